"""Serves an ASGI application over HTTP on one port, with uvicorn in the running event loop."""

import asyncio
import ctypes
import errno
import socket
import ssl
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Final, cast

import uvicorn

from ....proto.addresses import listen
from .connection import ConnectionBounds

_BUSY: Final = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}
_BUSY_SECONDS: Final = 1.0
"""After which a connection is accepted again when there was no file or memory left for one; as
asyncio does.
"""

_FIRST_REQUEST_SECONDS: Final = 0.5
"""In which a connection that was accepted last may send its request before the server closes what
has none.
"""

_HANDSHAKE_SECONDS: Final = 0.1
"""In which connections whose handshake has begun with a listener reach it before it is closed."""

_SO_ATTACH_REUSEPORT_CBPF: Final = 51  # Linux


class HttpListener:
    """Listens from `start` to `stop`."""

    def __init__(
        self,
        config: uvicorn.Config,
        bounds: ConnectionBounds | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """With `tls`, `bounds` hold for connections from before their handshakes on."""
        self._server = _Server(config, bounds or ConnectionBounds(), tls)

    async def start(self, address: str, *, shares_port: bool = False) -> str:
        """Listens on HOST:PORT (port 0: a free one); returns the address with the real port. With
        `shares_port` others may listen there, too, who say the same.

        Raises OSError if the port is taken.
        """
        host, _, port = address.rpartition(":")
        listener = listen(host, int(port), backlog=2_048, reuse_port=shares_port)
        # asyncio does this for its own listeners only; without it each event of a stream waits 40
        # ms for an ACK.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._running = asyncio.create_task(
            self._server.serve(sockets=[listener]), name="http server"
        )
        await self._server.ready.wait()
        return f"{host}:{listener.getsockname()[1]}"

    async def stop(self, grace: float) -> None:
        """Accepts no more connections, then no more requests; cancels those that still run after
        `grace` seconds.
        """
        await self._server.stop_accepting(min(grace, _FIRST_REQUEST_SECONDS))
        self._server.config.timeout_graceful_shutdown = max(1, round(grace))
        self._server.should_exit = True
        await self._running
        cancelled = self._server.server_state.tasks
        if cancelled:
            await asyncio.wait(cancelled)


class _Server(uvicorn.Server):
    """Leaves the process's signals alone and sets `ready` when it listens."""

    def __init__(
        self, config: uvicorn.Config, bounds: ConnectionBounds, tls: ssl.SSLContext | None
    ) -> None:
        super().__init__(config)
        self.ready = asyncio.Event()
        self._bounds = bounds
        self._tls = tls
        self._listeners: list[socket.socket] = []
        self._acceptors: list[_TlsAcceptor] = []

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._listeners = sockets or []
        if self._tls is None:
            await super().startup(sockets)
        else:
            await super().startup([])
            self._acceptors = [
                _TlsAcceptor(each, self._connection, self._tls, self._bounds)
                for each in self._listeners
            ]
            self.servers = cast(list[Any], self._acceptors)
        self.ready.set()

    async def stop_accepting(self, seconds: float) -> None:
        """Closes the listeners, once other processes that share their ports get the new
        connections: one that waits in a listener that is closed is reset. Then waits so long for
            the requests of those accepted last.
        """
        are_shared = [_yield_port(each) for each in self._listeners]
        if any(are_shared):
            await asyncio.sleep(_HANDSHAKE_SECONDS)
        for _ in range(2):  # the loop accepts all that wait
            await asyncio.sleep(0)
        for each in self.servers:
            if isinstance(each, asyncio.Server):
                each.close()
        for acceptor in self._acceptors:
            acceptor.stop_accepting()
        for listener in self._listeners:
            listener.close()
        await asyncio.sleep(seconds)

    def _connection(self) -> asyncio.Protocol:
        kind: Any = self.config.http_protocol_class
        made: asyncio.Protocol = kind(
            config=self.config, server_state=self.server_state, app_state=self.lifespan.state
        )
        return made

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _yield_port(listener: socket.socket) -> bool:
    """Has the kernel give new connections to the second of the sockets that share the listener's
    port, in the order in which they began to listen; if there is no second one, to the first as
    before. Returns whether it does.
    """
    program = ctypes.create_string_buffer(struct.pack("HBBI", 0x06, 0, 0, 1))  # BPF_RET, of index 1
    try:
        listener.setsockopt(
            socket.SOL_SOCKET,
            _SO_ATTACH_REUSEPORT_CBPF,
            struct.pack("HP", 1, ctypes.addressof(program)),
        )
    except OSError:  # the port is not shared, or the kernel knows no such programs
        return False
    return True


@dataclass(eq=False)
class _Handshake:
    """Is a connection before the end of its TLS handshake."""

    task: asyncio.Task[None]

    def abort(self) -> None:
        """See Abortable."""
        self.task.cancel()


class _TlsAcceptor:
    """Accepts connections, until `close`, and begins with each when its TLS handshake has ended.

    asyncio's own servers tell nobody of a connection before that, and leave it a minute."""

    def __init__(
        self,
        listener: socket.socket,
        make_connection: Callable[[], asyncio.Protocol],
        context: ssl.SSLContext,
        bounds: ConnectionBounds,
    ) -> None:
        self._listener = listener.dup()  # who waits for it closes it
        self._listener.setblocking(False)
        self._make_connection = make_connection
        self._context = context
        self._bounds = bounds
        self._handshakes: set[asyncio.Task[None]] = set()
        self._accepting = asyncio.create_task(self._accept(), name="tls acceptor")

    def stop_accepting(self) -> None:
        """Begins with no further connection; handshakes go on."""
        self._accepting.cancel()

    def close(self) -> None:
        """Begins with no further connection, and gives up those in their handshakes."""
        for task in (self._accepting, *self._handshakes):
            task.cancel()

    async def wait_closed(self) -> None:
        """Waits until nothing is left of what `close` has ended."""
        await asyncio.wait({self._accepting, *self._handshakes})

    async def _accept(self) -> None:
        with self._listener:
            while True:
                try:
                    accepted, address = await asyncio.get_running_loop().sock_accept(self._listener)
                except OSError as error:
                    await asyncio.sleep(_BUSY_SECONDS if error.errno in _BUSY else 0)
                else:
                    task = asyncio.create_task(self._shake_hands(accepted, address[0]))
                    self._handshakes.add(task)
                    task.add_done_callback(self._handshakes.discard)

    async def _shake_hands(self, accepted: socket.socket, address: str) -> None:
        task, loop = asyncio.current_task(), asyncio.get_running_loop()
        assert task is not None
        handshake = _Handshake(task)
        self._bounds.enter(address, handshake)
        try:
            with suppress(OSError):  # TLS's own errors, too
                await loop.connect_accepted_socket(
                    self._make_connection,
                    accepted,
                    ssl=self._context,
                    ssl_handshake_timeout=self._bounds.head_seconds,
                )
        finally:
            self._bounds.leave(address, handshake)
