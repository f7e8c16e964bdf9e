"""Tandem: distributed inference for large language models, prefill and decode apart."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .proto import errors
    from .router.client import AsyncClient, Client, ClientTls, connect
    from .router.client.types import Tool

__all__ = ["AsyncClient", "Client", "ClientTls", "Tool", "__version__", "connect", "errors"]
__version__ = "0.1.0"

_HOMES = {"AsyncClient": "client", "Client": "client", "ClientTls": "client", "connect": "client"}
_HOMES |= {"Tool": "client.types"}


def __getattr__(name: str) -> Any:
    """Imports the clients when they are asked for: `import tandem.workers.engine` must not load gRPC."""
    if name == "errors":
        return import_module(".proto.errors", __name__)
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".router.{_HOMES[name]}", __name__), name)
