"""Ranks that connect over real gRPC, gloo and shared memory: they take the fastest way that works, and need none."""

import asyncio
import gc
import os
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from tandem.proto.channel import bind, peer_server
from tandem.tests.fleet import fleet, token_request
from tandem.tests.workers.spans import span
from tandem.workers.engine.plan import FirstTokens
from tandem.workers.kv_cache.layout import KvLayout
from tandem.workers.kv_cache.store import SAMPLE_BYTES
from tandem.workers.model.kv_store import PagedKv
from tandem.workers.transfer import accept, connect, inlets, outlets
from tandem.workers.transfer.collective import Pair
from tandem.workers.transfer.connect import Connection
from tandem.workers.transfer.connector import KvMover
from tandem.workers.transfer.inlets import PairInlet
from tandem.workers.transfer.outlets import PairOutlet
from tandem.workers.transfer.receiver import Fetched, Target, Want
from tandem.workers.transfer.transports import Means
from tandem.workers.transfer.wire import (
    PAIR_GONE,
    Choice,
    Hello,
    Message,
    Open,
    Pull,
    Sent,
    TransferError,
    TransferKey,
    TransportError,
    Trial,
    Try,
    Welcome,
    checksum_of,
    decode,
    encode,
)

LAYOUT = KvLayout.uniform(num_layers=3, num_heads=2, num_kv_heads=2, head_dim=4, dtype="bfloat16", model="m")
NUM_TOKENS, BLOCK, NUM_BLOCKS = 60, 4, 64
WAYS = ("shared", "gloo")
EPOCH = 3


def memory(seed: int) -> PagedKv:
    kv = PagedKv(LAYOUT, num_blocks=NUM_BLOCKS, block_size=BLOCK, device=torch.device("cpu"), shared=True)
    kv.data.view(torch.uint8).random_(0, 256, generator=torch.Generator().manual_seed(seed))
    return kv


