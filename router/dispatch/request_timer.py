"""Measures one request: fills its timeline, and counts its interruptions, transfers and gaps."""

from collections.abc import Callable
from typing import Final

from ...proto import inference_pb2, worker_pb2
from ...proto.metrics import (
    INTERRUPTIONS,
    ITL,
    KV_BYTES,
    KV_SECONDS,
    PREEMPTIONS,
    RECOVERIES,
    SPEC_ACCEPTED_TOKENS,
    SPEC_DRAFT_TOKENS,
    SPEC_DRAFTS,
    BucketCounts,
    Metrics,
)
from ..request import TokenRequest
from ..scheduling.policy import Placement

MAX_INTERRUPTIONS: Final = 32
"""Interruptions that a timeline lists; further ones are only counted."""


class RequestTimer:
    """Stamps each stage of one request the first time it is reached; `stop` writes the timeline.

    Values that no longer change are in the timeline earlier: workers, attempts, interruptions, time
    to first token. Time lost by an interruption counts for the stage of the request: as dispatch
    before the first token, as decode after it. A choice with two tokens has begun to decode, so a
    later move to another decode worker is no stage of the request.
    """

    def __init__(
        self,
        request: TokenRequest,
        timeline: inference_pb2.Timeline,
        metrics: Metrics,
        clock: Callable[[], float],
    ) -> None:
        """Stamps the end of the request's checks, after which it waits for a worker."""
        self._metrics = metrics
        self._clock = clock
        self._timeline = timeline
        num_choices = request.submit.num_choices
        self._arrived = request.arrived
        self._tokenized = self._clock()
        self._dispatched: float | None = None
        self._first: float | None = None  # when the first token came
        self._decode_admitted: float | None = None
        self._kv_received: float | None = None
        self._last = request.arrived  # when the last token came
        self._queue = 0.0  # seconds in the prefill worker's queue
        self._was_interrupted = False
        self._num_tokens = [0] * num_choices  # of each choice
        self._new_tokens: dict[int, int] = {}  # by choice, since the last `stamp`
        self._last_of = [0.0] * num_choices  # the time of the last token of each choice
        self._gaps = BucketCounts(ITL.buckets)  # between tokens of a choice
        timeline.request_id = request.request_id
        timeline.prompt_tokens = len(request.submit.token_ids)

    def dispatched(self, placement: Placement, attempt: int, kind: str = "replay") -> None:
        """Stamps the dispatch of an attempt; `kind` is the label of a recovery in RECOVERIES."""
        if self._was_interrupted:
            self._metrics.add(RECOVERIES, kind=kind)
        if self._dispatched is None:
            self._dispatched = self._clock()
        self._timeline.attempts = attempt
        self._timeline.prefill_worker = placement.prefill or placement.decode
        self._timeline.decode_worker = placement.decode

    def observe(self, output: worker_pb2.Output, *, decode: bool = False) -> None:
        """Stamps an output of the prefill worker; `decode`: of the decode worker of a pair."""
        now = self._clock()
        if output.HasField("admitted") and decode:
            self._decode_admitted = self._decode_admitted or self._decodes_from(now)
        elif output.HasField("admitted") and self._first is None:
            self._queue = output.admitted.queue_seconds
            self._timeline.cached_tokens = output.admitted.cached_tokens
            self._timeline.restore_seconds = output.admitted.restore_seconds
        elif output.HasField("tokens") and self._first is None:
            self._first = now
            self._timeline.ttft_seconds = now - self._arrived
            self._timeline.prefill_seconds = output.tokens.prefill_seconds
        elif output.HasField("kv_received"):
            received = output.kv_received
            self._kv_received = self._kv_received or self._decodes_from(now)
            self._timeline.kv_transfer_bytes += received.transfer_bytes
            self._timeline.kv_transfer_active_seconds += received.transfer_active_seconds
            self._timeline.kv_transport = received.transport
            self._metrics.observe(
                KV_SECONDS, received.transfer_active_seconds, transport=received.transport
            )
            self._metrics.add(KV_BYTES, received.transfer_bytes, transport=received.transport)

    def _decodes_from(self, now: float) -> float:
        """Returns `now`, or the time of the first token if a choice has decoded since then."""
        return now if self._first is None or max(self._num_tokens) < 2 else self._first

    def interrupted(self, cause: str, worker_id: str) -> None:
        """Counts that a worker lost choices; `cause` is the label in INTERRUPTIONS."""
        self._was_interrupted = True
        self._metrics.add(INTERRUPTIONS, cause=cause)
        if cause == "preempted":
            self._metrics.add(PREEMPTIONS)
        if len(self._timeline.interruptions) < MAX_INTERRUPTIONS:
            at = self._clock() - self._arrived
            self._timeline.interruptions.add(cause=cause, worker=worker_id, at_seconds=at)

    def tokens(self, count: int, choice: int = 0) -> None:
        """Counts tokens of a choice; the next `stamp` takes their time."""
        self._new_tokens[choice] = self._new_tokens.get(choice, 0) + count

    def stamp(self) -> None:
        """Stamps the new tokens: the tokens of one choice have come at equal distances."""
        if not self._new_tokens:
            return
        self._last = now = self._clock()
        for choice, count in self._new_tokens.items():
            self._num_tokens[choice] += count
            if not count:
                continue
            if last := self._last_of[choice]:
                self._gaps.observe((now - last) / count, count)
            elif count > 1:
                self._gaps.observe(0.0, count - 1)
            self._last_of[choice] = now
        self._new_tokens.clear()

    def drafted(self, tokens: worker_pb2.Tokens) -> None:
        """Counts the draft tokens of the steps of `tokens`, and the accepted ones."""
        self._metrics.add(SPEC_DRAFTS, tokens.num_drafts)
        self._metrics.add(SPEC_DRAFT_TOKENS, tokens.num_draft_tokens)
        self._metrics.add(SPEC_ACCEPTED_TOKENS, tokens.num_accepted_tokens)

    def stop(self) -> None:
        """Writes the timeline after the end or the failure of the request."""
        self.stamp()
        timeline = self._timeline
        num_tokens = sum(self._num_tokens)
        end = self._last if num_tokens else self._clock()
        dispatched = end if self._dispatched is None else self._dispatched
        first = self._first or end
        received = min(self._kv_received or first, end)
        # A wait for blocks on the decode worker after the first token is queueing.
        waited = min(max((self._decode_admitted or first) - first, 0.0), received - first)
        timeline.tokenize_seconds = self._tokenized - self._arrived
        timeline.queue_seconds = dispatched - self._tokenized + self._queue + waited
        working = self._queue + timeline.restore_seconds + timeline.prefill_seconds
        timeline.dispatch_seconds = first - dispatched - working
        timeline.kv_transfer_seconds = received - first - waited
        timeline.decode_seconds = end - received
        timeline.end_to_end_seconds = end - self._arrived
        timeline.ttft_seconds = first - self._arrived
        timeline.completion_tokens = num_tokens
        num_steps = max(self._num_tokens) - 1  # each step serves all choices that still run
        timeline.tpot_seconds = (end - first) / num_steps if num_steps > 0 else 0.0
        self._gaps.report(self._metrics, ITL)
