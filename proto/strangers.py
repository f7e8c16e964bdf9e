"""Ends connections of strangers to a server of peers before they take the places of peers.

gRPC tells Python of calls, never of connections, and refuses new ones when there are too many. So a
stranger could keep all peers out with connections that never prove anything. The kernel knows each
connection, and the first accepted call of a peer says which one is the peer's.
"""

import asyncio
import os
import socket
from collections.abc import Mapping
from contextlib import suppress
from typing import Final, TypeAlias
from urllib.parse import unquote

import psutil

_SWEEP_SECONDS: Final = 1.0
"""No event tells of a connection without a call, so the connections are counted this often. A peer
makes its first call as soon as it has connected.
"""

_Peer: TypeAlias = tuple[str, int]  # address and port


class StrangerSweep:
    """Ends connections to one server that have had no accepted call for a while, when there are
    many connections.
    """

    def __init__(self, max_connections: int) -> None:
        """It begins when a quarter of the connections that the server takes are in use."""
        self.ports: set[int] = set()  # of the server
        self._most = max_connections // 4
        self._known: set[_Peer] = set()
        self._suspects: Mapping[
            _Peer, int
        ] = {}  # connections that had no accepted call at the last sweep
        self._task: asyncio.Task[None] | None = None

    def admit(self, peer: str) -> None:
        """Notes that a call from `peer`, as gRPC names it, was accepted."""
        self._known.add(_parse_peer(peer))

    def start(self) -> None:
        """Sweeps from now on, until `stop`."""
        self._task = asyncio.create_task(self._run(), name="stranger sweep")

    def stop(self) -> None:
        """Ends the sweeps. Idempotent."""
        if self._task is not None:
            self._task.cancel()

    async def _run(self) -> None:
        process = psutil.Process()
        while True:
            await asyncio.sleep(_SWEEP_SECONDS)
            if process.num_fds() > self._most:
                await self._sweep()

    async def _sweep(self) -> None:
        known_before = set(self._known)
        found = await asyncio.to_thread(_connections_to, self.ports)
        self._known -= known_before - found.keys()  # they have ended
        strangers = {peer: fd for peer, fd in found.items() if peer not in self._known}
        if len(found) > self._most:
            for peer in strangers.keys() & self._suspects.keys():
                _end(strangers[peer], peer)
        self._suspects = strangers


def _connections_to(ports: set[int]) -> dict[_Peer, int]:
    """Returns the file descriptor of each connection that this process has accepted at one of the
    ports.
    """
    return {
        (_plain(each.raddr.ip), each.raddr.port): each.fd
        for each in psutil.Process().net_connections("tcp")
        if each.raddr and each.laddr.port in ports
    }


def _end(fd: int, peer: _Peer) -> None:
    """Ends the connection of `peer`, unless the descriptor is another's by now."""
    with suppress(OSError), socket.socket(fileno=os.dup(fd)) as connection:
        address, port, *_ = connection.getpeername()
        if (_plain(address), port) == peer:
            connection.shutdown(socket.SHUT_RDWR)


def _parse_peer(name: str) -> _Peer:
    """Returns address and port of `ipv4:ADDRESS:PORT` or `ipv6:[ADDRESS]:PORT`."""
    address, _, port = unquote(name).partition(":")[2].rpartition(":")
    return _plain(address.strip("[]")), int(port) if port.isdecimal() else 0


def _plain(address: str) -> str:
    """Returns an address without its zone; an IPv4 address that is mapped to IPv6 as IPv4."""
    return address.partition("%")[0].removeprefix("::ffff:")
