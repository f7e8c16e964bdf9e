"""Keeps the connections of ranks that transfer KV cache.

Two ranks choose their transport when they first meet, from the capabilities of both; the choice is
static. A connection is a stream that lives as long as both ranks do. If the transport cannot
connect or breaks, transfers go over gRPC for RETRY_SECONDS; then the transport is tried again.
Neither case is an error of a transfer.
"""

import asyncio
import itertools
import logging
import secrets
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Final

import grpc.aio

from ...proto.channel import PeerChannel, PeerStream
from .connector import CONNECT_SECONDS, KvConnector, TransferContext
from .frames import (
    CONNECT_METHOD,
    CONNECTION_LOST,
    Announce,
    Message,
    Open,
    TransferError,
    TransferKey,
    TransportError,
    decode,
    encode,
)
from .registry import capabilities, choose, find_connector

logger = logging.getLogger(__name__)

CONNECT_WAIT_SECONDS: Final = 0.5
"""The time that transfers wait for a first connection before they go over gRPC."""

RETRY_SECONDS: Final = 10.0
"""The time that transfers use gRPC after a transport has failed."""

_FORGET_SECONDS: Final = 600.0  # a failure is remembered for this time

KvCall = PeerStream[bytes, bytes]


class Connection:
    """Connects a receiver to one sender; lives as long as its task."""

    def __init__(
        self, endpoint: str, call: KvCall, context: TransferContext, *, awaited: bool
    ) -> None:
        self.endpoint = endpoint
        self.awaited = awaited  # transfers wait for this connection up to CONNECT_WAIT_SECONDS
        self.began = context.clock()
        self.transport = ""  # set from when the connection is settled until its end
        self.connector: KvConnector | None = None  # None: gRPC
        self.settled = asyncio.Event()  # the transport is known, or the connection has ended
        self.key = TransferKey(transfer_id=secrets.token_bytes(16), epoch=0)
        self.streams = itertools.count(1)  # numbers of the transfers
        self._call = call
        self._context = context
        self.task = asyncio.create_task(self._run())
        # As a callback, because a task that is cancelled before it began never runs its code.
        self.task.add_done_callback(self._end)

    async def _run(self) -> None:
        try:
            await self._connect()
            while True:
                announcement = await self._receive(None)
                if not isinstance(announcement, Announce) or self.connector is None:
                    raise TransferError("KV connection out of order")
                await self.connector.deliver(announcement)
        except (TransferError, TimeoutError, OSError, ValueError) as error:
            level = logging.INFO if self.transport else logging.WARNING  # a peer may leave
            # Logged as text: a kept log record would keep the exception alive, and with it the
            # mapped memory.
            logger.log(
                level,
                "the KV connection to %s has ended: %s",
                self.endpoint,
                str(error) or "timed out",
            )

    async def _connect(self) -> None:
        hello = Open(layout=self._context.kv.layout.digest, transports=capabilities(self._context))
        with _grpc_errors():
            async with asyncio.timeout(CONNECT_SECONDS):
                await self._call.write(encode(self.key, hello))
        answer = await self._receive(CONNECT_SECONDS)
        if not isinstance(answer, Open) or not answer.transports.keys() <= hello.transports.keys():
            raise TransferError("KV connection out of order")
        for name, description in list(answer.transports.items())[:1]:
            connector = find_connector(name)
            if connector is None or not isinstance(description, dict):
                raise TransferError(f"KV transport {name} without a description")
            async with asyncio.timeout(CONNECT_SECONDS):
                self.connector = await connector.connect(self._context, name, description)
        self.transport = self.connector.name if self.connector else "grpc"
        logger.info("KV cache from %s goes over %s", self.endpoint, self.transport)
        self.settled.set()

    async def _receive(self, timeout: float | None) -> Message:
        """Returns the sender's next message; the first one determines the epoch.

        Raises TransferError.
        """
        with _grpc_errors():
            async with asyncio.timeout(timeout):  # a timeout cancels the read, which ends the call
                frame = await self._call.read()
        if not isinstance(frame, bytes):
            raise TransferError("KV stream broke")  # the sender has ended it
        key, message, _ = decode(frame)
        if self.key.epoch == 0:
            self.key = TransferKey(transfer_id=self.key.transfer_id, epoch=key.epoch)
        if key != self.key:
            raise TransferError("KV frame of another connection")
        return message

    def _end(self, task: "asyncio.Task[None]") -> None:
        self.transport = ""
        self.settled.set()
        self._call.cancel()
        if self.connector:
            self.connector.close()


