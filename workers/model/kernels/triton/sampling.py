"""Samples tokens in one Triton kernel: penalties, grammar masks, temperature, filters and noise.

Computes the function of kernels/c/sampling.c with the same noise, so a sequence draws the same
tokens on CPUs and GPUs, except where rounding decides between nearly equal scores. Nothing waits
for the device. A token does not depend on the rest of the batch, because sums have one order.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# What Triton compiles has no Python types: its arguments are scalars and blocks of the device.

from typing import Any, Final

import numpy as np
import torch
import triton
import triton.language as tl

from ...device import copy_to_device
from . import FP_FUSION

ROW: Final = np.dtype(
    [
        ("scale", np.float32),  # 1 / temperature; 0 is greedy
        ("keys", np.uint32, 2),  # of the noise
        ("top_k", np.int32),  # 0 keeps all
        ("top_p", np.float32),
        ("log_min_p", np.float32),  # -3e38 for none
        ("repetition", np.float32),  # the penalties of SamplingParams
        ("presence", np.float32),
        ("frequency", np.float32),
        ("penalty_row", np.int32),  # of `counts` and `in_prompt`; -1 for no penalties
        ("mask_row", np.int32),  # of `masks`; -1 for no mask
    ]
)
"""Describes how a row is sampled."""

_FIELDS = tl.constexpr(ROW.itemsize // 4)
_TILE: Final = 1024  # logits that a program reads at once

# A token's place is the distance of its score from the top, in steps of 2^-16; scores with the same
# place are ties. Distances from 64 on share the last place, because such tokens have no mass.
_LAST_PLACE = tl.constexpr(2**22 - 1)
_NUM_DIGITS = tl.constexpr(6)  # of places
_DIGIT_BITS = tl.constexpr(4)
_BINS = tl.constexpr(16)  # of a digit
_BANNED = tl.constexpr(-1e28)  # as in penalties.py
_STAGES = tl.constexpr(3)  # tiles that are read ahead


@triton.jit
def _field(rows, row, known, FIELD: tl.constexpr):
    return tl.load(rows + row * _FIELDS + FIELD, mask=known, other=0)


@triton.jit
def _float_field(rows, row, known, FIELD: tl.constexpr):
    return _field(rows, row, known, FIELD).to(tl.float32, bitcast=True)


@triton.jit
def _load_scores(
    source,  # the tensors and sizes of a launch, see `_sample_kernel`
    row,  # [ROWS]
    known,  # [ROWS] False: all scores are -inf
    begin,
    COLUMNS: tl.constexpr,
):
    """Returns the scores [ROWS, COLUMNS] of the tokens from `begin`; -inf after the last token."""
    logits, rows, counts, in_prompt, masks, stride_row, vocab_size, num_words = source
    column = begin + tl.arange(0, COLUMNS)[None, :]
    inside = known[:, None] & (column < vocab_size)
    place = row.to(tl.int64)[:, None] * stride_row + column
    scores = tl.load(logits + place, mask=inside, other=float("-inf")).to(tl.float32)
    penalty_row = tl.load(rows + row * _FIELDS + 9, mask=known, other=-1)
    if tl.max(penalty_row, axis=0) >= 0:
        used = inside & (penalty_row >= 0)[:, None]
        place = penalty_row.to(tl.int64)[:, None] * vocab_size + column
        count = tl.load(counts + place, mask=used, other=0)
        is_known = (count > 0) | (tl.load(in_prompt + place, mask=used, other=0) != 0)
        repetition = _float_field(rows, row, known, 6)[:, None]
        presence = _float_field(rows, row, known, 7)[:, None]
        frequency = _float_field(rows, row, known, 8)[:, None]
        divisor = tl.where(is_known & (scores > 0), repetition, 1.0)
        factor = tl.where(is_known & (scores <= 0), repetition, 1.0)
        scores = tl.div_rn(scores, divisor) * factor
        scores -= frequency * count.to(tl.float32)
        scores -= tl.where(count > 0, presence, 0.0)
    mask_row = tl.load(rows + row * _FIELDS + 10, mask=known, other=-1)
    if tl.max(mask_row, axis=0) >= 0:
        place = mask_row.to(tl.int64)[:, None] * num_words + column // 32
        words = tl.load(masks + place, mask=inside & (mask_row >= 0)[:, None], other=-1)
        scores = tl.where((words >> (column % 32)) & 1 != 0, scores, scores + _BANNED)
    scale = _float_field(rows, row, known, 0)
    return scores * tl.where(scale > 0, scale, 1.0)[:, None]


@triton.jit
def _places(distances):
    """Maps distances from the top, at most 0, to places."""
    steps = tl.minimum(tl.maximum(distances * -65536.0, 0.0), 4194303.0)
    return steps.to(tl.int32)


@triton.jit
def _find_last_place(
    source,
    row,  # [ROWS]
    known,  # [ROWS]
    top,  # [ROWS] the largest score
    last,  # [ROWS] tokens after this place are not counted
    enough,  # [ROWS]
    vocab_size,
    BY_MASS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Returns the first place [ROWS] up to which there are `enough` tokens.

    If BY_MASS, `enough` is a share of the mass of the counted tokens. A histogram of 16 bins finds
    one digit of the place at a time. A bin also counts the tokens before it, so that no sum depends
    on another digit.
    """
    place = tl.zeros([ROWS], tl.int32)
    for digit in range(_NUM_DIGITS):
        shift = (_NUM_DIGITS - 1 - digit) * _DIGIT_BITS
        ends = place[None, :] + ((tl.arange(0, _BINS) + 1) << shift)[:, None]
        # Bins come first, so that a thread holds all bins of its columns.
        bins = tl.zeros([_BINS, ROWS, COLUMNS], tl.float32)
        for begin in tl.range(0, vocab_size, COLUMNS, num_stages=_STAGES):
            scores = _load_scores(source, row, known, begin, COLUMNS)
            distances = scores - top[:, None]
            places = _places(distances)
            weights = tl.exp(distances) if BY_MASS else tl.full([ROWS, COLUMNS], 1.0, tl.float32)
            weights = tl.where(places <= last[:, None], weights, 0.0)
            bins += tl.where(places[None, :, :] < ends[:, :, None], weights[None, :, :], 0.0)
        reached = tl.sum(bins, axis=2)
        if BY_MASS:
            # The first digit's last bin has all tokens.
            enough = tl.where(digit == 0, enough * tl.max(reached, axis=0), enough)
        before = tl.sum((reached < enough[None, :]).to(tl.int32), axis=0)
        place += tl.minimum(before, _BINS - 1) << shift
    return place


