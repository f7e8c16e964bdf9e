"""Where two ranks tell each other how to be reached, before they are a process group.

Torch's own store asks the name service for the names of all addresses that it sees, and waits for the answer, up to
seconds; so groups of gloo meet over a socket of ours. NCCL's have threads that look into their store at any time.
All of this blocks: it belongs into a thread.
"""

import socket
from collections.abc import Sequence
from datetime import timedelta
from typing import Final

import msgpack
from torch import distributed
from torch._C._distributed_c10d import Store

from .backend import join_store

_MAX_BYTES: Final = 65_536  # of all that one side says; with gloo it is a fifth of a kilobyte


class Meeting(Store):
    """A store of two ranks: what one sets, the other hears. Used by one thread."""

    def __init__(self, connection: socket.socket) -> None:
        """Its timeout is that of every wait."""
        super().__init__()
        self._connection = connection
        self._known: dict[str, bytes] = {}
        self._heard = msgpack.Unpacker()
        self._num_left = _MAX_BYTES

    def set(self, key: str, value: bytes) -> None:  # type: ignore[override]  # torch's own types say str
        self._known[key] = bytes(value)
        self._connection.sendall(msgpack.packb([key, bytes(value)]))

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._known[key]

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Raises RuntimeError or OSError if the other side does not say them."""
        while not all(key in self._known for key in keys):
            if not (data := self._connection.recv(4096)):
                raise RuntimeError("the other rank has gone")
            self._num_left -= len(data)
            if self._num_left < 0:
                raise RuntimeError("the other rank says too much")
            self._heard.feed(data)
            self._take()

    def _take(self) -> None:
        for note in self._heard:
            match note:
                case [str(key), bytes(value)]:
                    self._known[key] = value
                case _:
                    raise RuntimeError("no rank speaks so")

    def close(self) -> None:
        """When the group is made, or will not be. Idempotent."""
        self._connection.close()


def welcome(server: socket.socket, backend: str, timeout: float) -> Store:
    """The store of the rank that listens, once the other has come. Raises RuntimeError or OSError."""
    if backend != "gloo":
        host, port = server.getsockname()
        return distributed.TCPStore(  # type: ignore[attr-defined]
            host, port, 2, True, timedelta(seconds=timeout), wait_for_workers=False, master_listen_fd=server.detach()
        )
    server.settimeout(timeout)
    with server:
        connection, _ = server.accept()
    connection.settimeout(timeout)
    return Meeting(connection)


def visit(host: str, port: int, backend: str, timeout: float) -> Store:
    """The store of the other one. Raises RuntimeError or OSError."""
    return (
        Meeting(socket.create_connection((host, port), timeout))
        if backend == "gloo"
        else join_store(host, port, timeout)
    )
