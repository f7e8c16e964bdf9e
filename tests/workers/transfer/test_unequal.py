"""KV cache between tensor-parallel groups of any two sizes: every rank gets its heads, bit by bit,
from any source.
"""

import asyncio
import itertools
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt
import pytest
import torch

from tandem.proto import worker_pb2
from tandem.tests.waits import WAIT
from tandem.tests.workers.spans import read_now, span
from tandem.tests.workers.transfer import fake_nixl
from tandem.tests.workers.transfer.played import (
    EPOCH,
    Calls,
    handle,
    sender_of,
)
from tandem.tests.workers.transfer.played_ipc import play_ipc
from tandem.workers.engine.plan import FirstTokens
from tandem.workers.kv_cache.layout import KvLayout, LayerGeometry
from tandem.workers.kv_cache.reshard import plan
from tandem.workers.kv_cache.sharding import kv_heads
from tandem.workers.kv_cache.tables import SequenceKv, TableBlocks, plan_tables, spec_of
from tandem.workers.model.kv.store import PagedKv
from tandem.workers.transfer import nixl_agent
from tandem.workers.transfer.connector import KvConnector, TransferContext
from tandem.workers.transfer.frames import Ack, FetchTarget, Open, Pull, TransferError, TransferKey
from tandem.workers.transfer.receiver import KvReceiver
from tandem.workers.transfer.sender import KvSender

Bytes = npt.NDArray[np.uint8]

LAYERS, HEAD_DIM, NUM_TOKENS, NUM_BLOCKS = 2, 4, 37, 16
KEY = TransferKey(transfer_id=b"0123456789abcdef", epoch=EPOCH)
FIRST_TOKENS = FirstTokens(tokens=(42, 7), logprobs=(-0.125, -3.0))
SIZES = (1, 2, 4)


def layout_of(num_kv_heads: int, num_heads: int = 8) -> KvLayout:
    return KvLayout.uniform(
        num_layers=LAYERS,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=HEAD_DIM,
        dtype="bfloat16",
        model="m",
    )


