"""One attempt to carry a request, or one of its choices, through a worker or a pair of them.

Interprets what the workers have sent; its caller waits, and decides what follows an interruption.
Awaits nothing.
"""

from collections.abc import Callable, Iterator, Set
from dataclasses import dataclass
from enum import Enum, auto
from typing import Final

from ...proto import worker_pb2
from ..request import TokenDelta, TokenRequest
from ..scheduling.policy import Placement
from ..scheduling.registry import WorkerRegistry
from .causes import CAUSES, Cause
from .request_timer import RequestTimer
from .worker_client import SuspendedChoice, WorkerKey, WorkerStream

_MAX_FETCHES: Final = 2
"""Of one KV cache: after so many that failed, the fault is taken to be the prefill worker's."""

_USUAL_CRASHES: Final = 4
"""Of the workers of one request. After each further one it has to make twice as many steps until it
is proven, so that one that always does harm some steps after it has moved is at last on solo run then.
"""

Submitter = Callable[[str, worker_pb2.Submit], WorkerStream | None]
"""Sends a submit to a worker. Returns None if that has left the registry; raises Unavailable if the
router closes.
"""


class ChoiceState(Enum):
    """How far a choice of an attempt is.

        OPENING ──first token──> DECODING                             one worker
        OPENING ──first token──> MOVING ──KV cache received──> DECODING    a pair

    A choice that has ended or was interrupted is no longer in the attempt.
    """

    OPENING = auto()  # its prompt waits or is computed
    MOVING = auto()  # the decode worker waits for the KV cache, which the prefill worker holds
    DECODING = auto()


