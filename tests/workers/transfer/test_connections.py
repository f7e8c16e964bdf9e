"""Ranks that connect over real gRPC, gloo and shared memory: they agree on a transport, and need
none.
"""

import asyncio
import gc
import os
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import grpc
import grpc.aio
import pytest
import torch

from tandem.proto import worker_pb2
from tandem.proto.channel import PeerStream
from tandem.tests.fleet import fleet
from tandem.tests.matrix.proxy import Proxy
from tandem.tests.peers import IDENTITY, peer_server
from tandem.tests.token_request import token_request
from tandem.tests.waits import NEVER, WAIT
from tandem.tests.workers.spans import read_now, span
from tandem.tests.workers.transfer.played import EPOCH, handle, one_table, placed, sender_of
from tandem.workers.engine.plan import FirstTokens
from tandem.workers.kv_cache.layout import KvLayout, KvSpan
from tandem.workers.kv_cache.tables import TableBlocks
from tandem.workers.model.kv.store import PagedKv
from tandem.workers.transfer import connections
from tandem.workers.transfer.collective import CollectiveConnector
from tandem.workers.transfer.connections import Connection
from tandem.workers.transfer.connector import KvConnector, TransferContext
from tandem.workers.transfer.endpoint import KvEndpoint, PeerChannels, add_bytes_method
from tandem.workers.transfer.frames import (
    CONNECTION_LOST,
    Announce,
    Message,
    Open,
    Pull,
    TransferError,
    TransferKey,
    TransportError,
    checksum_of,
    decode,
    encode,
)
from tandem.workers.transfer.p2p_group import P2pGroup
from tandem.workers.transfer.registry import capabilities
from tandem.workers.transfer.shared_memory import SharedMemoryConnector

LAYOUT = KvLayout.uniform(
    num_layers=3, num_heads=2, num_kv_heads=2, head_dim=4, dtype="bfloat16", model="m"
)
NUM_TOKENS, BLOCK, NUM_BLOCKS = 60, 4, 64
TRANSPORTS = ("shared", "gloo")


def memory(seed: int) -> PagedKv:
    kv = PagedKv(
        LAYOUT, num_blocks=NUM_BLOCKS, block_size=BLOCK, device=torch.device("cpu"), shared=True
    )
    kv.data.view(torch.uint8).random_(0, 256, generator=torch.Generator().manual_seed(seed))
    return kv


