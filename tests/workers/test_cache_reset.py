"""A worker whose prefix cache is reset: nothing from before is found, and what runs goes on."""

import asyncio
import time

import pytest

from tandem.proto import worker_pb2
from tandem.proto.limits import FINGERPRINT_BYTES
from tandem.tests.fleet import VOCAB, fake_rank, worker_stub
from tandem.tests.peers import peer_channel
from tandem.tests.workers.engine.fake import expected_tokens
from tandem.tests.workers.raw_session import RawSession, ended, idle, submit, worker_of
from tandem.tests.workers.test_cache_reports import cached, follow
from tandem.tests.workers.test_kv_handle import started
from tandem.workers.serve.request_manager import RequestManager
from tandem.workers.serve.worker import Worker

PROMPT = range(100)  # of six full blocks and four tokens


async def reset(*workers: Worker) -> list[str]:
    """Resets the workers as of one time; returns their reasons."""
    now = time.time_ns()

    async def call(worker: Worker) -> str:
        async with peer_channel(worker.address) as channel:
            response: worker_pb2.ResetPrefixCacheResponse = await worker_stub(
                channel
            ).ResetPrefixCache(worker_pb2.ResetPrefixCacheRequest(time=now))
        return response.error

    return await asyncio.gather(*map(call, workers))


async def end_of(session: RawSession, name: str) -> None:
    while not any(map(ended, session.outputs(name))):
        assert await session.read() is not None


async def cached_tokens(session: RawSession, name: str) -> int:
    """Has the prompt answered; returns how many of its tokens were cached."""
    await session.send(submit(name, token_ids=PROMPT))
    await end_of(session, name)
    assert session.tokens(name) == expected_tokens(PROMPT, 5, VOCAB)
    return session.outputs(name)[0].admitted.cached_tokens


async def test_a_prompt_finds_nothing_and_a_stream_goes_on() -> None:
    """What the stream still computes is not found either."""
    async with worker_of(fake_rank(step_seconds=0.005)) as (worker, session):
        await session.send(submit("stream", token_ids=PROMPT, max_tokens=600))
        while not session.tokens("stream"):
            await session.read()
        assert await cached_tokens(session, "before") == 96
        assert await reset(worker) == [""]
        assert not any(map(ended, session.outputs("stream")))
        assert worker.load().cached_blocks == 0
        assert [await cached_tokens(session, name) for name in ("after", "again")] == [0, 96]
        await end_of(session, "stream")
        assert session.tokens("stream") == expected_tokens(PROMPT, 600, VOCAB)
        assert (await idle(worker)).integrity_ok
        assert worker.load().cached_blocks == 6, "only the blocks of the later prompts"


async def test_a_session_hears_that_the_cache_is_empty_although_no_step_follows() -> None:
    async with worker_of(fake_rank()) as (worker, session):
        await cached_tokens(session, "a")
        await follow(session, await cached(worker))
        assert await reset(worker) == [""]
        assert await cached(worker) == set()
        await follow(session, set())


async def test_what_another_worker_computed_before_is_not_cached() -> None:
    async with started(fake_rank(), fake_rank()) as running:
        old = await running.prefill()
        assert await reset(*running.workers) == ["", ""]
        await running.fetch(1, old)
        await running.check_tokens(1)
        assert [worker.load().cached_blocks for worker in running.workers] == [0, 0]
        new = await running.prefill(request_id="new")
        await running.fetch(1, new, request_id="new")
        await end_of(running.sessions[1], "new")
        for worker in running.workers:
            await idle(worker)
            assert worker.load().cached_blocks == 6


async def test_a_worker_that_starts_later_does_not_cache_what_is_older_than_the_reset() -> None:
    """It learns of the reset from the worker whose KV cache it fetches."""
    async with started(fake_rank(), fake_rank()) as running:
        assert await reset(running.workers[0]) == [""]
        handle = running.workers[0]._kv_handle(0)
        old = worker_pb2.KvHandle(epoch=1, last_reset=handle.last_reset)
        age = running.workers[1]._age
        assert age.allows(handle)
        assert not age.allows(old)


async def test_a_request_that_is_prepared_during_a_reset_enters_no_cache(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its adapter loads while the reset runs."""
    loads, may_end = asyncio.Event(), asyncio.Event()

    async def load(manager: RequestManager, _adapter: worker_pb2.Adapter) -> int:
        if not manager.limits.is_fallback:  # the decode worker
            loads.set()
            await may_end.wait()
        return 0

    monkeypatch.setattr(RequestManager, "load_adapter", load)
    adapter = worker_pb2.Adapter(fingerprint=b"f" * FINGERPRINT_BYTES)
    async with started(fake_rank(), fake_rank()) as running:
        old = await running.prefill(adapter=adapter)
        await running.fetch(1, old, adapter=adapter)
        await loads.wait()
        assert await reset(*running.workers) == ["", ""]
        may_end.set()
        await running.check_tokens(1)
        await idle(running.workers[1])
        assert running.workers[1].load().cached_blocks == 0
