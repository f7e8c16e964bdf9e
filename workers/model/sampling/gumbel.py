"""Samples tokens on the device as a function of logits, parameters, seed and position alone.

The temperature is applied first, then the filters. The token is argmax(logit - log E)
(Gumbel-max), where E is exponential noise hashed from (seed, position, token id). So neither the
batch nor the device changes a sample, and rounding of the logits changes it only at near ties.
"""

import math
from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
import torch

from ....proto.hashing import hash_token_ids
from ....proto.limits import MIN_TEMPERATURE
from ...engine.plan import SamplingParams
from .. import kernels
from ..device import column, indices, to_device
from ..kernels.c import cpu
from .filters import filter_scores, has_filter
from .penalties import LEAST_SCORE

NO_MIN_P: Final = -3e38
"""The logarithm of a min-p that excludes no token."""

_MASK64: Final = 2**64 - 1


class Adjustments(NamedTuple):
    """Holds the penalties and grammar masks that the Triton kernel applies, on the device."""

    counts: torch.Tensor  # [num_sequences, vocab_size] int32: how often each token was sampled
    in_prompt: torch.Tensor  # [num_sequences, vocab_size] bool
    masks: torch.Tensor  # [num_masks, num_words] int32: a bit for each allowed token
    penalty_rows: Sequence[int]  # [num_rows] the row of `counts`; -1 for no penalties
    mask_rows: Sequence[int]  # [num_rows] the row of `masks`; -1 for no mask


def sample(
    logits: torch.Tensor,
    params: Sequence[SamplingParams],
    positions: Sequence[int],
    adjustments: Adjustments | None = None,
) -> torch.Tensor:
    """Maps logits [num_rows, vocab_size] to sampled token ids [num_rows], int64.

    A token is -1 if a logit of its row is NaN or positive infinity, or the largest is negative
    infinity. `positions` are the sampled tokens' positions in their sequences. Only the Triton
    kernel makes `adjustments`, and not for rows with typical sampling.
    """
    random = [
        row for row, row_params in enumerate(params) if row_params.temperature >= MIN_TEMPERATURE
    ]
    fused = kernels.on_gpu(logits) or cpu.usable(logits)
    if kernels.on_gpu(logits):
        tokens = _sample_in_triton(logits, params, positions, adjustments)
    elif fused:
        tokens = _sample_native(logits, params, positions)
    else:
        tokens = _unless_invalid(*logits.max(-1))
    if fused:
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


def _sample_in_triton(
    logits: torch.Tensor,
    params: Sequence[SamplingParams],
    positions: Sequence[int],
    adjustments: Adjustments | None,
) -> torch.Tensor:
    """Samples all rows with the Triton kernel; rows with typical sampling greedily."""
    # Imports Triton, which is not always installed.
    from ..kernels.triton import sampling as triton

    if adjustments is None:
        nothing = torch.empty(1, 1, dtype=torch.int32, device=logits.device)
        none = [-1] * len(params)
        adjustments = Adjustments(nothing, nothing.bool(), nothing, none, none)
    temperatures = np.array(_temperatures(params), np.float32)
    rows = np.array(
        [
            (
                0,
                _keys(row.seed, position) if temperature else (0, 0),
                row.top_k if temperature else 0,
                row.top_p if temperature else 1,
                _log_min_p(row) if temperature else NO_MIN_P,
                row.repetition_penalty,
                row.presence_penalty,
                row.frequency_penalty,
                penalty_row,
                mask_row,
            )
            for row, position, temperature, penalty_row, mask_row in zip(
                params,
                positions,
                temperatures.tolist(),
                adjustments.penalty_rows,
                adjustments.mask_rows,
                strict=True,
            )
        ],
        triton.ROW,
    )
    np.divide(np.float32(1), temperatures, out=rows["scale"], where=temperatures > 0)
    return triton.sample(logits, rows, adjustments.counts, adjustments.in_prompt, adjustments.masks)


def _sample_native(
    logits: torch.Tensor, params: Sequence[SamplingParams], positions: Sequence[int]
) -> torch.Tensor:
    """Samples all rows with the C kernel; rows with typical sampling greedily."""
    temperatures = _temperatures(params)
    keys = [
        _keys(row.seed, position) if temperature else (0, 0)
        for row, position, temperature in zip(params, positions, temperatures, strict=True)
    ]
    filters = None
    if any(map(has_filter, params)):
        filters = torch.tensor([[row.top_k, row.top_p, _log_min_p(row)] for row in params])
    return cpu.sample(logits, torch.tensor(temperatures), torch.tensor(keys), filters)


def _temperatures(params: Sequence[SamplingParams]) -> list[float]:
    """Returns the temperatures of the fused kernels; 0 is greedy."""
    return [
        0.0 if row.typical_p < 1 or row.temperature < MIN_TEMPERATURE else row.temperature
        for row in params
    ]


def _log_min_p(params: SamplingParams) -> float:
    return math.log(params.min_p) if params.min_p else NO_MIN_P


def drawn_scores(scores: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """Returns float32 scores [num_rows, vocab_size] whose softmax `sample` draws tokens from.

    `scores` has the same shape: logits, after the logits processors. Tokens that are never drawn
    have the score -inf; a greedy row has one other token.
    """
    drawn = torch.full(scores.shape, -torch.inf, dtype=torch.float32, device=scores.device)
    for row, own in enumerate(params):
        if own.temperature < MIN_TEMPERATURE:
            drawn[row].scatter_(0, scores[row].argmax(0, keepdim=True), 0.0)
            continue
        warm = scores[row : row + 1].float() / own.temperature
        if has_filter(own):
            kept, ids = filter_scores(warm, [own])
            drawn[row].scatter_(0, ids[0], kept[0])
        else:
            drawn[row] = warm[0]
    return drawn.masked_fill_(drawn < LEAST_SCORE, -torch.inf)  # of banned tokens


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

    Each row has its own key. The lower 31 bits of `hash_token_ids` are the uniform variate.
    """
    words = torch.tensor(keys).to(torch.int32)  # the bits of unsigned 32-bit integers
    first, second = to_device(words, ids.device)[:, :, None].unbind(1)  # [num_rows, 1] each
    x = hash_token_ids(ids.to(torch.int32), first, second)
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
