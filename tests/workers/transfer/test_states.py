"""States between tensor parallel groups of any two sizes: each part's heads arrive bit by bit, when
the last chunk has passed their layer.

The memory is numpy arrays in canonical form, because only the transfer is tested here.
"""

import asyncio
import itertools
from dataclasses import replace
from mmap import mmap
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from tandem.proto import worker_pb2
from tandem.tests.waits import WAIT
from tandem.tests.workers.transfer.played import EPOCH, Calls, handle, sender_of
from tandem.workers.engine.plan import FirstTokens
from tandem.workers.kv_cache.layout import CacheGroup, KvLayout, KvSpan, LayerGeometry, StatePart
from tandem.workers.kv_cache.sharding import kv_heads
from tandem.workers.kv_cache.store import Completed, KvRead, slots_of
from tandem.workers.kv_cache.tables import SequenceKv, TableBlocks, plan_tables
from tandem.workers.transfer.connector import TransferContext
from tandem.workers.transfer.frames import FetchTarget, TransferError, TransferKey
from tandem.workers.transfer.receiver import KvReceiver
from tandem.workers.transfer.sender import KvSender

Bytes = npt.NDArray[np.uint8]

NUM_TOKENS, NUM_BLOCKS, NUM_STATES, BLOCK_SIZE = 21, 4, 3, 8
KEY = TransferKey(transfer_id=b"0123456789abcdef", epoch=EPOCH)

ATTENTION = LayerGeometry(num_heads=4, num_kv_heads=2, head_dim=8)
# The gated delta net: 4 key heads, 8 value heads; the inputs of query and key are two planes.
DELTA = LayerGeometry(
    num_heads=0,
    num_kv_heads=0,
    head_dim=0,
    states=(
        StatePart(name="matrix", num_heads=8, num_kv_heads=8, row=6),
        StatePart(name="conv_key", num_heads=4, num_kv_heads=4, planes=2, row=3, dtype="bfloat16"),
        StatePart(name="conv_value", num_heads=8, num_kv_heads=8, row=3, dtype="bfloat16"),
    ),
)
# Mamba 2: B and C of two groups, which four ranks hold twice.
MAMBA = LayerGeometry(
    num_heads=0,
    num_kv_heads=0,
    head_dim=0,
    states=(
        StatePart(name="matrix", num_heads=8, num_kv_heads=8, row=5),
        StatePart(name="conv_bc", num_heads=8, num_kv_heads=2, planes=2, row=4, dtype="bfloat16"),
    ),
)
LAYERS = (DELTA, MAMBA, ATTENTION, DELTA, MAMBA)
LAYOUT = KvLayout(layers=LAYERS, dtype="bfloat16", model="m")


