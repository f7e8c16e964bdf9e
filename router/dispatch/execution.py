"""One request from its first dispatch to the end of its last choice, through the failures of workers.

Prompt and emitted tokens stay here: whatever happens to a worker, the next flight prefills prompt + emitted tokens
(mostly hits in a prefix cache) and goes on at the next index. Several choices fly together until one of them, or their
worker, is lost; what is left of them then flies alone. Knows token ids, not text. Awaits nothing.
"""

import logging
from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace
from typing import Final

from ...proto import inference_pb2, worker_pb2
from ...proto.errors import InternalError, InvalidArgument, Overloaded, Unavailable
from ..request import TokenDelta, TokenRequest
from ..scheduling.registry import WorkerRegistry
from .attempt import Attempt, AttemptFailure, Send
from .request_timer import RequestTimer

logger = logging.getLogger(__name__)

MAX_WORKERS_LOST: Final = 2
"""A request that so many workers had begun when they died is not given to another."""

MAX_TRANSFERS_LOST: Final = 3
"""Of one choice. Those that fly alone may lose as many at the same moment, by one death."""

_AVOIDED: Final = (worker_pb2.FAILURE_KIND_FULL, worker_pb2.FAILURE_KIND_WORKER)
_FIELDS: Final = {"num_choices": "n", "stop_token_ids": "stopping.stop_token_ids", "grammar": "constraint"}
"""Fields of a submit by what the caller calls them; whatever else a worker refuses is too long a prompt for it."""


class RequestExecution:
    """`start`, then `deltas` whenever something may have come, until `done`; at last `end`, whatever happened."""

    def __init__(
        self, request: TokenRequest, ended: Collection[int], *, send: Send, view: WorkerRegistry, watch: RequestTimer
    ) -> None:
        self._request = request
        self._ended = ended
        self._send = send
        self._view = view
        self._watch = watch
        self._emitted: list[list[int]] = [[] for _ in range(request.num_choices)]
        self._finished: set[int] = set()
        self._has_prompt_logprobs = False
        self._flights: list[Attempt] = []
        self._num_flights = 0
        self._failures: list[AttemptFailure] = []

    @property
    def done(self) -> bool:
        return not self._flights

    def start(self) -> None:
        """The first dispatch. Raises Unavailable without a worker."""
        self._launch_all()

    def deltas(self) -> Iterator[TokenDelta]:
        """What has come since the last call. Raises a TandemError if the request cannot be carried through."""
        for flight in self._flights:  # grows meanwhile: by those that follow lost ones
            for delta in flight.poll():
                if delta.choice in self._ended:
                    flight.drop(delta.choice)
                elif fresh := self._fresh(delta):
                    self._emitted[fresh.choice] += fresh.ids
                    self._watch.tokens(len(fresh.ids))
                    yield fresh
            failures, flight.failures = flight.failures, []
            for failure in failures:
                self._recover(failure, flight)
            if not flight.choices:
                flight.end()
        self._flights = [flight for flight in self._flights if flight.choices]

    def end(self) -> None:
        """Workers free whatever they still hold for the request. Idempotent."""
        for flight in self._flights:
            flight.end()

    def _fresh(self, delta: TokenDelta) -> TokenDelta | None:
        """The delta without what the caller has already: prompt logprobs and, of a beam search that began anew,
        tokens."""
        if self._has_prompt_logprobs and delta.prompt_logprobs:
            delta = replace(delta, prompt_logprobs=())
        self._has_prompt_logprobs |= bool(delta.prompt_logprobs)
        if self._request.beam_search is None:
            return delta
        if delta.choice in self._finished:
            return None
        if delta.finish_reason:
            self._finished.add(delta.choice)
        num_known = len(self._emitted[delta.choice]) - delta.first_index
        if num_known <= 0:
            return delta
        return replace(
            delta,
            first_index=delta.first_index + num_known,
            ids=delta.ids[num_known:],
            logprobs=delta.logprobs[num_known:],
        )

    def _recover(self, failure: AttemptFailure, flight: Attempt) -> None:
        """Dispatches again what was lost. Counted before it is sent: a crash skips any later place."""
        logger.warning("%s: %s on %s", self._request.request_id, failure.message, failure.worker[0])
        self._failures.append(failure)
        _check(self._failures)
        if not flight.choices:
            flight.end()
        choices = failure.choices - set(self._ended)
        is_untouched = len(choices) == self._request.num_choices and not any(self._emitted)
        if self._request.beam_search is not None or is_untouched:
            self._launch_all()
        else:
            for choice in sorted(choices):
                self._launch_alone(choice)

    def _launch_all(self) -> None:
        self._launch(self._request, self._submit(self._request.prompt, self._request.max_tokens))

    def _launch_alone(self, choice: int) -> None:
        request, emitted = self._request, self._emitted[choice]
        part = replace(
            request,
            request_id=f"{request.request_id}#{choice}",
            prompt=(*request.prompt, *emitted),
            max_tokens=request.max_tokens - len(emitted),
            num_choices=1,
        )
        submit = self._submit(part.prompt, part.max_tokens)
        submit.first_index = len(emitted)
        submit.num_choices, submit.first_choice = 1, choice
        self._launch(part, submit)

    def _launch(self, part: TokenRequest, submit: worker_pb2.Submit) -> None:
        placement = self._view.place(part, {f.worker[0] for f in self._failures if f.kind in _AVOIDED})
        if placement is None:
            if self._failures and self._failures[-1].kind == worker_pb2.FAILURE_KIND_FULL:
                raise Overloaded("every worker's queue is full")
            raise Unavailable("no worker is ready")
        self._num_flights = submit.attempt = self._num_flights + 1
        self._watch.dispatched(placement, attempt=submit.attempt)
        flight = Attempt(part, submit, placement, send=self._send, view=self._view, watch=self._watch)
        self._flights.append(flight)
        flight.start()

    def _submit(self, tokens: Iterable[int], max_tokens: int) -> worker_pb2.Submit:
        """Of all choices; without the number of the attempt."""
        request = self._request
        return worker_pb2.Submit(
            request_id=request.request_id,
            token_ids=tokens,
            max_tokens=max_tokens,
            sampling=request.sampling,
            stop_token_ids=request.stop_token_ids,
            ignore_eos=request.ignore_eos,
            cache_salt=request.cache_salt,
            num_choices=request.num_choices,
            beam_search=request.beam_search,
            logprobs=request.logprobs,
            prompt_logprobs=None if self._has_prompt_logprobs else request.prompt_logprobs,
            bad_words=[inference_pb2.TokenIds(ids=word) for word in request.bad_words],
            min_tokens=request.min_tokens,
            grammar=request.grammar,
            priority=request.priority,
        )


def _check(failures: list[AttemptFailure]) -> None:
    """Raises the request's end if it has failed often enough; returns if another flight is due."""
    last = failures[-1]
    if last.kind == worker_pb2.FAILURE_KIND_INVALID:
        field, _, reason = last.message.partition(": ")
        raise InvalidArgument(reason if field in _FIELDS else last.message, _FIELDS.get(field, "prompt"))
    begun = {f.worker for f in failures if f.kind == worker_pb2.FAILURE_KIND_WORKER and f.admitted}
    if len(begun) >= MAX_WORKERS_LOST:
        raise InternalError("the request was given up after two workers were lost")
    lost = [f.choices for f in failures if f.kind == worker_pb2.FAILURE_KIND_TRANSFER]
    if any(sum(choice in choices for choices in lost) >= MAX_TRANSFERS_LOST for choice in last.choices):
        raise InternalError("the KV cache could not be moved")
