"""`tandem key`: edits the file of API keys, prints their usage, makes a service's identity."""

import json
import time
from collections import Counter
from pathlib import Path
from typing import Annotated, Final
from urllib.parse import urlencode

import typer

from ...proto.identity import PeerIdentity
from ...router.auth.keys import ApiKey, create_key, load_keys, parse_expiry, revoke_key
from ..certificate import make_peer_tls
from ..config import PeerTlsConfig
from ..serve.identity_file import write_identity
from ..service_url import STATUS_URL, ServiceAccess
from ..tables import make_table, table_console
from . import options as o

key_app = typer.Typer(
    help="Edit the file of API keys; print what they used; make the identity of a service.",
    no_args_is_help=True,
)

_COUNTS: Final = {
    "requests": "REQUESTS",
    "failed": "FAILED",
    "prompt_tokens": "PROMPT TOKENS",
    "cached_tokens": "CACHED",
    "generated_tokens": "GENERATED",
}
_DIGITS: Final = 12  # of a digest; enough to identify its key

KeysFile = Annotated[Path, typer.Argument(help="The file of API keys.")]
KeyName = Annotated[str, typer.Argument(help="The key's name.")]


@key_app.command("create")
def create_command(
    file: KeysFile,
    name: KeyName,
    tenant: Annotated[
        str | None, typer.Option(help="The tenant of the key; by default its name.")
    ] = None,
    max_priority: Annotated[int, typer.Option(help="The highest priority of its requests.")] = 0,
    requests_per_minute: Annotated[
        int | None, typer.Option(help="The maximum of calls a minute at each router.")
    ] = None,
    tokens_per_minute: Annotated[
        int | None,
        typer.Option(help="The maximum of prompt and completion tokens a minute at each router."),
    ] = None,
    max_streams: Annotated[
        int | None, typer.Option(help="The maximum of concurrent calls at each router.")
    ] = None,
    operator: Annotated[
        bool,
        typer.Option(
            "--operator", help="The key of an operator: it sees the requests of all tenants."
        ),
    ] = False,
    expires: Annotated[
        str | None,
        typer.Option(
            help="The date or time when it expires, such as 2027-01-31; UTC without a zone."
        ),
    ] = None,
) -> None:
    """Add a key to FILE, which is made if it is missing, and print the key, which is not stored."""
    key = create_key(
        file,
        name=name,
        tenant=name if tenant is None else tenant,
        max_priority=max_priority,
        requests_per_minute=requests_per_minute,
        tokens_per_minute=tokens_per_minute,
        max_streams=max_streams,
        operator=operator,
        expires=None if expires is None else parse_expiry(expires),
    )
    typer.echo(key)


@key_app.command("list")
def list_command(file: KeysFile) -> None:
    """List the keys of FILE: their limits, and the first digits of their SHA-256."""
    numbers = ("PRIORITY", "REQUESTS/MIN", "TOKENS/MIN", "STREAMS")
    table = make_table("NAME", "TENANT", "EXPIRES", "SHA-256", numbers=numbers, boxed=False)
    for key in load_keys(file):
        limits = (key.requests_per_minute, key.tokens_per_minute, key.max_streams)
        cells = ["-" if limit is None else str(limit) for limit in limits]
        table.add_row(
            key.name, key.tenant, _expiry(key), key.sha256[:_DIGITS], str(key.max_priority), *cells
        )
    table_console().print(table)


@key_app.command("revoke")
def revoke_command(file: KeysFile, name: KeyName) -> None:
    """Remove a key from FILE.

    Running services refuse it within seconds; its running calls continue.
    """
    revoke_key(file, name)


@key_app.command("usage")
@o.service_options(STATUS_URL)
def usage_command(
    service: ServiceAccess,
    since: Annotated[
        str, typer.Option(help="The first day in UTC, such as 2026-11-27; by default today.")
    ] = "",
    by_day: Annotated[bool, typer.Option("--by-day", help="Print a line for each day.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the days as JSON.")] = False,
) -> None:
    """Print what the requests of each key used: requests, failures, tokens.

    An operator's key shows all keys, any other key only its own usage. Routers report requests
    within ten seconds after their end.
    """
    found = service.read(f"/usage?{urlencode({'since': since})}" if since else "/usage")
    rows = found["data"]
    if found.get("has_more"):
        typer.echo(
            f"only the newest {len(rows)} rows are counted, of which the last are of "
            f"{rows[-1]['day']}; give a later day as --since",
            err=True,
        )
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
        return
    sums: dict[tuple[str, ...], Counter[str]] = {}
    texts = {"day": "DAY"} if by_day else {}
    texts |= {"key_name": "NAME", "tenant": "TENANT"}
    for row in rows:
        own = tuple(str(row[name] or "-") for name in texts)
        sums.setdefault(own, Counter()).update({name: row[name] for name in _COUNTS})
    table = make_table(*texts.values(), numbers=_COUNTS.values(), boxed=False)
    for names, counts in sums.items():
        table.add_row(*names, *(str(counts[name]) for name in _COUNTS))
    table_console().print(table)


@key_app.command("identity")
def identity_command(
    file: Annotated[
        Path, typer.Argument(help="The new file, for `identity_file` of a configuration.")
    ],
    tls: Annotated[
        bool, typer.Option(help="Include a key and a certificate, so that peers use TLS.")
    ] = True,
) -> None:
    """Make the identity of a service: the secret by which its processes recognise each other.

    Keep the file secret.
    """
    write_identity(
        file, PeerIdentity.generate(make_peer_tls(PeerTlsConfig().name) if tls else None)
    )


def _expiry(key: ApiKey) -> str:
    if key.expires is None:
        return "-"
    return f"{key.expires:%Y-%m-%d %H:%M %Z}" + (
        " (expired)" if key.has_expired(time.time()) else ""
    )
