"""Describes the requests that a planned service gets, at any rate, and its objectives."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ..traces.read import TracedRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """Holds the limits that a share of the requests must meet."""

    limits: Mapping[str, float]  # ms, by the names of `tandem bench --slo`
    attainment: float = 0.95

    def __str__(self) -> str:
        limits = " and ".join(f"{name.upper()} {limit:g} ms" for name, limit in self.limits.items())
        return f"{limits} for {self.attainment:.0%} of the requests"


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
        return PlannedWorkload([_scale(each, factor) for each in self.requests])


def _scale(request: TracedRequest, factor: float) -> TracedRequest:
    block = max(round(request.block_tokens * factor), 1)
    length = max(round(request.input_length * factor), 1)
    return replace(
        request,
        input_length=min(length, block * len(request.block_hashes))
        if request.block_hashes
        else length,
        output_length=max(round(request.output_length * factor), 1),
        block_tokens=block,
    )
