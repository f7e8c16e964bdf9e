"""Provides an executor that computes nothing, to measure the overhead of the layers above it.

Its tokens are meaningless and come at once. Its KV cache always holds zeros. Knows nothing of
models.
"""

import itertools
import time
from collections.abc import Callable
from mmap import mmap

from tandem.tests.workers.spans import Blocks
from tandem.workers.engine.plan import Executor, OnLayers, Samples, StepPlan
from tandem.workers.kv_cache.layout import KvLayout, KvSpan
from tandem.workers.kv_cache.store import Completed, KvRead
from tandem.workers.kv_cache.tables import plan_tables


class NullKv:
    """Implements `KvStore` for the whole model without a cache: every read returns zeros."""

    def __init__(self, layout: KvLayout) -> None:
        self.layout = layout
        self.tp = 1
        self.rank = 0
        self.shared_fd = None
        self.num_blocks = 0
        self.block_size = 0
        self.tables = plan_tables(layout, 16)
        self._zeros = memoryview(b"")

    def num_slots(self, group: int) -> int:
        return self.layout.groups[group].part.num_kv_heads

    def attach(
        self, memory: mmap, *, num_blocks: int, block_size: int, tp: int, rank: int
    ) -> KvRead:
        """Raises ValueError, because this store has no memory to map."""
        raise ValueError("not shared")

    def read(self, blocks: Blocks, span: KvSpan) -> Completed[memoryview]:
        """Returns zeros."""
        size = self._check(span)
        if len(self._zeros) < size:
            self._zeros = memoryview(bytes(size))
        return Completed(self._zeros[:size])

    def write(self, blocks: Blocks, span: KvSpan, data: memoryview) -> None:
        """Drops the data after the checks of `KvStore.write`."""
        size = self._check(span)
        if data.nbytes != size:
            raise ValueError(f"data: {data.nbytes} bytes, expected {size}")

    def _check(self, span: KvSpan) -> int:
        num_tokens = span.first_token + span.num_tokens
        num_slots = [group.part.num_kv_heads for group in self.layout.groups]
        span.check(self.layout, tokens=range(num_tokens), num_slots=num_slots)
        return span.size(self.layout)


class NullExecutor(Executor):
    """Samples 0, 1, ..., vocab_size - 1, 0, ... for any sequence.

    Does not support log probabilities or beam search.
    """

    def __init__(
        self, *, vocab_size: int = 512, step_seconds: float = 0.0, model: str = "null"
    ) -> None:
        """Makes an executor whose steps take `step_seconds` to collect."""
        layout = KvLayout.uniform(
            num_layers=1, num_heads=1, num_kv_heads=1, head_dim=1, dtype="bfloat16", model=model
        )
        self.kv = NullKv(layout)
        self.vocab_size = vocab_size
        self._step_seconds = step_seconds
        self._tokens = itertools.cycle(range(vocab_size))

    def launch(self, plan: StepPlan, on_layers: OnLayers | None = None) -> Callable[[], Samples]:
        num_samples = sum(step.num_samples for step in plan.sequences)
        samples = Samples(tokens=list(itertools.islice(self._tokens, num_samples)))

        def collect() -> Samples:
            if self._step_seconds:
                time.sleep(self._step_seconds)
            return samples

        return collect
