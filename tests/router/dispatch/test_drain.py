"""Streams of a draining worker go on elsewhere with their KV cache: nothing is lost, altered or
computed again.
"""

import asyncio
from collections import Counter
from collections.abc import Sequence
from functools import partial

import pytest

from tandem.proto import inference_pb2, worker_pb2
from tandem.router.dispatch.dispatcher import Dispatcher
from tandem.router.scheduling.policy import Placement
from tandem.tests.fleet import VOCAB, Unlimited, fake_rank, fleet
from tandem.tests.peers import IDENTITY
from tandem.tests.token_request import token_request
from tandem.tests.waits import WAIT
from tandem.tests.workers.engine.fake import FakeExecutor, expected_choices
from tandem.workers.engine.engine import Engine
from tandem.workers.engine.sequence import SequenceSpec, Task
from tandem.workers.serve.request_manager import RequestManager
from tandem.workers.serve.session import WorkerRequest
from tandem.workers.serve.worker import Worker
from tandem.workers.transfer.frames import FetchResult


@pytest.fixture
def submits(monkeypatch: pytest.MonkeyPatch) -> Counter[Task]:
    """Counts what the workers' engines are given, by task."""
    counts: Counter[Task] = Counter()
    submit = Engine.submit

    def record(engine: Engine, spec: SequenceSpec, submitted: float | None = None) -> None:
        counts[spec.task] += 1
        submit(engine, spec, submitted)

    monkeypatch.setattr(Engine, "submit", record)
    return counts


async def until_running(workers: Sequence[Worker], count: int) -> None:
    """Waits until these workers have so many sequences together."""
    async with asyncio.timeout(WAIT):
        while sum(worker.load().num_running for worker in workers) < count:
            await asyncio.sleep(0.002)


async def until_decoding(worker: Worker) -> None:
    executor = worker._rank.executor
    assert isinstance(executor, FakeExecutor)
    async with asyncio.timeout(WAIT):
        while executor.num_steps < 5:
            await asyncio.sleep(0.002)


@pytest.mark.parametrize(("prefill", "num_choices"), [(0, 1), (1, 1), (1, 3)])
async def test_streams_move_to_another_worker_and_nothing_is_computed_again(
    prefill: int, num_choices: int, submits: Counter[Task]
) -> None:
    num_requests = 24 // num_choices
    async with fleet(
        prefill, 3, rank=lambda role: fake_rank(num_blocks=2000, step_seconds=0.05)
    ) as running:

        async def one(number: int) -> int:
            prompt = range(number, number + 40)
            ids, timeline = await running.choices(
                token_request(prompt, 150, num_choices=num_choices)
            )
            assert ids == expected_choices(prompt, num_choices, 150, VOCAB)
            return timeline.attempts

        requests = [asyncio.create_task(one(number)) for number in range(num_requests)]
        decoding = running.workers[prefill:]
        await until_running(decoding, num_requests * num_choices)
        worker = max(decoding, key=lambda each: each.load().num_running)
        before = submits[Task.PREFILL] + submits[Task.COLOCATED]
        assert await worker.drain(WAIT) == 0
        assert not all(request.done() for request in requests)
        running.hurry()
        attempts = await asyncio.gather(*requests)
        assert max(attempts) > 1
        assert submits[Task.PREFILL] + submits[Task.COLOCATED] == before == num_requests


async def test_a_stream_whose_cache_has_just_arrived_is_not_computed_again(
    submits: Counter[Task], monkeypatch: pytest.MonkeyPatch
) -> None:
    fetch, fetches = RequestManager._fetched, []

    def suspend_and_commit(
        manager: RequestManager, request: WorkerRequest, task: "asyncio.Task[FetchResult]"
    ) -> None:
        fetches.append(task)
        if (
            len(fetches) == 1
        ):  # acknowledged already, so that the prefill worker has let go of the cache
            request_id, attempt = request.key
            manager.suspend(
                request.session, worker_pb2.Suspend(request_id=request_id, attempt=attempt)
            )
        fetch(manager, request, task)

    monkeypatch.setattr(RequestManager, "_fetched", suspend_and_commit)
    async with fleet(1, 2, rank=lambda role: fake_rank()) as running:
        ids, timeline = await running.generate(token_request(range(40), 20))
        assert ids == expected_choices(range(40), 1, 20, VOCAB)[0]
        assert (timeline.attempts, len(fetches)) == (2, 2)
        assert submits[Task.PREFILL] + submits[Task.COLOCATED] == 1


