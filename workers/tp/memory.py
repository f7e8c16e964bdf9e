"""Sizes the KV cache of a rank.

On a GPU by measurement: with a small temporary cache the largest steps run and CUDA graphs are
captured. The cache then gets the rest of the rank's part of the GPU. On a CPU nothing is measured:
the cache gets a part of the host's memory.
"""

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, Protocol

import torch

from ..engine.block_table import NUM_STATES
from ..host.memory import total_memory
from ..model.footprint import CacheBytes, CacheCounts, MemoryUse, gib, memory_budget
from ..model.parallel import Group
from ..model.runner import ModelRunner
from ..model.warmup import StepLimits
from .process_group import TpGroup

# The default on CPUs is at most this. All pages are taken when a worker starts, at about 2 GiB a
# second, and a crashed worker should be back soon.
_MOST_ON_CPUS: Final = 1 << 30
# The most that CUDA and its libraries take in a process that shares its GPU. Nothing tells a
# process how much of the device's memory the other processes hold. Not measured.
_CONTEXT_BYTES: Final = 1 << 30

BuildRunners = Callable[[int], Sequence[ModelRunner]]
"""Returns the runners of a rank's models, each with a KV cache of this number of blocks."""


class DeviceMemory(Protocol):
    """Reads the memory of a GPU, in bytes."""

    def reserved(self) -> int:
        """Returns the bytes that torch's allocator holds for this process."""
        ...

    def free_and_total(self) -> tuple[int, int]:
        """Returns the free bytes of the GPU, and all of its bytes."""
        ...

    def release(self) -> None:
        """Returns the allocator's unused memory to the GPU."""
        ...


class CudaMemory:
    """Implements `DeviceMemory` by torch.cuda."""

    def __init__(self, device: str, share: float) -> None:
        """Bounds this process to its `share` of the GPU, if it has not all of it."""
        self._device = torch.device(device).index  # None: the current one
        if share < 1:
            torch.cuda.set_per_process_memory_fraction(share, self._device)

    def reserved(self) -> int:
        return torch.cuda.memory_reserved(self._device)

    def free_and_total(self) -> tuple[int, int]:
        return torch.cuda.mem_get_info(self._device)

    def release(self) -> None:
        gc.collect()  # a runner's closures refer to it
        torch.cuda.empty_cache()


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheSize:
    """Describes the KV cache that a rank should have."""

    bytes: CacheBytes
    block_size: int  # tokens
    cache_bytes: int | None  # None: as much as fits
    share: float  # of the GPU, or of the host
    utilization: float  # of that share
    limits: StepLimits
    state_slots: int | None = None  # see `CacheBytes.split`
    max_sequences: int = 64
    sequence_states: int = NUM_STATES  # that one sequence takes

    def split(self, num_bytes: int) -> CacheCounts:
        """Divides a cache into states and blocks. Raises ValueError as `CacheBytes.split`."""
        return self.bytes.split(
            num_bytes,
            state_slots=self.state_slots,
            max_sequences=self.max_sequences,
            least=self.sequence_states,
        )


def host_counts(size: CacheSize, group: Group | None) -> CacheCounts:
    """Returns the numbers of blocks and states on a CPU.

    Raises ValueError if no block fits, and as `CacheBytes.split`.
    """
    if size.cache_bytes is not None:
        return size.split(size.cache_bytes)
    own = min(_MOST_ON_CPUS, memory_budget(total_memory(), size.share, size.utilization))
    if own < size.bytes.block:
        raise ValueError(
            f"kv_cache_gb: the default here is {gib(own)}, which is below {size.bytes.block}, the "
            f"size of a block of {size.block_size} tokens; set kv_cache_gb"
        )
    (least,) = _least([own], torch.device("cpu"), group)
    return size.split(least)


