"""Bounds what HTTP connections may take: time to send a request, time to read the answer, and their number.

uvicorn bounds an idle connection only. What is here concerns bytes and time; the app sees whole requests.
"""

import asyncio
import secrets
from collections import Counter, OrderedDict, defaultdict
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from ...proto.limits import MAX_CONNECTIONS, MAX_CONNECTIONS_PER_ADDRESS, MAX_HEAD_BYTES, STALL_SECONDS
from .audit import AuditLog

CONNECTION_STATE: Final = "connection"
"""The key of a request's state under which the app finds a name that no other connection has or will have."""

_HEAD_SECONDS: Final = 10.0
"""For the head of a request, from the begin of the connection or from its first byte; and for TLS before it."""

_LEAST_PROGRESS_BYTES: Final = 4_096
"""That a client takes of its answer in `stall_seconds`, or it is cut."""


class Abortable(Protocol):
    """Is a connection, at whatever stage."""

    def abort(self) -> None:
        """Ends it at once."""


@dataclass(kw_only=True)
class ConnectionBounds:
    """Holds the bounds of a server, and its connections as far as the bounds need them."""

    stall_seconds: float = STALL_SECONDS
    head_seconds: float = _HEAD_SECONDS
    request_seconds: float = 70.0  # for a whole request; the app answers one whose body takes a minute
    idle_seconds: float = 300.0  # of a gRPC connection without a call; its client connects anew
    max_connections: int = MAX_CONNECTIONS
    max_per_address: int = MAX_CONNECTIONS_PER_ADDRESS  # HTTP connections, gRPC calls
    per_address: Counter[str] = field(default_factory=Counter)
    num_connections: int = 0
    # Without a whole request: of all addresses (under ""), and of each; the one that has been so for longest first.
    idle: defaultdict[str, OrderedDict[Abortable, None]] = field(default_factory=lambda: defaultdict(OrderedDict))

    def enter(self, address: str, connection: Abortable) -> None:
        """Counts a connection, which is idle. If that is one too many, the one that has been idle for longest ends, of
        its address or of all."""
        self.num_connections += 1
        self.per_address[address] += 1
        self.set_idle(address, connection, True)
        if self.per_address[address] > self.max_per_address:
            next(iter(self.idle[address])).abort()
        elif self.num_connections > self.max_connections:
            next(iter(self.idle[""])).abort()

    def leave(self, address: str, connection: Abortable) -> None:
        """Forgets a connection that has ended."""
        self.set_idle(address, connection, False)
        self.num_connections -= 1
        self.per_address[address] -= 1
        if not self.per_address[address]:
            del self.per_address[address]

    def set_idle(self, address: str, connection: Abortable, is_idle: bool) -> None:
        """Notes that a connection waits for a request from now on, or that it has one."""
        for name in ("", address):
            idle = self.idle[name]
            idle.pop(connection, None)
            if is_idle:
                idle[connection] = None
            elif not idle:
                del self.idle[name]


class HttpConnection(HttpToolsProtocol):
    """Serves one connection. When there are too many, one without a request gives way to a new one."""

    def __init__(self, *args: Any, bounds: ConnectionBounds, audit: AuditLog | None = None, **kwargs: Any) -> None:
        """Takes uvicorn's arguments, the bounds that all connections of a server share, and what is told of requests
        that are none."""
        super().__init__(*args, **kwargs)
        self._bounds = bounds
        self._audit = audit
        self._address = ""
        self._request_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None
        self._num_unwritten = 0  # bytes, when the timer was set
        self._has_resumed = False  # since then
        self._head_bytes = 0  # since the last head or part of a body: of a head, or of trailers
        self._name = secrets.token_hex(16)  # an address and a port belong to another client later

    def abort(self) -> None:
        """See Abortable."""
        self.transport.abort()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._address = self.client[0] if self.client else ""
        self._bounds.enter(self._address, self)
        self._time_request(self._bounds.head_seconds)

    def connection_lost(self, exc: Exception | None) -> None:
        self._bounds.leave(self._address, self)
        for timer in (self._request_timer, self._write_timer):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._head_bytes += len(data)
        super().data_received(data)
        if self._head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            self.send_400_response("The head of the request is too large.")
        # Bytes between two requests end uvicorn's timer of an idle connection.
        if self in self._bounds.idle[""] and self._request_timer is None and self.timeout_keep_alive_task is None:
            self._time_request(self._bounds.head_seconds)

    def send_400_response(self, msg: str) -> None:
        if self._audit is not None:  # the app never hears of it
            self._audit.failed("http", "400")
            self._audit.refused("http", self._address, "400")
        super().send_400_response(msg)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["state"][CONNECTION_STATE] = self._name
        self._time_request(self._bounds.head_seconds)

    def on_headers_complete(self) -> None:
        self._head_bytes = 0
        self._time_request(self._bounds.request_seconds)
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._head_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._head_bytes = 0
        self._time_request(None)
        self._bounds.set_idle(self._address, self, False)
        super().on_message_complete()

    def on_response_complete(self) -> None:
        if self.transport.get_write_buffer_size():
            self._watch_writes()
        if not self.pipeline:
            self._bounds.set_idle(self._address, self, True)
        super().on_response_complete()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_writes()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._has_resumed = True

    def _time_request(self, seconds: float | None) -> None:
        """Ends the connection after so long, unless it is called again."""
        if self._request_timer is not None:
            self._request_timer.cancel()
        self._request_timer = None if seconds is None else self.loop.call_later(seconds, self.transport.abort)

    def _watch_writes(self) -> None:
        """Looks from now on whether the client takes what is written, until it has taken all."""
        if self._write_timer is None:
            self._num_unwritten = self.transport.get_write_buffer_size()
            self._has_resumed = False
            self._write_timer = self.loop.call_later(self._bounds.stall_seconds, self._check_writes)

    def _check_writes(self) -> None:
        self._write_timer = None
        num_bytes = self.transport.get_write_buffer_size()
        if not num_bytes:
            return
        if not self._has_resumed and num_bytes > self._num_unwritten - _LEAST_PROGRESS_BYTES:
            self.transport.abort()
        else:
            self._watch_writes()
