"""Tests the spans of requests and the lines of their logs, without servers.

test_metrics.py tests them over the wire.
"""

import json
import logging
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from io import StringIO
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from tandem.cluster.config import load_config
from tandem.cluster.serve.telemetry.logs import log_request, write_json_logs
from tandem.cluster.serve.telemetry.otlp import check_otlp
from tandem.cluster.serve.telemetry.tracing import SpanRecorder
from tandem.proto import inference_pb2
from tandem.proto.errors import InvalidArgument
from tandem.router.telemetry.requests import PARTS, EndedRequest, RequestFacts
from tandem.router.telemetry.trace import CURRENT_REQUEST, TraceContext

CALLER = TraceContext(
    trace_id="0af7651916cd43dd8448eb211c80319c", span_id="b7ad6b7169203331", is_sampled=True
)
CANARY = "canary-81ac"


def ended(trace: TraceContext | None = CALLER, **fields: Any) -> EndedRequest:
    """A request that took 2.5 s and ended just now."""
    seconds = dict(zip(PARTS, (0.125, 0.25, 0.125, 0.25, 0.25, 0.0, 1.5), strict=True))
    timeline = inference_pb2.Timeline(
        end_to_end_seconds=2.5, ttft_seconds=1.0, cached_tokens=16, attempts=1, decode_worker="d-0"
    )
    for part, duration in seconds.items():
        setattr(timeline, f"{part}_seconds", duration)
    began = time.time() - 2.5
    facts = RequestFacts(
        request_id="r",
        arrived=0.0,
        began=began,
        num_prompt=20,
        num_choices=1,
        max_tokens=8,
        model="m",
        trace=trace,
    )
    usual: dict[str, Any] = {
        "facts": facts,
        "timeline": timeline,
        "num_generated": 8,
        "longest_choice": 8,
        "finish_reasons": ("length",),
    }
    return EndedRequest(**usual | fields)


def spans_of(*requests: EndedRequest, sample_ratio: float = 1.0) -> tuple[ReadableSpan, ...]:
    exporter = InMemorySpanExporter()
    recorder = SpanRecorder(exporter, service="tandem", sample_ratio=sample_ratio)
    for request in requests:
        recorder.record(request)
    recorder.close()
    return exporter.get_finished_spans()


def seconds_of(span: ReadableSpan) -> float:
    assert span.start_time is not None
    assert span.end_time is not None
    return (span.end_time - span.start_time) / 1e9


def test_a_span_is_the_child_of_the_callers() -> None:
    *children, span = spans_of(ended())
    assert span.context is not None
    assert span.parent is not None
    assert f"{span.context.trace_id:032x}" == CALLER.trace_id
    assert f"{span.parent.span_id:016x}" == CALLER.span_id
    assert {child.context.trace_id for child in children if child.context} == {
        span.context.trace_id
    }
    assert {child.parent.span_id for child in children if child.parent} == {span.context.span_id}


def test_spans_take_the_times_of_the_timeline_and_follow_each_other() -> None:
    request = ended()
    *children, span = spans_of(request)
    assert seconds_of(span) == pytest.approx(request.timeline.end_to_end_seconds)
    assert span.end_time is not None
    assert span.end_time / 1e9 == pytest.approx(time.time(), abs=60)
    assert [child.name for child in children] == [
        "tokenize",
        "queue",
        "dispatch",
        "restore",
        "prefill",
        "decode",
    ]
    for child in children:
        assert seconds_of(child) == pytest.approx(
            getattr(request.timeline, f"{child.name}_seconds")
        )
    edges = [child.start_time for child in children] + [children[-1].end_time]
    assert edges == [span.start_time, *(child.end_time for child in children)]


def test_attributes_are_those_of_generative_ai() -> None:
    span = spans_of(ended())[-1]
    assert span.name == "text_completion m"
    found = dict(span.attributes or {})
    assert found["gen_ai.request.model"] == found["gen_ai.response.model"] == "m"
    assert found["gen_ai.provider.name"] == "tandem"
    assert (found["gen_ai.usage.input_tokens"], found["gen_ai.usage.output_tokens"]) == (20, 8)
    assert found["gen_ai.response.finish_reasons"] == ("length",)
    assert found["gen_ai.latency.time_to_first_token"] == 1.0
    assert found["gen_ai.latency.time_in_queue"] == 0.25
    assert span.status.is_ok or span.status.is_unset


