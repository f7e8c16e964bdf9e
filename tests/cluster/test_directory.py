"""Tests the directory without Ray: registration, expiry, long poll, and a router's list after a restart."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from tandem.cluster.directory import Directory, DirectoryWatcher, RouterInfo, Snapshot
from tandem.proto import worker_pb2
from tandem.router.dispatch.convictions import Convictions
from tandem.tests.local_directory import LocalDirectory
from tandem.tests.router.pools import request

REQUEST = request((5, 6, 7))


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def worker(worker_id: str, *, epoch: int = 1, running: int = 0, version: int = 0, draining: bool = False) -> bytes:
    load = worker_pb2.WorkerLoad(num_running=running, version=version)
    info = worker_pb2.WorkerInfo(worker_id=worker_id, epoch=epoch, load=load, draining=draining)
    return info.SerializeToString(deterministic=True)


def ids(snapshot: Snapshot) -> list[str]:
    return [worker_pb2.WorkerInfo.FromString(info).worker_id for info in snapshot.workers]


async def test_register_refresh_and_remove() -> None:
    directory = Directory(clock=Clock())
    await directory.register(worker("b"))
    await directory.register(worker("a"))
    before = await directory.snapshot()
    assert ids(before) == ["a", "b"]
    await directory.register(worker("a"))
    assert (await directory.snapshot()).version == before.version, "an unchanged heartbeat is no news"
    await directory.register(worker("a", running=3))
    assert (await directory.snapshot()).version > before.version
    await directory.remove("b")
    await directory.remove("never-there")
    assert ids(await directory.snapshot()) == ["a"]


@pytest.mark.parametrize(
    ("newer", "older"),
    [
        ({"epoch": 2, "running": 2}, {"epoch": 1, "running": 1, "version": 9}),
        ({"running": 2, "version": 5}, {"running": 1, "version": 4}),
        ({"version": 5, "draining": True}, {"version": 4}),
        ({"version": 5, "draining": True}, {"version": 5}),
    ],
)
async def test_an_older_report_is_ignored(newer: dict[str, Any], older: dict[str, Any]) -> None:
    directory = Directory(clock=Clock())
    await directory.register(worker("a", **older))
    await directory.register(worker("a", **newer))
    await directory.register(worker("a", **older))
    (info,) = (await directory.snapshot()).workers
    assert info == worker("a", **newer)


async def test_a_silent_worker_is_dropped_and_others_stay() -> None:
    clock = Clock()
    directory = Directory(expiry=10, clock=clock)
    await directory.register(worker("silent"))
    for _ in range(9):
        clock.now += 1
        await directory.register(worker("alive"))
    assert ids(await directory.snapshot()) == ["alive", "silent"]
    clock.now += 1
    assert ids(await directory.snapshot()) == ["alive"]


async def test_a_frozen_directory_does_not_drop_everybody_when_it_wakes() -> None:
    clock = Clock()
    directory = Directory(expiry=10, clock=clock)
    await directory.register(worker("a"))
    await directory.register(worker("b"))
    clock.now += 60
    await directory.register(worker("a"))
    assert ids(await directory.snapshot()) == ["a", "b"]
    for _ in range(10):
        clock.now += 1
        await directory.register(worker("a"))
    assert ids(await directory.snapshot()) == ["a"]


async def test_watch_answers_at_once_when_there_is_news_and_else_waits_for_it() -> None:
    directory = Directory()
    first = await directory.watch("", -1, timeout=60)
    waiting = asyncio.create_task(directory.watch(first.incarnation, first.version, timeout=60))
    await asyncio.sleep(0)
    assert not waiting.done()
    await directory.register(worker("a"))
    async with asyncio.timeout(5):
        assert ids(await waiting) == ["a"]


async def test_watch_ends_at_its_timeout() -> None:
    directory = Directory()
    first = await directory.snapshot()
    async with asyncio.timeout(5):
        same = await directory.watch(first.incarnation, first.version, timeout=0.05)
    assert (same.version, same.workers) == (first.version, ())


async def test_watch_tells_of_an_expiry_that_nobody_announced() -> None:
    directory = Directory(expiry=0.2)
    await directory.register(worker("a"))
    known = await directory.snapshot()
    async with asyncio.timeout(5):
        assert ids(await directory.watch(known.incarnation, known.version, timeout=60)) == []


async def test_a_router_is_registered_as_long_as_it_watches() -> None:
    clock = Clock()
    directory = Directory(expiry=10, clock=clock)
    routers = [RouterInfo(router_id=f"r{n}", grpc_address=f"h:{n}", http_address=f"h:{n + 10}") for n in range(2)]
    first = await directory.watch("", -1, 60, routers[0])
    assert (first.routers, first.workers) == ((routers[0],), ())
    waiting = asyncio.create_task(directory.watch(first.incarnation, first.version, 60, routers[0]))
    await asyncio.sleep(0)
    second = await directory.watch("", -1, 60, routers[1])
    async with asyncio.timeout(5):
        assert (await waiting).routers == second.routers == tuple(routers)
    await directory.register(worker("a"))
    knows_a = replace(routers[1], num_workers=1)
    assert (await directory.watch("", -1, 60, knows_a)).routers == (routers[0], knows_a)
    for _ in range(2):
        clock.now += 4
        await directory.watch("", -1, 60, knows_a)
    clock.now += 4
    assert (await directory.snapshot()).routers == (knows_a,), "the other has not watched for 10 s"
    await directory.remove("r1")
    assert (await directory.snapshot()).routers == ()


async def test_a_conviction_reaches_every_router_and_those_that_join() -> None:
    routers = [RouterInfo(router_id=f"r{n}", grpc_address=f"h:{n}", http_address=f"h:{n + 10}") for n in range(3)]
    watchers, convictions = [DirectoryWatcher() for _ in routers], [Convictions() for _ in routers]
    directory = Directory()
    client = LocalDirectory(directory)
    for number in range(2):
        await client.watch(watchers[number], routers[number], convictions[number])
    await client.watch(watchers[0], routers[0], convictions[0])  # it knows of the second one now
    waiting = asyncio.create_task(client.watch(watchers[1], routers[1], convictions[1]))
    sharing = asyncio.create_task(client.keep_sharing(convictions[0]))
    await asyncio.sleep(0)
    convictions[0].convict(REQUEST)
    assert not convictions[1].is_convicted(REQUEST)
    async with asyncio.timeout(5):
        await waiting
    sharing.cancel()
    assert convictions[1].is_convicted(REQUEST)
    version = (await directory.snapshot()).version
    await directory.watch("", -1, 0.0, None, convictions[1].remaining())
    assert (await directory.snapshot()).version == version, "what all know wakes nobody"
    again = LocalDirectory(Directory())  # one that has lost everything
    await again.watch(watchers[1], routers[1], convictions[1])
    await again.watch(watchers[2], routers[2], convictions[2])
    assert convictions[2].is_convicted(REQUEST)


def snapshot(incarnation: str, age: float, *workers: str) -> Snapshot:
    return Snapshot(incarnation=incarnation, version=1, age=age, workers=tuple(worker(id_) for id_ in workers))


@pytest.mark.parametrize(
    ("snapshots", "believed"),
    [
        ([snapshot("x", 0, "a")], {"a"}),
        ([snapshot("x", 50, "a", "b"), snapshot("x", 51, "a")], {"a"}),
        ([snapshot("x", 1, "a", "b"), snapshot("x", 2, "a")], {"a"}),
        # A restarted directory is empty at first: the workers are believed in until they had time to come back.
        ([snapshot("x", 50, "a", "b"), snapshot("y", 0)], {"a", "b"}),
        ([snapshot("x", 50, "a", "b"), snapshot("y", 0), snapshot("y", 1, "a", "c")], {"a", "b", "c"}),
        ([snapshot("x", 50, "a", "b"), snapshot("y", 1, "a", "b"), snapshot("y", 2, "b")], {"b"}),
        ([snapshot("x", 50, "a", "b"), snapshot("y", 0), snapshot("y", 10, "a")], {"a"}),
        ([snapshot("x", 50, "a"), snapshot("y", 0), snapshot("z", 1, "b")], {"a", "b"}),
    ],
)
def test_the_workers_that_a_watcher_keeps(snapshots: list[Snapshot], believed: set[str]) -> None:
    watcher = DirectoryWatcher(expiry=10)
    workers = [watcher.apply(one) for one in snapshots][-1]
    assert {info.worker_id for info in workers} == believed
    assert len(workers) == len(believed)
    assert (watcher.incarnation, watcher.version) == (snapshots[-1].incarnation, 1)
