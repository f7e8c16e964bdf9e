"""`tandem demo`: serves a small model on this machine, shows it at work, and stops it."""

import asyncio
import io
import sys
from collections.abc import Callable, Mapping
from contextlib import redirect_stdout
from functools import partial
from typing import TYPE_CHECKING, Annotated, Final

import typer

from ....proto.errors import InvalidArgument
from ...config import load_config
from ...serve.environment import prepare_ray_environment
from ...stop_signals import stopped_by_signals
from ...store.checked import check_folder
from ...store.store import resolve_model
from ...tables import table_console
from .kill import KillDemo
from .mixed_requests import mixed_requests
from .questions import ask_questions
from .screen import Screen

if TYPE_CHECKING:
    # Imports Ray, which reads the environment.
    from ...serve.launch import Service

MODEL: Final = "smollm2-135m-instruct"
_INTERRUPTED: Final = 130  # as shells report SIGINT

_SETTINGS: Final[dict[str, object]] = {
    "name": "demo",
    "router.grpc_port": 0,
    "router.http_port": 0,
}
# The decode worker would prefill prompts as short as these; the demo shows the transfer between
# the pools.
_ANSWER_SETTINGS: Final[dict[str, object]] = {"router.local_prefill_tokens": 0}
# One process of each kind is killed, and another one must be left.
_KILL_SETTINGS: Final[dict[str, object]] = {
    "router.replicas": 2,
    "prefill.replicas": 2,
    "decode.replicas": 2,
    "prefill.kv_cache_gb": 0.5,
    "decode.kv_cache_gb": 0.5,
}


def demo(
    kill: Annotated[
        bool,
        typer.Option(
            "--kill",
            help="Run 16 streams while a decode worker, a prefill worker, a router and the Serve "
            "controller are killed, and compare every token with an undisturbed run.",
        ),
    ] = False,
    model: Annotated[
        str, typer.Option(help="A built-in model's name, a local folder or a Hugging Face id.")
    ] = MODEL,
    tokens: Annotated[
        int, typer.Option(min=24, max=2_000, help="Tokens of each stream, with --kill.")
    ] = 200,
) -> None:
    """Serve a small model on this machine, show it at work, and stop it.

    Without --kill: four questions at once, and the time of each part of their answers. With --kill:
    the exit code is 1 if a stream was lost or a token differs.
    """
    show = partial(_show_kills, num_tokens=tokens) if kill else _show_answers
    problems: list[str] | None = None
    with stopped_by_signals():
        problems = _serve(model, _SETTINGS | (_KILL_SETTINGS if kill else _ANSWER_SETTINGS), show)
    if problems is None:
        raise typer.Exit(_INTERRUPTED)
    for problem in problems:
        print(f"error: {problem}", file=sys.stderr)
    if problems:
        raise typer.Exit(1)


def _serve(
    model: str,
    settings: Mapping[str, object],
    show: Callable[["Service", Screen], list[str]],
) -> list[str]:
    """Serves a model, and calls `show`; returns the lines that it returns, about faults.

    Raises InvalidArgument on a cluster, whose processes are not ours to kill.
    """
    if prepare_ray_environment(None) is not None:
        raise InvalidArgument("must be unset: the demo starts its own Ray", "RAY_ADDRESS")
    from ...serve.launch import start_service  # imports Ray, which reads the environment

    config = load_config(None, {"model": model, **settings})
    folder = resolve_model(model, dtype=config.dtype)
    console = table_console()
    console.file = sys.stdout
    screen = Screen(console)
    screen.event(
        f"starting {model}: {config.router.replicas or 1} router(s), {config.prefill.replicas} "
        f"prefill worker(s), {config.decode.replicas} decode worker(s)"
    )
    check = partial(check_folder, config, folder)
    # Ray prints a paragraph on sys.stdout for each process that is killed.
    with (
        redirect_stdout(io.StringIO()),
        start_service(config, str(folder.resolve()), check=check) as service,
    ):
        screen.event(f"ready: {service.addresses}")
        problems = show(service, screen)
        screen.event("stopping")
    return problems


def _show_answers(service: "Service", screen: Screen) -> list[str]:
    return ask_questions(service.grpc_address, screen.console)


def _show_kills(service: "Service", screen: Screen, num_tokens: int) -> list[str]:
    routers = list(zip(service.grpc_addresses, service.http_addresses, strict=True))
    report = asyncio.run(KillDemo(routers, mixed_requests(num_tokens), screen).run())
    for line in report.lines():
        screen.console.print(line)
    return [] if report.passed else ["streams were lost or altered, or KV blocks are still held"]
