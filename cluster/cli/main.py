"""`tandem`: serves a model, queries a service, manages models.

Commands that need Ray or torch import them when they run, so that `--help` and the clients start at once. Every
expected failure is one line on stderr and exit code 2 (bad input) or 1 (the rest).
"""

import gc
import sys
from importlib.metadata import version as version_of
from typing import Annotated

import typer

from ...proto.errors import InvalidArgument, NotFound, TandemError
from ...workers.model.config import CheckpointError
from .batch import batch
from .bench import DEFINITIONS, bench
from .chat import chat
from .client import dashboard, generate, status
from .drain import drain
from .eval import eval_app
from .key import key_app
from .model import model_app, quantize
from .plan import check, plan_app
from .serve import check_config, serve

app = typer.Typer(
    help="Serve large language models with prefill and decode apart.",
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
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Takes the options before a command."""


app.add_typer(model_app, name="model")
app.add_typer(key_app, name="key")
app.add_typer(plan_app, name="plan")
app.add_typer(eval_app, name="eval")
for command in (generate, chat, batch, status, dashboard, drain, serve, check, check_config, quantize):
    app.command()(command)
app.command(epilog=DEFINITIONS)(bench)


def main() -> None:
    """Runs the `tandem` command; its entry point."""
    gc.set_threshold(100_000)  # what a command imports is no garbage: looking through it takes 0.3 s of `check`
    try:
        app()
    except (InvalidArgument, CheckpointError, NotFound) as error:
        _fail(error, 2)
    except TandemError as error:
        _fail(error, 1)


def _fail(error: Exception, code: int) -> None:
    print(f"error: {error}", file=sys.stderr)
    sys.exit(code)
