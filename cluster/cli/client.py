"""`tandem generate`, `status`, `dashboard`: a completion, the state, the pages of a service."""

import json
import socket
import sys
import urllib.error
import urllib.request
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Final
from urllib.parse import urlsplit

import typer
from rich.table import Table

from ...proto.addresses import in_brackets, is_loopback
from ...proto.errors import InvalidArgument
from ...router.client.client import Client
from ..service_url import GRPC_URL, STATUS_URL, ServiceAccess
from ..tables import make_table, table_console
from ..text_files import read_stdin, read_text
from . import options as o
from .answers import completion_json, print_choices, print_logprobs, print_stream, print_timeline

_GRAFANA_PATH: Final = "/api/grafana_health"
_PAGE_SECONDS: Final = 3.0
_HIDDEN: Final = "-"


@o.request_options(max_tokens=128)
@o.service_options(GRPC_URL)
def generate(
    context: typer.Context,
    service: ServiceAccess,
    prompt: Annotated[
        str | None,
        typer.Argument(
            help="The text to continue; by default, or with -, read from stdin.", show_default=False
        ),
    ] = None,
    file: Annotated[Path | None, typer.Option(help="Continue the text of this file.")] = None,
    timeout: o.Timeout = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object instead of the text.")
    ] = False,
    timeline: o.ShowTimeline = False,
) -> None:
    """Continue a text, greedily unless a temperature or several completions are requested.

    The continuation streams to stdout; several completions are printed one below the other, when
    all are complete. Tables of log probabilities and times go to stderr.
    """
    options = o.given_options(context.params)
    if not options.keys() & {"n", "best_of", "beam_width"}:
        options.setdefault("temperature", 0.0)
    text = _prompt(prompt, file)
    with (
        service.connect(Client) as client,
        client.stream(text, timeout=timeout, **options) as stream,
    ):
        if as_json:
            typer.echo(json.dumps(completion_json(stream.completion()), ensure_ascii=False))
        elif options.get("n", 1) > 1:
            print_choices(stream.completion(), scored="beam_width" in options)
        else:
            print_stream(stream)
        if not as_json:
            print_logprobs(stream.completion())
        if timeline:
            print_timeline(stream.timeline)


@o.service_options(STATUS_URL)
def status(
    service: ServiceAccess,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show a running service: routers, workers with their blocks and load, and transports."""
    _, found = service.status()
    if as_json:
        typer.echo(json.dumps(found, indent=2))
        return
    typer.echo(f"{found['service']}: {found['model']}")
    for router in found["routers"]:
        typer.echo(
            f"router {router['id']}  grpc={router['grpc']} http={router['http']} "
            f"ops={router['ops']}"
        )
    console = table_console()
    console.print(_worker_table(found["workers"]))
    if any(worker["transports"] for worker in found["workers"]):
        console.print(_transport_table(found["workers"]))


def _prompt(prompt: str | None, file: Path | None) -> str:
    """Returns the prompt: the argument, the text of a file or stdin. Raises InvalidArgument."""
    if file is not None:
        if prompt is not None:
            raise InvalidArgument("must not be given together with another prompt", "--file")
        return read_text(file, "--file")
    if prompt is None and sys.stdin.isatty():
        raise InvalidArgument("missing; give a text, --file FILE, or - to type one", "prompt")
    return read_stdin("prompt") if prompt is None or prompt == "-" else prompt


def _worker_table(workers: list[dict[str, Any]]) -> Table:
    numbers = (
        "running",
        "waiting",
        "total",
        "free",
        "cached",
        "owned",
        "leased",
        "reserved",
        "leases",
        "transfers",
    )
    has_states = any(worker.get("num_states") for worker in workers)
    columns = (*numbers, "states") if has_states else numbers
    table = make_table("pool", "worker", "state", numbers=columns, boxed=False)
    for worker in workers:
        load = worker.get("load", {})  # only an operator's key shows it
        counts = [load.get(f"num_{name}", _HIDDEN) for name in numbers[:2]]
        counts += [load.get(f"{state}_blocks", _HIDDEN) for state in numbers[2:8]]
        counts += [worker.get(f"num_{name}", _HIDDEN) for name in numbers[8:]]
        if has_states:
            counts.append(f"{load.get('held_states', _HIDDEN)}/{worker.get('num_states', 0)}")
        table.add_row(worker["role"], worker["id"], worker["state"], *map(str, counts))
    return table


def _transport_table(workers: list[dict[str, Any]]) -> Table:
    """Returns a table of the transports by which workers have pulled KV cache, for each rank."""
    table = make_table("worker", "pulls from", "transport", boxed=False)
    for worker in workers:
        for endpoint, transport in worker["transports"].items():
            table.add_row(worker["id"], endpoint, transport)
    return table


@o.service_options(STATUS_URL)
def dashboard(
    service: ServiceAccess,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show the addresses of a service's console, status page, Ray dashboard and Grafana.

    If they listen on loopback, the last line is a command that makes them reachable from another
    machine.
    """
    url, found = service.status()
    ray_dashboard = found["ray_dashboard"]
    if ray_dashboard and not _has_page(ray_dashboard):
        ray_dashboard = ""  # its API alone
    pages = {
        "consoles": [router["console"] for router in found["routers"]],
        "status_page": url or None,
        "ray_dashboard": ray_dashboard or None,
        "grafana": fetch_grafana(ray_dashboard) if ray_dashboard else None,
    }
    if as_json:
        typer.echo(json.dumps(pages, indent=2))
        return
    for line in _lines(pages):
        typer.echo(line)


def _lines(pages: dict[str, Any]) -> list[str]:
    rows = [("console", each) for each in pages["consoles"]]
    rows.append(
        ("status page", pages["status_page"] or "not known to the API; tandem serve prints it")
    )
    rows.append(
        (
            "Ray dashboard",
            pages["ray_dashboard"] or "not started; tandem serve --dashboard starts it",
        )
    )
    rows.append(
        (
            "Grafana",
            pages["grafana"]
            or "not known; set RAY_GRAFANA_HOST and start Ray's dashboard without a token",
        )
    )
    lines = [f"{name + ':':15}{where}" for name, where in rows]
    tunnel = ssh_command(where for _, where in rows if "://" in where)
    return [*lines, f"{'from elsewhere:':15}{tunnel}"] if tunnel else lines


def ssh_command(urls: Iterable[str]) -> str:
    """Returns the command that tunnels the URLs on loopback to another machine; may be empty."""
    places = [urlsplit(url) for url in urls]
    local = sorted(
        {
            (place.port, place.hostname)
            for place in places
            if place.port and is_loopback(place.hostname or "")
        }
    )
    tunnels = "".join(f" -L {port}:{in_brackets(host or '')}:{port}" for port, host in local)
    return f"ssh{tunnels} {socket.gethostname()}" if tunnels else ""


def _has_page(url: str) -> bool:
    """Returns True if the URL can be read without a token."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=_PAGE_SECONDS):
            return True
    except (OSError, ValueError):
        return False


def fetch_grafana(ray_dashboard: str) -> str | None:
    """Returns the address of the Grafana that Ray's dashboard shows.

    None if no Grafana answers the dashboard, or the dashboard demands a token.
    """
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(ray_dashboard + _GRAFANA_PATH, timeout=_PAGE_SECONDS) as answer:
            found = json.load(answer)["data"]["grafanaHost"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return None if found in ("", "DISABLED") else str(found)