_NO_REHAND: Final = {Cause.INVALID, Cause.NOT_FINITE}
"""After these nobody decodes with the same KV cache: it may be what is not finite."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Interruption:
    """The end of choices of an attempt before their time."""

    cause: Cause
    worker: WorkerKey
    message: str
    choices: frozenset[int]
    # the prefill worker holds the KV cache still: they stay in the attempt until `abandon`
    can_hand_off: bool
    suspended: SuspendedChoice | None = None


@dataclass(slots=True, eq=False)
class Parked:
    """Choices that wait until they can continue."""

    choices: frozenset[int]
    attempt: "Attempt | None"  # that can hand over its KV cache
    cause: Cause
    message: str  # of the worker
    last_worker: str
    until: float  # when they are given up
    suspended: SuspendedChoice | None = (
        None  # the one choice, whose KV cache waits at `last_worker`
    )


class Attempt:
    """Call `start`, then `poll` whenever there may be something new, and `end` however it ends.

    In a pair, the decode worker gets its submit as soon as there is a handle of the KV cache. Its
    tokens are taken once each choice has its first token from the prefill worker; a refusal is
    taken at once. As long as it has not received the KV cache, the prefill worker holds that and
    `handoff` can give it to another decode worker. No decode worker gets anything before
    `may_decode` says so.
    """

    def __init__(
        self,
        part: TokenRequest,
        submit: worker_pb2.Submit,
        placement: Placement,
        *,
        send: Submitter,
        registry: WorkerRegistry,
        timer: RequestTimer,
        may_decode: Callable[["Attempt"], bool] = lambda attempt: True,
        num_crashes: int = 0,
        source: SuspendedChoice | None = None,
    ) -> None:
        """`part` is what the registry counts: the request itself, or what is left of one choice.
        `num_crashes`: of its workers so far, see `_USUAL_CRASHES`. `source` has its KV cache
        already: then the placement's prefill worker is the one that suspended it.
        """
        self.interruptions: list[Interruption] = []  # the caller removes them
        self.is_proven = False  # the worker that decodes has survived its first steps with it
        self.part = part
        # A beam search of one step has nothing to hand over.
        is_whole = submit.HasField("beam_search") and submit.max_tokens == 1
        self.placement = placement._replace(prefill=None) if is_whole else placement
        self._choices = range(submit.first_choice, submit.first_choice + submit.num_choices)
        self._states = dict.fromkeys(
            self._choices, ChoiceState.OPENING
        )  # of choices neither ended nor interrupted
        self._submit = submit
        self._number = submit.attempt
        self._send = send
        self._registry = registry
        self._timer = timer
        self._may_decode = may_decode
        self._waits_to_decode = False
        self._is_beam = submit.HasField("beam_search")
        self._opener: WorkerStream | SuspendedChoice | None = (
            source  # computes the prompt, and in a pair nothing else
        )
        self._decoder: WorkerStream | None = None  # the decode worker's stream in a pair
        self._kv = (
            worker_pb2.KvHandle()
        )  # of the prefill worker, once that has admitted the request
        self._proof = submit.first_index + 1 + 2 ** max(num_crashes - _USUAL_CRASHES, 0)
        self._num_fetches_failed = 0
        self._num_cached = 0
        self._begun = source is not None  # the prompt has been computed
        self._ended = False

    @property
    def holds_kv(self) -> bool:
        """Whether the prefill worker still holds the KV cache, as far as is known."""
        return self._opener is not None and self._opener.failure is None

    @property
    def is_computed(self) -> bool:
        """Whether the prefill worker is done with the prompt, so that a decode worker can begin."""
        return not self._needs_opener

    @property
    def tried_at(self) -> str | None:
        """The worker that computes and has not shown yet that it survives that, if there is one."""
        if self.is_proven or not self._states:
            return None
        if self._needs_opener:
            return self.placement.prefill or self.placement.decode
        return None if self._decoder is None else self.placement.decode

    @property
    def choices(self) -> Set[int]:
        """The choices that go on."""
        return self._states.keys()

    def start(self) -> None:
        """Sends the first submit; call it right after `WorkerRegistry.place`. Raises Unavailable if
        the router closes.
        """
        num_tokens, decode_id = len(self._submit.token_ids), self.placement.decode
        is_resumed = self.part.is_resumed
        if isinstance(self._opener, SuspendedChoice):
            self._registry.dispatched(decode_id, self.part, 0)
            self._kv = self._opener.kv
            self._states = dict.fromkeys(self._states, ChoiceState.MOVING)
            self._waits_to_decode = True
            return
        if self.placement.prefill is None:
            self._submit.task = worker_pb2.TASK_COLOCATED
            self._registry.dispatched(
                decode_id, self.part, num_tokens, decodes=True, is_resumed=is_resumed
            )
        else:
            self._submit.task = worker_pb2.TASK_PREFILL
            prefill = self.placement.prefill
            # A stream that stands still waits for no third worker.
            if not is_resumed and (holder := self._registry.find_holder(self.part, prefill)):
                self._submit.prefix_holder.CopyFrom(holder)
            fetched = self._submit.prefix_holder.num_tokens
            self._registry.dispatched(
                prefill, self.part, num_tokens, is_resumed=is_resumed, fetched_tokens=fetched
            )
            self._registry.dispatched(decode_id, self.part, 0)
        worker_id = self.placement.prefill or decode_id
        self._opener = self._send(worker_id, self._submit)
        if self._opener is None:
            self._interrupt(Cause.GONE, (worker_id, 0), "worker left")

    def poll(self) -> Iterator[TokenDelta]:
        """Yields what has come since the last call. What was interrupted is in `interruptions`
        then.
        """
        for stream in self._readable():
            for output in stream.take():
                kind = output.WhichOneof("event")
                if kind == "tokens":
                    if delta := self._tokens(output):
                        yield delta
                elif kind == "admitted":
                    self._admitted(stream, output)
                elif kind == "kv_received":
                    self._kv_received(output)
                elif kind == "suspended" and isinstance(stream, WorkerStream):
                    self._suspended(stream, output)
                else:  # one choice, or before the first token all, were preempted
                    choices = frozenset({output.choice}) if self._begun else None
                    self._interrupt(Cause.PREEMPTED, stream.worker, output.failure.message, choices)
                if not self._states:
                    return
            if stream.failure is not None and (stream is self._decoder or self._needs_opener):
                self._failed(stream, stream.failure)
        if self._waits_to_decode and self._states:
            self._go_on_to_decode()

    def drop(self, choice: int) -> None:
        """Cancels a choice that is no longer wanted."""
        if self._states.pop(choice, None) is not None and (stream := self._decoder or self._opener):
            stream.cancel_choice(choice)

    def hand_off(self, placement: Placement, number: int) -> None:
        """Gives the KV cache to the decode worker of `placement`, as attempt `number`, with the
        next `poll`.
        """
        self._registry.ended(self.placement.decode, self.part.request_id)
        self.placement, self._number, self._waits_to_decode = placement, number, True
        self._registry.dispatched(placement.decode, self.part, 0)

    def abandon(self, choices: Set[int]) -> None:
        """Removes choices that go on in another attempt; without any left the attempt ends."""
        for choice in choices:
            self._states.pop(choice, None)
        if not self._states:
            self.end()

    def end(self) -> None:
        """Lets the workers free what they still hold. Idempotent."""
        if self._ended:  # what the registry counts for the request now is another attempt's
            return
        self._ended, self._waits_to_decode = True, False
        for stream in (self._opener, self._decoder):
            if stream is not None:
                stream.cancel()
        for worker_id in (self.placement.prefill, self.placement.decode):
            if worker_id is not None:
                self._registry.ended(worker_id, self.part.request_id)

    @property
    def _needs_opener(self) -> bool:
        """Whether anything that the stream of the prefill worker brings still counts."""
        return self.placement.prefill is None or ChoiceState.OPENING in self._states.values()

    def _readable(self) -> Iterator[WorkerStream | SuspendedChoice]:
        """Yields the streams whose outputs are to be taken now."""
        if self._opener is not None and self._needs_opener:
            yield self._opener
        decoder = self._decoder
        if decoder is not None and self._states:
            is_refused = decoder.failure is not None and not decoder.received_kv
            if is_refused or not self._needs_opener:
                yield decoder

    def _send_decode(self) -> None:
        submit = worker_pb2.Submit()
        submit.CopyFrom(self._submit)
        submit.attempt = self._number
        submit.task = worker_pb2.TASK_DECODE
        submit.kv.CopyFrom(self._kv)
        self._decoder = self._send(self.placement.decode, submit)
        if self._decoder is None:
            self._interrupt(
                Cause.GONE, (self.placement.decode, 0), "worker left", can_hand_off=True
            )
            return
        for choice in self._choices:  # those that have ended since the prefill worker was asked
            if choice not in self._states:
                self._decoder.cancel_choice(choice)

    def _tokens(self, output: worker_pb2.Output) -> TokenDelta | None:
        tokens, choice = output.tokens, output.choice
        if not self._begun:
            self._begin(output)
        if self._states.get(choice) is ChoiceState.OPENING:
            following = (
                ChoiceState.DECODING if self.placement.prefill is None else ChoiceState.MOVING
            )
            for opened in self._choices if self._is_beam else (choice,):
                if opened in self._states:
                    self._states[opened] = following
        if choice not in self._states:
            return None
        if tokens.num_draft_tokens:
            self._timer.drafted(tokens)
        # The first token may be one that the prefill worker drew.
        self.is_proven |= tokens.first_index + len(tokens.ids) >= self._proof
        finish_reason = tokens.finish_reason
        if finish_reason:
            del self._states[choice]
        elif not tokens.ids:  # a beam search has been prefilled
            return None
        return TokenDelta(
            first_index=tokens.first_index,
            ids=tuple(tokens.ids),
            finish_reason=finish_reason,
            choice=choice,
            logprobs=tuple(tokens.logprobs),
            prompt_logprobs=tuple(tokens.prompt_logprobs),
            score=tokens.score,
            embedding=tuple(tokens.embedding),
        )

    def _begin(self, output: worker_pb2.Output) -> None:
        self._begun = True
        self._timer.observe(output)
        worker_id = self.placement.prefill or self.placement.decode
        self._registry.prefilled(worker_id, self.part.request_id)
        if seconds := output.tokens.prefill_seconds:
            self._registry.record_prefill(
                worker_id, len(self._submit.token_ids) - self._num_cached, seconds
            )

    def _admitted(self, stream: WorkerStream | SuspendedChoice, output: worker_pb2.Output) -> None:
        self._timer.observe(output, decode=stream is self._decoder)
        if stream is self._opener:
            self._num_cached = output.admitted.cached_tokens
            if self.placement.prefill is not None and self._submit.max_tokens > 1:
                self._kv = output.admitted.kv
                self._waits_to_decode = True

    def _go_on_to_decode(self) -> None:
        """Gives the KV cache to the decode worker once the request may decode."""
        if self.holds_kv:
            if self._may_decode(self):
                self._waits_to_decode = False
                self._send_decode()
        elif self._opener is not None and not self._needs_opener:
            self._waits_to_decode = False
            self._interrupt(Cause.GONE, self._opener.worker, "KV cache lost")

    def _kv_received(self, output: worker_pb2.Output) -> None:
        self._timer.observe(output, decode=True)
        self._states = dict.fromkeys(self._states, ChoiceState.DECODING)
        if self.placement.prefill is not None:
            self._registry.ended(self.placement.prefill, self.part.request_id)
            received = output.kv_received
            self._registry.record_transfer(
                self.placement.prefill,
                self.placement.decode,
                received.transfer_bytes,
                received.transfer_active_seconds,
            )

    def _suspended(self, stream: WorkerStream, output: worker_pb2.Output) -> None:
        choice = SuspendedChoice(stream, output.choice, output.suspended.kv)
        if output.choice in self._states:
            self._interrupt(
                Cause.SUSPENDED,
                stream.worker,
                "suspended",
                frozenset({output.choice}),
                suspended=choice,
            )
        else:
            choice.cancel()

    def _failed(self, stream: WorkerStream | SuspendedChoice, failure: worker_pb2.Failure) -> None:
        cause = CAUSES.get(failure.kind)
        if cause is None:
            # A worker reads a grammar before it admits the request.
            cause = Cause.CRASH if stream.may_have_begun or self._submit.grammar else Cause.GONE
        is_decoder = stream is self._decoder
        if is_decoder:
            self._decoder = None
            self._num_fetches_failed += cause is Cause.TRANSFER
        self._interrupt(cause, stream.worker, failure.message, can_hand_off=is_decoder)

    def _interrupt(
        self,
        cause: Cause,
        worker: WorkerKey,
        message: str,
        choices: frozenset[int] | None = None,
        *,
        can_hand_off: bool = False,
        suspended: SuspendedChoice | None = None,
    ) -> None:
        """Interrupts `choices`, None for all."""
        is_held = self.holds_kv and ChoiceState.DECODING not in self._states.values()
        can_hand_off &= (
            is_held and self._num_fetches_failed < _MAX_FETCHES and cause not in _NO_REHAND
        )
        interrupted = frozenset(self._states if choices is None else choices & self._states.keys())
        if not interrupted:
            return
        self.interruptions.append(
            Interruption(
                cause=cause,
                worker=worker,
                message=message,
                choices=interrupted,
                can_hand_off=can_hand_off,
                suspended=suspended,
            )
        )
        if not can_hand_off:
            for choice in interrupted:
                del self._states[choice]
