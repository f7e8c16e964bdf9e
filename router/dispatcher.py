"""Leads one request through a prefill and a decode worker, and through their failures.

Prompt and emitted tokens stay here: whatever happens to a worker, the next attempt prefills prompt + emitted tokens
(mostly hits in a prefix cache) and goes on at the next index. Knows token ids, not text.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from functools import partial
from typing import Final

from ..proto import inference_pb2, worker_pb2
from ..proto.errors import InternalError, InvalidArgument, Overloaded, Unavailable
from .link import Attempt, LinkBroken, WorkerLink
from .policy import Placement
from .request import TokenDelta, TokenRequest
from .stopwatch import Stopwatch
from .view import DirectoryView

logger = logging.getLogger(__name__)

MAX_WORKERS_LOST: Final = 2
"""A request that so many workers had begun when they died is not given to another."""

MAX_TRANSFERS_LOST: Final = 3

_AVOIDED: Final = (worker_pb2.FAILURE_KIND_FULL, worker_pb2.FAILURE_KIND_WORKER)


class AttemptFailed(Exception):
    """One attempt has ended without the request's end; another may follow."""

    def __init__(self, kind: "worker_pb2.FailureKind", worker_id: str, message: str, *, admitted: bool = False) -> None:
        super().__init__(message)
        self.kind = kind
        self.worker_id = worker_id
        self.message = message
        self.admitted = admitted  # the worker had begun to compute it, so that it may be what killed the worker


class Dispatcher:
    """The TokenSource that the pools stand behind."""

    def __init__(self, view: DirectoryView, *, max_requests: int = 4096) -> None:
        self._view = view
        self._max_requests = max_requests
        self._links: dict[tuple[str, int], WorkerLink] = {}
        self._num_requests = 0
        self._closed = False

    @property
    def num_requests(self) -> int:
        """Requests under way."""
        return self._num_requests

    async def generate(
        self, request: TokenRequest, timeline: inference_pb2.Timeline
    ) -> AsyncGenerator[TokenDelta, None]:
        """See TokenSource. Raises Unavailable without a worker, Overloaded when all are full, InternalError when the
        request has cost MAX_WORKERS_LOST workers."""
        if self._num_requests >= self._max_requests:
            raise Overloaded(f"{self._max_requests} requests are under way")
        self._num_requests += 1
        watch = Stopwatch(request, timeline)
        emitted: list[int] = []
        failures: list[AttemptFailed] = []
        try:
            while True:
                try:
                    async with aclosing(self._attempt(request, emitted, failures, watch)) as deltas:
                        async for delta in deltas:
                            emitted += delta.ids
                            watch.tokens(len(delta.ids))
                            yield delta
                    return
                except AttemptFailed as failure:
                    logger.warning("%s: %s on %s", request.request_id, failure.message, failure.worker_id)
                    failures.append(failure)
                    _check(failures)
        finally:
            self._num_requests -= 1
            watch.stop()

    async def close(self) -> None:
        """Ends all sessions; the workers cancel what came over them. Requests under way end with Unavailable."""
        self._closed = True
        await asyncio.gather(*(link.close() for link in self._links.values()))
        self._links.clear()

    async def _attempt(
        self, request: TokenRequest, emitted: list[int], failures: list[AttemptFailed], watch: Stopwatch
    ) -> AsyncGenerator[TokenDelta, None]:
        """One dispatch. Counted before it is sent: a crash skips any later place."""
        placement = self._view.place(request, {f.worker_id for f in failures if f.kind in _AVOIDED})
        if placement is None:
            if failures and failures[-1].kind == worker_pb2.FAILURE_KIND_FULL:
                raise Overloaded("every worker's queue is full")
            raise Unavailable("no worker is ready")
        submit = _submit(request, emitted, attempt=len(failures) + 1)
        watch.dispatched(placement, attempt=submit.attempt)
        run = self._whole if placement.prefill is None else self._apart
        try:
            async with aclosing(run(placement, submit, request, watch)) as deltas:
                async for delta in deltas:
                    yield delta
        finally:
            for worker_id in (placement.prefill, placement.decode):
                if worker_id is not None:
                    self._view.ended(worker_id, request.request_id)

    async def _whole(
        self, placement: Placement, submit: worker_pb2.Submit, request: TokenRequest, watch: Stopwatch
    ) -> AsyncGenerator[TokenDelta, None]:
        submit.task = worker_pb2.TASK_WHOLE
        self._view.sent(placement.decode, request, len(submit.token_ids))
        attempt = self._send(placement.decode, submit)
        try:
            finished = False
            while not finished:
                output = await _next(attempt, placement.decode)
                watch.observe(output)
                if output.HasField("tokens"):
                    self._view.computed(placement.decode, request.request_id)
                    delta = _delta(output.tokens)
                    finished = delta.finish_reason != inference_pb2.FINISH_REASON_UNSPECIFIED
                    yield delta
        finally:
            attempt.end()

    async def _apart(
        self, placement: Placement, submit: worker_pb2.Submit, request: TokenRequest, watch: Stopwatch
    ) -> AsyncGenerator[TokenDelta, None]:
        assert placement.prefill is not None
        submit.task = worker_pb2.TASK_PREFILL
        self._view.sent(placement.prefill, request, len(submit.token_ids))
        self._view.sent(placement.decode, request, 0)
        prefill = self._send(placement.prefill, submit)
        decode: Attempt | None = None
        try:
            while True:
                output = await _next(prefill, placement.prefill)
                watch.observe(output)
                if output.HasField("admitted") and submit.max_tokens > 1:
                    decode = self._send(placement.decode, _with_kv(submit, output.admitted.kv))
                elif output.HasField("tokens"):
                    break
            self._view.computed(placement.prefill, request.request_id)
            delta = _delta(output.tokens)
            yield delta
            if decode is None or delta.finish_reason != inference_pb2.FINISH_REASON_UNSPECIFIED:
                return
            while delta.finish_reason == inference_pb2.FINISH_REASON_UNSPECIFIED:
                output = await _next(decode, placement.decode)
                watch.observe(output, decode=True)
                if output.HasField("joined"):
                    self._view.ended(placement.prefill, request.request_id)
                elif output.HasField("tokens"):
                    delta = _delta(output.tokens)
                    yield delta
        finally:
            prefill.end()
            if decode is not None:
                decode.end()

    def _send(self, worker_id: str, submit: worker_pb2.Submit) -> Attempt:
        """Over the session that stands, or a new one. Raises AttemptFailed if the worker has left the view, Unavailable
        after `close`."""
        if self._closed:
            raise Unavailable("the router is shutting down")
        info = self._view.get(worker_id)
        if info is None:
            raise AttemptFailed(worker_pb2.FAILURE_KIND_WORKER, worker_id, "worker left")
        key = (worker_id, info.epoch)
        link = self._links.get(key)
        if link is None or link.broken:
            for stale in [k for k, old in self._links.items() if old.broken]:
                del self._links[stale]
            link = self._links[key] = WorkerLink(info.address, partial(self._view.report_load, worker_id))
        return link.submit(submit)


