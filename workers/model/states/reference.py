"""Computes the layers of `mixers` in plain torch, one token after the other.

It serves machines without a compiler, and it is the reference of the kernels' tests. The memory of
states has the layout of the kernels, because the states of one worker may be read by another.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

import torch
from torch.nn import functional

from .steps import StateSteps

_TILE: Final = 16  # columns, as in scan.h

_Token = Callable[[torch.Tensor, int], tuple[torch.Tensor, torch.Tensor]]
"""Maps the state before a row of the batch and its number to the state after it and its result."""


def pack(matrices: torch.Tensor) -> torch.Tensor:
    """Maps matrices [heads, rows, columns] to the memory of a slot, [heads, rows * columns]."""
    return torch.cat([each.flatten(1) for each in torch.split(matrices, _TILE, dim=2)], dim=1)


def unpack(memory: torch.Tensor, rows: int) -> torch.Tensor:
    """Maps the memory of a slot, [heads, rows * columns], to matrices [heads, rows, columns]."""
    tiles = torch.split(memory, _TILE * rows, dim=1)
    return torch.cat([each.reshape(len(memory), rows, -1) for each in tiles], dim=2)


def _run(
    state: torch.Tensor,  # [num_slots, ...]
    steps: StateSteps,
    out: torch.Tensor,  # [num_tokens, ...]
    read: Callable[[torch.Tensor], torch.Tensor],
    write: Callable[[torch.Tensor], torch.Tensor],
    token: _Token,
) -> torch.Tensor:
    """Computes the tokens of all sequences, reads their states and writes them to the targets."""
    for sequence in steps.sequences:
        memory = state.new_zeros(state.shape[1:])
        if sequence.source is not None:
            memory = state[sequence.source]
        current = read(memory)
        for index in range(sequence.num_tokens):
            row = sequence.first_row + index
            current, result = token(current, row)
            out[row] = result
            for count, slot in sequence.targets:
                if count == index + 1:
                    state[slot] = write(current)
    return out


def _swap(rows: torch.Tensor, size: int) -> torch.Tensor:
    """Maps [n, size * columns] to [size, n * columns]."""
    return rows.reshape(len(rows), size, -1).transpose(0, 1).flatten(1)


def conv(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    parts: Sequence[torch.Tensor],
    steps: StateSteps,
    *,
    silu: bool,
) -> torch.Tensor:
    """Computes `mixers.conv`."""
    out = x.new_empty(x.shape)
    num_past = weight.shape[0] - 1
    first = 0
    for state in parts:
        heads = state.shape[1]
        columns = state.shape[2] // num_past
        channels = slice(first, first + heads * columns)
        first = channels.stop
        taps = weight[:, channels].float()
        constant = 0.0 if bias is None else bias[channels].float()

        def token(
            past: torch.Tensor,  # [width - 1, channels]
            row: int,
            channels: slice = channels,
            taps: torch.Tensor = taps,
            constant: torch.Tensor | float = constant,
        ) -> tuple[torch.Tensor, torch.Tensor]:
            inputs = torch.cat([past, x[None, row, channels]])
            result = constant + (taps * inputs.float()).sum(0)
            return inputs[1:], functional.silu(result) if silu else result

        _run(
            state,
            steps,
            out[:, channels],
            partial(_swap, size=num_past),
            partial(_swap, size=heads),
            token,
        )
    return out


def gated_delta(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    gate: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
    steps: StateSteps,
    *,
    scale: float,
    normalizes: bool,
) -> torch.Tensor:
    """Computes `mixers.gated_delta`."""
    heads = value.shape[1]
    # [num_tokens, heads, rows]
    queries, keys = (
        each.float().repeat_interleave(heads // each.shape[1], dim=1) for each in (query, key)
    )
    if normalizes:
        queries, keys = (
            each * torch.rsqrt(each.square().sum(-1, keepdim=True) + 1e-6)
            for each in (queries, keys)
        )
    queries = queries * scale
    decays = gate.float().view(*gate.shape[:2], -1).exp()

    def token(matrices: torch.Tensor, row: int) -> tuple[torch.Tensor, torch.Tensor]:
        matrices = matrices * decays[row, :, :, None]
        known = (matrices * keys[row, :, :, None]).sum(1)
        change = (value[row].float() - known) * beta[row, :, None].float()
        matrices = matrices + keys[row, :, :, None] * change[:, None]
        return matrices, (matrices * queries[row, :, :, None]).sum(1)

    rows = key.shape[2]
    out = value.new_empty(value.shape)
    return _run(state, steps, out, lambda memory: unpack(memory, rows), pack, token)


def delta_gates(
    a: torch.Tensor, b: torch.Tensor, rate: torch.Tensor, bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes `mixers.delta_gates`."""
    return rate * functional.softplus(a.float() + bias), b.float().sigmoid().to(b.dtype)


def mamba2(
    x: torch.Tensor,
    dt: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    a: torch.Tensor,
    d: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
    state: torch.Tensor,
    steps: StateSteps,
    *,
    limits: tuple[float, float],
) -> torch.Tensor:
    """Computes `mixers.mamba2`."""
    heads = x.shape[1]
    times = functional.softplus(dt.float() + (0.0 if dt_bias is None else dt_bias)).clamp(*limits)
    # [num_tokens, heads, rows]
    keys, queries = (
        each.float().repeat_interleave(heads // each.shape[1], dim=1) for each in (b, c)
    )
    decays = (times * a).exp()

    def token(matrices: torch.Tensor, row: int) -> tuple[torch.Tensor, torch.Tensor]:
        inputs = x[row].float()
        change = inputs * times[row, :, None]
        matrices = matrices * decays[row, :, None, None] + keys[row, :, :, None] * change[:, None]
        result = (matrices * queries[row, :, :, None]).sum(1)
        return matrices, result if d is None else result + inputs * d[:, None]

    rows = b.shape[2]
    out = x.new_empty(x.shape)
    return _run(state, steps, out, lambda memory: unpack(memory, rows), pack, token)


def mamba(
    x: torch.Tensor,
    dt: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    a: torch.Tensor,
    d: torch.Tensor | None,
    z: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
    state: torch.Tensor,
    steps: StateSteps,
) -> torch.Tensor:
    """Computes `mixers.mamba`."""
    rows = a.shape[0]
    heads = state.shape[1]
    times = functional.softplus(dt.float() + (0.0 if dt_bias is None else dt_bias))

    def token(matrix: torch.Tensor, row: int) -> tuple[torch.Tensor, torch.Tensor]:
        inputs = x[row].float()
        decays = (times[row] * a).exp()
        matrix = matrix * decays + b[row, :, None].float() * (inputs * times[row])
        result = (matrix * c[row, :, None].float()).sum(0)
        if d is not None:
            result = result + inputs * d
        return matrix, result if z is None else result * functional.silu(z[row].float())

    # The matrices of all heads, side by side: [rows, channels].
    return _run(
        state,
        steps,
        x.new_empty(x.shape),
        lambda memory: unpack(memory, rows).transpose(0, 1).flatten(1),
        lambda matrix: pack(matrix.reshape(rows, heads, -1).transpose(0, 1)),
        token,
    )
