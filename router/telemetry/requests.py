"""Follows requests from start to end, for metrics, traces, log lines and the console.

A token costs nothing here: the tokens of a request are read on demand and at its end.
"""

import asyncio
from collections.abc import Callable, Collection, Iterator, Sequence
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
    SLO_REQUESTS,
    SLO_TOKENS,
    TPOT,
    TTFT,
    Metrics,
)
from ..slo import RequestSlo, SloOutcome
from .trace import TraceContext

PARTS: Final = ("tokenize", "queue", "dispatch", "restore", "prefill", "kv_transfer", "decode")
"""The parts of a timeline in their order; they add up to the time of the request."""

_REASONS: Final = {
    inference_pb2.FINISH_REASON_LENGTH: "length",
    inference_pb2.FINISH_REASON_TOOL_CALLS: "tool_calls",
    inference_pb2.FINISH_REASON_TIME: "time",
    inference_pb2.FINISH_REASON_REPETITION: "repetition",
}
_FINISHED_LABELS: Final = {"tool_calls": "stop", "time": "length", "repetition": "stop"}
"""By reason, the label of vLLM's metric."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestFacts:
    """Holds the facts that are known when a request starts, without its text.

    `prompt` and `prefix_salt` are only for hashes: no log, page or file may have the prompt.
    """

    request_id: str  # as the client knows it
    arrived: float  # by time.monotonic()
    began: float  # the same moment, by time.time()
    num_prompt: int  # tokens
    num_choices: int  # in the answer
    max_tokens: int  # of each choice
    model: str = ""
    tenant: str = ""
    key_name: str = ""  # of the caller's key
    is_chat: bool = False
    is_embedding: bool = False  # also of a chat
    is_batch: bool = False  # a line of a batch
    temperature: float = 0.0
    top_p: float = 1.0
    trace: TraceContext | None = None
    prompt: Sequence[int] = ()  # token ids; empty if the request began at another router
    prefix_salt: bytes = b""  # requests with the same salt share cached prefixes
    slo: RequestSlo | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EndedRequest:
    """Describes a request that has ended."""

    facts: RequestFacts
    timeline: inference_pb2.Timeline
    num_generated: int  # tokens of all choices that this service generated
    longest_choice: int  # most of these tokens in one choice
    # Of each choice of the answer: stop, length, tool_calls, time, repetition, abort or error.
    finish_reasons: tuple[str, ...]
    error: str = ""  # the gRPC code of the error that ended it; CANCELLED if the client left
    was_refused: bool = False  # before it began; admission counts it

    @property
    def is_complete(self) -> bool:
        return not self.error


Observer = Callable[[EndedRequest], None]


class RequestProgress(Protocol):
    """Reports the progress of a request at any time."""

    @property
    def num_generated(self) -> int: ...

    @property
    def longest_choice(self) -> int: ...

    @property
    def finish_reasons(self) -> "Sequence[inference_pb2.FinishReason]":
        """The finish reasons of the answered choices that have ended."""


@dataclass(slots=True, kw_only=True)
class RequestTotals:
    """Sums over the requests of a router, including those that run."""

    begun: int = 0
    ended: int = 0
    failed: int = 0
    tokens: int = 0  # generated
    prompt_tokens: int = 0  # of requests with a first token

    def add(self, other: "RequestTotals") -> None:
        """Adds the sums of other requests."""
        self.begun += other.begun
        self.ended += other.ended
        self.failed += other.failed
        self.tokens += other.tokens
        self.prompt_tokens += other.prompt_tokens


class RunningRequest:
    """Follows one request, whose `timeline` is filled meanwhile."""

    __slots__ = ("_has_begun", "_num_counted", "_outputs", "facts", "timeline")

    def __init__(
        self, facts: RequestFacts, timeline: inference_pb2.Timeline, outputs: RequestProgress
    ) -> None:
        self.facts = facts
        self.timeline = timeline
        self._outputs = outputs
        self._num_counted = 0
        self._has_begun = False

    @property
    def num_generated(self) -> int:
        """The number of tokens until now."""
        return self._outputs.num_generated

    def take_new(self, is_over: bool = False) -> tuple[int, int]:
        """Returns the new tokens of prompt and answer since the last call.

        The tokens of the prompt count with the first token, or when the request `is_over`.
        """
        num_new = max(self.num_generated - self._num_counted, 0)
        self._num_counted += num_new
        if self._has_begun or not (num_new or is_over):
            return 0, num_new
        self._has_begun = True
        return self.facts.num_prompt, num_new

    def end(self, error: BaseException | None) -> EndedRequest:
        """Returns the description of the ended request; call `take_new` before."""
        has_left = isinstance(error, asyncio.CancelledError | GeneratorExit | Cancelled)
        reasons = [_REASONS.get(reason, "stop") for reason in self._outputs.finish_reasons]
        code = ""
        if error is not None:
            code = "CANCELLED" if has_left else getattr(error, "code", "INTERNAL")
            num_open = self.facts.num_choices - len(reasons)
            reasons += ["abort" if has_left else "error"] * num_open
        return EndedRequest(
            facts=self.facts,
            timeline=self.timeline,
            num_generated=self._num_counted,
            longest_choice=self._outputs.longest_choice,
            finish_reasons=tuple(reasons),
            error=code,
            was_refused=isinstance(error, Overloaded) and not self._has_begun,
        )


class RequestTelemetry:
    """Follows the running requests of one event loop."""

    def __init__(self, metrics: Metrics = NULL_METRICS, observers: Sequence[Observer] = ()) -> None:
        """Calls `observers` with each ended request; they may be added later and must not raise."""
        self.metrics = metrics
        self.observers = list(observers)
        self.totals = RequestTotals()
        self._new_totals: dict[str, RequestTotals] = {}  # by tenant, since the last `take_totals`
        self._running: dict[RunningRequest, None] = {}

    @property
    def running(self) -> Collection[RunningRequest]:
        """The running requests, the oldest first."""
        return self._running.keys()

    @contextmanager
    def track(
        self, facts: RequestFacts, timeline: inference_pb2.Timeline, outputs: RequestProgress
    ) -> Iterator[None]:
        """Follows a request while the context is open; an exception there is the request's error.

        `timeline` must be complete when the context ends.
        """
        running = RunningRequest(facts, timeline, outputs)
        self._running[running] = None
        self._add(facts.tenant, RequestTotals(begun=1))
        error: BaseException | None = None
        try:
            yield
        except BaseException as raised:
            error = raised
            raise
        finally:
            del self._running[running]
            self._end(running, error)
            error = None  # this frame is part of its traceback

    def count_running(self) -> None:
        """Counts the tokens of running requests until now; the others are counted at the end."""
        for running in self._running:
            self._count(running)

    def take_totals(self) -> dict[str, RequestTotals]:
        """Removes and returns the sums since the last call, by tenant."""
        taken, self._new_totals = self._new_totals, {}
        return taken

    def _add(self, tenant: str, sums: RequestTotals) -> None:
        self.totals.add(sums)
        self._new_totals.setdefault(tenant, RequestTotals()).add(sums)

    def _count(self, running: RunningRequest, is_over: bool = False) -> None:
        num_prompt, num_new = running.take_new(is_over)
        if num_prompt:
            self.metrics.add(PROMPT_TOKENS, num_prompt)
        if num_new:
            self.metrics.add(GENERATION_TOKENS, num_new)
        if num_prompt or num_new:
            self._add(running.facts.tenant, RequestTotals(prompt_tokens=num_prompt, tokens=num_new))

    def _end(self, running: RunningRequest, error: BaseException | None) -> None:
        self._count(running, is_over=error is None)
        ended = running.end(error)
        failed = int(ended.error not in ("", "CANCELLED"))
        self._add(running.facts.tenant, RequestTotals(ended=1, failed=failed))
        if not ended.was_refused:
            _report(self.metrics, ended)
        if ended.error != "CANCELLED":  # nobody saw whether it would have kept its limits
            count_slo(self.metrics, ended.facts.slo, _judge(ended), ended.num_generated)
        for observer in self.observers:
            observer(ended)


def count_slo(
    metrics: Metrics, slo: RequestSlo | None, outcome: SloOutcome, num_tokens: int = 0
) -> None:
    """Counts a request and its generated tokens in its SLO class, if it has one."""
    if slo is not None:
        metrics.add(SLO_REQUESTS, slo_class=slo.name, outcome=outcome)
        metrics.add(SLO_TOKENS, num_tokens, slo_class=slo.name, outcome=outcome)


def _judge(ended: EndedRequest) -> SloOutcome:
    if ended.was_refused:
        return "refused"
    if not ended.is_complete or ended.facts.slo is None:
        return "failed"
    if not ended.num_generated and "time" in ended.finish_reasons:  # max_time_ms ended the wait
        return "failed"
    return ended.facts.slo.limits.judge(ended.timeline)


def _report(metrics: Metrics, ended: EndedRequest) -> None:
    timeline, facts = ended.timeline, ended.facts
    for reason in ended.finish_reasons:
        metrics.add(FINISHED, finished_reason=_FINISHED_LABELS.get(reason, reason))
    if ended.num_generated:
        metrics.add(CACHED_TOKENS, timeline.cached_tokens)
        metrics.add(PREFIX_QUERIES, facts.num_prompt)
        metrics.add(PREFIX_HITS, timeline.cached_tokens)
        if not facts.is_batch:
            metrics.observe(TTFT, timeline.ttft_seconds)
    if not ended.is_complete:
        return
    if not facts.is_batch:  # which wait for all other requests, as they should
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
    metrics.observe(REQUEST_MAX_GENERATION, ended.longest_choice)
    metrics.observe(REQUEST_N, facts.num_choices)
    if timeline.tpot_seconds:
        metrics.observe(TPOT, timeline.tpot_seconds)
