"""One rank's KV cache on its way: what it offers to others and what it fetches from them, over gRPC."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing

import grpc
import grpc.aio

from ...proto.channel import peer_channel
from ..engine.plan import KvStore
from .export import Exporter, FrameHook
from .pull import Puller
from .wire import PULL_METHOD, TransferError


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
        frame_hook: FrameHook | None = None,
    ) -> None:
        """As `Exporter` and `Puller` say."""
        self.kv = kv
        self.exporter = Exporter(
            kv,
            epoch=epoch,
            lease_seconds=lease_seconds,
            stall_seconds=stall_seconds,
            on_release=on_release,
            frame_hook=frame_hook,
        )
        self._channels: dict[str, grpc.aio.Channel] = {}
        self.puller = Puller(kv, stall_seconds=stall_seconds, channel=self._channel)

    def serve_on(self, server: grpc.aio.Server) -> None:
        """Adds the KV endpoint to a server that has not started yet."""
        service, method = PULL_METHOD.strip("/").split("/")
        # No serializers: frames are bytes.
        pull: grpc.RpcMethodHandler[bytes, bytes] = grpc.stream_stream_rpc_method_handler(self._pull)
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {method: pull}),))

    async def close(self) -> None:
        """Ends all connections to others."""
        await asyncio.gather(*(channel.close() for channel in self._channels.values()))

    async def _pull(
        self, request_iterator: AsyncIterator[bytes], context: grpc.aio.ServicerContext[bytes, bytes]
    ) -> None:
        try:
            async with aclosing(self.exporter.serve(request_iterator)) as frames:
                async for frame in frames:
                    await context.write(frame)
        except TransferError as error:
            await context.abort(grpc.StatusCode.ABORTED, str(error))

    def _channel(self, endpoint: str) -> grpc.aio.Channel:
        if endpoint not in self._channels:
            self._channels[endpoint] = peer_channel(endpoint)
        return self._channels[endpoint]
