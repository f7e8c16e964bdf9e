"""`tandem`: serve a model, talk to a service, look after models.

Commands that need Ray or torch hand over to `run_service` in a module of its own, so that `--help` and the clients
start at once. Every expected failure is one line on stderr and exit code 2 (bad input) or 1 (the rest).
"""

import sys
from pathlib import Path
from typing import Annotated

import typer

from ...proto.errors import InvalidArgument, NotFound, TandemError
from ...workers.model.config import CheckpointError
from ...workers.model.footprint import check_config_split
from ..config import ConfigError, PoolConfig, TandemConfig, load_config
from ..environment import prepare_ray_environment
from ..store.store import resolve_model
from .bench import bench
from .chat import chat
from .client import generate, status
from .eval import eval_app
from .model import model_app
from .plan import plan_app

app = typer.Typer(
    help="Serve large language models with prefill and decode apart.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    add_completion=False,
)
app.add_typer(model_app, name="model")
app.add_typer(plan_app, name="plan")
app.add_typer(eval_app, name="eval")
app.command()(generate)
app.command()(chat)
app.command()(status)
app.command()(bench)


def main() -> None:
    """The entry point of the `tandem` command."""
    try:
        app()
    except (ConfigError, CheckpointError, InvalidArgument, NotFound) as error:
        _fail(error, 2)
    except TandemError as error:
        _fail(error, 1)


@app.command()
def serve(
    model: Annotated[
        str | None, typer.Argument(help="A built-in model's name, a local folder or a Hugging Face hub id.")
    ] = None,
    config: Annotated[Path | None, typer.Option(help="A YAML file; flags win over it.")] = None,
    prefill: Annotated[int | None, typer.Option(help="Prefill workers; 0 lets decode workers prefill.")] = None,
    decode: Annotated[int | None, typer.Option(help="Decode workers.")] = None,
    tp: Annotated[int | None, typer.Option(help="Ranks that share the model, in the workers of both pools.")] = None,
    prefill_tp: Annotated[int | None, typer.Option(help="The same for prefill workers; wins over --tp.")] = None,
    decode_tp: Annotated[int | None, typer.Option(help="The same for decode workers; wins over --tp.")] = None,
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16 or float16.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda.")] = None,
    context_tokens: Annotated[int | None, typer.Option(help="The longest prompt plus completion.")] = None,
    served_model_name: Annotated[str | None, typer.Option(help="The name under which the model answers.")] = None,
    name: Annotated[str | None, typer.Option(help="The service's name; keeps two apart on one cluster.")] = None,
    host: Annotated[str | None, typer.Option(help="The interface that all servers bind.")] = None,
    grpc_port: Annotated[int | None, typer.Option(help="0 takes a free one.")] = None,
    http_port: Annotated[int | None, typer.Option(help="0 takes a free one.")] = None,
    reflection: Annotated[bool | None, typer.Option(help="Answer gRPC reflection.")] = None,
    dashboard: Annotated[bool | None, typer.Option(help="Start Ray's dashboard with a local Ray.")] = None,
    address: Annotated[str | None, typer.Option(help="A Ray cluster to join, else RAY_ADDRESS.")] = None,
) -> None:
    """Serve MODEL until Ctrl-C or SIGTERM; both stop everything within 10 s and end with exit code 0.

    Prints one line on stdout when the service can answer: tandem ready grpc=HOST:PORT http=HOST:PORT
    """
    overrides = {
        "model": model,
        "prefill.replicas": prefill,
        "decode.replicas": decode,
        "prefill.tp": tp if prefill_tp is None else prefill_tp,
        "decode.tp": tp if decode_tp is None else decode_tp,
        "dtype": dtype,
        "device": device,
        "context_tokens": context_tokens,
        "served_model_name": served_model_name,
        "name": name,
        "host": host,
        "router.grpc_port": grpc_port,
        "router.http_port": http_port,
        "router.reflection": reflection,
        "dashboard": dashboard,
    }
    checked = load_config(config, overrides)
    _run(checked, checked_folder(checked), address)


@app.command()
def check_config(file: Annotated[Path, typer.Argument(help="A YAML file for `tandem serve --config`.")]) -> None:
    """Check a configuration file without starting anything."""
    load_config(file)
    typer.echo(f"{file}: ok")


def checked_folder(config: TandemConfig) -> Path:
    """The model's folder, fetched if it has to be, after the check that it can be served, and split as configured.

    Raises CheckpointError, or ConfigError for a `tp` that does not divide the model's heads."""
    folder = resolve_model(config.model, progress=True)
    from ...workers.model.loader import check_checkpoint  # with torch, which takes a second

    model = check_checkpoint(folder)
    wrong = []
    for role in ("prefill", "decode"):
        pool: PoolConfig = getattr(config, role)
        try:
            check_config_split(model, pool.tp)
        except ValueError as error:
            wrong.append(f"{role}.{error}")
    if wrong:
        raise ConfigError("\n".join(wrong))
    return folder.resolve()


def _run(config: TandemConfig, folder: Path, address: str | None) -> None:
    address = prepare_ray_environment(address)
    from .foreground import serve_in_foreground  # imports Ray, which reads the environment and takes a second

    serve_in_foreground(config, folder, address)


def _fail(error: Exception, code: int) -> None:
    print(f"error: {error}", file=sys.stderr)
    sys.exit(code)
