"""Runs whole steps on CPUs as a native call, as CUDA graphs do on GPUs.

Between the kernels of a step there is no Python then: nothing gives up the interpreter's lock and must win it back, and
no thread is woken or waited for some hundred times (see kernels/team.c)."""

from collections.abc import Sequence
from typing import Final, NamedTuple, Self

import torch

from ..engine.plan import OnLayers
from .attention.backend import SequenceSpan
from .attention.torch_backend import StaticStep, TorchAttentionBackend
from .kernels import cpu
from .kernels.calls import NotRecordedError, Program, Recorder
from .models.family import CausalLM

_MAX_DECODES: Final = 256  # rows of a decode step; memory of rows that no step has is never touched
_MAX_TOKENS: Final = 1024  # of any other step
_REUSE_DISTANCE: Final = 24  # calls; about three layers


class _Recorded(NamedTuple):
    """Holds a recorded step and its inputs."""

    program: Program
    token_ids: torch.Tensor  # [max_rows] int32
    positions: torch.Tensor  # the same
    static: StaticStep
    num_layers: list[int]  # that are computed at each mark

    def run(
        self,
        token_ids: torch.Tensor,  # [num_tokens] int32
        positions: torch.Tensor,  # the same
        spans: Sequence[SequenceSpan],
        on_layers: OnLayers | None = None,
    ) -> torch.Tensor | None:
        """Returns the result's first rows, valid until the next run; None if the step is too large."""
        num_tokens = len(token_ids)
        if num_tokens > self.program.max_rows:
            return None
        self.token_ids[:num_tokens] = token_ids
        self.positions[:num_tokens] = positions
        self.static.fill(spans)
        on_mark = None if on_layers is None else lambda index: on_layers(self.num_layers[index])
        self.program.run(num_tokens, on_mark)
        return self.program.result[:num_tokens]


class StepPrograms:
    """Holds the recorded steps of a model: of decodes up to the logits, and of any tokens up to the hidden states."""

    def __init__(self, decodes: _Recorded, tokens: _Recorded | None) -> None:
        self.decodes = decodes.run
        self.tokens = tokens.run if tokens else None

    @classmethod
    def record(cls, model: CausalLM, backend: TorchAttentionBackend) -> Self | None:
        """Returns None if some part of a decode step has no kernel."""
        decodes = _record(model, backend, _MAX_DECODES, decodes_only=True)
        return cls(decodes, _record(model, backend, _MAX_TOKENS, decodes_only=False)) if decodes else None


def _record(model: CausalLM, backend: TorchAttentionBackend, max_rows: int, *, decodes_only: bool) -> _Recorded | None:
    static = backend.static(max_rows, decodes_only=decodes_only)
    if static is None or not cpu.usable(torch.empty(0)):
        return None
    token_ids, positions = torch.zeros(2, max_rows, dtype=torch.int32).unbind()
    num_layers: list[int] = []

    def on_layers(computed: int) -> None:
        num_layers.append(computed)
        recorder.mark()

    try:
        with Recorder() as recorder:
            result = model(token_ids, positions, static.attention, on_layers)
            result = model.compute_logits(result) if decodes_only else result
    except NotRecordedError:
        return None
    # Decodes have memory to spare, and nobody waits for a thread within a step; other steps are large.
    program = recorder.program(result, max_rows, None if decodes_only else _REUSE_DISTANCE)
    return _Recorded(program, token_ids, positions, static, num_layers)
