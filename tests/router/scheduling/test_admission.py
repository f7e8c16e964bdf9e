"""Admission over a view: who goes to the workers, who is refused, and that nobody waits in vain."""

import asyncio
import itertools
import random
import time
from collections import Counter, deque
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.proto import worker_pb2
from tandem.proto.errors import InvalidArgument, Overloaded
from tandem.router.request import TokenRequest
from tandem.router.scheduling.admission import Admission
from tandem.router.scheduling.registry import WorkerRegistry
from tandem.tests.router.pools import Clock, fill, request


class Desk:
    """Admission over one prefill and one decode worker, and requests that hold slots as the dispatcher does."""

    def __init__(self, *, max_sequences: int = 2, clock: Callable[[], float] = time.monotonic, **bounds: float) -> None:
        self.view = WorkerRegistry(rng=random.Random(0), clock=clock)
        fill(self.view, prefill=1, decode=1, max_sequences=max_sequences, num_blocks=256)
        self.admission = Admission(self.view, clock=clock, **bounds)  # type: ignore[arg-type]
        self.active: list[TokenRequest] = []
        self.order: list[str] = []
        self._ends: dict[str, asyncio.Event] = {}
        self.tasks: dict[str, asyncio.Task[None]] = {}

    async def ask(self, asked: TokenRequest) -> "asyncio.Task[None]":
        """Lets the request go as far as it can."""
        self._ends[asked.request_id] = asyncio.Event()
        task = self.tasks[asked.request_id] = asyncio.create_task(self._hold(asked))
        await settle()
        return task

    async def finish(self, name: str) -> None:
        self._ends[name].set()
        await settle()

    async def cancel(self, name: str) -> None:
        self.tasks[name].cancel()
        await settle()

    async def _hold(self, asked: TokenRequest) -> None:
        async with self.admission.slot(asked):
            placement = self.view.place(asked)
            assert placement is not None
            assert placement.prefill is not None
            self.view.sent(placement.prefill, asked, len(asked.prompt))
            self.view.sent(placement.decode, asked, 0)
            self.active.append(asked)
            self.order.append(asked.request_id)
            self.view.computed(placement.prefill, asked.request_id)
            try:
                await self._ends[asked.request_id].wait()
            finally:
                self.active.remove(asked)
                self.view.ended(placement.prefill, asked.request_id)
                self.view.ended(placement.decode, asked.request_id)


async def settle() -> None:
    """Everything that can go on has gone on."""
    for _ in range(6):
        await asyncio.sleep(0)


async def test_as_many_run_as_there_is_room_for_and_the_rest_follows_in_order() -> None:
    desk = Desk(max_sequences=2)
    for n in range(5):
        await desk.ask(request([n] * 10, str(n)))
    assert (desk.order, desk.admission.num_active, desk.admission.num_waiting) == (["0", "1"], 2, 3)
    assert desk.admission.waiting_tokens == 3 * 18
    await desk.finish("1")
    assert desk.order == ["0", "1", "2"]
    await desk.cancel("3")
    await desk.finish("0")
    assert desk.order == ["0", "1", "2", "4"]
    await desk.cancel("2")
    await desk.finish("4")
    assert desk.admission.num_active == desk.admission.num_waiting == 0


async def test_choices_take_a_sequence_each() -> None:
    desk = Desk(max_sequences=4)
    await desk.ask(request([1], "three", num_choices=3))
    await desk.ask(request([1], "two", num_choices=2))
    await desk.ask(request([1], "one"))
    assert desk.order == ["three"]  # nobody overtakes the one who needs more
    await desk.finish("three")
    assert desk.order == ["three", "two", "one"]
    await desk.finish("one")
    await desk.finish("two")


async def test_blocks_are_room_too() -> None:
    desk = Desk(max_sequences=64)  # and 4096 tokens of KV cache
    for n in range(4):
        await desk.ask(request([n] * 1000, str(n), max_tokens=100))
    assert desk.order == ["0", "1", "2"]
    await desk.finish("1")
    assert desk.order == ["0", "1", "2", "3"]
    for name in "023":
        await desk.finish(name)


async def test_what_no_worker_could_run_does_not_wait() -> None:
    desk = Desk(max_sequences=2)
    await desk.ask(request([1] * 9, "runs"))
    task = await desk.ask(request([1] * 9, "evil", num_choices=3))
    with pytest.raises(InvalidArgument, match="n: 3 sequences; a worker runs at most 2"):
        await task
    await desk.ask(request([1] * 9, "good"))
    assert desk.order == ["runs", "good"]
    for name in desk.order[:]:
        await desk.finish(name)


async def test_a_request_larger_than_all_kv_cache_begins_when_a_worker_is_empty() -> None:
    """What it is expected to generate is a guess: the worker says whether it fits."""
    desk = Desk(max_sequences=32)  # 4096 tokens
    await desk.ask(request([1] * 9, "runs"))
    await desk.ask(request([1] * 9, "large", num_choices=32, max_tokens=500))
    assert desk.order == ["runs"]
    await desk.finish("runs")
    assert desk.order == ["runs", "large"]
    await desk.finish("large")


