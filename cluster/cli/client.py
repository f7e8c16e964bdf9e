"""`tandem generate`, `tandem status` and `tandem dashboard`: requests a completion of a service,
shows its state, and where its pages are.
"""

import json
import socket
import sys
import urllib.error
import urllib.request
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Final
from urllib.parse import urlsplit

import typer
from rich.console import Console
from rich.table import Table

from ...proto.addresses import in_brackets, is_loopback
from ...proto.errors import InvalidArgument, NotFound, Unauthenticated, Unavailable
from ...router.client.client import Client
from ..serve.status import in_order, service_of
from ..tables import make_table
from ..text_files import read_text
from . import options as o
from .answers import completion_json, print_choices, print_logprobs, print_stream, print_timeline

DEFAULT_STATUS_URL: Final = "http://127.0.0.1:8000/tandem"
STATUS_SECONDS: Final = 10.0
_GRAFANA_PATH: Final = "/api/grafana_health"
_PAGE_SECONDS: Final = 3.0
_HIDDEN: Final = "-"


@o.request_options(max_tokens=128)
def generate(
    context: typer.Context,
    prompt: Annotated[
        str | None, typer.Argument(help="Text to continue; - or none: stdin.", show_default=False)
    ] = None,
    file: Annotated[Path | None, typer.Option(help="Continue the text of this file.")] = None,
    target: o.Target = o.DEFAULT_TARGET,
    api_key_file: o.ApiKeyFile = None,
    tls_ca: o.TlsCa = None,
    tls_certificate: o.TlsCertificate = None,
    tls_key: o.TlsKey = None,
    timeout: o.Timeout = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object instead of the text.")
    ] = False,
    timeline: o.ShowTimeline = False,
) -> None:
    """Continue a text, greedily unless a temperature or several completions are asked for.

    The continuation streams to stdout; several completions are printed one below the other, when
    all are complete. Tables of log probabilities and times go to stderr.
    """
    options = o.given_options(context.params)
    if not options.keys() & {"n", "best_of", "beam_width"}:
        options.setdefault("temperature", 0.0)
    text = _prompt(prompt, file)
    with (
        o.connect(Client, target, api_key_file, tls_ca, tls_certificate, tls_key) as client,
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


def status(
    url: Annotated[
        str, typer.Option(help="The status page, as `tandem serve` names it.")
    ] = DEFAULT_STATUS_URL,
    api_key_file: o.ApiKeyFile = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show a running service: routers, pools, workers, their blocks and load, the transports
    between them.
    """
    _, service = fetch_status(url, o.read_api_key(api_key_file))
    if as_json:
        typer.echo(json.dumps(service, indent=2))
        return
    console = Console(soft_wrap=True, highlight=False)
    console.print(f"{service['service']}: {service['model']}")
    for router in service["routers"]:
        console.print(
            f"router {router['id']}  grpc={router['grpc']} http={router['http']} "
            f"ops={router['ops']}"
        )
    console.print(_worker_table(service["workers"]))
    if any(worker["transports"] for worker in service["workers"]):
        console.print(_transport_table(service["workers"]))


def _prompt(prompt: str | None, file: Path | None) -> str:
    """Returns the prompt: the argument, the text of a file or stdin. Raises InvalidArgument."""
    if file is not None:
        if prompt is not None:
            raise InvalidArgument("must not be given together with another prompt", "file")
        return read_text(file, "file")
    if prompt is None and sys.stdin.isatty():
        raise InvalidArgument("missing; give a text, --file, or - to type one", "prompt")
    return sys.stdin.read() if prompt in (None, "-") else prompt


def fetch_status(url: str, api_key: str = "") -> tuple[str, Any]:
    """Returns the URL of the status page and what it says. A service that has been replaced has
    another page than
    before: that one, then. Raises InvalidArgument, Unauthenticated or Unavailable.
    """
    _check_url(url)
    with suppress(NotFound):
        return url, _fetch_json(url, api_key)
    for successor in _pages_beside(url):
        with suppress(NotFound):
            return successor, _fetch_json(successor, api_key)
    raise Unavailable(f"no service answers at {url}: Not Found")


def _check_url(url: str) -> None:
    """Raises InvalidArgument for what is no URL of a status page."""
    with suppress(ValueError):  # of brackets and ports
        parts = urlsplit(url)
        if parts.scheme in ("http", "https") and parts.hostname and parts.port != 0:
            return
    raise InvalidArgument(
        f"must be http://HOST:PORT/NAME, as `tandem serve` prints it, got {url!r}", "--url"
    )


def _pages_beside(url: str) -> list[str]:
    """Returns the status pages of all deployments of the service whose page was this, the oldest
    first: it serves while a younger one starts.
    """
    root, _, application = url.rstrip("/").rpartition("/")
    try:
        routes = list(_fetch_json(f"{root}/-/routes"))
    except (NotFound, TypeError):
        return []
    service = service_of(application)
    return [
        f"{root}/{name}"
        for name in in_order(service, (str(route).removeprefix("/") for route in routes))
    ]


def _fetch_json(url: str, api_key: str = "") -> Any:
    """Returns what a URL answers. Raises NotFound, Unauthenticated or Unavailable."""
    request = urllib.request.Request(
        url, headers={"Authorization": f"Bearer {api_key}"} if api_key else {}
    )
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=STATUS_SECONDS) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        if error.code == Unauthenticated.http_status:
            raise Unauthenticated(
                "the status page needs an API key: TANDEM_API_KEY or --api-key-file"
            ) from None
        if error.code == NotFound.http_status:
            raise NotFound(f"nothing is at {url}") from None
        raise Unavailable(f"no service answers at {url}: {error.reason}") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", None) or error
        raise Unavailable(f"no service answers at {url}: {reason}") from None


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
    table = make_table("pool", "worker", "state", numbers=numbers, boxed=False)
    for worker in workers:
        load = worker.get("load", {})  # which only an operator's key shows
        counts = [load.get(f"num_{name}", _HIDDEN) for name in numbers[:2]]
        counts += [load.get(f"{state}_blocks", _HIDDEN) for state in numbers[2:8]]
        counts += [worker.get(f"num_{name}", _HIDDEN) for name in numbers[8:]]
        table.add_row(worker["role"], worker["id"], worker["state"], *map(str, counts))
    return table


def _transport_table(workers: list[dict[str, Any]]) -> Table:
    """Returns a table of the ranks from which each worker has pulled KV cache, and the transport
    that it used.
    """
    table = make_table("worker", "pulls from", "transport", boxed=False)
    for worker in workers:
        for endpoint, transport in worker["transports"].items():
            table.add_row(worker["id"], endpoint, transport)
    return table


def dashboard(
    url: Annotated[
        str, typer.Option(help="The status page, as `tandem serve` names it.")
    ] = DEFAULT_STATUS_URL,
    api_key_file: o.ApiKeyFile = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show how to open a running service's console, status page, Ray dashboard and Grafana.

    Where they listen on loopback, the last line is what opens them from another machine."""
    url, service = fetch_status(url, o.read_api_key(api_key_file))
    ray_dashboard = service["ray_dashboard"]
    if ray_dashboard and not _has_page(ray_dashboard):
        ray_dashboard = ""  # its API alone
    pages = {
        "consoles": [router["console"] for router in service["routers"]],
        "status_page": url,
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
    rows.append(("status page", pages["status_page"]))
    rows.append(
        (
            "Ray dashboard",
            pages["ray_dashboard"] or "not started; tandem serve --dashboard starts it",
        )
    )
    rows.append(
        (
            "Grafana",
            pages["grafana"] or "none that Ray's dashboard tells of (RAY_GRAFANA_HOST, no token)",
        )
    )
    lines = [f"{name + ':':15}{where}" for name, where in rows]
    tunnel = ssh_command(where for _, where in rows if "://" in where)
    return [*lines, f"{'from elsewhere:':15}{tunnel}"] if tunnel else lines


def ssh_command(urls: Iterable[str]) -> str:
    """Returns the command with which another machine reaches those URLs that are on loopback here;
    empty if none is.
    """
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
    """Returns whether there is something at the URL that needs no token."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=_PAGE_SECONDS):
            return True
    except (OSError, ValueError):
        return False


def fetch_grafana(ray_dashboard: str) -> str | None:
    """Returns the address of the Grafana that Ray's dashboard shows charts of; None if there is
    none that answers it, or if the dashboard wants a token.
    """
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(ray_dashboard + _GRAFANA_PATH, timeout=_PAGE_SECONDS) as answer:
            found = json.load(answer)["data"]["grafanaHost"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return None if found in ("", "DISABLED") else str(found)
