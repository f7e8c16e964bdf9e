"""Tests the directory without Ray: registration, expiry, long poll, restart."""

import asyncio
import threading
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from hypothesis import given
from hypothesis import strategies as st

from tandem.cluster.serve import directory as directory_client
from tandem.cluster.serve import members
from tandem.cluster.serve.directory import DirectoryClient
from tandem.cluster.serve.members import (
    NOTHING,
    Changes,
    Continuity,
    Directory,
    RouterInfo,
    Version,
)
from tandem.cluster.serve.views.member_view import DirectoryWatcher
from tandem.proto import worker_pb2
from tandem.proto.errors import Unavailable
from tandem.router.adapters import AdapterRegistry
from tandem.router.dispatch.blocked_prompts import BlockedPrompts
from tandem.router.scheduling.registry import WorkerRegistry
from tandem.tests.local_directory import LocalDirectory
from tandem.tests.router.pools import request
from tandem.tests.waits import WAIT

REQUEST = request((5, 6, 7))


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def worker(
    worker_id: str, *, epoch: int = 1, running: int = 0, version: int = 0, draining: bool = False
) -> bytes:
    load = worker_pb2.WorkerLoad(num_running=running, version=version)
    role = worker_pb2.ROLE_DECODE
    info = worker_pb2.WorkerInfo(
        worker_id=worker_id, epoch=epoch, role=role, load=load, draining=draining
    )
    return info.SerializeToString(deterministic=True)


def ids(snapshot: Changes) -> list[str]:
    return [worker_pb2.WorkerInfo.FromString(info).worker_id for info in snapshot.workers]


async def test_register_refresh_and_remove() -> None:
    directory = Directory(clock=Clock())
    await directory.register(worker("b"))
    await directory.register(worker("a"))
    before = await directory.changes()
    assert ids(before) == ["a", "b"]
    await directory.register(worker("a"))
    assert (await directory.changes()).version == before.version, (
        "an unchanged heartbeat is no news"
    )
    await directory.register(worker("a", running=3, version=1))
    after = await directory.changes()
    assert after.version == before.version, "a load is no news of the members"
    loads = [worker_pb2.WorkerInfo.FromString(each).load for each in after.workers]
    assert [each.num_running for each in loads] == [3, 0], "a new router gets the last loads"
    await directory.remove("b")
    await directory.remove("never-there")
    assert ids(await directory.changes()) == ["a"]


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
    (info,) = (await directory.changes()).workers
    expected = worker_pb2.WorkerInfo.FromString(worker("a", **newer))
    assert worker_pb2.WorkerInfo.FromString(info) == expected


async def test_a_silent_worker_is_dropped_and_others_stay() -> None:
    clock = Clock()
    directory = Directory(expiry=10, clock=clock)
    await directory.register(worker("silent"))
    for _ in range(9):
        clock.now += 1
        await directory.register(worker("alive"))
    assert ids(await directory.changes()) == ["alive", "silent"]
    clock.now += 1
    assert ids(await directory.changes()) == ["alive"]


async def test_a_frozen_directory_does_not_drop_everybody_when_it_wakes() -> None:
    clock = Clock()
    directory = Directory(expiry=10, clock=clock)
    await directory.register(worker("a"))
    await directory.register(worker("b"))
    clock.now += 60
    await directory.register(worker("a"))
    assert ids(await directory.changes()) == ["a", "b"]
    for _ in range(10):
        clock.now += 1
        await directory.register(worker("a"))
    assert ids(await directory.changes()) == ["a"]


async def test_watch_answers_at_once_when_there_is_news_and_else_waits_for_it() -> None:
    directory = Directory()
    first = await directory.watch(NOTHING, timeout=60)
    waiting = asyncio.create_task(directory.watch(first.version, timeout=60))
    await asyncio.sleep(0)
    assert not waiting.done()
    await directory.register(worker("a"))
    async with asyncio.timeout(WAIT):
        assert ids(await waiting) == ["a"]


async def test_watch_ends_at_its_timeout() -> None:
    directory = Directory()
    first = await directory.changes()
    async with asyncio.timeout(WAIT):
        same = await directory.watch(first.version, timeout=0.05)
    assert (same.version, same.workers) == (first.version, ())


async def test_watch_tells_of_an_expiry_that_nobody_announced() -> None:
    directory = Directory(expiry=0.2)
    await directory.register(worker("a"))
    known = await directory.changes()
    async with asyncio.timeout(WAIT):
        assert (await directory.watch(known.version, timeout=60)).removed == ("a",)