async def test_prompts_wait_here_while_the_prefill_worker_has_enough_to_do() -> None:
    view = WorkerRegistry(rng=random.Random(0))
    fill(view, prefill=1, decode=1, num_blocks=4096)
    admission = Admission(view)
    got: list[int] = []

    async def ask(number: int) -> None:
        asked = request([number] * 1000, str(number))
        async with admission.slot(asked):
            view.place(asked)
            view.sent("p0", asked, 1000)
            view.sent("d0", asked, 0)
            got.append(number)
            await asyncio.Event().wait()

    tasks = [asyncio.create_task(ask(n)) for n in range(6)]
    await settle()
    assert got == [0, 1, 2]  # 2500 tokens, half a second's work at the neutral rate, and the one that reaches it
    view.computed("p0", "0")
    await settle()
    assert got == [0, 1, 2, 3]
    view.measured("p0", prefill_tokens=1000, prefill_seconds=0.02)  # it is faster than that
    view.update(view.workers())
    await settle()
    assert got == [0, 1, 2, 3, 4, 5]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert admission.num_active == 0


async def test_others_requests_count_and_their_end_wakes() -> None:
    desk = Desk(max_sequences=4)
    await desk.ask(request([1], "first"))
    desk.view.report_load("d0", load(num_running=4))
    await desk.ask(request([1], "second"))
    assert desk.order == ["first"]
    desk.view.report_load("d0", load(num_running=2))
    await settle()
    assert desk.order == ["first", "second"]
    desk.view.report_load("d0", load(num_running=4))
    await desk.finish("first")
    await desk.finish("second")
    await desk.ask(request([1], "third"))  # nobody waits for others alone
    assert desk.order[-1] == "third"
    await desk.finish("third")


async def test_without_a_decode_worker_nobody_waits() -> None:
    desk = Desk(max_sequences=1)
    await desk.ask(request([1], "0"))
    waiting = await desk.ask(request([1], "1"))
    desk.view.update([])
    await settle()
    assert isinstance(waiting.exception(), AssertionError)  # it was let through, to find that there is no place
    await desk.finish("0")


async def test_a_full_queue_refuses_at_once_and_early() -> None:
    desk = Desk(max_sequences=1, max_queued_requests=2)
    desk.admission.check_early(10, "")
    for n in range(3):
        await desk.ask(request([n] * 10, str(n)))
    with pytest.raises(Overloaded, match="the queue is full") as caught:
        await (await desk.ask(request([9] * 10, "late")))
    assert caught.value.retry_after >= 1
    with pytest.raises(Overloaded, match="the queue is full"):
        desk.admission.check_early(10, "")
    desk.admission.check_early(10, "another")  # would get the place of one of those
    desk.admission.check_early(10, "", priority=1)
    await desk.ask(request([7] * 10, "other", tenant="another"))
    assert isinstance(desk.tasks["2"].exception(), Overloaded)
    assert desk.admission.num_waiting == 2
    for name in ("1", "other"):
        await desk.cancel(name)
    await desk.finish("0")


async def test_who_cannot_be_served_in_time_hears_it_at_once() -> None:
    clock = Clock()
    desk = Desk(max_sequences=1, clock=clock, max_queue_seconds=20.0)
    names = [str(n) for n in range(30)]
    for name in names:
        await desk.ask(request([1] * 92, name))  # 100 tokens of work
    for name in names[:10]:
        clock.now += 0.5
        await desk.finish(name)
    assert desk.admission.num_waiting == 19  # about 9.5 seconds
    with pytest.raises(Overloaded, match=r"about 9\.5 seconds long") as caught:
        await (await desk.ask(request([1] * 92, "hasty", deadline=clock.now + 9)))
    assert caught.value.retry_after == pytest.approx(9.5, rel=0.02)
    with pytest.raises(Overloaded):
        desk.admission.check_early(100, "", deadline=clock.now + 9)
    patient = await desk.ask(request([1] * 92, "patient", deadline=clock.now + 11))
    assert not patient.done()
    for n in range(40):
        await desk.ask(request([1] * 92, f"more {n}"))
    assert 38 <= desk.admission.num_waiting <= 41  # twenty seconds of work
    for task in desk.tasks.values():
        task.cancel()
    await asyncio.gather(*desk.tasks.values(), return_exceptions=True)
    assert desk.admission.num_active == desk.admission.num_waiting == 0


async def test_who_has_waited_too_long_is_refused_then_and_makes_way() -> None:
    desk = Desk(max_sequences=2)
    await desk.ask(request([1], "0"))
    late = await desk.ask(request([1], "late", num_choices=2, deadline=time.monotonic() + 0.05))
    after = await desk.ask(request([1], "after"))
    with pytest.raises(Overloaded, match="waited too long"):
        await late
    await settle()
    assert desk.order == ["0", "after"]
    assert not after.done()
    impatient = Desk(max_sequences=1, max_queue_seconds=0.01)
    await impatient.ask(request([1], "0"))
    with pytest.raises(Overloaded, match="waited too long"):
        await (await impatient.ask(request([1], "1")))
    for one in (desk, impatient):
        for task in one.tasks.values():
            task.cancel()
        await asyncio.gather(*one.tasks.values(), return_exceptions=True)


