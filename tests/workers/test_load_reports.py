"""Tests how often a worker reports its load to the sessions of routers, in simulated time."""

import asyncio
from itertools import pairwise
from typing import cast

from tandem.cluster.sim.loop import run_simulated
from tandem.proto import worker_pb2
from tandem.workers.serve.load_reports import IDLE_SECONDS, LOAD_SECONDS, LoadReports
from tandem.workers.serve.session import RouterSession, WorkerRequest


class Reporter:
    """Counts the loads that a busy session, with a request, and an idle one get."""

    def __init__(self) -> None:
        self.load = worker_pb2.WorkerLoad()
        self.busy = RouterSession()
        self.busy.requests["a", 1] = cast(WorkerRequest, None)
        self.idle = RouterSession()
        self.reports = LoadReports(lambda: self.load, {self.busy, self.idle})
        self.times: dict[bool, list[float]] = {True: [], False: []}
        self._tasks = [asyncio.create_task(self._read(each)) for each in (self.busy, self.idle)]

    async def _read(self, session: RouterSession) -> None:
        while (message := await session.take()) is not None:
            self.reports.add_to(message, session)
            if message.HasField("load"):
                now = asyncio.get_running_loop().time()
                self.times[session is self.busy].append(now)

    def change(self) -> None:
        self.load = worker_pb2.WorkerLoad(version=self.load.version + 1)

    async def end(self) -> None:
        for session in (self.busy, self.idle):
            session.close()
        await asyncio.gather(*self._tasks)


def test_a_load_is_reported_every_quarter_of_a_second_and_every_two_to_idle_sessions() -> None:
    async def run() -> None:
        reporter = Reporter()
        for _ in range(1_000):
            reporter.change()
            reporter.reports.changed()
            await asyncio.sleep(0.01)
        busy, idle = reporter.times[True], reporter.times[False]
        assert (busy[0], idle[0]) == (0.0, 0.0)  # a change after a pause is reported at once
        for times, seconds in ((busy, LOAD_SECONDS), (idle, IDLE_SECONDS)):
            gaps = [after - before for before, after in pairwise(times)]
            assert min(gaps) >= seconds - 1e-6
            assert max(gaps) <= seconds + LOAD_SECONDS + 1e-6
            assert len(times) >= 8 / seconds
        await asyncio.sleep(IDLE_SECONDS + 0.1)
        for session in (reporter.busy, reporter.idle):
            assert not session.is_stale(reporter.load.version), "both know the last load"
        await reporter.end()

    run_simulated(run())


def test_a_change_that_the_engine_applies_later_is_reported() -> None:
    async def run() -> None:
        reporter = Reporter()
        reporter.reports.changed()  # a request has ended
        await asyncio.sleep(0.1)
        before = len(reporter.times[True])
        reporter.change()  # its blocks are free
        await asyncio.sleep(LOAD_SECONDS)
        assert len(reporter.times[True]) == before + 1
        await asyncio.sleep(60)
        assert len(reporter.times[True]) == before + 1, "an unchanged load is not reported"
        await reporter.end()

    run_simulated(run())


def test_cache_changes_go_to_idle_sessions_with_the_next_report() -> None:
    async def run() -> None:
        load = worker_pb2.WorkerLoad(version=1)
        session = RouterSession(load_version=1)
        reports = LoadReports(lambda: load, {session})
        session.change_cache([b"a"], [])
        session.wake()
        first = await session.take()
        assert first is not None
        assert list(first.stored_blocks) == [b"a"]
        session.change_cache([b"b"], [b"a"])
        reports.changed()
        message = await session.take()
        assert message is not None
        assert (list(message.stored_blocks), list(message.evicted_blocks)) == ([b"b"], [b"a"])

    run_simulated(run())
