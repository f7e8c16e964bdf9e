"""Implements the gRPC connections between Tandem's processes; refuses all other clients.

A call costs each side two hashes of some bytes (`python -m tandem.tests.bench.engine.identity`); a
message of a stream costs nothing. One file because both sides must agree on the proof.
"""

import asyncio
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any, Final, Generic, Self, TypeAlias, TypeVar

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from .identity import PeerIdentity
from .limits import MAX_CONNECTIONS, MAX_INTERNAL_MESSAGE_BYTES
from .strangers import StrangerSweep

SILENCE_SECONDS: Final = 2.5
"""A worker without traffic for this time counts as frozen or disconnected, so that its streams
continue elsewhere within three seconds.
"""

_PATIENT_SECONDS: Final = 10.0  # for peers whose loss is also noticed in another way

PEER_OPTIONS: Final = (
    # Frames have 1 MiB, the message of a step has little more than 16 MiB at most.
    ("grpc.max_receive_message_length", MAX_INTERNAL_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_INTERNAL_MESSAGE_BYTES),
    # Channels may send pings at any rate, see `_keepalive`.
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 300),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 300),
    # A worker that comes back is soon found again. The first option is the timeout of one try.
    ("grpc.min_reconnect_backoff_ms", 2_000),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    # A new channel to a worker that has come back does not wait for an older channel's backoff.
    ("grpc.use_local_subchannel_pool", 1),
    # A port that is taken is an error, and workers use no proxy of the environment.
    ("grpc.so_reuseport", 0),
    ("grpc.enable_http_proxy", 0),
)

HANDSHAKE_SECONDS: Final = 10.0
"""Timeout of a client's handshake of HTTP/2 or TLS."""

_IDLE_SECONDS: Final = 300.0  # a server closes a connection without calls; peers reconnect

PROOF_SECONDS: Final = 10.0
"""Timeout of a peer's proof. A frozen peer is noticed earlier, by its silence."""

_PROOF: Final = "tandem-proof-bin"  # metadata of a call, and of its answer
_NOT_OURS: Final = "not a peer of this service"
_NO_MESSAGE: Final = "not a message of this method"

_Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"  # grpc's classes are not generic at runtime
_Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
Request = TypeVar("Request")
Response = TypeVar("Response")


class PeerChannel:
    """Holds a channel to the process of this service at HOST:PORT, for stubs.

    The creator closes it. Every call proves that this process belongs to the service. Answers of
    another process are never seen: the call raises AioRpcError UNAUTHENTICATED.
    """

    def __init__(
        self, address: str, identity: PeerIdentity, silence_seconds: float = SILENCE_SECONDS
    ) -> None:
        """Connects on the first call.

        A frozen or disconnected peer is noticed within `silence_seconds`, a dead one at once by its
        socket.
        """
        self.num_calls = 0  # calls that have not ended
        self.on_unused: Callable[[], object] = lambda: None  # called when the last call has ended
        self._address = address
        self._identity = identity
        options = PEER_OPTIONS + _keepalive(silence_seconds)
        if identity.tls is None:
            self._channel = grpc.aio.insecure_channel(address, options)
        else:
            tls = identity.tls
            credentials = grpc.ssl_channel_credentials(tls.ca, tls.key, tls.certificate)
            # The certificate is for a fixed name, because the addresses of peers change.
            named = ("grpc.ssl_target_name_override", tls.name)
            self._channel = grpc.aio.secure_channel(address, credentials, (*options, named))

    @property
    def is_failing(self) -> bool:
        """Returns True if the last try to connect failed: calls fail at once until the next try."""
        return bool(self._channel.get_state() is grpc.ChannelConnectivity.TRANSIENT_FAILURE)

    async def close(self) -> None:
        """Ends all calls. Idempotent."""
        await self._channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    def stream_stream(
        self,
        method: str,
        request_serializer: Callable[[Request], bytes] | None = None,
        response_deserializer: Callable[[bytes], Response] | None = None,
        **_: object,
    ) -> "Callable[..., PeerStream[Request, Response]]":
        """Returns a function that opens streams of a method, for stubs."""
        opens = self._channel.stream_stream(method, request_serializer, response_deserializer)

        def call(requests: AsyncIterable[Request] | None = None) -> PeerStream[Request, Response]:
            proof = self._identity.make_proof(method, self._address)
            stream = PeerStream(opens, requests, proof, self._identity)
            self.num_calls += 1
            stream.add_done_callback(self._ended)
            return stream

        return call

    def unary_unary(
        self,
        method: str,
        request_serializer: Callable[[Request], bytes] | None = None,
        response_deserializer: Callable[[bytes], Response] | None = None,
        **_: object,
    ) -> Callable[..., Awaitable[Response]]:
        """Returns a function that calls a method, for stubs."""
        calls = self._channel.unary_unary(method, request_serializer, response_deserializer)

        async def call(request: Request, timeout: float | None = None) -> Response:
            proof = self._identity.make_proof(method, self._address)
            self.num_calls += 1
            try:
                made = calls(request, timeout=timeout, metadata=grpc.aio.Metadata((_PROOF, proof)))
                response = await made
                if not _is_answered(await made.initial_metadata(), proof, self._identity):
                    raise _not_ours()
                return response
            finally:
                self._ended()

        return call

    def _ended(self) -> None:
        self.num_calls -= 1
        if not self.num_calls:
            self.on_unused()