async def test_every_worker_is_replaced_in_turn() -> None:
    async with fleet(
        1, 4, rank=lambda role: fake_rank(num_blocks=2000, step_seconds=0.05)
    ) as running:

        async def one(number: int) -> None:
            prompt = range(number, number + 40)
            ids, _ = await running.choices(token_request(prompt, 300))
            assert ids == expected_choices(prompt, 1, 300, VOCAB)

        requests = [asyncio.create_task(one(number)) for number in range(8)]
        await until_running(running.workers[1:], 8)
        for worker in running.workers[1:4]:
            assert await worker.drain(WAIT) == 0
        assert not all(request.done() for request in requests)
        running.hurry()
        await asyncio.gather(*requests)


async def test_streams_leave_draining_workers_only_for_free_sequences(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two workers drain at once; the third one has room for two of their eight streams at first."""
    held, submit = [], Engine.submit

    def record(engine: Engine, spec: SequenceSpec, submitted: float | None = None) -> None:
        submit(engine, spec, submitted)
        if spec.task is Task.DECODE:
            held.append(len(engine.requests.waiting) + engine.requests.num_holding)

    monkeypatch.setattr(Engine, "submit", record)
    rank = partial(fake_rank, num_blocks=2000, step_seconds=0.01)
    async with fleet(0, 3, rank=lambda role: rank(), max_sequences=4) as running:
        workers = running.workers
        places = [0, 0, 0, 0, 1, 1, 1, 1, 2, 2]
        names = iter([workers[place].worker_id for place in places])
        requests = []
        with monkeypatch.context() as patch:
            patch.setattr(
                running.registry,
                "place",
                lambda *args, **options: Placement(prefill=None, decode=next(names)),
            )
            for number, place in enumerate(places):
                asked = token_request(range(number, number + 40), 50 if place == 2 else 150)
                requests.append(asyncio.create_task(running.choices(asked)))
            await until_running(workers, len(places))
        assert await asyncio.gather(*(each.drain(WAIT) for each in workers[:2])) == [0, 0]
        assert max(held) <= 4
        assert len(held) > 2, "more follow when streams of the third worker have ended"
        running.hurry()
        for number, (ids, _) in enumerate(await asyncio.gather(*requests)):
            count = 50 if places[number] == 2 else 150
            assert ids == expected_choices(range(number, number + 40), 1, count, VOCAB)


async def test_streams_end_where_they_are_if_there_is_no_other_worker() -> None:
    async with fleet(1, 1, rank=lambda role: fake_rank(step_seconds=0.002)) as running:
        request = asyncio.create_task(running.choices(token_request(range(40), 100)))
        await until_decoding(running.workers[1])
        assert await running.workers[1].drain(WAIT) == 0
        ids, timeline = await request
        assert (ids, timeline.attempts) == (expected_choices(range(40), 1, 100, VOCAB), 1)


async def test_a_stream_that_is_lost_while_it_is_suspended_is_computed_again() -> None:
    async with fleet(0, 2, rank=lambda role: fake_rank(step_seconds=0.02)) as running:
        running.dispatcher = Dispatcher(
            running.registry, Unlimited(running.registry), identity=IDENTITY
        )
        request = asyncio.create_task(running.choices(token_request(range(40), 200)))
        await until_running(running.workers, 1)
        worker = max(running.workers, key=lambda each: each.load().num_running)
        other = next(each for each in running.workers if each is not worker)
        offer, stopped = worker._kv.offer, asyncio.Event()

        def offer_and_stop(*args: object) -> None:
            offer(*args)  # type: ignore[arg-type]
            stopped.set()

        worker._kv.offer = offer_and_stop  # type: ignore[assignment, method-assign]
        draining = asyncio.create_task(worker.drain(WAIT))
        async with asyncio.timeout(WAIT):
            await stopped.wait()
        await worker.stop()
        await draining
        ids, _ = await request
        assert ids == expected_choices(range(40), 1, 200, VOCAB)
        assert other.load().num_running == 0
        running.workers.remove(worker)
        await running.dispatcher.close()


async def test_beam_searches_and_prompts_stay() -> None:
    search = inference_pb2.BeamSearch(width=4, length_penalty=1.0, early_stopping=False)
    async with fleet(
        1, 2, rank=lambda role: fake_rank(num_blocks=1000, step_seconds=0.01)
    ) as running:
        asked = token_request(range(40), 100, num_choices=2, beam_search=search)
        expected, _ = await running.choices(asked)
        again = asyncio.create_task(
            running.choices(token_request(range(40), 100, num_choices=2, beam_search=search))
        )
        await until_running(running.workers, 1)
        worker = max(running.workers, key=lambda each: each.load().num_running)
        assert await worker.drain(WAIT) == 0
        ids, timeline = await again
        assert (ids, timeline.attempts) == (expected, 1)
        assert worker.info().role in (worker_pb2.ROLE_DECODE, worker_pb2.ROLE_PREFILL)
