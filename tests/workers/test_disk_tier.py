"""A worker with KV cache on disk: prefixes come back from it, also after a restart, and no fault of
it is one of a request.
"""

import asyncio
import functools
import logging
import os
import shutil
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import pytest

from tandem.cluster.config import load_config
from tandem.cluster.store.checked import checked_folder
from tandem.proto import worker_pb2
from tandem.proto.errors import InvalidArgument
from tandem.proto.hashing import hash_chain
from tandem.tests import service
from tandem.tests.fleet import VOCAB, fake_rank
from tandem.tests.peers import peer_channel
from tandem.tests.tiny import make_tiny_model
from tandem.tests.tiny_decoders import make_tiny_decoder
from tandem.tests.waits import WAIT
from tandem.tests.worker_config import worker_config
from tandem.tests.workers.engine.fake import FakeExecutor, FakeKv, expected_tokens
from tandem.tests.workers.raw_session import RawSession, ended, idle, submit, worker_of
from tandem.tests.workers.test_cache_reset import reset
from tandem.workers.engine.config import SpeculativeConfig
from tandem.workers.engine.events import Admitted
from tandem.workers.kv_cache.block_files import BlockFiles
from tandem.workers.kv_cache.tables import TableBlocks
from tandem.workers.model.footprint import kv_bytes_per_token
from tandem.workers.model.kv.store import PagedKv
from tandem.workers.model.loader import open_checkpoint
from tandem.workers.serve import disk_tier
from tandem.workers.serve.disk_tier import DiskTier, reports_of
from tandem.workers.serve.engine_thread import EngineThread
from tandem.workers.serve.worker import Worker
from tandem.workers.tp.kv_group import KvGroup
from tandem.workers.tp.rank_disk import RankDisk
from tandem.workers.tp.rank_server import RankServer

PROMPTS = [
    range(first, first + 100) for first in (0, 200, 400)
]  # of six full blocks and four tokens
MAX_TOKENS = 20
PAGE = 4_096


def on_disk(folder: Path, num_bytes: int = 2**20) -> dict[str, Any]:
    return {"kv_disk": str(folder), "kv_disk_bytes": num_bytes}


