"""Requests through real workers, sessions and KV transfers, with an executor that checks every byte
of KV cache.
"""

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace

import grpc.aio
import pytest

from tandem.proto import inference_pb2, worker_pb2
from tandem.proto.errors import DeadlineExceeded, Overloaded, Unavailable
from tandem.router.dispatch.dispatcher import Dispatcher
from tandem.router.request import TokenDelta, TokenRequest
from tandem.router.scheduling.admission import Admission
from tandem.router.scheduling.capacity import NO_CAPACITY
from tandem.router.scheduling.registry import WorkerRegistry
from tandem.router.telemetry.prometheus import PrometheusMetrics
from tandem.router.telemetry.requests import PARTS
from tandem.tests.fleet import VOCAB, Fleet, Unlimited, fake_rank, fleet
from tandem.tests.metrics_page import MetricsPage
from tandem.tests.peers import IDENTITY
from tandem.tests.router.fake_worker import FakeWorker, token
from tandem.tests.token_request import token_request
from tandem.tests.waits import SLOW_STEP, WAIT
from tandem.tests.workers.engine.fake import (
    FakeExecutor,
    expected_choices,
    expected_logprobs,
    expected_tokens,
)

UNFINISHED = inference_pb2.FINISH_REASON_UNSPECIFIED
TIME = inference_pb2.FINISH_REASON_TIME


async def deltas_of(
    running: Fleet, request: TokenRequest, ended: Collection[int] = ()
) -> list[TokenDelta]:
    """All deltas, checked to have contiguous indices and exactly one end a choice."""
    found: list[TokenDelta] = []
    counts, finished = [0] * request.submit.num_choices, set()
    async with aclosing(
        running.dispatcher.generate(request, inference_pb2.Timeline(), ended)
    ) as deltas:
        async for delta in deltas:
            assert delta.first_index == counts[delta.choice]
            assert delta.choice not in finished
            counts[delta.choice] += len(delta.ids)
            if delta.finish_reason != UNFINISHED:
                finished.add(delta.choice)
            found.append(delta)
    assert finished | set(ended) == set(range(request.submit.num_choices))
    return found


def ids_of(deltas: list[TokenDelta], num_choices: int) -> list[list[int]]:
    return [
        [i for delta in deltas if delta.choice == choice for i in delta.ids]
        for choice in range(num_choices)
    ]


@pytest.mark.parametrize("prefill", [0, 1, 2])
@pytest.mark.parametrize("length", [1, 15, 16, 17, 700])
async def test_tokens_equal_the_reference(prefill: int, length: int) -> None:
    prompt = [(7 * i + length) % VOCAB for i in range(length)]
    async with fleet(prefill, 1, chunk_tokens=64) as running:
        for _ in range(2):  # the second time from the prefix caches
            tokens, timeline = await running.generate(token_request(prompt, 40))
            assert tokens == expected_tokens(prompt, 40, VOCAB)
        if prefill:
            assert (
                timeline.kv_transfer_bytes == length % 16 * 3 * 64
            )  # the whole blocks were there already


async def test_a_prefill_worker_needs_room_for_the_prompt_alone() -> None:
    """A decode worker computes a prompt for which the prefill worker has no room."""
    async with fleet(
        1, 1, rank=lambda role: fake_rank(num_blocks=8 if role == "prefill" else 256)
    ) as running:
        tokens, timeline = await running.generate(token_request(range(20), 500))
        assert tokens == expected_tokens(range(20), 500, VOCAB)
        assert not timeline.interruptions
        tokens, _ = await running.generate(token_request(range(300), 5))
        assert tokens == expected_tokens(range(300), 5, VOCAB)


async def test_what_a_prefill_worker_cannot_do_alone_may_be_asked_again() -> None:
    """The decode workers, which are away, may have more KV cache."""
    async with fleet(1, 0, rank=lambda role: fake_rank(num_blocks=8)) as running:
        tokens, _ = await running.generate(token_request(range(20), 50))
        assert tokens == expected_tokens(range(20), 50, VOCAB)
        for request in (
            token_request(range(20), 500),
            token_request(range(20), 60, num_choices=8),
        ):
            with pytest.raises(Unavailable, match="no worker can serve the request now: "):
                await running.choices(request)


