"""Pairs of ranks in two processes over gloo: what is sent arrives in order, and nothing waits for
ever.
"""

import asyncio
import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import msgpack
import pytest
import torch

from tandem.tests.waits import NEVER, START, WAIT, line_of
from tandem.tests.workers.stream_model import StreamModel
from tandem.tests.workers.transfer.played_nccl import play_nccl
from tandem.workers.host.streams import DeviceData
from tandem.workers.transfer.backend import join_store, listen_store, open_group
from tandem.workers.transfer.frames import TransferError
from tandem.workers.transfer.p2p_group import P2pGroup

SIZES = [1, 3 * 1024, 1024 * 1024, 20 * 1024 * 1024]
TIMEOUT = 2.0
"""Of a pair whose other side is silent. A pair opens, and works, with timeouts of WAIT."""

# A joiner in another process, on another interface; it does what its standard input says, a line at
# a time.
JOINER = """
import asyncio, hashlib, json, sys, time
from tandem.workers.transfer.p2p_group import P2pGroup
from tandem.workers.transfer.frames import TransferError
async def main():
    print(json.dumps("ready"), flush=True)
    address, timeout = json.loads(sys.stdin.readline())
    pair = await P2pGroup.join(address, host="127.0.0.2", timeout=timeout)
    for line in sys.stdin:
        name, *values = json.loads(line)
        began = time.monotonic()
        try:
            if name == "receive":
                answer = [hashlib.sha256(await pair.receive(size)).hexdigest() for size in values]
            else:
                answer = []
                for value, size in values:
                    answer.append(await pair.send(bytearray([value % 256]) * size))
        except TransferError as error:
            answer = [str(error), time.monotonic() - began]
        print(json.dumps(answer), flush=True)
    pair.close()
asyncio.run(main())
"""