@dataclass(frozen=True)
class Served:
    """What serves: a real model on two ranks, or drafting; else a fake one, whose KV memory notices
    every misplaced byte.
    """

    tp: int
    model: Path
    drafts: bool = False  # with the model itself in the place of a smaller one

    @property
    def is_real(self) -> bool:
        return self.tp > 1 or self.drafts

    @functools.cache  # noqa: B019  as long as the model
    def answer_to(self, prompt: range) -> list[int]:
        if not self.is_real:
            return expected_tokens(prompt, MAX_TOKENS, VOCAB)
        return service.expected_tokens(self.model, [prompt], MAX_TOKENS)[0]

    @asynccontextmanager
    async def worker(
        self, folder: Path, *, num_bytes: int = 2**20, num_blocks: int = 256
    ) -> AsyncIterator[tuple[Worker, RawSession]]:
        """A worker, and a session to it."""
        if not self.is_real:
            async with worker_of(fake_rank(num_blocks), **on_disk(folder, num_bytes)) as found:
                yield found
            return
        block_bytes = 16 * kv_bytes_per_token(
            open_checkpoint(self.model).config, self.tp, "float32"
        )
        fields: dict[str, Any] = {"dtype": "float32", "kv_cache_bytes": num_blocks * block_bytes}
        if self.drafts:
            fields |= {
                "draft_model": str(self.model),
                "speculative": SpeculativeConfig(model=str(self.model)),
            }
        config = worker_config(str(self.model), **fields, **on_disk(folder, num_bytes))
        async with AsyncExitStack() as stack:
            ranks = [await RankServer.start(config.rank) for _ in range(1, self.tp)]
            for rank in ranks:
                stack.push_async_callback(rank.stop)
            worker = await Worker.start(
                config, worker_id="split", ranks=[rank.address for rank in ranks]
            )
            stack.push_async_callback(worker.stop)
            yield worker, RawSession(await stack.enter_async_context(peer_channel(worker.address)))
            await idle(worker)
            assert [rank.num_transfers for rank in ranks] == [0] * len(ranks)

    async def answer(self, session: RawSession, prompt: range, name: str = "") -> int:
        """Sends a prompt, checks its answer, and returns the number of its cached tokens."""
        name = name or str(prompt.start)
        await session.send(submit(name, token_ids=prompt, max_tokens=MAX_TOKENS, ignore_eos=True))
        await session.until(lambda output: output.request_id == name and ended(output))
        assert session.tokens(name) == self.answer_to(prompt)
        (admitted,) = [
            output.admitted for output in session.outputs(name) if output.HasField("admitted")
        ]
        return admitted.cached_tokens

    async def answers(self, session: RawSession, name: str = "") -> list[int]:
        """Has all prompts answered."""
        return [
            await self.answer(session, prompt, name and f"{name} {prompt.start}")
            for prompt in PROMPTS
        ]

    async def written(self, worker: Worker, prompt: range) -> None:
        """Waits until the blocks of a prompt and its answer are on disk."""
        chain = hash_chain([*prompt, *self.answer_to(prompt)[:-1]], 16)
        disk = worker._disk
        assert disk is not None
        async with asyncio.timeout(WAIT):
            while disk._writing is not None or any(digest not in disk for digest in chain):
                await asyncio.sleep(0.005)

    async def fill(self, folder: Path) -> None:
        """Leaves all prompts on disk, in an empty folder; a real model computes them once."""
        kept = self.model.parent / f"filled-{self.tp}-{self.drafts}"
        if self.is_real and kept.exists():
            shutil.copytree(kept, folder, dirs_exist_ok=True)
            return
        async with self.worker(folder) as (worker, session):
            for prompt in PROMPTS:
                assert await self.answer(session, prompt) == 0
                await self.written(worker, prompt)
        if self.is_real:
            shutil.copytree(folder, kept)

    def last_folder(self, folder: Path) -> Path:
        """That of the last rank."""
        return folder / ("decode-0" if self.tp == 1 else f"decode-rank{self.tp - 1}-0")

    def file_of(self, folder: Path, digest: bytes) -> Path:
        """The file of a block, of the last rank."""
        (path,) = self.last_folder(folder).glob(f"*-{digest.hex()}.kv")
        return path

    def is_last(self, files: BlockFiles) -> bool:
        """Whether these are the files of the last rank."""
        return (
            Path(os.readlink(f"/proc/self/fd/{files._folder}")).name
            == self.last_folder(Path()).name
        )


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny", num_attention_heads=8)


@pytest.fixture(params=[1, 2], ids=["tp1", "tp2"], scope="module")
def served(request: pytest.FixtureRequest, model: Path) -> Served:
    return Served(request.param, model)