async def test_the_timeline_adds_up() -> None:
    async with fleet(1, 1) as running:
        tokens, timeline = await running.generate(token_request(range(300), 20))
    parts = sum(getattr(timeline, f"{part}_seconds") for part in PARTS)
    assert parts == pytest.approx(timeline.end_to_end_seconds, rel=0.05)
    assert min(timeline.queue_seconds, timeline.dispatch_seconds, timeline.kv_transfer_seconds) >= 0
    assert timeline.completion_tokens == len(tokens) == 20
    assert timeline.attempts == 1
    assert timeline.kv_transfer_bytes == 300 * 3 * 64


@pytest.mark.parametrize("prefill", [0, 1])
@pytest.mark.parametrize("max_tokens", [1, 40])
async def test_choices_equal_those_of_requests_of_their_own(prefill: int, max_tokens: int) -> None:
    prompt = range(37)
    async with fleet(prefill, 1, chunk_tokens=16) as running:
        for _ in range(2):
            deltas = await deltas_of(running, token_request(prompt, max_tokens, num_choices=4))
            assert ids_of(deltas, 4) == expected_choices(prompt, 4, max_tokens, VOCAB)


@pytest.mark.parametrize("prefill", [0, 1])
async def test_choices_end_at_stop_tokens_of_their_own(prefill: int) -> None:
    """One of them with the first token, which the prefill worker draws."""
    prompt = range(20)
    whole = expected_choices(prompt, 3, 30, VOCAB)
    stops = (whole[1][0], whole[2][7])
    async with fleet(prefill, 1) as running:
        deltas = await deltas_of(
            running, token_request(prompt, 30, num_choices=3, stop_token_ids=stops)
        )
    ends = [next((i + 1 for i, t in enumerate(ids) if t in stops), 30) for ids in whole]
    assert ids_of(deltas, 3) == [ids[:end] for ids, end in zip(whole, ends, strict=True)]
    assert (ends[1], ends[2]) == (1, 8)


@pytest.mark.parametrize("prefill", [0, 1])
async def test_logprobs_come_with_their_tokens(prefill: int) -> None:
    prompt = list(range(1, 40))
    async with fleet(prefill, 1, chunk_tokens=16) as running:
        request = token_request(prompt, 6, num_choices=2, logprobs=2, prompt_logprobs=1)
        deltas = await deltas_of(running, request)
    tokens, scored = ids_of(deltas, 2), [s for d in deltas if d.choice == 1 for s in d.logprobs]
    assert len(scored) == 6
    for i, scores in enumerate(scored):
        expected = expected_logprobs([*prompt, *tokens[1][:i]], 2, VOCAB)
        assert list(scores.top_ids) == [token for token, _ in expected]
        assert list(scores.top_logprobs) == pytest.approx([logprob for _, logprob in expected])
    assert [len(delta.prompt_logprobs) for delta in deltas if delta.prompt_logprobs] == [
        len(prompt) - 1
    ]
    assert deltas[0].prompt_logprobs


@pytest.mark.parametrize("prefill", [0, 1])
@pytest.mark.parametrize("max_tokens", [1, 9])
async def test_a_beam_search_is_the_same_wherever_it_runs(prefill: int, max_tokens: int) -> None:
    beams = inference_pb2.BeamSearch(width=4, length_penalty=1.0, early_stopping=False)
    request = token_request(range(30), max_tokens, num_choices=3, beam_search=beams)
    async with fleet(0, 1) as alone, fleet(prefill, 2) as running:
        first, second = await deltas_of(alone, request), await deltas_of(running, request)
    assert ids_of(first, 3) == ids_of(second, 3)
    scores = [delta.score for delta in first if delta.finish_reason != UNFINISHED]
    assert scores == sorted(scores, reverse=True)
    assert len({tuple(ids) for ids in ids_of(first, 3)}) == 3


async def test_dropped_choices_are_freed_on_their_worker() -> None:
    prompt = range(30)
    ended: set[int] = set()
    async with fleet(1, 1, rank=lambda role: fake_rank(step_seconds=SLOW_STEP)) as running:
        request = token_request(prompt, 1000, num_choices=3)
        found: list[TokenDelta] = []
        async with aclosing(
            running.dispatcher.generate(request, inference_pb2.Timeline(), ended)
        ) as deltas:
            async for delta in deltas:
                assert delta.choice not in ended
                found.append(delta)
                if delta.first_index + len(delta.ids) >= 5 * (delta.choice + 1):
                    ended.add(delta.choice)
        await running.check_idle()
    assert ended == {0, 1, 2}
    whole = expected_choices(prompt, 3, 1000, VOCAB)
    assert all(ids == whole[choice][: len(ids)] for choice, ids in enumerate(ids_of(found, 3)))