@dataclass
class Two:
    """A rank that exports and one that pulls from it; transfer n has blocks of its own in either memory."""

    transports: tuple[str, ...] = WAYS
    exporter_transports: tuple[str, ...] | None = None
    stall_seconds: float = 5.0
    targets: dict[int, asyncio.Future[Target]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.source, self.target = memory(1), memory(2)
        own = self.transports if self.exporter_transports is None else self.exporter_transports
        self.exporter = self._mover(self.source, own)
        self.puller = self._mover(self.target, self.transports)
        self.server = peer_server()
        self.exporter.serve_on(self.server)
        self.endpoint = bind(self.server, "127.0.0.1", 0)

    def _mover(self, kv: PagedKv, transports: tuple[str, ...]) -> KvMover:
        return KvMover(
            kv,
            epoch=EPOCH,
            lease_seconds=30,
            stall_seconds=self.stall_seconds,
            on_release=lambda sequence_id: None,
            means=Means(transports=transports),
        )

    def blocks(self, number: int) -> tuple[int, ...]:
        return tuple(range(number * 16 + 15, number * 16, -1))

    def offer(self, number: int = 0) -> None:
        self.exporter.exporter.offer(number, key(number).transfer_id, self.blocks(number), NUM_TOKENS, b"hash")

    def finish(self, number: int = 0) -> None:
        self.exporter.exporter.progress(number, NUM_TOKENS)
        self.exporter.exporter.complete(number, FirstTokens(tokens=(42,)))

    def half(self, number: int = 0) -> None:
        self.exporter.exporter.progress(number, NUM_TOKENS // 2)

    async def fetch(self, number: int = 0) -> Fetched:
        place: asyncio.Future[Target] = asyncio.get_running_loop().create_future()
        place.set_result(Target(blocks=self.blocks(number), num_cached=0))
        want = Want(key=key(number), num_tokens=NUM_TOKENS, prefix_hash=b"hash")
        async with self.puller.puller.fetch([self.endpoint], LAYOUT, want, place) as fetched:
            return fetched

    async def move(self, number: int = 0) -> Fetched:
        """A whole transfer, from the offer to the check of its bytes."""
        await until(lambda: key(number).transfer_id not in self.exporter.exporter._exports)
        self.offer(number)
        self.finish(number)
        fetched = await self.fetch(number)
        assert fetched.opening.tokens == (42,)
        self.check(number)
        return fetched

    def check(self, number: int = 0) -> None:
        assert self.cache(number) == self.whole(number)

    def cache(self, number: int = 0) -> bytes:
        """What the puller has."""
        return bytes(self.target.read(self.blocks(number), span(self.target, 0, NUM_TOKENS)))

    def whole(self, number: int = 0) -> bytes:
        """What the exporter has."""
        return bytes(self.source.read(self.blocks(number), span(self.source, 0, NUM_TOKENS)))

    async def arriving(self, number: int = 0) -> None:
        """Returns when the puller has half of it, and before the rest is sent."""
        half = span(self.target, 0, NUM_TOKENS // 2)
        blocks = self.blocks(number)
        await until(lambda: self.target.read(blocks, half) == self.source.read(blocks, half))

    @property
    def connection(self) -> Connection:
        (connection,) = self.puller.puller._connections._open.values()
        return connection

    @property
    def inlet(self) -> PairInlet:
        inlet = self.connection._inlets["gloo"]
        assert isinstance(inlet, PairInlet)
        return inlet

    @property
    def outlet(self) -> PairOutlet:
        (accepted,) = self.exporter.exporter.acceptor._accepted.values()
        outlet = accepted.outlets["gloo"]
        assert isinstance(outlet, PairOutlet)
        return outlet

    @property
    def ways(self) -> list[str]:
        return [peer.transport for peer in self.puller.puller.peers]

    @property
    def num_connections(self) -> int:
        return self.exporter.exporter.acceptor.num_connections


def key(number: int = 0) -> TransferKey:
    return TransferKey(transfer_id=bytes([number]) * 16, epoch=EPOCH)


@asynccontextmanager
async def two(**fields: Any) -> AsyncIterator[Two]:
    pair = Two(**fields)
    await pair.server.start()
    try:
        yield pair
    finally:
        await pair.puller.close()
        pair.exporter.disconnect()
        await pair.server.stop(0)
        await pair.exporter.close()


async def until(condition: Callable[[], bool], seconds: float = 5.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.002)


@pytest.fixture(autouse=True)
def _short_frames_and_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FRAME_BYTES", "SLICE_BYTES"):
        monkeypatch.setattr(outlets, name, 256)
    monkeypatch.setattr(connect, "RECONNECT_SECONDS", 0.0)
    monkeypatch.setattr(connect, "CONNECT_WAIT_SECONDS", 4.0)  # a test's machine may be busy


@pytest.fixture
def prefer(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Lets a transport, where it passes its trial, be the fastest."""
    true = connect.fastest

    def choose(name: str) -> None:
        monkeypatch.setattr(connect, "fastest", lambda rates: true({way: 2.0 if way == name else 1.0 for way in rates}))

    return choose


# --- which way is taken -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chosen", ["grpc", *WAYS])
async def test_all_ways_are_measured_and_the_fastest_is_kept(chosen: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[dict[str, float]] = []
    true = connect.fastest

    def fastest(rates: Mapping[str, float]) -> str:
        seen.append(dict(rates))
        for name in rates:
            rates[name] = 5e9 if name == chosen else 4e9  # type: ignore[index]
        return true(rates)

    monkeypatch.setattr(connect, "fastest", fastest)
    async with two() as pair:
        fetched = await pair.move()
        assert (fetched.transport, fetched.num_bytes) == (chosen, len(pair.whole()))
        (rates,) = seen
        assert list(rates) == ["grpc", *WAYS]
        assert all(1e6 < rate < 1e12 for rate in rates.values())
        (peer,) = pair.puller.puller.peers
        assert (peer.endpoint, peer.transport, peer.bytes_per_second) == (pair.endpoint, chosen, 5e9)
        (accepted,) = pair.exporter.exporter.acceptor._accepted.values()
        await until(lambda: list(accepted.outlets) == [chosen] * (chosen != "grpc"))
        assert list(pair.connection._inlets) == [chosen] * (chosen != "grpc")
        assert (await pair.move(1)).transport == chosen
        assert len(seen) == 1


@pytest.mark.parametrize(
    ("puller", "exporter", "found"),
    [((), WAYS, set()), (WAYS, (), set()), (("gloo",), WAYS, {"gloo"}), (WAYS, ("shared",), {"shared"})],
)
async def test_only_what_both_sides_are_willing_to_use_is_tried(
    puller: tuple[str, ...], exporter: tuple[str, ...], found: set[str]
) -> None:
    async with two(transports=puller, exporter_transports=exporter) as pair:
        await pair.move()
        await until(lambda: bool(pair.ways))
        assert pair.connection.rates.keys() - {"grpc"} == found


def test_what_this_process_cannot_do_is_not_offered() -> None:
    means = Means(transports=("nccl", "gloo", "shared", "gloo", "smoke"))
    assert means.usable() == ["gloo", "shared"]


@pytest.mark.parametrize("way", WAYS)
async def test_a_way_whose_sample_comes_wrong_is_refused(
    way: str, prefer: Callable[[str], None], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    true = outlets.open_outlet

    def open_outlet(name: str, means: Any, ledger: Any, sample: bytes, say: Any) -> Any:
        wrong = sample[:-1] + bytes([sample[-1] ^ 1])
        ledger.put_sample(wrong)
        return true(name, means, ledger, wrong, say)

    monkeypatch.setattr(accept, "open_outlet", open_outlet)
    prefer(way)
    async with two(transports=(way,)) as pair:
        assert (await pair.move()).transport == "grpc"
        assert pair.ways == ["grpc"]
        assert f"cannot go by {way}: KV sample came wrong" in caplog.text
        monkeypatch.setattr(accept, "open_outlet", true)
        pair.exporter.exporter._ledger.put_sample(pair.exporter.exporter.acceptor._sample)
        assert (await pair.move(1)).transport == "grpc"
        monkeypatch.setattr(connect, "REVIEW_SECONDS", 0.0)
        assert (await pair.move(2)).transport == "grpc"  # it waits for no second trial
        await until(lambda: pair.ways == [way])
        assert (await pair.move(3)).transport == way


async def test_a_sample_that_comes_wrong_over_grpc_ends_the_connection_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accept, "checksum_of", lambda data: 0)
    async with two() as pair:
        assert (await pair.move()).transport == "grpc"
        await until(lambda: pair.num_connections == 0)
        assert pair.ways == []


@pytest.mark.parametrize("where", ["outlet", "inlet"])
async def test_a_way_that_does_not_answer_is_refused_and_holds_nobody_up(
    where: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def never(*args: object) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(PairOutlet if where == "outlet" else PairInlet, "run" if where == "outlet" else "sample", never)
    for module in (connect, inlets, outlets):
        monkeypatch.setattr(module, "CONNECT_SECONDS", 1.0)
    monkeypatch.setattr(connect, "CONNECT_WAIT_SECONDS", 0.1)
    async with two(transports=("gloo",)) as pair:
        assert (await pair.move()).transport == "grpc"
        assert pair.ways == []
        await until(lambda: pair.ways == ["grpc"])
        assert "cannot go by gloo" in caplog.text
        assert (await pair.move(1)).transport == "grpc"


async def test_a_way_that_the_exporter_cannot_open_is_refused(
    prefer: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    prefer("gloo")
    monkeypatch.setattr(Pair, "listen", lambda *args, **kwargs: socket_error())
    async with two() as pair:
        assert (await pair.move()).transport in ("grpc", "shared")
        assert pair.connection.rates.keys() == {"grpc", "shared"}


def socket_error() -> None:
    raise OSError("no such interface")


# --- ways that break --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("side", ["outlet", "inlet", "stream"])
async def test_a_pair_that_breaks_in_a_transfer_costs_nothing_but_time(
    side: str, prefer: Callable[[str], None]
) -> None:
    prefer("gloo")
    async with two() as pair:
        assert (await pair.move()).transport == "gloo"
        pair.offer(1)
        fetching = asyncio.create_task(pair.fetch(1))
        await until(lambda: pair.exporter.exporter.num_streams == 1)
        pair.half(1)
        await pair.arriving(1)
        broken = pair.connection
        if side == "stream":
            pair.exporter.disconnect()
        else:
            (pair.outlet if side == "outlet" else pair.inlet).pair.close()
        pair.finish(1)
        fetched = await fetching
        assert (fetched.opening.tokens, fetched.transport, fetched.num_bytes) == ((42,), "grpc", len(pair.whole(1)))
        pair.check(1)
        await until(lambda: pair.num_connections == 0)
        assert (broken.transport, pair.ways) == ("", [])
        assert (await pair.move(2)).transport == "gloo"  # nobody is banned
        assert pair.connection is not broken


async def test_a_broken_peer_is_not_tried_again_at_once(
    prefer: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connect, "RECONNECT_SECONDS", 1000.0)
    prefer("gloo")
    async with two() as pair:
        await pair.move()
        pair.exporter.disconnect()
        await until(lambda: pair.ways == [])
        assert (await pair.move(1)).transport == "grpc"
        assert pair.num_connections == 0
        monkeypatch.setattr(connect, "RECONNECT_SECONDS", 0.0)
        assert (await pair.move(2)).transport == "gloo"


async def test_a_message_with_a_wrong_checksum_is_not_taken(
    prefer: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pair's bytes have no frame around them."""
    prefer("gloo")
    true = PairOutlet.put

    def put(self: PairOutlet, stream: int, data: memoryview) -> None:
        true(self, stream, data)
        self._waiting[-1] = memoryview(bytes(len(data)))

    async with two() as pair:
        await pair.move()
        monkeypatch.setattr(PairOutlet, "put", put)
        assert (await pair.move(1)).transport == "grpc"
        assert pair.ways == []


async def test_shared_memory_outlives_its_connection(prefer: Callable[[str], None]) -> None:
    """For what has begun."""
    prefer("shared")
    async with two() as pair:
        pair.offer()
        fetching = asyncio.create_task(pair.fetch())
        await until(lambda: pair.ways == ["shared"])
        pair.half()
        await pair.arriving()
        pair.exporter.disconnect()
        await until(lambda: pair.ways == [])
        pair.finish()
        assert (await fetching).transport == "shared"
        pair.check()


async def test_a_transfer_that_stalls_costs_its_connection(
    prefer: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    prefer("gloo")
    async with two(stall_seconds=0.3) as pair:
        await pair.move()
        monkeypatch.setattr(PairOutlet, "put", lambda *args: None)
        with pytest.raises(TransferError, match="no progress"):
            await pair.move(1)
        assert pair.ways == []


@pytest.mark.parametrize("way", WAYS)
async def test_a_pair_that_the_exporter_does_not_know_is_dropped(way: str, prefer: Callable[[str], None]) -> None:
    prefer(way)
    async with two() as pair:
        await pair.move()
        pair.connection._key = TransferKey(transfer_id=b"x" * 16, epoch=EPOCH)
        assert (await pair.move(1)).transport == "grpc"
        assert pair.ways == []
        assert (await pair.move(2)).transport == way


@pytest.mark.parametrize(("transport", "pair_id"), [("gloo", b""), ("smoke", b""), ("shared", b"x" * 16)])
async def test_an_unknown_pair_or_transport_ends_the_transfer(
    transport: str, pair_id: bytes, prefer: Callable[[str], None]
) -> None:
    prefer("shared")
    async with two() as pair:
        await pair.move()
        pair.offer(1)
        pair.finish(1)
        pull = Pull(first_token=0, first_slot=0, num_slots=2, transport=transport, pair=pair_id or pair.connection.pair)
        said = [encode(key(1), message) for message in (Open(layout=asdict(LAYOUT)), pull)]
        with pytest.raises(TransportError, match=PAIR_GONE):
            await all_of(pair.exporter.exporter.serve(each(said)))
        await until(lambda: pair.exporter.exporter.num_streams == 0)


async def each(frames: list[bytes]) -> AsyncIterator[bytes]:
    for frame in frames:
        yield frame


async def all_of(frames: Any) -> list[Message]:
    async with aclosing(frames) as answers:
        return [decode(frame)[1] async for frame in answers]


# --- several transfers ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
async def test_a_transfer_that_is_cancelled_leaves_the_others_alone(way: str, prefer: Callable[[str], None]) -> None:
    prefer(way)
    async with two() as pair:
        for number in range(3):
            pair.offer(number)
        fetches = [asyncio.create_task(pair.fetch(number)) for number in range(3)]
        await until(lambda: pair.exporter.exporter.num_streams == 3)
        for number in range(3):
            pair.half(number)
        await pair.arriving(1)
        connection = pair.connection
        fetches[1].cancel()
        left = pair.cache(1)
        for number in range(3):
            pair.finish(number)
        results = await asyncio.gather(*fetches, return_exceptions=True)
        assert isinstance(results[1], asyncio.CancelledError)
        for number in (0, 2):
            pair.check(number)
        assert [result.transport for result in results if isinstance(result, Fetched)] == [way, way]
        assert pair.cache(1) == left
        assert pair.connection is connection
        assert (await pair.move(3)).transport == way


@pytest.mark.parametrize("way", WAYS)
async def test_a_cancel_at_any_moment_writes_nothing_more(way: str, prefer: Callable[[str], None]) -> None:
    prefer(way)
    async with two() as pair:
        await pair.move(1)
        for turns in range(0, 120, 3):
            pair.exporter.exporter.withdraw(0)
            pair.offer()
            pair.finish()
            pair.target.data.zero_()
            fetching = asyncio.create_task(pair.fetch())
            for _ in range(turns):
                await asyncio.sleep(0)
            before = pair.cache()
            if not fetching.cancel():
                break
            with pytest.raises(asyncio.CancelledError):
                await fetching
            await asyncio.sleep(0.002)
            assert pair.cache() == before
        assert pair.ways == [way]
        assert (await pair.move(2)).transport == way


@pytest.mark.parametrize("way", ["grpc", *WAYS])
@pytest.mark.parametrize("when", ["between", "waiting"])
async def test_a_withdrawn_export_is_never_taken(way: str, when: str, prefer: Callable[[str], None]) -> None:
    """Neither in the middle of the prefill nor with all its frames under way."""
    prefer(way)
    async with two() as pair:
        await pair.move(1)
        pair.offer()
        fetching = asyncio.create_task(pair.fetch())
        await until(lambda: pair.exporter.exporter.num_streams == 1)
        pair.half()
        await pair.arriving()
        if when == "waiting":
            pair.exporter.exporter.progress(0, NUM_TOKENS)
            await asyncio.sleep(0)
        pair.exporter.exporter.withdraw(0)
        pair.source.data.zero_()  # it is somebody else's
        with pytest.raises(TransferError, match="broke"):
            await fetching
        assert pair.ways == [way]  # which is not to blame


async def test_streams_wait_for_a_slow_pair_and_hear_of_its_end() -> None:
    said: list[Sent] = []
    outlet = PairOutlet("gloo", Means(transports=("gloo",)), bytes(SAMPLE_BYTES), said.append)
    for _ in range(8):
        await outlet.room()
        outlet.put(1, memoryview(b"data"))
    waiting = asyncio.create_task(outlet.room())
    await asyncio.sleep(0)
    assert not waiting.done()
    outlet.close()
    with pytest.raises(TransportError, match=PAIR_GONE):
        await waiting
    with pytest.raises(TransportError, match=PAIR_GONE):
        outlet.put(1, memoryview(b"data"))
    assert len(said) == 8


# --- what nobody would say --------------------------------------------------------------------------------------------

HELLO = Hello(layout=asdict(LAYOUT), host="h", transports=["gloo"])


@pytest.mark.parametrize(
    ("messages", "text"),
    [
        ([], "fell silent"),
        ([Try(transport="gloo")], "out of order"),
        ([Hello(layout={}, host="", transports=[])], "layouts differ"),
        ([HELLO, HELLO], "out of order"),
        ([HELLO, Try(transport="shared")], "out of order"),
        ([HELLO, Try(transport="smoke")], "out of order"),
        ([HELLO, Try(transport="gloo"), Try(transport="gloo")], "out of order"),
        ([HELLO, Choice(transport="")], "out of order"),
        ([HELLO, Choice(transport="gloo")], PAIR_GONE),
        ([HELLO, Choice(transport="grpc"), Try(transport="gloo")], "out of order"),
        ([HELLO, Choice(transport="grpc"), Choice(transport="grpc")], "out of order"),
    ],
)
async def test_a_puller_that_breaks_the_order_is_refused(messages: list[Message], text: str) -> None:
    async with two() as pair:
        acceptor = pair.exporter.exporter.acceptor
        frames = [encode(TransferKey(transfer_id=b"i" * 16, epoch=EPOCH), message) for message in messages]
        with pytest.raises(TransferError, match=text):
            await all_of(acceptor.serve(each(frames)))
        assert acceptor.num_connections == 0


WELCOME = Welcome(transports=["shared", "gloo", "smoke"], checksum=0)


@pytest.mark.parametrize(
    "messages",
    [
        [],
        [Trial(transport="gloo", info={})],
        [WELCOME, WELCOME],
        [WELCOME, Sent(stream=1, num_bytes=1, checksum=1)],
    ],
)
async def test_an_exporter_that_breaks_the_order_is_left_alone(
    messages: list[Message], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with two() as pair:

        async def serve(incoming: Any) -> AsyncIterator[bytes]:
            hello = await anext(incoming)
            for message in messages:
                yield encode(TransferKey(transfer_id=decode(hello)[0].transfer_id, epoch=EPOCH), message)

        monkeypatch.setattr(pair.exporter.exporter.acceptor, "serve", serve)
        other = peer_server()
        pair.exporter.serve_on(other)
        endpoint = bind(other, "127.0.0.1", 0)
        await other.start()
        pair.endpoint = endpoint
        assert (await pair.move()).transport == "grpc"
        await until(lambda: not pair.puller.puller._connections._open)
        await other.stop(0)


async def test_a_message_larger_than_any_frame_is_not_waited_for() -> None:
    async with two_ends() as (pair, inlet):
        with pytest.raises(TransferError, match="out of bounds"):
            await inlet.deliver(Sent(stream=1, num_bytes=2**50, checksum=0))
        assert not pair.broken


@asynccontextmanager
async def two_ends() -> AsyncIterator[tuple[Pair, PairInlet]]:
    pair = Pair.listen("127.0.0.1", timeout=5)
    accepting = asyncio.create_task(pair.accept())
    inlet = await inlets.open_inlet("gloo", {"address": pair.address}, Means(transports=("gloo",)), memory(1))
    assert isinstance(inlet, PairInlet)
    await accepting
    try:
        yield pair, inlet
    finally:
        pair.close()
        inlet.close()


async def test_what_arrives_for_a_stream_that_is_gone_is_dropped() -> None:
    async with two_ends() as (pair, inlet):
        first, second = inlet.source(), inlet.source()
        first.close()
        data = [bytes([number]) * (1 + number) for number in range(4)]
        for number, part in enumerate(data):
            sending = asyncio.create_task(pair.send(part))
            stream = (first, second)[number % 2].stream
            await inlet.deliver(Sent(stream=stream, num_bytes=len(part), checksum=checksum_of(part)))
            await sending
        assert [await second.read(cast(Any, None), memoryview(b"")) for _ in range(2)] == data[1::2]
        inlet.close()
        with pytest.raises(TransportError, match="broke"):
            await second.read(cast(Any, None), memoryview(b""))
        with pytest.raises(TransportError, match="broke"):
            await inlet.source().read(cast(Any, None), memoryview(b""))


# --- what is left -----------------------------------------------------------------------------------------------------


def held() -> tuple[int, int, int, int]:
    """Threads, files, maps of KV cache memory, tasks."""
    gc.collect()
    maps = Path("/proc/self/maps").read_text().count("tandem-kv")
    return threading.active_count(), len(os.listdir("/proc/self/fd")), maps, len(asyncio.all_tasks())


@pytest.mark.parametrize("who", ["puller", "exporter"])
@pytest.mark.parametrize("way", ["grpc", *WAYS])
async def test_connections_that_end_leave_nothing(way: str, who: str, prefer: Callable[[str], None]) -> None:
    prefer(way)
    async with two() as pair:

        async def connect_and_part() -> None:
            assert (await pair.move()).transport == way
            if who == "puller":
                pair.puller.puller._connections.drop(pair.connection)
            else:
                pair.exporter.disconnect()
            await until(lambda: not pair.ways and pair.num_connections == 0)

        await connect_and_part()
        await until(lambda: pair.puller.puller.num_closing == 0)
        await settle()
        before = held()
        for _ in range(20):
            await connect_and_part()
        with suppress(TimeoutError):
            await until(lambda: all(now <= then for now, then in zip(held(), before, strict=True)), 2)
        assert all(now <= then for now, then in zip(held(), before, strict=True)), f"{held()} after {before}"


async def settle() -> None:
    """Returns when the pairs' threads have ended."""
    await until(lambda: not any(thread.name == "kv-pair" for thread in threading.enumerate()))


async def test_a_worker_does_not_wait_for_its_connections_to_end() -> None:
    async with fleet(1, 1) as running:
        await running.generate(token_request(range(50), 4))
        prefill, decode = running.workers
        await until(lambda: [peer.endpoint for peer in decode._mover.puller.peers] == [prefill.address])
        began = time.monotonic()
        running.workers.remove(prefill)
        await prefill.stop(grace=20.0)
        assert time.monotonic() - began < 5
        await until(lambda: decode._mover.puller.peers == [])
