"""Creates the reports of routers and workers that size the pools: metrics by name."""

from typing import Final

from ...proto import worker_pb2
from ...router.scheduling.admission import Admission
from ...router.scheduling.capacity import NO_CAPACITY, required_capacity
from ...router.scheduling.registry import WorkerRegistry

# Uncached tokens of prompts sent to workers since the start.
PREFILL_TOKENS: Final = "prefill_tokens"
# The seconds of one worker for these tokens, predicted when they were sent.
PREFILL_SECONDS: Final = "prefill_seconds"
# Tokens of prompts that wait for prefill workers.
WAITING_PREFILL_TOKENS: Final = "waiting_prefill_tokens"
WAITING_SEQUENCES: Final = "waiting_sequences"  # in routers, for decode workers
WAITING_KV_TOKENS: Final = "waiting_kv_tokens"  # in routers, for decode workers
DECODES: Final = "decodes"  # 1 for a worker with the role of decode, else 0
SEQUENCES: Final = "sequences"  # running and waiting at a worker
MAX_SEQUENCES: Final = "max_sequences"
KV_TOKENS: Final = "kv_tokens"  # held by a worker for sequences, leases and transfers
MAX_KV_TOKENS: Final = "max_kv_tokens"
STEP_SECONDS: Final = "step_seconds"  # mean of a worker's steps with decodes; 0 before the first


def router_report(admission: Admission, registry: WorkerRegistry) -> dict[str, float]:
    """Returns the demand of a router's requests.

    Waiting requests count for the pool that lacks room for the request at the head of the queue.
    Their prompts are expected to have the recent share of cached tokens.
    """
    free = registry.capacity.free() or NO_CAPACITY
    first = admission.queue.first()
    cost = registry.capacity.cost
    needs = (required_capacity(entry.request, cost) for entry in admission.queue)
    waiting = sum(needs, NO_CAPACITY)
    lacks_prefill = first is not None and free.prompt_tokens <= 0
    lacks_decode = first is not None and (
        first.needed.sequences > free.sequences or first.needed.kv_tokens > free.kv_tokens
    )
    return {
        PREFILL_TOKENS: registry.prefill_tokens,
        PREFILL_SECONDS: registry.prefill_seconds,
        WAITING_PREFILL_TOKENS: waiting.prompt_tokens * registry.capacity.uncached_rate
        if lacks_prefill
        else 0.0,
        WAITING_SEQUENCES: waiting.sequences if lacks_decode else 0,
        WAITING_KV_TOKENS: waiting.kv_tokens if lacks_decode else 0,
    }


def worker_report(info: worker_pb2.WorkerInfo) -> dict[str, float]:
    """Returns the load and the capacity of a worker."""
    load = info.load
    held = load.total_blocks - load.free_blocks - load.cached_blocks
    return {
        DECODES: float(info.role == worker_pb2.ROLE_DECODE),
        SEQUENCES: load.num_running + load.num_waiting,
        MAX_SEQUENCES: info.max_sequences,
        KV_TOKENS: max(held, 0) * info.block_size,
        MAX_KV_TOKENS: load.total_blocks * info.block_size,
        STEP_SECONDS: load.step_seconds,
    }
