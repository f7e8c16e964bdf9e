"""Holds the metrics of a router and writes them in the Prometheus text format."""

from collections.abc import Callable, Iterator
from itertools import accumulate, product
from typing import Final

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from ...proto.metrics import METRICS, BucketCounts, Metric, Metrics

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"

_ENGINE: Final = "0"  # vLLM's label for one of several engines of a server
_Family = CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily
_Labels = tuple[str, ...]


class PrometheusMetrics(Metrics, Collector):
    """Holds measurements as plain numbers of one event loop.

    It needs no lock; prometheus_client takes two for each count. A series whose label values are
    known begins at 0.
    """

    def __init__(self, model_name: str) -> None:
        self._model_name = model_name
        self._refresh: list[Callable[[], object]] = []
        self._numbers: dict[Metric, dict[_Labels, float]] = {}
        self._histograms: dict[Metric, dict[_Labels, BucketCounts]] = {}
        for metric in METRICS:
            if metric.source == "router":
                known = list(product(*metric.labels.values()))
                if metric.kind == "histogram":
                    self._histograms[metric] = {
                        labels: BucketCounts(metric.buckets) for labels in known
                    }
                else:
                    self._numbers[metric] = dict.fromkeys(known, 0.0)
        self._registry = CollectorRegistry()
        self._registry.register(self)
        ProcessCollector(registry=self._registry)

    def add(self, metric: Metric, amount: float = 1.0, **labels: str) -> None:
        key = _key(metric, labels)
        values = self._numbers[metric]
        values[key] = values.get(key, 0.0) + amount

    def set(self, metric: Metric, value: float, **labels: str) -> None:
        self._numbers[metric][_key(metric, labels)] = value

    def observe(self, metric: Metric, value: float, count: int = 1, **labels: str) -> None:
        key = _key(metric, labels)
        histograms = self._histograms[metric]
        if key not in histograms:
            histograms[key] = BucketCounts(metric.buckets)
        histograms[key].observe(value, count)

    def before_each_scrape(self, refresh: Callable[[], object]) -> None:
        """Adds a function that sets the metrics that are cheaper to read than to count."""
        self._refresh.append(refresh)

    def render(self) -> bytes:
        """Returns the page, in CONTENT_TYPE."""
        for refresh in self._refresh:
            refresh()
        return generate_latest(self._registry)

    def collect(self) -> Iterator[_Family]:
        """Yields all metrics, for prometheus_client."""
        for metric, values in self._numbers.items():
            kind = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
            family = kind(
                metric.name, metric.help, labels=[*self._constant(metric), *metric.labels]
            )
            for labels, value in values.items():
                family.add_metric([*self._constant(metric).values(), *labels], value)
            yield family
        for metric, histograms in self._histograms.items():
            histogram = HistogramMetricFamily(
                metric.name, metric.help, labels=[*self._constant(metric), *metric.labels]
            )
            for labels, counts in histograms.items():
                bounds = map(floatToGoString, (*metric.buckets, float("inf")))
                buckets = list(zip(bounds, map(float, accumulate(counts.counts)), strict=True))
                histogram.add_metric(
                    [*self._constant(metric).values(), *labels], buckets, sum(counts.sums)
                )
            yield histogram

    def _constant(self, metric: Metric) -> dict[str, str]:
        """Returns the labels that all series of the metric have."""
        return {"model_name": self._model_name} | ({"engine": _ENGINE} if metric.is_vllm else {})


def _key(metric: Metric, labels: dict[str, str]) -> _Labels:
    """Returns the values of the labels in the metric's order. Raises KeyError if one is missing."""
    return tuple([labels[name] for name in metric.labels])
