"""`tandem drain`: takes workers out of service."""

import asyncio
from pathlib import Path
from typing import Annotated, Any

import typer

from ...proto.addresses import host_of
from ...proto.errors import NotFound, Unavailable
from ..serve.identity_file import kept_status_url, read_identity
from ..serve.status import drain_workers
from ..service_url import STATUS_URL, ServiceAccess
from . import options as o


@o.service_options(STATUS_URL)
def drain(
    worker_name: Annotated[
        str,
        typer.Argument(
            metavar="TARGET",
            help="A worker's id, a host for all workers with its address, or all.",
        ),
    ],
    service: ServiceAccess,
    timeout: Annotated[
        float, typer.Option(min=0.0, help="Seconds to wait for the requests of the workers.")
    ] = 30.0,
    identity: Annotated[
        Path | None,
        typer.Option(help="The service's identity; by default the file that `tandem serve` wrote."),
    ] = None,
) -> None:
    """Make workers refuse new requests, and wait until they have no requests.

    The routers move running requests to other workers, or let them end if no other worker has room.
    A drained worker stays up and refuses requests until it is stopped. Exit code 1: a worker has
    requests left, or does not answer.
    """
    url, found = service.status()
    workers = [worker for worker in found["workers"] if worker_name in _names(worker)]
    if not workers:
        raise NotFound(f"no worker is {worker_name}")
    addresses = [worker["address"] for worker in workers]
    if not url and identity is None:
        url = kept_status_url(found["service"])
    own = read_identity(url, identity)
    counts = asyncio.run(drain_workers(addresses, timeout, own))
    for worker, count in zip(workers, counts, strict=True):
        typer.echo(f"{worker['id']}: {'no answer' if count is None else f'{count} requests left'}")
    if any(count != 0 for count in counts):
        raise Unavailable("not every worker is drained")


def _names(worker: dict[str, Any]) -> tuple[str, ...]:
    return worker["id"], host_of(worker["address"]), "all"
