"""`tandem model get` and `tandem model list`: fetches and lists built-in models."""

from typing import Annotated

import typer
from rich.console import Console
from rich.filesize import decimal
from rich.table import Column

from ..store.store import get_model, list_models
from ..tables import make_table

model_app = typer.Typer(help="Fetch and list the built-in models.", no_args_is_help=True)


@model_app.command("get")
def get_command(name: Annotated[str, typer.Argument(help="A name that `tandem model list` shows.")]) -> None:
    """Fetch a built-in model unless it is here already, and print its folder."""
    typer.echo(get_model(name, progress=True))


@model_app.command("list")
def list_command() -> None:
    """List the built-in models with their folders, as far as they have been fetched."""
    table = make_table("NAME", "SIZE", Column("FOLDER", overflow="fold"), boxed=False)
    for folder, num_bytes in list_models().items():
        cells = ("-", "not fetched") if num_bytes is None else (decimal(num_bytes), str(folder))
        table.add_row(folder.name, *cells)
    console = Console()
    if not console.is_terminal:
        console.width = 4096  # do not wrap lines in a pipe
    console.print(table)