async def test_a_router_is_registered_as_long_as_it_watches() -> None:
    clock = Clock()
    directory = Directory(expiry=10, clock=clock)
    routers = [
        RouterInfo(router_id=f"r{n}", grpc_address=f"h:{n}", http_address=f"h:{n + 10}")
        for n in range(2)
    ]
    first = await directory.watch(NOTHING, 60, routers[0])
    assert (first.routers, first.workers) == ((routers[0],), ())
    waiting = asyncio.create_task(directory.watch(first.version, 60, routers[0]))
    await asyncio.sleep(0)
    second = await directory.watch(NOTHING, 60, routers[1])
    async with asyncio.timeout(WAIT):
        assert (await waiting).routers == (routers[1],)
    assert second.routers == tuple(routers)
    await directory.register(worker("a"))
    knows_a = replace(routers[1], num_workers=1)
    assert (await directory.watch(NOTHING, 60, knows_a)).routers == (routers[0], knows_a)
    for _ in range(2):
        clock.now += 4
        await directory.watch(NOTHING, 60, knows_a)
    clock.now += 4
    assert (await directory.changes()).routers == (knows_a,), "the other has not watched for 10 s"
    await directory.remove("r1")
    assert (await directory.changes()).routers == ()


async def test_a_conviction_reaches_every_router_and_those_that_join() -> None:
    routers = [
        RouterInfo(router_id=f"r{n}", grpc_address=f"h:{n}", http_address=f"h:{n + 10}")
        for n in range(3)
    ]
    watchers, blocked_prompts = (
        [DirectoryWatcher() for _ in routers],
        [BlockedPrompts() for _ in routers],
    )
    directory = Directory()
    client = LocalDirectory(directory)
    for number in range(2):
        await client.watch(
            watchers[number], routers[number], blocked_prompts[number], AdapterRegistry()
        )
    # The first router knows the second one now.
    await client.watch(watchers[0], routers[0], blocked_prompts[0], AdapterRegistry())
    waiting = asyncio.create_task(
        client.watch(watchers[1], routers[1], blocked_prompts[1], AdapterRegistry())
    )
    sharing = asyncio.create_task(
        client.keep_sharing(watchers[0], blocked_prompts[0], AdapterRegistry())
    )
    await asyncio.sleep(0)
    blocked_prompts[0].block(REQUEST)
    assert not blocked_prompts[1].is_blocked(REQUEST)
    async with asyncio.timeout(WAIT):
        await waiting
    sharing.cancel()
    assert blocked_prompts[1].is_blocked(REQUEST)
    version = (await directory.changes()).version
    await directory.share(blocked_prompts[1].remaining(), {})
    assert (await directory.changes()).version == version, "what all know wakes nobody"
    again = LocalDirectory(Directory())  # one that has lost everything
    for _ in range(2):  # with the first it notices that this directory is another one
        await again.watch(watchers[1], routers[1], blocked_prompts[1], AdapterRegistry())
    await again.watch(watchers[2], routers[2], blocked_prompts[2], AdapterRegistry())
    assert blocked_prompts[2].is_blocked(REQUEST)


def snapshot(incarnation: str, age: float, *workers: str) -> Changes:
    version = Version(incarnation=incarnation, members=1)
    listed = tuple(worker(id_) for id_ in workers)
    return Changes(version=version, is_whole=True, age=age, workers=listed)


@pytest.mark.parametrize(
    ("snapshots", "believed"),
    [
        ([snapshot("x", 0, "a")], {"a"}),
        ([snapshot("x", 50, "a", "b"), snapshot("x", 51, "a")], {"a"}),
        ([snapshot("x", 1, "a", "b"), snapshot("x", 2, "a")], {"a"}),
        # A restarted directory is empty at first: the workers are believed in until they had time
        # to come back.
        ([snapshot("x", 50, "a", "b"), snapshot("y", 0)], {"a", "b"}),
        (
            [snapshot("x", 50, "a", "b"), snapshot("y", 0), snapshot("y", 1, "a", "c")],
            {"a", "b", "c"},
        ),
        ([snapshot("x", 50, "a", "b"), snapshot("y", 1, "a", "b"), snapshot("y", 2, "b")], {"b"}),
        ([snapshot("x", 50, "a", "b"), snapshot("y", 0), snapshot("y", 10, "a")], {"a"}),
        ([snapshot("x", 50, "a"), snapshot("y", 0), snapshot("z", 1, "b")], {"a", "b"}),
    ],
)
def test_the_workers_that_a_watcher_keeps(snapshots: list[Changes], believed: set[str]) -> None:
    watcher = DirectoryWatcher(expiry=10)
    for one in snapshots:
        watcher.apply(one)
    assert {info.worker_id for info in watcher.workers} == believed
    assert len(watcher.workers) == len(believed)
    assert watcher.version == snapshots[-1].version


