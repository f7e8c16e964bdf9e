"""Simulates a service: routers with real registries in front of workers that only count.

Prefill workers compute one prompt after another, decode workers run many sequences. Both have a
prefix cache that drops the least recently used blocks and reports stored and evicted blocks. Run as
a module, it prints a comparison of the ways to place requests.
"""

import heapq
import itertools
import math
import random
import statistics
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tandem.proto import worker_pb2
from tandem.proto.worker_pb2 import ROLE_DECODE, ROLE_PREFILL
from tandem.router.request import TokenRequest
from tandem.router.scheduling.policy import Placement
from tandem.router.scheduling.prefix_index import Prefix
from tandem.router.scheduling.registry import WorkerRegistry
from tandem.tests.router.pools import Clock, info, request

BLOCK_SIZE = 32
TOKEN_BYTES = 131_072  # of KV cache
STEP_SECONDS = 0.012
REPORT_SECONDS = 0.01  # how old a worker's report is when it comes


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Makes conversations that begin at random, each with one of a few system prompts."""

    conversations: int = 300
    turns: int = 6
    per_second: float = 12.0  # conversations that begin
    think_seconds: float = 3.0
    system_prompts: int = 8
    system_tokens: int = 600
    turn_tokens: tuple[int, int] = (40, 160)
    answer_tokens: tuple[int, int] = (40, 160)


@dataclass(frozen=True, kw_only=True)
class Pools:
    prefill: int = 8
    decode: int = 8
    num_blocks: int = 1_500
    max_sequences: int = 64
    prefill_fixed: float = 0.004
    token_seconds: float = 2e-4
    byte_seconds: float = 2e-10
    slow: dict[str, float] = field(
        default_factory=dict
    )  # workers, and how many times longer they take


@dataclass(frozen=True, kw_only=True)
class Figures:
    """Holds the results of a simulation; seconds are simulated."""

    num_requests: int
    hit_rate: float  # of prompt tokens
    mean_ttft: float
    p95_ttft: float
    transfer_rate: float  # prompt tokens that were transferred, of all
    shares: dict[str, float]  # of the requests, by worker
    locally: float  # the part of the requests that decode workers prefilled


class Cache:
    """Holds blocks in the order of their last use, and reports changes to registries."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._blocks: OrderedDict[bytes, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._blocks)

    def cached_tokens(self, chain: Sequence[bytes]) -> int:
        return BLOCK_SIZE * sum(1 for _ in itertools.takewhile(self._blocks.__contains__, chain))

    def use(self, chain: Sequence[bytes]) -> tuple[list[bytes], list[bytes]]:
        """Returns the hashes of the stored and of the evicted blocks."""
        stored = [digest for digest in chain if digest not in self._blocks]
        for digest in reversed(chain):
            self._blocks[digest] = None
            self._blocks.move_to_end(digest)
        evicted = [
            self._blocks.popitem(last=False)[0] for _ in range(len(self._blocks) - self._capacity)
        ]
        return stored, evicted


@dataclass(eq=False, kw_only=True)
class SimulatedRequest:
    request: TokenRequest
    prefix: Prefix
    placement: Placement
    registry: WorkerRegistry
    answer: tuple[int, ...]
    done: Callable[[], None]


