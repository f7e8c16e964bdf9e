"""Predicts the time of a service's work: steps of workers, requests at routers, KV transfers.

Pure arithmetic on numbers that `tandem plan measure` fits. Knows nothing of models or devices.
"""

import statistics
from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields, replace
from itertools import combinations
from typing import Final, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from ...workers.engine.plan import StepPlan

_READ_TOKENS: Final = 32
"""Prompt tokens that share one read of the keys before them, as in the attention kernels."""

_FEW_TOKENS: Final = (4, 8, 12, 16, 24, 32, 48, 64, 128, 256)
"""Numbers of tokens up to which the products of a step may take less time than reading the weights.

The number that fits best depends on the processor's rate of products and its memory bandwidth.
"""

_MARGIN: Final = 1.05
"""How far work may exceed the measured work: tokens of a measured grid seldom end at its bound."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepWork:
    """Holds the amounts of a step that decide its time."""

    sequences: int = 0
    # Tokens whose keys and values are read. A decode reads its context once; a prompt reads its
    # context once for every 32 of its tokens.
    context_tokens: int = 0
    prompt_tokens: int = 0
    # The number of (query, key) pairs of prompts: the sum of prompt tokens x their mean context.
    prompt_context: int = 0

    @classmethod
    def of(cls, plan: StepPlan) -> Self:
        """Returns the work of an engine's step. A draft token counts as a decode."""
        found = cls(sequences=len(plan.sequences))
        context = 0
        for step in plan.sequences:
            num_tokens = len(step.token_ids)
            if num_tokens > 1 + step.num_draft:
                found += cls.of_prompt(step.start, num_tokens)
            else:
                context += _count_pairs(step.start, num_tokens)
        return found + cls(context_tokens=context)

    @classmethod
    def of_prompt(cls, start: int, num_tokens: int) -> Self:
        """Returns the work of prompt tokens from position `start` on, without their sequence."""
        pairs = _count_pairs(start, num_tokens)
        return cls(
            context_tokens=-(-num_tokens // _READ_TOKENS) * pairs // num_tokens,
            prompt_tokens=num_tokens,
            prompt_context=pairs,
        )

    def __add__(self, other: Self) -> Self:
        sums = {name: getattr(self, name) + getattr(other, name) for name in _AMOUNTS}
        return replace(self, **sums)

    @property
    def num_tokens(self) -> int:
        """Returns the tokens of all sequences; a prompt counts as one more than it has."""
        return self.sequences + self.prompt_tokens

    def further_tokens(self, few_tokens: int) -> int:
        """Returns the tokens beyond the first `few_tokens`."""
        return max(self.num_tokens - few_tokens, 0)


def prompt_steps(num_tokens: int, chunk_tokens: int) -> list[StepWork]:
    """Returns the steps of one prompt that is alone, in chunks of at most `chunk_tokens`."""
    return [
        StepWork(sequences=1) + StepWork.of_prompt(start, min(chunk_tokens, num_tokens - start))
        for start in range(0, num_tokens, chunk_tokens)
    ]


def _count_pairs(start: int, num_tokens: int) -> int:
    """Returns the number of (query, key) pairs of tokens from position `start` on."""
    return num_tokens * start + num_tokens * (num_tokens + 1) // 2


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCosts:
    """Predicts the seconds of a step as a sum of non-negative terms."""

    fixed: float  # of every step: the weights and the host
    each_sequence: float
    each_context_token: float
    each_prompt_token: float
    each_prompt_context: float
    each_further_token: float = 0.0  # in addition, beyond `few_tokens`
    # To read all routed experts. The more tokens choose some, the fewer are left to read, so
    # this is no term of a fit to measured steps.
    expert_seconds: float = 0.0
    chosen_share: float = 1.0  # of a layer's experts, by one token
    few_tokens: int = 0  # whose products take less time than reading the weights
    # The greatest measured amounts. None: the costs are arithmetic, and hold for any work.
    measured: StepWork | None = None

    def seconds(self, work: StepWork) -> float:
        """Returns the predicted time of a step."""
        return (
            self.fixed
            + self.each_sequence * work.sequences
            + self.each_context_token * work.context_tokens
            + self.each_prompt_token * work.prompt_tokens
            + self.each_prompt_context * work.prompt_context
            + self.each_further_token * work.further_tokens(self.few_tokens)
            + self.seconds_of_experts(work.num_tokens)
        )

    def seconds_of_experts(self, num_tokens: int) -> float:
        """Returns the time to read the experts that `num_tokens` choose at random."""
        return self.expert_seconds * (1 - (1 - self.chosen_share) ** num_tokens)

    def outside(self, work: StepWork) -> list[str]:
        """Returns the amounts of the work for which the prediction is not measured, as text."""
        if self.measured is None:
            return []
        return [
            f"{each.name.replace('_', ' ')}: {amount:,}, measured up to {most:,}"
            for each, amount, most in zip(
                fields(work), astuple(work), astuple(self.measured), strict=True
            )
            if amount > _MARGIN * most
        ]

    def with_host(self, seconds: float, each_sequence: float) -> "StepCosts":
        """Returns the costs if the host takes this time besides each step."""
        return replace(
            self,
            fixed=self.fixed + seconds,
            each_sequence=self.each_sequence + each_sequence,
        )

    def scaled(self, factor: float) -> "StepCosts":
        """Returns the costs of steps that take `factor` times as long."""
        terms = {name: factor * getattr(self, name) for name in (*_TERMS, "expert_seconds")}
        return replace(self, **terms)


_AMOUNTS: Final = tuple(each.name for each in fields(StepWork))
_TERMS: Final = tuple(
    each.name
    for each in fields(StepCosts)
    if each.name not in ("expert_seconds", "chosen_share", "few_tokens", "measured")
)
"""The terms that are fitted to measured steps."""
LEAST_SAMPLES: Final = len(_TERMS) + 1
"""Measured steps of a fit, at least: without one of them, there is still one for each term."""


class StepSample(NamedTuple):
    """Holds a measured step."""

    work: StepWork
    seconds: float

    def as_row(self) -> tuple[float, ...]:
        """Returns the amounts of the work, and the seconds."""
        return *astuple(self.work), self.seconds

    @classmethod
    def of_row(cls, row: Sequence[float]) -> Self:
        """Returns the sample of a row that `as_row` has returned."""
        *amounts, seconds = row
        return cls(StepWork(**dict(zip(_AMOUNTS, map(int, amounts), strict=True))), seconds)


class StepFit(NamedTuple):
    """Holds fitted costs and the relative errors of predictions for steps left out of the fit."""

    costs: StepCosts
    errors: tuple[float, ...]  # of each sample, by costs fitted to the others; above 0: too long

    @property
    def mean_error(self) -> float:
        """Returns the mean of the absolute leave-one-out errors."""
        return statistics.fmean(map(abs, self.errors))

    @property
    def worst_error(self) -> float:
        return max(map(abs, self.errors))


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceCosts:
    """Predicts the times of a service's parts, in seconds."""

    prefill: StepCosts  # of a worker of the prefill pool
    decode: StepCosts  # of a worker of the decode pool, which also prefills without a prefill pool
    # Of a request until its first token, besides its steps and the router's processor time.
    request_seconds: float = 0.0
    router_seconds_per_request: float = 0.0
    router_seconds_per_token: float = 0.0  # of output
    transfer_seconds: float = 0.0  # of a KV transfer without bytes
    transfer_bytes_per_second: float = float("inf")
    # How much longer a step takes while the workers beside it on the same cores are busy: of a
    # decode worker, and of a prefill worker, to which other processes are preferred.
    contention: float = 1.0
    prefill_contention: float = 1.0

    def scaled(self, factor: float) -> "ServiceCosts":
        """Returns the costs if every step takes `factor` times as long."""
        return replace(self, prefill=self.prefill.scaled(factor), decode=self.decode.scaled(factor))


def fit_steps(samples: Sequence[StepSample]) -> StepFit:
    """Fits costs to measured steps, so that the relative errors are small.

    `few_tokens` is the number that fits all samples best; the leave-one-out fits keep it. Raises
    ValueError for fewer samples than terms.
    """
    if len(samples) < LEAST_SAMPLES:
        raise ValueError(f"needs at least {LEAST_SAMPLES} measured steps, got {len(samples)}")
    few_tokens = min(_FEW_TOKENS, key=lambda few: _misfit(_relative_rows(samples, few)))
    rows = _relative_rows(samples, few_tokens)
    errors = []
    for index in range(len(samples)):
        others = np.delete(rows, index, axis=0)
        errors.append(float(rows[index] @ nonnegative_least_squares(others, _ones(others)) - 1))
    found = nonnegative_least_squares(rows, _ones(rows))
    measured = {name: max(getattr(sample.work, name) for sample in samples) for name in _AMOUNTS}
    costs = StepCosts(
        **dict(zip(_TERMS, map(float, found), strict=True)),
        few_tokens=few_tokens,
        measured=StepWork(**measured),
    )
    return StepFit(costs, tuple(errors))


def _relative_rows(samples: Sequence[StepSample], few_tokens: int) -> NDArray[np.float64]:
    """Returns the amounts of each sample by its seconds, [samples, terms]."""
    rows: NDArray[np.float64] = np.array(
        [[1.0, *astuple(each.work), each.work.further_tokens(few_tokens)] for each in samples]
    )
    rows /= np.array([[each.seconds] for each in samples])
    return rows


def _misfit(rows: NDArray[np.float64]) -> float:
    """Returns the sum of the squared relative errors of the best fit."""
    ones = _ones(rows)
    return float(((rows @ nonnegative_least_squares(rows, ones) - ones) ** 2).sum())


def nonnegative_least_squares(
    rows: NDArray[np.float64], targets: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Returns x >= 0 [terms] for which rows @ x is closest to `targets`.

    The solution is the plain least squares solution of the terms that are above 0 in it. With few
    terms, every subset can be tried.
    """
    num_terms = rows.shape[1]
    scale = np.maximum(np.abs(rows).max(axis=0), np.finfo(np.float64).tiny)
    best = np.zeros(num_terms)
    least = float(targets @ targets)
    for size in range(1, num_terms + 1):
        for chosen in map(list, combinations(range(num_terms), size)):
            part = rows[:, chosen] / scale[chosen]
            solution = np.linalg.lstsq(part, targets, rcond=None)[0]
            error = float(((part @ solution - targets) ** 2).sum())
            if solution.min() >= 0 and error < least:
                least = error
                best = np.zeros(num_terms)
                best[chosen] = solution / scale[chosen]
    return best


def _ones(rows: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.ones(len(rows))
