"""Random schedules of steps, transfers and the host tier on the streams of a GPU that is played.

Every access to a block must be ordered against every write of it, and no transfer may wait for a
step without need. 10,000 schedules instead of 100, about a minute:

    pytest -n 0 --hypothesis-profile=thorough tests/workers/model/test_stream_order.py
"""

import random
from array import array
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, cast

import hypothesis
import pytest
import torch
from hypothesis import strategies as st

from tandem.tests.tiny import make_tiny_model
from tandem.tests.workers.model.helpers import Driver, load, prompt
from tandem.tests.workers.spans import as_table, span
from tandem.tests.workers.stream_model import (
    Operation,
    RecordingOrder,
    StreamModel,
    put_on_gpu,
)
from tandem.workers.engine.plan import SamplingParams, SequenceStep, StepPlan
from tandem.workers.host.streams import Ints
from tandem.workers.kv_cache.layout import KvLayout
from tandem.workers.kv_cache.store import Completed
from tandem.workers.kv_cache.tables import TableBlocks
from tandem.workers.model.kv.store import HostBlocks, PagedKv
from tandem.workers.model.runner import ModelRunner

NUM_BLOCKS: Final = 8
NUM_HOST_BLOCKS: Final = 3
BLOCK_SIZE: Final = 2
GREEDY: Final = SamplingParams(temperature=0.0)

Place = tuple[object, int]  # block and offset of a token
Action = tuple[str, int, int]  # what to do, and two numbers that choose of what


