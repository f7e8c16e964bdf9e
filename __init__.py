"""Tandem: distributed inference for large language models, prefill and decode apart."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .cluster.local.llm import LLM
    from .cluster.local.lora import LoRARequest
    from .cluster.local.outputs import CompletionOutput, RequestOutput
    from .proto import errors
    from .router.client import AsyncClient, Client, ClientTls, connect
    from .router.client.types import Options as SamplingParams
    from .router.client.types import Tool

__all__ = [
    "LLM",
    "AsyncClient",
    "Client",
    "ClientTls",
    "CompletionOutput",
    "LoRARequest",
    "RequestOutput",
]
__all__ += ["SamplingParams", "Tool", "__version__", "connect", "errors"]
__version__ = "0.1.0"

_HOMES = dict.fromkeys(("AsyncClient", "Client", "ClientTls", "connect"), "router.client")
_HOMES |= {
    "SamplingParams": "router.client.types",
    "Tool": "router.client.types",
    "LLM": "cluster.local.llm",
}
_HOMES |= {"LoRARequest": "cluster.local.lora"}
_HOMES |= dict.fromkeys(("CompletionOutput", "RequestOutput"), "cluster.local.outputs")
_NAMES = {"SamplingParams": "Options"}  # where the name is another there


def __getattr__(name: str) -> Any:
    """Imports what is asked for when it is: `import tandem.workers.engine` must not load gRPC."""
    if name == "errors":
        return import_module(".proto.errors", __name__)
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_HOMES[name]}", __name__), _NAMES.get(name, name))
