"""Makes the reports of routers and workers by which the pools are sized: figures by the names that
the policy reads.
"""

from typing import Final

from ...proto import worker_pb2
from ...router.scheduling.admission import Admission
from ...router.scheduling.capacity import NO_CAPACITY, required_capacity
from ...router.scheduling.registry import WorkerRegistry

PREFILL_TOKENS: Final = (
    "prefill_tokens"  # of prompts that were sent to workers since the start, less what was cached
)
PREFILL_SECONDS: Final = (
    "prefill_seconds"  # that one worker takes for these, as predicted when they were sent
)
WAITING_PREFILL_TOKENS: Final = (
    "waiting_prefill_tokens"  # of prompts that wait for workers to compute them
)
WAITING_SEQUENCES: Final = "waiting_sequences"  # that wait for workers to decode them
WAITING_KV_TOKENS: Final = "waiting_kv_tokens"  # the same
SEQUENCES: Final = "sequences"  # that a worker has, with those that wait there
MAX_SEQUENCES: Final = "max_sequences"
KV_TOKENS: Final = "kv_tokens"  # that a worker holds for sequences, leases and transfers
MAX_KV_TOKENS: Final = "max_kv_tokens"
STEP_SECONDS: Final = "step_seconds"  # mean of a worker's steps with decodes; 0 before the first


def router_report(admission: Admission, registry: WorkerRegistry) -> dict[str, float]:
    """Returns what a router asks for. What waits, waits for the pool that lacks what the request at
    the head of the queue needs; of its prompts as much is taken to be cached as of those before.
    """
    work, free, first = (
        registry.prefill_work,
        registry.free() or NO_CAPACITY,
        admission.queue.first(),
    )
    waiting = sum((required_capacity(entry.request) for entry in admission.queue), NO_CAPACITY)
    lacks_prefill = first is not None and free.prompt_tokens <= 0
    lacks_decode = first is not None and (
        first.needed.sequences > free.sequences or first.needed.kv_tokens > free.kv_tokens
    )
    return {
        PREFILL_TOKENS: work.uncached_tokens,
        PREFILL_SECONDS: work.seconds,
        WAITING_PREFILL_TOKENS: waiting.prompt_tokens * registry.uncached_rate
        if lacks_prefill
        else 0.0,
        WAITING_SEQUENCES: waiting.sequences if lacks_decode else 0,
        WAITING_KV_TOKENS: waiting.kv_tokens if lacks_decode else 0,
    }


def worker_report(info: worker_pb2.WorkerInfo) -> dict[str, float]:
    """Returns what a worker has to do, and can do."""
    load = info.load
    held = load.total_blocks - load.free_blocks - load.cached_blocks
    return {
        SEQUENCES: load.num_running + load.num_waiting,
        MAX_SEQUENCES: info.max_sequences,
        KV_TOKENS: max(held, 0) * info.block_size,
        MAX_KV_TOKENS: load.total_blocks * info.block_size,
        STEP_SECONDS: load.step_seconds,
    }
