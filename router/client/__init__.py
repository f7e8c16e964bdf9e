"""The Python clients of a Tandem service, over gRPC."""

from .client import AsyncClient, AsyncStream, Client, Stream, connect

__all__ = ["AsyncClient", "AsyncStream", "Client", "Stream", "connect"]
