"""Simulates a service on a virtual clock: real routers, a real directory, and simulated workers.

The same seed gives the same result.
"""

import asyncio
from collections.abc import Sequence
from typing import Any, Final

from ...proto.identity import PeerIdentity
from ..scaling.reports import WAITING_SEQUENCES
from ..serve.members import Directory
from ..traces.prompts import prompt_ids
from ..traces.read import TracedRequest
from .autoscaler import Autoscaler
from .cost import ServiceCosts
from .fabric import Fabric
from .loop import run_simulated
from .pools import SimulatedPools
from .result import SimulatedRequest, SimulationResult
from .router import SimulatedRouter
from .service import SimulatedService
from .worker import VOCAB_SIZE

_SAMPLE_SECONDS: Final = 1.0


def simulate(
    service: SimulatedService,
    requests: Sequence[TracedRequest],
    costs: ServiceCosts,
    seed: int = 0,
    *,
    tenants: Sequence[str] = (),
) -> SimulationResult:
    """Serves a trace in virtual time and returns what its clients and the service measure.

    `tenants`: of each request; empty if all belong to one. Raises RuntimeError if a worker has a
    defect.
    """
    return run_simulated(_Simulation(service, costs, seed).run(requests, tenants))


class _Simulation:
    """Runs one simulation in the current event loop."""

    def __init__(self, service: SimulatedService, costs: ServiceCosts, seed: int) -> None:
        self._service = service
        self._costs = costs
        self._seed = seed
        self._queue_seconds = {"prefill": 0.0, "decode": 0.0}
        self._failures: list[BaseException] = []
        self._serving: asyncio.Future[list[SimulatedRequest]] | None = None

    async def run(
        self, requests: Sequence[TracedRequest], tenants: Sequence[str]
    ) -> SimulationResult:
        """Serves the requests and ends everything."""
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(self._handle)
        directory = Directory(clock=loop.time)
        fabric = Fabric()
        pools = SimulatedPools(self._service, self._costs, fabric, directory, self._fail)
        identity = PeerIdentity.generate()
        routers = [
            SimulatedRouter(
                f"router-{number}",
                self._service,
                self._costs,
                fabric,
                identity,
                self._seed + number,
            )
            for number in range(self._service.routers)
        ]
        workers = [
            (await pools.start(role)).info()
            for role, pool in self._service.pools.items()
            for _ in range(pool.workers)
        ]
        for router in routers:
            router.registry.update(workers)
        autoscaler = Autoscaler(self._service, pools, routers)
        background = [
            *(asyncio.create_task(router.watch(directory)) for router in routers),
            *(asyncio.create_task(pools.fail(fault)) for fault in self._service.faults),
            *(asyncio.create_task(autoscaler.obey(each)) for each in self._service.resizes),
            asyncio.create_task(autoscaler.run()),
            asyncio.create_task(self._sample(routers)),
        ]
        for task in background:
            task.add_done_callback(self._check)
        self._serving = asyncio.ensure_future(self._serve(requests, tenants, routers))
        await asyncio.wait([self._serving])
        seconds = loop.time()
        for task in background:
            task.cancel()
        for router in routers:
            await router.dispatcher.close()
        await pools.close()
        if self._failures:
            raise RuntimeError("the simulation has failed") from self._failures[0]
        return SimulationResult(
            requests=self._serving.result(),
            workers=pools.usages,
            seconds=seconds,
            router_busy_share=max(each.time.busy_seconds for each in routers) / seconds,
            queue_seconds=self._queue_seconds,
            sizes=pools.sizes,
            starts=pools.starts,
        )

    async def _serve(
        self,
        requests: Sequence[TracedRequest],
        tenants: Sequence[str],
        routers: Sequence[SimulatedRouter],
    ) -> list[SimulatedRequest]:
        """Sends each request to the next router at its time, and waits for the end of all."""
        loop = asyncio.get_running_loop()
        tasks = []
        for number, request in enumerate(requests):
            if (delay := request.time - loop.time()) > 0:
                await asyncio.sleep(delay)
            router = routers[number % len(routers)]
            serving = router.serve(
                str(number),
                make_prompt(request, number, self._seed),
                request.output_length,
                tenants[number] if tenants else "",
            )
            tasks.append(asyncio.create_task(serving))
        return list(await asyncio.gather(*tasks))

    async def _sample(self, routers: Sequence[SimulatedRouter]) -> None:
        """Counts, without end, the requests that wait in the routers, by the pool they wait for."""
        while True:
            await asyncio.sleep(_SAMPLE_SECONDS)
            for router in routers:
                num_waiting = len(router.admission.queue)
                if num_waiting:
                    waits = router.report()[WAITING_SEQUENCES]
                    role = "prefill" if "prefill" in self._service.pools and not waits else "decode"
                    self._queue_seconds[role] += _SAMPLE_SECONDS * num_waiting

    def _check(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()):
            self._fail(error)

    def _handle(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Handles an error that no task has read."""
        self._fail(context.get("exception") or RuntimeError(context["message"]))

    def _fail(self, error: BaseException) -> None:
        """Ends the simulation because of a defect."""
        self._failures.append(error)
        if self._serving is not None:
            self._serving.cancel()


def make_prompt(request: TracedRequest, number: int, seed: int) -> list[int]:
    """Returns the prompt of the request with this number in its trace."""
    return prompt_ids(request, VOCAB_SIZE, [seed] if request.block_hashes else [seed, number])