class ArrayKv:
    """Implements `KvStore`: of each group an array [layer, plane, place, slot, bytes of a row]."""

    shared_fd = None

    def __init__(self, layout: KvLayout, tp: int, rank: int) -> None:
        self.layout, self.tp, self.rank = layout, tp, rank
        self.num_blocks, self.block_size = NUM_BLOCKS, BLOCK_SIZE
        self.tables = plan_tables(layout, BLOCK_SIZE)
        self.slots = slots_of(layout, tp, rank)
        noise = np.random.default_rng(100 + rank)
        self.arrays: list[Bytes] = []
        for group, num_slots in zip(layout.groups, self.slots, strict=True):
            part = group.part
            places = NUM_STATES if part.state else NUM_BLOCKS * BLOCK_SIZE
            shape = (len(group.layers), part.planes, places, num_slots, part.row_bytes)
            self.arrays.append(noise.integers(0, 256, shape, np.uint8))

    def num_slots(self, group: int) -> int:
        """See `KvStore.num_slots`."""
        return self.slots[group]

    def attach(self, memory: mmap, **sizes: int) -> KvRead:
        """Raises ValueError: this memory cannot be mapped."""
        raise ValueError("not shared")

    def _index(self, table: TableBlocks, span: KvSpan) -> tuple[Any, ...]:
        size = 1 if self.layout.groups[span.group].part.state else BLOCK_SIZE
        span.check(self.layout, tokens=table.tokens(size), num_slots=self.slots)
        tokens = np.arange(span.first_token, span.first_token + span.num_tokens)
        places = np.array(table.blocks)[tokens // size - table.first] * size + tokens % size
        layers = slice(span.first_layer, span.first_layer + span.num_layers)
        return layers, slice(None), places, slice(span.first_slot, span.first_slot + span.num_slots)

    def read(self, table: TableBlocks, span: KvSpan) -> Completed[memoryview]:
        """See `KvStore.read`."""
        found = np.ascontiguousarray(self.arrays[span.group][self._index(table, span)])
        return Completed(found.reshape(-1).data)

    def write(self, table: TableBlocks, span: KvSpan, data: memoryview) -> None:
        """See `KvStore.write`."""
        index = self._index(table, span)
        array = self.arrays[span.group]
        array[index] = np.frombuffer(data, np.uint8).reshape(array[index].shape)


class Groups:
    """A group that sends a sequence, of which every rank has its heads, and one that receives."""

    def __init__(self, layout: KvLayout, source_tp: int, target_tp: int) -> None:
        self.layout = layout
        numbers = np.random.default_rng(1)
        self.whole: list[Bytes] = []  # of each group: [layer, plane, token, head, bytes of a row]
        for group in layout.groups:
            part = group.part
            num_tokens = 1 if part.state else NUM_TOKENS
            shape = (
                len(group.layers),
                part.planes,
                num_tokens,
                part.num_kv_heads,
                part.row_bytes,
            )
            self.whole.append(numbers.integers(0, 256, shape, np.uint8))
        self.source = SequenceKv((TableBlocks((3, 0, 1)),), 2)
        self.target = SequenceKv((TableBlocks((2, 1, 3)),), 0)
        self.released: list[int] = []
        self.senders = [self._sender(source_tp, rank) for rank in range(source_tp)]
        self.endpoints = [f"rank {rank}" for rank in range(source_tp)]
        self.stores = [ArrayKv(layout, target_tp, rank) for rank in range(target_tp)]
        self.receivers = [self._receiver(store) for store in self.stores]

    def _sender(self, tp: int, rank: int) -> KvSender:
        store = ArrayKv(self.layout, tp, rank)
        for number, group in enumerate(self.layout.groups):
            part = self.whole[number][:, :, :, self.heads(group, tp, rank)]
            span = _span(store, number)
            table = self.source.table(store.tables, group)
            store.write(table, span, np.ascontiguousarray(part).reshape(-1).data)
        sender = sender_of(store, (), self.released, lease_seconds=None if rank else 30)
        sender.offer(1, KEY.transfer_id, self.source, NUM_TOKENS, b"hash")
        return sender

    def _receiver(self, store: ArrayKv) -> KvReceiver:
        calls = Calls(dict(zip(self.endpoints, self.senders, strict=True)))
        return KvReceiver(TransferContext(kv=store), stall_seconds=WAIT, channel=calls.channel)

    def heads(self, group: CacheGroup, tp: int, rank: int) -> list[int]:
        return list(kv_heads(group.part.num_heads, group.part.num_kv_heads, tp, rank))

    def complete(self) -> None:
        for sender in self.senders:
            sender.progress(1, NUM_TOKENS)
            sender.complete(1, FirstTokens(tokens=(42,)))

    async def fetch(self, rank: int, num_cached: int = 0) -> worker_pb2.KvReceived:
        target: asyncio.Future[FetchTarget] = asyncio.get_running_loop().create_future()
        target.set_result(FetchTarget(self.target, num_cached))
        offered = handle(KEY, self.endpoints, self.layout, NUM_TOKENS)
        async with self.receivers[rank].fetch(offered, b"hash", target) as (_, received):
            return received

    def differing(self, rank: int) -> set[str]:
        """Names the states and the tokens of which a target rank has something else."""
        store = self.stores[rank]
        found: set[str] = set()
        for number, group in enumerate(self.layout.groups):
            table = self.target.table(store.tables, group)
            data = store.read(table, _span(store, number)).result
            expected = self.whole[number][:, :, :, self.heads(group, store.tp, rank)]
            if data != np.ascontiguousarray(expected).reshape(-1).data:
                found.add(group.part.state or "tokens")
        return found


def _span(store: ArrayKv, group: int) -> KvSpan:
    """All of a sequence in a group."""
    found = store.layout.groups[group]
    return KvSpan(
        group=group,
        first_layer=0,
        num_layers=len(found.layers),
        first_token=0,
        num_tokens=1 if found.part.state else NUM_TOKENS,
        first_slot=0,
        num_slots=store.slots[group],
    )


@pytest.mark.parametrize(("source_tp", "target_tp"), list(itertools.product((1, 2, 4), repeat=2)))
async def test_every_part_of_a_state_arrives(source_tp: int, target_tp: int) -> None:
    groups = Groups(LAYOUT, source_tp, target_tp)
    groups.complete()
    received = await asyncio.gather(*(groups.fetch(rank) for rank in range(target_tp)))
    assert [groups.differing(rank) for rank in range(target_tp)] == [set()] * target_tp
    for rank, part in enumerate(received):
        store = groups.stores[rank]
        sizes = [_span(store, number).size(LAYOUT) for number in range(len(LAYOUT.groups))]
        assert part.transfer_bytes == sum(sizes)


async def test_states_come_with_a_prompt_that_is_cached() -> None:
    groups = Groups(LAYOUT, 2, 1)
    groups.complete()
    received = await groups.fetch(0, NUM_TOKENS)
    assert groups.differing(0) == {"tokens"}
    assert received.transfer_bytes == LAYOUT.bytes_per_state


async def test_a_state_leaves_when_the_last_chunk_has_passed_its_layer() -> None:
    groups = Groups(LAYOUT, 1, 1)
    fetching = asyncio.create_task(groups.fetch(0))
    (sender,) = groups.senders
    matrices = next(
        number for number, group in enumerate(LAYOUT.groups) if group.part.state == "conv_key"
    )  # of the layers 0 and 3

    def arrived(layer: int) -> bool:
        array = groups.stores[0].arrays[matrices][layer, :, 0]
        return bool((array == groups.whole[matrices][layer, :, 0]).all())

    for num_ready, num_ahead, num_layers, expected in (
        (8, 16, 5, (False, False)),  # not the last chunk
        (16, NUM_TOKENS, 0, (False, False)),
        (16, NUM_TOKENS, 1, (True, False)),
        (16, NUM_TOKENS, 4, (True, True)),
    ):
        sender.progress(1, num_ready, num_ahead, num_layers)
        async with asyncio.timeout(WAIT):
            while (arrived(0), arrived(1)) != expected:
                await asyncio.sleep(0)
        for _ in range(50):  # nothing more comes
            await asyncio.sleep(0)
        assert (arrived(0), arrived(1)) == expected
    assert not fetching.done()
    groups.complete()
    async with asyncio.timeout(WAIT):
        await fetching
    assert groups.differing(0) == set()


@pytest.mark.parametrize(("source_tp", "target_tp"), [(1, 2), (2, 1), (4, 2)])
async def test_query_key_and_value_split_as_one_would_be_found(
    source_tp: int, target_tp: int
) -> None:
    """The control: runs of channels of the joined row as heads give a rank other channels."""
    joined = StatePart(name="conv", num_heads=4, num_kv_heads=4, row=12, dtype="bfloat16")
    layout = replace(LAYOUT, layers=(replace(DELTA, states=(joined,)), ATTENTION))
    groups = Groups(layout, source_tp, target_tp)

    def channels(tp: int, rank: int) -> list[int]:
        """The runs of the joined row, 4 + 4 + 8 of 3 channels, with which a rank computes."""
        query = range(4 * rank // tp, 4 * (rank + 1) // tp)
        value = range(8 * rank // tp, 8 * (rank + 1) // tp)
        return [*query, *(4 + run for run in query), *(8 + run for run in value)]

    number = next(i for i, group in enumerate(layout.groups) if group.part.state)
    row = np.random.default_rng(3).integers(0, 256, (16, 6), np.uint8)  # [run, bytes]
    for rank, sender in enumerate(groups.senders):
        store = sender.context.kv
        own = row[channels(source_tp, rank)]
        assert isinstance(store, ArrayKv)
        store.arrays[number][0, 0, 2] = own.reshape(store.slots[number], -1)
    groups.complete()
    await asyncio.gather(*(groups.fetch(rank) for rank in range(target_tp)))
    wrong = [
        (store.arrays[number][0, 0, 0].reshape(-1, 6) != row[channels(target_tp, rank)]).any()
        for rank, store in enumerate(groups.stores)
    ]
    assert any(wrong)


async def test_a_sequence_without_a_state_is_not_sent() -> None:
    groups = Groups(LAYOUT, 1, 1)
    (sender,) = groups.senders
    sender.withdraw(1)
    sender.offer(1, KEY.transfer_id, SequenceKv(groups.source.tables), NUM_TOKENS, b"hash")
    groups.complete()
    with pytest.raises(TransferError, match="stream broke"):
        await groups.fetch(0)
    assert groups.released == []