@pytest.fixture(autouse=True)
def any_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is on disk is read, however fast a fake model computes."""
    monkeypatch.setattr(DiskTier, "_measure", lambda tier, bytes_per_second: None)


def sizes_of(folder: Path) -> list[int]:
    """Bytes on disk of each block."""
    return [-(-path.stat().st_size // PAGE) * PAGE for path in folder.rglob("*.kv")]


@pytest.mark.parametrize("num_blocks", [10, 256])
async def test_prefixes_come_back_after_a_restart(
    tmp_path: Path, served: Served, num_blocks: int
) -> None:
    await served.fill(tmp_path)
    async with served.worker(tmp_path, num_blocks=num_blocks) as (worker, session):
        assert await served.answers(session) == [96, 96, 96]
        status = await idle(worker)
        assert (status.num_restored_tokens, status.integrity_ok) == (3 * 96, True)
        if isinstance(executor := worker._rank.executor, FakeExecutor):
            assert executor.num_tokens == 3 * (4 + MAX_TOKENS - 1)


async def test_prefixes_come_back_that_have_left_the_kv_cache(
    tmp_path: Path, served: Served
) -> None:
    async with served.worker(tmp_path, num_blocks=10) as (worker, session):
        for prompt in PROMPTS:
            assert await served.answer(session, prompt) == 0
            await served.written(worker, prompt)
        assert await served.answers(session, "again") == [96, 96, 96]


async def test_a_session_hears_of_what_is_on_disk(tmp_path: Path, served: Served) -> None:
    await served.fill(tmp_path)
    chain = {digest for prompt in PROMPTS for digest in hash_chain(prompt, 16)}
    lost = hash_chain(PROMPTS[0], 16)[2]
    served.file_of(tmp_path, lost).unlink()
    async with served.worker(tmp_path) as (_, session):
        await served.answer(session, range(150, 190))
        stored = [digest for message in session.messages for digest in message.stored_blocks]
        assert chain - {lost} < set(stored)
        assert lost not in stored
        assert len(stored) == len(set(stored))


async def test_a_reset_removes_all_files_of_all_ranks(tmp_path: Path, served: Served) -> None:
    prompt = PROMPTS[0]
    await served.fill(tmp_path)
    async with served.worker(tmp_path) as (worker, session):
        assert await served.answer(session, prompt) == 96
        assert await reset(worker) == [""]
        assert sizes_of(tmp_path) == []
        assert await served.answer(session, prompt, "after") == 0
        await served.written(worker, prompt)
        assert await served.answer(session, prompt, "again") == 96


async def test_a_disk_that_refuses_a_reset_is_reported(
    tmp_path: Path, served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with served.worker(tmp_path) as (worker, session):
        assert await served.answer(session, PROMPTS[0]) == 0
        await served.written(worker, PROMPTS[0])
        with monkeypatch.context() as patch:

            def refuse(files: BlockFiles) -> None:
                raise OSError("read-only")

            patch.setattr(BlockFiles, "clear", refuse)
            assert await reset(worker) == [
                "some KV cache is left; the log of the worker has the reason"
            ]
        assert await reset(worker) == [""]
        assert sizes_of(tmp_path) == []


@pytest.mark.parametrize("size", [0, 50, 700])
async def test_damaged_files_are_computed_again(tmp_path: Path, served: Served, size: int) -> None:
    """Of the first prompt all are cut off, of the second that of its fourth block is changed, and
    of the third that is
    missing: of the last rank. Those that were noticed are then there again.
    """
    await served.fill(tmp_path)
    for digest in hash_chain(PROMPTS[0], 16):
        path = served.file_of(tmp_path, digest)
        path.write_bytes(path.read_bytes()[:size])
    path = served.file_of(tmp_path, hash_chain(PROMPTS[1], 16)[3])
    path.write_bytes(path.read_bytes()[:-1] + b"!")
    served.file_of(tmp_path, hash_chain(PROMPTS[2], 16)[1]).unlink()
    async with served.worker(tmp_path) as (worker, session):
        assert await served.answers(session) == [0, 48, 16]
        for prompt in PROMPTS:
            await served.written(worker, prompt)
    async with served.worker(tmp_path) as (_, session):
        assert await served.answers(session) == [16, 96, 96]


async def test_a_disk_that_hangs_is_given_up(
    tmp_path: Path, served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is written to the blocks when it answers at last, and meanwhile it is left alone."""
    await served.fill(tmp_path)
    go_on, asked, read = threading.Event(), threading.Semaphore(0), BlockFiles.read

    def hang(files: BlockFiles, digest: bytes) -> memoryview | None:
        if served.is_last(files):
            asked.release()
            assert go_on.wait(WAIT)
        return read(files, digest)

    monkeypatch.setattr(BlockFiles, "read", hang)
    monkeypatch.setattr(disk_tier, "_LOAD_SECONDS", 0.05)
    async with served.worker(tmp_path) as (_, session):
        assert await served.answers(session) == [0, 0, 0]
        go_on.set()
        assert asked.acquire(timeout=0)
        assert await served.answer(session, PROMPTS[0], "again") == 96


