"""A worker's reports of its prefix cache: each change once, whenever the session began."""

import asyncio

from tandem.proto.hashing import hash_chain
from tandem.tests.fleet import VOCAB, fake_rank
from tandem.tests.peers import peer_channel
from tandem.tests.waits import WAIT
from tandem.tests.workers.engine.fake import expected_tokens
from tandem.tests.workers.raw_session import RawSession, ended, idle, submit, worker_of
from tandem.workers.serve.worker import Worker


def known(session: RawSession) -> set[bytes]:
    """The cached blocks by the messages read; each is stored only if it was absent and evicted only
    if present.
    """
    found: set[bytes] = set()
    for message in session.messages:
        assert found.isdisjoint(message.stored_blocks)
        assert found.issuperset(message.evicted_blocks)
        found = found.union(message.stored_blocks).difference(message.evicted_blocks)
    return found


async def cached(worker: Worker) -> set[bytes]:
    """What is cached, once no request is left to change it."""
    await idle(worker)
    hashes = set(worker._engine.requests.pool._block_of)
    assert len(hashes) == worker.load().cached_blocks
    return hashes


async def follow(session: RawSession, hashes: set[bytes]) -> None:
    """Reads until the session has reported exactly these."""
    async with asyncio.timeout(WAIT):
        while known(session) != hashes:
            assert await session.read() is not None


async def test_a_session_hears_of_what_comes_into_the_cache() -> None:
    async with worker_of(fake_rank()) as (worker, session):
        await session.send(submit(token_ids=range(40), max_tokens=25))
        await session.until(ended)
        hashes = await cached(worker)
        tokens = [*range(40), *expected_tokens(range(40), 24, VOCAB)]
        assert hashes == set(hash_chain(tokens, 16))
        await follow(session, hashes)


async def test_sessions_that_begin_at_any_time_know_the_same_cache() -> None:
    """While blocks come and go."""
    async with (
        worker_of(fake_rank(num_blocks=24, step_seconds=0.001)) as (worker, first),
        peer_channel(worker.address) as channel,
    ):
        sessions = [first]
        for number in range(30):
            await first.send(
                submit(str(number), token_ids=range(number, number + 60), max_tokens=30)
            )
            if number % 6 == 3:
                sessions.append(RawSession(channel))
            await first.until(ended)
        hashes = await cached(worker)
        assert any(message.evicted_blocks for message in first.messages)
        for session in sessions:
            await follow(session, hashes)
        late = RawSession(channel)
        await follow(late, hashes)
        assert len(late.messages) == 2  # the first only shows that the worker lives


async def test_tokens_that_are_computed_again_are_counted() -> None:
    async with worker_of(fake_rank()) as (worker, session):
        counts = []
        for name, first_index in (("new", 0), ("resumed", 3), ("cached", 3)):
            first = 0 if name == "new" else 50
            await session.send(
                submit(
                    name, token_ids=range(first, first + 40), max_tokens=4, first_index=first_index
                )
            )
            await session.until(ended)
            counts.append((await idle(worker)).num_recomputed_tokens)
        block = worker.info().block_size
        rest = 40 - 39 // block * block  # the last token is computed anyway
        assert counts == [0, 40, 40 + rest]


async def test_a_worker_without_a_prefix_cache_reports_nothing() -> None:
    async with worker_of(fake_rank(), prefix_caching=False) as (worker, session):
        await session.send(submit(token_ids=range(40)))
        await session.until(ended)
        assert await cached(worker) == set()
        assert not any(
            message.stored_blocks or message.evicted_blocks for message in session.messages
        )


async def test_what_the_directory_hears_of_a_worker() -> None:
    async with worker_of(fake_rank(), max_sequences=7, mixed_chunk_tokens=48) as (worker, session):
        assert worker.load().step_seconds == 0
        await session.send(submit())
        await session.until(ended)
        info = worker.info()
        assert (info.max_sequences, info.mixed_chunk_tokens) == (7, 48)
        assert 0 < info.load.step_seconds < WAIT
