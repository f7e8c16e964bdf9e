"""Simulates two pools whose sizes the policy decides from the reports that Serve would pass to it.

Prefill workers compute one prompt after another. The steps of decode workers take longer with more
sequences. A request waits at the router while the pool that it needs next is full. Workers take
time to start; workers that stop give their work to others. Or the number of workers stays and
their roles change, as the directory decides it.
"""

import heapq
import itertools
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, Final

from tandem.cluster.scaling import reports
from tandem.cluster.scaling.config import RoleScaling, RoleScalingConfig, ScalingConfig
from tandem.cluster.scaling.needs import Sample
from tandem.cluster.scaling.policy import (
    DECODE_POOL,
    PREFILL_POOL,
    ROUTER,
    PoolContext,
    ScalingPolicy,
)
from tandem.cluster.scaling.roles import RoleScaler

TICK: Final = 0.05  # seconds
POLICY_SECONDS: Final = 1.0  # between two calls; Serve makes ten in that time
LOOK_AHEAD_SECONDS: Final = 0.5  # of prompts that a worker gets before it needs them


@dataclass(frozen=True, kw_only=True)
class Arrival:
    """A request of a trace."""

    time: float
    prompt: int
    output: int
    cached: int = 0  # of the prompt


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """The speed and capacity of one worker."""

    prefill_rate: float  # tokens a second
    step_fixed: float = 0.02  # seconds of a decode step
    step_each: float = 0.001  # for each sequence
    kv_tokens: int = 40_000
    max_sequences: int = 64
    start_seconds: float = 30.0
    switch_seconds: float = 1.0  # until a worker with another role does its work


@dataclass(kw_only=True)
class Outcome:
    """The finished requests and the sizes of the pools."""

    # Of each request, in the order in which they end.
    numbers: list[int] = field(default_factory=list)  # in the trace
    waits: list[float] = field(default_factory=list)  # from its arrival to its prompt's computation
    tpots: list[float] = field(default_factory=list)
    # By pool: the times of changes, with the new numbers of workers.
    targets: dict[str, list[tuple[float, int]]] = field(default_factory=dict)
    worker_seconds: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0

    def in_time(self, wait_seconds: float, tpot_seconds: float) -> set[int]:
        """Returns the requests that neither waited longer nor were decoded more slowly."""
        ended = zip(self.numbers, self.waits, self.tpots, strict=True)
        return {
            number for number, wait, tpot in ended if wait <= wait_seconds and tpot <= tpot_seconds
        }

    def reversals(self, pool: str, within: float) -> int:
        """Returns how often a pool changed its size back in less than `within` seconds."""
        pairs = itertools.pairwise(self.targets[pool])
        changes = [(time, number > before) for (_, before), (time, number) in pairs]
        return sum(
            grew != grows and time - last < within
            for (last, grew), (time, grows) in itertools.pairwise(changes)
        )


@dataclass(eq=False)
class Job:
    arrival: Arrival
    number: int
    wait: float = 0.0
    begun: float = 0.0  # its first token
    joined_at: float = 0.0
    joined: float = 0.0  # the pace of its decode worker at that time


class PrefillWorker:
    def __init__(self, name: str = "", free_at: float = 0.0) -> None:
        self.name = name
        self.free_at = free_at

    def lag(self, now: float) -> float:
        return max(self.free_at - now, 0.0)


class DecodeWorker:
    """Gives every sequence a token in each step.

    `pace` counts the tokens of each, `ends` is the count at which it has all.
    """

    def __init__(self, name: str = "") -> None:
        self.name = name
        self.pace = 0.0
        self.ends: list[tuple[float, int, Job]] = []
        self.kv_tokens = 0.0

    def add(self, number: int, job: Job, tokens: float) -> None:
        job.joined = self.pace
        self.kv_tokens += job.arrival.prompt
        heapq.heappush(self.ends, (self.pace + tokens, number, job))

    def advance(self, tokens: float) -> list[tuple[Job, float]]:
        """Returns the sequences that have ended, with their pace."""
        self.pace += tokens
        self.kv_tokens += tokens * len(self.ends)
        ended = []
        while self.ends and self.ends[0][0] <= self.pace:
            end, _, job = heapq.heappop(self.ends)
            self.kv_tokens -= job.arrival.prompt + self.pace - job.joined
            ended.append((job, end))
        return ended


