"""Restricts sampling by top-k, top-p, min-p and typical sampling, in transformers' order.

Each of the first three keeps a set {score >= threshold}, ties included.
"""

from collections.abc import Sequence
from typing import Final

import torch

from ...engine.plan import SamplingParams
from ..device import column, to_device

# Scores that are sorted first. If more are kept, the whole vocabulary must be sorted.
NUM_CANDIDATES: Final = 1024


def has_filter(params: SamplingParams) -> bool:
    """Returns True if any filter is active."""
    return params.top_k > 0 or params.top_p < 1 or params.min_p > 0 or params.typical_p < 1


def filter_scores(
    scores: torch.Tensor, params: Sequence[SamplingParams]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Applies the filters to scores [num_rows, vocab_size].

    Returns the largest scores of each row, descending, with -inf for excluded tokens, and their
    token ids. Both are [num_rows, num_candidates], wide enough for all tokens that are kept.
    """
    vocab_size = scores.shape[1]
    width = min(NUM_CANDIDATES, vocab_size)
    # Not on a GPU, because the comparison below would wait for it.
    if max(row.top_k for row in params) < width and not scores.is_cuda:
        values, ids = scores.topk(width)
        threshold = _threshold(scores, values, params)
        if width == vocab_size or bool((values[:, -1:] < threshold).all()):
            return _keep_typical(values.masked_fill(values < threshold, -torch.inf), params), ids
    values, ids = scores.sort(descending=True)
    kept = values.masked_fill(values < _threshold(scores, values, params), -torch.inf)
    return _keep_typical(kept, params), ids


def _threshold(
    scores: torch.Tensor, values: torch.Tensor, params: Sequence[SamplingParams]
) -> torch.Tensor:
    """Returns each row's smallest kept score [num_rows, 1]; `values` are its largest scores."""
    width = values.shape[1]
    ranks = [min(row.top_k, width) - 1 if row.top_k > 0 else 0 for row in params]
    last = to_device(torch.tensor(ranks), values.device)
    no_top_k = column([float(row.top_k <= 0) for row in params], values) > 0
    kth = values.gather(1, last[:, None]).masked_fill(no_top_k, -torch.inf)
    # top-p counts the mass of the tokens that top-k keeps.
    total = scores.masked_fill(scores < kth, -torch.inf).logsumexp(-1, keepdim=True)
    mass = (values - total).exp()
    top_p = column([row.top_p for row in params], values)
    num_kept = (mass.cumsum(-1) - mass < top_p).sum(-1, keepdim=True).clamp(min=1)
    nucleus = values.gather(1, num_kept - 1).masked_fill(top_p >= 1, -torch.inf)
    relative = values[:, :1] + column([row.min_p for row in params], values).log()
    return torch.maximum(torch.maximum(kth, nucleus), relative)


def _keep_typical(values: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """Masks scores [num_rows, width] by typical sampling (arXiv 2202.00666).

    Keeps the tokens whose information content is nearest to the entropy, up to the mass typical_p.
    """
    if all(row.typical_p >= 1 for row in params):
        return values
    logprobs = values.log_softmax(-1)
    probs = logprobs.exp()
    distance = (logprobs + (probs * -logprobs).nansum(-1, keepdim=True)).abs()
    ordered, order = distance.sort(-1)
    typical_p = column([row.typical_p for row in params], values)
    num_less = (probs.gather(1, order).cumsum(-1) < typical_p).sum(-1, keepdim=True)
    last = ordered.gather(1, num_less.clamp(max=values.shape[1] - 1))
    return values.masked_fill((distance > last) & (typical_p < 1), -torch.inf)
