"""Closes connections of strangers to a server for peers before they use up its connections.

A stranger is a client that is no process of the service. gRPC reports calls to Python but not
connections, and it refuses new connections above a limit. So a stranger could lock out all peers
with connections that never prove anything. The kernel lists every connection, and the first
accepted call of a peer tells which connection is the peer's.
"""

import asyncio
import os
import resource
import socket
from collections.abc import Mapping
from contextlib import suppress
from typing import Final, TypeAlias
from urllib.parse import unquote

import psutil

_SWEEP_SECONDS: Final = 1.0
"""Interval of the checks, because no event reports a connection without a call. A peer makes its
first call as soon as it has connected.
"""

_Peer: TypeAlias = tuple[str, int]  # address and port


class StrangerSweep:
    """Closes connections that had no accepted call for a while, if there are many connections."""

    def __init__(self, max_connections: int) -> None:
        """Starts to close connections when a quarter of `max_connections` is in use.

        The process may be allowed fewer open files; then a quarter of these is enough.
        """
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        if files == resource.RLIM_INFINITY:
            files = 2 * max_connections
        self.max_connections: int = min(max_connections, files // 2)
        """Bound for the server: the sweep itself and the rest of the process open files as well."""
        self.ports: set[int] = set()  # the server's ports
        self._most = min(max_connections, files) // 4
        self._known: set[_Peer] = set()
        # Connections that had no accepted call at the last sweep.
        self._unproven: Mapping[_Peer, int] = {}
        self._task: asyncio.Task[None] | None = None

    def admit(self, peer: str) -> None:
        """Records that a call from `peer`, in gRPC's format, was accepted."""
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
            # No file may be free at the moment; the next round tries again.
            with suppress(OSError, psutil.Error):
                # The sweep also forgets the connections of peers that have ended.
                if process.num_fds() > self._most or len(self._known) > self._most:
                    await self._sweep()

    async def _sweep(self) -> None:
        known_before = set(self._known)
        found = await asyncio.to_thread(_connections_to, self.ports)
        self._known -= known_before - found.keys()  # connections that have ended
        strangers = {peer: fd for peer, fd in found.items() if peer not in self._known}
        if len(found) > self._most:
            for peer in strangers.keys() & self._unproven.keys():
                _end(strangers[peer], peer)
        self._unproven = strangers


def _connections_to(ports: set[int]) -> dict[_Peer, int]:
    """Returns the file descriptor of each connection that was accepted at one of the ports."""
    return {
        (_plain(each.raddr.ip), each.raddr.port): each.fd
        for each in psutil.Process().net_connections("tcp")
        if each.raddr and each.laddr.port in ports
    }


def _end(fd: int, peer: _Peer) -> None:
    """Closes the connection of `peer`, unless the descriptor has another connection by now."""
    with suppress(OSError), socket.socket(fileno=os.dup(fd)) as connection:
        address, port, *_ = connection.getpeername()
        if (_plain(address), port) == peer:
            connection.shutdown(socket.SHUT_RDWR)


def _parse_peer(name: str) -> _Peer:
    """Returns address and port of `ipv4:ADDRESS:PORT` or `ipv6:[ADDRESS]:PORT`."""
    address, _, port = unquote(name).partition(":")[2].rpartition(":")
    return _plain(address.strip("[]")), int(port) if port.isdecimal() else 0


def _plain(address: str) -> str:
    """Returns an address without its zone; an IPv4-mapped IPv6 address as IPv4."""
    return address.partition("%")[0].removeprefix("::ffff:")
