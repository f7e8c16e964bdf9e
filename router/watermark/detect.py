"""Finds the evidence for a watermark in tokens: the test of arXiv 2301.10226, section 2.

Knows nothing of models: a tokenizer, the key, gamma and the width of the context are enough.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from ...proto.hashing import green_bits, green_threshold, hash_context, hash_token_ids

_NEGLIGIBLE: Final = 1e-18  # part of a sum


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """Holds how many tokens of a text are green, and how likely that is without a watermark."""

    num_tokens: int  # scored: different pairs of a context and the token after it
    num_green: int
    gamma: float

    @property
    def z(self) -> float:
        """Returns the excess of green tokens in standard deviations; 0 without scored tokens."""
        if not self.num_tokens:
            return 0.0
        variance = self.num_tokens * self.gamma * (1 - self.gamma)
        return (self.num_green - self.gamma * self.num_tokens) / math.sqrt(variance)

    @property
    def p(self) -> float:
        """Returns the probability of at least this number of green tokens without a watermark.

        It is the tail of the binomial distribution, not of the normal one, which is too small for
        short texts.
        """
        if self.num_green > self.gamma * self.num_tokens:
            return min(_tail(self.num_green, self.num_tokens, self.gamma), 1.0)
        below = _tail(self.num_tokens - self.num_green + 1, self.num_tokens, 1 - self.gamma)
        return max(1.0 - below, 0.0)


def find_evidence(ids: Sequence[int], key: bytes, gamma: float, context_width: int) -> Evidence:
    """Counts the green tokens among token ids.

    The first `context_width` tokens have no context and are not scored. A pair of a context and a
    token counts once, as the paper advises: repeated passages would otherwise count as evidence.
    """
    rows = np.array(ids, np.int64)
    if len(rows) <= context_width:
        return Evidence(num_tokens=0, num_green=0, gamma=gamma)
    windows = np.lib.stride_tricks.sliding_window_view(rows, context_width + 1)
    columns = list(windows.T)  # the words of each context, then the tokens
    # Hashes of 64 bits tell pairs apart. A sort of the pairs would hold the interpreter's lock.
    _, places = np.unique(hash_context(key, columns), return_index=True)
    *context, tokens = [column[places] for column in columns]
    hashes = hash_context(key, context)
    bits = green_bits(
        hash_token_ids(
            tokens.astype(np.int32),
            (hashes >> 32).astype(np.int32),
            hashes.astype(np.int32),
        )
    )
    num_green = int((bits < green_threshold(gamma)).sum())
    return Evidence(num_tokens=len(tokens), num_green=num_green, gamma=gamma)


def _tail(least: int, count: int, probability: float) -> float:
    """Returns the probability of at least `least` successes in `count` trials.

    `least` is above the mean, so that the terms of the sum decrease.
    """
    if least > count:
        return 0.0
    term = math.exp(
        math.lgamma(count + 1)
        - math.lgamma(least + 1)
        - math.lgamma(count - least + 1)
        + least * math.log(probability)
        + (count - least) * math.log1p(-probability)
    )
    total = term
    odds = probability / (1 - probability)
    for successes in range(least, count):
        term *= (count - successes) / (successes + 1) * odds
        total += term
        if term <= total * _NEGLIGIBLE:  # also if all terms are 0
            break
    return total
