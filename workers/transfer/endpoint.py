"""Joins what one rank needs to move KV cache: its sender, its receiver and the channels to other workers."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from typing import Any

import grpc
import grpc.aio

from ...proto.channel import PeerChannel, PeerServer
from ...proto.identity import PeerIdentity
from .frames import CONNECT_METHOD, PULL_METHOD, TransferError
from .receiver import KvReceiver
from .sender import KvSender

_Handle = Callable[[AsyncIterator[bytes], grpc.aio.ServicerContext[bytes, bytes]], Any]
_Serve = Callable[[AsyncIterator[bytes]], AsyncGenerator[bytes, None]]


class KvEndpoint:
    """Serves and fetches KV cache for one rank. Lives in one event loop."""

    def __init__(self, sender: KvSender, identity: PeerIdentity) -> None:
        """The receiver has the sender's context and its `stall_seconds`."""
        self.sender = sender
        self._identity = identity
        self._channels: dict[str, PeerChannel] = {}
        self.receiver = KvReceiver(sender.context, stall_seconds=sender.stall_seconds, channel=self._channel)

    def serve_on(self, server: PeerServer) -> None:
        """Adds the KV endpoint to a server that has not started yet."""
        add_bytes_method(server, PULL_METHOD, _answering(self.sender.serve))
        add_bytes_method(server, CONNECT_METHOD, _answering(self.sender.connections.serve))

    def disconnect(self) -> None:
        """Ends the connections that others have to this rank, so that the server can stop; they connect anew."""
        self.sender.connections.disconnect()

    async def close(self) -> None:
        """Ends all connections to others."""
        await self.receiver.connections.close()
        await asyncio.gather(*(channel.close() for channel in self._channels.values()))
        await self.sender.context.close()

    def _channel(self, endpoint: str) -> PeerChannel:
        if endpoint not in self._channels:
            self._channels[endpoint] = PeerChannel(endpoint, self._identity)
        return self._channels[endpoint]


def add_bytes_method(server: PeerServer, name: str, handle: _Handle) -> None:
    """Adds a method of streams both ways, without serializers; `name` is /SERVICE/METHOD."""
    service, method = name.strip("/").split("/")
    handler: grpc.RpcMethodHandler[bytes, bytes] = grpc.stream_stream_rpc_method_handler(handle)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {method: handler}),))


def _answering(serve: _Serve) -> _Handle:
    """Returns the handler of a stream whose frames `serve` answers."""

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
