"""Carries a request, or one of its choices, through one worker or through a pair of workers.

Interprets the outputs of the workers. Its caller waits, and decides how to continue after an
interruption. Awaits nothing.
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
"""Failed fetches of one KV cache, after which the prefill worker is taken to be at fault."""

_USUAL_CRASHES: Final = 4
"""Crashes of one request's workers after which each further crash doubles the tokens that prove the
request. So a request that always crashes a worker some tokens after a move crashes, in the end, the
worker of its solo run.
"""

_NO_HANDOFF: Final = {Cause.INVALID, Cause.NOT_FINITE}
"""After these no other worker decodes with the KV cache, which may hold NaN or infinity."""

Submitter = Callable[[str, worker_pb2.Submit], WorkerStream | None]
"""Sends a submit to a worker. Returns None if the worker has left the registry; raises Unavailable
if the router closes.
"""


class ChoiceState(Enum):
    """The progress of one choice of an attempt.

        PREFILLING ──first token──> DECODING                                        one worker
        PREFILLING ──first token──> TRANSFERRING ──KV cache received──> DECODING    a pair

    A choice that has ended or was interrupted is no longer in the attempt.
    """

    PREFILLING = auto()  # its prompt waits or is computed
    TRANSFERRING = auto()  # the decode worker lacks the KV cache, which the prefill worker holds
    DECODING = auto()


@dataclass(slots=True, eq=False, kw_only=True)
class Interruption:
    """Choices that an attempt has lost, and that wait until another one can continue them."""

    cause: Cause
    choices: frozenset[int]  # those that still wait
    message: str = ""  # of the worker
    worker: WorkerKey = ("", 0)
    # Set if its prefill worker still holds the KV cache; the choices stay in it until `abandon`.
    attempt: "Attempt | None" = None
    suspended: SuspendedChoice | None = None  # the one choice, whose KV cache waits at `worker`
    until: float = 0.0  # when the request fails

    @property
    def unable(self) -> str:
        """Returns the message of a request that its workers cannot serve."""
        return f"no worker can serve the request now: {self.message}"


class Attempt:
    """Runs choices at one worker or at a pair of a prefill worker and a decode worker.

    Call `start`, then `poll` whenever something may have come, and `end` in any case. In a pair,
    the decode worker gets its submit once the handle of the KV cache has come and `may_decode`
    allows it. The decode worker's tokens are read once each choice has its first token from the
    prefill worker; a refusal of the decode worker is read at once. Until the decode worker has
    received the KV cache, the prefill worker holds it, and `hand_off` can give it to another decode
    worker.
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
        may_decode: Callable[["Attempt"], bool],
        num_crashes: int,
        source: SuspendedChoice | None,
    ) -> None:
        """The registry counts `part`: the request itself, or the rest of one choice.

        `num_crashes` counts the crashes of the request's workers. A `source` holds the KV cache
        already; the placement's prefill worker is then the one that suspended the choice.
        """
        self.interruptions: list[Interruption] = []  # the caller removes them
        self.is_proven = False  # the worker that decodes has survived its first steps with it
        self.part = part
        self._is_beam = submit.HasField("beam_search")
        # A beam search of one step has nothing to hand over.
        is_one_step = self._is_beam and submit.max_tokens == 1
        self.placement = placement._replace(prefill=None) if is_one_step else placement
        self._choices = range(submit.first_choice, submit.first_choice + submit.num_choices)
        # Of the choices that have neither ended nor been interrupted.
        self._states = dict.fromkeys(self._choices, ChoiceState.PREFILLING)
        self._submit = submit
        self._number = submit.attempt
        self._send = send
        self._registry = registry
        self._timer = timer
        self._may_decode = may_decode
        self._waits_to_decode = False
        # Of the worker that computes the prompt: in a pair the prefill worker, else the only one.
        self._first_stream: WorkerStream | SuspendedChoice | None = source
        self._decode_stream: WorkerStream | None = None  # of the decode worker of a pair
        self._kv = worker_pb2.KvHandle()  # set once the prefill worker has admitted the request
        self._proof = submit.first_index + 1 + 2 ** max(num_crashes - _USUAL_CRASHES, 0)
        self._num_fetches_failed = 0
        self._num_cached = 0
        self._begun = source is not None  # the prompt has been computed
        self._ended = False

    @property
    def holds_kv(self) -> bool:
        """Returns True if the prefill worker seems to hold the KV cache still."""
        return self._first_stream is not None and self._first_stream.failure is None

    @property
    def is_prefilled(self) -> bool:
        """Returns True in a pair once each choice has its first token, so decoding can begin."""
        return not self._reads_first_stream

    @property
    def unproven_worker(self) -> str | None:
        """The worker that computes and has not yet survived its first steps; None if none does."""
        if self.is_proven or not self._states:
            return None
        if self._reads_first_stream:
            return self.placement.prefill or self.placement.decode
        return None if self._decode_stream is None else self.placement.decode

    @property
    def choices(self) -> Set[int]:
        """The choices that are still in the attempt."""
        return self._states.keys()

    def start(self) -> None:
        """Sends the first submit. Raises Unavailable if the router closes.

        Call it right after `WorkerRegistry.place`.
        """
        num_tokens = len(self._submit.token_ids)
        decode_id = self.placement.decode
        is_recovery = self.part.is_recovery
        if isinstance(self._first_stream, SuspendedChoice):
            self._registry.dispatched(decode_id, self.part, 0)
            self._kv = self._first_stream.kv
            self._states = dict.fromkeys(self._states, ChoiceState.TRANSFERRING)
            self._waits_to_decode = True
            return
        if self.placement.prefill is None:
            self._submit.task = worker_pb2.TASK_COLOCATED
            self._registry.dispatched(
                decode_id, self.part, num_tokens, decodes=True, is_recovery=is_recovery
            )
        else:
            self._submit.task = worker_pb2.TASK_PREFILL
            prefill = self.placement.prefill
            # A stream that stands still does not wait for a third worker.
            if not is_recovery and (holder := self._registry.find_holder(self.part, prefill)):
                self._submit.prefix_holder.CopyFrom(holder)
            fetched = self._submit.prefix_holder.num_tokens
            self._registry.dispatched(
                prefill, self.part, num_tokens, is_recovery=is_recovery, fetched_tokens=fetched
            )
            self._registry.dispatched(decode_id, self.part, 0)
        worker_id = self.placement.prefill or decode_id
        self._first_stream = self._send(worker_id, self._submit)
        if self._first_stream is None:
            self._interrupt(Cause.GONE, (worker_id, 0), "worker left")

    def poll(self) -> Iterator[TokenDelta]:
        """Yields the deltas since the last call; afterwards read `interruptions`."""
        for stream in self._streams_to_read():
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
                else:  # a preemption: of one choice, or of all before the first token
                    choices = frozenset({output.choice}) if self._begun else None
                    self._interrupt(Cause.PREEMPTED, stream.worker, output.failure.message, choices)
                if not self._states:
                    return
            if stream.failure is not None and (
                stream is self._decode_stream or self._reads_first_stream
            ):
                self._failed(stream, stream.failure)
        if self._waits_to_decode and self._states:
            self._start_decode()

    def drop(self, choice: int) -> None:
        """Cancels a choice that is no longer wanted."""
        if self._states.pop(choice, None) is not None and (
            stream := self._decode_stream or self._first_stream
        ):
            stream.cancel_choice(choice)

    def hand_off(self, placement: Placement, number: int) -> None:
        """Gives the KV cache to the decode worker of `placement` at the next `poll`.

        `number` is the number of the attempt there.
        """
        self._registry.ended(self.placement.decode, self.part.request_id)
        self.placement = placement
        self._number = number
        self._waits_to_decode = True
        self._registry.dispatched(placement.decode, self.part, 0)

    def abandon(self, choices: Set[int]) -> None:
        """Removes choices that continue in another attempt; ends the attempt after the last one."""
        for choice in choices:
            self._states.pop(choice, None)
        if not self._states:
            self.end()

    def end(self) -> None:
        """Lets the workers free all that they hold for the attempt. Idempotent."""
        if self._ended:  # the registry may count the request for another attempt by now
            return
        self._ended = True
        self._waits_to_decode = False
        for stream in (self._first_stream, self._decode_stream):
            if stream is not None:
                stream.cancel()
        for worker_id in (self.placement.prefill, self.placement.decode):
            if worker_id is not None:
                self._registry.ended(worker_id, self.part.request_id)

    @property
    def _reads_first_stream(self) -> bool:
        """Returns True while the first stream matters: in a pair until all first tokens came."""
        return self.placement.prefill is None or ChoiceState.PREFILLING in self._states.values()

    def _streams_to_read(self) -> Iterator[WorkerStream | SuspendedChoice]:
        if self._first_stream is not None and self._reads_first_stream:
            yield self._first_stream
        stream = self._decode_stream
        if stream is not None and self._states:
            is_refused = stream.failure is not None and not stream.received_kv
            if is_refused or not self._reads_first_stream:
                yield stream

    def _send_decode(self) -> None:
        submit = worker_pb2.Submit()
        submit.CopyFrom(self._submit)
        submit.attempt = self._number
        submit.task = worker_pb2.TASK_DECODE
        submit.kv.CopyFrom(self._kv)
        self._decode_stream = self._send(self.placement.decode, submit)
        if self._decode_stream is None:
            worker = (self.placement.decode, 0)
            self._interrupt(Cause.GONE, worker, "worker left", can_hand_off=True)
            return
        for choice in self._choices:  # some have ended since the prefill worker got its submit
            if choice not in self._states:
                self._decode_stream.cancel_choice(choice)

    def _tokens(self, output: worker_pb2.Output) -> TokenDelta | None:
        tokens, choice = output.tokens, output.choice
        if not self._begun:
            self._begin(output)
        if self._states.get(choice) is ChoiceState.PREFILLING:
            following = (
                ChoiceState.DECODING if self.placement.prefill is None else ChoiceState.TRANSFERRING
            )
            for each in self._choices if self._is_beam else (choice,):
                if each in self._states:
                    self._states[each] = following
        if choice not in self._states:
            return None
        if tokens.num_draft_tokens:
            self._timer.drafted(tokens)
        # The prefill worker may have sampled the first token.
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
        self._timer.observe(output, decode=stream is self._decode_stream)
        if stream is self._first_stream:
            self._num_cached = output.admitted.cached_tokens
            if self.placement.prefill is not None and self._submit.max_tokens > 1:
                self._kv = output.admitted.kv
                self._waits_to_decode = True

    def _start_decode(self) -> None:
        """Gives the KV cache to the decode worker once the request may decode."""
        if self.holds_kv:
            if self._may_decode(self):
                self._waits_to_decode = False
                self._send_decode()
        elif self._first_stream is not None and not self._reads_first_stream:
            self._waits_to_decode = False
            self._interrupt(Cause.GONE, self._first_stream.worker, "KV cache lost")

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
        is_decode = stream is self._decode_stream
        if is_decode:
            self._decode_stream = None
            self._num_fetches_failed += cause is Cause.TRANSFER
        self._interrupt(cause, stream.worker, failure.message, can_hand_off=is_decode)

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
        """Interrupts `choices`; None interrupts all."""
        is_held = self.holds_kv and ChoiceState.DECODING not in self._states.values()
        can_hand_off &= (
            is_held and self._num_fetches_failed < _MAX_FETCHES and cause not in _NO_HANDOFF
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
                attempt=self if can_hand_off else None,
                suspended=suspended,
            )
        )
        if not can_hand_off:
            for choice in interrupted:
                del self._states[choice]
