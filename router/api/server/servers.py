"""Starts and stops the gRPC and the HTTP server of a router together."""

import asyncio

import grpc

from ....proto.limits import KEEPALIVE_SECONDS
from ...auth.authenticator import Authenticator
from ...auth.tls import ServerTls
from ..browsers import BrowserRules
from ..console.feed import ConsoleFeed
from ..service import GenerationService
from .audit import AuditLog
from .connection import ConnectionBounds
from .grpc_server import GrpcServer
from .http_server import HttpServer


class ApiServers:
    """Holds both servers of one GenerationService. `start` makes them; `set_serving` opens them."""

    def __init__(
        self, grpc_server: GrpcServer, http_server: HttpServer, grpc_address: str, http_address: str
    ) -> None:
        self._grpc = grpc_server
        self._http = http_server
        self.grpc_address = grpc_address  # HOST:PORT, with the real port
        self.http_address = http_address

    @classmethod
    async def start(
        cls,
        service: GenerationService,
        *,
        grpc_address: str = "127.0.0.1:0",
        http_address: str = "127.0.0.1:0",
        reflection: bool = False,
        compression: grpc.Compression = grpc.Compression.NoCompression,
        browsers: BrowserRules = BrowserRules(),
        bounds: ConnectionBounds | None = None,
        authenticator: Authenticator | None = None,
        tls: ServerTls | None = None,
        console: ConsoleFeed | None = None,
        shares_ports: bool = False,
        keepalive_seconds: float | None = KEEPALIVE_SECONDS,
    ) -> "ApiServers":
        """Listens on both addresses, HOST:PORT; port 0 takes a free one.

        `compression`: of gRPC responses; `browsers`: for HTTP; `bounds`: of connections. Without an
        `authenticator`, the servers need no key; without `tls`, they serve plaintext; without a
        `console`, its page shows no workers. With `shares_ports`, other servers with `shares_ports`
        may use the same ports. `keepalive_seconds`: as in HttpServer.

        Raises OSError or RuntimeError if a port is taken; then neither server runs.
        """
        audit = AuditLog(metrics=service.metrics)
        bounds = bounds or ConnectionBounds()
        authenticator = authenticator or Authenticator()
        grpc_server = GrpcServer(
            service,
            reflection=reflection,
            compression=compression,
            audit=audit,
            bounds=bounds,
            authenticator=authenticator,
            tls=tls,
            shares_port=shares_ports,
        )
        http_server = HttpServer(
            service, browsers, audit, bounds, authenticator, tls, console, keepalive_seconds
        )
        bound_http = await http_server.start(http_address, shares_port=shares_ports)
        service.http_port = int(bound_http.rpartition(":")[2])
        try:
            bound_grpc = await grpc_server.start(grpc_address)
        except BaseException:
            await http_server.stop(0)
            raise
        return cls(grpc_server, http_server, bound_grpc, bound_http)

    async def set_serving(self, serving: bool) -> None:
        """Sets the answers of the health checks of both servers."""
        self._http.set_serving(serving)
        await self._grpc.set_serving(serving)

    async def stop(self, grace: float) -> None:
        """Accepts no more requests; cancels requests that still run after `grace` seconds."""
        await asyncio.gather(self._grpc.stop(grace), self._http.stop(grace))