async def test_heartbeats_with_other_loads_end_no_poll() -> None:
    directory = Directory(clock=Clock())
    for number in range(300):
        await directory.register(worker(f"w{number:03}", version=1))
    known = (await directory.changes()).version
    waiting = asyncio.create_task(directory.watch(known, timeout=60))
    for number in range(299):
        await directory.register(worker(f"w{number:03}", version=2, running=5))
        await asyncio.sleep(0)
    assert not waiting.done()
    await directory.register(worker("w001", version=3, running=6, draining=True))
    async with asyncio.timeout(WAIT):
        found = await waiting
    assert ids(found) == ["w001"]


def test_a_watcher_keeps_the_objects_of_unchanged_workers() -> None:
    """So the registry skips them: a change of one of 1,000 workers costs little."""
    watcher = DirectoryWatcher()
    watcher.apply(snapshot("x", 50, "a", "b"))
    before = {each.worker_id: each for each in watcher.workers}
    version = Version(incarnation="x", members=2)
    watcher.apply(
        Changes(version=version, is_whole=False, age=51, workers=(worker("b", draining=True),))
    )
    after = {each.worker_id: each for each in watcher.workers}
    assert after["a"] is before["a"]
    assert after["b"].draining


async def test_whoever_has_missed_more_than_is_remembered_gets_the_whole_list(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(members, "_MAX_REMOVED", 2)
    directory, watchers = Directory(clock=Clock()), [DirectoryWatcher() for _ in range(2)]
    for number in range(5):
        await directory.register(worker(f"w{number}"))
    for watcher in watchers:
        watcher.apply(await directory.changes())
    for number in range(3):
        await directory.remove(f"w{number}")
        watchers[0].apply(await directory.changes(watchers[0].version))
    missed = await directory.changes(watchers[1].version)
    assert missed.is_whole
    watchers[1].apply(missed)
    for watcher in watchers:
        assert {info.worker_id for info in watcher.workers} == {"w3", "w4"}


@given(st.lists(st.tuples(st.sampled_from("wldxrqcpn"), st.integers(0, 4)), max_size=60))
def test_changes_add_up_to_the_whole_list(steps: list[tuple[str, int]]) -> None:
    """Two routers that poll at different times know the same as a new one."""
    asyncio.run(_check_changes(steps))


async def _check_changes(steps: list[tuple[str, int]]) -> None:
    clock = Clock()
    directory, watchers = Directory(expiry=10, clock=clock), [DirectoryWatcher() for _ in range(2)]
    registries = [WorkerRegistry() for _ in watchers]

    async def poll(number: int) -> None:
        watcher, registry = watchers[number], registries[number]
        if watcher.apply(await directory.changes(watcher.version)):
            registry.update(watcher.workers)

    for version, (kind, number) in enumerate(steps, 1):
        if kind in "wl":  # more likely than the others
            await directory.register(worker(f"w{number}", version=version, running=version))
        elif kind == "d":
            await directory.register(worker(f"w{number}", version=version, draining=True))
        elif kind == "x":
            await directory.remove(f"w{number}")
        elif kind == "n":
            clock.now += 3
        elif kind == "r":
            router = RouterInfo(router_id=f"r{number}", grpc_address=str(version), http_address="")
            await directory.watch(NOTHING, 0.0, router)
        else:
            await poll("qcp".index(kind) % 2)
    whole = DirectoryWatcher()
    whole.apply(await directory.changes())
    expected = {info.worker_id: info.draining for info in whole.workers}
    for number, watcher in enumerate(watchers):
        await poll(number)
        assert watcher.routers == whole.routers
        assert expected == {info.worker_id: info.draining for info in registries[number].workers()}


class FailingReports(LocalDirectory):
    """Fails calls of one method; tells when a poll waits and when a call has failed."""

    def __init__(self, directory: Directory) -> None:
        super().__init__(directory)
        self.fails = "share"
        self.polling = asyncio.Event()
        self.failed = asyncio.Event()

    async def _call(self, method: str, *args: object, wait: float = 0.0) -> Any:
        if method == self.fails:
            self.failed.set()
            raise Unavailable("the directory does not answer")
        self.polling.set()
        return await super()._call(method, *args, wait=wait)


class Opening:
    """Stands in for `open_directory`, which waits inside Ray while no GCS server answers."""

    def __init__(self, error: Exception | None = None) -> None:
        self.num_calls = 0
        self.may_end = threading.Event()
        self.changes = snapshot("a", 0.0)
        self._error = error

    def __call__(self, *_: object) -> Any:
        self.num_calls += 1
        assert self.may_end.wait(WAIT)
        if self._error is not None and self.num_calls == 1:
            raise self._error
        return SimpleNamespace(changes=SimpleNamespace(remote=self._changes))

    async def _changes(self) -> Changes:
        return self.changes


@pytest.mark.parametrize("error", [None, ValueError("no GCS server")])
async def test_calls_without_a_gcs_server_wait_for_one_thread(
    monkeypatch: pytest.MonkeyPatch, error: Exception | None
) -> None:
    """A thread for each would use up asyncio's pool, on which the rest of a router depends."""
    opening = Opening(error)
    problems: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, problem: problems.append(problem))
    monkeypatch.setattr(directory_client, "open_directory", opening)
    monkeypatch.setattr(directory_client, "CALL_SECONDS", 0.01)
    client = DirectoryClient("a")
    for _ in range(3):
        calls = [client.changes() for _ in range(3)]
        answers = await asyncio.gather(*calls, return_exceptions=True)
        assert [type(answer) for answer in answers] == [Unavailable] * 3
    opening.may_end.set()
    monkeypatch.setattr(directory_client, "CALL_SECONDS", WAIT)
    async with asyncio.timeout(WAIT):
        while client._opening is not None:
            await asyncio.sleep(0.01)
    assert await client.changes() is opening.changes
    assert opening.num_calls == (1 if error is None else 2)
    assert not problems


