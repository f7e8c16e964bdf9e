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
