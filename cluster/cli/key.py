"""`tandem key`: keeps the file of API keys, and makes the identity of a service."""

import time
from pathlib import Path
from typing import Annotated, Final

import typer
from rich.console import Console

from ...proto.certificate import make_peer_tls
from ...proto.identity import PeerIdentity
from ...router.auth.keys import ApiKey, create_key, load_keys, parse_expiry, revoke_key
from ..config import PeerTlsConfig
from ..serve.identity_file import write_identity
from ..tables import make_table

key_app = typer.Typer(
    help="Keep the file of API keys; make the identity of a service.", no_args_is_help=True
)

_DIGITS: Final = 12  # of a digest: enough to find its key

KeysFile = Annotated[Path, typer.Argument(help="The file of keys.")]
KeyName = Annotated[str, typer.Argument(help="The key's name.")]


@key_app.command("create")
def create_command(
    file: KeysFile,
    name: KeyName,
    tenant: Annotated[
        str | None, typer.Option(help="Whose key it is; by default the name.")
    ] = None,
    max_priority: Annotated[int, typer.Option(help="The highest priority of its requests.")] = 0,
    requests_per_minute: Annotated[int | None, typer.Option(help="Calls, at each router.")] = None,
    tokens_per_minute: Annotated[
        int | None, typer.Option(help="Of prompts and completions, at each router.")
    ] = None,
    max_streams: Annotated[
        int | None, typer.Option(help="Calls at a time, at each router.")
    ] = None,
    operator: Annotated[
        bool, typer.Option("--operator", help="It sees the requests of all tenants in the console.")
    ] = False,
    expires: Annotated[
        str | None, typer.Option(help="A date or time in ISO form; UTC if it has no zone.")
    ] = None,
) -> None:
    """Add a key to FILE, which is made if it is not there, and print the key. It is stored nowhere."""
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
    """List the keys of FILE: what each may do, and the first digits of its SHA-256."""
    numbers = ("PRIORITY", "REQUESTS/MIN", "TOKENS/MIN", "STREAMS")
    table = make_table("NAME", "TENANT", "EXPIRES", "SHA-256", numbers=numbers, boxed=False)
    for key in load_keys(file):
        limits = (key.requests_per_minute, key.tokens_per_minute, key.max_streams)
        cells = ["-" if limit is None else str(limit) for limit in limits]
        table.add_row(
            key.name, key.tenant, _expiry(key), key.sha256[:_DIGITS], str(key.max_priority), *cells
        )
    console = Console()
    if not console.is_terminal:
        console.width = 4096  # do not wrap lines in a pipe
    console.print(table)


@key_app.command("revoke")
def revoke_command(file: KeysFile, name: KeyName) -> None:
    """Remove a key from FILE. Running services refuse it within seconds; its calls under way go on."""
    revoke_key(file, name)


@key_app.command("identity")
def identity_command(
    file: Annotated[
        Path, typer.Argument(help="The file to make, for `identity_file` of a configuration.")
    ],
    tls: Annotated[
        bool, typer.Option(help="With a key and a certificate, so that peers speak TLS.")
    ] = True,
) -> None:
    """Make the identity of a service: the secret by which its processes know each other. It must
    stay one.
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