@dataclass
class Two:
    """A rank that sends and one that receives from it; transfer n has blocks of its own in either
    memory.
    """

    transports: tuple[str, ...] = TRANSPORTS
    sender_transports: tuple[str, ...] | None = None
    stall_seconds: float = WAIT

    def __post_init__(self) -> None:
        self.source, self.target = memory(1), memory(2)
        own = self.transports if self.sender_transports is None else self.sender_transports
        self.sending = self._endpoint(self.source, own)
        self.receiving = self._endpoint(self.target, self.transports)
        self.sender, self.receiver = self.sending.sender, self.receiving.receiver
        self.server = peer_server()
        self.sending.serve_on(self.server)
        self.address = self.server.bind("127.0.0.1", 0)

    def _endpoint(self, kv: PagedKv, transports: tuple[str, ...]) -> KvEndpoint:
        return KvEndpoint(sender_of(kv, transports, stall_seconds=self.stall_seconds), IDENTITY)

    def blocks(self, number: int) -> tuple[int, ...]:
        return tuple(range(number * 16 + 15, number * 16, -1))

    def offer(self, number: int = 0) -> None:
        place = one_table(self.blocks(number))
        self.sender.offer(number, key(number).transfer_id, place, NUM_TOKENS, b"hash")

    def finish(self, number: int = 0) -> None:
        self.sender.progress(number, NUM_TOKENS)
        self.sender.complete(number, FirstTokens(tokens=(42,)))

    def half(self, number: int = 0) -> None:
        self.sender.progress(number, NUM_TOKENS // 2)

    async def fetch(self, number: int = 0) -> worker_pb2.KvReceived:
        offered = handle(key(number), [self.address], LAYOUT, NUM_TOKENS)
        async with (
            asyncio.timeout(WAIT),
            self.receiver.fetch(offered, b"hash", placed(self.blocks(number))) as (
                first_tokens,
                received,
            ),
        ):
            assert first_tokens.tokens == (42,)
            return received

    async def move(self, number: int = 0) -> worker_pb2.KvReceived:
        """A whole transfer, from the offer to the check of its bytes."""
        await until(lambda: key(number).transfer_id not in self.sender._offers)
        self.offer(number)
        self.finish(number)
        fetched = await self.fetch(number)
        self.check(number)
        return fetched

    def check(self, number: int = 0) -> None:
        assert self.cache(number) == self.whole(number)

    def cache(self, number: int = 0) -> bytes:
        """What the receiver has."""
        return bytes(read_now(self.target, self.blocks(number), span(self.target, 0, NUM_TOKENS)))

    def whole(self, number: int = 0) -> bytes:
        """What the sender has."""
        return bytes(read_now(self.source, self.blocks(number), span(self.source, 0, NUM_TOKENS)))

    async def arriving(self, number: int = 0) -> None:
        """Returns when the receiver has half of it, and before the rest is sent."""
        half = span(self.target, 0, NUM_TOKENS // 2)
        blocks = self.blocks(number)
        await until(
            lambda: read_now(self.target, blocks, half) == read_now(self.source, blocks, half)
        )

    @property
    def connection(self) -> Connection:
        (connection,) = self.receiver.connections._open.values()
        return connection

    @property
    def connectors(self) -> tuple[CollectiveConnector, CollectiveConnector]:
        """The sender's and the receiver's side of the collective transport."""
        (sending,) = self.sender.connections._connectors.values()
        receiving = self.connection.connector
        assert isinstance(sending, CollectiveConnector)
        assert isinstance(receiving, CollectiveConnector)
        return sending, receiving

    async def recovers(self, transport: str) -> None:
        """Checks that the transport comes back: gRPC is taken until it is connected."""
        assert (await self.move(2)).transport == "grpc"
        await until(lambda: self.used == [transport])
        assert (await self.move(3)).transport == transport

    @property
    def used(self) -> list[str]:
        return list(self.receiver.connections.transports.values())

    @property
    def num_connections(self) -> int:
        return len(self.sender.connections._connectors)


def key(number: int = 0) -> TransferKey:
    return TransferKey(transfer_id=bytes([number]) * 16, epoch=EPOCH)


@asynccontextmanager
async def two(**fields: Any) -> AsyncIterator[Two]:
    pair = Two(**fields)
    await pair.server.start()
    try:
        yield pair
    finally:
        async with asyncio.timeout(WAIT):
            await pair.receiving.close()
            pair.sending.disconnect()
            await pair.server.stop(0)
            await pair.sending.close()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT):
        while not condition():
            await asyncio.sleep(0.002)


@pytest.fixture(autouse=True)
def _short_frames_and_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KvConnector, "frame_bytes", 256)
    monkeypatch.setattr(connections, "RETRY_SECONDS", 0.0)


# --- which transport is taken
# -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("receiver", "sender", "taken"),
    [
        ((), TRANSPORTS, "grpc"),
        (TRANSPORTS, (), "grpc"),
        (("gloo",), TRANSPORTS, "gloo"),
        (TRANSPORTS, ("gloo",), "gloo"),
        (("shared",), ("gloo",), "grpc"),
        (TRANSPORTS, TRANSPORTS, "shared"),
        (("gloo", "shared"), TRANSPORTS, "gloo"),
    ],
)
async def test_the_first_of_the_receiver_s_order_that_both_can_use_is_taken_and_kept(
    receiver: tuple[str, ...], sender: tuple[str, ...], taken: str
) -> None:
    async with two(transports=receiver, sender_transports=sender) as pair:
        fetched = await pair.move()
        assert (fetched.transport, fetched.transfer_bytes) == (taken, len(pair.whole()))
        await until(lambda: bool(pair.used))
        assert pair.receiver.connections.transports == {pair.address: taken}
        connection = pair.connection
        assert (await pair.move(1)).transport == taken
        assert pair.connection is connection


