"""Scales simulated pools by the real policy, as the controller of Ray Serve does."""

import asyncio
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from ..config import PoolRole
from ..scaling.config import ScalingConfig
from ..scaling.needs import Reports, Value
from ..scaling.policy import DECODE_POOL, PREFILL_POOL, ROUTER, ScalingPolicy
from ..scaling.reports import worker_report
from ..scaling.roles import REPORTS_PER_WINDOW
from .pools import SimulatedPools
from .router import SimulatedRouter
from .service import Resize, SimulatedService

_POLICY_SECONDS: Final = 1.0  # between two calls; Serve makes ten in that time
_DEPLOYMENTS: Final[dict[PoolRole, str]] = {"prefill": PREFILL_POOL, "decode": DECODE_POOL}


@dataclass(frozen=True, kw_only=True)
class _Policy:
    policy_kwargs: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class _Bounds:
    """Holds the bounds of a deployment, in the form of Serve's AutoscalingConfig."""

    policy: _Policy
    min_replicas: int
    max_replicas: int


@dataclass(kw_only=True)
class _Context:
    """Describes a deployment, in the form of Serve's AutoscalingContext."""

    deployment_name: str
    target_num_replicas: int
    current_time: float | None
    policy_state: dict[str, Any]
    config: _Bounds
    raw_metrics: Reports | None


@dataclass(eq=False)
class _Series:
    """Keeps the reports of one deployment for a time."""

    seconds: float
    values: dict[str, dict[str, deque[Value]]] = field(default_factory=dict)

    def add(self, now: float, replica: str, report: Mapping[str, float]) -> None:
        for figure, value in report.items():
            series = self.values.setdefault(figure, {}).setdefault(replica, deque())
            series.append(Value(now, value))
            while series[0].timestamp < now - self.seconds:
                series.popleft()

    def of(self, replicas: Sequence[str]) -> Reports:
        """Returns the values of the replicas that are alive."""
        return {
            figure: {each: tuple(found[each]) for each in replicas if each in found}
            for figure, found in self.values.items()
        }


class Autoscaler:
    """Sizes the pools of a simulation. Lives in its event loop."""

    def __init__(
        self,
        service: SimulatedService,
        pools: SimulatedPools,
        routers: Sequence[SimulatedRouter],
    ) -> None:
        self._service = service
        self._pools = pools
        self._routers = routers
        self._clock = asyncio.get_running_loop().time
        self._policy = ScalingPolicy()
        configs = [pool.scaling for pool in service.pools.values() if pool.scaling is not None]
        self._window = min((each.window_seconds for each in configs), default=0.0)
        self._default = configs[0] if configs else None
        self._states: dict[str, dict[str, Any]] = {}
        self._reports = {name: _Series(self._window) for name in (ROUTER, *_DEPLOYMENTS.values())}
        self._starting: dict[PoolRole, list[asyncio.Task[None]]] = {
            each: [] for each in service.pools
        }
        self._stopping: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Reports and decides, without end. Returns at once if no pool scales."""
        if self._default is None:
            return
        next_report = 0.0
        while True:
            await asyncio.sleep(_POLICY_SECONDS)
            if self._clock() >= next_report:
                next_report = self._clock() + self._window / REPORTS_PER_WINDOW
                self._report()
            self._decide(self._default)

    async def obey(self, resize: Resize) -> None:
        """Sets the size of a pool at the time of a `Resize`."""
        await asyncio.sleep(resize.time - self._clock())
        self.resize(resize.role, resize.workers)

    def resize(self, role: PoolRole, number: int) -> None:
        """Starts or stops workers until a pool has `number`, counting those that start."""
        change = number - self._number(role)
        starting = self._still_starting(role)
        running = self._pools.running(role)
        for _ in range(change):
            starting.append(asyncio.create_task(self._start(role)))
        for _ in range(-change):
            if starting:
                starting.pop().cancel()
            elif running:
                stopping = asyncio.create_task(self._pools.stop(running.pop()))
                self._stopping.add(stopping)
                stopping.add_done_callback(self._stopping.discard)

    async def _start(self, role: PoolRole) -> None:
        await self._pools.wait_for_start(role, self._service.pools[role].start_seconds)
        await self._pools.start(role)

    def _number(self, role: PoolRole) -> int:
        """Returns the workers of a pool, with those that start for the first time or again."""
        ready = len(self._pools.running(role))
        return ready + len(self._still_starting(role)) + self._pools.num_returning(role)

    def _still_starting(self, role: PoolRole) -> list[asyncio.Task[None]]:
        """Returns the starts that have not ended, and forgets the others."""
        self._starting[role] = [each for each in self._starting[role] if not each.done()]
        return self._starting[role]

    def _report(self) -> None:
        now = self._clock()
        for number, router in enumerate(self._routers):
            self._reports[ROUTER].add(now, str(number), router.report())
        for role in self._service.pools:
            for worker in self._pools.running(role):
                report = worker_report(worker.info())
                self._reports[_DEPLOYMENTS[role]].add(now, worker.spec.address, report)

    def _decide(self, default: ScalingConfig) -> None:
        routers = [str(number) for number in range(len(self._routers))]
        contexts = {ROUTER: self._context(ROUTER, 1, None, default, routers)}
        roles = {_DEPLOYMENTS[role]: role for role in self._service.pools}
        for name, role in roles.items():
            alive = [each.spec.address for each in self._pools.running(role)]
            scaling = self._service.pools[role].scaling
            contexts[name] = self._context(name, self._number(role), scaling, default, alive)
        numbers, states = self._policy(contexts)
        for name, number in numbers.items():
            self._states[name] = states[name]
            self.resize(roles[name], number)

    def _context(
        self,
        name: str,
        number: int,
        scaling: ScalingConfig | None,
        default: ScalingConfig,
        alive: Sequence[str],
    ) -> _Context:
        """Returns the state of a deployment; a pool of a fixed size has equal bounds."""
        least = most = number
        if scaling is not None:
            pools = {_DEPLOYMENTS[role]: pool for role, pool in self._service.pools.items()}
            least, most = pools[name].workers, scaling.max_replicas
        return _Context(
            deployment_name=name,
            target_num_replicas=number,
            current_time=self._clock(),
            policy_state=self._states.get(name, {}),
            config=_Bounds(
                policy=_Policy(policy_kwargs=(scaling or default).model_dump()),
                min_replicas=least,
                max_replicas=most,
            ),
            raw_metrics=self._reports[name].of(alive),
        )
