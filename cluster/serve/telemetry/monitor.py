"""Composes a router's metrics, traces and logs with the server of its ops pages."""

import asyncio
from collections import Counter
from collections.abc import Collection
from itertools import product
from typing import TYPE_CHECKING, Final

from ....proto import worker_pb2
from ....proto.metrics import (
    KV_CACHE_USAGE,
    NULL_METRICS,
    READY,
    RUNNING,
    SLO_REQUESTS,
    SLO_TOKENS,
    TASKS,
    WAITING,
    WAITING_BY_REASON,
    WORKERS,
    Metrics,
)
from ....router.api.browsers import BrowserRules
from ....router.api.server.ops_server import OpsServer
from ....router.dispatch.dispatcher import Dispatcher
from ....router.scheduling.admission import Admission
from ....router.scheduling.registry import WorkerRegistry
from ....router.slo import OUTCOMES
from ....router.telemetry.prometheus import CONTENT_TYPE, PrometheusMetrics
from ....router.telemetry.requests import Observer, RequestTelemetry
from .logs import log_request
from .otlp import check_otlp
from .trace_file import TraceRecorder

if TYPE_CHECKING:
    from .tracing import SpanRecorder

_CLOSE_SECONDS: Final = 2.0
_POOLS: Final = {worker_pb2.ROLE_PREFILL: "prefill", worker_pb2.ROLE_DECODE: "decode"}


class RouterMonitor:
    """Holds a router's metrics, logs and traces, and the server of /metrics, /live and /ready."""

    def __init__(
        self,
        model_name: str,
        *,
        counts: bool,
        browsers: BrowserRules,
        spans: "SpanRecorder | None",
        trace_file: TraceRecorder | None,
        slo_classes: Collection[str],
        logs_requests: bool,
    ) -> None:
        """Creates the telemetry objects; without `counts` there are no metrics and no /metrics.

        `spans` and `trace_file` record each request at its end, `logs_requests` logs it.
        """
        self._prometheus = PrometheusMetrics(model_name) if counts else None
        recorders = [each for each in (spans, trace_file) if each is not None]
        self._recorders = recorders
        self.metrics: Metrics = self._prometheus or NULL_METRICS
        observers: list[Observer] = [log_request] if logs_requests else []
        observers += [each.record for each in recorders]
        for slo_class, outcome in product(slo_classes, OUTCOMES):  # each series begins at 0
            for metric in (SLO_REQUESTS, SLO_TOKENS):
                self.metrics.add(metric, 0, slo_class=slo_class, outcome=outcome)
        self.telemetry = RequestTelemetry(self.metrics, observers)
        render = None if self._prometheus is None else self._prometheus.render
        self.ops = OpsServer(render, CONTENT_TYPE, browsers)

    def watch(self, admission: Admission, dispatcher: Dispatcher, registry: WorkerRegistry) -> None:
        """Reads the gauges at each scrape.

        Running and waiting requests are the router's, so their sum over routers is the service's
        number. Every router knows all workers: for gauges of workers the maximum over routers is
        right, not the sum.
        """
        if self._prometheus is not None:
            self._prometheus.before_each_scrape(self.telemetry.count_running)
            self._prometheus.before_each_scrape(lambda: self._read(admission, dispatcher, registry))

    async def close(self) -> None:
        """Stops the server if it has started, and writes the last recorded requests."""
        await self.ops.stop()
        closing = [asyncio.create_task(asyncio.to_thread(each.close)) for each in self._recorders]
        if closing:
            await asyncio.wait(closing, timeout=_CLOSE_SECONDS)

    def _read(self, admission: Admission, dispatcher: Dispatcher, registry: WorkerRegistry) -> None:
        num_queued = len(admission.queue)
        num_lines = sum(entry.request.is_batch for entry in admission.queue)
        num_parked = dispatcher.num_parked
        self.metrics.set(RUNNING, max(admission.num_active - num_parked, 0))
        self.metrics.set(WAITING, num_queued + num_parked)
        self.metrics.set(WAITING_BY_REASON, num_queued - num_lines, reason="capacity")
        self.metrics.set(WAITING_BY_REASON, num_lines, reason="batch")
        self.metrics.set(WAITING_BY_REASON, num_parked, reason="deferred")
        self.metrics.set(READY, not (self.ops.reason or self.ops.failure))
        self.metrics.set(TASKS, len(asyncio.all_tasks()))
        counts: Counter[tuple[str, str]] = Counter()
        used = total = 0
        for info, load, state in registry.loads():
            counts[_POOLS[info.role], state] += 1
            if info.role == worker_pb2.ROLE_DECODE:
                used += load.total_blocks - load.free_blocks - load.cached_blocks
                total += load.total_blocks
        for pool in WORKERS.labels["pool"]:
            for state in WORKERS.labels["state"]:
                self.metrics.set(WORKERS, counts[pool, state], pool=pool, state=state)
        self.metrics.set(KV_CACHE_USAGE, used / total if total else 0.0)


def open_spans(endpoint: str | None, sample_ratio: float, service: str) -> "SpanRecorder | None":
    """Returns a recorder that exports spans to a collector's URL; None without one.

    Raises InvalidArgument if a package is not installed.
    """
    if endpoint is None:
        return None
    check_otlp(endpoint)
    from .tracing import SpanRecorder, otlp_sink  # needs packages that most services lack

    sink = otlp_sink(endpoint)
    return SpanRecorder(sink, service=service, sample_ratio=sample_ratio)
