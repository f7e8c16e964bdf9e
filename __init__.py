"""Tandem: distributed inference for large language models, prefill and decode apart."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .router.client import AsyncClient, Client, connect

__all__ = ["AsyncClient", "Client", "__version__", "connect"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """Imports the clients when they are asked for: `import tandem.workers.engine` must not load gRPC."""
    if name not in ("AsyncClient", "Client", "connect"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from .router import client

    return getattr(client, name)