async def test_a_rank_of_another_host_is_not_reached_by_shared_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    true = SharedMemoryConnector.capabilities.__func__  # type: ignore[attr-defined]
    hosts = iter(["here", "there"])
    other = classmethod(lambda cls, context, name: true(cls, context, name) | {"host": next(hosts)})
    monkeypatch.setattr(SharedMemoryConnector, "capabilities", other)
    async with two() as pair:
        assert (await pair.move()).transport == "gloo"


def test_what_this_process_cannot_do_is_not_offered() -> None:
    context = TransferContext(kv=memory(1), transports=("nccl", "gloo", "shared", "gloo", "smoke"))
    assert list(capabilities(context)) == ["gloo", "shared"]


@pytest.mark.parametrize("side", ["listen", "connect", "run"])
async def test_a_transport_that_does_not_answer_holds_nobody_up(
    side: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def never(*args: object) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(CollectiveConnector, side, never)
    for module in ("connections", "collective"):
        monkeypatch.setattr(f"tandem.workers.transfer.{module}.CONNECT_SECONDS", 0.5)
    monkeypatch.setattr(connections, "CONNECT_WAIT_SECONDS", 0.1)
    async with two(transports=("gloo",)) as pair:
        assert (await pair.move()).transport == "grpc"
        assert pair.used == []
        await until(lambda: "no KV transport gloo" in caplog.text or "has ended" in caplog.text)
        assert (await pair.move(1)).transport == "grpc"


async def test_a_transport_that_the_sender_cannot_open_is_not_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(P2pGroup, "listen", lambda *args, **kwargs: no_interface())
    async with two(transports=("gloo",)) as pair:
        assert (await pair.move()).transport == "grpc"
        assert pair.used == ["grpc"]


def no_interface() -> None:
    raise OSError("no such interface")


async def test_a_transport_that_cannot_be_connected_is_tried_anew_after_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    true, tries = CollectiveConnector.connect, 0

    async def connect(*args: Any) -> CollectiveConnector:
        nonlocal tries
        tries += 1
        raise OSError("no")

    monkeypatch.setattr(CollectiveConnector, "connect", connect)
    monkeypatch.setattr(connections, "RETRY_SECONDS", 1000.0)
    async with two(transports=("gloo",)) as pair:
        assert [(await pair.move(number)).transport for number in range(3)] == ["grpc"] * 3
        assert tries == 1
        monkeypatch.setattr(CollectiveConnector, "connect", true)
        monkeypatch.setattr(connections, "RETRY_SECONDS", 0.0)
        assert (await pair.move()).transport == "grpc"  # a second connection is not waited for
        await until(lambda: pair.used == ["gloo"])
        assert (await pair.move(1)).transport == "gloo"


# --- transports that break
# --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("side", ["sender", "receiver", "stream"])
async def test_a_pair_that_breaks_in_a_transfer_costs_nothing_but_time(side: str) -> None:
    async with two(transports=("gloo",)) as pair:
        assert (await pair.move()).transport == "gloo"
        pair.offer(1)
        fetching = asyncio.create_task(pair.fetch(1))
        await until(lambda: pair.sender.num_streams == 1)
        pair.half(1)
        await pair.arriving(1)
        broken = pair.connection
        if side == "stream":
            pair.sending.disconnect()
        else:
            pair.connectors[side == "receiver"].group.close()
        pair.finish(1)
        fetched = await fetching
        assert (fetched.transport, fetched.transfer_bytes) == ("grpc", len(pair.whole(1)))
        pair.check(1)
        await until(lambda: pair.num_connections == 0)
        assert (broken.transport, pair.used) == ("", [])
        await pair.recovers("gloo")
        assert pair.connection is not broken


async def test_a_broken_peer_is_not_tried_again_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "RETRY_SECONDS", 1000.0)
    async with two(transports=("gloo",)) as pair:
        await pair.move()
        pair.sending.disconnect()
        await until(lambda: pair.used == [])
        assert (await pair.move(1)).transport == "grpc"
        assert pair.num_connections == 0
        monkeypatch.setattr(connections, "RETRY_SECONDS", 0.0)
        await pair.recovers("gloo")


