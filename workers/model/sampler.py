"""Chooses the next tokens of a batch on the device, as a function of logits, parameters, seed and position alone.

Order: temperature, top-k, top-p, min-p, as transformers' warpers; each keeps a set {logit >= threshold}, ties
included. The choice is Gumbel-max: argmax(logit - log E), E exponential noise hashed from (seed, position, token id).
So neither the batch nor the device changes the draw, and rounding of the logits changes it only at near ties.
"""

from collections.abc import Sequence
from typing import Final

import torch

from ..engine.plan import SamplingParams
from .device import to_device
from .kernels import cpu

MIN_TEMPERATURE: Final = 1e-5  # below it a choice is greedy: the division would overflow float32
NUM_CANDIDATES: Final = 1024  # sorted first; what top-p keeps beyond them costs a sort of the whole vocabulary

_MASK64: Final = 2**64 - 1


def sample(logits: torch.Tensor, params: Sequence[SamplingParams], positions: Sequence[int]) -> torch.Tensor:
    """logits [num_rows, vocab_size] to token ids [num_rows], int64.

    `positions` are those of the sampled tokens in their sequences."""
    native = cpu.usable(logits)
    random = [row for row, row_params in enumerate(params) if row_params.temperature >= MIN_TEMPERATURE]
    tokens = _sample_native(logits, params, positions) if native else logits.argmax(-1)
    for filtered in (True,) if native else (False, True):
        rows = [row for row in random if _filters(params[row]) == filtered]
        if rows:
            index = to_device(torch.tensor(rows), logits.device)
            keys = [_keys(params[row].seed, positions[row]) for row in rows]
            tokens[index] = _draw(logits[index].float(), [params[row] for row in rows], keys, filtered)
    return tokens


def _sample_native(logits: torch.Tensor, params: Sequence[SamplingParams], positions: Sequence[int]) -> torch.Tensor:
    """The tokens of all rows, those with filters greedily."""
    temperatures = [0.0 if _filters(row) or row.temperature < MIN_TEMPERATURE else row.temperature for row in params]
    keys = [_keys(row.seed, position) for row, position in zip(params, positions, strict=True)]
    return cpu.sample(logits, torch.tensor(temperatures), torch.tensor(keys))


def _filters(params: SamplingParams) -> bool:
    return params.top_k > 0 or params.top_p < 1 or params.min_p > 0


def _draw(
    logits: torch.Tensor, params: Sequence[SamplingParams], keys: Sequence[tuple[int, int]], filtered: bool
) -> torch.Tensor:
    scores = logits / _column([row.temperature for row in params], logits)
    ids = torch.arange(logits.shape[1], device=logits.device)[None]
    if filtered:
        scores, ids = filter_scores(scores, params)
    best = (scores - exponential_noise(ids, keys).log_()).argmax(-1, keepdim=True)
    return ids.expand(len(params), -1).gather(1, best).squeeze(1)


def filter_scores(scores: torch.Tensor, params: Sequence[SamplingParams]) -> tuple[torch.Tensor, torch.Tensor]:
    """Applies top-k, top-p and min-p to scores [num_rows, vocab_size].

    Returns the largest scores of each row, descending, with -inf for what is not kept, and their token ids; each
    [num_rows, num_candidates], wide enough to hold all that is kept."""
    vocab_size = scores.shape[1]
    width = min(NUM_CANDIDATES, vocab_size)
    if max(row.top_k for row in params) < width and not scores.is_cuda:  # a GPU would have to be waited for
        values, ids = scores.topk(width)
        threshold = _threshold(scores, values, params)
        if width == vocab_size or bool((values[:, -1:] < threshold).all()):
            return values.masked_fill(values < threshold, -torch.inf), ids
    values, ids = scores.sort(descending=True)
    return values.masked_fill(values < _threshold(scores, values, params), -torch.inf), ids


def _threshold(scores: torch.Tensor, values: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """The smallest score each row keeps, [num_rows, 1], as far as `values`, its largest scores, reach down."""
    width = values.shape[1]
    ranks = [min(row.top_k, width) - 1 if row.top_k > 0 else 0 for row in params]
    last = to_device(torch.tensor(ranks), values.device)
    no_top_k = _column([float(row.top_k <= 0) for row in params], values) > 0
    kth = values.gather(1, last[:, None]).masked_fill(no_top_k, -torch.inf)
    # top-p counts the mass of what top-k keeps.
    total = scores.masked_fill(scores < kth, -torch.inf).logsumexp(-1, keepdim=True)
    mass = (values - total).exp()
    top_p = _column([row.top_p for row in params], values)
    num_kept = (mass.cumsum(-1) - mass < top_p).sum(-1, keepdim=True).clamp(min=1)
    nucleus = values.gather(1, num_kept - 1).masked_fill(top_p >= 1, -torch.inf)
    relative = values[:, :1] + _column([row.min_p for row in params], values).log()
    return torch.maximum(torch.maximum(kth, nucleus), relative)


def exponential_noise(ids: torch.Tensor, keys: Sequence[tuple[int, int]]) -> torch.Tensor:
    """Exponential variates, float32 [num_rows, n], of token ids [1 or num_rows, n] under each row's key.

    A 32-bit integer hash (two rounds of multiply and xor-shift, constants of lowbias32) with half of the key before
    each round; 31 bits of it make the uniform variate."""
    words = torch.tensor([[_signed(word) for word in key] for key in keys], dtype=torch.int32)
    first, second = to_device(words, ids.device)[:, :, None].unbind(1)  # [num_rows, 1] each
    x = ids.to(torch.int32) * _signed(0x9E3779B1) + first
    x ^= (x >> 16).bitwise_and_(0xFFFF)
    x *= _signed(0x7FEB352D)
    x ^= (x >> 15).bitwise_and_(0x1FFFF)
    x += second
    x *= _signed(0x846CA68B)
    x ^= (x >> 16).bitwise_and_(0xFFFF)
    uniform = x.bitwise_and_(0x7FFFFFFF).float().add_(0.5).mul_(2.0**-31).clamp_(max=1 - 2.0**-24)
    return uniform.neg_().log1p_().neg_()


def _keys(seed: int, position: int) -> tuple[int, int]:
    """Two 32-bit keys of a 64-bit seed and a position, by splitmix64 (Steele et al., OOPSLA 2014)."""
    mixed = _splitmix64(_splitmix64(seed & _MASK64) ^ position)
    return mixed >> 32, mixed & 0xFFFFFFFF


def _splitmix64(x: int) -> int:
    x = (x + 0x9E3779B97F4A7C15) & _MASK64
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & _MASK64
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & _MASK64
    return x ^ (x >> 31)


def _signed(word: int) -> int:
    """The int32 with the bits of a 32-bit word."""
    return word - 2**32 if word >= 2**31 else word


def _column(values: Sequence[float], like: torch.Tensor) -> torch.Tensor:
    """[num_rows, 1], float32."""
    return to_device(torch.tensor(values, dtype=torch.float32), like.device)[:, None]
