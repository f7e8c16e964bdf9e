"""Computes the metrics of a benchmark from the times of its requests. Pure: reads no clock.

Latencies count completed requests only, except the latency of refusals. Rates refer to a whole
round, from the start of its first request to the end of its last. Definitions and names are those
in `vllm bench serve`, so that both tools report the same metrics for the same server.
"""

import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final

import numpy as np

LATENCIES: Final = ("ttft", "tpot", "itl", "e2e", "refusal")
REFUSALS: Final = ("RESOURCE_EXHAUSTED", "HTTP 429")
"""Kinds of failure that mean overload."""
RATES: Final = (
    "request_throughput",
    "output_throughput",
    "total_throughput",
    "goodput",
    "slo_attainment",
)
_QUANTILES: Final = {"p50": 50.0, "p90": 90.0, "p99": 99.0}
LATE_SECONDS: Final = 0.05
"""A request that is sent so long after its planned time counts as late."""
_MAX_DETAIL: Final = 200  # characters of a server's error text
_TAIL: Final = {"p99.9": 99.9}  # only of gaps, which are numerous enough


class RequestFailed(Exception):
    """Describes why a request did not complete.

    `kind`: a few words, equal for all failures of the kind. `detail`: the server's text, as one
    line.
    """

    def __init__(self, kind: str, detail: object = "") -> None:
        super().__init__(kind)
        self.kind = kind
        self.detail = " ".join(str(detail).split())[:_MAX_DETAIL]


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRecord:
    """Holds the times of one request, in seconds of one monotonic clock."""

    started: float  # sent
    ended: float  # answered or failed
    chunk_times: Sequence[float]  # arrivals of chunks with tokens; not empty if it completed
    prompt_tokens: int
    output_tokens: int
    failure: RequestFailed | None = None
    late: float = 0.0  # seconds from the planned time of an open loop until it was sent

    @property
    def ttft(self) -> float:
        """Returns the seconds to the first token."""
        return self.chunk_times[0] - self.started

    @property
    def e2e(self) -> float:
        """Returns the seconds to the last token."""
        return self.chunk_times[-1] - self.started

    @property
    def tpot(self) -> float | None:
        """Returns the seconds for each token after the first, or None without such tokens."""
        return (self.e2e - self.ttft) / (self.output_tokens - 1) if self.output_tokens > 1 else None

    @property
    def gaps(self) -> list[float]:
        """Returns the seconds between successive chunks."""
        return [after - before for before, after in pairwise(self.chunk_times)]


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureCount:
    """Counts the failures of one kind."""

    kind: str
    count: int
    example: str  # the first one's detail


@dataclass(frozen=True, kw_only=True)
class Summary:
    """Holds the metrics of one round.

    `figures` holds the RATES (goodput and slo_attainment only under an SLO), `late_ms` and
    `late_sends` (of open loops), and {mean, p50, p90, p99, max} of each of LATENCIES as
    `mean_ttft_ms` and so on, for gaps also `p99.9_itl_ms`. Latencies that no request had are
    absent.
    """

    duration: float  # seconds
    num_requests: int
    num_completed: int
    prompt_tokens: int  # of completed requests
    output_tokens: int
    failures: tuple[FailureCount, ...]  # the most frequent first
    figures: Mapping[str, float]
    # Of this machine, by process name.
    busy_threads: Mapping[str, int] = field(default_factory=dict)


def summarize(records: Sequence[RequestRecord], slo: Mapping[str, float]) -> Summary:
    """Returns the metrics of a round of at least one request.

    `slo`: limits in ms on ttft, tpot and e2e, which may be empty.
    """
    completed = [record for record in records if record.failure is None]
    duration = max(record.ended for record in records) - min(record.started for record in records)
    prompt_tokens = sum(record.prompt_tokens for record in completed)
    output_tokens = sum(record.output_tokens for record in completed)
    figures = {
        "request_throughput": len(completed) / duration,
        "output_throughput": output_tokens / duration,
        "total_throughput": (prompt_tokens + output_tokens) / duration,
        "late_ms": 1000 * max(record.late for record in records),
        "late_sends": sum(record.late > LATE_SECONDS for record in records),
    }
    if slo:
        good = sum(meets(record, slo) for record in records)
        figures |= {"goodput": good / duration, "slo_attainment": good / len(records)}
    refusals = [
        each.ended - each.started
        for each in records
        if each.failure and each.failure.kind in REFUSALS
    ]
    values = {
        "ttft": [record.ttft for record in completed],
        "tpot": [tpot for record in completed if (tpot := record.tpot) is not None],
        "itl": [gap for record in completed for gap in record.gaps],
        "e2e": [record.e2e for record in completed],
        "refusal": refusals,
    }
    for name, seconds in values.items():
        figures |= distribution(name, seconds)
    return Summary(
        duration=duration,
        num_requests=len(records),
        num_completed=len(completed),
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        failures=count_failures(record.failure for record in records),
        figures=figures,
    )


def meets(record: RequestRecord, slo: Mapping[str, float]) -> bool:
    """Returns True if the request completed within every limit (ms).

    A response of one token has no TPOT and meets any limit on it.
    """
    if record.failure is not None:
        return False
    found = {"ttft": record.ttft, "tpot": record.tpot or 0.0, "e2e": record.e2e}
    return all(1000 * found[name] <= limit for name, limit in slo.items())


def count_failures(failures: Iterable[RequestFailed | None]) -> tuple[FailureCount, ...]:
    """Returns the failures by kind, the most frequent first, each with the detail of its first."""
    found = [failure for failure in failures if failure is not None]
    examples = {failure.kind: failure.detail for failure in reversed(found)}
    counts = Counter(failure.kind for failure in found).most_common()
    return tuple(
        FailureCount(kind=kind, count=count, example=examples[kind]) for kind, count in counts
    )


def medians(rounds: Sequence[Summary]) -> dict[str, float]:
    """Returns the median of each figure over the rounds that have it."""
    names = dict.fromkeys(name for each in rounds for name in each.figures)
    return {
        name: statistics.median(each.figures[name] for each in rounds if name in each.figures)
        for name in names
    }


def ratios(ours: Mapping[str, float], peers: Mapping[str, float]) -> dict[str, float]:
    """Returns ours / peers for the metrics that both have, except where the peer's value is 0."""
    return {
        name: ours[name] / peers[name]
        for name in ours
        if peers.get(name) and not name.startswith("late_")
    }


def distribution(name: str, seconds: Sequence[float]) -> dict[str, float]:
    """Returns mean, quantiles (with interpolation) and maximum in ms; empty without values."""
    if not seconds:
        return {}
    quantiles = _QUANTILES | (_TAIL if name == "itl" else {})
    ms = 1000 * np.asarray(seconds)
    points = dict(zip(quantiles, np.percentile(ms, list(quantiles.values())), strict=True))
    found = {"mean": ms.mean(), **points, "max": ms.max()}
    return {f"{statistic}_{name}_ms": float(value) for statistic, value in found.items()}
