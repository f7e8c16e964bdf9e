"""Tests the table of metrics against vLLM's names and its own page, and the counts by bucket."""

import re
from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from tandem.proto.metrics import ITL, METRICS, TTFT, BucketCounts, Metric, Metrics
from tandem.router.telemetry.prometheus import PrometheusMetrics

PAGE = Path(__file__).parents[2] / "docs" / "operations" / "metrics.md"

VLLM: dict[str, tuple[str, set[str]]] = {
    # vllm/v1/metrics/loggers.py, the names that Prometheus sees, the labels beside model_name and
    # engine
    "vllm:num_requests_running": ("gauge", set()),
    "vllm:num_requests_waiting": ("gauge", set()),
    "vllm:num_requests_waiting_by_reason": ("gauge", {"reason"}),
    "vllm:kv_cache_usage_perc": ("gauge", set()),
    "vllm:prefix_cache_queries_total": ("counter", set()),
    "vllm:prefix_cache_hits_total": ("counter", set()),
    "vllm:num_preemptions_total": ("counter", set()),
    # vllm/v1/spec_decode/metrics.py
    "vllm:spec_decode_num_drafts_total": ("counter", set()),
    "vllm:spec_decode_num_draft_tokens_total": ("counter", set()),
    "vllm:spec_decode_num_accepted_tokens_total": ("counter", set()),
    "vllm:prompt_tokens_total": ("counter", set()),
    "vllm:prompt_tokens_cached_total": ("counter", set()),
    "vllm:generation_tokens_total": ("counter", set()),
    "vllm:request_success_total": ("counter", {"finished_reason"}),
    "vllm:request_prompt_tokens": ("histogram", set()),
    "vllm:request_generation_tokens": ("histogram", set()),
    "vllm:iteration_tokens_total": ("histogram", set()),
    "vllm:request_max_num_generation_tokens": ("histogram", set()),
    "vllm:request_params_n": ("histogram", set()),
    "vllm:request_params_max_tokens": ("histogram", set()),
    "vllm:time_to_first_token_seconds": ("histogram", set()),
    "vllm:inter_token_latency_seconds": ("histogram", set()),
    "vllm:request_time_per_output_token_seconds": ("histogram", set()),
    "vllm:e2e_request_latency_seconds": ("histogram", set()),
    "vllm:request_queue_time_seconds": ("histogram", set()),
    "vllm:request_inference_time_seconds": ("histogram", set()),
    "vllm:request_prefill_time_seconds": ("histogram", set()),
    "vllm:request_decode_time_seconds": ("histogram", set()),
    "vllm:request_prefill_kv_computed_tokens": ("histogram", set()),
}


class Recorder(Metrics):
    """Keeps what it is told to observe."""

    def __init__(self) -> None:
        self.observed: list[tuple[float, int]] = []

    def observe(self, metric: Metric, value: float, count: int = 1, **labels: str) -> None:
        self.observed.append((value, count))


def line_of(metric: Metric) -> str:
    """Returns the line of docs/operations/metrics.md for a metric."""
    labels = " ".join(f"`{name}`" for name in metric.labels)
    name = "ray_" * (metric.source == "worker") + metric.name
    return f"| `{name}` | {metric.kind} | {labels} | {metric.help} |"


def test_vllm_names_have_its_kinds_and_labels() -> None:
    ours = {metric.name: (metric.kind, set(metric.labels)) for metric in METRICS if metric.is_vllm}
    assert ours == VLLM


def test_every_name_is_one_that_prometheus_takes() -> None:
    names = [metric.name for metric in METRICS]
    assert len(set(names)) == len(names)
    for metric in METRICS:
        assert re.fullmatch(r"(vllm:|tandem_)[a-z0-9_]+", metric.name)
        is_exception = metric.name == "vllm:iteration_tokens_total"  # vLLM's name of a histogram
        assert metric.name.endswith("_total") == (metric.kind == "counter" or is_exception)
        assert bool(metric.buckets) == (metric.kind == "histogram")
        assert list(metric.buckets) == sorted(set(metric.buckets))
        assert metric.help.endswith(".")
        assert not {"request_id", "tenant", "key", "worker", "prompt"} & set(metric.labels)
        assert metric.source == "router" or not metric.is_vllm


def test_the_page_has_every_metric_as_in_the_table() -> None:
    """To write it anew: python -m tandem.tests.proto.test_metrics"""
    found = [
        line
        for line in PAGE.read_text().splitlines()
        if re.match(r"\| `(ray_|vllm:|tandem_)", line)
    ]
    assert found == [line_of(metric) for metric in METRICS]


def test_what_a_router_shows_is_the_table() -> None:
    page = PrometheusMetrics("m").render().decode()
    shown = {family.name: family for family in text_string_to_metric_families(page)}
    for metric in METRICS:
        if metric.source == "router":
            family = shown[
                metric.name.removesuffix("_total") if metric.kind == "counter" else metric.name
            ]
            assert (family.type, family.documentation) == (metric.kind, metric.help)
            for sample in family.samples:
                constant = {"model_name", "engine"} if metric.is_vllm else {"model_name"}
                assert set(sample.labels) - {"le"} == constant | set(metric.labels)
                assert sample.value == 0
            if all(metric.labels.values()):  # dashboards find a series before anything has happened
                assert family.samples


@given(
    st.lists(
        st.tuples(st.one_of(st.floats(0, 200), st.sampled_from(ITL.buckets)), st.integers(1, 9)),
        max_size=50,
    )
)
def test_observations_are_reported_in_their_buckets(values: list[tuple[float, int]]) -> None:
    counts, exact = BucketCounts(ITL.buckets), BucketCounts(ITL.buckets)
    recorder: Any = Recorder()
    for value, count in values:
        counts.observe(value, count)
    counts.report(recorder, ITL)
    for value, count in recorder.observed:
        exact.observe(value, count)
    assert exact.counts == counts.counts
    assert abs(sum(exact.sums) - sum(value * count for value, count in values)) < 1e-6
    assert len(recorder.observed) <= len(ITL.buckets) + 1


def test_a_value_at_a_bound_is_in_its_bucket() -> None:
    counts = BucketCounts(TTFT.buckets)
    counts.observe(TTFT.buckets[0])
    counts.observe(TTFT.buckets[-1] + 1)
    assert (counts.counts[0], counts.counts[-1]) == (1, 1)


if __name__ == "__main__":
    print("\n".join(map(line_of, METRICS)))
