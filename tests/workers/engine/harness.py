"""A prefill and a decode engine on fake executors, a minimal router over both, and the checks that never rest."""

import functools
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tandem.tests.workers.spans import span
from tandem.workers.engine.block_pool import BlockState
from tandem.workers.engine.config import EngineConfig
from tandem.workers.engine.engine import Engine
from tandem.workers.engine.events import Admitted, Event, Joined, Preempted, Progress, Token
from tandem.workers.engine.fake import FakeExecutor, FakeKv, _extend, expected_tokens
from tandem.workers.engine.plan import KvSpan, OnLayers, SamplingParams, StepPlan
from tandem.workers.engine.sequence import SequenceSpec, State, Task

VOCAB_SIZE = 16


class RecordingExecutor(FakeExecutor):
    """Keeps the plans. The fastest of devices: a step has ended when it is launched."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        super().__init__(num_blocks, block_size, vocab_size=VOCAB_SIZE)
        self.plans: list[StepPlan] = []

    def launch(self, plan: StepPlan, on_layers: OnLayers | None = None) -> Callable[[], list[int]]:
        self.plans.append(plan)
        return super().launch(plan, on_layers)


class LateExecutor(RecordingExecutor):
    """The slowest of devices: a step begins when somebody waits for its tokens. Writes of KV cache from outside come
    after the steps launched before them, and reads do not wait for anything."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        super().__init__(num_blocks, block_size)
        self.kv = OrderedKv(num_blocks, block_size, self)
        self._queue: deque[Callable[[], None]] = deque()

    def launch(self, plan: StepPlan, on_layers: OnLayers | None = None) -> Callable[[], list[int]]:
        done: list[Callable[[], list[int]]] = []
        self.plans.append(plan)
        self._queue.append(lambda: done.append(FakeExecutor.launch(self, plan)))

        def collect() -> list[int]:
            while not done:
                self._queue.popleft()()
            return done[0]()

        return collect

    def catch_up(self) -> None:
        while self._queue:
            self._queue.popleft()()


class OrderedKv(FakeKv):
    """The memory of a LateExecutor."""

    def __init__(self, num_blocks: int, block_size: int, executor: LateExecutor) -> None:
        super().__init__(num_blocks, block_size, executor.kv.layout)
        self._executor = executor

    def write(self, blocks: Sequence[int], span: KvSpan, data: memoryview) -> None:
        self._executor.catch_up()
        super().write(blocks, span, data)


