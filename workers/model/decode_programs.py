"""Runs whole decode steps on CPUs as one native call, as CUDA graphs do on GPUs.

Between the kernels of a step there is no Python then: nothing gives up the interpreter's lock and must win it back, and
no thread is woken or waited for some hundred times (see kernels/team.c)."""

import itertools
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple, Self

import torch

from .attention.backend import SequenceSpan, StepAttention
from .attention.torch_backend import TorchAttentionBackend
from .kernels import cpu
from .kernels.calls import NotRecordedError, Program, record

_MAX_BATCH: Final = 256  # memory of rows that no step has is never touched

Forward = Callable[[torch.Tensor, torch.Tensor, StepAttention], torch.Tensor]
"""Maps token ids and positions [num_tokens] to the logits of every token, [num_tokens, vocab_size]."""


class _DecodeProgram(NamedTuple):
    """Holds a recorded step and its inputs and outputs."""

    program: Program
    token_ids: torch.Tensor  # [_MAX_BATCH] int32
    positions: torch.Tensor  # the same
    logits: torch.Tensor  # [_MAX_BATCH, vocab_size]
    fill: Callable[[Sequence[SequenceSpan]], None]


class DecodePrograms:
    """Holds recorded steps in which every sequence has one new token; two, that take turns, see `Program`."""

    def __init__(self, programs: Sequence[_DecodeProgram]) -> None:
        self._programs = itertools.cycle(programs)

    @classmethod
    def record(cls, forward: Forward, backend: TorchAttentionBackend) -> Self | None:
        """Returns None if some part of the step has no kernel."""
        try:
            programs = [_record(forward, backend) for _ in range(2)]
        except NotRecordedError:
            return None
        return cls([each for each in programs if each]) if all(programs) else None

    def run(self, token_ids: torch.Tensor, spans: Sequence[SequenceSpan]) -> torch.Tensor | None:
        """Maps token_ids [batch] to logits [batch, vocab_size], valid until the run after the next; None if the batch
        is too large."""
        batch = len(spans)
        if batch > _MAX_BATCH:
            return None
        step = next(self._programs)
        step.token_ids[:batch] = token_ids
        step.positions[:batch] = torch.tensor([span.start for span in spans])
        step.fill(spans)
        step.program.run(batch)
        return step.logits[:batch]


def _record(forward: Forward, backend: TorchAttentionBackend) -> _DecodeProgram | None:
    static = backend.static_decodes(_MAX_BATCH)
    if static is None or not cpu.usable(torch.empty(0)):
        return None
    attention, fill = static
    token_ids, positions = torch.zeros(2, _MAX_BATCH, dtype=torch.int32).unbind()
    with record(_MAX_BATCH) as program:
        logits = forward(token_ids, positions, attention)
    return _DecodeProgram(program, token_ids, positions, logits, fill)
