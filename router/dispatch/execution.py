"""Executes one request from its first attempt to the end of its last choice, whatever happens to workers.

Prompt and emitted tokens stay here. After an interruption the choices continue on one of two ways: *rehand*, while the
prefill worker still holds the KV cache, gives that to another decode worker; *replay* prefills prompt + emitted tokens,
mostly hits in a prefix cache, and continues at the next index. Several choices share an attempt until one of them, or
their worker, is lost; then each continues in an attempt of its own. Knows token ids, not text. Only `run` awaits.
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Collection, Iterator
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Final

from ...proto import inference_pb2, worker_pb2
from ...proto.errors import InternalError, InvalidArgument, Overloaded, Unavailable
from ..deadline import before, deadline_passed
from ..request import TokenDelta, TokenRequest
from ..scheduling.admission import Admission
from ..scheduling.registry import WorkerRegistry
from .attempt import Attempt, Cause, Interruption, Submitter
from .request_timer import RequestTimer

logger = logging.getLogger(__name__)

MAX_WORKERS_LOST: Final = 2
"""A request that so many workers had begun when they crashed is not given to another."""

MAX_TRANSFERS_LOST: Final = 3
"""Of one choice. Choices in attempts of their own may lose as many at the same moment, by one crash."""

_FIELDS: Final = {"num_choices": "n", "stop_token_ids": "stopping.stop_token_ids", "grammar": "constraint"}
"""Fields of a submit by the names of the API. Every other refusal of a worker concerns the length of the prompt."""


class RequestExecution:
    """Call `run`; or `start`, then `deltas` whenever something may have come, until `done`, and in the end `end`,
    whatever happened."""

    def __init__(
        self,
        request: TokenRequest,
        ended: Collection[int],
        *,
        send: Submitter,
        registry: WorkerRegistry,
        timer: RequestTimer,
    ) -> None:
        """`ended`: choices that are no longer wanted; the caller may add to it."""
        self._request = request
        self._ended = ended
        self._send = send
        self._registry = registry
        self._timer = timer
        self._emitted = [list(ids or ()) for ids in request.emitted or [()] * request.num_choices]
        self._finished: set[int] = set()
        self._has_prompt_logprobs = False
        self._attempts: list[Attempt] = []
        self._num_attempts = 0
        self._interruptions: list[Interruption] = []

    @property
    def done(self) -> bool:
        return not self._attempts

    async def run(self, admission: Admission, wake: asyncio.Event) -> AsyncGenerator[TokenDelta, None]:
        """Waits for admission, then yields all deltas, see TokenSource. `wake` is set whenever something has come."""
        late, deadline = asyncio.Event(), self._request.deadline

        def expire() -> None:
            late.set()
            wake.set()

        async with AsyncExitStack() as scope:
            scope.callback(self._timer.stop)
            await before(deadline, scope.enter_async_context(admission.slot(self._request)))
            scope.callback(self.end)
            if deadline is not None:  # one timer for a request costs less than one for each token
                timer = asyncio.get_running_loop().call_later(deadline - time.monotonic(), expire)
                scope.callback(timer.cancel)
            self.start()
            while True:
                for delta in self.deltas():
                    yield delta
                if self.done:
                    return
                await wake.wait()
                wake.clear()
                if late.is_set():
                    raise deadline_passed()

    def start(self, choice: int | None = None) -> None:
        """Starts an attempt, of one choice or, if None, of all; of each alone if the request was begun elsewhere.
        Raises Unavailable or Overloaded without a worker."""
        request = self._request
        if choice is None and request.emitted:
            for open_choice in (i for i, ids in enumerate(request.emitted) if ids is not None):
                self.start(open_choice)
            return
        emitted = [] if choice is None else self._emitted[choice]
        part = request if choice is None else replace(request, request_id=f"{request.request_id}#{choice}")
        if choice is not None:
            max_tokens = request.max_tokens - len(emitted)
            part = replace(part, prompt=(*request.prompt, *emitted), max_tokens=max_tokens, num_choices=1)
        placement = self._registry.place(part, self._avoided())
        if placement is None:
            if self._interruptions and self._interruptions[-1].cause is Cause.FULL:
                raise Overloaded("every worker's queue is full")
            raise Unavailable("no worker is ready")
        self._num_attempts += 1
        submit = worker_pb2.Submit(
            request_id=request.request_id,
            attempt=self._num_attempts,
            token_ids=part.prompt,
            first_index=len(emitted),
            max_tokens=part.max_tokens,
            sampling=request.sampling,
            stop_token_ids=request.stop_token_ids,
            ignore_eos=request.ignore_eos,
            cache_salt=request.cache_salt,
            num_choices=part.num_choices,
            first_choice=choice or 0,
            beam_search=request.beam_search,
            logprobs=request.logprobs,
            prompt_logprobs=None if emitted or self._has_prompt_logprobs else request.prompt_logprobs,
            bad_words=[inference_pb2.TokenIds(ids=word) for word in request.bad_words],
            min_tokens=request.min_tokens,
            grammar=request.grammar,
            priority=request.priority,
        )
        self._timer.dispatched(placement, self._num_attempts)
        attempt = Attempt(part, submit, placement, send=self._send, registry=self._registry, timer=self._timer)
        self._attempts.append(attempt)
        attempt.start()

    def deltas(self) -> Iterator[TokenDelta]:
        """Yields what has come since the last call. Raises a TandemError if the request cannot be continued."""
        for attempt in self._attempts:  # grows meanwhile, by those that replay
            while True:
                for delta in attempt.poll():
                    if delta.choice in self._ended:
                        attempt.drop(delta.choice)
                    elif fresh := self._fresh(delta):
                        self._emitted[fresh.choice] += fresh.ids
                        self._timer.tokens(len(fresh.ids))
                        yield fresh
                if not attempt.interruptions:
                    break
                interruptions, attempt.interruptions = attempt.interruptions, []
                for interruption in interruptions:
                    self._continue(interruption, attempt)
            if not attempt.choices:
                attempt.end()
        self._attempts = [attempt for attempt in self._attempts if attempt.choices]

    def end(self) -> None:
        """Lets the workers free whatever they still hold for the request. Idempotent."""
        for attempt in self._attempts:
            attempt.end()

    def _fresh(self, delta: TokenDelta) -> TokenDelta | None:
        """Returns the delta without what the caller has already: prompt logprobs and, of a beam search that started
        again, tokens."""
        if delta.prompt_logprobs:
            if self._has_prompt_logprobs:
                delta = replace(delta, prompt_logprobs=())
            self._has_prompt_logprobs = True
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

    def _continue(self, interruption: Interruption, attempt: Attempt) -> None:
        """Continues interrupted choices: rehand if that is possible, else replay. Raises the request's error if it was
        interrupted too often. A crash counts before the next placement, which avoids the worker."""
        logger.warning("%s: %s on %s", self._request.request_id, interruption.message, interruption.worker[0])
        self._interruptions.append(interruption)
        _check(self._interruptions)
        if interruption.can_rehand and self._rehand(interruption, attempt):
            return
        attempt.abandon(interruption.choices)
        choices = interruption.choices - set(self._ended)
        is_untouched = len(choices) == self._request.num_choices and not any(self._emitted)
        if self._request.beam_search is not None or is_untouched:
            self.start()
        else:
            for choice in sorted(choices):
                self.start(choice)

    def _rehand(self, interruption: Interruption, attempt: Attempt) -> bool:
        """Gives the KV cache of the attempt to another decode worker; to the same one if there is no other and it may
        not be at fault. Returns False, having done nothing, without a decode worker."""
        avoided, prefill = self._avoided(), attempt.placement.prefill
        placement = self._registry.place(attempt.part, avoided | {interruption.worker[0]}, prefill=prefill)
        placement = placement or self._registry.place(attempt.part, avoided, prefill=prefill)
        if placement is None:
            return False
        self._num_attempts += 1
        self._timer.dispatched(placement, self._num_attempts)
        attempt.rehand(placement, self._num_attempts)
        return True

    def _avoided(self) -> set[str]:
        return {one.worker[0] for one in self._interruptions if one.cause.avoids_worker}


def _check(interruptions: list[Interruption]) -> None:
    """Raises the request's error if the last interruption was one too many; returns if the request continues."""
    last = interruptions[-1]
    if last.cause is Cause.INVALID:
        field, _, reason = last.message.partition(": ")
        raise InvalidArgument(reason if field in _FIELDS else last.message, _FIELDS.get(field, "prompt"))
    crashed = {one.worker for one in interruptions if one.cause.blames_request}
    if len(crashed) >= MAX_WORKERS_LOST:
        raise InternalError("the request was given up after two workers were lost")
    lost = [one.choices for one in interruptions if one.cause is Cause.TRANSFER]
    if any(sum(choice in choices for choices in lost) >= MAX_TRANSFERS_LOST for choice in last.choices):
        raise InternalError("the KV cache could not be moved")