async def test_a_message_with_a_wrong_checksum_is_not_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The pair's bytes have no frame around them."""
    true = CollectiveConnector.offer

    async def offer(
        self: CollectiveConnector, stream: int, table: TableBlocks, span: KvSpan
    ) -> bytes:
        payload = await true(self, stream, table, span)
        self._waiting[-1] = memoryview(bytearray(self._waiting[-1].nbytes))
        return payload

    async with two(transports=("gloo",)) as pair:
        await pair.move()
        monkeypatch.setattr(CollectiveConnector, "offer", offer)
        assert (await pair.move(1)).transport == "grpc"
        assert pair.used == []


async def test_shared_memory_outlives_its_connection() -> None:
    """For what has begun."""
    async with two(transports=("shared",)) as pair:
        pair.offer()
        fetching = asyncio.create_task(pair.fetch())
        await until(lambda: pair.used == ["shared"])
        pair.half()
        await pair.arriving()
        pair.sending.disconnect()
        await until(lambda: pair.used == [])
        pair.finish()
        assert (await fetching).transport == "shared"
        pair.check()


async def test_a_transfer_that_stalls_costs_its_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    async with two(transports=("gloo",)) as pair:
        await pair.move()
        pair.receiver._stall_seconds = 0.3
        monkeypatch.setattr(CollectiveConnector, "offer", KvConnector.offer)
        with pytest.raises(TransferError, match="no progress"):
            await pair.move(1)
        assert pair.used == []


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_a_connection_that_the_sender_does_not_know_is_dropped(transport: str) -> None:
    async with two(transports=(transport,)) as pair:
        await pair.move()
        pair.connection.key = TransferKey(transfer_id=b"x" * 16, epoch=EPOCH)
        assert (await pair.move(1)).transport == "grpc"
        assert pair.used == []
        await pair.recovers(transport)


async def test_an_unknown_connection_ends_the_transfer() -> None:
    async with two(transports=("shared",)) as pair:
        await pair.move()
        pair.offer(1)
        pair.finish(1)
        pull = Pull(first_token=0, group=0, first_slot=0, num_slots=2, connection=b"x" * 16)
        said = [encode(key(1), message) for message in (Open(layout=LAYOUT.digest), pull)]
        with pytest.raises(TransportError, match=CONNECTION_LOST):
            await all_of(pair.sender.serve(each(said)))
        await until(lambda: pair.sender.num_streams == 0)


async def each(frames: list[bytes]) -> AsyncIterator[bytes]:
    for frame in frames:
        yield frame


async def all_of(frames: Any) -> list[Message]:
    async with aclosing(frames) as answers:
        return [decode(frame)[1] async for frame in answers]


# --- several transfers
# ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_a_transfer_that_is_cancelled_leaves_the_others_alone(transport: str) -> None:
    async with two(transports=(transport,)) as pair:
        for number in range(3):
            pair.offer(number)
        fetches = [asyncio.create_task(pair.fetch(number)) for number in range(3)]
        await until(lambda: pair.sender.num_streams == 3)
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
        assert [
            result.transport for result in results if isinstance(result, worker_pb2.KvReceived)
        ] == [
            transport,
            transport,
        ]
        assert pair.cache(1) == left
        assert pair.connection is connection
        assert (await pair.move(3)).transport == transport


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_a_cancel_at_any_moment_writes_nothing_more(transport: str) -> None:
    async with two(transports=(transport,)) as pair:
        await pair.move(1)
        for turns in range(0, 120, 3):
            pair.sender.withdraw(0)
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
        assert pair.used == [transport]
        assert (await pair.move(2)).transport == transport


