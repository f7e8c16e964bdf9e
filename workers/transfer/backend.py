"""Opens torch.distributed process groups that bind one named interface and use no global state.

The groups of a process are independent of each other; `torch.distributed.init_process_group` is
never called. Calls of this module block without the interpreter lock, so run them in a thread.
Failures raise RuntimeError, as torch does.
"""

import hmac
import os
import socket
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Final

import msgpack
from torch import distributed
from torch._C._distributed_c10d import Store

from ...proto.addresses import listen, without_brackets

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Backend, TCPStore

_ERROR_HANDLING: Final = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
_ENVIRONMENT: Final = threading.Lock()
# Bound on all bytes that one side of a rendezvous sends; gloo sends about 200.
_MAX_BYTES: Final = 65_536
_PASSWORD_SECONDS: Final = 1.0


def listen_store(host: str, size: int, timeout: float) -> "TCPStore":
    """Returns the store at which `size` ranks of one group find each other.

    It does not wait for any of them. It listens at `host` and its `port` until it is dropped.
    `timeout` is in seconds, for waits for its keys. Raises OSError if this machine has no such
    interface.
    """
    return _serve_store(listen(host, 0), size, timeout)


def _serve_store(server: socket.socket, size: int, timeout: float) -> "TCPStore":
    limit = timedelta(seconds=timeout)
    host, port, *_ = server.getsockname()
    # From here on the store owns the socket. A store that opened its own would listen on all
    # interfaces.
    return distributed.TCPStore(  # type: ignore[attr-defined]
        host, port, size, True, limit, wait_for_workers=False, master_listen_fd=server.detach()
    )


def join_store(host: str, port: int, timeout: float) -> "TCPStore":
    """Connects to the store of another process. Raises RuntimeError if nothing listens there.

    Torch has no deadline for a listener that is frozen: then this returns, or raises, when that
    process continues or dies.
    """
    try:
        # Checked first, because the store's own connect retries for three times the timeout and
        # logs a stack trace each time.
        socket.create_connection((without_brackets(host), port), timeout).close()
    except OSError as error:
        raise RuntimeError(f"no process group listens at {host}:{port}") from error
    return distributed.TCPStore(  # type: ignore[attr-defined]
        without_brackets(host),
        port,
        None,
        False,
        timedelta(seconds=timeout),
        wait_for_workers=False,
    )


def open_group(
    store: Store,
    *,
    backend: str,
    rank: int,
    size: int,
    host: str,
    timeout: float,
    outlives_peers: bool = False,
) -> "Backend":
    """Opens a process group over the store; returns it once all `size` ranks have joined.

    A second group over the same store needs a PrefixStore. `host` is this rank's own interface,
    which gloo binds. NCCL takes its interface from NCCL_SOCKET_IFNAME. It creates its communicator
    at the first call, on the device of that call's tensor. `timeout` is in seconds, for the wait
    for the others and for every call. By default a group of NCCL ends the process when a peer is
    lost, unless it `outlives_peers`. Raises ValueError for a backend that this torch lacks.
    """
    limit = timedelta(seconds=timeout)
    if backend == "gloo":
        gloo = distributed.ProcessGroupGloo
        options = gloo._Options()  # type: ignore[attr-defined]
        options._devices = [gloo.create_device(hostname=without_brackets(host), lazy_init=False)]
        options._timeout = limit
        return gloo(store, rank, size, options)
    if backend != "nccl" or not distributed.is_nccl_available():
        raise ValueError(f"collective backend: {backend!r} is not in this build of torch")
    options = distributed.ProcessGroupNCCL.Options()
    options._timeout = limit
    store.set(f"rank {rank}", "joined")
    store.wait([f"rank {other}" for other in range(size)], limit)
    if not outlives_peers:
        return distributed.ProcessGroupNCCL(store, rank, size, options)
    with _ENVIRONMENT:  # the constructor reads the variable
        before = os.environ.get(_ERROR_HANDLING)
        os.environ[_ERROR_HANDLING] = "0"
        try:
            return distributed.ProcessGroupNCCL(store, rank, size, options)
        finally:
            del os.environ[_ERROR_HANDLING]
            if before is not None:
                os.environ[_ERROR_HANDLING] = before


class Rendezvous(Store):
    """Shares a store between two ranks over one socket; one thread uses it.

    A key that one rank sets is sent to the other. It replaces torch's TCPStore, which looks up the
    name of every address that it sees and waits for the answer, up to seconds. NCCL needs torch's
    store: it reads the store at any time, from threads of its own.
    """

    def __init__(self, connection: socket.socket) -> None:
        """Uses the connection's timeout for every wait."""
        super().__init__()
        self._connection = connection
        self._values: dict[str, bytes] = {}
        self._unpacker = msgpack.Unpacker()
        self._num_left = _MAX_BYTES

    # torch's own types have str as the type of values.
    def set(self, key: str, value: bytes) -> None:  # type: ignore[override]
        self._values[key] = bytes(value)
        self._connection.sendall(msgpack.packb([key, bytes(value)]))

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._values[key]

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Waits for keys of the other side. Raises RuntimeError or OSError if they do not come."""
        while not all(key in self._values for key in keys):
            if not (data := self._connection.recv(4096)):
                raise RuntimeError("the other rank has closed the connection")
            self._num_left -= len(data)
            if self._num_left < 0:
                raise RuntimeError(f"the other rank has sent more than {_MAX_BYTES} bytes")
            self._unpacker.feed(data)
            for item in self._unpacker:
                match item:
                    case [str(key), bytes(value)]:
                        self._values[key] = value
                    case _:
                        raise RuntimeError("the other rank has sent no pair of key and value")

    def close(self) -> None:
        """Closes the connection. Call this when the group exists, or has failed. Idempotent."""
        self._connection.close()


def meet_peer(
    place: tuple[str, int],
    server: socket.socket | None,
    backend: str,
    timeout: float,
    password: bytes,
) -> Store:
    """Returns the store of two ranks that meet at `place`; the first one listens there by `server`.

    Returns on the first rank once the other one has connected and, for gloo, has shown the
    password. Raises RuntimeError or OSError.
    """
    if backend != "gloo":
        return _serve_store(server, 2, timeout) if server else join_store(*place, timeout)
    if server is not None:
        return Rendezvous(_accept(server, timeout, password))
    connection = socket.create_connection((without_brackets(place[0]), place[1]), timeout)
    connection.sendall(password)
    return Rendezvous(connection)


def _accept(server: socket.socket, timeout: float, password: bytes) -> socket.socket:
    """Returns the first connection that shows the password, and closes the others.

    Any process may connect: a scanner of ports must not take the place of the other rank.
    """
    deadline = time.monotonic() + timeout
    with server:
        while (left := deadline - time.monotonic()) > 0:
            server.settimeout(left)
            connection, _ = server.accept()
            connection.settimeout(min(left, _PASSWORD_SECONDS))
            with suppress(OSError):
                if hmac.compare_digest(connection.recv(len(password)), password):
                    connection.settimeout(timeout)
                    return connection
            connection.close()
    raise TimeoutError("the other rank has not connected")