class PeerStream(Generic[Request, Response]):
    """Holds one bidirectional stream, like a call of grpc.aio.

    It sends and returns nothing before the peer has proved itself. After that it adds no cost to a
    message.
    """

    def __init__(
        self,
        opens: "grpc.aio.StreamStreamMultiCallable[Request, Response]",
        requests: AsyncIterable[Request] | None,
        proof: bytes,
        identity: PeerIdentity,
    ) -> None:
        self.read: Callable[[], Awaitable[Response | object]] = self._read_first
        self.write: Callable[[Request], Awaitable[None]] = self._write_first
        sent = None if requests is None else self._send_later(requests)
        self._call = opens(sent, metadata=grpc.aio.Metadata((_PROOF, proof)))
        self._proof = proof
        self._identity = identity
        self._proved = asyncio.ensure_future(self._prove())
        self._proved.add_done_callback(lambda proved: proved.cancelled() or proved.exception())

    async def done_writing(self) -> None:
        """Tells the peer that no more messages will be written. Idempotent."""
        await self._call.done_writing()

    async def code(self) -> grpc.StatusCode:
        """Returns the call's status code once the call has ended."""
        return await self._call.code()

    async def details(self) -> str:
        """Returns the text of the call's status once the call has ended."""
        return await self._call.details()

    def cancel(self) -> None:
        """Ends the call. Idempotent."""
        self._call.cancel()

    def add_done_callback(self, callback: Callable[[], None]) -> None:
        """Calls `callback` when the call has ended, for any reason."""
        self._call.add_done_callback(lambda _call: callback())

    async def _prove(self) -> None:
        """Raises AioRpcError unless the peer proves that it belongs to this service."""
        try:
            async with asyncio.timeout(PROOF_SECONDS):
                if not _is_answered(
                    await self._call.initial_metadata(), self._proof, self._identity
                ):
                    await self._call.read()  # raises the call's own error if it has failed
                    raise _not_ours()
        except TimeoutError as error:
            self._call.cancel()
            raise _not_ours() from error
        except BaseException:
            self._call.cancel()
            raise
        self.read = self._call.read
        self.write = self._call.write

    async def _read_first(self) -> Response | object:
        await asyncio.shield(self._proved)
        return await self._call.read()

    async def _write_first(self, request: Request) -> None:
        await asyncio.shield(self._proved)
        await self._call.write(request)

    async def _send_later(self, requests: AsyncIterable[Request]) -> AsyncIterator[Request]:
        await asyncio.wait([self._proved])
        # If the proof failed, the read raises the error.
        if not self._proved.cancelled() and not self._proved.exception():
            async for request in requests:
                yield request


def patient_channel(address: str, identity: PeerIdentity) -> PeerChannel:
    """Returns a channel to a peer whose silence the streams detect themselves."""
    return PeerChannel(address, identity, _PATIENT_SECONDS)


def is_silence(error: grpc.aio.AioRpcError) -> bool:
    """Returns True if a call ended because the peer was silent.

    The peer, or the network, may be frozen.
    """
    return "ping timeout" in (error.details() or "")


class PeerServer:
    """Serves other processes of the service only; the owner adds services and a port.

    Other clients get UNAUTHENTICATED before a byte of a message is read. Their connections are
    closed before they use up the connections of peers. The owner starts and stops the server.
    """

    def __init__(self, identity: PeerIdentity, max_connections: int = MAX_CONNECTIONS) -> None:
        self._sweep = StrangerSweep(max_connections)
        self._guard = _Guard(identity, self._sweep)
        self._tls = identity.tls
        options = PEER_OPTIONS + _keepalive(_PATIENT_SECONDS)
        options += (
            ("grpc.server_handshake_timeout_ms", round(1_000 * HANDSHAKE_SECONDS)),
            ("grpc.max_connection_idle_ms", round(1_000 * _IDLE_SECONDS)),
            ("grpc.max_allowed_incoming_connections", self._sweep.max_connections),
        )
        self._server = grpc.aio.server(options=options, interceptors=(self._guard,))

    def add_generic_rpc_handlers(self, handlers: Sequence[grpc.GenericRpcHandler]) -> None:
        """Adds services, as generated code does."""
        self._server.add_generic_rpc_handlers(handlers)

    def add_registered_method_handlers(
        self, service: str, handlers: Mapping[str, _Handler]
    ) -> None:
        """Adds the methods of a service, as generated code does."""
        self._server.add_registered_method_handlers(service, handlers)

    def bind(self, host: str, port: int) -> str:
        """Binds one interface and port, 0 for any free port; returns HOST:PORT for callers.

        Callers must use exactly this address. Raises OSError if the port is taken.
        """
        try:
            address = f"{host}:{self._add_port(f'{host}:{port}')}"
        except RuntimeError as error:
            raise OSError(f"cannot bind {host}:{port}") from error
        self.answer_to(address)
        return address

    def _add_port(self, address: str) -> int:
        if self._tls is None:
            port = self._server.add_insecure_port(address)
        else:
            shown = [(self._tls.key, self._tls.certificate)]
            credentials = grpc.ssl_server_credentials(shown, self._tls.ca, require_client_auth=True)
            port = self._server.add_secure_port(address, credentials)
        self._sweep.ports.add(port)
        return port

    def answer_to(self, address: str) -> None:
        """Also accepts calls to this HOST:PORT, the address of a proxy that forwards them here."""
        self._guard.targets.append(address)

    async def start(self) -> None:
        """Starts to serve."""
        await self._server.start()
        self._sweep.start()

    async def stop(self, grace: float) -> None:
        """Ends all calls, after at most `grace` seconds."""
        await self._server.stop(grace)
        self._sweep.stop()


