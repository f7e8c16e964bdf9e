"""KV transfers and workers that fail in every way: each is noticed, none yields a wrong token,
nothing is left.
"""

import asyncio
import random
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from queue import Full
from typing import Any

import pytest

from tandem.proto import inference_pb2
from tandem.proto.errors import TandemError
from tandem.router.dispatch import execution
from tandem.router.dispatch.dispatcher import Dispatcher
from tandem.router.scheduling.admission import Admission
from tandem.tests.fleet import VOCAB, fake_rank, fleet
from tandem.tests.peers import IDENTITY
from tandem.tests.token_request import token_request
from tandem.tests.waits import WAIT
from tandem.tests.workers.engine.fake import FakeExecutor, expected_choices, expected_tokens
from tandem.workers.engine.engine import Engine
from tandem.workers.engine.plan import FirstTokens
from tandem.workers.engine.sequence import SequenceSpec, Task
from tandem.workers.serve.disk_tier import DiskTier
from tandem.workers.tp.rank import Rank
from tandem.workers.transfer import frames
from tandem.workers.transfer.connector import KvConnector
from tandem.workers.transfer.frames import Commit, Data, TransferError, TransferKey, decode, encode

NUM_AT_ONCE = 32

OF_DATA = ("repeat", "reorder", "wrong layer", "wrong token")
OF_ANY = ("corrupt", "truncate", "drop", "foreign", "epoch", "cut", "end")
RARE = ("stall",)  # each costs stall_seconds


