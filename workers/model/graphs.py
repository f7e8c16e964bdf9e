"""Replays whole decode steps as CUDA graphs.

One launch replaces hundreds, whose cost dominates a small step.
"""

from collections.abc import Callable, Sequence
from typing import Final

import torch

from .attention.backend import SequenceSpan, StepAttention
from .attention.triton_backend import StaticDecodes, TritonAttentionBackend

BATCHES: Final = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256)
"""A step is padded to the next of these sizes; a larger step runs without a graph."""


Forward = Callable[[torch.Tensor, torch.Tensor, StepAttention], torch.Tensor]
"""Maps token ids and positions [num_tokens] to logits [num_tokens, vocab_size]."""

Launch = Callable[[], torch.Tensor]
Capture = Callable[[Launch], tuple[Callable[[], object], torch.Tensor]]
"""Captures a function's kernel launches; returns a replay function and the tensor it writes."""


def cuda_capture() -> Capture:
    """Returns a function that captures CUDA graphs.

    The graphs share one memory pool: only one may run at a time, and its result must be read before
    the next one runs.
    """
    pool = torch.cuda.graph_pool_handle()

    def capture(launch: Launch) -> tuple[Callable[[], object], torch.Tensor]:
        # Triton compiles and cuBLAS allocates its workspace now; neither is allowed in a capture.
        launch()
        graph = torch.cuda.CUDAGraph()
        # If a capture fails, torch.cuda.graph leaves its stream current; the outer block does not.
        with torch.cuda.stream(torch.cuda.current_stream()), torch.cuda.graph(graph, pool=pool):
            result = launch()
        return graph.replay, result

    return capture


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

        The largest is captured first, so that the others find memory in its pool.
        """
        self.num_replays = 0
        self._batches = sorted(batches)
        self._static = StaticDecodes(backend, self._batches[-1])
        self._token_ids = torch.zeros(self._batches[-1], dtype=torch.int64, device=backend.device)
        self._captured = {
            batch: capture(self._step(forward, batch)) for batch in reversed(self._batches)
        }

    def run(self, token_ids: torch.Tensor, spans: Sequence[SequenceSpan]) -> torch.Tensor | None:
        """Maps token_ids [batch] to logits [batch, vocab_size]; None if no graph is large enough.

        The logits are valid until the next run. Safe to call while earlier runs are still queued on
        the device.
        """
        if not self._static.fill(spans):
            return None
        self._token_ids[: len(spans)] = token_ids
        replay, logits = self._captured[
            next(batch for batch in self._batches if batch >= len(spans))
        ]
        replay()
        self.num_replays += 1
        return logits[: len(spans)]

    def _step(self, forward: Forward, batch: int) -> Launch:
        positions, attention = self._static.step(batch)
        return lambda: forward(self._token_ids[:batch], positions, attention)
