"""Leads requests through prefill and decode workers, and through their failures. Knows token ids, not text."""

import asyncio
import time
from collections.abc import AsyncGenerator, Collection, Iterator
from contextlib import AsyncExitStack, contextmanager
from functools import partial

from ...proto import inference_pb2, worker_pb2
from ...proto.errors import Overloaded, Unavailable
from ..deadline import before, deadline_passed
from ..request import TokenDelta, TokenRequest
from ..scheduling.admission import Admission
from ..scheduling.registry import WorkerRegistry
from .attempt import Leg, WorkerLeft
from .execution import RequestExecution
from .request_timer import RequestTimer
from .worker_client import WorkerClient


class Dispatcher:
    """The TokenSource that the pools stand behind."""

    def __init__(self, view: WorkerRegistry, admission: Admission | None = None, *, max_requests: int = 4096) -> None:
        """`admission` says who may begin, and when; without it at most `max_requests` run, and no other waits."""
        self._view = view
        self._admission = admission
        self._max_requests = max_requests
        self._links: dict[tuple[str, int], WorkerClient] = {}
        self._num_requests = 0
        self._closed = False

    @property
    def num_requests(self) -> int:
        """Requests under way, those that wait for admission too."""
        return self._num_requests

    async def generate(
        self, request: TokenRequest, timeline: inference_pb2.Timeline, ended: Collection[int] = ()
    ) -> AsyncGenerator[TokenDelta, None]:
        """See TokenSource. Raises Unavailable without a worker, Overloaded when all are full, InternalError when the
        request has cost MAX_WORKERS_LOST workers."""
        watch = RequestTimer(request, timeline)
        wake = asyncio.Event()
        run = RequestExecution(request, ended, send=partial(self._send, wake), view=self._view, watch=watch)
        async with AsyncExitStack() as scope:
            scope.callback(watch.stop)
            await self._admit(request, scope)
            scope.callback(run.end)
            alarm = scope.enter_context(_alarm(request.deadline, wake))
            run.start()
            while True:
                for delta in run.deltas():
                    yield delta
                if run.done:
                    return
                await wake.wait()
                wake.clear()
                if alarm.is_set():
                    raise deadline_passed()

    async def close(self) -> None:
        """Ends all sessions; the workers cancel what came over them. Requests under way end with Unavailable."""
        self._closed = True
        await asyncio.gather(*(link.close() for link in self._links.values()))
        self._links.clear()

    async def _admit(self, request: TokenRequest, scope: AsyncExitStack) -> None:
        """Returns when the request may begin; its place is kept until `scope` ends."""
        if self._admission is None and self._num_requests >= self._max_requests:
            raise Overloaded(f"{self._max_requests} requests are under way")
        self._num_requests += 1
        scope.callback(self._leave)
        if self._admission is not None:
            await before(request.deadline, scope.enter_async_context(self._admission.slot(request)))

    def _leave(self) -> None:
        self._num_requests -= 1

    def _send(self, wake: asyncio.Event, worker_id: str, submit: worker_pb2.Submit) -> Leg:
        """Over the session that stands, or a new one. Raises WorkerLeft, or Unavailable after `close`."""
        if self._closed:
            raise Unavailable("the router is shutting down")
        info = self._view.get(worker_id)
        if info is None:
            raise WorkerLeft
        key = (worker_id, info.epoch)
        link = self._links.get(key)
        if link is None or link.broken:
            for stale in [k for k, old in self._links.items() if old.broken]:
                del self._links[stale]
            link = self._links[key] = WorkerClient(
                info.address, partial(self._report, key), partial(self._view.lost_session, *key)
            )
        return Leg(worker=key, attempt=link.submit(submit, wake))

    def _report(self, worker: tuple[str, int], message: worker_pb2.SessionResponse) -> None:
        """What a worker says of itself, beside its answers."""
        worker_id, epoch = worker
        if message.HasField("load"):
            self._view.report_load(worker_id, message.load)
        if message.HasField("cache"):
            self._view.report_cache(worker_id, epoch, message.cache.stored, message.cache.evicted)


@contextmanager
def _alarm(deadline: float | None, wake: asyncio.Event) -> Iterator[asyncio.Event]:
    """Sets the event that it yields, and `wake`, when time.monotonic() has come to `deadline`; one timer a request
    costs less than one a token."""
    rung = asyncio.Event()
    if deadline is None:
        yield rung
        return
    loop = asyncio.get_running_loop()

    def ring() -> None:
        rung.set()
        wake.set()

    timer = loop.call_later(deadline - time.monotonic(), ring)
    try:
        yield rung
    finally:
        timer.cancel()
