"""Tandem: distributed LLM inference with separate workers for prefill and decode."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .cluster.local.llm import LLM
    from .cluster.local.lora import LoRARequest
    from .cluster.local.outputs import CompletionOutput, RequestOutput
    from .proto import errors
    from .router.client import AsyncClient, Client, ClientTls, connect
    from .router.client.types import Message, Tool
    from .router.client.types import Options as SamplingParams

__all__ = [
    "LLM",
    "AsyncClient",
    "Client",
    "ClientTls",
    "CompletionOutput",
    "LoRARequest",
    "Message",
    "RequestOutput",
    "SamplingParams",
    "Tool",
    "__version__",
    "connect",
    "errors",
]
__version__ = "0.1.0"

_HOMES = {
    "LLM": "cluster.local.llm",
    "AsyncClient": "router.client",
    "Client": "router.client",
    "ClientTls": "router.client",
    "CompletionOutput": "cluster.local.outputs",
    "LoRARequest": "cluster.local.lora",
    "Message": "router.client.types",
    "RequestOutput": "cluster.local.outputs",
    "SamplingParams": "router.client.types",
    "Tool": "router.client.types",
    "connect": "router.client",
}
_NAMES = {"SamplingParams": "Options"}  # names that differ in their module


def __getattr__(name: str) -> Any:
    """Imports a public name at its first use: `import tandem.workers.engine` must not load gRPC."""
    if name == "errors":
        return import_module(".proto.errors", __name__)
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_HOMES[name]}", __name__), _NAMES.get(name, name))