class Session:
    """Reports one worker's load and changes of its prefix cache to one router."""

    def __init__(
        self, simulation: "Simulation", registry: WorkerRegistry, info: worker_pb2.WorkerInfo
    ) -> None:
        self.num_requests = 0  # of this router at the worker
        self._simulation = simulation
        self._registry = registry
        self._info = info
        self._load = worker_pb2.WorkerLoad()
        self._changes: dict[bytes, bool] = {}  # by block: True if it was stored
        self._next_idle_report = 0.0
        self._due = math.inf  # the time of the next report

    def report(
        self, load: worker_pb2.WorkerLoad, stored: Sequence[bytes], evicted: Sequence[bytes]
    ) -> None:
        """Reports soon, or after `idle_report_seconds` without requests of this router."""
        self._load = load
        self._changes |= dict.fromkeys(stored, True)
        self._changes |= dict.fromkeys(evicted, False)
        now = self._simulation.now
        due = now if self.num_requests else max(now, self._next_idle_report)
        if due < self._due:
            self._due = due
            self._simulation.after(due - now + REPORT_SECONDS, self._send)

    def _send(self) -> None:
        if self._due > self._simulation.now:  # an earlier report has taken all changes
            return
        self._due = math.inf
        self._next_idle_report = self._simulation.now + self._simulation.idle_report_seconds
        changes, self._changes = self._changes, {}
        message = worker_pb2.SessionResponse(
            load=self._load,
            stored_blocks=[digest for digest, is_stored in changes.items() if is_stored],
            evicted_blocks=[digest for digest, is_stored in changes.items() if not is_stored],
        )
        self._registry.report(self._info.worker_id, self._info.epoch, message)