def gpu_blocks(
    size: CacheSize, build: BuildRunners, memory: DeviceMemory, device: str, group: TpGroup | None
) -> int:
    """Measures a GPU, and returns the number of blocks that every rank can have.

    Every rank of the group must call it. Raises ValueError if no block or not `size.cache_bytes`
    fit, with the sums of the rank that has the least memory left.
    """
    with explain_out_of_memory(
        f"a step of {size.limits.num_tokens} tokens and {size.limits.num_rows} sequences does not "
        "fit beside the weights; lower max_sequences or chunk_tokens, raise num_gpus"
    ):
        use, scratch = measure(size, build, memory, group)
    free, total = memory.free_and_total()
    budget = memory_budget(total, size.share, size.utilization)
    # Steps and graphs will need their memory again.
    left = min(budget - use.total, free - use.activations - use.graphs)
    own = max(left, 0) // (size.bytes.block + scratch)
    num_blocks, budget, weights, activations, graphs, rest = _least(
        [own, budget, use.weights, use.activations, use.graphs, use.rest],
        torch.device(device),
        group,
    )
    worst = MemoryUse(weights=weights, activations=activations, graphs=graphs, rest=rest)
    used = (
        f"of the {gib(budget)} that a rank may use (num_gpus {size.share:g} x "
        f"gpu_memory_utilization {size.utilization:g} of a GPU), {worst} are used"
    )
    remedy = "raise gpu_memory_utilization or num_gpus, lower max_sequences or chunk_tokens"
    if num_blocks == 0:
        raise ValueError(
            f"gpu_memory_utilization: no memory is left for the KV cache: {used}; {remedy}, or "
            "split the model over more GPUs (tp)"
        )
    if size.cache_bytes is None:
        return num_blocks
    wanted = size.cache_bytes // size.bytes.block
    if wanted > num_blocks:
        raise ValueError(
            f"kv_cache_gb: must be at most {num_blocks * size.bytes.block / 2**30:.2f}, got "
            f"{size.cache_bytes / 2**30:.2f}: {used}; lower it or leave it out, or {remedy}"
        )
    return wanted


def measure(
    size: CacheSize, build: BuildRunners, memory: DeviceMemory, group: TpGroup | None
) -> tuple[MemoryUse, int]:
    """Runs the largest steps and captures graphs with a temporary KV cache, then frees all.

    Expects the weights on the GPU. Every rank of the group must call it. Returns the memory of a
    rank, and the bytes beside a block that steps over a full cache need.
    """
    memory.release()  # loading may have needed more than the weights
    weights = memory.reserved()
    runners = build(size.limits.num_blocks(size.block_size))
    cache = memory.reserved()
    for runner in runners:
        runner.run_largest_steps(size.limits)
    # Only rank 0 runs a draft model, for longer than a collective of the others would wait.
    if group:
        group.meet("stepped")
    activations = memory.reserved() - cache
    memory.release()  # as a capture does, so that the difference is the graphs' memory alone
    before = memory.reserved()
    for runner in runners:
        runner.capture_decodes(size.limits.num_rows)
    if group:
        group.meet("measured")
    after = memory.reserved()
    free, total = memory.free_and_total()
    rest = max(0, total - free - after)
    use = MemoryUse(
        weights=weights,
        activations=activations,
        graphs=after - before,
        rest=rest if size.share == 1 else min(rest, _CONTEXT_BYTES),
    )
    scratch = sum(runner.scratch_bytes_per_block for runner in runners)
    del runner, runners
    memory.release()
    return use, scratch


@contextmanager
def explain_out_of_memory(reason: str) -> Iterator[None]:
    """Raises ValueError with the reason in place of torch's OutOfMemoryError."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise ValueError(
            f"gpu_memory_utilization: {reason}, or split the model over more GPUs (tp)"
        ) from error


def _least(numbers: Sequence[int], device: torch.device, group: Group | None) -> list[int]:
    """Returns the numbers of the rank whose first one is the least."""
    if group is None:
        return list(numbers)
    parts = group.all_gather(torch.tensor(numbers, dtype=torch.int64, device=device))
    found: list[list[int]] = [part.tolist() for part in parts]
    return min(found)
