"""Bounds what HTTP connections may take: time to send a request, time to read the answer, and their
number.

uvicorn bounds an idle connection only. What is here concerns bytes and time; the app sees whole
requests.

A connection is always in one of four states, and waits for its client in each but the second:

    state        until                                 bounded by
    HEAD         the head of a request is complete     head_seconds
    ANSWERING    all whole requests are answered       the app, and stall_seconds if the client does
    not read BODY         the body of a request is complete     request_seconds
    IDLE         a byte comes                          uvicorn's timeout_keep_alive
"""

import asyncio
import enum
import secrets
from collections import Counter, OrderedDict, defaultdict
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from ....proto.limits import (
    MAX_CONNECTIONS,
    MAX_CONNECTIONS_PER_ADDRESS,
    MAX_HEAD_BYTES,
    STALL_SECONDS,
)
from .audit import AuditLog

CONNECTION_STATE: Final = "connection"
"""The key of a request's state under which the app finds a name that no other connection has or
will have.
"""

_HEAD_SECONDS: Final = 10.0
"""For the head of a request, from the begin of the connection or from its first byte; and for TLS
before it.
"""

_LEAST_PROGRESS_BYTES: Final = 4_096
"""That a client takes of its answer in `stall_seconds`, or it is cut."""


class Abortable(Protocol):
    """Is a connection, at whatever stage."""

    def abort(self) -> None:
        """Ends it at once."""


_PARSED_BYTES: Final = 256
"""Bytes that are parsed at a time. A pipeline is parsed no further than to the first request that
has to wait, so this bounds the number of requests that wait in memory.
"""

_PIPELINE_SECONDS: Final = 0.005
"""Between the starts of two pipelined requests of all connections. A client that pipelines
thousands of requests on each of its connections takes a part of the event loop's time only.
"""


class _State(enum.Enum):
    HEAD = enum.auto()
    ANSWERING = enum.auto()
    BODY = enum.auto()
    IDLE = enum.auto()


@dataclass(kw_only=True)
class ConnectionBounds:
    """Holds the bounds of a server, and its connections as far as the bounds need them."""

    stall_seconds: float = STALL_SECONDS
    head_seconds: float = _HEAD_SECONDS
    request_seconds: float = (
        70.0  # for a whole request; the app answers one whose body takes a minute
    )
    idle_seconds: float = 300.0  # of a gRPC connection without a call; its client connects anew
    max_connections: int = MAX_CONNECTIONS
    max_per_address: int = MAX_CONNECTIONS_PER_ADDRESS  # HTTP connections, gRPC calls
    answers_give_way: bool = (
        False  # a connection that is being answered may be ended for a new one, too
    )
    per_address: Counter[str] = field(default_factory=Counter)
    num_connections: int = 0
    # Of each address, the connections that wait for their clients; the one that has waited for
    # longest first.
    idle: defaultdict[str, OrderedDict[Abortable, None]] = field(
        default_factory=lambda: defaultdict(OrderedDict)
    )
    next_start: float = 0.0  # of a pipelined request, on the event loop's clock

    def enter(self, address: str, connection: Abortable) -> None:
        """Counts a connection, which waits for its client. If that is one too many, of its address
        or of all, the one
        that has waited for longest ends: of that address, or of the address that has the most
        connections.
        """
        self.num_connections += 1
        self.per_address[address] += 1
        self.set_idle(address, connection, True)
        if self.per_address[address] > self.max_per_address:
            next(iter(self.idle[address])).abort()
        elif self.num_connections > self.max_connections:
            busiest = max(self.idle, key=self.per_address.__getitem__)
            next(iter(self.idle[busiest])).abort()

    def leave(self, address: str, connection: Abortable) -> None:
        """Forgets a connection that has ended."""
        self.set_idle(address, connection, False)
        self.num_connections -= 1
        self.per_address[address] -= 1
        if not self.per_address[address]:
            del self.per_address[address]

    def set_idle(self, address: str, connection: Abortable, is_idle: bool) -> None:
        """Notes that a connection waits for its client from now on, or that its client waits for
        the server.
        """
        idle = self.idle[address]
        idle.pop(connection, None)
        if is_idle:
            idle[connection] = None
        elif not idle:
            del self.idle[address]

    def next_pipelined(self, now: float) -> float:
        """Returns the time at which the next pipelined request of any connection may start."""
        self.next_start = max(self.next_start + _PIPELINE_SECONDS, now)
        return self.next_start


