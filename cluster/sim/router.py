"""Simulates a router: the real admission, registry and dispatcher, and a view of the directory."""

import asyncio
import random
from array import array
from collections.abc import Callable, Sequence
from contextlib import aclosing
from typing import Final

from ...proto import inference_pb2, worker_pb2
from ...proto.errors import TandemError
from ...proto.identity import PeerIdentity
from ...router.dispatch.dispatcher import Dispatcher
from ...router.request import TokenRequest, TokenSource
from ...router.scheduling.admission import Admission
from ...router.scheduling.registry import WorkerRegistry
from ..bench.metrics import RequestFailed, RequestRecord
from ..scaling.reports import router_report
from ..serve.members import EXPIRY_SECONDS, Directory, RouterInfo
from ..serve.views.member_view import DirectoryWatcher
from .cost import ServiceCosts
from .fabric import Fabric, RouterTime
from .result import SimulatedRequest
from .service import SimulatedService

_POLL_SECONDS: Final = 0.05  # between two polls of the directory, as DirectoryClient waits
_SAMPLING: Final = inference_pb2.SamplingParams(
    temperature=0, top_k=0, top_p=1, min_p=0, typical_p=1, repetition_penalty=1
)


class SimulatedRouter:
    """Runs one router in the event loop of the simulation."""

    def __init__(
        self,
        name: str,
        service: SimulatedService,
        costs: ServiceCosts,
        fabric: Fabric,
        identity: PeerIdentity,
        seed: int,
    ) -> None:
        clock = asyncio.get_running_loop().time
        self.time = RouterTime(costs.router_seconds_per_token)
        self.registry = WorkerRegistry(
            local_prefill_tokens=service.router.local_prefill_tokens,
            rng=random.Random(seed),
            clock=clock,
        )
        self.admission = Admission(
            self.registry,
            max_queued_tokens=service.router.max_queued_tokens,
            max_queued_requests=service.router.max_queued_requests,
            max_queue_seconds=service.router.max_queue_seconds,
            clock=clock,
        )
        self.dispatcher = Dispatcher(
            self.registry,
            self.admission,
            identity=identity,
            park_seconds=service.router.park_seconds,
            connect=fabric.connect(self.time),
            clock=clock,
        )
        self._name = name
        self._clock = clock
        self._request_seconds = costs.request_seconds
        self._seconds_per_request = costs.router_seconds_per_request

    async def watch(self, directory: Directory) -> None:
        """Keeps the registry equal to the directory's list, without end."""
        watcher = DirectoryWatcher()
        info = RouterInfo(router_id=self._name, grpc_address="", http_address="")
        while True:
            changes = await directory.watch(watcher.version, EXPIRY_SECONDS / 2, info)
            if watcher.apply(changes):
                self.registry.update(watcher.workers)
                await self.dispatcher.update_sessions()
            await asyncio.sleep(_POLL_SECONDS)

    def report(self) -> dict[str, float]:
        """Returns the demand of this router's requests, for the autoscaling policy."""
        return router_report(self.admission, self.registry)

    async def serve(
        self, request_id: str, prompt: Sequence[int], max_tokens: int, tenant: str
    ) -> SimulatedRequest:
        """Serves one request, like a client that measures it."""
        started = self._clock()
        if self._request_seconds:
            await asyncio.sleep(self._request_seconds)
        await self.time.spend(self._seconds_per_request)
        request = make_request(request_id, prompt, max_tokens, tenant, started)
        return await measure(self.dispatcher, request, self._clock)


def make_request(
    request_id: str, prompt: Sequence[int], max_tokens: int, tenant: str, arrived: float
) -> TokenRequest:
    """Returns a request that generates exactly `max_tokens` tokens."""
    submit = worker_pb2.Submit(
        request_id=request_id,
        token_ids=prompt,
        max_tokens=max_tokens,
        num_choices=1,
        sampling=_SAMPLING,
    )
    return TokenRequest(request_id=request_id, submit=submit, tenant=tenant, arrived=arrived)


async def measure(
    source: TokenSource, request: TokenRequest, clock: Callable[[], float]
) -> SimulatedRequest:
    """Reads the tokens of a request and measures them by `clock`, from the request's arrival on."""
    times = array("d")
    num_tokens = 0
    timeline = inference_pb2.Timeline()
    failure: RequestFailed | None = None
    try:
        async with aclosing(source.generate(request, timeline)) as deltas:
            async for delta in deltas:
                times.append(clock())
                num_tokens += len(delta.ids)
    except TandemError as error:
        failure = RequestFailed(error.code, error.message)
    record = RequestRecord(
        started=request.arrived,
        ended=clock(),
        chunk_times=times,
        prompt_tokens=len(request.submit.token_ids),
        output_tokens=num_tokens,
        failure=failure,
    )
    return SimulatedRequest(record=record, timeline=timeline, tenant=request.tenant)