class Worker:
    """Simulates a worker of either role.

    It computes prompts one by one, and runs sequences side by side.
    """

    def __init__(self, simulation: "Simulation", known: worker_pb2.WorkerInfo) -> None:
        self.info = known
        self.cache = Cache(simulation.pools.num_blocks)
        self._simulation = simulation
        self._pace = simulation.pools.slow.get(known.worker_id, 1.0)
        self._prompts: deque[tuple[SimulatedRequest, Callable[[SimulatedRequest], None]]] = deque()
        self._computing = False
        self._waiting: deque[SimulatedRequest] = deque()
        self._running = 0
        self._sessions = {
            registry: Session(simulation, registry, known) for registry in simulation.registries
        }

    def prefill(self, one: SimulatedRequest, then: Callable[[SimulatedRequest], None]) -> None:
        self._sessions[one.registry].num_requests += 1
        self._prompts.append((one, then))
        self._compute()
        self._report()

    def decode(self, one: SimulatedRequest) -> None:
        self._sessions[one.registry].num_requests += 1
        self._waiting.append(one)
        self._run()

    def _compute(self) -> None:
        if self._computing or not self._prompts:
            return
        self._computing = True
        one, then = self._prompts.popleft()
        pools, num_tokens = self._simulation.pools, len(one.request.submit.token_ids)
        cached = min(self.cache.cached_tokens(one.prefix.chain(BLOCK_SIZE)), num_tokens - 1)
        chunks = -(-(num_tokens - cached) // 32) if self._running else 0
        seconds = self._pace * (
            max(pools.prefill_fixed, chunks * STEP_SECONDS)
            + pools.token_seconds * (num_tokens - cached)
        )
        self._simulation.cached_tokens += cached

        def computed() -> None:
            self._computing = False
            self._report(one.prefix)
            self._sessions[one.registry].num_requests -= 1
            one.registry.prefilled(self.info.worker_id, one.request.request_id)
            one.registry.record_prefill(self.info.worker_id, num_tokens - cached, seconds)
            then(one)
            self._compute()

        self._simulation.after(seconds, computed)

    def _run(self) -> None:
        while self._waiting and self._running < self._simulation.pools.max_sequences:
            self._running += 1
            one = self._waiting.popleft()
            moving = 0.0
            if one.placement.prefill is not None:
                missing = len(one.request.submit.token_ids) - self.cache.cached_tokens(
                    one.prefix.chain(BLOCK_SIZE)
                )
                self._simulation.moved_tokens += missing
                moving = self._pace * (
                    1e-3 + missing * TOKEN_BYTES * self._simulation.pools.byte_seconds
                )
                one.registry.record_transfer(
                    one.placement.prefill, self.info.worker_id, missing * TOKEN_BYTES, moving
                )
            crowd = 1 + self._running / self._simulation.pools.max_sequences
            seconds = moving + self._pace * crowd * STEP_SECONDS * len(one.answer)
            self._simulation.after(seconds, lambda one=one: self._end(one))  # type: ignore[misc]

    def _end(self, one: SimulatedRequest) -> None:
        self._running -= 1
        self._report(Prefix((*one.request.submit.token_ids, *one.answer)))
        self._sessions[one.registry].num_requests -= 1
        for worker_id in (one.placement.prefill, one.placement.decode):
            if worker_id is not None:
                one.registry.ended(worker_id, one.request.request_id)
        one.done()
        self._run()

    def _report(self, used: Prefix | None = None) -> None:
        stored, evicted = self.cache.use(used.chain(BLOCK_SIZE) if used else [])
        waiting = [len(one.request.submit.token_ids) for one, _ in self._prompts]
        load = worker_pb2.WorkerLoad(
            num_waiting=len(waiting) + len(self._waiting),
            num_running=self._running,
            waiting_tokens=sum(waiting),
            free_blocks=self._simulation.pools.num_blocks - len(self.cache),
            cached_blocks=len(self.cache),
            total_blocks=self._simulation.pools.num_blocks,
            step_seconds=STEP_SECONDS,
        )
        for session in self._sessions.values():
            session.report(load, stored, evicted)


Place = Callable[[WorkerRegistry, TokenRequest], Placement | None]


class Simulation:
    """Runs one simulation; `place` chooses the workers, and each turn goes to a random router."""

    def __init__(
        self,
        place: Place,
        *,
        traffic: Traffic = Traffic(),
        pools: Pools = Pools(),
        routers: int = 1,
        idle_report_seconds: float = 0.0,
        local_prefill_tokens: int = 0,
        seed: int = 0,
    ) -> None:
        self.pools, self._traffic, self._place = pools, traffic, place
        self.idle_report_seconds = idle_report_seconds
        self._rng = random.Random(seed)
        self._clock = Clock()
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self.registries = [
            WorkerRegistry(
                local_prefill_tokens=local_prefill_tokens,
                rng=random.Random(seed + n),
                clock=self._clock,
            )
            for n in range(routers)
        ]
        names = [(f"p{n}", ROLE_PREFILL) for n in range(pools.prefill)]
        names += [(f"d{n}", ROLE_DECODE) for n in range(pools.decode)]
        infos = [
            info(
                name,
                role,
                block_size=BLOCK_SIZE,
                num_blocks=pools.num_blocks,
                max_sequences=pools.max_sequences,
            )
            for name, role in names
        ]
        for known in infos:
            known.kv_bytes_per_token = TOKEN_BYTES
        self._workers = {known.worker_id: Worker(self, known) for known in infos}
        for registry in self.registries:
            registry.update(infos)
        self._ttfts: list[float] = []
        self._used: dict[str, int] = dict.fromkeys(self._workers, 0)
        self._num_local = 0
        self.cached_tokens = self.moved_tokens = self._prompt_tokens = 0

    @property
    def now(self) -> float:
        return self._clock.now

    def after(self, seconds: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self._clock.now + seconds, next(self._order), event))

    def run(self) -> Figures:
        """Simulates the conversations of the traffic."""
        systems = [
            self._tokens(self._traffic.system_tokens) for _ in range(self._traffic.system_prompts)
        ]
        begin = 0.0
        for _ in range(self._traffic.conversations):
            begin += self._rng.expovariate(self._traffic.per_second)
            history = self._rng.choice(systems)
            self.after(begin, lambda history=history: self._turn(history, self._traffic.turns))  # type: ignore[misc]
        return self.finish()

    def finish(self) -> Figures:
        """Simulates until nothing happens any more."""
        while self._events:
            self._clock.now, _, event = heapq.heappop(self._events)
            event()
        count = len(self._ttfts)
        return Figures(
            num_requests=count,
            hit_rate=self.cached_tokens / self._prompt_tokens,
            mean_ttft=statistics.fmean(self._ttfts),
            p95_ttft=statistics.quantiles(self._ttfts, n=20)[-1],
            transfer_rate=self.moved_tokens / self._prompt_tokens,
            shares={name: used / count for name, used in self._used.items()},
            locally=self._num_local / count,
        )

    def _tokens(self, count: int) -> tuple[int, ...]:
        return tuple(self._rng.choices(range(50_000), k=count))

    def _turn(self, history: tuple[int, ...], turns: int) -> None:
        prompt = history + self._tokens(self._rng.randint(*self._traffic.turn_tokens))
        answer = self._tokens(self._rng.randint(*self._traffic.answer_tokens))

        def done() -> None:
            if turns > 1:
                think = self._rng.expovariate(1 / self._traffic.think_seconds)
                self.after(think, lambda: self._turn(prompt + answer, turns - 1))

        self.ask(prompt, answer, done)

    def ask(
        self, prompt: tuple[int, ...], answer: tuple[int, ...], done: Callable[[], None]
    ) -> None:
        """Sends a request to a random router; calls `done` when it has ended."""
        asked = request(prompt, str(next(self._order)), max_tokens=len(answer))
        registry = self._rng.choice(self.registries)
        placement = self._place(registry, asked)
        assert placement is not None
        arrived = self._clock.now

        def first_token(one: SimulatedRequest) -> None:
            self._ttfts.append(self._clock.now - arrived)
            self._workers[placement.decode].decode(one)

        for worker_id in (placement.prefill, placement.decode):
            if worker_id is not None:
                computes = worker_id == (placement.prefill or placement.decode)
                registry.dispatched(worker_id, asked, len(prompt) if computes else 0)
                self._used[worker_id] += 1
        self._num_local += placement.prefill is None
        self._prompt_tokens += len(prompt)
        one = SimulatedRequest(
            request=asked,
            prefix=Prefix(prompt),
            placement=placement,
            registry=registry,
            answer=answer,
            done=done,
        )
        self._workers[placement.prefill or placement.decode].prefill(one, first_token)


