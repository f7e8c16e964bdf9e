"""Limits the context that a router serves to what the decode workers hold.

A worker holds less than the model's context if its KV cache is small. Without this limit the
service would offer a context that no worker can serve.
"""

import logging
from collections.abc import Iterable
from typing import Final

from ....proto import worker_pb2
from ....router.api.service import GenerationService
from ...config import TandemConfig

log = logging.getLogger(__name__)

_GIB: Final = 1 << 30


class ContextLimit:
    """Follows the list of workers. Keeps the last limit while no decode worker is listed."""

    def __init__(self, service: GenerationService, config: TandemConfig) -> None:
        self.warning = ""  # logged when it changes; empty if all workers hold the whole context
        self._service = service
        self._config = config
        self._configured = service.model("").context_tokens
        self._held: tuple[int, int] | None = None

    def update(self, workers: Iterable[worker_pb2.WorkerInfo]) -> None:
        """Applies the whole list of workers."""
        decode = [
            each
            for each in workers
            if each.role == worker_pb2.ROLE_DECODE and each.context_tokens > 0
        ]
        if not decode:
            return
        decode.sort(key=lambda each: each.context_tokens)
        held = decode[0].context_tokens, decode[-1].context_tokens
        if held == self._held:
            return
        self._held = held
        self._service.limit_context(*held)
        warning = _warning(decode[0], self._configured, self._config)
        if warning and warning != self.warning:
            log.warning("%s", warning)
        self.warning = warning


def _warning(smallest: worker_pb2.WorkerInfo, configured: int, config: TandemConfig) -> str:
    """Returns the warning of a service whose smallest decode worker is `smallest`; "" for none."""
    if smallest.context_tokens >= configured:
        return ""
    whole = "the model's" if config.context_tokens is None else "the configured"
    size = ""
    # Otherwise a sequence does not hold all tokens in all layers, or the draft model takes a part.
    if len(smallest.tables) <= 1 and config.speculative is None:
        num_bytes = smallest.context_tokens * smallest.kv_bytes_per_token // max(smallest.tp, 1)
        size = f" has {num_bytes / _GIB:.2f} GiB" + (" in each rank" if smallest.tp > 1 else "")
    is_measured = config.device == "cuda" and config.decode.kv_cache_gb is None
    remedy = "gpu_memory_utilization or num_gpus" if is_measured else "kv_cache_gb"
    return (
        f"context: a worker holds {smallest.context_tokens:,} of {whole} {configured:,} tokens, "
        f"because its KV cache{size or ' is small'}; raise {remedy}"
    )
