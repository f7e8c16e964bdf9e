"""Names the transports. To add one, write its `KvConnector` in a file of its own and register it here, or from outside
by `register_connector` before the first worker of the process starts."""

from collections.abc import Mapping
from typing import Any

from .collective import CollectiveConnector
from .connector import KvConnector, TransferContext
from .nixl import NixlConnector
from .shared_memory import SharedMemoryConnector

_CONNECTORS: dict[str, type[KvConnector]] = {
    "shared": SharedMemoryConnector,
    "nixl": NixlConnector,
    "nccl": CollectiveConnector,
    "gloo": CollectiveConnector,
}


def register_connector(name: str, connector: type[KvConnector]) -> None:
    """Makes a transport known under a name that `transports` of the config may list. Raises ValueError for a name that
    is taken."""
    if name in (*_CONNECTORS, "grpc"):
        raise ValueError(f"KV transport {name}: registered already")
    _CONNECTORS[name] = connector


def unregister_connector(name: str) -> None:
    """Takes back a `register_connector`."""
    del _CONNECTORS[name]


def connector_class(name: str) -> type[KvConnector]:
    """Returns the transport of this name. Raises KeyError."""
    return _CONNECTORS[name]


def capabilities(context: TransferContext) -> dict[str, Any]:
    """Returns what a rank can use, by transport, in its order of preference."""
    found = {name: _CONNECTORS[name].capabilities(context, name) for name in context.transports if name in _CONNECTORS}
    return {name: able for name, able in found.items() if able is not None}


def choose(context: TransferContext, receiver: Mapping[str, Any]) -> str | None:
    """Returns the transport to a receiver with these capabilities: the first in its order that both can use; None for
    gRPC."""
    own = capabilities(context)
    for name, able in receiver.items():
        if name in own and isinstance(able, dict) and _CONNECTORS[name].reaches(own[name], able):
            return name
    return None