@pytest.mark.parametrize("transport", ["grpc", *TRANSPORTS])
@pytest.mark.parametrize("when", ["between", "waiting"])
async def test_a_withdrawn_offer_is_never_taken(transport: str, when: str) -> None:
    """Neither in the middle of the prefill nor with all its frames under transport."""
    async with two(transports=(transport,)) as pair:
        await pair.move(1)
        pair.offer()
        fetching = asyncio.create_task(pair.fetch())
        await until(lambda: pair.sender.num_streams == 1)
        pair.half()
        await pair.arriving()
        if when == "waiting":
            pair.sender.progress(0, NUM_TOKENS)
            await asyncio.sleep(0)
        pair.sender.withdraw(0)
        pair.source.data.zero_()  # it is somebody else's
        with pytest.raises(TransferError, match="broke"):
            await fetching
        assert pair.used == [transport]  # which is not to blame


async def test_streams_wait_for_a_slow_pair_and_fail_when_it_ends() -> None:
    announced: list[Announce] = []
    context = TransferContext(kv=memory(1), transports=("gloo",))
    connector = await CollectiveConnector.listen(context, "gloo", announced.append)
    one = span(context.kv, 0, 1)
    for _ in range(8):
        await connector.ready()
        await connector.offer(1, TableBlocks((0,)), one)
    waiting = asyncio.create_task(connector.ready())
    await asyncio.sleep(0)
    assert not waiting.done()
    connector.close()
    with pytest.raises(TransportError, match=CONNECTION_LOST):
        await waiting
    with pytest.raises(TransportError, match=CONNECTION_LOST):
        await connector.offer(1, TableBlocks((0,)), one)
    assert len(announced) == 8


# --- frames out of order
# ----------------------------------------------------------------------------------------------

HELLO = Open(layout=LAYOUT.digest, transports={"gloo": {}})


@pytest.mark.parametrize(
    ("messages", "text"),
    [
        ([], "fell silent"),
        ([Announce(stream=1, num_bytes=1, checksum=1)], "out of order"),
        ([Open(layout=b"", transports={})], "layouts differ"),
        ([HELLO, HELLO], "out of order"),
        ([Open(layout=LAYOUT.digest, transports={"smoke": 7, "gloo": 7}), HELLO], "out of order"),
    ],
)
async def test_a_receiver_that_breaks_the_order_is_refused(
    messages: list[Message], text: str
) -> None:
    async with two() as pair:
        frames = [
            encode(TransferKey(transfer_id=b"i" * 16, epoch=EPOCH), message) for message in messages
        ]
        with pytest.raises(TransferError, match=text):
            await all_of(pair.sender.connections.serve(each(frames)))
        assert pair.num_connections == 0