@triton.jit
def _log_noise(column, first, second):
    """Returns the logarithm of exponential variates; see `gumbel.exponential_noise`."""
    x = column.to(tl.uint32) * 0x9E3779B1 + first
    x ^= x >> 16
    x *= 0x7FEB352D
    x ^= x >> 15
    x += second
    x *= 0x846CA68B
    x ^= x >> 16
    uniform = ((x & 0x7FFFFFFF).to(tl.int32).to(tl.float32) + 0.5) * 4.656612873077393e-10
    uniform = tl.minimum(uniform, 0.999999940395355224609375)
    # The series is for small numbers, where 1 - uniform would be rounded.
    series = uniform * (1 + uniform * (1 / 2 + uniform * (1 / 3 + uniform * (1 / 4 + uniform / 5))))
    return tl.log(tl.where(uniform < 1 / 64, series, -tl.log(1 - uniform)))


@triton.jit(do_not_specialize=["num_rows", "num_words"])
def _sample_kernel(
    logits,
    rows,
    counts,
    in_prompt,
    masks,
    tokens,
    num_rows,
    stride_row,
    vocab_size,
    num_words,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    source = (logits, rows, counts, in_prompt, masks, stride_row, vocab_size, num_words)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    known = row < num_rows
    highest = tl.full([ROWS, COLUMNS], float("-inf"), tl.float32)
    for begin in tl.range(0, vocab_size, COLUMNS, num_stages=_STAGES):
        scores = _load_scores(source, row, known, begin, COLUMNS)
        # NaN counts as infinity.
        highest = tl.maximum(highest, tl.where(scores < float("inf"), scores, float("inf")))
    top = tl.max(highest, axis=1)
    is_valid = known & (tl.abs(top) < float("inf"))
    top = tl.where(is_valid, top, 0.0)
    last = tl.full([ROWS], _LAST_PLACE, tl.int32)
    top_k = _field(rows, row, is_valid, 3)
    if tl.max(top_k, axis=0) > 0:
        last = _find_last_place(
            source,
            row,
            is_valid,
            top,
            last,
            tl.where(top_k > 0, top_k.to(tl.float32), float("inf")),
            vocab_size,
            False,
            ROWS,
            COLUMNS,
        )
    top_p = tl.where(is_valid, _float_field(rows, row, is_valid, 4), 1.0)
    if tl.min(top_p, axis=0) < 1:
        nucleus = _find_last_place(
            source, row, is_valid, top, last, top_p, vocab_size, True, ROWS, COLUMNS
        )
        last = tl.where(top_p < 1, nucleus, last)
    is_random = _float_field(rows, row, known, 0) > 0
    first_key = _field(rows, row, known, 1).to(tl.uint32, bitcast=True)[:, None]
    second_key = _field(rows, row, known, 2).to(tl.uint32, bitcast=True)[:, None]
    log_min_p = _float_field(rows, row, known, 5)[:, None]
    best = tl.full([ROWS, COLUMNS], float("-inf"), tl.float32)
    token = tl.zeros([ROWS, COLUMNS], tl.int32)
    for begin in tl.range(0, vocab_size, COLUMNS, num_stages=_STAGES):
        scores = _load_scores(source, row, is_valid, begin, COLUMNS)
        distances = scores - top[:, None]
        is_kept = (_places(distances) <= last[:, None]) & (distances >= log_min_p)
        column = begin + tl.arange(0, COLUMNS)[None, :]
        noisy = tl.where(
            is_random[:, None], scores - _log_noise(column, first_key, second_key), scores
        )
        noisy = tl.where(is_kept, noisy, float("-inf"))
        token = tl.where(noisy > best, column, token)
        best = tl.maximum(best, noisy)
    # The first of several equal maxima wins.
    winner = tl.max(best, axis=1)
    sampled = tl.min(tl.where(best == winner[:, None], token, vocab_size), axis=1)
    sampled = tl.where(is_valid & (winner > float("-inf")), sampled, -1)
    tl.store(tokens + row, sampled.to(tl.int64), mask=known)


def sample(
    logits: torch.Tensor,  # [num_rows, vocab_size], any stride of rows
    rows: "np.ndarray[Any, Any]",  # [num_rows] of ROW, in host memory
    counts: torch.Tensor,  # [num_sequences, vocab_size] int32: how often each was sampled
    in_prompt: torch.Tensor,  # [num_sequences, vocab_size] bool
    masks: torch.Tensor,  # [num_masks, num_words] int32: a bit for each allowed token
) -> torch.Tensor:
    """Returns the sampled tokens, int64 [num_rows].

    A token is -1 if a logit of its row is NaN or positive infinity, or the largest is negative
    infinity.
    """
    num_rows, vocab_size = logits.shape
    tokens = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    columns = min(_TILE, triton.next_power_of_2(vocab_size))
    rows_at_once = max(_TILE // columns, 1)
    _sample_kernel[(triton.cdiv(num_rows, rows_at_once),)](
        logits,
        copy_to_device([rows.view(np.int32)], logits.device)[0],
        counts,
        in_prompt.view(torch.uint8),
        masks,
        tokens,
        num_rows,
        logits.stride(0),
        vocab_size,
        masks.shape[-1],
        ROWS=rows_at_once,
        COLUMNS=columns,
        enable_fp_fusion=FP_FUSION,
        num_warps=16,
    )
    return tokens
