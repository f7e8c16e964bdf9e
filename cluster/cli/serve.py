"""`tandem serve` and `tandem check-config`: a service that lives as long as the command, and its
configuration.
"""

import os
import signal
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, Final, TextIO

import typer
from rich.console import Console

from ...router.auth.keys import load_keys
from ..config import NULL, TandemConfig, load_config
from ..serve.environment import prepare_ray_environment
from ..store.checked import checked_folder, with_draft_folder
from ..store.generation_defaults import FILE, describe_defaults, generation_defaults

_KEYS: Final = {
    **{"prefill": "prefill.replicas", "decode": "decode.replicas", "routers": "router.replicas"},
    **{"prefill_tp": "prefill.tp", "decode_tp": "decode.tp"},
    **{
        "grpc_port": "router.grpc_port",
        "http_port": "router.http_port",
        "ops_port": "router.ops_port",
    },
    "reflection": "router.reflection",
    **{"api_keys": "auth.keys_file", "allow_anonymous": "auth.allow_anonymous"},
}
"""The keys of the configuration that are not called as their flags are."""


def serve(
    context: typer.Context,
    model: Annotated[
        str | None,
        typer.Argument(
            help="A built-in model's name, a local folder, a GGUF file or a Hugging Face hub id."
        ),
    ] = None,
    config: Annotated[Path | None, typer.Option(help="A YAML file; flags win over it.")] = None,
    prefill: Annotated[
        int | None, typer.Option(help="Prefill workers; 0 lets decode workers prefill.")
    ] = None,
    decode: Annotated[int | None, typer.Option(help="Decode workers.")] = None,
    routers: Annotated[
        int | None, typer.Option(help="Routers; by default 1 here, one a node on a cluster.")
    ] = None,
    tp: Annotated[
        int | None, typer.Option(help="Ranks that share the model, in the workers of both pools.")
    ] = None,
    prefill_tp: Annotated[
        int | None, typer.Option(help="The same for prefill workers; wins over --tp.")
    ] = None,
    decode_tp: Annotated[
        int | None, typer.Option(help="The same for decode workers; wins over --tp.")
    ] = None,
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16 or float16.")] = None,
    quantization: Annotated[
        str | None, typer.Option(help="Of the weights at loading: int8, int4 or fp8.")
    ] = None,
    kv_cache_dtype: Annotated[
        str | None, typer.Option(help="Of the KV cache: auto (--dtype), int8 or fp8.")
    ] = None,
    kv_host_gb: Annotated[
        float | None, typer.Option(help="GiB of host memory a rank, for what leaves it.")
    ] = None,
    kv_disk: Annotated[
        Path | None, typer.Option(help="A folder that keeps KV cache beyond a restart.")
    ] = None,
    kv_disk_gb: Annotated[
        float | None, typer.Option(help="GiB of its disk for each worker.")
    ] = None,
    speculative: Annotated[
        str | None, typer.Option(help="ngram or draft=MODEL: how tokens are guessed.")
    ] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda.")] = None,
    context_tokens: Annotated[
        int | None, typer.Option(help="The longest prompt plus completion.")
    ] = None,
    generation_config: Annotated[
        str | None, typer.Option(help="auto takes the model's own defaults, or none.")
    ] = None,
    served_model_name: Annotated[
        str | None, typer.Option(help="The name under which the model is served.")
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="The service's name; keeps two apart on one cluster.")
    ] = None,
    host: Annotated[str | None, typer.Option(help="The interface that all servers bind.")] = None,
    grpc_port: Annotated[int | None, typer.Option(help="0 takes a free one.")] = None,
    http_port: Annotated[int | None, typer.Option(help="0 takes a free one.")] = None,
    ops_port: Annotated[
        int | None, typer.Option(help="Of metrics and probes; 0 takes a free one.")
    ] = None,
    api_keys: Annotated[
        Path | None, typer.Option(help="The file of API keys, made by `tandem key create`.")
    ] = None,
    allow_anonymous: Annotated[
        bool | None,
        typer.Option(
            "--allow-anonymous", help="Serve without keys on any interface.", show_default=False
        ),
    ] = None,
    reflection: Annotated[bool | None, typer.Option(help="Serve gRPC reflection.")] = None,
    dashboard: Annotated[
        bool | None, typer.Option(help="Start Ray's dashboard with a local Ray.")
    ] = None,
    address: Annotated[
        str | None, typer.Option(help="A Ray cluster to join, else RAY_ADDRESS.")
    ] = None,
) -> None:
    """Serve MODEL until Ctrl-C or SIGTERM; both stop everything within 10 s and end with exit code
    0.

    On a cluster, a service of the same name, model and dtypes is replaced without an interruption.
    Prints one line on stdout when the service can answer: tandem ready grpc=HOST:PORT
    http=HOST:PORT ops=HOST:PORT With several routers, the addresses of each kind are separated by
    commas.
    """
    checked = load_config(config, _overrides(context.params))
    if checked.auth.keys_file is not None:
        load_keys(checked.auth.keys_file)  # raises what is wrong with it before anything starts
    if checked.router.tls is not None:
        checked.router.tls.files.load()
    address = prepare_ray_environment(
        address
    )  # raises what is wrong there before the model is fetched
    checked = with_draft_folder(checked)
    serve_in_foreground(checked, checked_folder(checked), address)