class ReceiverConnections:
    """Holds this rank's connections to the ranks that it pulls from, by endpoint."""

    def __init__(self, context: TransferContext, channel: Callable[[str], PeerChannel]) -> None:
        self.channel = channel  # to an endpoint
        self._context = context
        self._open: dict[str, Connection] = {}
        # By endpoint, the time when the last connection to it ended.
        self._failed: dict[str, float] = {}

    @property
    def transports(self) -> dict[str, str]:
        """Returns the transport of each connected endpoint, in the order of the endpoints."""
        return {
            endpoint: one.transport for endpoint, one in sorted(self._open.items()) if one.transport
        }

    def connect(self, endpoint: str) -> None:
        """Begins to connect, unless connected already or failed in the last RETRY_SECONDS."""
        now = self._context.clock()
        self._failed = {
            other: failed
            for other, failed in self._failed.items()
            if now - failed < _FORGET_SECONDS
        }
        if (
            endpoint in self._open
            or now - self._failed.get(endpoint, -RETRY_SECONDS) < RETRY_SECONDS
        ):
            return
        call: KvCall = self.channel(endpoint).stream_stream(CONNECT_METHOD)()
        connection = Connection(endpoint, call, self._context, awaited=endpoint not in self._failed)
        self._open[endpoint] = connection
        connection.task.add_done_callback(lambda task: self.drop(connection))

    async def get(self, endpoint: str) -> Connection | None:
        """Returns the connection once its transport is known; None to use gRPC.

        Returns None if gRPC was chosen or the transport is not known within CONNECT_WAIT_SECONDS.
        """
        connection = self._open.get(endpoint)
        if connection is None:
            return None
        seconds = CONNECT_WAIT_SECONDS - (self._context.clock() - connection.began)
        if connection.awaited and not connection.settled.is_set() and seconds > 0:
            with suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await connection.settled.wait()
        return connection if connection.transport and connection.connector else None

    def drop(self, connection: Connection) -> None:
        """Ends a connection that has failed. Idempotent."""
        if self._open.get(connection.endpoint) is connection:
            del self._open[connection.endpoint]
            self._failed[connection.endpoint] = self._context.clock()
        connection.task.cancel()

    async def close(self) -> None:
        """Ends all connections."""
        ending = list(self._open.values())
        for connection in ending:
            self.drop(connection)
        await asyncio.gather(*(connection.task for connection in ending), return_exceptions=True)


class SenderConnections:
    """Holds the connections of other ranks that pull from this one, by connection id."""

    def __init__(self, context: TransferContext, *, epoch: int) -> None:
        self._context = context
        self._epoch = epoch
        self._connectors: dict[bytes, KvConnector | None] = {}  # None: gRPC
        self._outboxes: dict[bytes, asyncio.Queue[Announce | None]] = {}  # None: the end

    def connector(self, connection_id: bytes) -> KvConnector:
        """Returns a connection's transport. Raises TransportError if the connection has ended."""
        connector = self._connectors.get(connection_id)
        if connector is None:
            raise TransportError(CONNECTION_LOST)
        return connector

    def disconnect(self) -> None:
        """Ends all connections; the receivers reconnect when they pull again."""
        for outbox in self._outboxes.values():
            outbox.put_nowait(None)

    async def serve(self, incoming: AsyncIterable[bytes]) -> AsyncGenerator[bytes, None]:
        """Answers one Connect stream until the receiver ends it.

        Raises TransferError, or the transport's own exceptions, for any other end.
        """
        frames = aiter(incoming)
        key, hello = await receive(frames, CONNECT_SECONDS)
        if not isinstance(hello, Open) or key.transfer_id in self._connectors:
            raise TransferError("KV connection out of order")
        if hello.layout != self._context.kv.layout.digest:
            raise TransferError("KV layouts differ")
        key = TransferKey(transfer_id=key.transfer_id, epoch=self._epoch)
        # The transport bounds its length: it limits the spans that wait.
        outbox = self._outboxes[key.transfer_id] = asyncio.Queue()
        self._connectors[key.transfer_id] = None
        tasks: list[asyncio.Task[None]] = []
        try:
            connector = await self._listen(hello, outbox.put_nowait)
            self._connectors[key.transfer_id] = connector
            described = {connector.name: connector.description()} if connector else {}
            tasks = [asyncio.create_task(_wait_for_end(frames, key))]
            if connector:
                tasks.append(asyncio.create_task(connector.run()))
            for task in tasks:
                task.add_done_callback(lambda task: outbox.put_nowait(None))
            yield encode(key, Open(layout=hello.layout, transports=described))
            while (announcement := await outbox.get()) is not None:
                yield encode(key, announcement)
            for task in tasks:
                if task.done() and not task.cancelled():
                    task.result()  # raises the exception that has ended the task
        finally:
            for task in tasks:
                task.cancel()
            del self._outboxes[key.transfer_id]
            if ended := self._connectors.pop(key.transfer_id):
                ended.close()

    async def _listen(
        self, hello: Open, announce: Callable[[Announce], None]
    ) -> KvConnector | None:
        chosen = choose(self._context, hello.transports)
        if chosen is None:
            return None
        name, connector = chosen
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                return await connector.listen(self._context, name, announce)
        except (OSError, ValueError, TransferError, TimeoutError) as error:
            logger.warning("no KV transport %s: %s", name, str(error) or "timed out")
            return None


async def receive(
    incoming: AsyncIterator[bytes], timeout: float | None, key: TransferKey | None = None
) -> tuple[TransferKey, Message | None]:
    """Returns the receiver's next message and its key, which must be `key` if given.

    With `key` given, returns None as message if the receiver has ended the stream. Raises
    TransferError for an unreadable message and after `timeout` seconds without one.
    """
    try:
        async with asyncio.timeout(timeout):
            # `anext` gets no default for the end: with one, its cancellation raises RuntimeError.
            found, message, _ = decode(await anext(incoming))
    except (StopAsyncIteration, TimeoutError) as error:
        if key is not None and isinstance(error, StopAsyncIteration):
            return key, None
        raise TransferError("KV receiver fell silent") from error
    if key not in (None, found):
        raise TransferError("KV frame of another transfer")
    return found, message


async def _wait_for_end(incoming: AsyncIterator[bytes], key: TransferKey) -> None:
    """Returns when the receiver ends the stream. Raises TransferError for any further message."""
    if (await receive(incoming, None, key))[1] is not None:
        raise TransferError("KV connection out of order")


@contextmanager
def _grpc_errors() -> Iterator[None]:
    """Translates the errors of a gRPC call to TransferError."""
    try:
        yield
    except (grpc.aio.AioRpcError, asyncio.InvalidStateError) as error:
        raise TransferError("KV stream broke") from error