async def _next(attempt: Attempt, worker_id: str) -> worker_pb2.Output:
    """The worker's next answer. Raises AttemptFailed for a failure or a broken link."""
    try:
        output = await attempt.next()
    except LinkBroken:
        kind = worker_pb2.FAILURE_KIND_WORKER
        raise AttemptFailed(kind, worker_id, "worker lost", admitted=attempt.admitted) from None
    if output.HasField("failure"):
        raise AttemptFailed(output.failure.kind, worker_id, output.failure.message, admitted=attempt.admitted)
    return output


def _check(failures: list[AttemptFailed]) -> None:
    """Raises the request's end if it has failed often enough; returns if another attempt is due."""
    last = failures[-1]
    if last.kind == worker_pb2.FAILURE_KIND_INVALID:
        raise InvalidArgument(last.message, "prompt")
    if sum(f.kind == worker_pb2.FAILURE_KIND_WORKER and f.admitted for f in failures) >= MAX_WORKERS_LOST:
        raise InternalError("the request was given up after two workers were lost")
    if sum(f.kind == worker_pb2.FAILURE_KIND_TRANSFER for f in failures) >= MAX_TRANSFERS_LOST:
        raise InternalError("the KV cache could not be moved")


def _submit(request: TokenRequest, emitted: list[int], attempt: int) -> worker_pb2.Submit:
    return worker_pb2.Submit(
        request_id=request.request_id,
        attempt=attempt,
        token_ids=[*request.prompt, *emitted],
        first_index=len(emitted),
        max_tokens=request.max_tokens - len(emitted),
        sampling=request.sampling,
        stop_token_ids=request.stop_token_ids,
        ignore_eos=request.ignore_eos,
        cache_salt=request.cache_salt,
    )


def _with_kv(submit: worker_pb2.Submit, handle: worker_pb2.KvHandle) -> worker_pb2.Submit:
    decode = worker_pb2.Submit()
    decode.CopyFrom(submit)
    decode.task = worker_pb2.TASK_DECODE
    decode.kv.CopyFrom(handle)
    return decode


def _delta(tokens: worker_pb2.Tokens) -> TokenDelta:
    return TokenDelta(first_index=tokens.first_index, ids=tuple(tokens.ids), finish_reason=tokens.finish_reason)