class MethodError(ray.exceptions.RayTaskError, TypeError):
    """The error of a method, as Ray raises it; for instance of another release's directory."""

    def __init__(self) -> None:
        pass


@pytest.mark.parametrize(
    "error",
    [
        ray.exceptions.ActorDiedError(),
        ray.exceptions.WorkerCrashedError(),
        ray.exceptions.OwnerDiedError("0", None, ""),
        MethodError(),
        ray.exceptions.ActorHandleNotFoundError("the actor has ended"),
        ValueError("no actor of this name"),
        TimeoutError(),
    ],
)
async def test_whatever_ray_raises_the_directory_is_unavailable_and_opened_again(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """Any other exception would end the replica's background tasks, and so the replica."""

    async def fail() -> None:
        raise error

    opening = Opening()
    opening.may_end.set()
    monkeypatch.setattr(directory_client, "open_directory", opening)
    client = DirectoryClient("a")
    client._handle = SimpleNamespace(changes=SimpleNamespace(remote=fail))
    with pytest.raises(Unavailable, match=type(error).__name__):
        await client.changes()
    assert await client.changes() is opening.changes


async def test_what_a_failed_report_could_not_share_is_in_the_next_poll() -> None:
    """The report fails while a poll waits, which ends after it without an error."""
    directory = Directory()
    client = FailingReports(directory)
    watcher, blocked_prompts = DirectoryWatcher(), BlockedPrompts()
    me = RouterInfo(router_id="r", grpc_address="h:1", http_address="h:2")
    poll = partial(client.watch, watcher, me, blocked_prompts, AdapterRegistry())
    await poll()
    await directory.register(worker("a"))
    await poll()
    client.polling.clear()
    waiting = asyncio.create_task(poll())
    sharing = asyncio.create_task(client.keep_sharing(watcher, blocked_prompts, AdapterRegistry()))
    async with asyncio.timeout(WAIT):
        await client.polling.wait()
        blocked_prompts.block(REQUEST)
        await client.failed.wait()
        await directory.register(worker("b"))
        await waiting
        sharing.cancel()
        assert not (await directory.changes()).blocked
        await poll()
    assert (await directory.changes()).blocked


async def test_what_a_failed_poll_could_not_share_is_in_the_next_one() -> None:
    directory = Directory()
    client = FailingReports(directory)
    watcher, blocked_prompts = DirectoryWatcher(), BlockedPrompts()
    me = RouterInfo(router_id="r", grpc_address="h:1", http_address="h:2")
    blocked_prompts.block(REQUEST)
    client.fails = "watch"
    with pytest.raises(Unavailable):
        await client.watch(watcher, me, blocked_prompts, AdapterRegistry())
    client.fails = ""
    await client.watch(watcher, me, blocked_prompts, AdapterRegistry())
    assert (await directory.changes()).blocked


@pytest.mark.parametrize("kind", [Changes, Continuity, Directory, RouterInfo, Version])
def test_another_release_finds_the_classes_that_ray_passes_to_it(kind: type) -> None:
    assert (kind.__module__, kind.__qualname__) == (members.__name__, kind.__name__)
    assert members.__name__ == "tandem.cluster.serve.members"
