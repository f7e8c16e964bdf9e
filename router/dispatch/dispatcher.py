"""Dispatches requests to workers, and continues them when workers fail. Knows token ids, not text."""

import asyncio
import time
from collections.abc import AsyncGenerator, Collection
from contextlib import AsyncExitStack
from functools import partial

from ...proto import inference_pb2, worker_pb2
from ...proto.errors import Unavailable
from ..deadline import before, deadline_passed
from ..request import TokenDelta, TokenRequest
from ..scheduling.admission import Admission
from ..scheduling.registry import WorkerRegistry
from .execution import RequestExecution
from .request_timer import RequestTimer
from .worker_client import WorkerClient, WorkerKey, WorkerStream


class Dispatcher:
    """Generates tokens on the workers of a registry: the TokenSource of the service.

    Needs to know nothing of other routers. A worker tells requests apart by their session, and a session is one
    router's; request ids only have to be unique within a router.
    """

    def __init__(self, registry: WorkerRegistry, admission: Admission | None = None) -> None:
        """`admission` decides when a request may start; None: one with the default bounds."""
        self.num_requests = 0  # in progress, those that wait for admission too
        self._registry = registry
        self._admission = admission or Admission(registry)
        self._clients: dict[WorkerKey, WorkerClient] = {}
        self._closed = False

    async def generate(
        self, request: TokenRequest, timeline: inference_pb2.Timeline, ended: Collection[int] = ()
    ) -> AsyncGenerator[TokenDelta, None]:
        """See TokenSource. Raises Unavailable without a worker, Overloaded when all are full, InternalError when the
        request has cost MAX_WORKERS_LOST workers."""
        timer = RequestTimer(request, timeline)
        wake, late = asyncio.Event(), asyncio.Event()

        def expire() -> None:
            late.set()
            wake.set()

        execution = RequestExecution(
            request, ended, send=partial(self._send, wake), registry=self._registry, timer=timer
        )
        async with AsyncExitStack() as scope:
            scope.callback(timer.stop)
            self.num_requests += 1
            scope.callback(self._forget)
            await before(request.deadline, scope.enter_async_context(self._admission.slot(request)))
            scope.callback(execution.end)
            if request.deadline is not None:  # one timer for a request costs less than one for each token
                delay = request.deadline - time.monotonic()
                scope.callback(asyncio.get_running_loop().call_later(delay, expire).cancel)
            execution.start()
            while True:
                for delta in execution.deltas():
                    yield delta
                if execution.done:
                    return
                await wake.wait()
                wake.clear()
                if late.is_set():
                    raise deadline_passed()

    async def close(self) -> None:
        """Ends all sessions; the workers cancel what came over them. Requests in progress end with Unavailable."""
        self._closed = True
        await asyncio.gather(*(client.close() for client in self._clients.values()))
        self._clients.clear()

    def _forget(self) -> None:
        self.num_requests -= 1

    def _send(self, wake: asyncio.Event, worker_id: str, submit: worker_pb2.Submit) -> WorkerStream | None:
        """Submits over the session with the worker, opening one if there is none. Returns None if the worker has left
        the registry. Raises Unavailable after `close`."""
        if self._closed:
            raise Unavailable("the router is shutting down")
        info = self._registry.get(worker_id)
        if info is None:
            return None
        key = (worker_id, info.epoch)
        client = self._clients.get(key)
        if client is None or client.broken:
            self._clients = {other: client for other, client in self._clients.items() if not client.broken}
            client = self._clients[key] = WorkerClient(
                key,
                info.address,
                on_message=partial(self._registry.report, *key),
                on_break=partial(self._registry.session_lost, *key),
            )
        return client.submit(submit, wake)
