"""Samples tokens on the device as a function of logits, parameters, seed and position alone.

The temperature is applied first, then the filters. The token is argmax(logit - log E)
(Gumbel-max), where E is exponential noise hashed from (seed, position, token id). So neither the
batch nor the device changes a sample, and rounding of the logits changes it only at near ties.
"""

import math
from collections.abc import Sequence
from typing import Final

import torch

from ...engine.plan import SamplingParams
from ..device import column, indices, to_device
from ..kernels.c import cpu
from .filters import filter_scores, has_filter

# Below it sampling is greedy, because the division would overflow float32.
MIN_TEMPERATURE: Final = 1e-5

_MASK64: Final = 2**64 - 1


def sample(
    logits: torch.Tensor, params: Sequence[SamplingParams], positions: Sequence[int]
) -> torch.Tensor:
    """Maps logits [num_rows, vocab_size] to sampled token ids [num_rows], int64.

    A token is -1 if a logit of its row is NaN or positive infinity, or the largest is negative
    infinity. `positions` are the sampled tokens' positions in their sequences.
    """
    native = cpu.usable(logits)
    random = [
        row for row, row_params in enumerate(params) if row_params.temperature >= MIN_TEMPERATURE
    ]
    tokens = (
        _sample_native(logits, params, positions) if native else _unless_invalid(*logits.max(-1))
    )
    if native:
        random = [row for row in random if params[row].typical_p < 1]
    for filtered in (False, True):
        rows = [row for row in random if has_filter(params[row]) == filtered]
        if rows:
            rows_device = indices(rows, logits.device)
            keys = [_keys(params[row].seed, positions[row]) for row in rows]
            tokens[rows_device] = _sample_random(
                logits[rows_device].float(), [params[row] for row in rows], keys, filtered
            )
    return tokens


def _sample_native(
    logits: torch.Tensor, params: Sequence[SamplingParams], positions: Sequence[int]
) -> torch.Tensor:
    """Samples all rows with the C kernel; rows with typical sampling greedily."""
    temperatures = [
        0.0 if row.typical_p < 1 or row.temperature < MIN_TEMPERATURE else row.temperature
        for row in params
    ]
    keys = [
        _keys(row.seed, position) if temperature else (0, 0)
        for row, position, temperature in zip(params, positions, temperatures, strict=True)
    ]
    filters = None
    if any(map(has_filter, params)):
        filters = torch.tensor(
            [[row.top_k, row.top_p, math.log(row.min_p) if row.min_p else -3e38] for row in params]
        )
    return cpu.sample(logits, torch.tensor(temperatures), torch.tensor(keys), filters)


def _sample_random(
    logits: torch.Tensor,
    params: Sequence[SamplingParams],
    keys: Sequence[tuple[int, int]],
    filtered: bool,
) -> torch.Tensor:
    """Maps float32 logits [num_rows, vocab_size] to token ids [num_rows].

    `keys` are the keys of each row's noise.
    """
    scores = logits / column([row.temperature for row in params], logits)
    ids = torch.arange(logits.shape[1], device=logits.device)[None]
    if filtered:
        scores, ids = filter_scores(scores, params)
    best, index = (scores - exponential_noise(ids, keys).log_()).max(-1, keepdim=True)
    return _unless_invalid(best, ids.expand(len(params), -1).gather(1, index)).squeeze(1)


def _unless_invalid(largest: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Replaces tokens by -1 where the row's largest score is infinite or NaN.

    NaN counts as the largest. Tensors may have any shape.
    """
    return torch.where(largest.abs() < torch.inf, tokens, -1)


def exponential_noise(ids: torch.Tensor, keys: Sequence[tuple[int, int]]) -> torch.Tensor:
    """Returns float32 exponential variates [num_rows, n] of token ids [1 or num_rows, n].

    Each row has its own key. The hash has 32 bits: two rounds of multiply and xor-shift with the
    constants of lowbias32, and half of the key before each round. Its lower 31 bits are the uniform
    variate.
    """
    words = torch.tensor(keys).to(torch.int32)  # the bits of unsigned 32-bit integers
    first, second = to_device(words, ids.device)[:, :, None].unbind(1)  # [num_rows, 1] each
    x = ids.to(torch.int32) * (0x9E3779B1 - 2**32) + first
    x ^= (x >> 16).bitwise_and_(0xFFFF)
    x *= 0x7FEB352D
    x ^= (x >> 15).bitwise_and_(0x1FFFF)
    x += second
    x *= 0x846CA68B - 2**32
    x ^= (x >> 16).bitwise_and_(0xFFFF)
    uniform = x.bitwise_and_(0x7FFFFFFF).float().add_(0.5).mul_(2.0**-31).clamp_(max=1 - 2.0**-24)
    return uniform.neg_().log1p_().neg_()


def _keys(seed: int, position: int) -> tuple[int, int]:
    """Derives two 32-bit keys from a 64-bit seed and a position.

    Uses splitmix64 (Steele et al., OOPSLA 2014).
    """
    mixed = _splitmix64(_splitmix64(seed & _MASK64) ^ position)
    return mixed >> 32, mixed & 0xFFFFFFFF


def _splitmix64(x: int) -> int:
    x = (x + 0x9E3779B97F4A7C15) & _MASK64
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & _MASK64
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & _MASK64
    return x ^ (x >> 31)
