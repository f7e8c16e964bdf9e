"""One rank's KV cache on its way: what it offers to others and what it fetches from them."""

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from typing import Any

import grpc
import grpc.aio

from ...proto.channel import peer_channel
from ..kv_cache.store import KvStore
from .receiver import KvReceiver
from .sender import FrameHook, KvSender
from .transports import Means
from .wire import CONNECT_METHOD, PULL_METHOD, TransferError

logger = logging.getLogger(__name__)

_Handle = Callable[[AsyncIterator[bytes], grpc.aio.ServicerContext[bytes, bytes]], Any]
_Serve = Callable[[AsyncIterator[bytes]], AsyncGenerator[bytes, None]]


class KvMover:
    """An exporter, a puller and the connections they need. Lives in one event loop."""

    def __init__(
        self,
        kv: KvStore,
        *,
        epoch: int,
        lease_seconds: float | None,
        stall_seconds: float,
        on_release: Callable[[int], None],
        means: Means,
        frame_hook: FrameHook | None = None,
    ) -> None:
        """As `Exporter` and `Puller` say."""
        for name in set(means.transports) - set(means.usable()):
            logger.warning("KV transport %s is not to be had here", name)
        self.kv = kv
        self.exporter = KvSender(
            kv,
            epoch=epoch,
            lease_seconds=lease_seconds,
            stall_seconds=stall_seconds,
            on_release=on_release,
            means=means,
            frame_hook=frame_hook,
        )
        self._channels: dict[str, grpc.aio.Channel] = {}
        self.puller = KvReceiver(kv, stall_seconds=stall_seconds, channel=self._channel, means=means)

    def serve_on(self, server: grpc.aio.Server) -> None:
        """Adds the KV endpoint to a server that has not started yet."""
        add_bytes_method(server, PULL_METHOD, _answering(self.exporter.serve))
        add_bytes_method(server, CONNECT_METHOD, _answering(self.exporter.acceptor.serve))

    def disconnect(self) -> None:
        """Ends the connections that others have to this rank, before the server stops; they come again."""
        self.exporter.acceptor.disconnect()

    async def close(self) -> None:
        """Ends all connections to others."""
        await self.puller.close()
        await asyncio.gather(*(channel.close() for channel in self._channels.values()))

    def _channel(self, endpoint: str) -> grpc.aio.Channel:
        if endpoint not in self._channels:
            self._channels[endpoint] = peer_channel(endpoint)
        return self._channels[endpoint]


def add_bytes_method(server: grpc.aio.Server, name: str, handle: _Handle) -> None:
    """Adds a method of streams both ways, without serializers; `name` is /SERVICE/METHOD."""
    service, method = name.strip("/").split("/")
    handler: grpc.RpcMethodHandler[bytes, bytes] = grpc.stream_stream_rpc_method_handler(handle)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {method: handler}),))


def _answering(serve: _Serve) -> _Handle:
    """The handler of a stream whose frames `serve` answers."""

    async def answer(incoming: AsyncIterator[bytes], context: grpc.aio.ServicerContext[bytes, bytes]) -> None:
        writing: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        writing.set_result(None)
        try:
            async with aclosing(serve(incoming)) as frames:
                async for frame in frames:  # made ready while the one before leaves
                    await writing
                    writing = asyncio.ensure_future(context.write(frame))
                    await asyncio.sleep(0)  # so that it begins
            await writing
        except TransferError as error:
            await asyncio.gather(writing, return_exceptions=True)
            await context.abort(grpc.StatusCode.ABORTED, str(error))
        finally:
            writing.cancel()
            await asyncio.gather(writing, return_exceptions=True)

    return answer