@pytest.mark.parametrize(
    "messages",
    [
        [],
        [Announce(stream=1, num_bytes=1, checksum=1)],
        [Open(layout=b"", transports={"smoke": {}})],
        [Open(layout=b"", transports={"shared": 7})],
        [Open(layout=b"", transports={}), Announce(stream=1, num_bytes=1, checksum=1)],
        [Open(layout=b"", transports={}), Open(layout=b"", transports={})],
    ],
)
async def test_a_sender_that_breaks_the_order_is_left_alone(
    messages: list[Message], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with two() as pair:

        async def serve(incoming: Any) -> AsyncIterator[bytes]:
            hello = await anext(incoming)
            for message in messages:
                yield encode(
                    TransferKey(transfer_id=decode(hello)[0].transfer_id, epoch=EPOCH), message
                )

        monkeypatch.setattr(pair.sender.connections, "serve", serve)
        other = peer_server()
        pair.sending.serve_on(other)
        pair.address = other.bind("127.0.0.1", 0)
        await other.start()
        assert (await pair.move()).transport == "grpc"
        await until(lambda: not pair.receiver.connections._open)
        await other.stop(0)
    assert "never retrieved" not in caplog.text


@pytest.mark.parametrize("num_bytes", [0, 2**50])
async def test_a_message_of_a_length_that_no_frame_has_is_not_waited_for(num_bytes: int) -> None:
    async with two_ends() as (pair, receiving):
        with pytest.raises(TransferError, match="must be from 1 to"):
            await receiving.deliver(Announce(stream=1, num_bytes=num_bytes, checksum=0))
        assert not pair.broken


@asynccontextmanager
async def two_ends() -> AsyncIterator[tuple[P2pGroup, CollectiveConnector]]:
    pair = P2pGroup.listen("127.0.0.1", timeout=WAIT)
    accepting = asyncio.create_task(pair.accept())
    context = TransferContext(kv=memory(1), transports=("gloo",))
    receiving = await CollectiveConnector.connect(context, "gloo", {"address": pair.address})
    await accepting
    try:
        yield pair, receiving
    finally:
        pair.close()
        receiving.close()


async def test_what_arrives_for_a_stream_that_is_gone_is_dropped() -> None:
    async with two_ends() as (pair, receiving):
        with receiving.open_stream(1):
            pass
        data = [bytearray([number]) * (1 + number) for number in range(4)]
        nothing = cast(Any, None)
        with receiving.open_stream(2):
            for number, part in enumerate(data):
                sending = asyncio.create_task(pair.send(part))
                stream = (1, 2)[number % 2]
                await receiving.deliver(
                    Announce(stream=stream, num_bytes=len(part), checksum=checksum_of(bytes(part)))
                )
                await sending
            fetched = [
                await receiving.fetch(2, TableBlocks(()), nothing, nothing) for _ in range(2)
            ]
            assert fetched == [memoryview(part) for part in data[1::2]]
            receiving.close()
            with pytest.raises(TransportError, match="broke"):
                await receiving.fetch(2, TableBlocks(()), nothing, nothing)
        with receiving.open_stream(3), pytest.raises(TransportError, match="broke"):
            await receiving.fetch(3, TableBlocks(()), nothing, nothing)


# --- what is left
# --------------------------------------------------------------------------------------------------


def held() -> tuple[int, int, int, int]:
    """Threads, files, maps of KV cache memory, tasks."""
    gc.collect()
    maps = Path("/proc/self/maps").read_text().count("tandem-kv")
    return (
        threading.active_count(),
        len(os.listdir("/proc/self/fd")),
        maps,
        len(asyncio.all_tasks()),
    )


@pytest.mark.parametrize("who", ["receiver", "sender"])
@pytest.mark.parametrize("transport", ["grpc", *TRANSPORTS])
async def test_connections_that_end_leave_nothing(transport: str, who: str) -> None:
    async with two(transports=(transport,)) as pair:

        async def connect_and_part() -> None:
            pair.receiver.connections._failed.clear()  # so that the connection is waited for
            assert (await pair.move()).transport == transport
            if who == "receiver":
                pair.receiver.connections.drop(pair.connection)
            else:
                pair.sending.disconnect()
            await until(lambda: not pair.used and pair.num_connections == 0)

        await connect_and_part()
        await until(lambda: pair.receiver.num_closing == 0)
        await settle()
        before = held()
        for _ in range(8):
            await connect_and_part()
        with suppress(TimeoutError):
            await until(lambda: all(now <= then for now, then in zip(held(), before, strict=True)))
        assert all(now <= then for now, then in zip(held(), before, strict=True)), (
            f"{held()} after {before}"
        )


async def settle() -> None:
    """Returns when the pairs' threads have ended."""
    await until(lambda: not any(thread.name == "kv-p2p" for thread in threading.enumerate()))


async def test_a_worker_does_not_wait_for_its_connections_to_end() -> None:
    async with fleet(1, 1) as running:
        await running.generate(token_request(range(50), 4))
        prefill, decode = running.workers
        await until(
            lambda: list(decode._endpoint.receiver.connections.transports) == [prefill.address]
        )
        running.workers.remove(prefill)
        async with asyncio.timeout(WAIT):
            await prefill.stop(grace=NEVER)
        await until(lambda: decode._endpoint.receiver.connections.transports == {})


# --- channels
# --------------------------------------------------------------------------------------------------


async def test_the_channel_to_a_rank_that_has_left_is_closed_and_made_anew_when_it_is_back() -> (
    None
):
    """While the rank lives, a connection keeps the channel, whose calls nothing ends."""
    async with two() as pair:
        channels = pair.receiving._channels
        channels._unused_seconds = 0.02
        await pair.move()
        await until(lambda: pair.used == ["shared"])
        channel = channels.get(pair.address)
        await until(lambda: not channels._timers)
        await until(lambda: channel.num_calls == 1)  # the connection
        assert channels.get(pair.address) is channel
        pair.sending.disconnect()
        await until(lambda: len(channels) == 0)
        assert channel.num_calls == 0
        await pair.move(1)
        assert channels.get(pair.address) is not channel


async def test_channels_to_ranks_that_nobody_answers_for_are_closed() -> None:
    channels = PeerChannels(IDENTITY, unused_seconds=0.02)
    gone = peer_server()
    address = gone.bind("127.0.0.1", 0)
    await gone.stop(0)
    for _ in range(2):
        call: PeerStream[bytes, bytes] = channels.get(address).stream_stream(
            "/tandem.v1.Nothing/Nothing"
        )()
        with pytest.raises(grpc.aio.AioRpcError):
            await call.read()
        await until(lambda: len(channels) == 0)
    channels.get(address)  # for no call
    await until(lambda: len(channels) == 0)
    channels.get(address)
    await channels.close()
    assert not channels._timers


async def test_kv_cache_of_a_rank_that_is_reachable_again_is_fetched_at_once() -> None:
    """The fetch does not fail by the backoff after earlier failures."""
    link, gone = Proxy(), peer_server()
    await link.start()
    link.target = gone.bind("127.0.0.1", 0)
    await gone.stop(0)
    try:
        async with two() as pair:
            address, pair.address = pair.address, link.address
            pair.server.answer_to(link.address)
            pair.offer()
            pair.finish()
            for _ in range(3):
                with pytest.raises(TransferError):
                    await pair.fetch()
            link.target = address
            await pair.fetch()
            pair.check()
    finally:
        await link.close()


async def test_a_failing_channel_is_replaced_while_an_earlier_call_of_it_goes_on() -> None:
    """A peer that stops finishes its calls, and takes no more connections."""
    method = "/tandem.v1.Nothing/Nothing"
    release = asyncio.Event()

    async def answer(incoming: object, context: grpc.aio.ServicerContext[bytes, bytes]) -> None:
        await context.write(b"begin")
        await release.wait()
        await context.write(b"end")

    stopping, back = peer_server(), peer_server()
    link, channels = Proxy(), PeerChannels(IDENTITY)
    await link.start()
    for server in (stopping, back):
        add_bytes_method(server, method, answer)
        server.answer_to(link.address)
    link.target, target = stopping.bind("127.0.0.1", 0), back.bind("127.0.0.1", 0)
    for server in (stopping, back):
        await server.start()

    def call() -> PeerStream[bytes, bytes]:
        return channels.get(link.address).stream_stream(method)()

    try:
        failing = channels.get(link.address)
        early = call()
        async with asyncio.timeout(WAIT):
            assert await early.read() == b"begin"
        stop = asyncio.create_task(stopping.stop(NEVER))
        link.target = "127.0.0.1:0"  # nothing can connect there
        async with asyncio.timeout(WAIT):
            while not failing.is_failing:
                refused = call()
                with suppress(grpc.aio.AioRpcError):
                    await refused.read()
                refused.cancel()
        await until(lambda: failing.num_calls == 1)
        link.target = target
        async with asyncio.timeout(WAIT):
            late = call()
            assert await late.read() == b"begin"
            release.set()
            assert [await early.read(), await late.read()] == [b"end", b"end"]
        await until(lambda: not channels._replaced)
        async with asyncio.timeout(WAIT):
            await stop
    finally:
        async with asyncio.timeout(WAIT):
            await channels.close()
            await stopping.stop(0)
            await back.stop(0)
            await link.close()
