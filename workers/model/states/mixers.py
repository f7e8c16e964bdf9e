"""Computes the convolutions and recurrences of layers that keep a state for each sequence.

The rows of a step's sequences follow each other. Every token is computed in float32 from the state
before it, in one order of operations. So the bits do not depend on how a sequence is cut into
steps, or on the other sequences of a step. `steps` names the slots; the memory of states is as
`kernels.c.states` describes it.
"""

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Final

import torch

from ..kernels.c import cpu, gates
from ..kernels.c import states as kernels
from . import reference
from .steps import StateSteps

_RUN: Final = 64


def channels_of_head(channels: int) -> int:
    """Returns the number of adjacent channels of a convolution, or of Mamba, that act as a head."""
    return _RUN if channels % _RUN == 0 else channels


def _rows(x: torch.Tensor) -> torch.Tensor:
    """Returns a tensor whose rows are contiguous; their stride may be any."""
    is_row = x.ndim == 1 or x[0].is_contiguous()
    return x if is_row else x.contiguous()


def conv(
    x: torch.Tensor,  # [num_tokens, channels]
    weight: torch.Tensor,  # [width, channels], contiguous, of x's dtype
    bias: torch.Tensor | None,  # [channels]
    # The states of adjacent channels, each [num_slots, heads, (width - 1) * columns].
    parts: Sequence[torch.Tensor],
    steps: StateSteps,
    *,
    silu: bool,
) -> torch.Tensor:
    """Convolves each channel of a sequence with its last `width` inputs: [num_tokens, channels].

    The state is the last width - 1 inputs, the oldest first, in x's dtype.
    """
    if not cpu.usable(x) or weight.shape[0] > kernels.MAX_WIDTH:
        return reference.conv(x, weight, bias, parts, steps, silu=silu)
    x = _rows(x)
    out = x.new_empty(x.shape)
    num_past = weight.shape[0] - 1
    sizes = [state.shape[1] * state.shape[2] // num_past for state in parts]
    for state, (first, end) in zip(parts, pairwise((0, *accumulate(sizes))), strict=True):
        kernels.conv(
            x[:, first:end],
            weight[:, first:end],
            None if bias is None else bias[first:end],
            state,
            steps.address,
            out[:, first:end],
            silu=silu,
        )
    return out


def gated_delta(
    query: torch.Tensor,  # [num_tokens, key_heads, rows]
    key: torch.Tensor,  # the same
    value: torch.Tensor,  # [num_tokens, heads, columns]
    # [num_tokens, heads] or, for each row, [num_tokens, heads, rows]; at most 0
    gate: torch.Tensor,
    beta: torch.Tensor,  # [num_tokens, heads]
    state: torch.Tensor,  # float32 [num_slots, heads, rows * columns]
    steps: StateSteps,
    *,
    scale: float,  # of the query
    normalizes: bool,  # whether query and key are divided by their length
) -> torch.Tensor:
    """Computes the gated delta rule (arXiv 2412.06464): [num_tokens, heads, columns].

    The state decays by e^gate. Then beta times the difference between the value and what the state
    returns for the key is added for the key. The result is what the state returns for the query.
    """
    if not cpu.usable(value) or key.shape[2] > kernels.MAX_ROWS:
        return reference.gated_delta(
            query, key, value, gate, beta, state, steps, scale=scale, normalizes=normalizes
        )
    return kernels.gated_delta(
        _rows(query),
        _rows(key),
        _rows(value),
        _rows(gate.float()),
        _rows(beta.to(value.dtype)),
        state,
        steps.address,
        scale=scale,
        normalizes=normalizes,
    )


def delta_gates(
    a: torch.Tensor,  # [num_tokens, heads]
    b: torch.Tensor,  # the same
    rate: torch.Tensor,  # float32 [heads], negative
    bias: torch.Tensor,  # float32 [heads]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns gate and beta of `gated_delta`, [num_tokens, heads] each; the gate is float32.

    The gate is rate * softplus(a + bias), and beta is sigmoid(b).
    """
    if not cpu.usable(a):
        return reference.delta_gates(a, b, rate, bias)
    return gates.delta_gates(_rows(a), _rows(b), rate, bias)


def mamba2(
    x: torch.Tensor,  # [num_tokens, heads, columns]
    dt: torch.Tensor,  # [num_tokens, heads], before dt_bias and softplus
    b: torch.Tensor,  # [num_tokens, groups, rows]
    c: torch.Tensor,  # the same
    a: torch.Tensor,  # float32 [heads], negative
    d: torch.Tensor | None,  # float32 [heads]
    dt_bias: torch.Tensor | None,  # float32 [heads]
    state: torch.Tensor,  # float32 [num_slots, heads, rows * columns]
    steps: StateSteps,
    *,
    limits: tuple[float, float],  # of dt
) -> torch.Tensor:
    """Computes the recurrence of Mamba 2 (arXiv 2405.21060): [num_tokens, heads, columns].

    The state decays by e^(dt a), and dt x is added for b. The result is what the state returns for
    c, plus d x.
    """
    if not cpu.usable(x) or b.shape[2] > kernels.MAX_ROWS:
        return reference.mamba2(x, dt, b, c, a, d, dt_bias, state, steps, limits=limits)
    x, dt, b, c = (_rows(each) for each in (x, dt.to(x.dtype), b, c))
    return kernels.mamba2(x, dt, b, c, a, d, dt_bias, state, steps.address, limits=limits)


def mamba(
    x: torch.Tensor,  # [num_tokens, channels]
    dt: torch.Tensor,  # the same, before dt_bias and softplus
    b: torch.Tensor,  # [num_tokens, rows]
    c: torch.Tensor,  # the same
    a: torch.Tensor,  # float32 [rows, channels], negative, contiguous
    d: torch.Tensor | None,  # float32 [channels]
    z: torch.Tensor | None,  # [num_tokens, channels]
    dt_bias: torch.Tensor | None,  # float32 [channels]
    state: torch.Tensor,  # float32 [num_slots, heads, rows * columns], channels are heads * columns
    steps: StateSteps,
) -> torch.Tensor:
    """Computes the selective scan of Mamba (arXiv 2312.00752): [num_tokens, channels].

    As `mamba2`, but every channel decays by its own e^(dt a) in each row. The result is multiplied
    by silu(z).
    """
    if not cpu.usable(x) or a.shape[0] > kernels.MAX_ROWS:
        return reference.mamba(x, dt, b, c, a, d, z, dt_bias, state, steps)
    x, dt, b, c = (_rows(each) for each in (x, dt.to(x.dtype), b, c))
    z = None if z is None else _rows(z)
    return kernels.mamba(x, dt, b, c, a, d, z, dt_bias, state, steps.address)
