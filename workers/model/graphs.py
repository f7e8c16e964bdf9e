"""Replays whole decode steps as CUDA graphs.

One launch replaces hundreds, whose cost dominates a small step.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Final

import torch

from .attention.backend import SequenceSpan, StepAttention
from .attention.triton_backend import StaticDecodes, TritonAttentionBackend

_BATCHES: Final = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256)
_STEPS_PER_DOUBLING: Final = 4  # beyond the largest of these


Forward = Callable[[torch.Tensor, torch.Tensor, StepAttention], torch.Tensor]
"""Maps token ids and positions [num_tokens] to logits [num_tokens, vocab_size]."""

Launch = Callable[[], torch.Tensor]
Capture = Callable[[Launch], tuple[Callable[[], object], torch.Tensor]]
"""Captures a function's kernel launches; returns a replay function and the tensor it writes."""


def graph_batches(max_sequences: int) -> list[int]:
    """Returns the sizes to which steps are padded, in ascending order; the last one is the maximum.

    A larger step runs without a graph.
    """
    batches = [batch for batch in _BATCHES if batch < max_sequences]
    batch = _BATCHES[-1]
    while (batch := batch + 2 ** (batch.bit_length() - 1) // _STEPS_PER_DOUBLING) < max_sequences:
        batches.append(batch)
    return [*batches, max_sequences]


def cuda_capture() -> Capture:
    """Returns a function that captures CUDA graphs.

    The graphs share one memory pool: only one may run at a time, and its result must be read before
    the next one runs.
    """
    pool = torch.cuda.graph_pool_handle()

    def capture(launch: Launch) -> tuple[Callable[[], object], torch.Tensor]:
        # Triton compiles and cuBLAS allocates its workspace now; neither is allowed in a capture.
        launch()
        # A capture that fails leaves torch's allocator capturing for the life of the process. So
        # code that waits for the device must raise before the capture begins.
        with no_waiting():
            launch()
        graph = torch.cuda.CUDAGraph()
        # In torch's default mode, the steps of another engine of this process would fail meanwhile.
        captured = torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local")
        # If a capture fails, torch.cuda.graph leaves its stream current; the outer block does not.
        with torch.cuda.stream(torch.cuda.current_stream()), captured:
            result = launch()
        return graph.replay, result

    return capture


@contextmanager
def no_waiting() -> Iterator[None]:
    """Makes calls that wait for the device raise RuntimeError, in all threads."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


class DecodeGraphs:
    """Holds the graphs of steps in which every sequence has one new token."""

    def __init__(
        self,
        forward: Forward,
        backend: TritonAttentionBackend,
        capture: Capture,
        batches: Sequence[int],
    ) -> None:
        """Captures a step for each size in `batches`.

        The largest is captured first, so that the others find memory in its pool. Its logits are
        the buffer of all sizes: logits of their own would take 0.3 GiB for 128,000 tokens.
        """
        self.num_replays = 0
        self._batches = sorted(batches)
        most = self._batches[-1]
        self._static = StaticDecodes(backend, most)
        self._token_ids = torch.zeros(most, dtype=torch.int64, device=backend.device)
        replay, self._logits = capture(self._step(forward, most))
        self._replays = {most: replay}
        for batch in reversed(self._batches[:-1]):
            step = partial(self._copy_logits, self._step(forward, batch))
            self._replays[batch], _ = capture(step)

    def run(self, token_ids: torch.Tensor, spans: Sequence[SequenceSpan]) -> torch.Tensor | None:
        """Maps token_ids [batch] to logits [batch, vocab_size]; None if no graph is large enough.

        The logits are valid until the next run. Safe to call while earlier runs are still queued on
        the device.
        """
        if not self._static.fill(spans):
            return None
        self._token_ids[: len(spans)] = token_ids
        self._replays[next(batch for batch in self._batches if batch >= len(spans))]()
        self.num_replays += 1
        return self._logits[: len(spans)]

    def _step(self, forward: Forward, batch: int) -> Launch:
        positions, attention = self._static.step(batch)
        # Rows without a sequence have position -1, which no table of learned positions has.
        return lambda: forward(self._token_ids[:batch], positions.clamp(min=0), attention)

    def _copy_logits(self, launch: Launch) -> torch.Tensor:
        """Launches a step, and copies its logits to the buffer; returns this part of the buffer."""
        logits = launch()
        return self._logits[: len(logits)].copy_(logits)
