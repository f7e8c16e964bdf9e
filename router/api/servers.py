"""Both front doors of a router, in the running event loop."""

import asyncio

import grpc

from .grpc_server import GrpcServer
from .openai.server import HttpServer
from .service import GenerationService


class ApiServers:
    """The gRPC and the HTTP server over one Completions. Made by `start`; says NOT_SERVING until `set_serving`."""

    def __init__(self, grpc_door: GrpcServer, http_door: HttpServer, grpc_address: str, http_address: str) -> None:
        self._grpc_door = grpc_door
        self._http_door = http_door
        self.grpc_address = grpc_address  # HOST:PORT, the port that was really bound
        self.http_address = http_address

    @classmethod
    async def start(
        cls,
        completions: GenerationService,
        *,
        grpc_address: str = "127.0.0.1:0",
        http_address: str = "127.0.0.1:0",
        reflection: bool = False,
        compression: grpc.Compression = grpc.Compression.NoCompression,
    ) -> "ApiServers":
        """Listens on both addresses, HOST:PORT; port 0 takes a free one. `compression` is that of gRPC answers.

        Raises OSError or RuntimeError if a port is taken; then neither door is open."""
        grpc_door = GrpcServer(completions, reflection=reflection, compression=compression)
        http_door = HttpServer(completions)
        bound_http = await http_door.start(http_address)
        try:
            bound_grpc = await grpc_door.start(grpc_address)
        except BaseException:
            await http_door.stop(0)
            raise
        return cls(grpc_door, http_door, bound_grpc, bound_http)

    async def set_serving(self, serving: bool) -> None:
        """What the health checks of both doors answer."""
        self._http_door.set_serving(serving)
        await self._grpc_door.set_serving(serving)

    async def stop(self, grace: float) -> None:
        """Takes no more requests; lets running ones end for `grace` seconds, then cancels them."""
        await asyncio.gather(self._grpc_door.stop(grace), self._http_door.stop(grace))
