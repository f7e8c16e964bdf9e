"""Follows each request from its start to its end, for those who count, trace or log requests.

Costs nothing for a token: what a request has generated is read when somebody scrapes, and when it ends.
"""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, Protocol

from ...proto import inference_pb2
from ...proto.errors import Cancelled, Overloaded
from ...proto.metrics import (
    CACHED_TOKENS,
    DECODE_TIME,
    E2E,
    FINISHED,
    GENERATION_TOKENS,
    INFERENCE_TIME,
    NULL_METRICS,
    PREFILL_TIME,
    PREFIX_HITS,
    PREFIX_QUERIES,
    PROMPT_TOKENS,
    QUEUE_TIME,
    REQUEST_COMPUTED,
    REQUEST_GENERATION,
    REQUEST_MAX_GENERATION,
    REQUEST_MAX_TOKENS,
    REQUEST_N,
    REQUEST_PROMPT,
    TPOT,
    TTFT,
    Metrics,
)
from .trace import TraceContext

_LABELS: Final = {
    inference_pb2.FINISH_REASON_LENGTH: "length",
    inference_pb2.FINISH_REASON_STOP: "stop",
    inference_pb2.FINISH_REASON_TOOL_CALLS: "stop",  # as in vLLM
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestFacts:
    """Holds what is known of a request when it starts. Nothing of its text."""

    request_id: str
    arrived: float  # by time.monotonic()
    num_prompt: int  # tokens
    num_choices: int  # that are to be answered
    max_tokens: int  # of each
    is_chat: bool = False
    temperature: float = 0.0
    top_p: float = 1.0
    trace: TraceContext | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EndedRequest:
    """Holds what there is to tell of a request that has ended. `finish_reasons` has one for each choice that was to be
    answered: stop, length, abort or error."""

    facts: RequestFacts
    timeline: inference_pb2.Timeline
    num_generated: int  # tokens, here
    finish_reasons: tuple[str, ...]
    error: str = ""  # the gRPC code of what has ended it

    @property
    def is_complete(self) -> bool:
        return not {"abort", "error"}.intersection(self.finish_reasons)


Observer = Callable[[EndedRequest], None]


class RequestProgress(Protocol):
    """Tells how far a request is, at any time."""

    @property
    def num_generated(self) -> int: ...

    @property
    def finish_reasons(self) -> "Sequence[inference_pb2.FinishReason]": ...


class RequestTelemetry:
    """Follows the requests that run. Lives in one event loop."""

    def __init__(self, metrics: Metrics = NULL_METRICS, observers: Sequence[Observer] = ()) -> None:
        """`observers` are called with each request at its end; none may raise."""
        self.metrics = metrics
        self._observers = observers
        self._running: set[_RunningRequest] = set()

    @contextmanager
    def track(self, facts: RequestFacts, timeline: inference_pb2.Timeline, outputs: RequestProgress) -> Iterator[None]:
        """Follows a request while the context is open; it ends with what is raised there. At its end `timeline` is
        filled in."""
        running = _RunningRequest(facts, outputs, self.metrics)
        self._running.add(running)
        error: BaseException | None = None
        try:
            yield
        except BaseException as raised:
            error = raised
            raise
        finally:
            self._running.discard(running)
            self._end(running.end(timeline, error))
            error = None  # this frame is part of its traceback

    def count_running(self) -> None:
        """Counts the tokens that the running requests have generated until now; what is left, at their end."""
        for running in self._running:
            running.count()

    def _end(self, ended: EndedRequest | None) -> None:
        if ended is not None:
            _report(self.metrics, ended)
            for observer in self._observers:
                observer(ended)


class _RunningRequest:
    """Counts the tokens of one request."""

    def __init__(self, facts: RequestFacts, outputs: RequestProgress, metrics: Metrics) -> None:
        self._facts = facts
        self._outputs = outputs
        self._metrics = metrics
        self._num_counted = 0
        self._has_begun = False

    def count(self, is_over: bool = False) -> None:
        """Counts what is new since the last call; a request that is over had its prompt computed in any case."""
        num_new = self._outputs.num_generated - self._num_counted
        if not self._has_begun and (num_new > 0 or is_over):
            self._has_begun = True
            self._metrics.add(PROMPT_TOKENS, self._facts.num_prompt)
        if num_new > 0:
            self._metrics.add(GENERATION_TOKENS, num_new)
            self._num_counted += num_new

    def end(self, timeline: inference_pb2.Timeline, error: BaseException | None) -> EndedRequest | None:
        """Returns the request as it has ended; None if it was refused before it began."""
        self.count(is_over=error is None)
        if isinstance(error, Overloaded) and not self._has_begun:
            return None
        has_left = isinstance(error, asyncio.CancelledError | GeneratorExit | Cancelled)
        known = [_LABELS.get(reason, "stop") for reason in self._outputs.finish_reasons]
        rest = "abort" if has_left else "error"
        reasons = [*known, *[rest] * (self._facts.num_choices - len(known))] if error is not None else known
        return EndedRequest(
            facts=self._facts,
            timeline=timeline,
            num_generated=self._num_counted,
            finish_reasons=tuple(reasons[: self._facts.num_choices]),
            error="" if error is None else "CANCELLED" if has_left else getattr(error, "code", "INTERNAL"),
        )


def _report(metrics: Metrics, ended: EndedRequest) -> None:
    timeline, facts = ended.timeline, ended.facts
    for reason in ended.finish_reasons:
        metrics.add(FINISHED, finished_reason=reason)
    if ended.num_generated:
        metrics.add(CACHED_TOKENS, timeline.cached_tokens)
        metrics.add(PREFIX_QUERIES, facts.num_prompt)
        metrics.add(PREFIX_HITS, timeline.cached_tokens)
        metrics.observe(TTFT, timeline.ttft_seconds)
    if not ended.is_complete:
        return
    metrics.observe(E2E, timeline.end_to_end_seconds)
    metrics.observe(QUEUE_TIME, timeline.queue_seconds)
    metrics.observe(PREFILL_TIME, timeline.prefill_seconds)
    metrics.observe(DECODE_TIME, timeline.decode_seconds)
    at_router = timeline.tokenize_seconds + timeline.queue_seconds
    metrics.observe(INFERENCE_TIME, max(timeline.end_to_end_seconds - at_router, 0.0))
    metrics.observe(REQUEST_PROMPT, facts.num_prompt)
    metrics.observe(REQUEST_COMPUTED, max(facts.num_prompt - timeline.cached_tokens, 0))
    metrics.observe(REQUEST_GENERATION, ended.num_generated)
    metrics.observe(REQUEST_MAX_TOKENS, facts.max_tokens)
    metrics.observe(REQUEST_MAX_GENERATION, facts.max_tokens)
    metrics.observe(REQUEST_N, facts.num_choices)
    if timeline.tpot_seconds:
        metrics.observe(TPOT, timeline.tpot_seconds)
