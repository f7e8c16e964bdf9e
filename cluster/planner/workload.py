"""Describes the requests that a planned service gets, at any rate, and its objectives."""

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Final

from ..traces.read import TracedRequest, TraceScale

_LARGEST_DENOMINATOR: Final = 1_000  # of a factor of lengths: 0.9 is 9/10, not its nearest float


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """Holds the limits that a share of the requests must meet."""

    limits: Mapping[str, float]  # ms, by the names of `tandem bench --slo`
    attainment: float = 0.95

    def __str__(self) -> str:
        limits = " and ".join(f"{name.upper()} {limit:g} ms" for name, limit in self.limits.items())
        return f"{limits} for {100 * self.attainment:g}% of the requests"


@dataclass(frozen=True, slots=True)
class PlannedWorkload:
    """Holds requests in the order of their times, the first one at 0."""

    requests: Sequence[TracedRequest]

    @classmethod
    def poisson(
        cls, rate: float, input_length: int, output_length: int, count: int, seed: int
    ) -> "PlannedWorkload":
        """Returns `count` requests of equal lengths, which arrive as a Poisson process.

        Their times are scaled, so that their mean rate is exactly `rate`.
        """
        rng = random.Random(seed)
        now = 0.0
        requests = []
        for _ in range(count):
            requests.append(
                TracedRequest(
                    time=now,
                    input_length=input_length,
                    output_length=output_length,
                    block_hashes=(),
                    block_tokens=1,
                )
            )
            now += rng.expovariate(rate)
        return cls(requests).at_rate(rate)

    @property
    def rate(self) -> float:
        """Returns the mean requests/s; 0 for one request."""
        seconds = self.requests[-1].time
        return (len(self.requests) - 1) / seconds if seconds else 0.0

    @property
    def _num_tokens(self) -> int:
        return sum(each.input_length + each.output_length for each in self.requests)

    @property
    def mean_length(self) -> int:
        """Returns the mean tokens of a sequence."""
        return self._num_tokens // len(self.requests)

    @property
    def longest_input(self) -> int:
        return max(each.input_length for each in self.requests)

    @property
    def longest(self) -> int:
        """Returns the tokens of the longest sequence."""
        return max(each.input_length + each.output_length for each in self.requests)

    def at_rate(self, rate: float) -> "PlannedWorkload":
        """Returns the same requests, with times that are scaled to another rate."""
        factor = self.rate / rate
        return PlannedWorkload([replace(each, time=factor * each.time) for each in self.requests])

    def with_lengths(self, factor: float) -> "PlannedWorkload":
        """Returns the requests with scaled lengths. Their blocks are scaled as well."""
        return PlannedWorkload([_scale(each, factor).apply(each) for each in self.requests])

    def length_change(self, factor: float) -> float:
        """Returns by which share `with_lengths` changes the sum of all lengths."""
        scaled = self.with_lengths(factor)
        return scaled._num_tokens / self._num_tokens - 1

    def lasting(self, seconds: float) -> "PlannedWorkload":
        """Returns the requests, repeated at the same rate until they arrive for `seconds`.

        The blocks of a repeated prompt have other hashes: no cache holds them.
        """
        last = self.requests[-1].time
        if last >= seconds:
            return self
        period = len(self.requests) / self.rate
        num_hashes = 1 + max(max(each.block_hashes, default=0) for each in self.requests)
        repeated = [
            replace(
                each,
                time=number * period + each.time,
                block_hashes=tuple(number * num_hashes + block for block in each.block_hashes),
            )
            for number in range(1 + math.ceil((seconds - last) / period))
            for each in self.requests
        ]
        num_before = sum(each.time < seconds for each in repeated)
        return PlannedWorkload(repeated[: num_before + 1])


def _scale(request: TracedRequest, factor: float) -> TraceScale:
    """Returns the nearest scale by which the request's blocks keep whole numbers of tokens."""
    if not request.block_hashes:
        return TraceScale(Fraction(factor).limit_denominator(_LARGEST_DENOMINATOR))
    block_tokens = max(round(factor * request.block_tokens), 1)
    return TraceScale(Fraction(block_tokens, request.block_tokens))