class _Guard(grpc.aio.ServerInterceptor):
    """Accepts calls that prove to be of the service, and answers with a proof."""

    def __init__(self, identity: PeerIdentity, sweep: StrangerSweep) -> None:
        self.targets: list[str] = []
        self._identity = identity
        self._sweep = sweep

    async def intercept_service(
        self, continuation: Any, handler_call_details: grpc.HandlerCallDetails
    ) -> "_Handler | None":
        proof = next(
            (value for key, value in handler_call_details.invocation_metadata if key == _PROOF), b""
        )
        if not isinstance(proof, bytes):
            return _REFUSE
        if not self._identity.accepts(proof, handler_call_details.method, self.targets):
            return _REFUSE
        handler: _Handler | None = await continuation(handler_call_details)
        answer = ((_PROOF, self._identity.answer(proof)),)
        return handler and _answering(handler, answer, self._sweep.admit)


async def _refuse(requests: object, context: _Context) -> None:
    await context.abort(grpc.StatusCode.UNAUTHENTICATED, _NOT_OURS)


# Registered as a stream for every method, because a stream's messages are only read on demand.
_REFUSE: "Final[_Handler]" = grpc.stream_stream_rpc_method_handler(_refuse)


def _answering(
    handler: _Handler, answer: tuple[tuple[str, bytes]], admit: Callable[[str], None]
) -> _Handler:
    """Returns a handler that first sends the metadata and reports the peer to `admit`.

    It is a coroutine function. It parses messages itself, because grpc answers UNKNOWN to
    unreadable bytes, and reveals the exception.
    """
    behave: Any = handler.stream_stream or handler.unary_unary
    make = (
        grpc.stream_stream_rpc_method_handler
        if handler.stream_stream
        else grpc.unary_unary_rpc_method_handler
    )
    parse: Any = handler.request_deserializer

    async def answer_first(request: Any, context: _Context) -> Any:
        admit(context.peer())
        await context.send_initial_metadata(answer)
        if parse is not None:
            messages = _Messages(request, parse, context)
            request = messages if handler.stream_stream else await messages.parse(request)
        return await behave(request, context)

    return make(answer_first, None, handler.response_serializer)


class _Messages:
    """Parses the messages of a stream; ends the call if one is unreadable."""

    def __init__(self, incoming: Any, parse: Callable[[bytes], Any], context: _Context) -> None:
        self._incoming = incoming
        self._parse = parse
        self._context = context

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Any:
        return await self.parse(await anext(self._incoming))

    async def parse(self, data: bytes) -> Any:
        try:
            return self._parse(data)
        except DecodeError:
            await self._context.abort(grpc.StatusCode.INVALID_ARGUMENT, _NO_MESSAGE)


def _is_answered(
    metadata: "grpc.aio.Metadata | None", proof: bytes, identity: PeerIdentity
) -> bool:
    answer = metadata.get(_PROOF) if metadata else None
    return isinstance(answer, bytes) and identity.is_answer(answer, proof)


def _not_ours() -> grpc.aio.AioRpcError:
    none = grpc.aio.Metadata()
    return grpc.aio.AioRpcError(grpc.StatusCode.UNAUTHENTICATED, none, none, _NOT_OURS)


def _keepalive(seconds: float) -> tuple[tuple[str, int], ...]:
    """Returns options that close a connection after `seconds` without traffic.

    A ping is sent after 0.4 of that time.
    """
    timeout = round(600 * seconds)
    return (
        ("grpc.keepalive_time_ms", round(400 * seconds)),
        ("grpc.keepalive_timeout_ms", timeout),
        # By default a minute, and then the option above has no effect.
        ("grpc.http2.ping_timeout_ms", timeout),
    )