class Worker:
    """An engine that checks itself after every step."""

    def __init__(self, config: EngineConfig, *, late: bool = False) -> None:
        self.config = config
        self.executor = (LateExecutor if late else RecordingExecutor)(config.num_blocks, config.block_size)
        self.engine = Engine(self.executor, config)
        self.specs: dict[int, SequenceSpec] = {}

    def submit(self, spec: SequenceSpec) -> None:
        self.engine.submit(spec)
        self.specs[spec.id] = spec

    def step(self) -> list[Event]:
        num_plans = len(self.executor.plans)
        early: list[Event] = []

        def take(events: list[Event]) -> None:
            early.extend(events)
            for event in events:
                if isinstance(event, Admitted):
                    self._check_cached(event)

        events = self.engine.step(take)
        events = early + events
        for plan in self.executor.plans[num_plans:]:
            decodes = sum(step.start > 0 and step.num_samples and len(step.token_ids) == 1 for step in plan.sequences)
            assert plan.num_tokens - decodes <= max(self.config.chunk_tokens, self.config.mixed_chunk_tokens)
            assert len(plan.sequences) <= self.config.max_sequences
            assert len({step.sequence_id for step in plan.sequences}) == len(plan.sequences)
        self.check()
        return events

    @property
    def in_flight(self) -> set[int]:
        """The ids of the sequences whose step is launched and not collected."""
        launched = self.engine._in_flight
        return {step.sequence_id for step in launched[0].sequences} if launched else set()

    def check(self) -> None:
        self.engine.check_integrity()
        assert sum(self.engine.blocks().values()) == self.config.num_blocks
        assert self.engine.scheduler.num_holding <= self.config.max_sequences
        salt_of: dict[int, bytes] = {}
        for sequence in self.engine.scheduler._sequences.values():
            assert sequence.state is not State.FINISHED
            assert sequence.num_computed <= sequence.num_scheduled <= min(sequence.num_tokens, sequence.spec.max_length)
            assert self.config.overlap or sequence.num_computed == sequence.num_scheduled
            assert sequence.num_published * self.config.block_size <= sequence.num_computed
            assert len(sequence.blocks) + len(sequence.reserved) <= sequence.max_blocks
            for block in sequence.blocks + sequence.reserved:
                assert salt_of.setdefault(block, sequence.spec.salt) == sequence.spec.salt, "tenants share a block"

    def check_idle(self) -> None:
        """Nothing is held, and every block is free or cached."""
        self.check()
        blocks = self.engine.blocks()
        assert blocks[BlockState.FREE] + blocks[BlockState.CACHED] == self.config.num_blocks, blocks
        scheduler = self.engine.scheduler
        assert (scheduler.num_waiting, scheduler.num_holding, scheduler.num_leased) == (0, 0, 0)

    def _check_cached(self, event: Admitted) -> None:
        """What the prefix cache gave was computed for, or generated after, the same tokens of the same tenant, and can
        be read when it is told."""
        spec = self.specs[event.id]
        prefix = spec.tokens[: event.num_cached]
        found = self.executor.kv.history(event.blocks, event.num_cached)
        assert found == functools.reduce(_extend, prefix, b""), "KV of another prefix"
        assert event.num_cached % self.config.block_size == 0
        assert len(event.blocks) == -(-len(spec.tokens) // self.config.block_size)
        earlier = [s for s in self.specs.values() if s.salt == spec.salt and s.id < spec.id]
        assert not prefix or any(_history(s)[: len(prefix)] == prefix for s in earlier)


def _history(spec: SequenceSpec) -> tuple[int, ...]:
    return spec.tokens + tuple(expected_tokens(spec.tokens, spec.max_tokens, VOCAB_SIZE))


@dataclass(eq=False)
class Request:
    """What a client asked for and what it has got."""

    prompt: tuple[int, ...]
    max_tokens: int
    split: bool = False  # prefill and decode apart; else whole on the decode worker
    stop_ids: frozenset[int] = frozenset()
    salt: bytes = b""
    tokens: list[int] = field(default_factory=list)
    num_ends: int = 0
    num_attempts: int = 0
    prefill_id: int | None = None
    decode_id: int | None = None
    source: Admitted | None = None
    target: Admitted | None = None
    num_readable: int = 0  # tokens whose KV cache the prefill worker has
    num_pulled: int | None = None
    first_token: int | None = None

    @property
    def expected(self) -> list[int]:
        tokens = expected_tokens(self.prompt, self.max_tokens, VOCAB_SIZE)
        stops = [i for i, token in enumerate(tokens) if token in self.stop_ids]
        return tokens[: stops[0] + 1] if stops else tokens


class Pair:
    """Leads requests through a prefill and a decode worker as a router would."""

    def __init__(self, prefill: EngineConfig, decode: EngineConfig, *, late: bool = False) -> None:
        self.prefill, self.decode = Worker(prefill, late=late), Worker(decode, late=late)
        self.active: list[Request] = []
        self._next_id = 0

    def submit(self, request: Request) -> None:
        """Starts a request, or starts it again after a loss with the tokens it has."""
        if request not in self.active:
            self.active.append(request)
        request.num_attempts += 1
        request.source = request.target = request.num_pulled = request.first_token = None
        request.prefill_id = request.decode_id = None
        if request.split:
            request.prefill_id = self._send(self.prefill, request, Task.PREFILL)
        else:
            request.decode_id = self._send(self.decode, request, Task.WHOLE)

    def cancel(self, request: Request) -> None:
        self._drop(request)
        self._end(request)

    def states(self, request: Request) -> list[State]:
        """Where the request stands on the workers that know it."""
        known = [(self.prefill, request.prefill_id), (self.decode, request.decode_id)]
        found = [worker.engine.scheduler._sequences.get(i) for worker, i in known if i is not None]
        return [sequence.state for sequence in found if sequence is not None]

    def lose_lease(self, request: Request) -> None:
        """The prefill worker's lease runs out: the import fails and the request starts again."""
        self._drop(request)
        self.submit(request)

    def step(self, worker: Worker) -> list[Event]:
        events = worker.step()
        for event in events:
            self._handle(worker, event)
        return events

    def pull(self, request: Request, max_tokens: int = 1 << 30) -> None:
        """Copies what KV cache there is, layer by layer; commits when it is whole."""
        if request.target is None or request.source is None or request.num_pulled is None:
            return
        start = request.num_pulled
        count = min(request.num_readable - start, max_tokens)
        source, target = self.prefill.executor.kv, self.decode.executor.kv
        if count > 0:
            for layer in range(source.layout.num_layers):
                part = span(source, start, count, layer, 1)
                target.write(request.target.blocks, part, source.read(request.source.blocks, part))
            request.num_pulled += count
        if request.first_token is not None and request.num_pulled == request.num_readable:
            assert request.decode_id is not None
            assert request.prefill_id is not None
            self.decode.engine.commit_import(request.decode_id, request.first_token)
            self.prefill.engine.cancel(request.prefill_id)
            request.num_pulled = request.prefill_id = None

    def drain(self, max_steps: int = 3000) -> None:
        """Runs everything to its end, in bounded steps, and finds nothing left behind."""
        for _ in range(max_steps):
            if not self.active:
                break
            for worker in (self.prefill, self.decode):
                if worker.engine.has_work:
                    self.step(worker)
            for request in list(self.active):
                self.pull(request)
        assert not self.active, "somebody starves"
        for worker in (self.prefill, self.decode):
            worker.check_idle()

    def _send(self, worker: Worker, request: Request, task: Task) -> int:
        self._next_id += 1
        spec = SequenceSpec(
            id=self._next_id,
            task=task,
            tokens=request.prompt + tuple(request.tokens),
            first_index=len(request.tokens),
            max_tokens=request.max_tokens - len(request.tokens),
            sampling=SamplingParams(),
            stop_ids=request.stop_ids,
            salt=request.salt,
        )
        worker.submit(spec)
        return spec.id

    def _handle(self, worker: Worker, event: Event) -> None:
        ids = "prefill_id" if worker is self.prefill else "decode_id"
        owners = [r for r in self.active if getattr(r, ids) == event.id]
        assert len(owners) == 1, f"{event} is of no request that lives"
        request = owners[0]
        match event:
            case Admitted() if worker is self.prefill:
                request.source = event
                request.num_readable = event.num_cached
                request.decode_id = self._send(self.decode, request, Task.DECODE)
            case Admitted():
                request.target = event
                request.num_pulled = event.num_cached if request.split else None
            case Progress():
                assert request.num_readable <= event.num_computed <= len(request.prompt) + len(request.tokens)
                request.num_readable = event.num_computed
            case Joined():
                assert worker is self.decode
            case Token():
                self._take(worker, request, event)
            case Preempted():
                self._drop(request)
                self.submit(request)

    def _take(self, worker: Worker, request: Request, event: Token) -> None:
        assert event.index == len(request.tokens), "an index is missing or repeated"
        assert event.token == request.expected[event.index], f"token {event.index} of {request}"
        request.tokens.append(event.token)
        assert (event.finish is not None) == (len(request.tokens) == len(request.expected))
        if worker is self.prefill:
            request.first_token = event.token
        if event.finish is not None:
            if worker is self.prefill and request.decode_id is not None:
                self.decode.engine.cancel(request.decode_id)
            self._end(request)

    def _drop(self, request: Request) -> None:
        for worker, sequence_id in ((self.prefill, request.prefill_id), (self.decode, request.decode_id)):
            if sequence_id is not None:
                worker.engine.cancel(sequence_id)
                worker.check()

    def _end(self, request: Request) -> None:
        request.num_ends += 1
        self.active.remove(request)
        assert request.num_ends == 1
