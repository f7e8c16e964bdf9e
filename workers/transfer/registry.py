"""Finds transports by name.

Transports that are not built in come from installed packages: entry points of the group
`tandem.kv_connectors`, each a `KvConnector`, with the names that `kv_transports` of the
configuration uses. This way every process finds them.
"""

from collections.abc import Mapping
from functools import cache
from importlib.metadata import entry_points
from typing import Any, Final

from .collective import CollectiveConnector
from .connector import KvConnector, TransferContext
from .nixl import NixlConnector
from .shared_memory import IpcConnector, SharedMemoryConnector

KV_CONNECTORS: Final[dict[str, type[KvConnector]]] = {
    "shared": SharedMemoryConnector,
    "ipc": IpcConnector,
    "nixl": NixlConnector,
    "nccl": CollectiveConnector,
    "gloo": CollectiveConnector,
}


@cache  # a search through all installed packages takes milliseconds
def find_connector(name: str) -> type[KvConnector] | None:
    """Returns the transport of this name; None if it is not installed here."""
    plugins = (point.load() for point in entry_points(group="tandem.kv_connectors", name=name))
    return KV_CONNECTORS.get(name) or next(plugins, None)


def capabilities(context: TransferContext) -> dict[str, Any]:
    """Returns the capabilities of this rank, by transport name in its order of preference."""
    known = {name: connector for name in context.transports if (connector := find_connector(name))}
    found = {name: connector.capabilities(context, name) for name, connector in known.items()}
    return {name: able for name, able in found.items() if able is not None}


def choose(
    context: TransferContext, receiver: Mapping[str, Any]
) -> tuple[str, type[KvConnector]] | None:
    """Returns name and class of the transport to a receiver with these capabilities; None for gRPC.

    Takes the first one in the receiver's order that both ranks can use.
    """
    own = capabilities(context)
    for name, able in receiver.items():
        connector = find_connector(name) if name in own and isinstance(able, dict) else None
        if connector and connector.reaches(own[name], able):
            return name, connector
    return None