@pytest.mark.parametrize(
    ("fields", "operation"),
    [
        ({}, "text_completion"),
        ({"is_chat": True}, "chat"),
        ({"is_embedding": True}, "embeddings"),
        ({"is_chat": True, "is_embedding": True}, "embeddings"),
    ],
)
def test_a_span_has_the_operation_and_the_model_of_its_request(
    fields: dict[str, Any], operation: str
) -> None:
    """The model may be an adapter."""
    span = spans_of(ended(facts=replace(ended().facts, model="adapter", **fields)))[-1]
    found = dict(span.attributes or {})
    assert span.name == f"{operation} adapter"
    assert found["gen_ai.operation.name"] == operation
    assert found["gen_ai.request.model"] == found["gen_ai.response.model"] == "adapter"


def test_a_request_that_fails_is_an_error() -> None:
    span = spans_of(ended(error="UNAVAILABLE", finish_reasons=("error",)))[-1]
    assert not span.status.is_ok
    assert dict(span.attributes or {})["error.type"] == "UNAVAILABLE"


def test_the_caller_decides_what_is_traced_and_else_the_configuration() -> None:
    unsampled = TraceContext(trace_id=CALLER.trace_id, span_id=CALLER.span_id, is_sampled=False)
    assert spans_of(ended(unsampled)) == ()
    assert spans_of(ended(None), sample_ratio=0.0) == ()
    assert len(spans_of(ended(CALLER), sample_ratio=0.0)) == 7
    assert len(spans_of(ended(None))) == 7


def test_a_request_that_was_refused_is_neither_span_nor_line(lines: StringIO) -> None:
    refused = ended(was_refused=True, error="RESOURCE_EXHAUSTED", finish_reasons=("error",))
    assert spans_of(refused) == ()
    log_request(refused)
    assert lines.getvalue() == ""


@pytest.fixture
def lines() -> Iterator[StringIO]:
    """The JSON log lines of the test."""
    logger = logging.getLogger("tandem")
    before = logger.handlers[:], logger.level, logger.propagate
    stream = StringIO()
    write_json_logs(stream)
    write_json_logs(stream)  # as for a second replica in the process
    yield stream
    logger.handlers[:], logger.propagate = before[0], before[2]
    logger.setLevel(before[1])


def test_a_request_is_a_line(lines: StringIO) -> None:
    log_request(ended())
    (line,) = map(json.loads, lines.getvalue().splitlines())
    assert line["request_id"] == "r"
    assert line["trace_id"] == CALLER.trace_id
    assert (line["level"], line["message"]) == ("info", "request ended")
    assert (line["prompt_tokens"], line["completion_tokens"], line["finish_reasons"]) == (
        20,
        8,
        ["length"],
    )
    assert sum(line[f"{part}_seconds"] for part in PARTS) == line["end_to_end_seconds"] == 2.5


def test_every_line_has_the_request_that_it_is_about(lines: StringIO) -> None:
    logger = logging.getLogger("tandem.router.dispatch.execution")
    token = CURRENT_REQUEST.set(("mine", CALLER.trace_id))
    try:
        logger.warning('%s: a line\nwith "quotes"', "mine")
    finally:
        CURRENT_REQUEST.reset(token)
    logger.warning("another")
    one, other = map(json.loads, lines.getvalue().splitlines())
    assert (one["request_id"], one["trace_id"], one["message"]) == (
        "mine",
        CALLER.trace_id,
        'mine: a line\nwith "quotes"',
    )
    assert "request_id" not in other


OTLP = "opentelemetry.exporter.otlp.proto.http"


@pytest.mark.parametrize("missing", [OTLP, OTLP.rpartition(".")[0]])
def test_a_collector_needs_the_extra_packages(
    missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_otlp("http://collector")
    monkeypatch.delitem(sys.modules, OTLP, raising=False)
    monkeypatch.setitem(sys.modules, missing, None)  # as if it were not installed
    check_otlp(None)
    with pytest.raises(InvalidArgument, match=r"^tracing\.endpoint: needs .*tandem-llm\[otel\]"):
        check_otlp("http://collector")


def test_the_configuration_names_what_is_wrong() -> None:
    assert load_config(None, {"model": "m"}).tracing.endpoint is None
    for key, value in {
        "tracing.endpoint": "collector:4318",
        "tracing.sample_ratio": 2,
        "log_format": "xml",
    }.items():
        with pytest.raises(InvalidArgument, match=key):
            load_config(None, {"model": "m", key: value})
