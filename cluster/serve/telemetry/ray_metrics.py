"""Hands the metrics of a worker to Ray, whose agent on each node serves them with those of Ray
itself.
"""

import asyncio
from itertools import count
from typing import Any, Final, Protocol

from ray.util.metrics import Counter, Gauge, Histogram

from ....proto.metrics import METRICS, Metric

_TAGS: Final = ("model_name", "pool")
_SECONDS: Final = 5.0  # between two reports; Ray's agent takes them every ten seconds
_INTEGRITY_BEATS: Final = 3  # reports for one of the integrity, which costs a worker up to 10 ms


class Reporter(Protocol):
    """Is a worker that has figures to report."""

    async def report_metrics(self, with_integrity: bool) -> None: ...


async def report_metrics(worker: Reporter) -> None:
    """Has a worker report its figures every few seconds, for ever."""
    for beat in count():
        await worker.report_metrics(with_integrity=beat % _INTEGRITY_BEATS == 0)
        await asyncio.sleep(_SECONDS)


class RayMetrics:
    """Is a `Metrics` for a process of a Ray cluster. Ray adds the worker's id and node to each
    series.
    """

    def __init__(self, model_name: str, pool: str) -> None:
        self._metrics = {
            metric: _make(metric, model_name, pool)
            for metric in METRICS
            if metric.source == "worker"
        }

    def add(self, metric: Metric, amount: float = 1.0, **labels: str) -> None:
        """See Metrics."""
        if amount > 0:  # Ray refuses 0
            self._metrics[metric].inc(amount, tags=labels)

    def set(self, metric: Metric, value: float, **labels: str) -> None:
        """See Metrics."""
        self._metrics[metric].set(float(value), tags=labels)

    def observe(self, metric: Metric, value: float, count: int = 1, **labels: str) -> None:
        """See Metrics."""
        for _ in range(count):
            self._metrics[metric].observe(value, tags=labels)


def _make(metric: Metric, model_name: str, pool: str) -> Any:
    keys = (*_TAGS, *metric.labels)
    if metric.kind == "histogram":
        made: Any = Histogram(
            metric.name, metric.help, boundaries=list(metric.buckets), tag_keys=keys
        )
    elif metric.kind == "gauge":
        made = Gauge(metric.name, metric.help, tag_keys=keys)
    else:
        made = Counter(
            metric.name.removesuffix("_total"), metric.help, tag_keys=keys
        )  # Ray adds it again
    made.set_default_tags({"model_name": model_name, "pool": pool})
    return made
