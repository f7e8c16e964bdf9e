"""Exports a span for each request over OTLP, with children from its timeline.

Imported only if it is configured. Names and attributes follow OpenTelemetry's conventions for
generative AI; `gen_ai.latency.*` are as in vLLM.
"""

from typing import Final

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace import (
    NonRecordingSpan,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
)
from opentelemetry.util.types import AttributeValue

from ....router.telemetry.requests import PARTS, EndedRequest, RequestFacts
from ....router.telemetry.trace import TraceContext

_NANOSECONDS: Final = 1e9


class SpanRecorder:
    """Turns requests that have ended into spans, which a thread exports."""

    def __init__(self, sink: SpanExporter, *, service: str, sample_ratio: float) -> None:
        """Starts without spans.

        `sample_ratio`: of the requests whose caller has not decided whether they are traced.
        """
        self._provider = TracerProvider(
            resource=Resource.create({"service.name": service}),
            sampler=ParentBased(TraceIdRatioBased(sample_ratio)),
        )
        self._provider.add_span_processor(BatchSpanProcessor(sink))
        self._tracer = self._provider.get_tracer("tandem")

    def record(self, ended: EndedRequest) -> None:
        """Records a request, unless it was refused."""
        if ended.was_refused:
            return
        operation = _operation(ended.facts)
        start = round(ended.facts.began * _NANOSECONDS)
        span = self._tracer.start_span(
            f"{operation} {ended.facts.model}",
            context=_parent(ended.facts.trace),
            kind=SpanKind.SERVER,
            start_time=start,
            attributes=_attributes(ended, operation),
        )
        if ended.error:
            span.set_status(Status(StatusCode.ERROR))
            span.set_attribute("error.type", ended.error)
        context = trace.set_span_in_context(span)
        begin = start
        for part in PARTS:
            seconds = getattr(ended.timeline, f"{part}_seconds")
            end = begin + max(round(seconds * _NANOSECONDS), 0)
            if seconds > 0:
                self._tracer.start_span(part, context=context, start_time=begin).end(end)
            begin = end
        span.end(begin)

    def close(self) -> None:
        """Exports the remaining spans; takes a while if the collector does not answer."""
        self._provider.shutdown()


def otlp_sink(endpoint: str) -> SpanExporter:
    """Returns an exporter of spans to a collector's URL.

    Raises ModuleNotFoundError without the extra `otel`.
    """
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    return OTLPSpanExporter(endpoint=endpoint, timeout=5)


def _parent(trace_context: TraceContext | None) -> Context | None:
    if trace_context is None:
        return None
    parent = SpanContext(
        trace_id=int(trace_context.trace_id, 16),
        span_id=int(trace_context.span_id, 16),
        is_remote=True,
        trace_flags=TraceFlags(
            TraceFlags.SAMPLED if trace_context.is_sampled else TraceFlags.DEFAULT
        ),
    )
    return trace.set_span_in_context(NonRecordingSpan(parent))


def _operation(facts: RequestFacts) -> str:
    if facts.is_embedding:
        return "embeddings"
    return "chat" if facts.is_chat else "text_completion"


def _attributes(ended: EndedRequest, operation: str) -> dict[str, AttributeValue]:
    facts = ended.facts
    timeline = ended.timeline
    return {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": "tandem",
        "gen_ai.request.model": facts.model,
        "gen_ai.response.model": facts.model,
        "gen_ai.response.id": facts.request_id,
        "gen_ai.response.finish_reasons": ended.finish_reasons,
        "gen_ai.request.max_tokens": facts.max_tokens,
        "gen_ai.request.choice.count": facts.num_choices,
        "gen_ai.request.temperature": facts.temperature,
        "gen_ai.request.top_p": facts.top_p,
        "gen_ai.usage.input_tokens": facts.num_prompt,
        "gen_ai.usage.output_tokens": ended.num_generated,
        "gen_ai.usage.cache_read.input_tokens": timeline.cached_tokens,
        "gen_ai.latency.time_to_first_token": timeline.ttft_seconds,
        "gen_ai.latency.e2e": timeline.end_to_end_seconds,
        "gen_ai.latency.time_in_queue": timeline.queue_seconds,
        "gen_ai.latency.time_in_model_prefill": timeline.prefill_seconds,
        "gen_ai.latency.time_in_model_decode": timeline.decode_seconds,
        "tandem.attempts": timeline.attempts,
        "tandem.prefill_worker": timeline.prefill_worker,
        "tandem.decode_worker": timeline.decode_worker,
        "tandem.kv_transport": timeline.kv_transport,
        "tandem.kv_transfer_bytes": timeline.kv_transfer_bytes,
    }