class HttpConnection(HttpToolsProtocol):
    """Serves one connection. When there are too many, one that waits for its client gives way to a
    new one.
    """

    def __init__(
        self, *args: Any, bounds: ConnectionBounds, audit: AuditLog | None = None, **kwargs: Any
    ) -> None:
        """Takes uvicorn's arguments, the bounds that all connections of a server share, and what is
        told of requests that are none.
        """
        super().__init__(*args, **kwargs)
        self._bounds = bounds
        self._audit = audit
        self._address = ""
        self._part = (
            _State.HEAD
        )  # what comes next from the client: HEAD, BODY, or IDLE if no request has begun
        self._timed: _State | None = None  # the state that the timer is for
        self._is_idle = True  # waits for its client, as the bounds know
        self._timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None
        self._num_unwritten = 0  # bytes, when the timer was set
        self._has_resumed = False  # since then
        self._head_bytes = 0  # since the last head or part of a body: of a head, or of trailers
        self._name = secrets.token_hex(16)  # an address and a port belong to another client later
        self._unparsed = b""  # a pipeline, from the first request on that is not parsed yet
        # nothing more is read: the connection ends with the answers to the requests so far
        self._is_last = False
        self._answered: RequestResponseCycle | None = (
            None  # the request that the app has been started for last
        )
        self._is_pipelined = (
            False  # the request that is started now has waited for the answer before it
        )
        self._has_turn = True  # a pipelined request waits for none

    def abort(self) -> None:
        """See Abortable."""
        self.transport.abort()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._address = self.client[0] if self.client else ""
        self._bounds.enter(self._address, self)
        self._update()

    def connection_lost(self, exc: Exception | None) -> None:
        self._bounds.leave(self._address, self)
        for timer in (self._timer, self._write_timer):
            if timer is not None:
                timer.cancel()
        self._unparsed = b""
        if self._answered is not None and not self._answered.response_complete:
            # uvicorn tells the last request of a pipeline only.
            self._answered.disconnected = True
            self._answered.message_event.set()
        super().connection_lost(exc)

    def eof_received(self) -> None:
        super().eof_received()
        self._watch_writes()  # asyncio closes the connection when all is written

    def data_received(self, data: bytes) -> None:
        if self._is_last:
            return
        self._unparsed += data
        if self._part is _State.IDLE:
            self._part = _State.HEAD
        self._parse()

    def send_400_response(self, msg: str) -> None:
        if self._audit is not None:  # the app never hears of it
            self._audit.failed("http", "400")
            self._audit.refused("http", self._address, "400")
        if self._state() is _State.ANSWERING:  # what follows the whole requests is no request
            self._is_last = True
            self.cycle.keep_alive = False
            return
        super().send_400_response(msg)
        self._watch_writes()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["state"][CONNECTION_STATE] = self._name
        self._part, self._timed = _State.HEAD, None

    def on_headers_complete(self) -> None:
        self._head_bytes = 0
        self._part, self._timed = _State.BODY, None
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._head_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._head_bytes = 0
        self._part = _State.IDLE
        super().on_message_complete()

    def on_response_complete(self) -> None:
        self._watch_writes()
        if not self.pipeline:
            self.cycle.body.clear()  # of a request whose body the app has not read
        self._is_pipelined = True
        super().on_response_complete()
        self._is_pipelined = False
        self._unset_keepalive_if_required()  # the timer is one of ours
        self._parse()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_writes()
        self._update()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._has_resumed = True
        self._update()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        """Starts the app for a request, for a pipelined one in its turn."""
        if cycle.scope["http_version"] < "1.1":
            app = _Unchunked(app, cycle)
        self._answered = cycle
        if self._is_pipelined:
            self._has_turn = False
            when = self._bounds.next_pipelined(self.loop.time())
            self.loop.call_at(when, self._start_pipelined, cycle, app)
        else:
            super()._start_asgi_task(cycle, app)

    def _start_pipelined(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._has_turn = True
        if not self.transport.is_closing():
            super()._start_asgi_task(cycle, app)
            self._update()

    def _parse(self) -> None:
        """Parses what has come, no further than to the first request that waits for the answer to
        another.
        """
        start, size = 0, len(self._unparsed)
        while start < size and not (self.pipeline or self._is_last or self.transport.is_closing()):
            part = self._unparsed[start : start + _PARSED_BYTES]
            start += len(part)
            self._head_bytes += len(part)
            super().data_received(part)
            if self._head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
                self.send_400_response("The head of the request is too large.")
        self._unparsed = b"" if self._is_last else self._unparsed[start:]
        if self._unparsed:
            self.flow.pause_reading()
        self._update()

    def _state(self) -> _State:
        is_answering = self.cycle is not None and not self.cycle.response_complete
        if is_answering and (self.pipeline or self._part is not _State.BODY):
            return _State.ANSWERING
        return self._part

    def _update(self) -> None:
        """Sets the timer of the state, if it is another state than before, and notes whether the
        connection waits for its client.
        """
        state = self._state()
        is_answered = state is _State.ANSWERING and self._has_turn and not self.flow.write_paused
        is_idle = not is_answered or self._bounds.answers_give_way
        if state is self._timed and is_idle == self._is_idle:
            return
        if state is not self._timed and self._timer is not None:
            self._timer.cancel()
        if state is not self._timed:
            self._timer = self._timer_of(state)
        self._timed, self._is_idle = state, is_idle
        self._bounds.set_idle(self._address, self, is_idle)

    def _timer_of(self, state: _State) -> asyncio.TimerHandle | None:
        match state:
            case _State.HEAD:
                return self.loop.call_later(self._bounds.head_seconds, self.abort)
            case _State.BODY:
                return self.loop.call_later(self._bounds.request_seconds, self.abort)
            case _State.IDLE:
                return self.loop.call_later(
                    self.timeout_keep_alive, self.timeout_keep_alive_handler
                )
            case _:
                return None

    def _watch_writes(self) -> None:
        """Looks from now on whether the client takes what is written, until it has taken all."""
        if self._write_timer is None and self.transport.get_write_buffer_size():
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


class _Unchunked:
    """Answers a request of HTTP/1.0, which knows no chunks: the end of the connection ends the
    body.
    """

    def __init__(self, app: ASGIApp, cycle: RequestResponseCycle) -> None:
        self._app = app
        self._cycle = cycle

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        has_length = True

        async def send_unchunked(message: Message) -> None:
            nonlocal has_length
            if message["type"] == "http.response.start":
                has_length = "content-length" in Headers(raw=message["headers"])
            if not has_length:  # for uvicorn, each part of the body is as long as it was to be
                self._cycle.chunked_encoding = False
                self._cycle.expected_content_length = len(message.get("body", b""))
            await send(message)

        await self._app(scope, receive, send_unchunked)
