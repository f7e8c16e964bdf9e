"""Dispatches requests to workers and continues them when workers fail. Knows ids, not text."""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Collection
from functools import partial
from typing import Final
from weakref import WeakSet

from ...proto import inference_pb2, worker_pb2
from ...proto.channel import PeerChannel
from ...proto.errors import Unavailable
from ...proto.identity import PeerIdentity
from ...proto.metrics import ITERATION_TOKENS, LOST_WORKERS, NULL_METRICS, Metrics
from ..request import TokenDelta, TokenRequest
from ..scheduling.admission import Admission
from ..scheduling.registry import WorkerRegistry
from .blocked_prompts import BlockedPrompts
from .execution import PARK_SECONDS, RequestExecution
from .output_buffer import Wakeup
from .poison_guard import PoisonGuard
from .request_timer import RequestTimer
from .worker_client import Connect, WorkerClient, WorkerKey, WorkerStream

PROBE_SECONDS: Final = 0.5
"""The time between attempts to reconnect to a worker after its session has broken."""

_STOPPING: Final = "the service is stopping"


class Dispatcher:
    """Generates tokens on the workers of a registry: the TokenSource of the service.

    It needs nothing from other routers except their blocked prompts. Each session belongs to one
    router, so request ids must be unique only within a router.
    """

    def __init__(
        self,
        registry: WorkerRegistry,
        admission: Admission,
        *,
        identity: PeerIdentity,
        park_seconds: float = PARK_SECONDS,
        metrics: Metrics = NULL_METRICS,
        blocked_prompts: BlockedPrompts | None = None,
        connect: Connect = PeerChannel,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Lets `admission` decide when a request may start.

        An interrupted request waits `park_seconds` for a worker that can take it. All routers share
        `blocked_prompts`; without it, this router keeps a list for itself. `connect` makes the
        channel to each worker.
        """
        self._metrics = metrics
        self._registry = registry
        self._admission = admission
        self._identity = identity
        self._park_seconds = park_seconds
        self._open_channel = connect
        self._clock = clock
        self._poison_guard = PoisonGuard(clock, blocked_prompts=blocked_prompts)
        self._running: WeakSet[RequestExecution] = WeakSet()
        self._clients: dict[WorkerKey, WorkerClient] = {}  # of listed workers
        # Sessions that requests still use, with workers that have left the list. If such a worker
        # is listed again, it gets a new session, because only a new one reports the whole prefix
        # cache.
        self._retired: list[WorkerClient] = []
        self._closed = False

    def generate(
        self,
        request: TokenRequest,
        timeline: inference_pb2.Timeline,
        cancelled: Collection[int] = (),
    ) -> AsyncGenerator[TokenDelta, None]:
        """Yields the tokens of one request, see TokenSource.

        Raises Unavailable if there is no worker, Overloaded if all are full, and InternalError if
        the request has crashed workers, see PoisonGuard.
        """
        wake = Wakeup()
        execution = RequestExecution(
            request,
            cancelled,
            send=partial(self._send, wake),
            registry=self._registry,
            timer=RequestTimer(request, timeline, self._metrics, self._clock),
            poison_guard=self._poison_guard,
            park_seconds=self._park_seconds,
            wake=wake.set,
            clock=self._clock,
        )
        self._running.add(execution)
        return execution.run(self._admission, wake)

    @property
    def num_parked(self) -> int:
        """The number of interrupted requests that wait for a worker."""
        return sum(execution.wake_at is not None for execution in self._running)

    def announce_stop(self) -> None:
        """Fails requests that find no worker with `the service is stopping` from now on."""
        self._registry.unavailable_message = _STOPPING

    def stop(self) -> None:
        """Ends all running, waiting and later requests with Unavailable."""
        self._closed = True
        error = Unavailable(_STOPPING)
        self._admission.stop(error)
        for execution in list(self._running):
            execution.fail(error)

    async def close(self) -> None:
        """Ends all requests and all sessions; the workers cancel the requests of a session."""
        self.stop()
        await asyncio.gather(*(client.close() for client in self._all_clients()))
        self._clients.clear()
        self._retired.clear()

    async def update_sessions(self) -> None:
        """Opens a session with each listed worker, and ends those with workers that have left.

        The sessions report the loads and the prefix caches, and show which workers are lost. A
        session that requests still use ends with its last request.
        """
        for (worker_id, epoch), client in list(self._clients.items()):
            known = self._registry.get(worker_id)
            if known is None or known.epoch != epoch:
                del self._clients[worker_id, epoch]
                self._retired.append(client)
                client.retire()
        self._forget_broken()
        for info in self._registry.workers():
            if self._closed:
                return
            opened = self._clients.get((info.worker_id, info.epoch))
            is_open = opened is not None and not opened.broken
            if not is_open and not self._registry.is_lost(info.worker_id, info.epoch):
                self._connect(info)
                await asyncio.sleep(0)  # other tasks run between 1,000 connections

    def _send(
        self, wake: asyncio.Event, worker_id: str, submit: worker_pb2.Submit
    ) -> WorkerStream | None:
        """Submits over the session with the worker; opens one first if needed.

        Returns None if the worker has left the registry or is lost; also if it has got the role of
        prefill since it was chosen to decode, while another worker decodes. Raises Unavailable
        after `stop`.
        """
        if self._closed:
            raise Unavailable(_STOPPING)
        info = self._registry.get(worker_id)
        if info is None or self._registry.is_lost(worker_id, info.epoch):
            return None
        decodes = info.role == worker_pb2.ROLE_DECODE or submit.task != worker_pb2.TASK_DECODE
        if not decodes and self._registry.has_other(worker_id):
            return None
        client = self._clients.get((worker_id, info.epoch))
        if client is None or client.broken:
            client = self._connect(info)
        return client.submit(submit, wake)

    def _connect(self, info: worker_pb2.WorkerInfo) -> WorkerClient:
        """Opens a session with a worker."""
        key = (info.worker_id, info.epoch)
        self._forget_broken()
        client = self._clients[key] = WorkerClient(
            key,
            info.address,
            self._identity,
            on_message=self._received,
            on_break=self._lost,
            room_elsewhere=partial(self._room_elsewhere, info.worker_id),
            connect=self._open_channel,
        )
        return client

    def _room_elsewhere(self, worker_id: str) -> int:
        """Returns how many more sequences of a draining worker can move to other workers.

        Sequences that are about to leave any worker have taken their room already.
        """
        num_moving = sum(client.num_moving for client in self._all_clients())
        return self._registry.room_elsewhere(worker_id) - num_moving

    def _all_clients(self) -> list[WorkerClient]:
        return [*self._clients.values(), *self._retired]

    def _forget_broken(self) -> None:
        self._clients = {key: client for key, client in self._clients.items() if not client.broken}
        self._retired = [client for client in self._retired if not client.broken]

    def _lost(self, client: WorkerClient) -> None:
        """Keeps requests from a worker with a broken session until a new session brings a message.

        The directory lists a dead worker for seconds; every request placed there would lose time. A
        worker that has left, or has a new epoch, is not lost with its earlier session.
        """
        worker = client.worker
        if self._clients.get(worker) is not client:
            return
        self._registry.session_lost(*worker)
        if not self._closed:
            delay = 0 if client.heard else PROBE_SECONDS  # a probe has not heard anything
            if client.was_lost and self._registry.is_lost(*worker):
                self._metrics.add(LOST_WORKERS)
            asyncio.get_running_loop().call_later(delay, self._probe, worker)

    def _probe(self, worker: WorkerKey) -> None:
        info = self._registry.get(worker[0])
        if info is not None and not self._closed and self._registry.is_lost(*worker):
            self._connect(info)

    def _received(self, client: WorkerClient, message: worker_pb2.SessionResponse) -> None:
        if self._clients.get(client.worker) is client:
            self._registry.report(*client.worker, message)
        if message.outputs:
            num_tokens = sum(len(output.tokens.ids) or 1 for output in message.outputs)
            self._metrics.observe(ITERATION_TOKENS, num_tokens)
