"""Clients of a Tandem service in Python, over gRPC."""

from .client import AsyncClient, AsyncStream, Client, Stream, connect
from .wire import ClientTls

__all__ = ["AsyncClient", "AsyncStream", "Client", "ClientTls", "Stream", "connect"]
