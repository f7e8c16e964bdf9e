"""A worker with KV cache on disk: prefixes come back from it, also after a restart, and no fault of it is one of a
request."""

import asyncio
import logging
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from tandem.proto import worker_pb2
from tandem.proto.hashing import hash_chain
from tandem.tests.fleet import VOCAB, fake_rank
from tandem.tests.workers.engine.fake import FakeExecutor, expected_tokens
from tandem.tests.workers.raw_session import RawSession, ended, idle, submit, worker_of
from tandem.workers import disk_tier
from tandem.workers.disk_tier import DiskTier
from tandem.workers.kv_cache.block_files import BlockFiles
from tandem.workers.worker import Worker

PROMPTS = [range(first, first + 100) for first in (0, 200, 400)]  # of six full blocks and four tokens
MAX_TOKENS = 20


def on_disk(folder: Path, num_bytes: int = 2**20) -> dict[str, Any]:
    return {"kv_disk": str(folder), "kv_disk_bytes": num_bytes}


async def answer(session: RawSession, prompt: range, name: str = "") -> int:
    """Has a prompt answered, which must be right; returns how many of its tokens were cached."""
    name = name or str(prompt.start)
    await session.send(submit(name, token_ids=prompt, max_tokens=MAX_TOKENS))
    await session.until(lambda output: output.request_id == name and ended(output))
    assert session.tokens(name) == expected_tokens(prompt, MAX_TOKENS, VOCAB)
    (admitted,) = [output.admitted for output in session.outputs(name) if output.HasField("admitted")]
    return admitted.cached_tokens


async def written(worker: Worker, prompt: range) -> None:
    """Waits until the blocks of a prompt and its answer are on disk."""
    chain = hash_chain([*prompt, *expected_tokens(prompt, MAX_TOKENS - 1, VOCAB)], 16)
    assert worker._disk is not None
    async with asyncio.timeout(10):
        while worker._disk._writing is not None or any(digest not in worker._disk._files for digest in chain):
            await asyncio.sleep(0.005)


@pytest.fixture(autouse=True)
def any_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is on disk is read, however fast a fake model computes."""
    monkeypatch.setattr(DiskTier, "_measure", lambda tier, bytes_per_second: None)


def file_of(folder: Path, digest: bytes) -> Path:
    (path,) = folder.rglob(f"*-{digest.hex()}.kv")
    return path


def size_of(folder: Path) -> int:
    """Bytes on disk of all blocks."""
    return sum(-(-path.stat().st_size // 4_096) * 4_096 for path in folder.rglob("*.kv"))


async def fill(folder: Path) -> None:
    """Leaves all prompts on disk."""
    async with worker_of(fake_rank(), **on_disk(folder)) as (worker, session):
        for prompt in PROMPTS:
            assert await answer(session, prompt) == 0
            await written(worker, prompt)


@pytest.mark.parametrize("num_blocks", [10, 256])
async def test_prefixes_come_back_after_a_restart(tmp_path: Path, num_blocks: int) -> None:
    await fill(tmp_path)
    async with worker_of(fake_rank(num_blocks=num_blocks), **on_disk(tmp_path)) as (worker, session):
        assert [await answer(session, prompt) for prompt in PROMPTS] == [96, 96, 96]
        status = await idle(worker)
        executor = worker._rank.executor
        assert isinstance(executor, FakeExecutor)
        assert executor.num_tokens == 3 * (4 + MAX_TOKENS - 1)
        assert (status.num_restored_tokens, status.integrity_ok) == (3 * 96, True)


async def test_prefixes_come_back_that_have_left_the_kv_cache(tmp_path: Path) -> None:
    async with worker_of(fake_rank(num_blocks=10), **on_disk(tmp_path)) as (worker, session):
        for prompt in PROMPTS:
            assert await answer(session, prompt) == 0
            await written(worker, prompt)
        assert [await answer(session, prompt, f"again {prompt.start}") for prompt in PROMPTS] == [96, 96, 96]


async def test_a_session_hears_of_what_is_on_disk(tmp_path: Path) -> None:
    await fill(tmp_path)
    chain = {digest for prompt in PROMPTS for digest in hash_chain(prompt, 16)}
    async with worker_of(fake_rank(), **on_disk(tmp_path)) as (_, session):
        await answer(session, range(600, 640))
        stored = [digest for message in session.messages for digest in message.stored_blocks]
        assert chain < set(stored)
        assert len(stored) == len(set(stored))


@pytest.mark.parametrize("size", [0, 50, 700])
async def test_damaged_files_are_computed_again(tmp_path: Path, size: int) -> None:
    """Of the first prompt all are cut off, of the second that of its fourth block is changed."""
    await fill(tmp_path)
    for digest in hash_chain(PROMPTS[0], 16):
        path = file_of(tmp_path, digest)
        path.write_bytes(path.read_bytes()[:size])
    path = file_of(tmp_path, hash_chain(PROMPTS[1], 16)[3])
    path.write_bytes(path.read_bytes()[:-1] + b"!")
    async with worker_of(fake_rank(), **on_disk(tmp_path)) as (_, session):
        assert [await answer(session, prompt) for prompt in PROMPTS] == [0, 48, 96]


async def test_a_disk_that_hangs_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is written to the blocks when it answers at last, and meanwhile it is left alone."""
    await fill(tmp_path)
    go_on, asked, read = threading.Event(), threading.Semaphore(0), BlockFiles.read

    def hang(files: BlockFiles, digest: bytes) -> memoryview | None:
        asked.release()
        assert go_on.wait(60)
        return read(files, digest)

    monkeypatch.setattr(BlockFiles, "read", hang)
    monkeypatch.setattr(disk_tier, "_LOAD_SECONDS", 0.05)
    async with worker_of(fake_rank(), **on_disk(tmp_path)) as (_, session):
        assert [await answer(session, prompt) for prompt in PROMPTS] == [0, 0, 0]
        go_on.set()
        assert asked.acquire(timeout=0)
        assert await answer(session, PROMPTS[0], "again") == 96