@pytest.mark.parametrize("reads", [0, 3])
async def test_the_deadline_ends_a_request_everywhere(reads: int) -> None:
    async with fleet(
        1, 1, rank=lambda role: fake_rank(step_seconds=SLOW_STEP if reads else 0.5)
    ) as running:
        request = token_request(
            range(30), 1000, deadline=time.monotonic() + (5.0 if reads else 0.2)
        )
        found: list[TokenDelta] = []

        async def read() -> None:
            async for delta in running.dispatcher.generate(request, inference_pb2.Timeline()):
                found.append(delta)

        with pytest.raises(DeadlineExceeded):
            await asyncio.wait_for(read(), WAIT)
        assert len(found) >= reads
        await running.check_idle()


@pytest.mark.parametrize("seconds", [0.0, 1.0])
async def test_when_its_time_is_over_a_request_ends_with_its_output(seconds: float) -> None:
    """The workers end it, too: they hold nothing afterwards."""
    async with fleet(1, 1, rank=lambda role: fake_rank(step_seconds=SLOW_STEP)) as running:
        request = token_request(range(30), 1000, ends_at=time.monotonic() + seconds)
        found = await deltas_of(running, request)
        assert [delta.finish_reason for delta in found if delta.finish_reason] == [TIME]
        (ids,) = ids_of(found, 1)
        assert ids == expected_tokens(range(30), len(ids), VOCAB)
        await running.check_idle()


async def test_the_time_of_a_request_that_waits_for_admission() -> None:
    async with fleet(0, 1) as running:
        admission = OneAtATime()
        running.dispatcher = Dispatcher(running.registry, admission, identity=IDENTITY)
        async with admission._turn:
            late = token_request(range(20), 4, ends_at=time.monotonic() + 0.05)
            (delta,) = await deltas_of(running, late)
            assert (delta.ids, delta.finish_reason) == ((), TIME)
            both = time.monotonic() + 0.05
            with pytest.raises(DeadlineExceeded):
                await deltas_of(running, token_request(range(20), 4, ends_at=both, deadline=both))


async def test_a_slow_reader_gets_fewer_and_longer_deltas() -> None:
    async with fleet(0, 1) as running:
        executor = running.workers[0]._rank.executor
        assert isinstance(executor, FakeExecutor)
        found = []
        async with aclosing(
            running.dispatcher.generate(token_request(range(20), 400), inference_pb2.Timeline())
        ) as deltas:
            async for delta in deltas:
                found.append(delta)
                if len(found) == 1:
                    async with asyncio.timeout(WAIT):
                        while executor.num_steps < 300:
                            await asyncio.sleep(0.001)
    assert ids_of(found, 1) == [expected_tokens(range(20), 400, VOCAB)]
    assert len(found) < 150


class OneAtATime(Admission):
    """Admits one request at a time, and no `refused` one."""

    def __init__(self) -> None:
        super().__init__(WorkerRegistry())
        self.waiting = 0
        self._turn = asyncio.Lock()

    @asynccontextmanager
    async def permit(self, request: TokenRequest) -> AsyncIterator[Callable[[], None]]:
        if request.tenant == "refused":
            raise Overloaded("not you", 7.0)
        self.waiting += 1
        async with self._turn:
            yield lambda: None


async def test_admission_decides_when_a_request_starts() -> None:
    async with fleet(0, 1) as running:
        admission = OneAtATime()
        running.dispatcher = Dispatcher(running.registry, admission, identity=IDENTITY)
        with pytest.raises(Overloaded, match="not you"):
            await running.generate(token_request(range(20), 4, tenant="refused"))
        first = running.dispatcher.generate(
            token_request(range(20), 4, name="first"), inference_pb2.Timeline()
        )
        await anext(first)
        late = token_request(range(20), 4, name="late", deadline=time.monotonic() + 0.05)
        with pytest.raises(DeadlineExceeded):
            await running.generate(late)
        second = asyncio.create_task(running.generate(token_request(range(20), 4, name="second")))
        async with asyncio.timeout(WAIT):
            while admission.waiting < 3:
                await asyncio.sleep(0)
        assert not second.done()
        await first.aclose()
        tokens, _ = await second
        assert tokens == expected_tokens(range(20), 4, VOCAB)


