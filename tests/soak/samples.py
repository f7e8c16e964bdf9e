"""Compares two samples of times, and tells whether one grows with time."""

import itertools
import math
import statistics
from bisect import bisect_left, bisect_right
from collections.abc import Sequence

Points = list[tuple[float, float]]
"""Values by time, which grows."""

_SURE = 3.09  # standard deviations: one of a thousand flat series is above

HEAD = f"{'':34}{'n':>7}{'median':>10}{'p90':>10}{'p99':>10}{'worst':>10}"


def quantile(values: Sequence[float], share: float) -> float:
    """Returns the value below which such a share is, interpolated."""
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = math.floor(place)
    return ordered[low] + (ordered[math.ceil(place)] - ordered[low]) * (place - low)


def line(name: str, seconds: Sequence[float], unit: float = 1e3) -> str:
    """Returns a row under HEAD; `unit`: so many make a second."""
    figures = (
        statistics.median(seconds),
        quantile(seconds, 0.9),
        quantile(seconds, 0.99),
        max(seconds),
    )
    return f"{name:34}{len(seconds):7}" + "".join(f"{unit * each:10.3f}" for each in figures)


def rank_sum(one: Sequence[float], other: Sequence[float]) -> float:
    """Returns z of the Wilcoxon-Mann-Whitney test: that far from 0, in standard deviations, are
    samples of one distribution; above 0 where `one` is greater.
    """
    n, m = len(one), len(other)
    ordered = sorted(other)
    larger = sum((bisect_left(ordered, each) + bisect_right(ordered, each)) / 2 for each in one)
    everything = sorted([*one, *other])
    ties = sum(count**3 - count for count in _counts(everything))
    total = n + m
    variance = n * m / 12 * (total + 1 - ties / (total * (total - 1)))
    return (larger - n * m / 2) / math.sqrt(variance) if variance else 0.0


def trend(points: Points) -> tuple[float, float]:
    """Returns the slope of values, the median of those between any two of them (Theil, 1950), of
    which fewer than three in ten may be anything; and one that it is surely not below (Sen, 1968),
    minus infinity if they are too few.
    """
    slopes = sorted(
        (high - low) / (late - early)
        for (early, low), (late, high) in itertools.combinations(points, 2)
    )
    count = len(points)
    place = math.floor(
        (len(slopes) - _SURE * math.sqrt(count * (count - 1) * (2 * count + 5) / 18)) / 2
    )
    return statistics.median(slopes or [0.0]), slopes[place] if place >= 0 and slopes else -math.inf


def grows(points: Points, least: float) -> bool:
    """Returns whether values grow by more than `least` from the first to the last, whatever noise
    there is, and a step at the start.
    """
    _, surely = trend(points)
    return surely * (points[-1][0] - points[0][0]) > least


def _counts(ordered: Sequence[float]) -> list[int]:
    found: list[int] = []
    for index, each in enumerate(ordered):
        if index and each == ordered[index - 1]:
            found[-1] += 1
        else:
            found.append(1)
    return found