class Injector:
    """Spoils one frame of most transfers, each in one of the ways above, and counts what it did."""

    def __init__(self, seed: int, limit: int) -> None:
        self.done: Counter[str] = Counter()
        self._random = random.Random(seed)
        self._limit = limit
        self._foreign: bytes | None = None  # a good frame of an earlier transfer

    @property
    def num_done(self) -> int:
        return self.done.total()

    async def __call__(self, frames: AsyncIterator[bytes]) -> AsyncGenerator[bytes, None]:
        position = self._random.randrange(16) if self._random.random() < 0.8 else None
        count = 0
        async for frame in frames:
            last = isinstance(decode(frame)[1], Commit)
            if position is None or self.num_done >= self._limit or not (count == position or last):
                yield frame
            else:
                position = None
                kind = self._choose(frame, last)
                self.done[kind] += 1
                if kind == "end":
                    return
                async for spoilt in self._spoil(kind, frame, frames):
                    yield spoilt
            self._foreign = self._foreign if last else frame
            count += 1

    def _choose(self, frame: bytes, last: bool) -> str:
        kinds = OF_ANY if last else OF_ANY + OF_DATA
        kind = self._random.choice(kinds + RARE if self._random.random() < 0.3 else kinds)
        if (kind == "drop" and last) or (kind == "foreign" and self._foreign is None):
            return "corrupt"  # a dropped commit is a stall by another name
        return kind

    async def _spoil(
        self, kind: str, frame: bytes, rest: AsyncIterator[bytes]
    ) -> AsyncGenerator[bytes, None]:
        """What goes out instead of `frame`; "reorder" takes one more of the stream."""
        key, message, payload = decode(frame)
        match kind:
            case "corrupt":
                bit = self._random.randrange(8 * len(frame))
                yield (
                    frame[: bit // 8]
                    + bytes([frame[bit // 8] ^ 1 << bit % 8])
                    + frame[bit // 8 + 1 :]
                )
            case "truncate":
                yield frame[: self._random.randrange(len(frame))]
            case "drop":
                pass
            case "foreign":
                assert self._foreign is not None
                assert decode(self._foreign)[0] != key
                yield self._foreign
            case "epoch":
                yield encode(
                    TransferKey(transfer_id=key.transfer_id, epoch=key.epoch + 1), message, payload
                )
            case "cut":
                raise TransferError("cut")
            case "stall":
                await asyncio.Event().wait()
            case "repeat":
                yield frame
                yield frame
            case "reorder":
                yield await anext(rest)
                yield frame
            case "wrong layer":
                assert isinstance(message, Data)
                yield encode(
                    key, replace(message, first_layer=(message.first_layer + 1) % 3), payload
                )
            case "wrong token":
                assert isinstance(message, Data)
                yield encode(key, replace(message, first_token=message.first_token + 1), payload)


@pytest.mark.parametrize("num_faults", [300, pytest.param(1000, marks=pytest.mark.soak)])
async def test_hundreds_of_faults_are_all_noticed(
    num_faults: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(KvConnector, "frame_bytes", 32 * 64)  # 32 tokens of one layer
    monkeypatch.setattr(execution, "MAX_TRANSFERS_LOST", 10**9)
    injector = Injector(seed=2, limit=num_faults)
    chance = random.Random(3)
    noticed = attempts = 0

    async with fleet(2, 2, frame_hook=injector, chunk_tokens=32, stall_seconds=5.0) as running:

        async def client() -> None:
            nonlocal noticed, attempts
            while injector.num_done < num_faults:
                prompt = [chance.randrange(VOCAB) for _ in range(chance.randrange(70, 160))]
                tokens, timeline = await running.generate(token_request(prompt, 4))
                assert tokens == expected_tokens(prompt, 4, VOCAB)
                noticed += timeline.attempts - 1
                attempts += timeline.attempts

        await asyncio.gather(*(client() for _ in range(NUM_AT_ONCE)))
        await running.check_idle()

    assert injector.num_done == num_faults == noticed
    assert caplog.text.count("KV transfer failed") == num_faults
    assert set(injector.done) == {*OF_DATA, *OF_ANY, *RARE}
    assert attempts > num_faults  # and transfers without a fault went through


async def test_without_the_checksum_the_executor_sees_the_wrong_cache(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The negative control: the test above detects a fault that passes the frames' checks."""
    monkeypatch.setattr(frames, "checksum_of", lambda data, before=0: 0)

    async def flip(frames: AsyncIterator[bytes]) -> AsyncGenerator[bytes, None]:
        async for frame in frames:
            is_data = isinstance(decode(frame)[1], Data)
            yield frame[:-1] + bytes([frame[-1] ^ 1]) if is_data else frame

    async with fleet(1, 1, frame_hook=flip) as running:
        tokens, _ = await running.generate(token_request(range(100), 4))
        assert tokens == expected_tokens(
            range(100), 4, VOCAB
        )  # of the prefill worker, which does all then
        broken = running.workers.pop()
        with pytest.raises(RuntimeError, match="has failed") as raised:
            broken.check_health()
        assert "KV of something else" in str(raised.value.__cause__)


@pytest.mark.parametrize("times", [1, 2, 1000])
async def test_a_request_survives_any_number_of_failed_transfers(times: int) -> None:
    left = times

    async def cut(frames: AsyncIterator[bytes]) -> AsyncGenerator[bytes, None]:
        nonlocal left
        async for frame in frames:
            if left:
                left -= 1
                raise TransferError("cut")
            yield frame

    async with fleet(1, 1, frame_hook=cut) as running:
        tokens, timeline = await running.generate(token_request(range(100), 4))
        assert tokens == expected_tokens(range(100), 4, VOCAB)
        assert timeline.attempts == 1 + min(times, execution.MAX_TRANSFERS_LOST)


@pytest.mark.parametrize("num_choices", [1, 3])
@pytest.mark.parametrize("fault", ["full", "transfer"])
async def test_another_decode_worker_takes_the_kv_cache_while_the_prefill_runs(
    fault: str, num_choices: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = [fake_rank(step_seconds=0.25), fake_rank(), fake_rank()]
    prefill, queue = ranks[0].executor, iter(ranks)
    assert isinstance(prefill, FakeExecutor)
    tasks: list[Task] = []
    steps: list[int] = []  # of the prefill worker, at each submit
    submit, prompt, left = Engine.submit, range(320), 1

    def record(engine: Engine, spec: SequenceSpec, submitted: float) -> None:
        nonlocal left
        tasks.append(spec.task)
        steps.append(prefill.num_steps)
        if len(steps) == 3:
            prefill.step_seconds = 0.0  # slow no longer
        if fault == "full" and spec.task is Task.DECODE and left:
            left -= 1
            raise Full
        submit(engine, spec, submitted)

    async def cut(frames: AsyncIterator[bytes]) -> AsyncGenerator[bytes, None]:
        nonlocal left
        async for frame in frames:
            if fault == "transfer" and left:
                left -= 1
                raise TransferError("cut")
            yield frame

    monkeypatch.setattr(Engine, "submit", record)
    async with fleet(
        1, 2, rank=lambda role: next(queue), frame_hook=cut, chunk_tokens=16
    ) as running:
        ids, timeline = await running.choices(token_request(prompt, 30, num_choices=num_choices))
    assert ids == expected_choices(prompt, num_choices, 30, VOCAB)
    assert tasks == [Task.PREFILL, Task.DECODE, Task.DECODE]
    assert timeline.attempts == 2
    assert steps[-1] < 320 / 16


@pytest.mark.parametrize("first_token", [VOCAB, 2**40])
async def test_a_commit_with_an_impossible_token_is_a_failed_transfer(
    first_token: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with fleet(1, 1) as running:
        monkeypatch.setattr(
            type(running.workers[0]._endpoint.sender),
            "complete",
            with_token(running.workers[0]._endpoint.sender.complete, first_token),
        )
        tokens, _ = await running.generate(token_request(range(50), 4))
        assert tokens == expected_tokens(range(50), 4, VOCAB)
        for worker in running.workers:
            worker.check_health()


def with_token(
    complete: Callable[[int, FirstTokens], None], token: int
) -> Callable[[object, int, FirstTokens], None]:
    return lambda exporter, sequence_id, opening: complete(
        sequence_id, replace(opening, tokens=(token,))
    )


async def test_requests_of_a_failed_decode_worker_continue_on_the_other() -> None:
    ranks = [fake_rank(), fake_rank(step_seconds=0.1), fake_rank(step_seconds=0.1)]
    executor = ranks[1].executor
    assert isinstance(executor, FakeExecutor)
    left = iter(ranks)
    async with fleet(1, 2, rank=lambda role: next(left)) as running:

        async def one(number: int) -> int:
            prompt = range(number, number + 50)
            tokens, timeline = await running.generate(token_request(prompt, 60))
            assert tokens == expected_tokens(prompt, 60, VOCAB)
            return timeline.attempts

        requests = [asyncio.create_task(one(number)) for number in range(8)]
        async with asyncio.timeout(WAIT):
            while executor.num_steps < 20:
                await asyncio.sleep(0.002)
        executor.fail_after_steps = 0
        running.hurry()
        attempts = await asyncio.gather(*requests)
        assert sorted(set(attempts)) == [1, 2]
        broken = running.workers.pop(1)
        with pytest.raises(RuntimeError, match="has failed"):
            broken.check_health()


async def test_without_another_worker_the_request_fails_in_the_end() -> None:
    async with fleet(0, 1) as running:
        admission = Admission(running.registry)
        running.dispatcher = Dispatcher(
            running.registry, admission, park_seconds=0.1, identity=IDENTITY
        )
        executor = running.workers[0]._rank.executor
        assert isinstance(executor, FakeExecutor)
        executor.fail_after_steps = 3
        with pytest.raises(TandemError, match="no worker is ready"):
            await running.generate(token_request(range(50), 60))
        running.workers.clear()
        await running.dispatcher.close()


@pytest.mark.parametrize(
    ("num_host_blocks", "has_disk"), [(0, False), (40, False), (0, True), (5, True)]
)
@pytest.mark.parametrize("prefill", [0, 1])
async def test_preempted_requests_get_exactly_their_tokens(
    prefill: int,
    num_host_blocks: int,
    has_disk: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What the fake model has computed in no time is read nevertheless."""
    monkeypatch.setattr(DiskTier, "_measure", lambda tier, bytes_per_second: None)
    disk: dict[str, Any] = {"kv_disk": str(tmp_path), "kv_disk_bytes": 2**20} if has_disk else {}

    def rank(role: str) -> Rank:
        return replace(fake_rank(num_blocks=14), num_host_blocks=num_host_blocks)

    async with fleet(prefill, 1, rank=rank, growth_tokens=16, **disk) as running:

        async def one(number: int) -> int:
            prompt = range(number, number + 30)
            tokens, timeline = await running.generate(token_request(prompt, 80))
            assert tokens == expected_tokens(prompt, 80, VOCAB)
            return timeline.attempts

        restores = num_host_blocks > 0 or has_disk
        restored = 0
        async with asyncio.timeout(WAIT):
            # On a busy machine a block may be needed again before it is on the disk.
            while not restored:
                assert sum(await asyncio.gather(*(one(number) for number in range(10)))) > 10
                restored = sum(status.num_restored_tokens for status in await running.statuses())
                if not restores:
                    break
        assert (restored > 0) == restores


@pytest.mark.parametrize("prefill", [0, 1])
async def test_preempted_choices_get_exactly_their_tokens(prefill: int) -> None:
    async with fleet(
        prefill, 1, rank=lambda role: fake_rank(num_blocks=30), growth_tokens=16
    ) as running:

        async def one(number: int) -> int:
            prompt = range(number, number + 30)
            ids, timeline = await running.choices(token_request(prompt, 70, num_choices=3))
            assert ids == expected_choices(prompt, 3, 70, VOCAB)
            return timeline.attempts

        assert sum(await asyncio.gather(*(one(number) for number in range(6)))) > 6


@pytest.mark.parametrize("beams", [False, True])
@pytest.mark.parametrize("steps", [1, 2, 3, 5, 8, 13, 21, 28])
async def test_choices_survive_their_worker_whenever_it_fails(steps: int, beams: bool) -> None:
    ranks = [fake_rank(step_seconds=0.001) for _ in range(3)]
    executor = ranks[1].executor
    assert isinstance(executor, FakeExecutor)
    executor.fail_after_steps = steps
    left = iter(ranks)
    search = (
        inference_pb2.BeamSearch(width=4, length_penalty=1.0, early_stopping=False)
        if beams
        else None
    )
    prompt = range(25)
    async with fleet(0, 1) as alone:
        request = token_request(prompt, 30, num_choices=4, beam_search=search)
        expected, _ = await alone.choices(request)
    async with fleet(1, 2, rank=lambda role: next(left)) as running:

        async def one() -> int:
            request = token_request(prompt, 30, num_choices=4, beam_search=search)
            ids, timeline = await running.choices(request)
            assert ids == expected
            return timeline.attempts

        attempts = await asyncio.gather(*(one() for _ in range(6)))
        broken = running.workers[1]
        assert max(attempts) > 1
        running.workers.remove(broken)
        with pytest.raises(RuntimeError, match="has failed"):
            broken.check_health()
    if not beams:
        assert expected == expected_choices(prompt, 4, 30, VOCAB)