def _overrides(flags: Mapping[str, Any]) -> dict[str, object]:
    """Returns the keys of the configuration that the command's flags set; None leaves the file's
    value.
    """
    values = dict(flags)
    del values["config"], values["address"]
    tp = values.pop("tp")
    for pool in ("prefill", "decode"):
        values[f"{pool}_tp"] = tp if values[f"{pool}_tp"] is None else values[f"{pool}_tp"]
    values["kv_disk"] = None if values["kv_disk"] is None else str(values["kv_disk"])
    method, given, model = (values.pop("speculative") or "").partition("=")
    values["speculative.method"] = "draft_model" if method == "draft" else method or None
    values["speculative.model"] = (
        model if given else NULL if method else None
    )  # ngram has none, whatever the file says
    for name in ("kv_host_gb", "kv_disk", "kv_disk_gb"):
        values |= dict.fromkeys((f"prefill.{name}", f"decode.{name}"), values.pop(name))
    if values["api_keys"] is not None:
        values["api_keys"] = str(values["api_keys"])
    return {_KEYS.get(flag, flag): value for flag, value in values.items()}


def check_config(
    file: Annotated[Path, typer.Argument(help="A YAML file for `tandem serve --config`.")],
) -> None:
    """Check a configuration file without starting anything."""
    load_config(file)
    typer.echo(f"{file}: ok")


def serve_in_foreground(config: TandemConfig, folder: Path, address: str | None) -> None:
    """Starts the service, prints its addresses, and stops it at SIGINT or SIGTERM. Raises
    Unavailable.
    """
    address = prepare_ray_environment(address)
    from ..serve.launch import (
        start_service,  # imports Ray, which reads the environment and takes a second
    )

    console = Console(stderr=True)
    if defaults := describe_defaults(generation_defaults(config, folder)):
        console.print(f"defaults of requests, by the model's {FILE}: {defaults}", highlight=False)
    with _own_stdout() as stdout, stopped_by_signals() as stopped:
        spinner = console.status(f"Starting {config.num_workers} worker(s) for {config.model}")
        spinner.start()
        try:
            with start_service(config, str(folder), address=address) as service:
                spinner.stop()
                console.print(f"status page: {service.status_url}", highlight=False)
                console.print(f"console: {service.console_url}", highlight=False)
                if service.dashboard_url:
                    console.print(
                        f"Ray's dashboard: {service.dashboard_url}{_token_note()}", highlight=False
                    )
                typer.echo(f"tandem ready {service.addresses}", file=stdout)
                if not stopped.is_set():
                    service.wait()
                    console.print(
                        f"another command has replaced the service {config.name!r}; it goes on"
                    )
        finally:
            spinner.stop()


@contextmanager
def _own_stdout() -> Iterator[TextIO]:
    """Lends the block a stdout of its own; what else is written there, by Ray or a library, goes to
    stderr.
    """
    sys.stdout.flush()
    with os.fdopen(os.dup(1), "w") as stdout:
        os.dup2(2, 1)
        try:
            yield stdout
        finally:
            sys.stdout.flush()
            os.dup2(stdout.fileno(), 1)


def _token_note() -> str:
    """Says where the token is that the dashboard of a Ray of our own asks for."""
    path = (
        os.environ.get("RAY_AUTH_TOKEN_PATH")
        if os.environ.get("RAY_AUTH_MODE") == "token"
        else None
    )
    return f", which asks for the token in {path}" if path else ""


@contextmanager
def stopped_by_signals() -> Iterator[threading.Event]:
    """Leaves the block at the first SIGINT or SIGTERM and sets the event, in case a library catches
    the exception.

    Later signals are ignored: the stop has its own time limit, and an interrupt would leave half of
    it undone.
    """
    stopped = threading.Event()

    def interrupt(signum: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        stopped.set()
        raise KeyboardInterrupt

    signal.signal(signal.SIGINT, interrupt)
    signal.signal(signal.SIGTERM, interrupt)
    with suppress(KeyboardInterrupt):
        yield stopped