@dataclass(eq=False)
class Held:
    """A sequence, or an import while it is `arriving`."""

    number: int
    blocks: list[int]
    num_launched: int = 0  # tokens that launched steps compute
    num_ready: int = 0  # tokens that the host knows to be computed
    num_shared: int = 0  # tokens in blocks of other sequences as well
    arriving: int | None = None  # tokens that were written
    loads: list[tuple[int, int]] = field(default_factory=list)
    is_new: bool = True

    def places(self, first: int, end: int) -> list[Place]:
        return [(self.blocks[at // BLOCK_SIZE], at % BLOCK_SIZE) for at in range(first, end)]


class World:
    """An engine that launches ahead and the transfers beside it, all of one thread here."""

    def __init__(self, order: type[RecordingOrder] = RecordingOrder) -> None:
        self.model = StreamModel()
        layout = KvLayout.uniform(
            num_layers=1, num_heads=1, num_kv_heads=1, head_dim=2, dtype="float32", model="m"
        )
        self.kv = PagedKv(
            layout, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, device=torch.device("cpu")
        )
        put_on_gpu(self.kv, order(NUM_BLOCKS, self.model))
        self.kv._gpu._waiter = cast(
            Any, SimpleNamespace(wait=lambda event, result: Completed(result()))
        )
        self.host = HostBlocks(self.kv, NUM_HOST_BLOCKS)
        self.saved: list[int] = []  # host blocks that hold something
        self.held: list[Held] = []
        self.in_flight: list[tuple[Operation, list[tuple[Held, int]]]] = []
        self.tables: dict[int, array[int]] = {}
        self.num_made = 0

    # --- what the engine does

    @property
    def free(self) -> list[int]:
        owned = {block for each in self.held for block in each.blocks}
        return [block for block in range(NUM_BLOCKS) if block not in owned]

    def launch(
        self,
        running: list[Held],
        saved: tuple[tuple[int, int], ...] = (),
        copies: tuple[tuple[int, int], ...] = (),
    ) -> None:
        """Launches a step of a token of each of these sequences."""
        steps = []
        loaded: list[tuple[int, int]] = []
        for each in running:
            known = 0 if each.is_new else len(self.tables[each.number])
            table = self.tables[each.number] if known else array("i")
            table.extend(each.blocks[known:])
            self.tables[each.number] = table
            steps.append(
                SequenceStep(
                    sequence_id=each.number,
                    token_ids=(1,),
                    start=each.num_launched,
                    new_blocks=(TableBlocks(tuple(each.blocks[known:]), known),),
                    sampling=GREEDY if each.is_new else None,
                    num_samples=1,
                )
            )
            each.is_new = False
            loaded += each.loads
            each.loads = []
        plan = StepPlan(
            sequences=tuple(steps), dropped=(), saved=saved, loaded=tuple(loaded), copies=copies
        )
        runner = cast(
            ModelRunner,
            SimpleNamespace(kv=self.kv, _tables={n: (t,) for n, t in self.tables.items()}),
        )
        with ModelRunner._ordered(runner, plan):
            step = self.model.operations[-1]
            for pairs, name, copy in (
                (plan.saved, "reads", self.host.save),
                (plan.loaded, "writes", self.host.load),
            ):
                if pairs:
                    copy(pairs)
                    self.model.operations[-1].kind = "copy"
                    of_blocks = [pair[name == "writes"] for pair in pairs]
                    places = [(each, at) for each in of_blocks for at in range(BLOCK_SIZE)]
                    setattr(self.model.operations[-1], name, places)
        step.reads = [place for each in running for place in each.places(0, each.num_launched)]
        step.writes = [each.places(each.num_launched, each.num_launched + 1)[0] for each in running]
        for source, target in copies:
            step.reads += [(source, at) for at in range(BLOCK_SIZE)]
            step.writes += [(target, at) for at in range(BLOCK_SIZE)]
        for each in running:
            each.num_launched += 1
        self.in_flight.append((step, [(each, each.num_launched) for each in running]))

    def admit(self, first: int, second: int) -> None:
        """Admits a sequence that computes, or that arrives, maybe with the prefix of another."""
        if not self.free:
            return
        shared: list[int] = []
        if second % 3 == 0 and self.held:
            other = self.held[first % len(self.held)]
            shared = other.blocks[: other.num_ready // BLOCK_SIZE]
        new = self.free[: 1 + second % 2]
        made = Held(self.num_made, shared + new)
        made.num_launched = made.num_ready = made.num_shared = len(shared) * BLOCK_SIZE
        self.num_made += 1
        if first % 2:
            made.arriving = made.num_shared
        elif self.saved and second % 5 == 0 and len(new) == 2:
            made.loads = [(self.saved[0], new[0])]
            made.num_launched += BLOCK_SIZE  # the host knows of it after the first step
        self.held.append(made)

    def step(self, first: int, second: int) -> None:
        """Launches a step of some of the sequences that have room."""
        if len(self.in_flight) == 2:
            self.collect()
        able = [
            each
            for each in self.held
            if each.arriving is None and each.num_launched < len(each.blocks) * BLOCK_SIZE
        ]
        chosen = [each for at, each in enumerate(able) if first >> at & 1] or able[:1]
        full = [each for each in self.held if each.num_ready >= BLOCK_SIZE]
        if full and self.free and second % 4 == 0:
            source, target = full[0].blocks[0], self.free[0]
            copied = Held(self.num_made, [target], BLOCK_SIZE)
            self.num_made += 1
            self.held.append(copied)
            self.launch(chosen, copies=((source, target),))
            self.in_flight[-1][1].append((copied, BLOCK_SIZE))
        elif chosen:
            self.launch(chosen)

    def collect(self, first: int = 0, second: int = 0) -> None:
        """Waits for the oldest step in flight."""
        if self.in_flight:
            step, computed = self.in_flight.pop(0)
            self.model.synchronize(step)
            for each, count in computed:
                each.num_ready = max(each.num_ready, count)

    def drop(self, first: int, second: int) -> None:
        """Ends a sequence or an import at any time; saves a block of it first, sometimes."""
        if not self.held:
            return
        gone = self.held.pop(first % len(self.held))
        if second % 3 == 0 and gone.num_ready >= BLOCK_SIZE and gone.arriving is None:
            host_block = second % NUM_HOST_BLOCKS
            self.launch([], saved=((gone.blocks[0], host_block),))
            self.saved = [host_block, *(each for each in self.saved if each != host_block)]

    # --- transfers

    def read(self, first: int, second: int) -> None:
        """Reads some of the tokens that are known to be computed."""
        able = [each for each in self.held if each.arriving is None and each.num_ready]
        if able:
            each = able[first % len(able)]
            begin = second % each.num_ready
            end = min(each.num_ready, begin + 1 + first % 3)
            self.kv.read(as_table(tuple(each.blocks)), span(self.kv, begin, end - begin))
            self.model.operations[-1].reads = each.places(begin, end)

    def write(self, first: int, second: int) -> None:
        """Writes the next tokens of an import; the last commits it."""
        able = [each for each in self.held if each.arriving is not None]
        if able:
            each = able[first % len(able)]
            begin = cast(int, each.arriving)
            end = min(len(each.blocks) * BLOCK_SIZE - 1, begin + 1 + second % 2)
            if begin < end:
                part = span(self.kv, begin, end - begin)
                data = memoryview(bytes(part.size(self.kv.layout)))
                self.kv.write(as_table(tuple(each.blocks)), part, data)
                self.model.operations[-1].writes = each.places(begin, end)
            each.arriving = end
            if end == len(each.blocks) * BLOCK_SIZE - 1:
                each.arriving = None
                each.num_launched = each.num_ready = end

    def end(self, first: int, second: int) -> None:
        """Lets the device finish one of the last operations."""
        if self.model.operations:
            last = self.model.operations[-6:]
            self.model.end(last[first % len(last)])

    def run(self, actions: list[Action]) -> None:
        for name, first, second in actions:
            getattr(self, name)(first, second)
        self.model.check(lambda place: place[0])


ACTIONS: Final = ("admit", "step", "collect", "drop", "read", "write", "end")

CHOICES: Final = (*ACTIONS, "admit", "step", "read", "write")

schedules = st.lists(
    st.tuples(st.sampled_from(CHOICES), st.integers(0, 15), st.integers(0, 15)),
    min_size=10,
    max_size=60,
)


def run(actions: list[Action], order: type[RecordingOrder] = RecordingOrder) -> StreamModel:
    with pytest.MonkeyPatch.context() as patch:
        world = World(order)
        world.model.install(patch)
        world.run(actions)
        return world.model


@hypothesis.given(schedules)
def test_every_access_is_ordered_and_no_transfer_waits_without_need(actions: list[Action]) -> None:
    run(actions)


def with_rule(later: str, earlier: str, waits: bool) -> type[RecordingOrder]:
    """An order with a fault: work of the kind `later` never, or always, waits for `earlier`."""

    class Broken(RecordingOrder):
        def _awaited(self, stream: Any, touched: Ints, written: Ints, is_step: bool) -> list[Any]:
            right = super()._awaited(stream, touched, written, is_step)
            kind = "step" if is_step else "write" if len(written) else "read"
            if kind != later:
                return right
            others = [each for each in self._unfinished if each.stream != stream]
            of_kind = [
                each.done
                for each in others
                if earlier
                == ("step" if each.is_step else "write" if each.written.any() else "read")
            ]
            return of_kind + right if waits else [each for each in right if each not in of_kind]

    return Broken


def fault_of(order: type[RecordingOrder]) -> str:
    """Returns the first fault that one of many schedules shows, or nothing."""
    rng = random.Random(1)
    for _ in range(3_000):
        actions = [(rng.choice(CHOICES), rng.randrange(16), rng.randrange(16)) for _ in range(60)]
        try:
            run(actions, order)
        except AssertionError as error:
            return str(error)
    return ""


def test_schedules_of_the_controls_are_in_order_without_a_fault() -> None:
    rng = random.Random(1)
    counts: dict[str, int] = {}
    for _ in range(100):
        actions = [(rng.choice(CHOICES), rng.randrange(16), rng.randrange(16)) for _ in range(60)]
        for operation in run(actions).operations:
            counts[operation.kind] = counts.get(operation.kind, 0) + 1
    assert min(counts[kind] for kind in ("step", "read", "write")) > 300, counts


@pytest.mark.parametrize(
    ("later", "earlier"),
    [
        ("step", "read"),  # a withdrawn block is overwritten while it is read
        ("step", "write"),  # the step after the commit
        ("write", "step"),  # the last owner's step
        ("write", "read"),
        ("write", "write"),  # of a cancelled import
        ("read", "write"),
    ],
)
def test_a_missing_wait_is_found(later: str, earlier: str) -> None:
    fault = fault_of(with_rule(later, earlier, False))
    assert fault.startswith(f"a {later} is not ordered after a {earlier}")


@pytest.mark.parametrize("later", ["read", "write"])
def test_a_wait_without_need_is_found(later: str) -> None:
    fault = fault_of(with_rule(later, "step", True))
    assert fault.startswith(f"a {later} waits for a step without need")


def test_steps_of_a_runner_wait_for_transfers_of_their_blocks_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And transfers for steps of their blocks alone; the host tier's copies count as well."""
    runner = load(make_tiny_model(tmp_path, num_hidden_layers=1), num_host_blocks=4)
    model = StreamModel()
    model.install(monkeypatch)
    put_on_gpu(runner.kv, RecordingOrder(runner.kv.num_blocks, model))
    driver = Driver(runner)

    def launch(*steps: SequenceStep, **fields: Any) -> Operation:
        first = len(model.operations)
        runner.launch(StepPlan(sequences=steps, **({"dropped": ()} | fields)))
        return model.operations[first]

    def write(block: int) -> Operation:
        part = span(runner.kv, 0, 1)
        data = memoryview(bytes(part.size(runner.kv.layout)))
        runner.kv.write(as_table((block,)), part, data)
        return model.operations[-1]

    first = launch(driver.step(1, prompt(20), 0))
    one, two = driver.tables[1]
    free = driver.free[:8]
    assert write(one).follows(first)
    assert write(two).follows(first)
    assert not write(free[0]).follows(first)
    other = launch(driver.step(2, prompt(3), 0))
    third = driver.tables[2][0]
    into_third = write(third)
    assert into_third.follows(other)
    assert not launch(driver.step(1, [7], 20)).follows(into_third)
    assert launch(driver.step(2, [7], 3)).follows(into_third)
    copied = write(free[7])
    assert launch(copies=((free[6], free[7]),)).follows(copied)
    launch(saved=((free[1], 0),), loaded=((2, free[2]),))
    saving, loading = model.operations[-2:]
    assert write(free[1]).follows(saving)
    assert write(free[2]).follows(loading)
    assert not write(free[3]).follows(saving)
