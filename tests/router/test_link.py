"""The session between a router and a worker, against a worker that the test plays."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from tandem.proto import inference_pb2, worker_pb2, worker_pb2_grpc
from tandem.proto.channel import peer_server
from tandem.router.link import Attempt, LinkBroken, WorkerLink

Context = object


class PlayedWorker(worker_pb2_grpc.WorkerServicer):
    """Keeps the commands that come and says what the test says."""

    def __init__(self) -> None:
        self.commands: asyncio.Queue[worker_pb2.SessionRequest] = asyncio.Queue()
        self.answers: asyncio.Queue[worker_pb2.SessionResponse | None] = asyncio.Queue()
        self.server = peer_server()
        worker_pb2_grpc.add_WorkerServicer_to_server(self, self.server)  # type: ignore[no-untyped-call]
        self.address = f"127.0.0.1:{self.server.add_insecure_port('127.0.0.1:0')}"

    async def Session(
        self, requests: AsyncIterator[worker_pb2.SessionRequest], context: Context
    ) -> AsyncIterator[worker_pb2.SessionResponse]:
        reader = asyncio.create_task(self._read(requests))
        try:
            while (answer := await self.answers.get()) is not None:
                yield answer
        finally:
            reader.cancel()

    async def _read(self, requests: AsyncIterator[worker_pb2.SessionRequest]) -> None:
        async for request in requests:
            self.commands.put_nowait(request)

    def say(self, *outputs: worker_pb2.Output, waiting: int = 0) -> None:
        load = worker_pb2.Load(num_waiting=waiting)
        self.answers.put_nowait(worker_pb2.SessionResponse(outputs=outputs, load=load))


@asynccontextmanager
async def linked() -> AsyncIterator[tuple[PlayedWorker, WorkerLink, list[int]]]:
    worker = PlayedWorker()
    await worker.server.start()
    loads: list[int] = []
    link = WorkerLink(worker.address, lambda load: loads.append(load.num_waiting))
    try:
        async with asyncio.timeout(20):
            yield worker, link, loads
    finally:
        await link.close()
        await worker.server.stop(0)


def token(request_id: str, index: int, *, attempt: int = 1, last: bool = False) -> worker_pb2.Output:
    reason = inference_pb2.FINISH_REASON_LENGTH if last else inference_pb2.FINISH_REASON_UNSPECIFIED
    tokens = worker_pb2.Tokens(first_index=index, ids=[7], finish_reason=reason)
    return worker_pb2.Output(request_id=request_id, attempt=attempt, tokens=tokens)


def submit(request_id: str, attempt: int = 1) -> worker_pb2.Submit:
    return worker_pb2.Submit(request_id=request_id, attempt=attempt)


async def test_each_attempt_gets_its_own_answers_in_order() -> None:
    async with linked() as (worker, link, loads):
        attempts = {name: link.submit(submit(name)) for name in "abc"}
        for name in "abc":
            assert (await worker.commands.get()).submit.request_id == name
        for index in range(3):
            worker.say(*(token(name, index) for name in "cab"), waiting=index)
        for attempt in attempts.values():
            assert [(await attempt.next()).tokens.first_index for _ in range(3)] == [0, 1, 2]
        assert loads == [0, 1, 2]


async def test_answers_to_an_older_attempt_are_dropped() -> None:
    async with linked() as (worker, link, _):
        first = link.submit(submit("a", 1))
        first.end()
        first.end()
        second = link.submit(submit("a", 2))
        worker.say(token("a", 0, attempt=1), token("b", 5), token("a", 9, attempt=2))
        assert (await second.next()).tokens.first_index == 9
        commands = [await worker.commands.get() for _ in range(3)]
        assert [command.WhichOneof("command") for command in commands] == ["submit", "cancel", "submit"]
        assert commands[1].cancel == worker_pb2.Cancel(request_id="a", attempt=1)


async def test_what_the_worker_ended_is_not_cancelled() -> None:
    async with linked() as (worker, link, _):
        finished, failed = link.submit(submit("a")), link.submit(submit("b"))
        failure = worker_pb2.Output(request_id="b", attempt=1, failure=worker_pb2.Failure())
        worker.say(token("a", 0, last=True), failure)
        assert (await finished.next()).tokens.finish_reason
        assert (await failed.next()).HasField("failure")
        finished.end()
        failed.end()
        link.submit(submit("c"))
        commands = [await worker.commands.get() for _ in range(3)]
        assert [command.submit.request_id for command in commands] == ["a", "b", "c"]


async def broken(attempt: Attempt) -> None:
    for _ in range(2):
        with pytest.raises(LinkBroken):
            await attempt.next()


@pytest.mark.parametrize("how", ["end", "stop", "close", "nobody"])
async def test_the_end_of_the_stream_reaches_every_attempt(how: str) -> None:
    async with linked() as (worker, link, _):
        if how == "nobody":
            await worker.server.stop(0)
        attempts = [link.submit(submit(name)) for name in "abc"]
        if how != "nobody":
            await worker.commands.get()
        if how == "end":
            worker.answers.put_nowait(None)
        elif how == "stop":
            await worker.server.stop(0)
        elif how == "close":
            await link.close()
        for attempt in attempts:
            await broken(attempt)
        assert link.broken
        await broken(link.submit(submit("late")))
        for attempt in attempts:
            attempt.end()


async def test_a_submit_in_the_very_moment_of_the_break_is_told() -> None:
    """Whoever hears of the break first may submit again at once, while the link still tidies up."""
    async with linked() as (worker, link, _):
        first = link.submit(submit("a"))
        await worker.commands.get()
        worker.answers.put_nowait(None)
        await broken(first)
        await broken(link.submit(submit("b")))


async def test_a_link_closed_before_it_began_breaks_too() -> None:
    link = WorkerLink("127.0.0.1:1", lambda load: None)
    attempt = link.submit(submit("a"))
    async with asyncio.timeout(5):
        await link.close()
        await broken(attempt)
