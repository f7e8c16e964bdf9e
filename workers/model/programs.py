"""Runs whole steps on CPUs as one native call, as CUDA graphs do on GPUs.

No Python runs between the kernels of a step. So the GIL is not released and taken again, and
threads are not woken and awaited hundreds of times (see kernels/c/team.c).
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final

import torch

from ..engine.plan import OnLayers
from .attention.backend import SequenceSpan
from .attention.torch_backend import TorchAttentionBackend
from .kernels.c import elementwise  # noqa: F401  # registers kernels of torch's operators
from .kernels.c.calls import Recorder
from .layers.lora import LoraStep, LowRankShape
from .models.family import CausalLM
from .states.steps import StepStates

_MAX_DECODES: Final = 256  # rows of a decode step; the memory of unused rows is never touched
_MAX_TOKENS: Final = 1024  # of any other step
_REUSE_DISTANCE: Final = 24  # calls; about three layers


class StepProgram:
    """Runs a recorded step: decodes up to the logits, or any tokens up to the hidden states."""

    def __init__(
        self,
        model: CausalLM,
        backend: TorchAttentionBackend,
        states: StepStates | None = None,
        *,
        decodes_only: bool,
    ) -> None:
        """Records the step; `states` are filled before each run.

        Raises NotImplementedError if a part of it has no kernel.
        """
        self._max_tokens = _MAX_DECODES if decodes_only else _MAX_TOKENS
        static = backend.static(self._max_tokens)
        if static is None:
            raise NotImplementedError("no kernel for the attention of some layer")
        attention, self._fill = static
        # [max_tokens] each
        self._token_ids, self._positions = torch.zeros(
            2, self._max_tokens, dtype=torch.int32
        ).unbind()
        self._num_layers: list[int] = []  # computed layers at each mark

        def on_layers(computed: int) -> None:
            self._num_layers.append(computed)
            recorder.mark()

        with Recorder() as recorder:
            result = model(self._token_ids, self._positions, attention, on_layers, states=states)
            result = model.compute_logits(result) if decodes_only else result
        # Decodes have memory to spare, so no call waits for another thread's memory within a step.
        # Other steps are large and reuse memory.
        self._program = recorder.program(
            result, self._max_tokens, None if decodes_only else _REUSE_DISTANCE
        )

    def __call__(
        self,
        token_ids: torch.Tensor,  # [num_tokens] int32
        positions: torch.Tensor,  # the same
        spans: Sequence[SequenceSpan],
        on_layers: OnLayers | None = None,
    ) -> torch.Tensor | None:
        """Returns logits [num_tokens, vocab_size] or hidden states [num_tokens, hidden].

        The result is valid until the next run. Returns None if the step is too large.
        """
        num_tokens = len(token_ids)
        if num_tokens > self._max_tokens:
            return None
        self._token_ids[:num_tokens] = token_ids
        self._positions[:num_tokens] = positions
        self._fill(spans)
        on_mark = None if on_layers is None else lambda index: on_layers(self._num_layers[index])
        self._program.run(num_tokens, on_mark)
        return self._program.result[:num_tokens]


Programs = tuple[StepProgram | None, StepProgram | None]
"""A program for decodes and one for any tokens; None if a kernel is missing."""


class AdaptedPrograms:
    """Holds the programs of steps with adapters, which are recorded when they are first needed."""

    def __init__(self, lora: LoraStep, record: Callable[[], Programs]) -> None:
        self._lora = lora
        self._record = record
        self._shape = LowRankShape()
        self._programs: Programs = (None, None)

    def of_step(self, shape: LowRankShape) -> Programs:
        """Returns programs for a step of this shape.

        Records them again if an adapter changes other layers than those before, or has a higher
        rank.
        """
        if not self._shape.includes(shape):
            self._shape = self._shape.joined(shape)
            self._lora.shape = self._shape
            self._programs = self._record()
            self._lora.shape = shape
        return self._programs


def record_steps(
    model: CausalLM, backend: TorchAttentionBackend, states: StepStates | None = None
) -> Programs:
    """Returns a program for decodes and one for any tokens; None if a kernel is missing."""
    decodes = None
    tokens = None
    with suppress(NotImplementedError):
        decodes = StepProgram(model, backend, states, decodes_only=True)
        tokens = StepProgram(model, backend, states, decodes_only=False)
    return decodes, tokens
