"""Computes costs: the KV cache that a sequence holds and moves, and the time and size of steps.

Pure arithmetic, for routers and workers. The KV cache follows from the block tables of the model. A
table has the tokens of one window; all its blocks have the bytes of every other table's blocks, so
that the numbers of their blocks can be added up. The time is fitted to observed times.
"""

import math
from dataclasses import dataclass, field
from math import lcm
from typing import Final, NamedTuple, Self

from . import worker_pb2

_DEFAULT_TOKEN_BYTES: Final = 32_768
"""Bytes of a token for a worker that has not reported them."""

_MEMORY: Final = 0.95
"""Each observation multiplies the weight of the earlier ones by this: about the last 20 count."""

_TRUSTED: Final = 5
"""After this number of observations, a longer time is cut to `_OUTLIER` times the prediction.

A single stall, such as a first compilation, must not redirect requests for long.
"""

_OUTLIER: Final = 4.0
_SPREAD: Final = 0.1
"""Amounts that differ by less than this share of their mean tell little about the unit cost."""

GROWTH_TOKENS: Final = 256
"""Generated tokens that are counted in advance for each sequence.

Most completions are not longer.
"""


class TableCost(NamedTuple):
    """The block table of the layers with one window."""

    block_size: int  # tokens
    token_bytes: int  # of all these layers of the whole model
    window: int | None = None  # tokens that a query attends to; None: all


@dataclass(frozen=True, slots=True)
class KvCost:
    """Holds what the KV cache of one model costs on one worker."""

    block_size: int  # tokens of a base block
    tables: tuple[TableCost, ...]
    state_bytes: int = 0  # of one sequence
    # The worker reports only some blocks of a prefix; see WorkerInfo.has_sparse_points.
    has_sparse_points: bool = False
    # Of a model with one table of all tokens and without states, else 0. Routers compute the costs
    # of a dense model several times for each request.
    dense_token_bytes: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        (block_size, token_bytes, window), *others = self.tables
        is_dense = block_size == self.block_size and window is None
        if others or self.state_bytes or not is_dense:
            token_bytes = 0
        object.__setattr__(self, "dense_token_bytes", token_bytes)  # the dataclass is frozen

    @classmethod
    def of(cls, info: worker_pb2.WorkerInfo) -> Self:
        """Returns the costs on a worker."""
        block_size = max(info.block_size, 1)
        token_bytes = info.kv_bytes_per_token or _DEFAULT_TOKEN_BYTES
        tables = tuple(
            TableCost(
                block_size=max(table.block_size, 1),
                token_bytes=table.token_bytes,
                window=table.window if table.HasField("window") else None,
            )
            for table in info.tables
        )
        return cls(
            block_size,
            tables or (TableCost(block_size, token_bytes),),
            info.state_bytes,
            info.has_sparse_points,
        )

    @property
    def report_blocks(self) -> int:
        """Returns the number of base blocks from one reported position of a prefix to the next.

        A worker with sparse points reports positions where the blocks of all tables end. The others
        report the blocks of the first table.
        """
        if self.has_sparse_points:
            return lcm(*(table.block_size for table in self.tables)) // self.block_size
        return self.tables[0].block_size // self.block_size

    def kv_tokens(self, num_tokens: int, num_shared: int = 0) -> int:
        """Returns the size of the blocks of a sequence, in tokens of base blocks.

        The sequence shares the blocks of its first `num_shared` tokens with other sequences. For a
        model without windows this is the number of its other tokens.
        """
        if self.dense_token_bytes:
            return num_tokens - num_shared
        found = 0
        for block_size, _, window in self.tables:
            own = num_tokens - num_shared
            if window is not None:
                own = min(own, window + block_size)
            found += own * self.block_size // block_size
        return found

    def moved_bytes(self, num_tokens: int, num_cached: int = 0) -> int:
        """Returns the bytes that a transfer of a sequence of `num_tokens` moves.

        The receiver has the first `num_cached` tokens. Tokens before the window are not moved.
        """
        if self.dense_token_bytes:
            return (num_tokens - num_cached) * self.dense_token_bytes
        found = self.state_bytes
        for _, token_bytes, window in self.tables:
            first = num_cached
            if window is not None:
                first = max(first, num_tokens - window + 1)
            found += (num_tokens - first) * token_bytes
        return found


NEUTRAL_COST: Final = KvCost(1, (TableCost(1, _DEFAULT_TOKEN_BYTES),))
"""The costs on an unknown worker: of a model without windows and states."""


def mixed_chunk(most: int, num_sequences: int) -> int:
    """Returns the prompt tokens, at most `most`, that a step computes beside decodes.

    `num_sequences` are the worker's sequences, running and waiting. With few sequences the result
    is about a third of `most`, because their steps are short.
    """
    return min(most, -(-most // 3) + num_sequences)


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearCost:
    """Predicts the seconds of work as `fixed` plus `each` for every unit of its amount."""

    fixed: float
    each: float

    def seconds(self, amount: float) -> float:
        return self.fixed + self.each * amount

    def amount(self, seconds: float) -> float:
        """Returns the greatest amount that takes at most `seconds`; negative if there is none."""
        left = seconds - self.fixed
        if self.each:
            return left / self.each
        return math.inf if left >= 0 else -math.inf


def fit_line(
    amount: float, seconds: float, variance: float, covariance: float, prior: LinearCost
) -> LinearCost:
    """Returns the line through observed work by least squares.

    `amount` and `seconds` are the means of the observations, `variance` is the one of the amounts.
    If the amounts differ too little to separate the slope from the fixed part, the slope is pulled
    towards the slope of `prior`, scaled to the observed speed. So prompts of one length also yield
    a time per token. Neither part is ever negative.
    """
    pull = (_SPREAD * amount) ** 2
    if not pull:  # the amounts are 0, or too small to be squared
        return LinearCost(fixed=seconds, each=prior.each)
    expected = prior.seconds(amount)
    likely = prior.each * seconds / expected if expected else 0.0
    each = min(max((covariance + pull * likely) / (variance + pull), 0.0), seconds / amount)
    return LinearCost(fixed=seconds - each * amount, each=each)


class LinearFit:
    """Fits a line to observed work, see `fit_line`; later observations weigh more."""

    def __init__(self) -> None:
        self._count = 0
        self._weight = 0.0
        # Weighted sums.
        self._amount = 0.0
        self._seconds = 0.0
        self._square = 0.0
        self._product = 0.0

    def observe(self, amount: float, seconds: float, prior: LinearCost) -> None:
        """Adds an observation: work of `amount` took `seconds`."""
        if self._count >= _TRUSTED:
            seconds = min(seconds, _OUTLIER * self.cost(prior).seconds(amount))
        self._count += 1
        self._weight = self._weight * _MEMORY + 1
        self._amount = self._amount * _MEMORY + amount
        self._seconds = self._seconds * _MEMORY + seconds
        self._square = self._square * _MEMORY + amount * amount
        self._product = self._product * _MEMORY + amount * seconds

    def cost(self, prior: LinearCost) -> LinearCost:
        """Returns the fit, or the prior before the first observation."""
        if not self._count:
            return prior
        amount = self._amount / self._weight
        seconds = self._seconds / self._weight
        variance = max(self._square / self._weight - amount * amount, 0.0)
        covariance = self._product / self._weight - amount * seconds
        return fit_line(amount, seconds, variance, covariance, prior)
