"""One dispatch of a request, or of one of its choices, to a worker or a pair of them.

Takes what the workers have said and says what it means; whoever drives it waits, and tries again. Awaits nothing.
"""

from collections.abc import Callable, Iterator, Set
from dataclasses import dataclass

from ...proto import worker_pb2
from ..request import TokenDelta, TokenRequest
from ..scheduling.policy import Placement
from ..scheduling.registry import WorkerRegistry
from .request_timer import RequestTimer
from .worker_client import WorkerStream

WorkerKey = tuple[str, int]  # id, epoch


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptFailure:
    """A flight, or some of its choices, has ended without the request's end; another may follow."""

    kind: "worker_pb2.FailureKind"
    worker: WorkerKey
    message: str
    admitted: bool  # the worker had begun to compute it, so that it may be what killed the worker
    choices: frozenset[int]  # whom it concerns


class WorkerLeft(Exception):
    """The worker is not in the view any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Leg:
    """A submit that is under way."""

    worker: WorkerKey
    attempt: WorkerStream


Send = Callable[[str, worker_pb2.Submit], Leg]
"""Sends a submit to a worker. Raises WorkerLeft, or Unavailable if the router has closed."""


class Attempt:
    """`start` sends its first submit, `poll` says what has come of it, `end` is due however it ends.

    A pair's first leg is over when each choice has its first token; only then the second one counts, though its worker
    is asked as soon as there is a handle of the KV cache, and may say something earlier.
    """

    def __init__(
        self,
        part: TokenRequest,
        submit: worker_pb2.Submit,
        placement: Placement,
        *,
        send: Send,
        view: WorkerRegistry,
        watch: RequestTimer,
    ) -> None:
        """`part` is what the view is told of: the request itself, or what is left of one choice."""
        self.choices = set(
            range(submit.first_choice, submit.first_choice + submit.num_choices)
        )  # neither ended nor lost
        self.failures: list[AttemptFailure] = []  # the driver takes them out
        self._part = part
        self._submit = submit
        self._send = send
        self._view = view
        self._watch = watch
        self._is_beam = submit.HasField("beam_search")
        self._begun = False  # the prompt has been computed
        self._over = False
        self._num_cached = 0
        self._decode_id = placement.decode
        self._legs: list[Leg] = []
        # A beam search of one step has nothing to hand over.
        self._prefill_id = None if self._is_beam and submit.max_tokens == 1 else placement.prefill
        self._unopened = set() if self._prefill_id is None else set(self.choices)  # without their first token

    def start(self) -> None:
        """Follows `view.place` at once. Raises Unavailable if the router has closed."""
        num_tokens = len(self._submit.token_ids)
        if self._prefill_id is None:
            self._submit.task = worker_pb2.TASK_WHOLE
            self._view.sent(self._decode_id, self._part, num_tokens)
        else:
            self._submit.task = worker_pb2.TASK_PREFILL
            self._view.sent(self._prefill_id, self._part, num_tokens)
            self._view.sent(self._decode_id, self._part, 0)
        self._start_leg(self._prefill_id or self._decode_id, self._submit)

    def poll(self) -> Iterator[TokenDelta]:
        """What has come since the last call. What has failed is in `failures` then, and not in `choices` any more."""
        if not self.choices:
            return
        leg = self._leg
        yield from self._read(leg)
        if self.choices and self._leg is not leg:
            yield from self._read(self._leg)

    def drop(self, choice: int) -> None:
        """The choice is not wanted any more."""
        self.choices.discard(choice)
        self._unopened.discard(choice)
        self._legs[-1].attempt.end_choice(choice)

    def end(self) -> None:
        """The workers free what they still hold for it. Idempotent."""
        if self._over:  # what the view now knows of the request is another flight's
            return
        self._over = True
        for leg in self._legs:
            leg.attempt.end()
        for worker_id in (self._prefill_id, self._decode_id):
            if worker_id is not None:
                self._view.ended(worker_id, self._part.request_id)

    @property
    def _leg(self) -> Leg:
        return self._legs[0] if self._unopened else self._legs[-1]

    def _start_leg(self, worker_id: str, submit: worker_pb2.Submit) -> None:
        try:
            self._legs.append(self._send(worker_id, submit))
        except WorkerLeft:
            self._lose(worker_pb2.FAILURE_KIND_WORKER, (worker_id, 0), "worker left", admitted=False)

    def _read(self, leg: Leg) -> Iterator[TokenDelta]:
        for output in leg.attempt.take():
            kind = output.WhichOneof("event")
            if kind == "tokens":
                if delta := self._tokens(output):
                    yield delta
            elif kind == "failure" and leg is self._leg:
                self._fail(leg, output)
            elif kind == "admitted":
                self._admit(leg, output)
            elif kind == "kv_received":
                self._join(output)
            if not self.choices:
                return
        if leg is self._leg and leg.attempt.broken:  # a leg that is over may break
            # A worker reads a grammar before it admits the request.
            begun = leg.attempt.admitted or bool(self._submit.grammar)
            self._lose(worker_pb2.FAILURE_KIND_WORKER, leg.worker, "worker lost", admitted=begun)

    def _tokens(self, output: worker_pb2.Output) -> TokenDelta | None:
        tokens, choice = output.tokens, output.choice
        if not self._begun:
            self._begin(output)
        if self._unopened:
            self._unopened -= self.choices if self._is_beam else {choice}
        if choice not in self.choices:
            return None
        finish_reason = tokens.finish_reason
        if finish_reason:
            self.choices.discard(choice)
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
        )

    def _begin(self, output: worker_pb2.Output) -> None:
        self._begun = True
        self._watch.observe(output)
        worker_id = self._prefill_id or self._decode_id
        self._view.computed(worker_id, self._part.request_id)
        if output.tokens.prefill_seconds:
            self._view.measured(
                worker_id,
                prefill_tokens=len(self._submit.token_ids) - self._num_cached,
                prefill_seconds=output.tokens.prefill_seconds,
            )

    def _admit(self, leg: Leg, output: worker_pb2.Output) -> None:
        is_decode = leg is not self._legs[0]
        self._watch.observe(output, decode=is_decode)
        if is_decode:
            return
        self._num_cached = output.admitted.cached_tokens
        if self._prefill_id is not None and self._submit.max_tokens > 1:
            self._start_leg(self._decode_id, _with_kv(self._submit, output.admitted.kv))

    def _join(self, output: worker_pb2.Output) -> None:
        self._watch.observe(output, decode=True)
        if self._prefill_id is not None:
            self._view.ended(self._prefill_id, self._part.request_id)
            joined = output.kv_received
            self._view.transferred(
                self._prefill_id, self._decode_id, joined.transfer_bytes, joined.transfer_active_seconds
            )

    def _fail(self, leg: Leg, output: worker_pb2.Output) -> None:
        failure = output.failure
        is_of_one = failure.kind == worker_pb2.FAILURE_KIND_PREEMPTED and self._begun and not self._is_beam
        choices = {output.choice} if is_of_one else None
        self._lose(failure.kind, leg.worker, failure.message, admitted=leg.attempt.admitted, choices=choices)

    def _lose(
        self,
        kind: "worker_pb2.FailureKind",
        worker: WorkerKey,
        message: str,
        *,
        admitted: bool,
        choices: Set[int] | None = None,
    ) -> None:
        """`choices`: None for all."""
        lost = frozenset(self.choices if choices is None else self.choices & choices)
        if lost:
            self.choices -= lost
            self._unopened -= lost
            self.failures.append(
                AttemptFailure(kind=kind, worker=worker, message=message, admitted=admitted, choices=lost)
            )


def _with_kv(submit: worker_pb2.Submit, handle: worker_pb2.KvHandle) -> worker_pb2.Submit:
    decode = worker_pb2.Submit()
    decode.CopyFrom(submit)
    decode.task = worker_pb2.TASK_DECODE
    decode.kv.CopyFrom(handle)
    return decode
