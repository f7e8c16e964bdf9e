"""Tests that blocks are free when no rank uses them, however often transfers are stopped."""

import asyncio
from typing import Any, cast

import pytest

from tandem.proto import worker_pb2
from tandem.workers.kv_cache.tables import SequenceKv, TableBlocks
from tandem.workers.tp.kv_group import KvGroup
from tandem.workers.tp.rank_client import RankClient, RankLost
from tandem.workers.transfer.endpoint import KvEndpoint


class Rank:
    """Answers when the test tells it to; also stands in for rank 0's endpoint, which is idle."""

    def __init__(self) -> None:
        self.sender, self.commands = self, list[worker_pb2.RankControlRequest]()
        self.stopped: list[asyncio.Future[None]] = []

    def offer(self, *offered: object) -> None:
        pass

    def progress(self, *counts: int) -> None:
        pass

    def withdraw(self, sequence_id: int) -> None:
        pass

    def send(self, command: worker_pb2.RankControlRequest) -> None:
        self.commands.append(command)

    def ask(self, sequence_id: int, **command: Any) -> "asyncio.Future[None]":
        assert command == {"stop_kv": True}
        self.stopped.append(asyncio.get_running_loop().create_future())
        return self.stopped[-1]


@pytest.mark.parametrize("lost", [False, True])
async def test_a_second_stop_waits_for_the_first(lost: bool) -> None:
    """A request may be cancelled while a failed fetch is being stopped."""
    rank, called = Rank(), list[str]()
    group = KvGroup(cast(KvEndpoint, rank), [cast(RankClient, rank)])
    handle = worker_pb2.KvHandle(transfer_id=b"t" * 16, num_tokens=16)
    group.offer(1, handle, SequenceKv((TableBlocks((0,)),)), b"hash")
    for name in ("first", "second", "third"):
        group.stop(1, lambda name=name: called.append(name))  # type: ignore[misc]
    for _ in range(10):
        await asyncio.sleep(0)
    assert not called
    (stopped,) = rank.stopped
    if lost:
        stopped.set_exception(RankLost("lost"))
    else:
        stopped.set_result(None)
    await asyncio.gather(*group._stopping.values())
    assert called == ([] if lost else ["first", "second", "third"])
    group.stop(2, lambda: called.append("other"))
    assert called[-1:] == ["other"]


async def test_ranks_hear_of_a_sequence_from_its_offer_to_its_stop() -> None:
    """Commands after the stop would start a transfer of blocks that another sequence has."""
    rank = Rank()
    group = KvGroup(cast(KvEndpoint, rank), [cast(RankClient, rank)])
    handle = worker_pb2.KvHandle(transfer_id=b"t" * 16, num_tokens=16)
    group.progress(1, 8)
    assert not rank.commands
    group.offer(1, handle, SequenceKv((TableBlocks((0,)),)), b"hash")
    group.progress(1, 8, 16, 2)
    group.progress(2, 8)
    offered, progress = rank.commands
    assert (offered.sequence_id, offered.offer_kv.kv) == (1, handle)
    assert progress.kv_progress == worker_pb2.KvProgress(num_ready=8, num_ahead=16, num_layers=2)
    group.stop(1, lambda: None)
    group.progress(1, 16)
    assert len(rank.commands) == 2
    rank.stopped[0].set_result(None)
    await asyncio.gather(*group._stopping.values())


async def test_blocks_are_free_when_a_load_into_them_has_ended() -> None:
    """A load that is cancelled may still write until it ends."""
    ended = list[str]()

    async def load() -> int:
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            await asyncio.sleep(0)
            ended.append("load")
        return 0

    group = KvGroup(cast(KvEndpoint, Rank()))
    group.load(1, load())
    await asyncio.sleep(0)
    group.stop(1, lambda: ended.append("free"))
    assert not ended
    await asyncio.gather(*group._stopping.values())
    assert ended == ["load", "free"]