async def test_a_slot_given_to_one_that_is_cancelled_in_that_moment_goes_on() -> None:
    desk = Desk(max_sequences=1)
    for name in "012":
        await desk.ask(request([1], name))
    desk._ends["0"].set()
    desk.tasks["0"].cancel()
    await asyncio.sleep(0)  # the slot is handed to 1, whose task has not run yet
    assert desk.admission.num_active == 1
    assert desk.admission.num_waiting == 1
    desk.tasks["1"].cancel()
    await settle()
    assert desk.order == ["0", "2"]
    desk.tasks["2"].cancel()
    await settle()
    assert desk.admission.num_active == 0


async def test_a_flood_of_one_tenant_leaves_the_other_its_half() -> None:
    desk = Desk(max_sequences=1, max_queued_requests=50)
    number = itertools.count()
    rest = {"flood": 0, "calm": 0}
    for _ in range(200):
        for tenant, wanted in (("flood", 60), ("calm", 2)):
            waiting = Counter(t.tenant for t in desk.admission._queue)
            for _ in range(wanted - waiting[tenant]):
                await desk.ask(request([1] * 30, f"{tenant} {next(number)}", tenant=tenant))
        name = desk.order[-1]
        rest[name.split()[0]] += 1
        await desk.finish(name)
    assert rest["calm"] >= 0.45 * 200
    for task in desk.tasks.values():
        task.cancel()
    await asyncio.gather(*desk.tasks.values(), return_exceptions=True)


async def test_refusing_is_quick_at_overload() -> None:
    desk = Desk(max_sequences=1, max_queued_requests=4096, max_queue_seconds=1e6)
    rng = random.Random(0)
    for n in range(4097):
        desk._ends[str(n)] = asyncio.Event()
        asked = request([1] * rng.randint(1, 50), str(n), tenant=f"tenant {n % 500}", priority=n % 3)
        desk.tasks[str(n)] = asyncio.create_task(desk._hold(asked))
    await settle()
    assert desk.admission.num_waiting == 4096
    took = []
    for n in range(1000):
        begin = time.perf_counter()
        with pytest.raises(Overloaded):
            async with desk.admission.slot(request([1] * 40, f"late {n}", tenant=f"tenant {n % 500}", priority=-1)):
                pass
        took.append(time.perf_counter() - begin)
    assert sorted(took)[990] < 0.010
    for task in desk.tasks.values():
        task.cancel()
    await asyncio.gather(*desk.tasks.values(), return_exceptions=True)


OPERATIONS = st.one_of(
    st.tuples(
        st.just("ask"), st.sampled_from("ab"), st.integers(-1, 1), st.sampled_from([1, 40, 300, 900]), st.integers(1, 3)
    ),
    st.tuples(st.just("cancel"), st.integers(0, 99)),
    st.tuples(st.just("finish"), st.integers(0, 99)),
    st.tuples(st.just("others"), st.integers(0, 4)),
)


@settings(max_examples=60)
@given(st.lists(OPERATIONS, max_size=40))
def test_nobody_waits_while_there_is_room_and_the_bounds_hold(operations: list[tuple[object, ...]]) -> None:
    asyncio.run(_play(operations))


async def _play(operations: list[tuple[object, ...]]) -> None:
    desk = Desk(max_sequences=4, max_queued_requests=6, max_queued_tokens=3000)
    names: deque[str] = deque()
    for number, (kind, *rest) in enumerate(operations):
        if kind == "ask":
            tenant, priority, num_tokens, choices = rest
            asked = request(
                [1] * int(str(num_tokens)), str(number), tenant=str(tenant),
                priority=int(str(priority)), num_choices=int(str(choices)),
            )  # fmt: skip
            await desk.ask(asked)
            names.append(asked.request_id)
        elif kind == "others":
            desk.view.report_load("d0", load(num_running=int(str(rest[0])) + sum(r.num_choices for r in desk.active)))
            await settle()
        elif names:
            name = names[int(str(rest[0])) % len(names)]
            await (desk.cancel(name) if kind == "cancel" else desk.finish(name))
        _check(desk)
    desk.view.report_load("d0", load(num_running=sum(r.num_choices for r in desk.active)))
    while desk.active:
        await desk.finish(desk.active[0].request_id)
        _check(desk)
    assert desk.admission.num_waiting == desk.admission.num_active == 0
    assert all(task.done() for task in desk.tasks.values())
    assert desk.view._reserved == {}
    await asyncio.gather(*desk.tasks.values(), return_exceptions=True)


def _check(desk: Desk) -> None:
    admission = desk.admission
    assert admission.num_active == len(desk.active)
    assert sum(one.num_choices for one in desk.active) <= 4 or len(desk.active) == 1
    assert admission.num_waiting <= 6
    assert admission.waiting_tokens <= 3000 or admission.num_waiting == 1
    first = admission._queue.first()
    assert first is None or not admission._fits(first.needed)


def load(num_running: int) -> worker_pb2.Load:
    return worker_pb2.Load(num_running=num_running, free_blocks=256, total_blocks=256)
