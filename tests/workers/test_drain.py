"""A worker that is drained reports so at once, refuses, and lets what runs go on or move away."""

import asyncio

import pytest

from tandem.proto import worker_pb2
from tandem.tests.fleet import VOCAB, fake_rank, worker_stub
from tandem.tests.peers import peer_channel
from tandem.tests.waits import SLOW_STEP, WAIT
from tandem.tests.worker_config import worker_config
from tandem.tests.workers.engine.fake import expected_tokens
from tandem.tests.workers.raw_session import RawSession, ended, idle, submit, worker_of
from tandem.tests.workers.test_suspend import (
    SUSPEND,
    choice_of,
    go_on,
    has_tokens,
    is_suspended,
    two_workers,
)
from tandem.workers.serve.worker import Worker


async def drain(worker: Worker, seconds: float) -> int:
    async with peer_channel(worker.address) as channel:
        response = await worker_stub(channel).Drain(
            worker_pb2.DrainRequest(timeout_seconds=seconds)
        )
    return int(response.num_requests)


async def until_draining(session: RawSession) -> worker_pb2.WorkerLoad:
    """The first load that says so."""
    while True:
        message = await session.read()
        assert message is not None
        if message.load.draining:
            return message.load


async def test_running_requests_move_away_and_new_ones_are_refused() -> None:
    prompt = list(range(50))
    async with two_workers(step_seconds=0.005) as running:
        (source, target), worker = running.sessions, running.workers[0]
        await source.send(submit(token_ids=prompt, max_tokens=500))
        await source.until(has_tokens)
        before = source.messages[-1].load.version
        waiting = asyncio.create_task(drain(worker, 30))
        assert (await until_draining(source)).version > before
        assert worker.info().draining
        assert worker.info().load.draining
        await source.send(submit("new"))
        assert (await source.failure()).kind == worker_pb2.FAILURE_KIND_GONE
        assert await drain(worker, 0) == 1
        assert await drain(worker, 0.01) == 1
        await source.send(SUSPEND)
        (output,) = await source.until(is_suspended)
        assert not waiting.done(), "its KV cache has not been fetched"
        made = choice_of([(source, "a")], 0)
        await go_on(target, "moved", made, 0, output.suspended.kv, token_ids=prompt, max_tokens=500)
        await target.until(ended)
        assert choice_of([(source, "a"), (target, "moved")], 0).tokens == expected_tokens(
            prompt, 500, VOCAB
        )
        async with asyncio.timeout(WAIT):
            assert await waiting == 0
        assert (await idle(worker)).info.draining, "it stays up"
        await source.send(submit("still"))
        assert (await source.failure()).kind == worker_pb2.FAILURE_KIND_GONE


async def test_running_requests_may_end_where_they_are() -> None:
    async with worker_of(fake_rank(step_seconds=0.005)) as (worker, session):
        await session.send(submit(max_tokens=40))
        await session.until(has_tokens)
        assert await drain(worker, 30) == 0
        await session.until(ended)
        assert session.tokens() == expected_tokens(range(20), 40, VOCAB)


async def test_an_idle_session_hears_of_it_at_once_and_of_nothing_else() -> None:
    async with worker_of(fake_rank()) as (worker, session):
        await session.send(submit())
        await session.until(ended)
        await idle(worker)
        assert not session.messages[-1].load.draining
        assert await drain(worker, 0) == 0
        await until_draining(session)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await session._call.read()


async def test_an_idle_worker_that_stops_reports_that_it_drains() -> None:
    """So a submit that it does not read any more counts as no crash."""
    worker = await Worker.serve(fake_rank(), worker_config(), worker_id="worker", role="decode")
    async with asyncio.timeout(WAIT), peer_channel(worker.address) as channel:
        session = RawSession(channel)
        await session.read()
        await worker.stop()
        await until_draining(session)
        assert await session.read() is None


@pytest.mark.parametrize("seconds", [float("nan"), float("-inf"), -1.0])
async def test_a_timeout_of_no_sense_is_none(seconds: float) -> None:
    worker = await Worker.serve(
        fake_rank(step_seconds=SLOW_STEP), worker_config(), worker_id="worker", role="decode"
    )
    async with peer_channel(worker.address) as channel:
        session = RawSession(channel)
        await session.send(submit(max_tokens=1000))
        await session.until(has_tokens)
        assert await drain(worker, seconds) == 1
        async with asyncio.timeout(WAIT):
            await worker.stop()
