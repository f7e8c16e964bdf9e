"""Bounds HTTP connections: the time to send a request, the time to read the answer, their number.

uvicorn bounds idle connections only. This module deals with bytes and time; the app gets whole
requests.

A connection is always in one of four states. It waits for its client in each but ANSWERING:

    state        until                                bounded by
    HEAD         the head of a request is complete    head_seconds
    ANSWERING    all whole requests are answered      the app; stall_seconds if the client reads not
    BODY         the body of a request is complete    request_seconds
    IDLE         a byte comes                         uvicorn's timeout_keep_alive
"""

import asyncio
import enum
import secrets
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

import httptools
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from ....proto.addresses import network_of
from ....proto.limits import (
    MAX_CONNECTIONS,
    MAX_CONNECTIONS_PER_ADDRESS,
    MAX_HEAD_BYTES,
    STALL_SECONDS,
)
from .audit import AuditLog

CONNECTION_STATE: Final = "connection"
"""The key of a request's state that holds the connection's name, which no other connection gets."""

_LEAST_PROGRESS_BYTES: Final = 4_096
"""A client that reads less of its answer in `stall_seconds` is disconnected."""

_PARSED_BYTES: Final = 256
"""Bytes that are parsed at a time. Parsing of a pipeline stops at the first request that has to
wait, so this bounds the number of requests that wait in memory.
"""

_PIPELINE_SECONDS: Final = 0.005
"""The least time between the starts of two pipelined requests of all connections. A client that
pipelines thousands of requests on each of its connections gets only a part of the event loop's
time.
"""

_INVALID: Final = "Invalid HTTP request received."

Abort: TypeAlias = Callable[[], object]
"""Ends a connection at once, before or after its TLS handshake. Two connections have two of them,
so it identifies the connection in ConnectionBounds.
"""


class _State(enum.Enum):
    HEAD = enum.auto()
    ANSWERING = enum.auto()
    BODY = enum.auto()
    IDLE = enum.auto()


@dataclass(kw_only=True)
class ConnectionBounds:
    """Holds the bounds of a server, and the connections that they apply to.

    An address stands for its network; see `network_of`.
    """

    stall_seconds: float = STALL_SECONDS
    # From the start of the connection, or from the first byte; the TLS handshake has as long.
    head_seconds: float = 10.0
    # For a whole request. Longer than the app waits for a body, so that the app answers first.
    request_seconds: float = 70.0
    idle_seconds: float = 300.0  # of a gRPC connection without a call; its client connects anew
    max_connections: int = MAX_CONNECTIONS
    max_per_address: int = MAX_CONNECTIONS_PER_ADDRESS  # HTTP connections, gRPC calls
    answers_give_way: bool = False  # a new connection may also end one that is being answered
    per_address: Counter[str] = field(default_factory=Counter)
    num_connections: int = 0
    # By address, the connections that wait for their clients; the longest waiting one first.
    idle: defaultdict[str, OrderedDict[Abort, None]] = field(
        default_factory=lambda: defaultdict(OrderedDict)
    )
    next_start: float = 0.0  # of a pipelined request, on the event loop's clock

    def enter(self, address: str, abort: Abort) -> None:
        """Counts a new connection, which waits for its client, and may end an older one.

        If its address has too many connections, the longest waiting one of the address ends. If the
        server has too many, the longest waiting one of the address with most connections ends.
        """
        self.num_connections += 1
        self.per_address[address] += 1
        self.set_idle(address, abort, True)
        if self.per_address[address] > self.max_per_address:
            self._end_longest_idle(address)
        elif self.num_connections > self.max_connections:
            self._end_longest_idle(max(self.idle, key=self.per_address.__getitem__))

    def leave(self, address: str, abort: Abort) -> None:
        """Forgets a connection that has ended."""
        self.set_idle(address, abort, False)
        self.num_connections -= 1
        self.per_address[address] -= 1
        if not self.per_address[address]:
            del self.per_address[address]

    def set_idle(self, address: str, abort: Abort, is_idle: bool) -> None:
        """Records that a connection waits for its client from now on, or no longer does."""
        idle = self.idle[address]
        idle.pop(abort, None)
        if is_idle:
            idle[abort] = None
        elif not idle:
            del self.idle[address]

    def next_pipelined(self, now: float) -> float:
        """Returns the time at which the next pipelined request of any connection may start."""
        self.next_start = max(self.next_start + _PIPELINE_SECONDS, now)
        return self.next_start

    def _end_longest_idle(self, address: str) -> None:
        abort = next(iter(self.idle[address]))
        abort()


