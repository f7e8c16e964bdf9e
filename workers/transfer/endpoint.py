"""Combines the parts of one rank's KV transfers: sender, receiver and channels to other workers."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from functools import partial
from typing import Any, Final

import grpc
import grpc.aio

from ...proto.channel import PeerChannel, PeerServer
from ...proto.identity import PeerIdentity
from .frames import CONNECT_METHOD, PULL_METHOD, TransferError
from .receiver import KvReceiver
from .sender import KvSender

UNUSED_SECONDS: Final = 60.0
"""The time that a channel without a call stays open."""

_Handle = Callable[[AsyncIterator[bytes], grpc.aio.ServicerContext[bytes, bytes]], Any]
_Serve = Callable[[AsyncIterator[bytes]], AsyncGenerator[bytes, None]]


class KvEndpoint:
    """Serves and fetches KV cache for one rank. Lives in one event loop."""

    def __init__(self, sender: KvSender, identity: PeerIdentity) -> None:
        """Gives the receiver the sender's context and `stall_seconds`."""
        self.sender = sender
        self._channels = PeerChannels(identity)
        self.receiver = KvReceiver(
            sender.context, stall_seconds=sender.stall_seconds, channel=self._channels.get
        )

    def serve_on(self, server: PeerServer) -> None:
        """Adds the KV methods to a server that has not started yet."""
        add_bytes_method(server, PULL_METHOD, _answering(self.sender.serve))
        add_bytes_method(server, CONNECT_METHOD, _answering(self.sender.connections.serve))

    def channel(self, address: str) -> PeerChannel:
        """Returns the channel to another worker, as `PeerChannels.get` does."""
        return self._channels.get(address)

    def disconnect(self) -> None:
        """Ends the connections from other ranks, so that the server can stop; they reconnect."""
        self.sender.connections.disconnect()

    async def close(self) -> None:
        """Ends all connections to other ranks."""
        await self.receiver.connections.close()
        await self._channels.close()
        await self.sender.context.close()


class PeerChannels:
    """Keeps a channel to each peer, and closes channels that had no call for `unused_seconds`.

    A connection to a peer is a call, so a closed channel leads to a peer that has left or is rarely
    called. Lives in one event loop.
    """

    def __init__(self, identity: PeerIdentity, unused_seconds: float = UNUSED_SECONDS) -> None:
        self._identity = identity
        self._unused_seconds = unused_seconds
        self._channels: dict[str, PeerChannel] = {}  # by endpoint
        # The loop's time when the last call ended, or when the channel was made.
        self._unused_since: dict[str, float] = {}
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._replaced: set[PeerChannel] = set()  # those with calls that have not ended
        self._closing: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._channels)

    def get(self, endpoint: str) -> PeerChannel:
        """Returns the channel to a peer.

        Call it before the next await: a channel without a call may be closed. A channel that fails
        to connect is replaced, because its calls fail without a try for up to a second: a request
        gives up its KV cache after two fetches that fail. Earlier calls of that channel go on: a
        peer that stops finishes them, although nothing can connect to it any more.
        """
        channel = self._channels.get(endpoint)
        if channel is not None and channel.is_failing:
            self._close_after_calls(channel)
            channel = None
        if channel is None:
            channel = self._channels[endpoint] = PeerChannel(endpoint, self._identity)
            channel.on_unused = partial(self._await_use, endpoint)
            self._await_use(endpoint)
        return channel

    async def close(self) -> None:
        """Closes all channels, which ends their calls."""
        for timer in self._timers.values():
            timer.cancel()
        channels = [*self._channels.values(), *self._replaced]
        self._channels.clear()
        self._replaced.clear()
        self._unused_since.clear()
        self._timers.clear()
        await asyncio.gather(*(channel.close() for channel in channels), *self._closing)

    def _await_use(self, endpoint: str) -> None:
        """Closes the channel after a while, unless it has a call then or had one meanwhile."""
        if endpoint not in self._channels:  # `close` has ended the last call
            return
        loop = asyncio.get_running_loop()
        self._unused_since[endpoint] = loop.time()
        # One timer serves many calls: asyncio keeps cancelled timers for a long time.
        if endpoint not in self._timers:
            self._timers[endpoint] = loop.call_later(
                self._unused_seconds, self._close_unused, endpoint
            )

    def _close_unused(self, endpoint: str) -> None:
        del self._timers[endpoint]
        if self._channels[endpoint].num_calls:
            return
        loop = asyncio.get_running_loop()
        until = self._unused_since[endpoint] + self._unused_seconds
        if loop.time() < until:
            self._timers[endpoint] = loop.call_at(until, self._close_unused, endpoint)
            return
        del self._unused_since[endpoint]
        self._close(self._channels.pop(endpoint))

    def _close_after_calls(self, channel: PeerChannel) -> None:
        """Closes a replaced channel as soon as its calls have ended."""
        if not channel.num_calls:
            self._close(channel)
            return
        self._replaced.add(channel)
        channel.on_unused = partial(self._close_replaced, channel)

    def _close_replaced(self, channel: PeerChannel) -> None:
        if channel in self._replaced:  # otherwise `close` has ended its last call
            self._replaced.remove(channel)
            self._close(channel)

    def _close(self, channel: PeerChannel) -> None:
        """Begins to close a channel without a call."""
        closing = asyncio.create_task(channel.close())
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)


def add_bytes_method(server: PeerServer, name: str, handle: _Handle) -> None:
    """Adds a bidirectional streaming method without serializers; `name` is /SERVICE/METHOD."""
    service, method = name.strip("/").split("/")
    handler: grpc.RpcMethodHandler[bytes, bytes] = grpc.stream_stream_rpc_method_handler(handle)
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler(service, {method: handler}),)
    )


def _answering(serve: _Serve) -> _Handle:
    """Returns the handler of a stream whose frames `serve` answers."""

    async def answer(
        incoming: AsyncIterator[bytes], context: grpc.aio.ServicerContext[bytes, bytes]
    ) -> None:
        writing: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        writing.set_result(None)
        try:
            async with aclosing(serve(incoming)) as frames:
                # The next frame is prepared while the previous one is written.
                async for frame in frames:
                    await writing
                    writing = asyncio.ensure_future(context.write(frame))
                    await asyncio.sleep(0)  # lets the write begin
            await writing
        except TransferError as error:
            await asyncio.gather(writing, return_exceptions=True)
            await context.abort(grpc.StatusCode.ABORTED, str(error))
        finally:
            writing.cancel()
            await asyncio.gather(writing, return_exceptions=True)

    return answer