def by_cost(registry: WorkerRegistry, asked: TokenRequest) -> Placement | None:
    """Places a request as the router does."""
    return registry.place(asked)


def at_random(seed: int = 1) -> Place:
    rng = random.Random(seed)

    def place(registry: WorkerRegistry, asked: TokenRequest) -> Placement:
        prefill = [w.worker_id for w in registry.workers() if w.role == ROLE_PREFILL]
        decode = [w.worker_id for w in registry.workers() if w.role == ROLE_DECODE]
        return Placement(prefill=rng.choice(prefill), decode=rng.choice(decode))

    return place


def in_turns() -> Place:
    turn = itertools.count()

    def place(registry: WorkerRegistry, asked: TokenRequest) -> Placement:
        prefill = [w.worker_id for w in registry.workers() if w.role == ROLE_PREFILL]
        decode = [w.worker_id for w in registry.workers() if w.role == ROLE_DECODE]
        number = next(turn)
        return Placement(
            prefill=prefill[number % len(prefill)], decode=decode[number % len(decode)]
        )

    return place


def main() -> None:
    """Prints the table."""
    runs = {
        "by cost": Simulation(by_cost),
        "by cost, 2 routers": Simulation(by_cost, routers=2),
        "by cost, local up to 128": Simulation(by_cost, local_prefill_tokens=128),
        "at random": Simulation(at_random()),
        "in turns": Simulation(in_turns()),
    }
    print(
        f"{'':24} {'requests':>8} {'hits':>7} {'mean TTFT':>10} {'p95 TTFT':>10} {'moved':>7} "
        f"{'local':>7}"
    )
    for name, simulation in runs.items():
        got = simulation.run()
        print(
            f"{name:24} {got.num_requests:8} {got.hit_rate:7.1%} {1e3 * got.mean_ttft:7.0f} ms "
            f"{1e3 * got.p95_ttft:7.0f} ms {got.transfer_rate:7.1%} {got.locally:7.1%}"
        )


if __name__ == "__main__":
    main()