class Simulation:
    """Runs a trace through pools; the policy decides their sizes, or an int as config fixes it."""

    def __init__(
        self,
        hardware: Hardware,
        prefill: ScalingConfig | int,
        decode: ScalingConfig | int,
        *,
        first: int | None = None,
        roles: RoleScalingConfig | None = None,
    ) -> None:
        """Starts the workers.

        `roles`: how the workers of two fixed pools change their roles.

        `first`: the number of workers of each pool when the trace begins; the others of a fixed
        pool start then. By default one worker of a pool that scales, and all of a fixed pool.
        """
        self._hardware = hardware
        self._sizes = {PREFILL_POOL: prefill, DECODE_POOL: decode}
        self._policy = ScalingPolicy()
        self._now = 0.0
        self._queue: deque[Job] = deque()
        self._computed: list[tuple[float, int, Job]] = []  # prompts, by when they are
        self._prefill: list[PrefillWorker] = []
        self._decode: list[DecodeWorker] = []
        # By pool: the times when starting workers are ready.
        self._starting: dict[str, list[float]] = {
            PREFILL_POOL: [],
            DECODE_POOL: [],
        }
        self._states: dict[str, dict[str, Any]] = {PREFILL_POOL: {}, DECODE_POOL: {}}
        self._samples: dict[str, dict[tuple[str, int], deque[SimpleNamespace]]] = {}
        self._number = 0
        self._tokens = 0.0
        self._last_report = float("-inf")
        self._names = itertools.count()
        self._roles: RoleScaler | None = None
        if roles is not None:
            assert isinstance(prefill, int)
            assert isinstance(decode, int)
            self._roles = RoleScaler(
                RoleScaling(config=roles, num_prefill=prefill, num_workers=prefill + decode)
            )
            self._window = roles.window_seconds
        self.outcome = Outcome()
        for pool, size in self._sizes.items():
            number = first or (size if isinstance(size, int) else 1)
            self.outcome.targets[pool] = [(0.0, size if isinstance(size, int) else number)]
            self.outcome.worker_seconds[pool] = 0.0
            self._workers(pool).extend(self._new(pool) for _ in range(number))

    def run(self, arrivals: Sequence[Arrival], extra_seconds: float = 0.0) -> Outcome:
        """Runs until every request has ended, and `extra_seconds` longer."""
        coming, next_policy, ends = deque(arrivals), 0.0, 0.0
        while coming or len(self.outcome.tpots) < len(arrivals) or self._now < ends:
            if len(self.outcome.tpots) < len(arrivals):
                ends = self._now + extra_seconds
            while coming and coming[0].time <= self._now:
                self._queue.append(Job(coming.popleft(), len(arrivals) - len(coming) - 1))
            self._admit()
            self._step()
            if self._now >= next_policy:
                next_policy += POLICY_SECONDS
                self._report()
                self._scale()
                self._change_roles()
            self._now += TICK
            self.outcome.seconds = self._now
            for pool in self._sizes:
                self.outcome.worker_seconds[pool] += TICK * (
                    len(self._workers(pool)) + len(self._starting[pool])
                )
        return self.outcome

    def _workers(self, pool: str) -> list[Any]:
        return self._prefill if pool == PREFILL_POOL else self._decode

    def _new(self, pool: str) -> Any:
        name = f"worker-{next(self._names)}"
        return PrefillWorker(name) if pool == PREFILL_POOL else DecodeWorker(name)

    def _lacks(self, job: Job) -> tuple[bool, bool]:
        """Returns two flags: a request waits for the prefill pool, and for the decode pool."""
        prefill = all(each.lag(self._now) >= LOOK_AHEAD_SECONDS for each in self._prefill)
        held = [len(each.ends) for each in self._decode]
        held_tokens = sum(each.kv_tokens for each in self._decode)
        coming = len(self._computed)
        coming_tokens = sum(each.arrival.prompt for _, _, each in self._computed)
        sequences = sum(held) + coming + 1 > self._hardware.max_sequences * len(self._decode)
        needed = held_tokens + coming_tokens + _kv_tokens(job)
        return prefill, sequences or (
            held_tokens > 0 and needed > self._hardware.kv_tokens * len(self._decode)
        )

    def _admit(self) -> None:
        while self._queue and not any(self._lacks(self._queue[0])):
            job = self._queue.popleft()
            worker = min(self._prefill, key=lambda each: each.free_at)
            uncached = max(job.arrival.prompt - job.arrival.cached, 1)
            begin = max(worker.free_at, self._now)
            job.wait = begin - job.arrival.time
            worker.free_at = job.begun = begin + uncached / self._hardware.prefill_rate
            self._tokens += uncached
            self._number += 1
            heapq.heappush(self._computed, (job.begun, self._number, job))

    def _step(self) -> None:
        while self._computed and self._computed[0][0] <= self._now:
            _, number, job = heapq.heappop(self._computed)
            job.joined_at = self._now
            self._place(number, job, job.arrival.output - 1)
        for worker in self._decode:
            seconds = self._step_seconds(worker)
            for job, end in worker.advance(TICK / seconds):
                ended = self._now + TICK - (worker.pace - end) * seconds
                self.outcome.numbers.append(job.number)
                self.outcome.waits.append(job.wait)
                self.outcome.tpots.append((ended - job.joined_at) / max(job.arrival.output - 1, 1))

    def _place(self, number: int, job: Job, tokens: float) -> None:
        min(self._decode, key=lambda each: len(each.ends)).add(number, job, tokens)

    def _step_seconds(self, worker: DecodeWorker) -> float:
        return self._hardware.step_fixed + self._hardware.step_each * len(worker.ends)

    def _report(self) -> None:
        windows = [
            size.window_seconds for size in self._sizes.values() if isinstance(size, ScalingConfig)
        ]
        if not windows or self._now - self._last_report < min(windows) / 5:
            return
        self._last_report = self._now
        self._sample(ROUTER, 0, min(windows), self._demand())
        for worker in self._decode:
            self._sample(DECODE_POOL, id(worker), min(windows), self._load(worker))

    def _demand(self) -> dict[str, float]:
        """Returns the report of the router."""
        waits = self._lacks(self._queue[0]) if self._queue else (False, False)
        waiting = [job.arrival for job in self._queue]
        return {
            reports.PREFILL_TOKENS: self._tokens,
            reports.PREFILL_SECONDS: self._tokens / self._hardware.prefill_rate,
            reports.WAITING_PREFILL_TOKENS: sum(each.prompt - each.cached for each in waiting)
            if waits[0]
            else 0,
            reports.WAITING_SEQUENCES: len(waiting) if waits[1] else 0,
            reports.WAITING_KV_TOKENS: sum(map(_kv_tokens, self._queue)) if waits[1] else 0,
        }

    def _load(self, worker: DecodeWorker) -> dict[str, float]:
        """Returns the report of a decode worker."""
        return {
            reports.DECODES: 1.0,
            reports.SEQUENCES: len(worker.ends),
            reports.MAX_SEQUENCES: self._hardware.max_sequences,
            reports.KV_TOKENS: worker.kv_tokens,
            reports.MAX_KV_TOKENS: self._hardware.kv_tokens,
            reports.STEP_SECONDS: self._step_seconds(worker) if worker.ends else 0.0,
        }

    def _change_roles(self) -> None:
        """Reports all members to the choice of roles, and gives workers the chosen ones."""
        if self._roles is None or self._now - self._last_report < self._window / 5:
            return
        self._last_report = self._now
        self._roles.report(self._now, "router", "", self._demand())
        for idle in list(self._prefill):
            if self._roles.report(self._now, idle.name, "prefill", {}) == "decode":
                self._prefill.remove(idle)  # its prompts are computed as planned
                self._decode.append(DecodeWorker(idle.name))
                self._note_roles()
        for busy in list(self._decode):
            figures = self._load(busy)
            if self._roles.report(self._now, busy.name, "decode", figures) == "prefill":
                self._stop_decode(busy)
                begins = self._now + self._hardware.switch_seconds
                self._prefill.append(PrefillWorker(busy.name, begins))
                self._note_roles()

    def _note_roles(self) -> None:
        for pool in self._sizes:
            self.outcome.targets[pool].append((self._now, len(self._workers(pool))))

    def _sample(
        self, deployment: str, replica: int, window: float, figures: Mapping[str, float]
    ) -> None:
        for figure, value in figures.items():
            series = self._samples.setdefault(deployment, {}).setdefault((figure, replica), deque())
            series.append(SimpleNamespace(timestamp=self._now, value=float(value)))
            while series[0].timestamp < self._now - window:
                series.popleft()

    def _scale(self) -> None:
        if any(isinstance(size, ScalingConfig) for size in self._sizes.values()):
            self._decide()
        for pool in self._sizes:
            self._resize(pool, self.outcome.targets[pool][-1][1])

    def _decide(self) -> None:
        contexts = {name: self._context(name) for name in (ROUTER, PREFILL_POOL, DECODE_POOL)}
        numbers, states = self._policy(contexts)
        for pool, number in numbers.items():
            self._states[pool] = states[pool]
            if number != self.outcome.targets[pool][-1][1]:
                self.outcome.targets[pool].append((self._now, number))

    def _context(self, name: str) -> PoolContext:
        metrics: dict[str, dict[Any, Sequence[Sample]]] = {}
        alive = {0, *map(id, self._decode)}
        for (figure, replica), series in self._samples.get(name, {}).items():
            if replica in alive:
                metrics.setdefault(figure, {})[replica] = list(series)
        size = self._sizes.get(name, 1)
        bounds = (size, size) if isinstance(size, int) else (1, size.max_replicas)
        found: Any = SimpleNamespace(
            deployment_name=name,
            target_num_replicas=self.outcome.targets[name][-1][1] if name in self._sizes else 1,
            current_time=self._now,
            policy_state=self._states.get(name, {}),
            config=SimpleNamespace(
                policy=self._carrier(size), min_replicas=bounds[0], max_replicas=bounds[1]
            ),
            raw_metrics=metrics,
        )
        return found  # type: ignore[no-any-return]

    def _carrier(self, size: ScalingConfig | int) -> SimpleNamespace:
        """Returns the policy of a deployment; a fixed pool carries the other pool's config."""
        config = next(
            each for each in (size, *self._sizes.values()) if isinstance(each, ScalingConfig)
        )
        return SimpleNamespace(policy_kwargs=config.model_dump())

    def _resize(self, pool: str, number: int) -> None:
        workers, starting = self._workers(pool), self._starting[pool]
        while starting and starting[0] <= self._now:
            workers.append(self._new(pool))
            starting.pop(0)
        while len(workers) + len(starting) < number:
            starting.append(self._now + self._hardware.start_seconds)
        while len(workers) + len(starting) > number:
            if starting:
                starting.pop()
            else:
                self._stop(workers)

    def _stop(self, workers: list[Any]) -> None:
        if workers is self._prefill:
            # The worker computes its prompts before it ends.
            worker = max(self._prefill, key=lambda each: each.free_at)
            self._prefill.remove(worker)
            return
        self._stop_decode(min(self._decode, key=lambda each: len(each.ends)))

    def _stop_decode(self, left: DecodeWorker) -> None:
        self._decode.remove(left)
        for end, number, job in left.ends:
            self._place(number, job, end - left.pace)


def _kv_tokens(job: Job) -> int:
    return job.arrival.prompt + min(job.arrival.output, 256)


def steady(
    per_second: float, seconds: float, prompt: int, output: int, start: float = 0.0
) -> Iterable[Arrival]:
    """Yields requests at equal distances."""
    for index in range(int(per_second * seconds)):
        yield Arrival(time=start + index / per_second, prompt=prompt, output=output)
