"""Derives the parts of a mixer's state from its calls, and computes the calls over their memory."""

from collections.abc import Sequence
from typing import Final

import torch
from torch import nn
from transformers.activations import ACT2FN

from ....kv_cache.layout import StatePart
from ...states import mixers
from ...states.steps import StepStates
from .mixers import ConvCall, DeltaCall, Mamba2Call, MambaCall, MixerCall

MATRIX: Final = "matrix"
_SILU: Final = ("silu", "swish")


def _part(name: str, num_heads: int, heads: int, row: int, dtype: str) -> StatePart:
    """Returns a part that every rank holds as a whole: plans of transformers split no mixer.

    So its heads are planes of one KV head.
    """
    return StatePart(
        name=name, num_heads=num_heads, num_kv_heads=1, planes=heads, row=row, dtype=dtype
    )


def derive_parts(calls: Sequence[MixerCall], num_heads: int) -> tuple[StatePart, ...] | None:
    """Returns the parts of the state of a mixer that made these calls.

    `num_heads` are the heads by which attention is split over ranks. Returns None if the calls are
    not one convolution, or one convolution and one recurrence of its channels.
    """
    if not calls or not isinstance(calls[0], ConvCall) or len(calls) > 2:
        return None
    channels, width = calls[0].weight.shape
    shapes: list[tuple[str, int, int]] = []  # of convolutions: name, heads, columns
    matrix: tuple[int, int] | None = None  # heads and numbers
    match calls[1:]:
        case []:
            run = mixers.channels_of_head(channels)
            shapes = [("conv", channels // run, run)]
        case [DeltaCall() as call]:
            _, key_heads, rows = call.key.shape
            _, heads, columns = call.value.shape
            shapes = [("conv_key", 2 * key_heads, rows), ("conv_value", heads, columns)]
            matrix = (heads, rows * columns)
        case [Mamba2Call() as call]:
            _, heads, columns = call.x.shape
            _, groups, rows = call.b.shape
            shapes = [("conv_x", heads, columns), ("conv_bc", 2 * groups, rows)]
            matrix = (heads, rows * columns)
        case [MambaCall() as call]:
            run = mixers.channels_of_head(call.x.shape[1])
            heads = call.x.shape[1] // run
            shapes = [("conv", heads, run)]
            matrix = (heads, call.a.shape[1] * run)
        case _:
            return None
    if sum(heads * columns for _, heads, columns in shapes) != channels or width < 2:
        return None
    parts = [
        _part(name, num_heads, heads, (width - 1) * columns, "auto")
        for name, heads, columns in shapes
    ]
    if matrix is not None:
        parts.append(_part(MATRIX, num_heads, *matrix, "float32"))
    return tuple(parts)


class Mixer:
    """Computes the calls of one layer's mixer over the memory of its states."""

    def __init__(self, layer: int, parts: Sequence[StatePart]) -> None:
        self._layer = layer
        self._parts = [part.name for part in parts]
        # Of the convolution, [width, channels]; known at the first step.
        self._taps: torch.Tensor | None = None

    def _memory(self, states: StepStates, part: str) -> torch.Tensor:
        """Returns the slots of a part, [num_slots, heads, numbers of a head]."""
        return states.memory(self._layer, part).flatten(1, 2)

    def compute(self, call: MixerCall, states: StepStates) -> torch.Tensor:
        """Computes a call in a step; the result is as of `states.mixers`."""
        if isinstance(call, ConvCall):
            return self._conv(call, states)
        memory = self._memory(states, MATRIX)
        if isinstance(call, DeltaCall):
            return mixers.gated_delta(
                call.query,
                call.key,
                call.value,
                call.gate,
                call.beta,
                memory,
                states.steps,
                scale=call.key.shape[2] ** -0.5,
                normalizes=call.normalizes,
            )
        # Weights of the recurrence are in float32.
        a, d, dt_bias = (
            None if each is None else each.float() for each in (call.a, call.d, call.dt_bias)
        )
        assert a is not None
        if isinstance(call, Mamba2Call):
            return mixers.mamba2(
                call.x,
                call.dt,
                call.b,
                call.c,
                a,
                d,
                dt_bias,
                memory,
                states.steps,
                limits=call.limits,
            )
        a = a.t().contiguous()
        return mixers.mamba(
            call.x, call.dt, call.b, call.c, a, d, call.z, dt_bias, memory, states.steps
        )

    def _conv(self, call: ConvCall, states: StepStates) -> torch.Tensor:
        if self._taps is None:
            self._taps = call.weight.to(call.x.dtype).t().contiguous()
        silu = call.activation in _SILU
        result = mixers.conv(
            call.x,
            self._taps,
            call.bias,
            [self._memory(states, part) for part in self._parts if part != MATRIX],
            states.steps,
            silu=silu,
        )
        if call.activation is None or silu:
            return result
        activation: nn.Module = ACT2FN[call.activation]
        activated: torch.Tensor = activation(result)
        return activated
