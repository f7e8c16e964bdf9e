"""Passes the metrics of a worker to Ray; Ray's agent on each node serves them with Ray's own."""

import asyncio
from collections.abc import Awaitable, Callable
from itertools import count
from typing import Any, Final

from ray.util.metrics import Counter, Gauge, Histogram

from ....proto.metrics import METRICS, Metric, Metrics

_TAGS: Final = ("model_name", "pool")
_SECONDS: Final = 5.0  # between two reports; Ray's agent collects them every ten seconds
_INTEGRITY_BEATS: Final = 3  # every third report checks the integrity, which takes up to 10 ms


async def keep_reporting(report: Callable[[bool], Awaitable[None]]) -> None:
    """Calls a worker's `report_metrics`, with or without the integrity, without end."""
    for beat in count():
        await report(beat % _INTEGRITY_BEATS == 0)
        await asyncio.sleep(_SECONDS)


class RayMetrics(Metrics):
    """Passes measurements to Ray's metrics. Ray adds the worker's id and node to each series."""

    def __init__(self, model_name: str, pool: str) -> None:
        self._metrics = {
            metric: _make(metric, model_name, pool)
            for metric in METRICS
            if metric.source == "worker"
        }

    def add(self, metric: Metric, amount: float = 1.0, **labels: str) -> None:
        if amount > 0:  # Ray refuses 0
            self._metrics[metric].inc(amount, tags=labels)

    def set(self, metric: Metric, value: float, **labels: str) -> None:
        self._metrics[metric].set(float(value), tags=labels)

    def observe(self, metric: Metric, value: float, count: int = 1, **labels: str) -> None:
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
        # Ray adds the suffix again.
        made = Counter(metric.name.removesuffix("_total"), metric.help, tag_keys=keys)
    made.set_default_tags({"model_name": model_name, "pool": pool})
    return made
