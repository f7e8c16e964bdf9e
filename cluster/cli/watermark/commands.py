"""`tandem watermark key` and `tandem watermark detect`."""

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from ....proto.errors import InvalidArgument
from ....router.client.client import Client
from ....router.watermark.key import write_watermark_key
from ...service_url import GRPC_URL, ServiceAccess
from ...text_files import read_stdin, read_text
from .. import options as o

watermark_app = typer.Typer(
    help="Make the key of watermarks; test a text for the watermark.", no_args_is_help=True
)


@watermark_app.command("key")
def key(
    file: Annotated[
        Path, typer.Argument(help="The new file, for `watermark.key_file` of a configuration.")
    ],
) -> None:
    """Write a new random key to FILE, which must not exist.

    Keep the file secret: who has the key can find and forge the watermark. Keep it as long as texts
    should be recognised.
    """
    write_watermark_key(file)


@watermark_app.command("detect")
@o.service_options(GRPC_URL)
def detect(
    service: ServiceAccess,
    file: Annotated[
        Path | None,
        typer.Argument(
            help="The file of the text; by default, or with -, read from stdin.", show_default=False
        ),
    ] = None,
    model: Annotated[
        str,
        typer.Option(help="The model whose tokenizer is used; not needed if only one is served."),
    ] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Test whether a text was generated with the watermark of a running service.

    Prints z, the standard deviations by which the green tokens exceed their number in other texts;
    p, the probability of that in other texts; and the number of scored tokens. A pair of a context
    and the token after it is scored once.
    """
    text = _read(file)
    with service.connect(Client) as client:
        found = client.detect_watermark(text, model=model)
    if as_json:
        figures = {
            "z": found.z,
            "p": found.p,
            "num_tokens": found.num_tokens,
            "num_green": found.num_green,
        }
        typer.echo(json.dumps(figures))
        return
    typer.echo(f"z              {found.z:.2f}")
    typer.echo(f"p              {found.p:.3g}")
    typer.echo(f"scored tokens  {found.num_tokens}")
    typer.echo(f"green tokens   {found.num_green}")


def _read(file: Path | None) -> str:
    """Returns the text of a file or of stdin. Raises InvalidArgument."""
    if file is not None and str(file) != "-":
        return read_text(file, "file")
    if file is None and sys.stdin.isatty():
        raise InvalidArgument("missing; give a file, or - to type the text", "file")
    return read_stdin("file")
