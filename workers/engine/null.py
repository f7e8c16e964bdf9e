"""Implements an executor that computes nothing, for measuring everything above it.

Knows nothing of models; its KV cache reads as zeros.
"""

import itertools
import time
from collections.abc import Callable, Sequence
from mmap import mmap

from ..kv_cache.layout import KvLayout, KvSpan
from ..kv_cache.store import KvReader
from .plan import Executor, OnLayers, Samples, StepPlan


class NullKv:
    """Implements `KvStore` for the whole model without memory for it: every read is of one buffer of zeros."""

    def __init__(self, layout: KvLayout) -> None:
        self.layout = layout
        self.tp, self.rank, self.num_slots = 1, 0, layout.num_kv_heads
        self.shared = None
        self._zeros = memoryview(b"")

    def attach(self, memory: mmap, *, num_blocks: int, block_size: int, num_slots: int) -> KvReader:
        raise ValueError("not shared")

    def read(self, blocks: Sequence[int], span: KvSpan) -> memoryview:
        size = self._check(span)
        if len(self._zeros) < size:
            self._zeros = memoryview(bytes(size))
        return self._zeros[:size]

    def write(self, blocks: Sequence[int], span: KvSpan, data: memoryview) -> None:
        size = self._check(span)
        if data.nbytes != size:
            raise ValueError(f"data: {data.nbytes} bytes, {size} are expected")

    def _check(self, span: KvSpan) -> int:
        last_token = span.first_token + span.num_tokens
        span.check(num_layers=self.layout.num_layers, num_tokens=last_token, num_slots=self.num_slots)
        return span.size(self.layout)


class NullExecutor(Executor):
    """Samples 0, 1, 2, ..., vocab_size - 1, 0, ... for any sequence, without log probabilities or beam search."""

    def __init__(self, *, vocab_size: int = 512, step_seconds: float = 0.0, model: str = "null") -> None:
        """Collecting a step takes `step_seconds`."""
        layout = KvLayout(num_layers=1, num_heads=1, num_kv_heads=1, head_dim=1, dtype="bfloat16", model=model)
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
