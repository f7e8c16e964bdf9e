"""`tandem drain`, `role` and `reset-cache`: commands to the workers of a service."""

import asyncio
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from ...proto.addresses import host_of
from ...proto.errors import InvalidArgument, NotFound, Unavailable
from ...proto.identity import PeerIdentity
from ..config import PoolRole
from ..serve.identity_file import kept_status_url, read_identity
from ..serve.status import (
    MAX_WAIT_SECONDS,
    SWITCH_SECONDS,
    drain_workers,
    reset_caches,
    switch_worker,
)
from ..service_url import STATUS_URL, ServiceAccess
from . import options as o

_Identity = Annotated[
    Path | None,
    typer.Option(help="The file of the service's identity; default: as `tandem serve` kept it."),
]


@o.service_options(STATUS_URL)
def drain(
    worker_name: Annotated[
        str,
        typer.Argument(
            metavar="TARGET",
            help="A worker's id, a host (for all its workers), or all.",
        ),
    ],
    service: ServiceAccess,
    timeout: Annotated[
        float,
        typer.Option(
            min=0.0,
            max=MAX_WAIT_SECONDS,
            help="Seconds to wait until the workers have no requests.",
        ),
    ] = 30.0,
    identity: _Identity = None,
) -> None:
    """Make workers refuse new requests, and wait until they have no requests.

    The routers move running requests to other workers, or let them end if no other worker has room.
    A drained worker stays up and refuses requests until it is stopped. Exit code 1: a worker has
    requests left, or does not answer.
    """
    url, found = service.status()
    workers = [worker for worker in found["workers"] if worker_name in _names(worker)]
    if not workers:
        raise NotFound(
            f"TARGET: no worker has the id or the host {worker_name}; `tandem status` lists them"
        )
    addresses = [worker["address"] for worker in workers]
    own = _identity(url, found, identity)
    counts = asyncio.run(drain_workers(addresses, timeout, own))
    for worker, count in zip(workers, counts, strict=True):
        typer.echo(f"{worker['id']}: {'no answer' if count is None else f'{count} requests left'}")
    if any(count != 0 for count in counts):
        raise Unavailable(
            "not every worker is drained; run the command again, with a longer --timeout"
        )


@o.service_options(STATUS_URL)
def role(
    worker_id: Annotated[str, typer.Argument(metavar="WORKER", help="A worker's id.")],
    wanted: Annotated[
        PoolRole, typer.Argument(metavar="ROLE", help="The new role: prefill or decode.")
    ],
    service: ServiceAccess,
    timeout: Annotated[
        float,
        typer.Option(
            min=0.0, max=MAX_WAIT_SECONDS, help="Seconds to wait for its requests to move."
        ),
    ] = SWITCH_SECONDS,
    identity: _Identity = None,
) -> None:
    """Make a worker prefill or decode.

    It keeps its weights and its prefix cache. The routers move its streams to other workers; a
    request that cannot move ends where it is. After a restart the worker has the role of its pool
    again.
    """
    url, found = service.status()
    known = {worker["id"]: worker for worker in found["workers"]}
    if worker_id not in known:
        raise NotFound(f"WORKER: no worker has the id {worker_id}; `tandem status` lists them")
    others = [
        each
        for each in known.values()
        if each["id"] != worker_id and (each["role"], each["state"]) == ("decode", "ready")
    ]
    if wanted == "prefill" and not others:
        raise InvalidArgument(
            "no other worker decodes; make one decode first: `tandem role OTHER decode`", "WORKER"
        )
    own = _identity(url, found, identity)
    began = time.monotonic()
    left = asyncio.run(switch_worker(known[worker_id]["address"], wanted, timeout, own))
    seconds = time.monotonic() - began
    typer.echo(f"{worker_id}: {wanted} after {seconds:.2f} s, {left} requests left")


@o.service_options(STATUS_URL)
def reset_cache(service: ServiceAccess, identity: _Identity = None) -> None:
    """Empty the prefix caches of all workers: in memory, in host memory and on disk.

    Running requests go on. Exit code 1: a worker has not emptied its cache, or does not answer.
    """
    url, found = service.status()
    workers = {worker["id"]: worker["address"] for worker in found["workers"]}
    failed = asyncio.run(reset_caches(workers, _identity(url, found, identity)))
    for name in workers:
        typer.echo(f"{name}: {failed.get(name, 'empty')}")
    if failed:
        raise Unavailable("not every prefix cache is empty; run the command again")


def _identity(url: str, found: dict[str, Any], path: Path | None) -> PeerIdentity:
    """Returns the identity of the service with this status, from `path` if it is given."""
    if not url and path is None:
        url = kept_status_url(found["service"])
    return read_identity(url, path)


def _names(worker: dict[str, Any]) -> tuple[str, ...]:
    return worker["id"], host_of(worker["address"]), "all"