async def test_a_request_that_is_cancelled_while_it_reads_leaves_nothing(
    tmp_path: Path, served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    await served.fill(tmp_path)
    go_on, asked, read = threading.Event(), asyncio.Event(), BlockFiles.read
    loop = asyncio.get_running_loop()

    def hang(files: BlockFiles, digest: bytes) -> memoryview | None:
        if served.is_last(files):
            loop.call_soon_threadsafe(asked.set)
            assert go_on.wait(WAIT)
        return read(files, digest)

    monkeypatch.setattr(BlockFiles, "read", hang)
    async with served.worker(tmp_path) as (worker, session):
        await session.send(submit("a", token_ids=PROMPTS[0], max_tokens=MAX_TOKENS))
        async with asyncio.timeout(WAIT):
            await asked.wait()
        await session.send(worker_pb2.Cancel(request_id="a", attempt=1))
        await idle(worker)
        go_on.set()
        assert await served.answers(session) == [96, 96, 96]


async def test_a_disk_that_refuses_writes_costs_nothing_else(
    tmp_path: Path, served: Served, caplog: pytest.LogCaptureFixture
) -> None:
    async with served.worker(tmp_path) as (worker, session):
        shutil.rmtree(served.last_folder(tmp_path))
        with caplog.at_level(logging.WARNING):
            assert await served.answers(session) == [0, 0, 0]
            await idle(worker)
        assert (
            sum("KV cache on disk: writing failed" in record.message for record in caplog.records)
            == 1
        )


def without_memory(*place: object) -> None:
    """In the place of a copy of a GPU whose memory is full."""
    raise MemoryError("the GPU has no memory left to copy KV cache")


async def test_without_memory_for_a_copy_prefixes_on_disk_are_computed(
    tmp_path: Path, served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    await served.fill(tmp_path)
    monkeypatch.setattr(PagedKv if served.is_real else FakeKv, "write", without_memory)
    async with served.worker(tmp_path) as (_, session):
        assert await served.answers(session) == [0, 0, 0]


async def test_without_memory_for_a_copy_nothing_is_written_to_disk(
    tmp_path: Path, served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PagedKv if served.is_real else FakeKv, "read", without_memory)
    async with served.worker(tmp_path) as (worker, session):
        assert await served.answers(session) == [0, 0, 0]
        disk = worker._disk
        assert disk is not None
        async with asyncio.timeout(WAIT):
            while not disk._no_writes_before:
                await asyncio.sleep(0.005)
        assert await served.answer(session, PROMPTS[0], "again") == 96
    assert not sizes_of(tmp_path)


async def test_blocks_before_the_one_without_memory_are_filled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kv = part_of(1, 0)
    disk = RankDisk.open(str(tmp_path), "decode", kv, max_bytes=2**20)
    digests = digests_of(0, count=3)
    for digest in digests:
        await disk.write(digest, 0)
    monkeypatch.setattr(kv, "write", Mock(side_effect=[None, MemoryError("full"), None]))
    assert await disk.read(digests, [1, 2, 3]) == 1
    disk.files.close()


async def test_the_bound_holds_while_it_serves(tmp_path: Path, served: Served) -> None:
    """Over all ranks, of which each has room for five blocks."""
    await served.fill(tmp_path / "roomy")
    (file_bytes,) = set(sizes_of(tmp_path / "roomy"))
    num_bytes = 5 * served.tp * file_bytes
    for _ in range(2):
        async with served.worker(tmp_path / "small", num_bytes=num_bytes) as (worker, session):
            await served.answers(session)
            await idle(worker)
            assert worker._disk is not None
            async with asyncio.timeout(WAIT):
                while worker._disk._writing is not None:
                    await asyncio.sleep(0.005)
        assert sum(sizes_of(tmp_path / "small")) == num_bytes


async def test_files_of_another_split_are_not_read(tmp_path: Path, model: Path) -> None:
    """They count, and leave first; those of the ranks that are no more stay, within their share."""
    split, whole = Served(2, model), Served(1, model)
    await split.fill(tmp_path)
    share = sum(sizes_of(tmp_path / "decode-0"))
    async with whole.worker(tmp_path) as (worker, session):
        assert await whole.answers(session) == [0, 0, 0]
        for prompt in PROMPTS:
            await whole.written(worker, prompt)
        assert sum(sizes_of(tmp_path / "decode-0")) > share
    async with split.worker(tmp_path) as (_, session):
        assert await split.answers(session) == [96, 96, 96]


def test_each_rank_of_each_split_has_files_of_its_own(tmp_path: Path) -> None:
    names = set()
    for tp, rank in [(1, 0), (2, 0), (2, 1), (4, 0), (4, 1)]:
        disk = RankDisk.open(
            str(tmp_path / f"{tp}-{rank}"), "decode", part_of(tp, rank), max_bytes=2**20
        )
        disk.files.write(b"h" * 16, [memoryview(bytes(disk.block_bytes))])
        disk.files.close()
        (path,) = (tmp_path / f"{tp}-{rank}").rglob("*.kv")
        names.add(path.name)
    assert len(names) == 5


def part_of(tp: int, rank: int) -> FakeKv:
    kv = fake_rank().kv
    assert isinstance(kv, FakeKv)
    kv.tp, kv.rank = tp, rank
    return kv


async def test_a_rank_takes_the_folder_of_the_number_that_its_rank_0_has(
    tmp_path: Path, model: Path
) -> None:
    """One of two workers that share a disk restarts; its rank 0 cannot have the first folder."""
    split = Served(2, model)
    async with (
        split.worker(tmp_path) as (worker, session),
        split.worker(tmp_path) as (other, beside),
    ):
        assert await split.answer(session, PROMPTS[0]) == 0
        await split.written(worker, PROMPTS[0])
        for prompt in PROMPTS[1:]:
            assert await split.answer(beside, prompt) == 0
            await split.written(other, prompt)
    stranger = RankDisk.open(str(tmp_path), "decode", part_of(2, 0), max_bytes=2**20)
    async with split.worker(tmp_path) as (_, session):
        assert await split.answers(session) == [0, 96, 96]
    stranger.files.close()
    assert sorted(os.listdir(tmp_path)) == [
        "decode-0",
        "decode-1",
        "decode-rank1-0",
        "decode-rank1-1",
    ]


async def test_a_rank_whose_folder_cannot_be_used_ends_the_start_with_a_line(
    tmp_path: Path, model: Path
) -> None:
    (tmp_path / "decode-rank1-0").write_text("")
    with pytest.raises(ValueError, match=r"kv_disk: .*decode-rank1-0: Not a directory"):
        async with Served(2, model).worker(tmp_path):
            pass


@pytest.mark.parametrize("tp", [1, 2])
async def test_a_worker_that_drafts_brings_back_prefixes_and_drafts_after_them(
    tmp_path: Path, model: Path, tp: int
) -> None:
    """The draft model, whose KV cache is nowhere else, computes the prompts itself."""
    drafting = Served(tp, model, drafts=True)
    await drafting.fill(tmp_path)
    async with drafting.worker(tmp_path) as (worker, session):
        assert await drafting.answers(session) == [96, 96, 96]
        status = await idle(worker)
        assert status.num_restored_tokens == 3 * 96
        assert MAX_TOKENS < status.num_accepted_tokens == status.num_draft_tokens


async def test_what_is_computed_faster_is_not_read(tmp_path: Path) -> None:
    await Served(1, tmp_path).fill(tmp_path)
    chain = hash_chain(PROMPTS[0], 16)
    tier = await DiskTier.open(str(tmp_path), "decode", fake_rank().kv, 2**20)
    assert tier.count(chain, 0.0) == tier.count(chain, 1e-9) == 6  # nothing is known yet
    tier._bytes_per_second, tier._measured = tier._disk.block_bytes / 0.01, time.monotonic()
    assert [tier.count(chain, seconds) for seconds in (0.0, 0.001, 0.009, 0.011, 1.0)] == [
        6,
        0,
        0,
        6,
        6,
    ]
    assert tier.count([b"?" * 16, *chain], 1.0) == 0
    tier._measured -= 1e6  # so long ago that the disk may be another
    assert tier.count(chain, 0.001) == 6
    await tier.close()


def timed_tier(folder: Path, clock: Callable[[], float]) -> DiskTier:
    disk = RankDisk.open(str(folder), "decode", fake_rank().kv, max_bytes=2**20)
    return DiskTier(disk, 16, clock=clock)


async def test_a_long_prefix_is_read_as_far_as_time_allows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was read in time counts, and the disk serves the next prompt."""
    await Served(1, tmp_path).fill(tmp_path)
    chain = hash_chain(PROMPTS[0], 16)
    now, read = 0.0, BlockFiles.read

    def slow(files: BlockFiles, digest: bytes) -> memoryview | None:
        nonlocal now
        now += disk_tier._LOAD_SECONDS / 4
        return read(files, digest)

    monkeypatch.setattr(BlockFiles, "read", slow)
    tier = timed_tier(tmp_path, lambda: now)
    tier._num_read = 1
    asked = Admitted(
        id=1,
        queue_seconds=0.0,
        num_cached=0,
        tables=(TableBlocks(tuple(range(6))),),
        import_hashes=tuple(chain),
    )
    no_other_rank = cast(KvGroup, SimpleNamespace(read_disk=lambda number, blocks: []))
    assert await tier.load(asked, no_other_rank) == 4 * 16
    assert tier.count(chain, 0.0) == 6
    await tier.close()


async def test_no_more_is_promised_than_can_be_read_in_time(tmp_path: Path) -> None:
    await Served(1, tmp_path).fill(tmp_path)
    chain = hash_chain(PROMPTS[0], 16)
    tier = timed_tier(tmp_path, lambda: 0.0)
    for share, num_blocks in ((0.02, 6), (0.2, 4), (2.0, 1)):  # of the time, for one block
        seconds = share * disk_tier._LOAD_SECONDS
        tier._bytes_per_second = tier._disk.block_bytes / seconds
        assert tier.count(chain, 0.0) == tier.count(chain, 2 * seconds) == num_blocks
    await tier.close()


async def test_blocks_of_another_size_are_not_found(tmp_path: Path) -> None:
    """The files of another block size have other names, whatever their hashes are."""
    await Served(1, tmp_path).fill(tmp_path)
    tier = await DiskTier.open(str(tmp_path), "decode", fake_rank(block_size=32).kv, 2**20)
    assert tier.count(hash_chain(PROMPTS[0], 16), 1.0) == 0
    await tier.close()


class HeldEngine:
    """Has the blocks of some hashes cached, and answers commands as an engine's thread does, once
    it is let.
    """

    def __init__(self, cached: Iterable[bytes] = ()) -> None:
        self.go_on = asyncio.Event()
        self.leased: list[bytes] = []
        self.commands = 0
        self._cached = set(cached)

    async def call(self, command: Callable[[Any], object], timeout: float) -> None:
        async with asyncio.timeout(WAIT):
            await self.go_on.wait()
        self.commands += 1
        command(self)

    async def settle(self, timeout: float) -> None:
        pass

    def post(self, command: Callable[[Any], object]) -> None:
        command(self)

    def lease_cached(self, digests: Iterable[bytes]) -> list[tuple[int, bytes]]:
        found = [digest for digest in digests if digest in self._cached]
        self.leased += found
        return [(0, digest) for digest in found]

    def unlease_cached(self, blocks: list[int]) -> None:
        pass

    def as_thread(self) -> EngineThread:
        return cast(EngineThread, self)


def digests_of(step: int, count: int = 8) -> list[bytes]:
    return [step.to_bytes(8) + block.to_bytes(8) for block in range(count)]


@asynccontextmanager
async def held_tier(folder: Path) -> AsyncIterator[DiskTier]:
    tier = await DiskTier.open(str(folder), "decode", fake_rank().kv, 2**20)
    yield tier
    await tier.close()


async def all_written(tier: DiskTier) -> None:
    async with asyncio.timeout(WAIT):
        while tier._writing is not None:
            await asyncio.sleep(0.005)


async def test_blocks_of_the_newest_step_are_written_first_in_their_order(tmp_path: Path) -> None:
    """Through the reports of the cache, which keep the order of a prompt's blocks."""
    steps = [digests_of(step) for step in range(3)]
    engine = HeldEngine(digest for step in steps for digest in step)
    async with held_tier(tmp_path) as tier:
        reports = reports_of(tier, engine.as_thread())
        for step in steps:
            reports.change("memory", step, ())
        engine.go_on.set()
        await all_written(tier)
    assert engine.leased == [*steps[2], *steps[1], *steps[0]]


async def test_blocks_that_leave_the_kv_cache_do_not_wait_to_be_written(tmp_path: Path) -> None:
    engine = HeldEngine()
    async with held_tier(tmp_path) as tier:
        reports = reports_of(tier, engine.as_thread())
        for step in range(1_000):
            reports.change("memory", digests_of(step), digests_of(step - 1) if step else ())
        assert list(tier._unwritten) == digests_of(999)
        engine.go_on.set()


async def test_blocks_that_are_gone_do_not_hold_up_the_others(tmp_path: Path) -> None:
    """One command to the engine passes over all of them."""
    first, gone = digests_of(0, count=4), digests_of(1, count=100)
    engine = HeldEngine(first)
    async with held_tier(tmp_path) as tier:
        tier.keep(first, engine.as_thread())
        tier.keep(gone, engine.as_thread())
        engine.go_on.set()
        await all_written(tier)
        assert engine.leased == first
        assert engine.commands == 1


async def test_the_number_of_blocks_that_wait_is_bounded_and_the_oldest_leave(
    tmp_path: Path,
) -> None:
    engine = HeldEngine()
    bound = disk_tier._MAX_UNWRITTEN
    async with held_tier(tmp_path) as tier:
        for step in range(bound // 8 + 10):
            tier.keep(digests_of(step), engine.as_thread())
        assert len(tier._unwritten) == bound
        assert next(iter(tier._unwritten)) == digests_of(bound // 8 + 9)[0]
        assert digests_of(9)[0] not in tier._unwritten
        engine.go_on.set()


@pytest.mark.parametrize("kind", ["gemma3", "lfm2"])
async def test_a_model_with_windows_or_states_is_refused(tmp_path: Path, kind: str) -> None:
    """A block of one table does not tell whether the others, or a state, continue there."""
    make = make_tiny_model if kind == "gemma3" else make_tiny_decoder
    folder = make(tmp_path / kind, kind)
    refused = r"^kv_disk: needs a model without windows and states; leave it out$"
    config = worker_config(
        str(folder), kv_cache_bytes=2**22, kv_disk=str(tmp_path), kv_disk_bytes=2**20
    )
    with pytest.raises(ValueError, match=refused):
        await Worker.start(config, worker_id="w")
    checked = {"model": str(folder), "decode": {"kv_disk": str(tmp_path), "kv_disk_gb": 1}}
    with pytest.raises(InvalidArgument, match=r"^decode\.kv_disk: needs a model without windows"):
        checked_folder(load_config(None, checked))
