"""`tandem generate`, `chat` and `status`: a service seen from outside, over its own two doors."""

import json
import sys
import urllib.request
from typing import Annotated, Any, Final

import typer
from rich.console import Console
from rich.table import Table

from ..proto.errors import TandemError, Unavailable
from ..router.client import Client, Stream
from ..router.client_core import Options
from .timeline import timeline_table

DEFAULT_TARGET: Final = "127.0.0.1:50051"
TABLE_CHARACTERS: Final = 150  # where there is no terminal to fit into
DEFAULT_STATUS_URL: Final = "http://127.0.0.1:8000/tandem"
STATUS_SECONDS: Final = 10.0

Target = Annotated[str, typer.Option(help="HOST:PORT of the service's gRPC door.")]
MaxTokens = Annotated[int, typer.Option(help="Tokens to generate at most.")]
Temperature = Annotated[float, typer.Option(help="0 is greedy.")]
TopP = Annotated[float, typer.Option(help="Keep the likeliest tokens up to this probability.")]
Seed = Annotated[int | None, typer.Option(help="Same seed, same tokens.")]
ShowTimeline = Annotated[bool, typer.Option("--timeline", help="Tell on stderr where the time went.")]


def generate(
    prompt: Annotated[str, typer.Argument(help="Text to continue.")],
    target: Target = DEFAULT_TARGET,
    max_tokens: MaxTokens = 128,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    seed: Seed = None,
    stop: Annotated[list[str] | None, typer.Option(help="End before this text; may be given several times.")] = None,
    timeline: ShowTimeline = False,
) -> None:
    """Continue a text; the continuation streams to stdout."""
    options = _options(max_tokens, temperature, top_p, seed)
    if stop:
        options["stop"] = stop
    with Client(target) as client, client.stream(prompt, **options) as stream:
        _print_stream(stream)
        if timeline:
            _print_timeline(stream)


def chat(
    target: Target = DEFAULT_TARGET,
    system: Annotated[str, typer.Option(help="A system message to begin with.")] = "",
    max_tokens: MaxTokens = 512,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    seed: Seed = None,
    timeline: ShowTimeline = False,
) -> None:
    """Talk with the model; the history goes along. Ctrl-D or an empty line ends it, Ctrl-C cuts an answer short."""
    messages = [{"role": "system", "content": system}] if system else []
    options = _options(max_tokens, temperature, top_p, seed)
    with Client(target) as client:
        while question := _ask():
            messages.append({"role": "user", "content": question})
            with client.stream_chat(messages, **options) as stream:
                try:
                    answer = _print_stream(stream)
                except KeyboardInterrupt:
                    typer.echo()
                    messages.pop()
                    continue
                if timeline:
                    _print_timeline(stream)
            messages.append({"role": "assistant", "content": answer})


def status(
    url: Annotated[str, typer.Option(help="The status page, as `tandem serve` names it.")] = DEFAULT_STATUS_URL,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show a running service: its pools and workers, their blocks and load, and the ways of KV cache between them."""
    service = _fetch(url)
    if as_json:
        typer.echo(json.dumps(service, indent=2))
        return
    console = Console(soft_wrap=True, highlight=False)
    console.print(f"{service['service']}: {service['model']}  grpc={service['grpc']} http={service['http']}")
    console.print(_worker_table(service["workers"]))
    if any(worker["peers"] for worker in service["workers"]):
        console.print(_peer_table(service["workers"]))


def _options(max_tokens: int, temperature: float, top_p: float, seed: int | None) -> Options:
    options = Options(max_tokens=max_tokens, temperature=temperature, top_p=top_p)
    if seed is not None:
        options["seed"] = seed
    return options


def _ask() -> str:
    """The next question; empty at the end. Only a terminal is prompted."""
    if sys.stdin.isatty():
        sys.stderr.write("> ")
        sys.stderr.flush()
    return sys.stdin.readline().strip()


def _print_stream(stream: Stream) -> str:
    """Prints the pieces as they come; returns the whole text. Raises a TandemError, below what has been printed."""
    pieces: list[str] = []
    try:
        for delta in stream:
            pieces.append(delta.text)
            typer.echo(delta.text, nl=False)
    except TandemError:
        if pieces:
            typer.echo()
        raise
    typer.echo()
    return "".join(pieces)


def _print_timeline(stream: Stream) -> None:
    if stream.timeline is not None:
        Console(stderr=True, width=None if sys.stderr.isatty() else TABLE_CHARACTERS).print(
            timeline_table([("request", stream.timeline)])
        )


def _fetch(url: str) -> Any:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=STATUS_SECONDS) as answer:
            return json.load(answer)
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", None) or error
        raise Unavailable(f"no service answers at {url}: {reason}") from None


def _worker_table(workers: list[dict[str, Any]]) -> Table:
    numbers = ("running", "waiting", "total", "free", "cached", "owned", "leased", "reserved", "leases", "transfers")
    table = Table("pool", "worker", "state", box=None, header_style="bold", pad_edge=False)
    for name in numbers:
        table.add_column(name, justify="right")
    for worker in workers:
        load = worker["load"]
        counts = [load["num_running"], load["num_waiting"]]
        counts += [load[f"{state}_blocks"] for state in numbers[2:8]]
        counts += [worker["leases"], worker["transfers"]]
        table.add_row(worker["role"], worker["id"], worker["state"], *map(str, counts))
    return table


def _peer_table(workers: list[dict[str, Any]]) -> Table:
    """From whom a worker has pulled KV cache, and how fast that was found to go when they connected."""
    table = Table("worker", "pulls from", "transport", box=None, header_style="bold", pad_edge=False)
    table.add_column("GB/s", justify="right")
    for worker in workers:
        for peer in worker["peers"]:
            table.add_row(worker["id"], peer["endpoint"], peer["transport"], f"{peer['gb_per_second']:.2f}")
    return table