class HttpConnection(HttpToolsProtocol):
    """Serves one connection, which may end for a new one while it waits for its client."""

    def __init__(
        self, *args: Any, bounds: ConnectionBounds, audit: AuditLog | None = None, **kwargs: Any
    ) -> None:
        """Takes uvicorn's arguments, the bounds of all connections of a server, and its audit log.

        The audit log gets the requests that cannot be parsed, which the app never sees.
        """
        super().__init__(*args, **kwargs)
        self._bounds = bounds
        self._audit = audit
        self._address = ""
        self._network = ""  # that the bounds count
        # The next part of a request that comes: HEAD, BODY, or IDLE if no request has begun.
        self._part = _State.HEAD
        self._timed: _State | None = None  # the state that the timer is for
        self._is_idle = True  # waits for its client; as last reported to the bounds
        self._timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None
        self._num_unwritten = 0  # bytes, when the write timer was set
        # Of a head or of trailers: bytes since the end of the last head or the last part of a body.
        self._head_bytes = 0
        self._name = secrets.token_hex(16)  # an address and a port belong to another client later
        self._unparsed = b""  # a pipeline, from the first unparsed request on
        # Nothing more is read: the connection ends with the answers to the requests so far.
        self._is_last = False
        self._answered: RequestResponseCycle | None = None  # the last request that the app got
        # The request that starts now has waited for the answer to the request before it.
        self._is_pipelined = False
        self._has_turn = True  # False while a pipelined request waits for its start

    def abort(self) -> None:
        """Ends the connection at once."""
        self.transport.abort()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._address = self.client[0] if self.client else ""
        self._network = network_of(self._address)
        self._bounds.enter(self._network, self.abort)
        self._update()

    def connection_lost(self, exc: Exception | None) -> None:
        self._bounds.leave(self._network, self.abort)
        for timer in (self._timer, self._write_timer):
            if timer is not None:
                timer.cancel()
        self._unparsed = b""
        if self._answered is not None and not self._answered.response_complete:
            # uvicorn notifies only the last request of a pipeline.
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
        if self._audit is not None:
            self._audit.failed("http", "400")
            self._audit.refused("http", self._address, "400")
        if self._state() is _State.ANSWERING:  # the whole requests are followed by other bytes
            self._is_last = True
            self.cycle.keep_alive = False
            return
        super().send_400_response(msg)
        self._watch_writes()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["state"][CONNECTION_STATE] = self._name
        self._part = _State.HEAD
        self._timed = None

    def on_headers_complete(self) -> None:
        if self.parser.should_upgrade():  # `_feed` parses the head again
            return
        self._head_bytes = 0
        self._part = _State.BODY
        self._timed = None
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._head_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():  # `_feed` parses the head again
            return
        self._head_bytes = 0
        self._part = _State.IDLE
        super().on_message_complete()

    def on_response_complete(self) -> None:
        self._watch_writes()
        if not self.pipeline:
            self.cycle.body.clear()  # the app may not have read it
        self._is_pipelined = True
        super().on_response_complete()
        self._is_pipelined = False
        self._unset_keepalive_if_required()  # our own timer bounds an idle connection
        self._parse()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_writes()
        self._update()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._watch_writes()
        self._update()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        """Starts the app for a request; a pipelined request waits for its turn."""
        if cycle.scope["http_version"] < "1.1":
            app = _unchunked(app, cycle)
        self._answered = cycle
        self._watch_writes()
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
        """Parses the received bytes, up to the first request that waits for another's answer."""
        start = 0
        size = len(self._unparsed)
        while start < size and not (self.pipeline or self._is_last or self.transport.is_closing()):
            part = self._unparsed[start : start + _PARSED_BYTES]
            start += len(part)
            self._head_bytes += len(part)
            self._feed(part)
            if self._head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
                self.send_400_response("The head of the request is too large.")
        self._unparsed = b"" if self._is_last else self._unparsed[start:]
        if self._unparsed:
            self.flow.pause_reading()
        self._update()

    def _feed(self, data: bytes) -> None:
        """Parses bytes. Ignores an offer to change the protocol, as RFC 9110, 7.8 allows.

        Java's clients offer HTTP/2 with each request until one is answered. httptools ends the
        request at the head of such an offer, so a new parser reads it without the offer.
        """
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as offer:
            if self.parser.get_method() == b"CONNECT":  # no offer: a tunnel
                self.send_400_response(_INVALID)
                return
            head = self._head_without_offer()
            self.parser = httptools.HttpRequestParser(self)
            self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn
            self._feed(head + data[offer.args[0] :])
        except httptools.HttpParserError:
            self.send_400_response(_INVALID)

    def _head_without_offer(self) -> bytes:
        version = self.parser.get_http_version().encode()
        lines = [b"%b %b HTTP/%b" % (self.parser.get_method(), self.url, version)]
        lines += [b"%b: %b" % (name, value) for name, value in self.headers if name != b"upgrade"]
        return b"\r\n".join((*lines, b"", b""))

    def _state(self) -> _State:
        is_answering = self.cycle is not None and not self.cycle.response_complete
        if is_answering and (self.pipeline or self._part is not _State.BODY):
            return _State.ANSWERING
        return self._part

    def _update(self) -> None:
        """Sets the timer of a new state, and reports to the bounds if the connection is idle."""
        state = self._state()
        is_answered = state is _State.ANSWERING and self._has_turn and not self.flow.write_paused
        is_idle = not is_answered or self._bounds.answers_give_way
        if state is self._timed and is_idle == self._is_idle:
            return
        if state is not self._timed:
            if self._timer is not None:
                self._timer.cancel()
            self._timer = self._timer_of(state)
        self._timed = state
        self._is_idle = is_idle
        self._bounds.set_idle(self._network, self.abort, is_idle)

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
        """Checks from now on that the client reads what is written, until it has read all.

        While an answer is written, nothing is checked: the buffer shows what the client has read
        only if nothing more comes into it. Writing pauses above the buffer's bound.
        """
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None
        is_written = self._answered is not None and not self._answered.response_complete
        if is_written and not (self.flow.write_paused or self.transport.is_closing()):
            return
        if num_bytes := self.transport.get_write_buffer_size():
            self._num_unwritten = num_bytes
            self._write_timer = self.loop.call_later(self._bounds.stall_seconds, self._check_writes)

    def _check_writes(self) -> None:
        num_bytes = self.transport.get_write_buffer_size()
        if num_bytes > max(self._num_unwritten - _LEAST_PROGRESS_BYTES, 0):
            self.transport.abort()
        else:
            self._watch_writes()


def _unchunked(app: ASGIApp, cycle: RequestResponseCycle) -> ASGIApp:
    """Wraps the app for a request of HTTP/1.0, which has no chunks.

    The end of the connection ends the body.
    """

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        has_length = True

        async def send_unchunked(message: Message) -> None:
            nonlocal has_length
            if message["type"] == "http.response.start":
                has_length = "content-length" in Headers(raw=message["headers"])
            if not has_length:
                # uvicorn compares the body with this length: here each part has the right one.
                cycle.chunked_encoding = False
                cycle.expected_content_length = len(message.get("body", b""))
            await send(message)

        await app(scope, receive, send_unchunked)

    return answer
