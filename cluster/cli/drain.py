"""`tandem drain`: takes workers out of service."""

import asyncio
from pathlib import Path
from typing import Annotated, Any

import typer

from ...proto.addresses import host_of
from ...proto.errors import NotFound, Unavailable
from ..serve.identity_file import read_identity
from ..serve.status import drain_workers
from . import options as o
from .client import DEFAULT_STATUS_URL, fetch_status


def drain(
    target: Annotated[
        str, typer.Argument(help="A worker's id, a host for all workers with its address, or all.")
    ],
    url: Annotated[
        str, typer.Option(help="The status page, as `tandem serve` names it.")
    ] = DEFAULT_STATUS_URL,
    api_key_file: o.ApiKeyFile = None,
    timeout: Annotated[
        float, typer.Option(min=0.0, help="Seconds to wait for the requests of the workers.")
    ] = 30.0,
    identity: Annotated[
        Path | None,
        typer.Option(help="The service's identity; by default, where `tandem serve` has left it."),
    ] = None,
) -> None:
    """Have workers refuse new requests, and wait until they have none.

    The routers hand running requests to other workers, or let them end where no other has room. A
    drained worker stays up and refuses until it is stopped. Exit code 1: a worker has requests
    left, or does not answer.
    """
    url, service = fetch_status(url, o.read_api_key(api_key_file))
    workers = [worker for worker in service["workers"] if target in _names(worker)]
    if not workers:
        raise NotFound(f"no worker is {target}")
    addresses = [worker["address"] for worker in workers]
    counts = asyncio.run(drain_workers(addresses, timeout, read_identity(url, identity)))
    for worker, count in zip(workers, counts, strict=True):
        typer.echo(f"{worker['id']}: {'no answer' if count is None else f'{count} requests left'}")
    if any(count != 0 for count in counts):
        raise Unavailable("not every worker is drained")


def _names(worker: dict[str, Any]) -> tuple[str, ...]:
    return worker["id"], host_of(worker["address"]), "all"
