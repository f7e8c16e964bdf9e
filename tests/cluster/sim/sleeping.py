"""Runs a real service, with threads and gRPC, whose steps only sleep as long as the costs say.

It has the shape of a SimulatedService, so that a simulation can be compared with it.
"""

import asyncio
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from typing import Any, Final

from tandem.cluster.config import PoolRole
from tandem.cluster.sim.cost import ServiceCosts, StepCosts, StepWork
from tandem.cluster.sim.result import SimulatedRequest
from tandem.cluster.sim.router import make_request, measure
from tandem.cluster.sim.service import SimulatedPool, SimulatedService
from tandem.cluster.sim.simulate import make_prompt
from tandem.cluster.sim.worker import VOCAB_SIZE
from tandem.cluster.traces.read import TracedRequest
from tandem.router.dispatch.dispatcher import Dispatcher
from tandem.router.scheduling.admission import Admission
from tandem.router.scheduling.registry import WorkerRegistry
from tandem.tests.peers import IDENTITY
from tandem.tests.worker_config import worker_config
from tandem.tests.workers.engine.null import NullExecutor
from tandem.workers.engine.plan import OnLayers, Samples, StepPlan
from tandem.workers.serve.worker import Worker
from tandem.workers.tp.rank import Rank

_LAG_SECONDS: Final = 0.005
_MAX_GAP: Final = 0.5  # of a step: after a longer pause the worker had no work


class SleepingExecutor(NullExecutor):
    """Sleeps as long as a step costs, and measures the time that the host adds."""

    def __init__(self, costs: StepCosts) -> None:
        super().__init__(vocab_size=VOCAB_SIZE)
        self.extra_seconds: list[float] = []  # from the due end of a step to the next launch
        self._costs = costs
        self._due = 0.0

    def launch(self, plan: StepPlan, on_layers: OnLayers | None = None) -> Callable[[], Samples]:
        collect = super().launch(plan)
        if not plan.sequences:
            return collect
        now = time.monotonic()
        seconds = self._costs.seconds(StepWork.of(plan))
        if now - self._due < _MAX_GAP * seconds:
            self.extra_seconds.append(now - self._due)
        self._due = due = now + seconds

        def finish() -> Samples:
            time.sleep(max(due - time.monotonic(), 0.0))
            return collect()

        return finish


@dataclass(frozen=True, kw_only=True)
class SleepingRun:
    """Holds what the clients of a sleeping service have measured, and what its host has added."""

    requests: Sequence[SimulatedRequest]
    extra_seconds: float  # of a step, the median
    transfer_seconds: float  # of a KV transfer, the median
    lag_share: float  # of the time: the event loop ran late, because the machine was busy

    def calibrate(self, costs: ServiceCosts) -> ServiceCosts:
        """Returns costs with the times of this host, which a busy machine prolongs."""
        prefill, decode = (
            replace(each, fixed=each.fixed + self.extra_seconds)
            for each in (costs.prefill, costs.decode)
        )
        return replace(
            costs, prefill=prefill, decode=decode, transfer_seconds=self.transfer_seconds
        )


async def run_sleeping(
    service: SimulatedService,
    requests: Sequence[TracedRequest],
    costs: ServiceCosts,
    tenants: Sequence[str],
) -> SleepingRun:
    """Serves the requests in real time."""
    executors: list[SleepingExecutor] = []
    async with AsyncExitStack() as scope:
        workers: list[Worker] = []
        for role, pool in service.pools.items():
            for number in range(pool.workers):
                step = costs.prefill if role == "prefill" else costs.decode
                executors.append(SleepingExecutor(step))
                worker = await _serve(executors[-1], service, pool, role, number)
                scope.push_async_callback(worker.stop)
                workers.append(worker)
        registry = WorkerRegistry(local_prefill_tokens=service.router.local_prefill_tokens)
        registry.update(worker.info() for worker in workers)
        admission = Admission(registry, max_queue_seconds=service.router.max_queue_seconds)
        dispatcher = Dispatcher(registry, admission, identity=IDENTITY)
        scope.push_async_callback(dispatcher.close)
        lag = _Lag()
        watching = asyncio.create_task(lag.watch())
        served = await _send(dispatcher, requests, tenants)
        watching.cancel()
    active = [each.timeline.kv_transfer_active_seconds for each in served]
    return SleepingRun(
        requests=served,
        extra_seconds=statistics.median(
            seconds for executor in executors for seconds in executor.extra_seconds
        ),
        transfer_seconds=statistics.median(active),
        lag_share=lag.late_seconds / lag.seconds,
    )


class _Lag:
    """Measures how late an event loop wakes its tasks."""

    late_seconds = 0.0
    seconds = 0.0

    async def watch(self) -> None:
        while True:
            began = time.monotonic()
            await asyncio.sleep(_LAG_SECONDS)
            taken = time.monotonic() - began
            self.seconds += taken
            self.late_seconds += max(taken - 2 * _LAG_SECONDS, 0.0)


async def _serve(
    executor: SleepingExecutor,
    service: SimulatedService,
    pool: SimulatedPool,
    role: PoolRole,
    number: int,
) -> Worker:
    rank = Rank(
        executor=executor,
        kv=executor.kv,
        num_blocks=pool.num_blocks,
        block_size=service.block_size,
        vocab_size=VOCAB_SIZE,
        context_tokens=service.context_tokens,
        eos_ids=frozenset(),
    )
    budgets: dict[str, Any] = vars(pool.budgets)
    config = worker_config(transports=(), **budgets)
    return await Worker.serve(rank, config, worker_id=f"{role}-{number}", role=role)


async def _send(
    dispatcher: Dispatcher, requests: Sequence[TracedRequest], tenants: Sequence[str]
) -> list[SimulatedRequest]:
    started = time.monotonic()

    async def send(number: int, request: TracedRequest) -> SimulatedRequest:
        due = started + request.time
        await asyncio.sleep(due - time.monotonic())
        prompt = make_prompt(request, number, 0)
        made = make_request(
            str(number), prompt, request.output_length, tenants[number], time.monotonic()
        )
        return await measure(dispatcher, made, time.monotonic)

    return list(await asyncio.gather(*(send(*each) for each in enumerate(requests))))
