"""`tandem`: serves a model, queries a service, manages models.

Commands that need Ray or torch import them when they run, so that `--help` and the clients start
quickly. An expected failure is a line on stderr, or a line for each wrong key of a configuration,
and exit code 2 (invalid input) or 1 (any other failure).
"""

import gc
import os
import sys
from importlib.metadata import version as version_of
from io import TextIOWrapper
from typing import Annotated, Final

import typer

from ...proto.errors import InvalidArgument, NotFound, TandemError
from ...workers.model.config import CheckpointError
from ..explain.command import explain_command
from .batch import batch
from .bench import DEFINITIONS, bench
from .chat import chat
from .client import dashboard, generate, status
from .demo.command import demo
from .eval import eval_app
from .key import key_app
from .model import model_app, quantize
from .plan import check, plan_app
from .serve import ServeCommand, check_config, serve
from .watermark.commands import watermark_app
from .workers import drain, reset_cache, role

_TRACEBACK_VARIABLE: Final = "TANDEM_TRACEBACK"
_MAX_TEXT: Final = 500

app = typer.Typer(
    help="Serve large language models with separate workers for prefill and decode.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    add_completion=False,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"tandem {version_of('tandem-llm')}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Show the version and exit."
        ),
    ] = False,
) -> None:
    """Reads the options before a command."""


app.add_typer(model_app, name="model")
app.add_typer(key_app, name="key")
app.add_typer(plan_app, name="plan")
app.add_typer(eval_app, name="eval")
app.add_typer(watermark_app, name="watermark")
for command in (
    generate,
    chat,
    batch,
    status,
    dashboard,
    demo,
    drain,
    role,
    reset_cache,
    check,
    check_config,
    quantize,
):
    app.command()(command)
app.command("explain")(explain_command)
app.command(epilog=DEFINITIONS)(bench)
app.command(cls=ServeCommand)(serve)


def main() -> None:
    """Runs the `tandem` command; its entry point."""
    # Imported modules are no garbage; collecting while they load takes 0.3 s of `tandem check`.
    gc.set_threshold(100_000)
    _open_standard_files()
    try:
        try:
            app()
        finally:
            sys.stdout.flush()
    except (InvalidArgument, CheckpointError, NotFound) as error:
        _fail(error, 2)
    except TandemError as error:
        _fail(error, 1)
    except BrokenPipeError:  # the reader of the output has ended
        _drop_output()
        sys.exit(1)
    except Exception as error:  # a defect, or a fault of the environment, such as a full disk
        if os.environ.get(_TRACEBACK_VARIABLE):
            raise
        _drop_output()
        _fail(_describe(error), 1)


def _fail(error: Exception | str, code: int) -> None:
    print(f"error: {error}", file=sys.stderr)
    sys.exit(code)


def _describe(error: Exception) -> str:
    """Returns an unexpected error as one line."""
    text = " ".join(str(error).split())
    if isinstance(error, OSError) and error.strerror:
        names = [str(name) for name in (error.filename, error.filename2) if name is not None]
        return ": ".join([*names, error.strerror])
    return f"{type(error).__name__}: {text[:_MAX_TEXT]} ({_TRACEBACK_VARIABLE}=1 shows where)"


def _open_standard_files() -> None:
    """Opens /dev/null for each of stdin, stdout and stderr that the caller has closed.

    Otherwise other files would get their numbers, and Python has None for them. Output that the
    encoding of a terminal lacks becomes question marks, instead of an error in the middle of an
    answer.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free number
    sys.stdin = sys.stdin or os.fdopen(0, encoding="utf-8")
    if isinstance(sys.stdin, TextIOWrapper):  # the locale C takes other bytes as surrogates
        sys.stdin.reconfigure(errors="strict")
    sys.stdout = sys.stdout or os.fdopen(1, "w", encoding="utf-8")
    sys.stderr = sys.stderr or os.fdopen(2, "w", encoding="utf-8")
    for output in (sys.stdout, sys.stderr):
        if isinstance(output, TextIOWrapper) and output.errors == "strict":
            output.reconfigure(errors="replace")


def _drop_output() -> None:
    """Sends the rest of stdout to /dev/null; otherwise Python would fail again at its end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
