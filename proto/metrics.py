"""Holds the table of metrics of a service, and the interface through which code reports them.

A new metric is one entry here and a call of `Metrics`. Routers serve theirs under /metrics. Metrics
named `vllm:` have the names, labels and buckets of vLLM V1, so that its dashboards work. Workers
pass theirs to Ray, which serves them on the metrics port of each node with `ray_` before the name.
No series is counted in two places, so sums over routers and over workers are correct. Labels have
few values: never an id, a tenant or a text.

One file because the table is one list, of which every entry is a few lines.
"""

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Final, Literal

Values = tuple[str, ...]
"""All values of a label; empty if they are not fixed: installed transports or status codes."""

_SECONDS: Final = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
    30.0,
    60.0,
)
_TTFT: Final = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1.0,
    2.5,
    5.0,
    7.5,
    10.0,
    20.0,
    40.0,
    80.0,
    160.0,
    640.0,
    2560.0,
)
_TPOT: Final = (
    0.01,
    0.025,
    0.05,
    0.075,
    0.1,
    0.15,
    0.2,
    0.3,
    0.4,
    0.5,
    0.75,
    1.0,
    2.5,
    5.0,
    7.5,
    10.0,
    20.0,
    40.0,
    80.0,
)
_LATENCY: Final = (
    0.3,
    0.5,
    0.8,
    1.0,
    1.5,
    2.0,
    2.5,
    5.0,
    10.0,
    15.0,
    20.0,
    30.0,
    40.0,
    50.0,
    60.0,
    120.0,
    240.0,
    480.0,
    960.0,
    1920.0,
    7680.0,
)
_STEP_TOKENS: Final = (
    1.0,
    8.0,
    16.0,
    32.0,
    64.0,
    128.0,
    256.0,
    512.0,
    1024.0,
    2048.0,
    4096.0,
    8192.0,
    16384.0,
)
# 1, 2, 5, 10, ... up to a million.
_TOKENS: Final = (
    *(float(digit * 10**exponent) for exponent in range(6) for digit in (1, 2, 5)),
    1_000_000.0,
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Metric:
    """Describes one metric. `labels` has the values of each label."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    source: Literal["router", "worker"]
    help: str
    labels: Mapping[str, Values] = field(default_factory=dict)
    buckets: tuple[float, ...] = ()  # upper bounds

    @property
    def is_vllm(self) -> bool:
        return self.name.startswith("vllm:")


_table: list[Metric] = []


def _add(
    kind: Literal["counter", "gauge", "histogram"],
    name: str,
    text: str,
    buckets: tuple[float, ...] = (),
    /,  # a label may have the name of a parameter
    worker: bool = False,
    **labels: Values,
) -> Metric:
    metric = Metric(
        name=name,
        kind=kind,
        source="worker" if worker else "router",
        help=text,
        labels=MappingProxyType(labels),
        buckets=buckets,
    )
    _table.append(metric)
    return metric


_counter = partial(_add, "counter")
_gauge = partial(_add, "gauge")
_histogram = partial(_add, "histogram")


# --- routers: requests

RUNNING = _gauge("vllm:num_requests_running", "Requests of this router that are at workers.")
WAITING = _gauge("vllm:num_requests_waiting", "Requests that wait in this router.")
WAITING_BY_REASON = _gauge(
    "vllm:num_requests_waiting_by_reason",
    "Requests that wait in this router; capacity: for free capacity; batch: lines of batches, for "
    "free capacity; deferred: interrupted ones, for a worker that can continue them.",
    reason=("capacity", "batch", "deferred"),
)
KV_CACHE_USAGE = _gauge(
    "vllm:kv_cache_usage_perc",
    "Share of the decode workers' blocks that is in use, 0 to 1. The same in each router.",
)
PROMPT_TOKENS = _counter(
    "vllm:prompt_tokens_total", "Prompt tokens of requests with a first token."
)
CACHED_TOKENS = _counter(
    "vllm:prompt_tokens_cached_total", "Prompt tokens that came from a prefix cache."
)
GENERATION_TOKENS = _counter(
    "vllm:generation_tokens_total", "Generated tokens that are part of an answer."
)
FINISHED = _counter(
    "vllm:request_success_total",
    "Completions that have ended, n for a request with n; abort: the client has cancelled; "
    "error: the request has failed.",
    finished_reason=("stop", "length", "abort", "error"),
)
PREEMPTIONS = _counter(
    "vllm:num_preemptions_total", "Requests that a worker preempted for older ones."
)
PREFIX_QUERIES = _counter(
    "vllm:prefix_cache_queries_total", "Prompt tokens looked up in a prefix cache."
)
PREFIX_HITS = _counter("vllm:prefix_cache_hits_total", "Prompt tokens found in a prefix cache.")
TTFT = _histogram(
    "vllm:time_to_first_token_seconds",
    "Time from the arrival of a request to its first token.",
    _TTFT,
)
ITL = _histogram(
    "vllm:inter_token_latency_seconds",
    "Time between two tokens of a choice, counted when its request ends.",
    _TPOT,
)
TPOT = _histogram(
    "vllm:request_time_per_output_token_seconds",
    "Mean time of a request's tokens after the first.",
    _TPOT,
)
E2E = _histogram(
    "vllm:e2e_request_latency_seconds",
    "Time from the arrival of a request to its last token.",
    _LATENCY,
)
QUEUE_TIME = _histogram(
    "vllm:request_queue_time_seconds", "Time in the queues of the router and its workers.", _LATENCY
)
PREFILL_TIME = _histogram(
    "vllm:request_prefill_time_seconds",
    "Time from admission, or the end of a KV load, to the first token.",
    _LATENCY,
)
DECODE_TIME = _histogram(
    "vllm:request_decode_time_seconds",
    "Time from joining the decode worker's batch to the end.",
    _LATENCY,
)
INFERENCE_TIME = _histogram(
    "vllm:request_inference_time_seconds", "Time at workers, without their queues.", _LATENCY
)
REQUEST_PROMPT = _histogram("vllm:request_prompt_tokens", "Prompt tokens of a request.", _TOKENS)
REQUEST_GENERATION = _histogram(
    "vllm:request_generation_tokens", "Generated tokens of a request.", _TOKENS
)
REQUEST_COMPUTED = _histogram(
    "vllm:request_prefill_kv_computed_tokens",
    "Prompt tokens of a request that were computed, not found in a prefix cache.",
    _TOKENS,
)
REQUEST_MAX_TOKENS = _histogram(
    "vllm:request_params_max_tokens", "max_tokens of a request.", _TOKENS
)
REQUEST_MAX_GENERATION = _histogram(
    "vllm:request_max_num_generation_tokens",
    "Tokens generated for the longest choice of a request.",
    _TOKENS,
)
REQUEST_N = _histogram("vllm:request_params_n", "n of a request.", (1.0, 2.0, 5.0, 10.0, 20.0))
ITERATION_TOKENS = _histogram(
    "vllm:iteration_tokens_total",
    "Outputs of one engine step for this router: tokens and other events.",
    _STEP_TOKENS,
)
SPEC_DRAFTS = _counter(
    "vllm:spec_decode_num_drafts_total", "Steps of a completion that verified draft tokens."
)
SPEC_DRAFT_TOKENS = _counter(
    "vllm:spec_decode_num_draft_tokens_total", "Draft tokens that were verified."
)
SPEC_ACCEPTED_TOKENS = _counter(
    "vllm:spec_decode_num_accepted_tokens_total",
    "Draft tokens that were accepted and are part of an answer.",
)
REFUSALS = _counter(
    "tandem_refusals_total",
    "Requests that the queue for workers refused; full: the queue is full; predicted: the "
    "predicted wait is too long; waited: the request has waited too long.",
    reason=("full", "predicted", "waited"),
)
_SLO_OUTCOMES: Final = ("met", "ttft", "tpot", "e2e", "failed", "refused")
SLO_REQUESTS = _counter(
    "tandem_slo_requests_total",
    "Requests of an SLO class that have ended; met: within every limit of the class; ttft, tpot, "
    "e2e: the first limit that was missed; failed and refused: without a complete answer. Requests "
    "that the client cancelled do not count.",
    slo_class=(),
    outcome=_SLO_OUTCOMES,
)
SLO_TOKENS = _counter(
    "tandem_slo_tokens_total",
    "Generated tokens of these requests.",
    slo_class=(),
    outcome=_SLO_OUTCOMES,
)
ERRORS = _counter(
    "tandem_errors_total",
    "Calls that ended with an error, by gRPC code or HTTP status.",
    api=("grpc", "http"),
    code=(),
)

# --- routers: faults, transfers

INTERRUPTIONS = _counter(
    "tandem_interruptions_total",
    "Attempts that ended early.",
    cause=(
        "invalid",
        "full",
        "gone",
        "crash",
        "transfer",
        "preempted",
        "suspended",
        "not_finite",
        "unable",
    ),
)
RECOVERIES = _counter(
    "tandem_recoveries_total",
    "Attempts after an interruption; handoff: with the KV cache of the prefill worker; suspended: "
    "with the KV cache of a suspended choice; replay: prompt and tokens are computed again.",
    kind=("handoff", "suspended", "replay"),
)
LOST_WORKERS = _counter(
    "tandem_lost_workers_total",
    "Workers that this router has lost: they died or cannot be reached. A drained worker without "
    "requests does not count. About the same in each router.",
)
KV_SECONDS = _histogram(
    "tandem_kv_transfer_seconds",
    "Transfer time of a request's KV cache.",
    _SECONDS,
    transport=(),
)
KV_BYTES = _counter(
    "tandem_kv_transfer_bytes_total", "Bytes of KV cache that workers have pulled.", transport=()
)
WORKERS = _gauge(
    "tandem_workers",
    "Workers that this router knows; lost: the session with the worker has broken. About the same "
    "in each router.",
    pool=("prefill", "decode"),
    state=("ready", "draining", "lost"),
)
READY = _gauge("tandem_ready", "1 while /ready answers 200.")
TASKS = _gauge(
    "tandem_tasks", "Asyncio tasks of this router; the status page has the tasks of workers."
)

# --- workers, through Ray

BLOCKS = _gauge(
    "tandem_blocks",
    "Blocks of KV cache.",
    worker=True,
    state=("free", "cached", "owned", "leased", "reserved"),
)
STATES = _gauge(
    "tandem_states",
    "States of sequences, of a model that keeps states; a running sequence takes two.",
    worker=True,
    state=("free", "cached", "owned", "leased", "reserved"),
)
SEQUENCES = _gauge(
    "tandem_sequences", "Sequences of a worker.", worker=True, state=("running", "waiting")
)
LEASES = _gauge("tandem_leases", "KV caches that wait for a decode worker.", worker=True)
TRANSFERS = _gauge("tandem_kv_transfers", "KV transfers in progress, in or out.", worker=True)
UNBALANCED = _gauge(
    "tandem_unbalanced",
    "1 if the blocks or states that are held are not exactly those of all sequences.",
    worker=True,
)
STEP_SECONDS = _histogram(
    "tandem_step_seconds", "Duration of one step of the engine.", _SECONDS, worker=True
)
STEP_TOKENS = _histogram(
    "tandem_step_tokens", "Tokens computed in one step.", _STEP_TOKENS, worker=True
)
COMPUTED_TOKENS = _counter(
    "tandem_computed_tokens_total", "Tokens computed in all steps.", worker=True
)
SUSPENDS = _counter("tandem_suspends_total", "Choices that were suspended.", worker=True)
RECOMPUTED = _counter(
    "tandem_recomputed_tokens_total", "Tokens computed again after an interruption.", worker=True
)
RESTORED = _counter(
    "tandem_kv_restored_tokens_total",
    "Prompt tokens whose KV cache was loaded from a lower tier or another worker.",
    worker=True,
    tier=("host", "disk", "remote"),
)
KV_FAILURES = _counter(
    "tandem_kv_transfer_failures_total",
    "Streams of KV cache that broke; if the transport is not gRPC, gRPC is tried next.",
    worker=True,
    transport=(),
)
GRAPH_REPLAYS = _counter(
    "tandem_gpu_graph_replays_total", "Steps that ran as a CUDA graph.", worker=True
)
GPU_MEMORY = _gauge(
    "tandem_gpu_memory_bytes", "Memory of the worker's GPU.", worker=True, state=("used", "free")
)
GPU_UTILIZATION = _gauge(
    "tandem_gpu_utilization",
    "Share of the time in which the GPU computes, 0 to 1; absent where NVML cannot read it.",
    worker=True,
)
CPU_POWER = _gauge(
    "tandem_cpu_power_watts",
    "Power of all CPU packages of the worker's host, the same for all workers of a host; absent "
    "where RAPL cannot be read.",
    worker=True,
)
GPU_POWER = _gauge(
    "tandem_gpu_power_watts",
    "Power of the worker's GPU; absent where NVML cannot read it.",
    worker=True,
)

METRICS: Final = tuple(_table)


class Metrics:
    """Receives measurements; this class drops them.

    A call costs about a microsecond. Code makes one for a message or a request, but none for a
    token.
    """

    def add(self, metric: Metric, amount: float = 1.0, **labels: str) -> None:
        """Adds to a counter."""

    def set(self, metric: Metric, value: float, **labels: str) -> None:
        """Sets a gauge."""

    def observe(self, metric: Metric, value: float, count: int = 1, **labels: str) -> None:
        """Counts `count` observations of a value in a histogram."""


NULL_METRICS: Final = Metrics()


class BucketCounts:
    """Counts observations by bucket, at 0.2 us each, for use with every token. Not thread-safe."""

    __slots__ = ("bounds", "counts", "sums")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sums = [0.0] * (len(bounds) + 1)

    def observe(self, value: float, count: int = 1) -> None:
        """Counts `count` observations of a value."""
        bucket = bisect_left(self.bounds, value)
        self.counts[bucket] += count
        self.sums[bucket] += value * count

    def report(self, metrics: Metrics, metric: Metric) -> None:
        """Reports all observations; a bucket's by their mean, which lies in the same bucket."""
        for bound, count, total in zip(
            (*self.bounds, float("inf")), self.counts, self.sums, strict=True
        ):
            if count:
                metrics.observe(metric, min(total / count, bound), count)
