"""Clients of a Tandem service in Python, over gRPC."""

from .client import AsyncClient, AsyncStream, Client, Stream, connect

__all__ = ["AsyncClient", "AsyncStream", "Client", "Stream", "connect"]