class Joiner:
    """The process, and what it says."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process

    def tell(self, *words: Any) -> None:
        print(json.dumps(words), file=self.process.stdin, flush=True)

    async def heard(self) -> Any:
        return json.loads(await asyncio.to_thread(line_of, self.process))


@contextmanager
def joiner_process() -> Iterator[Joiner]:
    process = subprocess.Popen(
        [sys.executable, "-c", JOINER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    try:
        yield Joiner(process)
    finally:
        process.kill()
        process.communicate(timeout=WAIT)


@contextmanager
def listener_process() -> Iterator[tuple[subprocess.Popen[str], Callable[[], str]]]:
    """One that sends nothing, and how to learn its address."""
    code = (
        "import asyncio; from tandem.workers.transfer.p2p_group import P2pGroup\n"
        "async def main():\n"
        "    pair = P2pGroup.listen('127.0.0.1', timeout=600); print(pair.address, flush=True); "
        "await "
        "pair.accept()\n"
        "    await pair.receive(1); await asyncio.sleep(600)\n"
        "asyncio.run(main())"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    try:
        yield process, lambda: line_of(process).strip()
    finally:
        process.kill()
        process.communicate(timeout=WAIT)


@asynccontextmanager
async def connected(timeout: float = WAIT) -> AsyncIterator[tuple[P2pGroup, Joiner]]:
    """A pair with a joiner; `timeout` is of each later call here."""
    with joiner_process() as joiner:
        assert await joiner.heard() == "ready"  # importing torch takes longer than some timeouts
        pair = P2pGroup.listen("127.0.0.1", timeout=WAIT)
        joiner.tell(pair.address, WAIT)
        try:
            await pair.accept()
            pair.timeout = timeout
            yield pair, joiner
        finally:
            await ended(pair)


@asynccontextmanager
async def two_ends() -> AsyncIterator[tuple[P2pGroup, P2pGroup]]:
    """Both sides in this process; TIMEOUT is of their later calls, which gloo cannot interrupt."""
    pair = P2pGroup.listen("127.0.0.1", timeout=WAIT)
    accepting = asyncio.create_task(pair.accept())
    other = await P2pGroup.join(pair.address, host="127.0.0.2", timeout=WAIT)
    await accepting
    pair.timeout = other.timeout = TIMEOUT
    try:
        yield pair, other
    finally:
        await ended(pair)
        await ended(other)


async def ended(pair: P2pGroup) -> None:
    """Closes it; its thread must come to an end."""
    pair.close()
    await asyncio.to_thread(pair._thread.join, 2 * WAIT)
    assert not pair._thread.is_alive()


def num_sockets() -> int:
    links = [os.readlink(path) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
    return sum(link.startswith("socket:") for link in links)


def listening() -> set[tuple[str, int]]:
    """List the addresses on which this process listens, from its own sockets.

    /proc/net/tcp is no reference: it may miss a socket while other processes open and close theirs.
    """
    found = set()
    for path in Path("/proc/self/fd").iterdir():
        if not (path.is_symlink() and os.readlink(path).startswith("socket:")):
            continue
        with socket.socket(fileno=os.dup(int(path.name))) as held:
            internet = held.family in (socket.AF_INET, socket.AF_INET6)
            if internet and held.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                found.add(held.getsockname()[:2])
    return found


async def test_bytes_arrive_both_ways() -> None:
    async with connected() as (pair, joiner):
        data = [bytearray(os.urandom(size)) for size in SIZES]
        joiner.tell("receive", *SIZES)
        for part in data:
            await pair.send(memoryview(part))
        assert await joiner.heard() == [hashlib.sha256(part).hexdigest() for part in data]
        joiner.tell("send", *enumerate(SIZES))
        for value, size in enumerate(SIZES):
            assert await pair.receive(size) == bytes([value]) * size
        await joiner.heard()


async def test_two_hundred_messages_keep_their_order() -> None:
    async with connected() as (pair, joiner):
        sizes = [1 + (7919 * index) % 50_000 for index in range(200)]
        data = [bytearray([index % 256]) * size for index, size in enumerate(sizes)]
        joiner.tell("receive", *sizes)
        await asyncio.gather(*(pair.send(part) for part in data))
        assert await joiner.heard() == [hashlib.sha256(part).hexdigest() for part in data]
        joiner.tell("send", *enumerate(sizes))
        received = await asyncio.gather(*(pair.receive(size) for size in sizes))
        assert received == data


@pytest.mark.parametrize("verb", ["send", "receive"])
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_lost_or_silent_joiner_is_noticed(how: signal.Signals, verb: str) -> None:
    """The loss of a joiner long before the timeout."""
    timeout = NEVER if how is signal.SIGKILL else TIMEOUT
    async with connected(timeout) as (pair, joiner):
        joiner.process.send_signal(how)
        calls = (
            [pair.send(bytearray(50_000_000)), pair.send(bytearray(1))]
            if verb == "send"
            else [pair.receive(1)] * 1
        )
        async with asyncio.timeout(WAIT):
            results = await asyncio.gather(*calls, return_exceptions=True)
        assert all(isinstance(result, TransferError) for result in results)
        assert pair.broken
        pair.timeout = NEVER
        async with asyncio.timeout(WAIT):
            for call in (pair.send(bytearray(b"x")), pair.receive(1), pair.accept()):
                with pytest.raises(TransferError):
                    await call


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_lost_or_silent_listener_is_noticed(how: signal.Signals) -> None:
    with listener_process() as (process, address):
        pair = await P2pGroup.join(await asyncio.to_thread(address), host="127.0.0.2", timeout=WAIT)
        await pair.send(bytearray(b"x"))
        pair.timeout = NEVER if how is signal.SIGKILL else TIMEOUT
        process.send_signal(how)
        async with asyncio.timeout(WAIT):
            for _ in range(2):
                with pytest.raises(TransferError):
                    await pair.receive(100)
        await ended(pair)


async def test_a_cancelled_call_breaks_the_pair() -> None:
    async with two_ends() as (pair, other):
        receiving, queued = (
            asyncio.ensure_future(other.receive(4)),
            asyncio.ensure_future(other.receive(4)),
        )
        await asyncio.sleep(0)
        receiving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await receiving
        with pytest.raises(TransferError, match="abandoned"):
            await queued
        with pytest.raises(TransferError, match="abandoned"):
            await other.send(bytearray(b"x"))
        async with asyncio.timeout(WAIT):
            with pytest.raises(TransferError):  # the other side hears of it, too
                await pair.receive(4)


async def test_close_ends_what_waits_and_can_be_said_twice() -> None:
    sockets = num_sockets()
    async with two_ends() as (pair, other):
        waiting = asyncio.ensure_future(other.receive(4))
        await asyncio.sleep(0)
        other.close()
        other.close()
        with pytest.raises(TransferError, match="closed"):  # and has not timed out
            await waiting
        pair.close()
        with pytest.raises(TransferError, match="closed"):
            await pair.send(bytearray(b"x"))
    assert num_sockets() == sockets


async def test_a_pair_that_is_closed_before_anybody_comes_waits_for_nobody() -> None:
    for _ in range(5):
        pair = P2pGroup.listen("127.0.0.1", timeout=NEVER)
        accepting = asyncio.create_task(pair.accept())
        await asyncio.sleep(0.01)
        pair.close()
        with pytest.raises(TransferError, match="closed"):
            await accepting
        await asyncio.to_thread(pair._thread.join, WAIT)
        assert not pair._thread.is_alive()


async def test_nobody_comes() -> None:
    pair = P2pGroup.listen("127.0.0.1", timeout=0.3)
    with pytest.raises(TransferError):
        await pair.accept()
    await ended(pair)
    with pytest.raises(TransferError, match="broke"):  # it listens no more: no timeout
        await P2pGroup.join(pair.address, host="127.0.0.1", timeout=WAIT)


async def test_who_does_not_know_the_address_gets_nothing_and_keeps_nobody_away() -> None:
    pair = P2pGroup.listen("127.0.0.1", timeout=WAIT)
    accepting = asyncio.create_task(pair.accept())
    place, _, secret = pair.address.partition("/")
    with pytest.raises(TransferError):
        await P2pGroup.join(f"{place}/{secret[::-1]}", host="127.0.0.1", timeout=WAIT)
    with socket.create_connection(pair.place):  # it stays silent
        other = await P2pGroup.join(pair.address, host="127.0.0.2", timeout=WAIT)
    await accepting
    await asyncio.gather(pair.send(bytearray(b"x")), other.receive(1))
    other.close()
    pair.close()
    await ended(other)
    await ended(pair)


async def test_strangers_do_not_prolong_the_wait_for_the_other_side() -> None:
    pair = P2pGroup.listen("127.0.0.1", timeout=TIMEOUT)
    with socket.create_connection(pair.place), pytest.raises(TransferError):
        await pair.accept()
    await ended(pair)


@pytest.mark.parametrize(
    "address",
    [
        "",
        "127.0.0.1:1",
        "127.0.0.1:1/abc",
        f"h:65536/{'a' * 32}",
        f":1/{'a' * 32}",
        f"h:x/{'a' * 32}",
    ],
)
async def test_impossible_addresses(address: str) -> None:
    with pytest.raises(TransferError, match="impossible address"):
        await P2pGroup.join(address, host="127.0.0.1", timeout=WAIT)


WORDS = [
    b"",
    b"\xc1",
    msgpack.packb(7),
    msgpack.packb(["key", 7]),
    msgpack.packb(["key", b"value"]) * 10_000,
]


@pytest.mark.parametrize(
    "words", WORDS, ids=["nothing", "rubbish", "a number", "no bytes", "too much"]
)
async def test_one_who_says_something_else_at_the_meeting_is_no_rank(words: bytes) -> None:
    pair = P2pGroup.listen("127.0.0.1", timeout=WAIT)
    accepting = asyncio.create_task(pair.accept())
    with socket.create_connection(pair.place) as connection:
        connection.sendall(pair.secret[: len(pair.secret) // 2].encode() + words)
    with pytest.raises(TransferError, match="broke"):
        await accepting
    await ended(pair)


async def test_only_the_named_interfaces_are_bound() -> None:
    before = listening()
    async with two_ends():
        assert {host for host, _ in listening() - before} == {"127.0.0.1", "127.0.0.2"}


def test_a_process_ends_well_with_an_open_pair() -> None:
    code = (
        "import asyncio; from tandem.workers.transfer.p2p_group import P2pGroup\n"
        "async def main():\n"
        "    pair = P2pGroup.listen('127.0.0.1', timeout=60); coming = "
        "asyncio.create_task(pair.accept())\n"
        "    other = await P2pGroup.join(pair.address, host='127.0.0.1', timeout=60)\n"
        "    await coming\n"
        "    await asyncio.gather(pair.send(bytearray(b'x')), other.receive(1)); other.close()\n"
        "asyncio.run(main())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=START, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_a_store_listens_at_once_on_its_interface_only() -> None:
    before = listening()
    store = listen_store("127.0.0.2", 3, WAIT)
    assert listening() - before == {("127.0.0.2", store.port)}
    other = join_store("127.0.0.2", store.port, WAIT)
    other.set("key", "value")
    assert store.get("key") == b"value"
    del store, other
    assert listening() == before


def test_stores_and_groups_do_not_wait_for_ever() -> None:
    store = listen_store("127.0.0.1", 2, 0.3)
    port, began = store.port, time.monotonic()
    with pytest.raises(RuntimeError):
        open_group(store, backend="gloo", rank=0, size=2, host="127.0.0.1", timeout=0.3)
    del store
    with pytest.raises(RuntimeError, match="no process group"):
        join_store("127.0.0.1", port, 0.3)
    assert time.monotonic() - began < WAIT  # torch's own timeouts are 5 and 30 minutes


def test_a_backend_that_this_torch_lacks() -> None:
    store = listen_store("127.0.0.1", 1, 1)
    with pytest.raises(ValueError, match="'smoke' is not in this build"):
        open_group(store, backend="smoke", rank=0, size=1, host="127.0.0.1", timeout=1)
    if not torch.distributed.is_nccl_available():
        with pytest.raises(ValueError, match="'nccl' is not in this build"):
            open_group(store, backend="nccl", rank=0, size=1, host="127.0.0.1", timeout=1)


@pytest.mark.parametrize(("device", "index"), [("cuda", 3), ("cuda:1", 1)])
async def test_nccl_selects_its_thread_s_device_by_index(
    device: str, index: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = StreamModel()
    selected = play_nccl(monkeypatch, model)
    pair = P2pGroup.listen("127.0.0.1", backend="nccl", device=device, timeout=WAIT)
    accepting = asyncio.create_task(pair.accept())
    other = await P2pGroup.join(
        pair.address, host="127.0.0.1", backend="nccl", device=device, timeout=WAIT
    )
    await accepting
    sending = asyncio.create_task(pair.send(bytearray(b"KV cache")))
    assert bytes(await other.receive(8)) == b"KV cache"
    await sending
    assert selected == [index] * 2
    assert "TORCH_NCCL_ASYNC_ERROR_HANDLING" not in os.environ
    await ended(pair)
    await ended(other)


async def test_messages_and_steps_do_not_wait_for_each_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = StreamModel()
    play_nccl(monkeypatch, model)
    model.launch("step")  # which never ends
    pair = P2pGroup.listen("127.0.0.1", backend="nccl", device="cuda:0", timeout=WAIT)
    accepting = asyncio.create_task(pair.accept())
    other = await P2pGroup.join(
        pair.address, host="127.0.0.1", backend="nccl", device="cuda:0", timeout=WAIT
    )
    await accepting
    data = DeviceData(torch.arange(64, dtype=torch.uint8), checksum=0)
    sending = asyncio.create_task(pair.send(data))
    received = await other.receive_on_device(64)
    model.launch("step")
    assert received.tensor.equal(data.tensor)
    await sending
    assert sum(each.kind == "message" for each in model.operations) == 6  # two secrets, both ends
    model.check()
    await ended(pair)
    await ended(other)


async def test_a_device_that_cannot_be_selected_breaks_the_pair_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def set_device(device: Any) -> None:
        raise RuntimeError("no such device")

    monkeypatch.setattr(torch.cuda, "set_device", set_device)
    pair = P2pGroup.listen("127.0.0.1", backend="nccl", device="cuda:0", timeout=60)
    with pytest.raises(TransferError, match="broke"):
        await pair.accept()
    await ended(pair)