async def test_when_the_service_stops_everybody_reads_so() -> None:
    async with fleet(
        0, 1, rank=lambda role: fake_rank(step_seconds=0.002), max_sequences=4
    ) as running:
        router = add_router(running)
        found: list[int] = []

        async def one(number: int) -> None:
            request = token_request(range(number, number + 30), 1500, name=str(number))
            async with aclosing(
                router.dispatcher.generate(request, inference_pb2.Timeline())
            ) as deltas:
                async for delta in deltas:
                    found.append(delta.choice)

        requests = [asyncio.create_task(one(number)) for number in range(12)]
        async with asyncio.timeout(WAIT):
            while len(found) < 20:
                await asyncio.sleep(0.002)
        router.dispatcher.stop()
        for result in await asyncio.gather(*requests, return_exceptions=True):
            assert isinstance(result, Unavailable)
            assert result.message == "the service is stopping"
        with pytest.raises(Unavailable, match="the service is stopping"):
            await router.generate(token_request(range(20), 4, name="late"))
        await router.dispatcher.close()


async def test_a_request_that_comes_when_the_service_stops_waits_for_nothing() -> None:
    """Neither for a slot nor, as all sessions are broken, for a worker."""
    registry = WorkerRegistry()
    info = worker_pb2.WorkerInfo(
        worker_id="d1", epoch=1, role=worker_pb2.ROLE_DECODE, max_sequences=1
    )
    registry.update([info])
    registry.session_lost("d1", 1)
    admission = Admission(registry)
    router = Dispatcher(registry, admission, identity=IDENTITY, park_seconds=3600)
    router.stop()
    asked = router.generate(token_request([1], 1), inference_pb2.Timeline())
    async with asyncio.timeout(WAIT):
        with pytest.raises(Unavailable, match="the service is stopping"):
            await anext(asked)
    with pytest.raises(Unavailable, match="the service is stopping"):
        admission.check_early(NO_CAPACITY, "tenant")
    await router.close()


async def test_routers_share_workers_without_knowing_of_each_other() -> None:
    """Their request ids are the same; the end of one leaves the others' requests alone."""
    async with fleet(
        1, 2, rank=lambda role: fake_rank(step_seconds=0.002), max_sequences=4
    ) as running:
        routers = [add_router(running) for _ in range(3)]
        vanishes, *stay = routers

        async def one(router: Fleet, number: int) -> None:
            prompt = range(number, number + 60)
            tokens, _ = await router.generate(token_request(prompt, 30, name=str(number % 15)))
            assert tokens == expected_tokens(prompt, 30, VOCAB)

        lost = [asyncio.create_task(one(vanishes, n)) for n in range(15)]
        kept = [
            asyncio.create_task(one(router, 15 * n + m))
            for n, router in enumerate(stay)
            for m in range(15)
        ]
        async with asyncio.timeout(WAIT):
            while not any(status.num_sessions == 3 for status in await running.statuses()):
                await asyncio.sleep(0.005)
        await vanishes.dispatcher.close()
        await asyncio.gather(*kept)
        for result in await asyncio.gather(*lost, return_exceptions=True):
            assert result is None or isinstance(result, Unavailable)
        await running.check_idle()
        fresh = WorkerRegistry()
        fresh.update(worker.info() for worker in running.workers)
        for router in stay:
            router.registry.update(worker.info() for worker in running.workers)
            free, expected = router.registry.capacity.free(), fresh.capacity.free()
            assert free is not None
            assert expected is not None
            assert (free.sequences, free.kv_tokens) == (expected.sequences, expected.kv_tokens)
            await router.dispatcher.close()


def add_router(running: Fleet) -> Fleet:
    registry = WorkerRegistry()
    registry.update(worker.info() for worker in running.workers)
    return replace(
        running,
        registry=registry,
        dispatcher=Dispatcher(registry, Admission(registry), identity=IDENTITY),
    )


class AnsweringWorker(FakeWorker):
    """Answers each submit with one token, the last; a silent one says nothing by itself."""

    is_silent = False
    num_sessions = 0
    num_submits = 0

    async def Session(
        self,
        requests: AsyncIterator[worker_pb2.SessionRequest],
        context: grpc.aio.ServicerContext[worker_pb2.SessionRequest, worker_pb2.SessionResponse],
    ) -> None:
        self.num_sessions += 1
        if not self.is_silent:
            self.send()
        await super().Session(requests, context)

    async def _read(self, requests: AsyncIterator[worker_pb2.SessionRequest]) -> None:
        async for request in requests:
            if request.HasField("submit"):
                self.num_submits += 1
                self.send(
                    token(request.submit.request_id, 0, attempt=request.submit.attempt, last=True)
                )


