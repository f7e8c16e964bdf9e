"""`tandem serve` and `tandem check-config`: runs a service, and checks its configuration."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, TextIO

import typer
from rich.console import Console
from rich.text import Text
from typer.core import TyperCommand

from ...proto.errors import InvalidArgument
from ...router.auth.keys import load_keys
from ...router.client.wire import API_KEY_VARIABLE
from ...router.watermark.key import read_watermark_key
from ..config import TandemConfig, check_interface, load_config
from ..given_keys import API_KEY_FLAG, hash_given_keys, hide_given_keys
from ..serve.environment import prepare_ray_environment
from ..serve.ports import local_host
from ..serve.telemetry.otlp import check_otlp
from ..settings import check_supported, collect_overrides, has_no_effect
from ..stop_signals import stopped_by_signals
from ..store.checked import check_folder, with_draft_folder
from ..store.generation_defaults import FILE, describe_defaults, generation_defaults
from ..store.store import resolve_model
from ..tables import table_console
from . import options as o

if TYPE_CHECKING:
    # Imports Ray, which reads the environment and takes a second.
    from ..serve.launch import Service

_KEY_WARNING: Final = (
    f"warning: {API_KEY_FLAG}: other users may have read the key in the arguments of this command; "
    "--api-keys FILE keeps keys out of them"
)


class ServeCommand(TyperCommand):
    """Refuses vLLM's flags that `tandem serve` does not have, with the reason.

    Drops those that change nothing.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Raises InvalidArgument that names the flag."""
        kept = []
        left = list(args)
        while left:
            arg = left.pop(0)
            flag, joins, value = arg.partition("=")
            if arg.startswith("-O"):  # vLLM joins: -O3
                flag = "-O"
            if flag.startswith("-"):
                name = flag.lstrip("-").replace("-", "_")
                if not joins:
                    if has_no_effect(name.removeprefix("no_"), True, flag):
                        continue
                    value = left[0] if left else ""
                if has_no_effect(name, value, f"{flag} {value}"):
                    if not joins:
                        left.pop(0)
                    continue
                check_supported(name, flag)
            kept.append(arg)
        return super().parse_args(ctx, kept)


@o.setting_options
def serve(
    context: typer.Context,
    model: Annotated[
        str | None,
        typer.Argument(
            help="A built-in model's name, a local folder, a GGUF file or a Hugging Face hub id."
        ),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(help="A YAML file; flags win over it. It may have vLLM's names of flags."),
    ] = None,
    address: Annotated[
        str | None, typer.Option(help="A Ray cluster to join; otherwise RAY_ADDRESS.")
    ] = None,
) -> None:
    """Serve MODEL until Ctrl-C, SIGTERM or SIGHUP; then streams get grace_seconds to end.

    The exit code is then 0. On a cluster, a service of the same name, model and dtypes is replaced
    without an interruption. When the service can answer, one line is printed on stdout: tandem
    ready grpc=HOST:PORT http=HOST:PORT ops=HOST:PORT. With several routers, commas separate the
    addresses of each kind.
    """
    given_keys = context.params["api_key"]
    if given_keys:
        hide_given_keys()
    loaded = load_config(config, {"model": model, **collect_overrides(context.params)})
    checked = _with_key_of_environment(loaded)
    if checked.auth.keys_file is not None:
        load_keys(checked.auth.keys_file)  # fails here, before anything starts
    if checked.watermark.key_file is not None:
        read_watermark_key(checked.watermark.key_file)
    if checked.router.tls is not None:
        checked.router.tls.load()
    # These fail before the model is fetched.
    checked.check_sizes_are_fixed()
    check_otlp(checked.tracing.endpoint)
    address = prepare_ray_environment(address)
    if address is None:
        local_host(checked)
    checked = with_draft_folder(checked)
    if given_keys:
        print(_KEY_WARNING, file=sys.stderr)
    if checked.auth != loaded.auth:
        print(f"calls need the key in {API_KEY_VARIABLE}", file=sys.stderr)
    serve_in_foreground(checked, resolve_model(checked.model, dtype=checked.dtype), address)


def check_config(
    file: Annotated[Path, typer.Argument(help="A YAML file for `tandem serve --config`.")],
) -> None:
    """Check a configuration file without starting anything.

    It does not read key files or the model, and does not try ports.
    """
    config = _with_key_of_environment(load_config(file))
    check_interface(config.auth, config.router.bind or config.host or "127.0.0.1")
    typer.echo(f"{file}: ok")
    try:
        config.check_sizes_are_fixed()
    except InvalidArgument as error:
        print(f"note: {error}", file=sys.stderr)


def serve_in_foreground(config: TandemConfig, folder: Path, address: str | None) -> None:
    """Starts the service, prints its addresses, and stops it at SIGINT, SIGTERM or SIGHUP.

    Raises Unavailable, and the errors of `check_folder`, which runs meanwhile.
    """
    address = prepare_ray_environment(address)
    # Imports Ray, which reads the environment and takes a second.
    from ..serve.launch import start_service

    console = table_console(stderr=True)
    if defaults := describe_defaults(generation_defaults(config, folder)):
        source = "" if config.sampling_defaults else f", from the model's {FILE}"
        console.print(f"defaults of requests{source}: {defaults}")
    with _own_stdout() as stdout, stopped_by_signals() as stopped:

        def check() -> None:
            check_folder(config, folder)
            if stopped.is_set():  # an import has caught the interrupt
                raise KeyboardInterrupt

        # Text, because a spinner would read a str as markup.
        spinner = console.status(
            Text(f"Starting {config.num_workers} worker(s) for {config.model}")
        )
        spinner.start()
        try:
            with start_service(
                config,
                str(folder.resolve()),
                address=address,
                check=check,
            ) as service:
                spinner.stop()
                print_pages(console, service)
                typer.echo(f"tandem ready {service.addresses}", file=stdout)
                if not stopped.is_set():
                    service.wait()
                    console.print(
                        f"another command has replaced the service {config.name!r}, which runs on"
                    )
        finally:
            spinner.stop()


def print_pages(console: Console, service: "Service") -> None:
    """Prints the addresses of the pages of a service."""
    console.print(f"status page: {service.status_url}")
    console.print(f"console: {service.console_url}")
    if service.dashboard_url:
        console.print(f"Ray's dashboard: {service.dashboard_url}{_token_note()}")


def _with_key_of_environment(config: TandemConfig) -> TandemConfig:
    """Adds the key in TANDEM_API_KEY, unless the configuration has keys or allows calls without.

    Removes the variable, because Ray's processes inherit the environment. Raises InvalidArgument.
    """
    key = os.environ.pop(API_KEY_VARIABLE, "").strip()
    if not key or config.auth.needs_key or config.auth.allow_anonymous:
        return config
    hashes = hash_given_keys(key, API_KEY_VARIABLE)
    auth = config.auth.model_copy(update={"key_hashes": hashes})
    return config.model_copy(update={"auth": auth})


@contextmanager
def _own_stdout() -> Iterator[TextIO]:
    """Gives the block the only access to stdout; output of Ray and libraries goes to stderr."""
    sys.stdout.flush()
    with os.fdopen(os.dup(1), "w") as stdout:
        os.dup2(2, 1)
        try:
            yield stdout
        finally:
            sys.stdout.flush()
            os.dup2(stdout.fileno(), 1)


def _token_note() -> str:
    """Returns a note with the file of the token for the dashboard of a local Ray."""
    path = os.environ.get("RAY_AUTH_TOKEN_PATH")
    if path and os.environ.get("RAY_AUTH_MODE") == "token":
        return f", which asks for the token in {path}"
    return ""
