"""`tandem model` and `tandem quantize`: fetches, lists and quantizes models."""

import ast
import os
import shutil
from pathlib import Path
from typing import Annotated, Final

import typer
from rich.filesize import decimal
from rich.table import Column

from ...proto.errors import InvalidArgument, Unavailable
from ..stop_signals import unwound_by_signals
from ..store.store import get_model, list_models, resolve_model
from ..tables import make_table, progress_bar, table_console
from ..text_files import read_text
from .options import check_choice

SCHEMES: Final = ("int8", "int4")
METHODS: Final = ("rtn", "gptq", "awq")
_GROUP_SIZE: Final = 64  # of int4
_WINDOW: Final = 2_048  # tokens
_CHARACTERS: Final = 100_000  # of the default text for perplexity
_CALIBRATION_CHARACTERS: Final = 200_000  # of the default text for calibration
_DOCSTRING_CHARACTERS: Final = 500  # the minimum of a docstring in it: short ones repeat each other

model_app = typer.Typer(help="Fetch and list the built-in models.", no_args_is_help=True)


@model_app.command("get")
def get_command(
    name: Annotated[str, typer.Argument(help="A name that `tandem model list` shows.")],
) -> None:
    """Fetch a built-in model if it is missing, and print its folder."""
    typer.echo(get_model(name))


@model_app.command("list")
def list_command() -> None:
    """List the built-in models, with the folders of those that have been fetched."""
    table = make_table("NAME", "SIZE", Column("FOLDER", overflow="fold"), boxed=False)
    for folder, num_bytes in list_models().items():
        cells = ("-", "not fetched") if num_bytes is None else (decimal(num_bytes), str(folder))
        table.add_row(folder.name, *cells)
    table_console().print(table)


def quantize(
    model: Annotated[
        str, typer.Argument(help="A model without quantized weights, named as for `tandem serve`.")
    ],
    out: Annotated[Path, typer.Argument(help="The folder to write, which must not exist.")],
    scheme: Annotated[str, typer.Option(help="int8 or int4.")] = "int4",
    group_size: Annotated[
        int | None,
        typer.Option(
            min=8,
            help="The number of inputs that share a scale, a multiple of 8; by default 64 with "
            "int4, all inputs with int8.",
        ),
    ] = None,
    method: Annotated[
        str,
        typer.Option(
            help="rtn (round to nearest), or gptq or awq, which use --calibration and are slower."
        ),
    ] = "rtn",
    calibration: Annotated[
        Path | None,
        typer.Option(
            help="A file with text like later prompts, for gptq and awq; by default docstrings of "
            "Python."
        ),
    ] = None,
    text: Annotated[
        Path | None,
        typer.Option(
            help="A file with text on which perplexity is measured; by default Python's reference."
        ),
    ] = None,
) -> None:
    """Quantize the linear weights of MODEL and print the perplexity of a text before and after.

    Writes OUT in the format of compressed-tensors. Embeddings, norms and the head are not changed.
    The texts for calibration and for perplexity should be different ones.
    """
    check_choice("--scheme", scheme, SCHEMES)
    check_choice("--method", method, METHODS)
    if method == "rtn" and calibration is not None:
        raise InvalidArgument("needs --method gptq or awq", "--calibration")
    if group_size is not None and group_size % 8:
        raise InvalidArgument(f"must be a multiple of 8, got {group_size}", "--group-size")
    _check_new_folder(out)
    seen = None
    if method != "rtn":
        seen = (
            _python_docstrings() if calibration is None else read_text(calibration, "--calibration")
        )
    measured = _python_reference() if text is None else read_text(text, "--text")
    folder = resolve_model(model)
    # With torch, which takes a second.
    from ..store.quantize import BITS, QuantizationScheme, check_roundable, quantize_model

    if group_size is None and scheme == "int4":
        group_size = _GROUP_SIZE
    made = QuantizationScheme(bits=BITS[scheme], group_size=group_size)
    # First: what cannot succeed is refused before hours of work.
    _check_room(out, check_roundable(folder, made, seen).num_bytes)
    before = _perplexity(folder, measured)
    with unwound_by_signals(), progress_bar("layers") as update:
        quantize_model(
            folder,
            out,
            made,
            seen,
            lambda done, total: update(completed=done, total=total),
            method="awq" if method == "awq" else "gptq",
        )
    after = _perplexity(out, measured)
    change = 100 * (after / before - 1)
    typer.echo(
        f"{out}: {scheme}, {method}: perplexity {before:.3f} before, {after:.3f} after "
        f"({change:+.2f} %)"
    )


def _check_new_folder(out: Path) -> None:
    """Raises InvalidArgument if the folder exists or cannot be made."""
    if out.exists():
        raise InvalidArgument(f"{out} exists; give a folder that does not exist", "OUT")
    above = _folder_above(out)
    if not (above.is_dir() and os.access(above, os.W_OK | os.X_OK)):
        raise InvalidArgument(
            f"{out} cannot be made: {above} is not a folder that you may write into", "OUT"
        )


def _check_room(out: Path, num_bytes: int) -> None:
    """Raises Unavailable if the disk of a new folder has no room for this number of bytes."""
    above = _folder_above(out)
    if num_bytes > shutil.disk_usage(above).free:
        raise Unavailable(f"OUT: {above} has no room for {decimal(num_bytes)}; give another folder")


def _folder_above(out: Path) -> Path:
    """Returns the lowest folder above a new folder that exists."""
    return next(folder for folder in out.absolute().parents if folder.exists())


def _perplexity(folder: Path, text: str) -> float:
    from ...workers.model.generic.context import read_context_tokens
    from ..local.llm import LLM

    with LLM(
        str(folder), max_model_len=min(read_context_tokens(folder), _WINDOW), max_num_seqs=4
    ) as llm:
        return llm.perplexity(text)[0]


def _python_docstrings() -> str:
    """Returns another text that comes with Python: the docstrings of its modules."""
    library = Path(os.__file__).parent
    files = sorted([*library.glob("*.py"), *library.glob("*/*.py")])
    files = [
        file
        for file in files
        if file.parent.name not in ("site-packages", "dist-packages", "test", "pydoc_data")
    ]
    found = (ast.get_docstring(ast.parse(file.read_bytes())) for file in files)
    return "\n\n".join(text for text in found if text and len(text) >= _DOCSTRING_CHARACTERS)[
        :_CALIBRATION_CHARACTERS
    ]


def _python_reference() -> str:
    """Returns a text that comes with Python."""
    from pydoc_data.topics import topics

    return "\n".join(topics.values())[:_CHARACTERS]