async def test_a_worker_whose_session_has_broken_gets_no_request_before_it_answers_a_probe() -> (
    None
):
    """The directory lists it all the time."""
    dead, alive = AnsweringWorker(), AnsweringWorker()
    registry = WorkerRegistry()
    registry.update(
        worker_pb2.WorkerInfo(
            worker_id=name, epoch=1, role=worker_pb2.ROLE_DECODE, address=each.address
        )
        for name, each in (("dead", dead), ("alive", alive))
    )
    router = Dispatcher(registry, Unlimited(registry), identity=IDENTITY)

    prompts = ([number] for number in itertools.count())  # of which nothing is cached

    async def ask_until(is_enough: Callable[[], bool], least: int = 1) -> None:
        while not is_enough() or least > 0:
            least -= 1
            request = token_request(next(prompts), 1)
            assert [
                delta.ids async for delta in router.generate(request, inference_pb2.Timeline())
            ] == [(7,)]

    await asyncio.gather(dead.server.start(), alive.server.start())
    try:
        async with asyncio.timeout(WAIT):
            await ask_until(lambda: dead.num_submits > 0 < alive.num_submits)
            dead.is_silent = True
            dead.answers.put_nowait(None)
            while not registry.is_lost("dead", 1):
                await asyncio.sleep(0.001)
            counted = dead.num_submits
            await ask_until(lambda: dead.num_sessions > 1, least=20)
            await ask_until(lambda: True, least=20)
            assert dead.num_submits == counted
            dead.send()  # to the probe
            await ask_until(lambda: dead.num_submits > counted)
    finally:
        await router.close()
        await asyncio.gather(dead.server.stop(0), alive.server.stop(0))


async def test_a_request_waits_while_the_sessions_with_all_workers_are_broken() -> None:
    worker = AnsweringWorker()
    registry = WorkerRegistry()
    info = worker_pb2.WorkerInfo(
        worker_id="d1", epoch=1, role=worker_pb2.ROLE_DECODE, address=worker.address
    )
    registry.update([info])
    registry.session_lost("d1", 1)
    router = Dispatcher(registry, Unlimited(registry), identity=IDENTITY)
    await worker.server.start()

    async def ask() -> list[tuple[int, ...]]:
        return [
            delta.ids
            async for delta in router.generate(token_request([1], 1), inference_pb2.Timeline())
        ]

    asked = asyncio.create_task(ask())
    try:
        async with asyncio.timeout(WAIT):
            while not router._running:
                await asyncio.sleep(0.001)
            router._probe(("d1", 1))
            assert await asked == [(7,)]
    finally:
        asked.cancel()
        await router.close()
        await worker.server.stop(0)


async def test_a_request_that_came_before_a_loss_waits_for_a_worker_after_the_lost_one() -> None:
    """It may have waited in the queue. A request that comes later is refused at once."""
    worker = AnsweringWorker()
    registry = WorkerRegistry()

    def info(epoch: int) -> worker_pb2.WorkerInfo:
        return worker_pb2.WorkerInfo(
            worker_id="d1", epoch=epoch, role=worker_pb2.ROLE_DECODE, address=worker.address
        )

    registry.update([info(1)])
    before = token_request([1], 1)
    registry.session_lost("d1", 1)
    registry.update([])
    later = token_request([1], 1, name="later")
    router = Dispatcher(registry, Unlimited(registry), identity=IDENTITY)
    await worker.server.start()

    async def ask(request: TokenRequest) -> list[tuple[int, ...]]:
        return [delta.ids async for delta in router.generate(request, inference_pb2.Timeline())]

    asked = asyncio.create_task(ask(before))
    try:
        async with asyncio.timeout(WAIT):
            while not router._running:
                await asyncio.sleep(0.001)
            with pytest.raises(Unavailable, match="no worker is ready"):
                await ask(later)
            registry.update([info(2)])
            assert await asked == [(7,)]
    finally:
        asked.cancel()
        await router.close()
        await worker.server.stop(0)


