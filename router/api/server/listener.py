"""Serves an ASGI application over HTTP on one port, with uvicorn in the running event loop."""

import asyncio
import ctypes
import errno
import socket
import ssl
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, Final, cast

import uvicorn
from starlette.types import ASGIApp

from ....proto.addresses import listen, network_of
from .audit import AuditLog
from .connection import ConnectionBounds, HttpConnection

_MAX_IDLE_SECONDS: Final = 60  # of a connection without a request

_BUSY: Final = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}
_BUSY_SECONDS: Final = 1.0
"""The pause after an error of _BUSY, before the next connection is accepted; as in asyncio."""

_FIRST_REQUEST_SECONDS: Final = 0.5
"""While the server stops, the last accepted connections have this time to send a request."""

_HANDSHAKE_SECONDS: Final = 0.1
"""A listener stays open for this time, so that connections reach it whose handshake has begun."""

_SO_ATTACH_REUSEPORT_CBPF: Final = 51  # Linux


class HttpListener(uvicorn.Server):
    """Listens from `start` to `stop`. Does not touch the signal handlers of the process."""

    def __init__(
        self,
        app: ASGIApp,
        bounds: ConnectionBounds | None = None,
        audit: AuditLog | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """Prepares a listener that accepts nothing yet.

        `bounds`: of the connections, with `tls` from before their handshakes on. `audit` gets
        the requests that cannot be parsed.
        """
        self._bounds = bounds or ConnectionBounds()
        self._tls = tls
        self._is_listening = asyncio.Event()
        self._listeners: list[socket.socket] = []
        self._acceptors: list[_TlsAcceptor] = []
        super().__init__(
            uvicorn.Config(
                app,
                interface="asgi3",
                lifespan="off",
                # uvicorn's own configuration of logging would close the handlers of the whole
                # process. With those of Ray Serve closed, a replica cannot answer a controller that
                # restarts, which then stops the replica.
                log_config=None,
                log_level="error",  # clients cause its warnings, without a limit
                access_log=False,
                proxy_headers=False,  # by X-Forwarded-For, a client could choose its address
                timeout_keep_alive=_MAX_IDLE_SECONDS,
                http=cast(Any, partial(HttpConnection, bounds=self._bounds, audit=audit)),
                ws="none",
            )
        )

    async def start(self, address: str, *, shares_port: bool = False) -> str:
        """Listens on HOST:PORT (port 0: a free one); returns the address with the real port.

        With `shares_port`, other listeners with `shares_port` may use the same port. Raises OSError
        if the port is taken.
        """
        host, _, port = address.rpartition(":")
        listener = listen(host, int(port), backlog=2_048, reuse_port=shares_port)
        # asyncio does this for its own listeners only. Without it each event of a stream waits
        # 40 ms for an ACK.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._running = asyncio.create_task(self.serve(sockets=[listener]), name="http server")
        await self._is_listening.wait()
        return f"{host}:{listener.getsockname()[1]}"

    def yield_port(self) -> bool:
        """Leaves new connections to a later listener on the port, if there is one.

        This listener goes on; alone on the port, it gets them as before. Returns False if the port
        is not shared.
        """
        are_shared = [_yield_port(each) for each in self._listeners]
        return any(are_shared)

    async def stop(self, grace: float) -> None:
        """Accepts no more connections, then no more requests.

        Cancels requests that still run after `grace` seconds.
        """
        await self._stop_accepting()
        await asyncio.sleep(min(grace, _FIRST_REQUEST_SECONDS))
        self.config.timeout_graceful_shutdown = max(1, round(grace))
        self.should_exit = True
        await self._running
        cancelled = self.server_state.tasks
        if cancelled:
            await asyncio.wait(cancelled)

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
        self._is_listening.set()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def _stop_accepting(self) -> None:
        """Closes the listeners, once other processes that share their ports get new connections.

        The kernel resets connections that wait in a closed listener.
        """
        if self.yield_port():
            await asyncio.sleep(_HANDSHAKE_SECONDS)
        for _ in range(2):  # the loop accepts all waiting connections
            await asyncio.sleep(0)
        for each in self.servers:
            if isinstance(each, asyncio.Server):
                each.close()
        for acceptor in self._acceptors:
            acceptor.stop_accepting()
        for listener in self._listeners:
            listener.close()

    def _connection(self) -> asyncio.Protocol:
        kind: Any = self.config.http_protocol_class
        made: asyncio.Protocol = kind(
            config=self.config, server_state=self.server_state, app_state=self.lifespan.state
        )
        return made


def _yield_port(listener: socket.socket) -> bool:
    """Makes the kernel give new connections to another listener that shares the port.

    Of these listeners, the second gets them, in the order in which they began to listen; a single
    one keeps them. Returns False if the port is not shared.
    """
    program = ctypes.create_string_buffer(struct.pack("HBBI", 0x06, 0, 0, 1))  # BPF_RET, of index 1
    try:
        listener.setsockopt(
            socket.SOL_SOCKET,
            _SO_ATTACH_REUSEPORT_CBPF,
            struct.pack("HP", 1, ctypes.addressof(program)),
        )
    except OSError:  # also if the kernel lacks such programs
        return False
    return True


class _TlsAcceptor:
    """Accepts connections until `close`, and starts each when its TLS handshake has ended.

    asyncio's own servers report no connection before that, and allow a minute for a handshake.
    """

    def __init__(
        self,
        listener: socket.socket,
        make_connection: Callable[[], asyncio.Protocol],
        context: ssl.SSLContext,
        bounds: ConnectionBounds,
    ) -> None:
        self._listener = listener.dup()  # `_accept` closes it
        self._listener.setblocking(False)
        self._make_connection = make_connection
        self._context = context
        self._bounds = bounds
        self._handshakes: set[asyncio.Task[None]] = set()
        self._accepting = asyncio.create_task(self._accept(), name="tls acceptor")

    def stop_accepting(self) -> None:
        """Accepts no further connection; handshakes continue."""
        self._accepting.cancel()

    def close(self) -> None:
        """Accepts no further connection, and cancels the handshakes."""
        for task in (self._accepting, *self._handshakes):
            task.cancel()

    async def wait_closed(self) -> None:
        """Waits for the tasks that `close` cancels."""
        await asyncio.wait({self._accepting, *self._handshakes})

    async def _accept(self) -> None:
        with self._listener:
            while True:
                try:
                    accepted, address = await asyncio.get_running_loop().sock_accept(self._listener)
                except OSError as error:
                    await asyncio.sleep(_BUSY_SECONDS if error.errno in _BUSY else 0)
                else:
                    task = asyncio.create_task(self._shake_hands(accepted, network_of(address[0])))
                    self._handshakes.add(task)
                    task.add_done_callback(self._handshakes.discard)

    async def _shake_hands(self, accepted: socket.socket, address: str) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._bounds.enter(address, task.cancel)
        try:
            with suppress(OSError):  # TLS errors are OSErrors
                await asyncio.get_running_loop().connect_accepted_socket(
                    self._make_connection,
                    accepted,
                    ssl=self._context,
                    ssl_handshake_timeout=self._bounds.head_seconds,
                )
        finally:
            self._bounds.leave(address, task.cancel)