async def test_a_request_that_is_cancelled_while_it_reads_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await fill(tmp_path)
    go_on, asked, read = threading.Event(), asyncio.Event(), BlockFiles.read
    loop = asyncio.get_running_loop()

    def hang(files: BlockFiles, digest: bytes) -> memoryview | None:
        loop.call_soon_threadsafe(asked.set)
        assert go_on.wait(60)
        return read(files, digest)

    monkeypatch.setattr(BlockFiles, "read", hang)
    async with worker_of(fake_rank(), **on_disk(tmp_path)) as (worker, session):
        await session.send(submit("a", token_ids=PROMPTS[0], max_tokens=MAX_TOKENS))
        async with asyncio.timeout(10):
            await asked.wait()
        await session.send(worker_pb2.Cancel(request_id="a", attempt=1))
        await idle(worker)
        go_on.set()
        assert [await answer(session, prompt) for prompt in PROMPTS] == [96, 96, 96]


async def test_a_disk_that_refuses_writes_costs_nothing_else(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with worker_of(fake_rank(), **on_disk(tmp_path)) as (worker, session):
        shutil.rmtree(tmp_path / "decode-0")
        with caplog.at_level(logging.WARNING):
            assert [await answer(session, prompt) for prompt in PROMPTS] == [0, 0, 0]
            await idle(worker)
        assert sum("KV cache on disk: writing failed" in record.message for record in caplog.records) == 1


async def test_the_bound_holds_while_it_serves(tmp_path: Path) -> None:
    num_bytes = 5 * 4_096
    async with worker_of(fake_rank(), **on_disk(tmp_path, num_bytes)) as (worker, session):
        for prompt in PROMPTS:
            await answer(session, prompt)
        await idle(worker)
    assert 0 < size_of(tmp_path) <= num_bytes


async def test_what_is_computed_faster_is_not_read(tmp_path: Path) -> None:
    await fill(tmp_path)
    chain = hash_chain(PROMPTS[0], 16)
    tier = DiskTier.open(str(tmp_path), "decode", fake_rank().kv, 2**20)
    assert tier.count(chain, 0.0) == tier.count(chain, 1e-9) == 6  # nothing is known yet
    tier._bytes_per_second, tier._measured = tier._block_bytes / 0.01, time.monotonic()
    assert [tier.count(chain, seconds) for seconds in (0.0, 0.001, 0.009, 0.011, 1.0)] == [6, 0, 0, 6, 6]
    assert tier.count([b"?" * 16, *chain], 1.0) == 0
    tier._measured -= 1e6  # so long ago that the disk may be another
    assert tier.count(chain, 0.001) == 6
    await tier.close()


async def test_blocks_of_another_size_are_not_found(tmp_path: Path) -> None:
    """The files of another block size have other names, whatever their hashes are."""
    await fill(tmp_path)
    tier = DiskTier.open(str(tmp_path), "decode", fake_rank(block_size=32).kv, 2**20)
    assert tier.count(hash_chain(PROMPTS[0], 16), 1.0) == 0
    await tier.close()
