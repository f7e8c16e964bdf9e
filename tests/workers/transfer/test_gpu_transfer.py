"""Transfers between two GPUs that are played: by gRPC through host memory, and by NCCL without
it.
"""

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import torch

from tandem.tests.waits import WAIT
from tandem.tests.workers.spans import span
from tandem.tests.workers.stream_model import (
    Event,
    RecordingOrder,
    StreamModel,
    put_on_gpu,
    run_out_of_memory,
)
from tandem.tests.workers.transfer.played_nccl import play_nccl
from tandem.tests.workers.transfer.test_connections import NUM_BLOCKS, NUM_TOKENS, Two, memory, two
from tandem.workers.host.streams import DeviceData, EventWaiter, device_checksum
from tandem.workers.kv_cache.layout import KvSpan
from tandem.workers.kv_cache.tables import TableBlocks
from tandem.workers.model.kv.gpu import GpuKv
from tandem.workers.model.kv.store import PagedKv
from tandem.workers.transfer.frames import TransferError


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> StreamModel:
    played = StreamModel()
    play_nccl(monkeypatch, played)
    # The test reads host memory, which stands for the GPU's, without the streams.
    monkeypatch.setattr(Two, "cache", lambda pair, number=0: _bytes(pair, pair.target, number))
    monkeypatch.setattr(Two, "whole", lambda pair, number=0: _bytes(pair, pair.source, number))
    return played


def _bytes(pair: Two, kv: PagedKv, number: int) -> bytes:
    blocks = torch.tensor(pair.blocks(number))
    tokens = kv.data.index_select(2, blocks).transpose(3, 4).flatten(2, 3)[:, :, :NUM_TOKENS]
    return tokens.contiguous().view(torch.uint8).numpy().tobytes()


@asynccontextmanager
async def between_gpus(model: StreamModel, transports: tuple[str, ...]) -> AsyncIterator[Two]:
    """Steps that never end are queued on both."""
    async with two(transports=transports) as pair:
        for kv, end in ((pair.source, pair.sending), (pair.target, pair.receiving)):
            end.sender.context.device = "cuda:0"
            put_on_gpu(kv, RecordingOrder(NUM_BLOCKS, model))
        model.launch("step")
        yield pair


@pytest.mark.parametrize("transport", ["grpc", "nccl"])
async def test_no_step_delays_a_transfer(model: StreamModel, transport: str) -> None:
    transports = () if transport == "grpc" else (transport,)
    async with between_gpus(model, transports) as pair:
        for number in range(3):
            fetched = await pair.move(number)  # which checks the bytes
            assert (fetched.transport, fetched.transfer_bytes) == (
                transport,
                len(pair.whole(number)),
            )
        model.launch("step")
        kinds = {each.kind for each in model.operations}
        assert kinds == {"step", "read", "write"} | ({"message"} if transports else set())
        model.check()


async def test_nccl_uses_no_host_memory(
    model: StreamModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(kv: GpuKv, table: TableBlocks, part: KvSpan) -> None:
        raise AssertionError("a read into host memory")

    monkeypatch.setattr(GpuKv, "read", refuse)
    async with between_gpus(model, ("nccl",)) as pair:
        assert (await pair.move()).transport == "nccl"


async def test_a_message_with_a_wrong_checksum_is_not_taken(
    model: StreamModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    true = GpuKv.gather

    async def damaged(kv: GpuKv, table: TableBlocks, part: KvSpan) -> DeviceData:
        data = await true(kv, table, part)
        data.tensor[7] ^= 4
        return data

    async with between_gpus(model, ("nccl",)) as pair:
        monkeypatch.setattr(GpuKv, "gather", damaged)
        assert (await pair.move()).transport == "grpc"
        assert pair.used == []


@pytest.mark.parametrize("at", [0, 1])  # the sender's read, the receiver's write
async def test_a_gpu_without_memory_for_a_frame_fails_one_transfer(
    model: StreamModel, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    async with between_gpus(model, ()) as pair:
        run_out_of_memory(monkeypatch, at)
        with pytest.raises(TransferError):
            await pair.move(0)
        assert (await pair.move(1)).transport == "grpc"


async def test_the_event_loop_runs_while_the_gpu_reads(
    model: StreamModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = threading.Event()
    in_time: list[bool] = []
    monkeypatch.setattr(Event, "synchronize", lambda event: in_time.append(ended.wait(WAIT)))
    kv = memory(1)
    put_on_gpu(kv, RecordingOrder(NUM_BLOCKS, model))
    reading = asyncio.ensure_future(kv.read(TableBlocks((3, 1)), span(kv, 0, 8)))
    await asyncio.sleep(0)
    assert not reading.done()
    ended.set()
    assert (await reading).nbytes == span(kv, 0, 8).size(kv.layout)
    assert in_time == [True]


async def test_an_error_in_a_waiting_thread_reaches_the_caller(model: StreamModel) -> None:
    """More often than there are threads."""

    def fail() -> None:
        raise ValueError("no result")

    waiter = EventWaiter()
    for _ in range(9):
        with pytest.raises(ValueError, match="no result"):
            async with asyncio.timeout(WAIT):
                await waiter.wait(Event(model), fail)


def test_each_changed_or_exchanged_word_changes_the_checksum() -> None:
    data = torch.randint(0, 256, (64,), dtype=torch.uint8)
    right = int(device_checksum(data))
    assert 0 <= right < 2**32
    for place in range(64):
        for bit in (1, 128):
            damaged = data.clone()
            damaged[place] ^= bit
            assert int(device_checksum(damaged)) != right
    exchanged = data.view(torch.int32).roll(1).view(torch.uint8)
    assert int(device_checksum(exchanged)) != right