@dataclass
class Transfer:
    """A source and a target group. The source's cache is that of one whole model, the target's is
    full of noise.
    """

    layout: KvLayout
    source_tp: int
    target_tp: int
    source_block: int = 16
    num_cached: int = 0
    transports: Callable[[int], tuple[str, ...]] = lambda source_rank: ()  # of a source rank
    released: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        numbers = np.random.default_rng(1)
        self.whole: list[Bytes] = [  # of each layer: [plane, token, KV head, bytes of a head]
            numbers.integers(
                0,
                256,
                (self._planes(layer), NUM_TOKENS, geometry.num_kv_heads, self._head_bytes(layer)),
                np.uint8,
            )
            for layer, geometry in enumerate(self.layout.layers)
        ]
        self.sources = [
            self._store(self.source_tp, rank, self.source_block) for rank in range(self.source_tp)
        ]
        choose = random.Random(2)
        self.held = self._place(self.source_block, choose)
        self.into = self._place(16, choose)
        for rank, kv in enumerate(self.sources):
            for layer, whole in enumerate(self.whole):
                table, tokens = self._table(self.held, kv, layer)
                heads = self._heads(layer, self.source_tp, rank)
                part = np.ascontiguousarray(whole[:, tokens.start : tokens.stop, heads])
                place = span(kv, tokens.start, len(tokens), layer, 1)
                kv.write(table, place, memoryview(part.tobytes()))
        self.senders = [self._sender(rank) for rank in range(self.source_tp)]
        self.endpoints = [f"rank {rank}" for rank in range(self.source_tp)]
        self.targets: list[PagedKv] = []
        self.calls: list[Calls] = []
        self.receivers: list[KvReceiver] = []
        self.before: list[list[Bytes]] = []  # of each target rank, what `cache` returned at first
        for rank in range(self.target_tp):
            self.add_receiver(self.target_tp, rank)

    def _place(self, block_size: int, choose: random.Random) -> SequenceKv:
        """The blocks of the prompt, and of its windows those that the next token sees."""
        free = choose.sample(range(NUM_BLOCKS), NUM_BLOCKS)
        tables: list[TableBlocks] = []
        for spec in plan_tables(self.layout, block_size):
            seen = NUM_TOKENS if spec.window is None else spec.window - 1
            first = max(NUM_TOKENS - seen, 0) // spec.block_size
            count = -(-NUM_TOKENS // spec.block_size) - first
            tables.append(TableBlocks(tuple(free.pop() for _ in range(count)), first))
        return SequenceKv(tuple(tables))

    def _table(self, place: SequenceKv, kv: PagedKv, layer: int) -> tuple[TableBlocks, range]:
        """The blocks of a layer, and the tokens of the prompt that they hold."""
        group = self.layout.groups[self.layout.place(layer)[0]]
        table = place.table(kv.tables, group)
        tokens = table.tokens(spec_of(kv.tables, group).block_size)
        return table, range(tokens.start, min(tokens.stop, NUM_TOKENS))

    def first(self, layer: int) -> int:
        """The first token of a layer that has to come."""
        window = self.layout.layers[layer].window
        return max(self.num_cached, 0 if window is None else NUM_TOKENS - window + 1)

    def _head_bytes(self, layer: int) -> int:
        return self.layout.groups[self.layout.place(layer)[0]].part.row_bytes

    def _planes(self, layer: int) -> int:
        return self.layout.groups[self.layout.place(layer)[0]].part.planes

    def add_receiver(self, tp: int, rank: int) -> None:
        """Adds a rank of the target group, or of another."""
        self.targets.append(self._store(tp, rank, 16, is_target=True))
        self.calls.append(Calls(dict(zip(self.endpoints, self.senders, strict=True))))
        transports = ("shared", "ipc", "gloo", "nixl")
        context = TransferContext(kv=self.targets[-1], transports=transports)
        channel = self.calls[-1].channel
        self.receivers.append(KvReceiver(context, stall_seconds=WAIT, channel=channel))
        self.before.append(self.cache(len(self.targets) - 1))

    def _store(self, tp: int, rank: int, block_size: int, *, is_target: bool = False) -> PagedKv:
        kv = PagedKv(
            self.layout,
            num_blocks=NUM_BLOCKS,
            block_size=block_size,
            device=torch.device("cpu"),
            shared=is_target or not {"shared", "ipc", "nixl"}.isdisjoint(self.transports(rank)),
            tp=tp,
            rank=rank,
        )
        for tensor in kv.tensors:
            tensor.view(torch.uint8).random_(0, 256, generator=torch.Generator().manual_seed(rank))
        return kv

    def _sender(self, rank: int) -> KvSender:
        lease_seconds = None if rank else 30
        sender = sender_of(
            self.sources[rank], self.transports(rank), self.released, lease_seconds=lease_seconds
        )
        sender.offer(1, KEY.transfer_id, self.held, NUM_TOKENS, b"hash")
        return sender

    def _heads(self, layer: int, tp: int, rank: int) -> list[int]:
        geometry = self.layout.layers[layer]
        return list(kv_heads(geometry.num_heads, geometry.num_kv_heads, tp, rank))

    def progress(self, num_ready: int) -> None:
        for sender in self.senders:
            sender.progress(1, num_ready)

    def complete(self) -> None:
        for sender in self.senders:
            sender.progress(1, NUM_TOKENS)
            sender.complete(1, FIRST_TOKENS)

    def handle(self) -> worker_pb2.KvHandle:
        return handle(KEY, self.endpoints, self.layout, NUM_TOKENS)

    def target(self) -> asyncio.Future[FetchTarget]:
        target: asyncio.Future[FetchTarget] = asyncio.get_running_loop().create_future()
        target.set_result(FetchTarget(self.into, self.num_cached))
        return target

    async def fetch(
        self, rank: int, arrived: asyncio.Barrier | None = None
    ) -> worker_pb2.KvReceived:
        """As a rank does that hears from its group when all have their part."""
        async with self.receivers[rank].fetch(self.handle(), b"hash", self.target()) as (
            first_tokens,
            received,
        ):
            assert first_tokens == FIRST_TOKENS
            if arrived:
                async with asyncio.timeout(WAIT):
                    await arrived.wait()
            assert self.num_acks == 0
        return received

    async def run(self) -> list[worker_pb2.KvReceived]:
        """The whole of it, with the prefill in two chunks; returns when every stream and connection
        has ended.
        """
        arrived = asyncio.Barrier(self.target_tp)
        fetches = [asyncio.create_task(self.fetch(rank, arrived)) for rank in range(self.target_tp)]
        await turns()
        self.progress(20)
        await turns()
        self.complete()
        async with asyncio.timeout(WAIT):
            fetched = await asyncio.gather(*fetches)
            while sum(receiver.num_closing for receiver in self.receivers):
                await asyncio.sleep(0)
        assert not any(call.cancelled for calls in self.calls for _, call in calls.made)
        await self.disconnect()
        return fetched

    async def disconnect(self) -> None:
        async with asyncio.timeout(WAIT):
            await asyncio.gather(*(receiver.connections.close() for receiver in self.receivers))
            await asyncio.gather(*(calls.ended() for calls in self.calls))

    @property
    def num_acks(self) -> int:
        return sum(
            isinstance(message, Ack)
            for calls in self.calls
            for _, call in calls.made
            for message in call.said
        )

    def cache(self, rank: int) -> list[Bytes]:
        """What a target rank has, of each layer: [plane, token, slot, bytes of a head]."""
        kv, found = self.targets[rank], []
        for layer in range(self.layout.num_layers):
            table, tokens = self._table(self.into, kv, layer)
            data = np.frombuffer(
                read_now(kv, table, span(kv, tokens.start, len(tokens), layer, 1)), np.uint8
            )
            num_slots = kv.num_slots(self.layout.place(layer)[0])
            found.append(data.reshape(self._planes(layer), len(tokens), num_slots, -1))
        return found

    def content(self, rank: int) -> bytes:
        """The same as bytes."""
        return b"".join(layer.tobytes() for layer in self.cache(rank))

    def check(self, ranks: Iterable[int] | None = None) -> None:
        """Every target rank has the heads of its slots, and what it had before the first token."""
        for rank in range(self.target_tp) if ranks is None else ranks:
            kv = self.targets[rank]
            for layer, found in enumerate(self.cache(rank)):
                _, tokens = self._table(self.into, kv, layer)
                first = self.first(layer)
                heads = self._heads(layer, kv.tp, kv.rank)
                expected = self.whole[layer][:, first:, heads]
                kept = first - tokens.start
                assert (found[:, kept:] == expected).all(), f"rank {rank}, layer {layer}"
                assert (found[:, :kept] == self.before[rank][layer][:, :kept]).all(), f"rank {rank}"

    def moved(self, rank: int) -> int:
        """The bytes that a target rank has to get."""
        kv = self.targets[rank]
        return sum(
            span(kv, first, NUM_TOKENS - first, layer, 1).size(self.layout)
            for layer, first in enumerate(map(self.first, range(self.layout.num_layers)))
        )


async def turns(count: int = 30) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


@pytest.fixture(autouse=True)
def _short_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a stream has several."""
    monkeypatch.setattr(KvConnector, "frame_bytes", 160)


def play(transport: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stands in for a library or a device that is not there."""
    if transport == "ipc":
        play_ipc(monkeypatch)
    if not nixl_agent.available():
        monkeypatch.setattr("tandem.workers.transfer.nixl.available", lambda: True)
        monkeypatch.setattr(nixl_agent, "_bindings", lambda: fake_nixl)


SPLITS = ((8, 0), (16, 21), (32, 16))  # block size of the source, tokens that the target has cached


@pytest.mark.parametrize(
    ("transport", "splits"),
    [
        ("grpc", SPLITS),
        ("shared", SPLITS),
        ("ipc", SPLITS[1:2]),
        ("gloo", SPLITS[1:2]),
        ("nixl", SPLITS[1:2]),
    ],
    ids=["grpc", "shared", "ipc", "gloo", "nixl"],
)
@pytest.mark.parametrize("num_kv_heads", [1, 2, 4, 8])
@pytest.mark.parametrize("target_tp", SIZES)
@pytest.mark.parametrize("source_tp", SIZES)
async def test_every_rank_gets_its_heads(
    source_tp: int,
    target_tp: int,
    num_kv_heads: int,
    transport: str,
    splits: Sequence[tuple[int, int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    play(transport, monkeypatch)
    for source_block, num_cached in splits:
        transfer = Transfer(
            layout_of(num_kv_heads),
            source_tp,
            target_tp,
            source_block,
            num_cached,
            transports=lambda source_rank: () if transport == "grpc" else (transport,),
        )
        fetched = await transfer.run()
        transfer.check()
        for rank, part in enumerate(fetched):
            moved = span(transfer.targets[rank], num_cached, NUM_TOKENS - num_cached)
            assert part.transfer_bytes == moved.size(transfer.layout)
            assert part.transport == transport
        assert (transfer.released, transfer.num_acks) == ([1], 1)
        assert [sender.num_offers for sender in transfer.senders] == [0] + [1] * (source_tp - 1)
        assert not any(sender.num_streams for sender in transfer.senders)


# Layers of several shapes, between each other; the windows differ where the shapes do not.
WIDE = LayerGeometry(num_heads=4, num_kv_heads=2, head_dim=64)
LATENT = LayerGeometry(num_heads=4, num_kv_heads=1, head_dim=72, value_dim=64)
MIXED = {
    "latent": (LATENT, WIDE, LATENT),
    "alternating": (WIDE, replace(WIDE, num_kv_heads=1, head_dim=128)) * 2,
    "runs": (WIDE, replace(WIDE, window=4), WIDE, replace(WIDE, num_kv_heads=4, head_dim=16), WIDE),
    "other heads": (WIDE, replace(WIDE, num_heads=8, num_kv_heads=8, head_dim=8)),
}


# Quantized blocks have another layout on GPUs, which mapped host memory does not show.
@pytest.mark.parametrize(
    ("transport", "cache_dtype"),
    [
        *itertools.product(["grpc", "shared", "gloo", "nixl"], ["auto", "int8"]),
        ("ipc", "auto"),
    ],
)
@pytest.mark.parametrize("layers", MIXED)
@pytest.mark.parametrize(("source_tp", "target_tp"), [(1, 1), (1, 2), (2, 1), (4, 2)])
async def test_layers_of_unequal_geometry_arrive(
    source_tp: int,
    target_tp: int,
    layers: str,
    transport: str,
    cache_dtype: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    play(transport, monkeypatch)
    layout = KvLayout(layers=MIXED[layers], dtype="bfloat16", model="m", cache_dtype=cache_dtype)
    for frame_bytes in (600, 2**20):  # of some rows, and of a layer
        monkeypatch.setattr(KvConnector, "frame_bytes", frame_bytes)
        transfer = Transfer(
            layout, source_tp, target_tp, 8, 21, transports=lambda source_rank: (transport,)
        )
        fetched = await transfer.run()
        transfer.check()
        for rank, part in enumerate(fetched):
            assert (part.transfer_bytes, part.transport) == (transfer.moved(rank), transport)
        assert (transfer.released, transfer.num_acks) == ([1], 1)


@pytest.mark.parametrize("target_tp", SIZES)
@pytest.mark.parametrize("source_tp", SIZES)
async def test_latent_rows_arrive_at_every_rank(source_tp: int, target_tp: int) -> None:
    layout = KvLayout(layers=(LATENT,) * 3, dtype="bfloat16", model="m")
    transfer = Transfer(layout, source_tp, target_tp, 8, 21)
    fetched = await transfer.run()
    transfer.check()
    row_bytes = 3 * 72 * 2  # of all layers: one plane, one KV head on every rank
    for part in fetched:
        assert part.transfer_bytes == (NUM_TOKENS - 21) * row_bytes


# Full layers and windows in blocks of several sizes.
WINDOWS = {
    "Gemma": (WIDE, *(replace(WIDE, window=12),) * 3),
    "three tables": (
        replace(WIDE, window=6),
        WIDE,
        replace(WIDE, num_kv_heads=1, head_dim=128, window=20),
        replace(WIDE, window=6),
    ),
    "windows alone": (replace(WIDE, window=9), replace(WIDE, num_kv_heads=4, window=9)),
}


@pytest.mark.parametrize("layers", WINDOWS)
@pytest.mark.parametrize(
    ("transport", "tps"),
    [
        ("grpc", tuple(itertools.product(SIZES, SIZES))),
        ("shared", ((1, 4), (2, 2), (4, 2))),
        ("ipc", ((2, 4), (2, 1))),
        ("gloo", ((1, 2), (4, 1))),
        ("nixl", ((1, 2), (4, 2))),
    ],
    ids=["grpc", "shared", "ipc", "gloo", "nixl"],
)
async def test_of_a_window_come_the_tokens_that_the_next_one_sees(
    layers: str,
    transport: str,
    tps: Sequence[tuple[int, int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    play(transport, monkeypatch)
    layout = KvLayout(layers=WINDOWS[layers], dtype="bfloat16", model="m")
    for (source_tp, target_tp), (source_block, num_cached) in itertools.product(tps, SPLITS):
        transfer = Transfer(
            layout,
            source_tp,
            target_tp,
            source_block,
            num_cached,
            transports=lambda source_rank: (transport,),
        )
        fetched = await transfer.run()
        transfer.check()
        for rank, part in enumerate(fetched):
            assert (part.transfer_bytes, part.transport) == (transfer.moved(rank), transport)
        assert (transfer.released, transfer.num_acks) == ([1], 1)


@pytest.mark.parametrize("change", ["first", "count"])
@pytest.mark.parametrize("transport", ["shared", "nixl"])
async def test_a_block_table_of_other_tokens_is_refused(
    change: str, transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The content of the blocks would be taken for that of other positions."""
    play(transport, monkeypatch)
    true = TableBlocks.trim

    def wrong(table: TableBlocks, *wanted: int) -> TableBlocks:
        found = true(table, *wanted)
        if change == "first":
            return TableBlocks(found.blocks, found.first + 1)
        return TableBlocks((*found.blocks, 0), found.first)

    monkeypatch.setattr(TableBlocks, "trim", wrong)
    layout = KvLayout(layers=WINDOWS["Gemma"], dtype="bfloat16", model="m")
    transfer = Transfer(layout, 1, 1, 8, transports=lambda source_rank: (transport,))
    transfer.complete()
    with pytest.raises(TransferError, match="of other tokens"):
        await transfer.fetch(0)
    assert (transfer.num_acks, transfer.released) == (0, [])
    await transfer.disconnect()


@pytest.mark.parametrize("table", [0, 1])
@pytest.mark.parametrize("missing", ["first", "last"])
async def test_a_sender_without_a_block_of_a_window_sends_nothing(table: int, missing: str) -> None:
    """A full table that begins late, and a window whose tail is a block short."""
    layout = KvLayout(layers=WINDOWS["Gemma"], dtype="bfloat16", model="m")
    transfer = Transfer(layout, 1, 1, 8)
    tables = list(transfer.held.tables)
    held = tables[table]
    tables[table] = (
        TableBlocks(held.blocks[1:], held.first + 1)
        if missing == "first"
        else TableBlocks(held.blocks[:-1], held.first)
    )
    transfer.senders[0].withdraw(1)
    place = SequenceKv(tuple(tables))
    transfer.senders[0].offer(1, KEY.transfer_id, place, NUM_TOKENS, b"hash")
    transfer.complete()
    with pytest.raises(TransferError, match="stream broke"):
        await transfer.fetch(0)
    refused = [call.error for _, call in transfer.calls[0].made if call.error]
    assert [str(error) for error in refused] == ["KV pull out of order"]
    assert (transfer.num_acks, transfer.released) == (0, [])


def test_a_span_beyond_its_group_is_refused() -> None:
    kv = Transfer(KvLayout(layers=MIXED["runs"], dtype="bfloat16", model="m"), 1, 1).targets[0]
    for layer, num_layers, good in (
        (0, 3, True),
        (2, 3, False),
        (3, 1, True),
        (3, 2, False),
        (0, 5, False),
    ):
        part = replace(span(kv, 0, 9, layer, num_layers), num_slots=1)
        if good:
            assert read_now(kv, (1,), part).nbytes == part.size(kv.layout)
        else:
            with pytest.raises(ValueError, match=r"^layers .* are not within"):
                read_now(kv, (1,), part)


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "tps"), [(12, 4, (1, 2, 3, 4, 6)), (9, 3, (1, 3))]
)
async def test_heads_that_straddle_ranks_arrive_too(
    num_heads: int, num_kv_heads: int, tps: tuple[int, ...]
) -> None:
    for source_tp in tps:
        for target_tp in tps:
            transfer = Transfer(layout_of(num_kv_heads, num_heads), source_tp, target_tp)
            await transfer.run()
            transfer.check()
            assert transfer.released == [1]


@pytest.mark.parametrize("num_kv_heads", [1, 2, 8])
@pytest.mark.parametrize("target_tp", SIZES)
@pytest.mark.parametrize("source_tp", SIZES)
async def test_there_is_a_stream_for_every_piece_and_no_other(
    source_tp: int, target_tp: int, num_kv_heads: int
) -> None:
    transfer = Transfer(layout_of(num_kv_heads), source_tp, target_tp)
    await transfer.run()
    for rank, calls in enumerate(transfer.calls):
        pieces = plan(8, num_kv_heads, source_tp, target_tp, rank)
        asked = [(endpoint, message) for endpoint, call in calls.made for message in call.said[1:2]]
        assert asked == [
            (
                f"rank {piece.source_rank}",
                Pull(
                    first_token=0,
                    group=0,
                    first_slot=piece.source_slots.start,
                    num_slots=len(piece.source_slots),
                ),
            )
            for piece in pieces
        ]


async def test_rank_0_pins_the_cache_where_it_reads_nothing() -> None:
    """12 heads over 4, from 6 ranks to 2: rank 1 has the KV heads (0, 1) that rank 0 has not
    together.
    """
    transfer = Transfer(layout_of(4, 12), 6, 2, transports=lambda source_rank: ("shared",))
    assert all(piece.source_rank for piece in plan(12, 4, 6, 2, 0))
    (fetched, _) = await transfer.run()
    transfer.check()
    assert fetched.transport == "shared"
    endpoint, pin = transfer.calls[0].made[-1]
    assert endpoint == "rank 0"
    assert [type(message) for message in pin.said] == [Open, Pull, Ack]
    assert pin.said[1] == Pull(first_token=NUM_TOKENS, group=0, first_slot=0, num_slots=0)
    assert transfer.released == [1]
    assert all(endpoint != "rank 0" for endpoint, _ in transfer.calls[1].made)


@pytest.mark.parametrize("fault", ["withdrawn", "other token"])
async def test_a_pin_that_fails_ends_the_fetch(fault: str) -> None:
    transfer = Transfer(layout_of(4, 12), 6, 2)
    fetching = asyncio.create_task(transfer.fetch(0))
    await turns()
    transfer.progress(20)
    await turns()
    if fault == "withdrawn":
        transfer.senders[0].withdraw(1)
    else:
        transfer.senders[0].progress(1, NUM_TOKENS)
        transfer.senders[0].complete(1, FirstTokens(tokens=(43,)))  # the others say FIRST_TOKENS
        for sender in transfer.senders[1:]:
            sender.progress(1, NUM_TOKENS)
            sender.complete(1, FIRST_TOKENS)
    with pytest.raises(
        TransferError, match="stream broke" if fault == "withdrawn" else "another prompt"
    ):
        await fetching
    assert all(call.cancelled for _, call in transfer.calls[0].made)
    assert (transfer.num_acks, transfer.released) == (0, [])


async def test_ranks_may_use_different_transports() -> None:
    transfer = Transfer(
        layout_of(8), 4, 2, transports=lambda source_rank: ("shared",) if source_rank == 0 else ()
    )
    assert [part.transport for part in await transfer.run()] == ["grpc+shared", "grpc"]
    transfer.check()


@pytest.mark.parametrize("failing", [0, 1])
async def test_one_stream_that_fails_ends_the_others(failing: int) -> None:
    transfer = Transfer(layout_of(8), 2, 1)
    fetching = asyncio.create_task(transfer.fetch(0))
    await turns()
    transfer.progress(20)
    await turns()
    assert any(
        (now != then).any() for now, then in zip(transfer.cache(0), transfer.before[0], strict=True)
    )
    transfer.senders[failing].withdraw(1)
    transfer.senders[1 - failing].progress(1, NUM_TOKENS)
    with pytest.raises(TransferError, match="stream broke"):
        await fetching
    left = transfer.content(0)
    assert all(call.cancelled for _, call in transfer.calls[0].made)
    transfer.senders[1 - failing].complete(1, FIRST_TOKENS)
    await turns()
    assert transfer.content(0) == left
    assert (transfer.num_acks, transfer.released) == (0, [])


@pytest.mark.parametrize("after", range(0, 40, 3))
async def test_a_cancel_at_any_moment_ends_all_streams(after: int) -> None:
    transfer = Transfer(layout_of(8), 4, 1)
    transfer.complete()
    fetching = asyncio.create_task(transfer.fetch(0, asyncio.Barrier(2)))
    await turns(after)
    fetching.cancel()
    left = transfer.content(0)
    with pytest.raises(asyncio.CancelledError):
        await fetching
    await turns()
    assert transfer.content(0) == left
    assert (transfer.num_acks, transfer.released) == (0, [])
    assert not any(sender.num_streams for sender in transfer.senders)


async def test_an_exception_in_the_context_leaves_the_cache_pinned_for_another_reader() -> None:
    transfer = Transfer(layout_of(2), 2, 2)
    transfer.complete()
    with pytest.raises(ZeroDivisionError):
        async with transfer.receivers[0].fetch(transfer.handle(), b"hash", transfer.target()):
            raise ZeroDivisionError
    await turns()
    assert (transfer.num_acks, transfer.released) == (0, [])
    await transfer.fetch(0)
    await turns()
    assert (transfer.num_acks, transfer.released) == (1, [1])


async def test_groups_of_different_models_exchange_nothing() -> None:
    transfer = Transfer(replace(layout_of(4), cache_dtype="int8"), 2, 1)
    endpoints, layout = tuple(transfer.endpoints), transfer.layout
    offers: list[tuple[tuple[str, ...], KvLayout]] = [
        (endpoints, replace(layout_of(2), cache_dtype="int8")),
        (endpoints, replace(layout, model="other")),
        (endpoints, replace(layout, cache_dtype="auto")),
        (endpoints, replace(layout, cache_dtype="fp8")),  # of as many bytes
        (("rank 0",) * 3, layout),  # 3 does not divide 8 heads
        ((), layout),
    ]
    for offer in offers:
        offered = handle(KEY, *offer, NUM_TOKENS)
        with pytest.raises(TransferError, match="layouts differ"):
            async with transfer.receivers[0].fetch(offered, b"hash", transfer.target()):
                pass
    assert transfer.calls[0].made == []
