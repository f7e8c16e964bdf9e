"""Chooses the ports of routers and holds them, and finds who listens. Does not import Ray.

Routers bind their ports so that other processes may bind the same ones (SO_REUSEPORT): a router
that replaces another listens beside it. A `PortClaim` settles beforehand which routers may.
"""

import socket
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, suppress
from typing import TYPE_CHECKING, Final

import psutil

from ...proto.addresses import TAKEN, bindable_port, why_not_bound
from ...proto.errors import InvalidArgument, Unavailable
from ..config import RouterConfig, TandemConfig, check_interface

if TYPE_CHECKING:
    # Imports transformers and every body of the APIs: a second before Ray can start.
    from ...router.api.server.servers import ApiServers

_IPV4_IN_IPV6: Final = "::ffff:"
_MAX_PORT: Final = 65_535
_MAX_ATTEMPTS: Final = 20  # to find a free port that no other process claims
_REMEDIES: Final = {  # if a port is taken
    "status_port": "set status_port to another one",
    "router.grpc_port": "choose another one (--grpc-port, 0 for a free one)",
    "router.http_port": "choose another one (--http-port, 0 for a free one)",
}


def listening_children() -> dict[str, psutil.Process]:
    """Returns the process that listens at each HOST:PORT, of the children of this process."""
    found: dict[str, psutil.Process] = {}
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            for each in process.net_connections("tcp"):
                if each.status == psutil.CONN_LISTEN:
                    host = each.laddr.ip.removeprefix(_IPV4_IN_IPV6)
                    found[f"{host}:{each.laddr.port}"] = process
    return found


class PortClaim:
    """Holds the right to listen on HOST:PORT until it is closed or this process ends.

    A port belongs to one router, and to one router of the deployment that replaces the router's.
    """

    def __init__(self, address: str, application: str, shared: Collection[str]) -> None:
        """Claims an address; port 0 claims a free port.

        `shared`: the addresses of the routers that `application` replaces. Raises OSError if the
        port is taken.
        """
        if address in shared:
            self.address = address
            self._lock = _lock_name(f"{application} {address}")
            return
        host = address.rpartition(":")[0]
        port = port_of(address)
        # Another process may claim the free port between the probe and the lock.
        for remaining in reversed(range(1 if port else _MAX_ATTEMPTS)):
            self.address = f"{host}:{bindable_port(host, port)}"
            try:
                self._lock = _lock_name(f" {self.address}")
                return
            except OSError:
                if not remaining:
                    raise

    def close(self) -> None:
        """Gives the right back. Idempotent."""
        self._lock.close()


def _lock_name(name: str) -> socket.socket:
    """Binds a name that only one process of this machine can have. Raises OSError if it is taken.

    Until the first process listens on a port, the probe of a second one succeeds. A socket name of
    the abstract kind can be bound once, and is free again however the process ends.
    """
    lock = socket.socket(socket.AF_UNIX)
    try:
        lock.bind(f"\0tandem {name}")
    except OSError:
        lock.close()
        raise
    return lock


def port_of(address: str) -> int:
    """Returns the port of HOST:PORT."""
    return int(address.rpartition(":")[2])


def local_host(config: TandemConfig) -> str:
    """Returns the interface of a service on a local Ray.

    Raises InvalidArgument if its routers may not listen there or have the port of the status page,
    and Unavailable if a port is taken.
    """
    host = config.host or "127.0.0.1"
    check_interface(config.auth, config.router.bind or host)
    _check_free(config, host)
    return host


def _check_free(config: TandemConfig, host: str) -> None:
    """Raises Unavailable if a configured port cannot be bound on this machine.

    Raises InvalidArgument if a router has the port of the status page.

    Several routers need no check: each uses another port if its own is in use.
    """
    ports = {"status_port": config.status_port or 0}
    if (config.router.replicas or 1) == 1:
        ports["router.grpc_port"] = config.router.grpc_port
        ports["router.http_port"] = config.router.http_port
    for key, port in ports.items():
        if key != "status_port" and port == config.status_port:
            raise InvalidArgument(f"must differ from status_port, {port}", key)
        interface = (config.router.bind or host) if key.startswith("router.") else host
        if reason := why_not_bound(interface, port):
            remedy = f" Then {_REMEDIES[key]}" if reason == TAKEN else ""
            raise Unavailable(f"{key}: {interface}:{port} cannot be bound{reason}{remedy}")


async def bind_api_servers(
    start_servers: Callable[..., Awaitable["ApiServers"]],
    router: RouterConfig,
    *,
    host: str,
    bind: str,
    num_routers: int,
    application: str,
    replaced: Collection[tuple[str, str]],
) -> tuple["ApiServers", ExitStack]:
    """Starts both API servers on the first pair of addresses that is free.

    `replaced`: the gRPC and HTTP addresses of the routers that `application` replaces. Returns the
    servers, and a stack that gives their ports back. Raises OSError or RuntimeError if no pair is
    free.
    """
    kept = [
        (f"{bind}:{port_of(grpc)}", f"{bind}:{port_of(http)}")
        for grpc, http in replaced
        if _host_part(grpc) == host
    ]
    shared = {address for pair in kept for address in pair}
    for pair in _api_addresses(router, bind, num_routers, kept):
        try:
            with ExitStack() as scope:
                grpc, http = (
                    scope.enter_context(closing(PortClaim(each, application, shared)))
                    for each in pair
                )
                servers = await start_servers(grpc_address=grpc.address, http_address=http.address)
                return servers, scope.pop_all()
        except (OSError, RuntimeError) as error:
            taken = error
    raise taken


def _api_addresses(
    router: RouterConfig, bind: str, num_routers: int, kept: Iterable[tuple[str, str]]
) -> Iterator[tuple[str, str]]:
    """Yields the pairs of gRPC and HTTP addresses to try, in their order.

    Without configured ports, the addresses of routers on this host that are replaced (`kept`) come
    first, so that clients find the new router where they know the old one. Then follow the
    configured ports and, for each further router, the next higher ones; with several routers, any
    free port is last.
    """
    if not router.grpc_port and not router.http_port:
        yield from kept
    for index in range(num_routers):
        ports = [port + index if port else 0 for port in (router.grpc_port, router.http_port)]
        if max(ports) <= _MAX_PORT:
            yield f"{bind}:{ports[0]}", f"{bind}:{ports[1]}"
    if num_routers > 1:
        yield f"{bind}:0", f"{bind}:0"


async def bind_ops_server(
    start_server: Callable[[str], Awaitable[str]],
    port: int,
    *,
    host: str,
    bind: str,
    num_routers: int,
    application: str,
    replaced: Collection[str],
) -> tuple[str, ExitStack]:
    """Starts the ops server on `port`, on one of the next higher ports, or on any free port.

    Without `port`, the ports of routers on this host that are `replaced` come first. Returns the
    bound address, empty if none can be bound, and a stack that gives its port back.
    """
    kept = [port_of(each) for each in replaced if _host_part(each) == host]
    shared = [f"{bind}:{each}" for each in kept]
    for each in _ops_ports(port, num_routers, kept):
        with suppress(OSError), ExitStack() as scope:
            claim = scope.enter_context(closing(PortClaim(f"{bind}:{each}", application, shared)))
            bound = await start_server(claim.address)
            return bound, scope.pop_all()
    return "", ExitStack()


def _ops_ports(port: int, num_routers: int, kept: Sequence[int]) -> list[int]:
    if not port:
        return [*kept, 0]
    return [*range(port, min(port + num_routers, _MAX_PORT + 1)), 0]


def _host_part(address: str) -> str:
    return address.rpartition(":")[0]
