"""Compares two samples of times."""

import math
import statistics
from bisect import bisect_left, bisect_right
from collections.abc import Sequence

HEAD = f"{'':34}{'n':>7}{'median':>10}{'p90':>10}{'p99':>10}{'worst':>10}"


def quantile(values: Sequence[float], share: float) -> float:
    """Returns the value below which such a share is, interpolated."""
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = math.floor(place)
    return ordered[low] + (ordered[math.ceil(place)] - ordered[low]) * (place - low)


def line(name: str, seconds: Sequence[float], unit: float = 1e3) -> str:
    """Returns a row under HEAD; `unit`: so many make a second."""
    figures = (statistics.median(seconds), quantile(seconds, 0.9), quantile(seconds, 0.99), max(seconds))
    return f"{name:34}{len(seconds):7}" + "".join(f"{unit * each:10.3f}" for each in figures)


def rank_sum(one: Sequence[float], other: Sequence[float]) -> float:
    """Returns z of the Wilcoxon-Mann-Whitney test: that far from 0, in standard deviations, are samples of one
    distribution; above 0 where `one` is greater."""
    n, m = len(one), len(other)
    ordered = sorted(other)
    larger = sum((bisect_left(ordered, each) + bisect_right(ordered, each)) / 2 for each in one)
    everything = sorted([*one, *other])
    ties = sum(count**3 - count for count in _counts(everything))
    total = n + m
    variance = n * m / 12 * (total + 1 - ties / (total * (total - 1)))
    return (larger - n * m / 2) / math.sqrt(variance) if variance else 0.0


def _counts(ordered: Sequence[float]) -> list[int]:
    found: list[int] = []
    for index, each in enumerate(ordered):
        if index and each == ordered[index - 1]:
            found[-1] += 1
        else:
            found.append(1)
    return found