async def test_a_router_follows_all_listed_workers_and_leaves_those_that_have_left() -> None:
    """A session that a request uses ends with the request."""
    async with fleet(1, 2, rank=lambda role: fake_rank(step_seconds=0.002)) as running:
        registry, router = running.registry, running.dispatcher

        async def sessions() -> list[int]:
            return [status.num_sessions for status in await running.statuses()]

        async def until(counts: list[int]) -> None:
            async with asyncio.timeout(WAIT):
                while await sessions() != counts:
                    await asyncio.sleep(0.001)

        await router.update_sessions()
        await until([1, 1, 1])
        asked = router.generate(token_request(range(60), 200), inference_pb2.Timeline())
        tokens: list[int] = []
        async with asyncio.timeout(WAIT), aclosing(asked):
            async for delta in asked:
                tokens += delta.ids
                if registry.workers() and len(tokens) > 3:  # a decode worker has the KV cache
                    registry.update([])
                    await router.update_sessions()
        assert tokens == expected_tokens(range(60), 200, VOCAB)
        await until([0, 0, 0])
        await router.update_sessions()
        assert not router._clients, "nothing of a worker that has left stays"
        registry.update([each.info() for each in running.workers])
        await router.update_sessions()
        await until([1, 1, 1])
        tokens, _ = await running.generate(token_request(range(60), 20, name="b"))
        assert tokens == expected_tokens(range(60), 20, VOCAB)


async def test_a_busy_worker_that_is_listed_again_reports_its_whole_prefix_cache_again() -> None:
    cached = token_request(range(64), 5)
    async with fleet(0, 1, rank=lambda role: fake_rank(step_seconds=0.005)) as running:
        registry, router, (worker,) = running.registry, running.dispatcher, running.workers
        await running.generate(cached)
        busy = asyncio.create_task(running.generate(token_request(range(500, 540), 200)))
        async with asyncio.timeout(WAIT):
            while not worker.load().num_running:
                await asyncio.sleep(0.001)
            first = router._clients[worker.worker_id, worker.epoch]
            for infos in ([], [worker.info()]):
                registry.update(infos)
                await router.update_sessions()
            while registry._look_up(cached).matched.num_tokens(worker.worker_id) < 48:
                await asyncio.sleep(0.001)
            assert not busy.done()
            assert not first.broken
            running.hurry()
            tokens, _ = await busy
            assert tokens == expected_tokens(range(500, 540), 200, VOCAB)
            while [status.num_sessions for status in await running.statuses()] != [1]:
                await asyncio.sleep(0.001)
        assert first.broken
        assert not router._clients[worker.worker_id, worker.epoch].broken
        assert registry.can_reach_worker


async def test_closing_a_router_ends_its_requests_at_workers_that_have_left() -> None:
    async with fleet(0, 1, rank=lambda role: fake_rank(step_seconds=0.005)) as running:
        busy = asyncio.create_task(running.generate(token_request(range(40), 200)))
        async with asyncio.timeout(WAIT):
            while not running.workers[0].load().num_running:
                await asyncio.sleep(0.001)
            running.registry.update([])
            await running.dispatcher.update_sessions()
            await running.dispatcher.close()
            while running.workers[0].load().num_running:
                await asyncio.sleep(0.001)
            with pytest.raises(Unavailable):
                await busy


@pytest.mark.parametrize(
    ("how", "num_lost"), [("died", 1), ("drained", 0), ("switched", 0), ("left", 0)]
)
async def test_a_worker_is_lost_only_while_it_is_listed_and_takes_requests(
    how: str, num_lost: int
) -> None:
    """No request uses the session, which breaks in each case."""
    worker = FakeWorker()

    def info(epoch: int) -> worker_pb2.WorkerInfo:
        return worker_pb2.WorkerInfo(
            worker_id="d1", epoch=epoch, role=worker_pb2.ROLE_DECODE, address=worker.address
        )

    registry = WorkerRegistry()
    registry.update([info(1)])
    metrics = PrometheusMetrics("tiny")
    router = Dispatcher(registry, Unlimited(registry), identity=IDENTITY, metrics=metrics)
    await worker.server.start()
    try:
        async with asyncio.timeout(WAIT):
            await router.update_sessions()
            client = router._clients["d1", 1]
            load = worker_pb2.WorkerLoad(draining=how == "drained", version=1)
            worker.answers.put_nowait(worker_pb2.SessionResponse(load=load))
            while not client.heard:
                await asyncio.sleep(0.001)
            if how in ("switched", "left"):
                registry.update([info(2)] if how == "switched" else [])
            await worker.server.stop(0)
            while not client.broken:
                await asyncio.sleep(0.001)
    finally:
        await router.close()
        await worker.server.stop(0)
    page = MetricsPage(metrics.render().decode())
    assert page.value("tandem_lost_workers_total") == num_lost
