"""The session between a router and a worker, against a worker whose answers the test writes."""

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.proto import worker_pb2
from tandem.router.dispatch.worker_client import WorkerClient, WorkerStream
from tandem.tests.router.fake_worker import FakeWorker, open_session, token
from tandem.tests.router.pieces import pieces
from tandem.tests.waits import WAIT

WORKER = ("d0", 1)


class Reader:
    """Submits, and takes outputs one by one."""

    def __init__(self, client: WorkerClient, request_id: str, **submit: Any) -> None:
        self._wake = asyncio.Event()
        fields = {"attempt": 1, "num_choices": 1} | submit
        self.stream = client.submit(worker_pb2.Submit(request_id=request_id, **fields), self._wake)
        self._taken: list[worker_pb2.Output] = []

    async def next(self) -> worker_pb2.Output | None:
        """None when the stream has failed and all before that was taken."""
        while not self._taken and not (taken := self.stream.take()):
            if self.stream.failure is not None:
                return None
            await self._wake.wait()
            self._wake.clear()
        self._taken = self._taken or taken
        return self._taken.pop(0)


@asynccontextmanager
async def connected(
    room_elsewhere: Callable[[], int] = lambda: 0,
) -> AsyncIterator[tuple[FakeWorker, WorkerClient, list[int]]]:
    worker = FakeWorker()
    await worker.server.start()
    loads: list[int] = []
    client = open_session(
        WORKER,
        worker.address,
        on_message=lambda client, message: loads.append(message.load.num_waiting),
        room_elsewhere=room_elsewhere,
    )
    try:
        async with asyncio.timeout(WAIT):
            yield worker, client, loads
    finally:
        await client.close()
        await worker.server.stop(0)


async def tokens(reader: Reader, count: int) -> list[int]:
    """The indices of the next tokens, however many are in one output."""
    found: list[int] = []
    while len(found) < count:
        output = await reader.next()
        assert output is not None
        found += range(
            output.tokens.first_index, output.tokens.first_index + len(output.tokens.ids)
        )
    return found


async def test_each_stream_gets_its_own_outputs_in_order() -> None:
    async with connected() as (worker, client, loads):
        readers = {name: Reader(client, name) for name in "abc"}
        for name in "abc":
            assert (await worker.commands.get()).submit.request_id == name
        for index in range(3):
            worker.send(*(token(name, index) for name in "cab"), waiting=index)
        for reader in readers.values():
            assert await tokens(reader, 3) == [0, 1, 2]
        assert loads == [0, 1, 2]


async def test_outputs_of_an_older_attempt_are_dropped() -> None:
    async with connected() as (worker, client, _):
        first = Reader(client, "a", attempt=1)
        first.stream.cancel()
        first.stream.cancel()
        second = Reader(client, "a", attempt=2)
        worker.send(token("a", 0, attempt=1), token("b", 5), token("a", 9, attempt=2))
        assert await tokens(second, 1) == [9]
        commands = [await worker.commands.get() for _ in range(3)]
        assert [command.WhichOneof("command") for command in commands] == [
            "submit",
            "cancel",
            "submit",
        ]
        assert commands[1].cancel == worker_pb2.Cancel(request_id="a", attempt=1)


async def test_what_the_worker_ended_is_not_cancelled() -> None:
    async with connected() as (worker, client, _):
        finished, failed = Reader(client, "a"), Reader(client, "b")
        failure = worker_pb2.Failure(kind=worker_pb2.FAILURE_KIND_FULL, message="queue full")
        worker.send(
            token("a", 0, last=True), worker_pb2.Output(request_id="b", attempt=1, failure=failure)
        )
        assert await tokens(finished, 1) == [0]
        assert await failed.next() is None
        assert failed.stream.failure == failure
        finished.stream.cancel()
        failed.stream.cancel()
        Reader(client, "c")
        commands = [await worker.commands.get() for _ in range(3)]
        assert [command.submit.request_id for command in commands] == ["a", "b", "c"]


async def test_choices_end_one_by_one() -> None:
    """Choice 0 ends by itself and choice 1 is cancelled, so that cancelling the last cancels the
    whole submit.
    """
    async with connected() as (worker, client, _):
        reader = Reader(client, "a", num_choices=3)
        await worker.commands.get()
        worker.send(
            token("a", 0, choice=0, last=True), token("a", 0, choice=1), token("a", 0, choice=2)
        )
        for choice in range(3):
            answer = await reader.next()
            assert answer is not None
            assert answer.choice == choice
        reader.stream.cancel_choice(0)
        reader.stream.cancel_choice(1)
        worker.send(token("a", 1, choice=1, number=66), token("a", 1, choice=2, number=77))
        answer = await reader.next()
        assert answer is not None
        assert list(answer.tokens.ids) == [77]
        reader.stream.cancel_choice(2)
        reader.stream.cancel()
        cancels = [(await worker.commands.get()).cancel for _ in range(2)]
        assert cancels[0] == worker_pb2.Cancel(request_id="a", attempt=1, choice=1)
        assert cancels[1] == worker_pb2.Cancel(request_id="a", attempt=1)
        assert worker.commands.empty()


async def test_a_single_choice_keeps_its_number() -> None:
    async with connected() as (worker, client, _):
        reader = Reader(client, "a", first_choice=3)
        worker.send(token("a", 4))
        answer = await reader.next()
        assert answer is not None
        assert answer.choice == 3


def scored(choice: int, first_index: int, ids: Sequence[int], last: bool) -> worker_pb2.Output:
    output = token("a", first_index, choice=choice, last=last)
    output.tokens.ids[:] = ids
    output.tokens.logprobs.extend(worker_pb2.TokenScores(logprob=-number) for number in ids)
    output.tokens.score = 2.5 if last else 0.0
    return output


@given(
    lengths=st.lists(st.integers(1, 12), min_size=1, max_size=4),
    order=st.randoms(use_true_random=False),
    takes=st.sets(st.integers(0, 40)),
)
def test_outputs_are_taken_once_and_in_order(
    lengths: list[int], order: random.Random, takes: set[int]
) -> None:
    client = WorkerClient.__new__(WorkerClient)
    submit = worker_pb2.Submit(request_id="a", attempt=1, num_choices=len(lengths))
    stream = WorkerStream(client, submit, asyncio.Event())
    sent = [0] * len(lengths)
    found: dict[int, list[int]] = {choice: [] for choice in range(len(lengths))}
    ended: set[int] = set()

    def take() -> None:
        for output in stream.take():
            tokens, ids = output.tokens, found[output.choice]
            assert output.choice not in ended
            assert tokens.first_index == len(ids)
            assert [-scores.logprob for scores in tokens.logprobs] == list(tokens.ids)
            assert bool(tokens.finish_reason) == (tokens.score == 2.5)
            ids += tokens.ids
            if tokens.finish_reason:
                ended.add(output.choice)

    for step, (choice, ids, is_last) in enumerate(pieces(lengths, order)):
        sent[choice] = ids.stop
        over = stream.put(scored(choice, ids.start, ids, is_last))
        assert over == (sent == lengths)
        if step in takes:
            take()
    take()
    assert found == {choice: list(range(length)) for choice, length in enumerate(lengths)}
    assert ended == set(found)


def test_events_and_gaps_keep_their_order() -> None:
    stream = WorkerStream(
        WorkerClient.__new__(WorkerClient),
        worker_pb2.Submit(request_id="a", attempt=1),
        asyncio.Event(),
    )
    joined = worker_pb2.Output(request_id="a", attempt=1, kv_received=worker_pb2.KvReceived())
    for output in (
        token("a", 0),
        token("a", 1),
        token("a", 3),
        joined,
        token("a", 4),
        token("a", 5),
    ):
        stream.put(output)
    outputs = stream.take()
    assert [output.WhichOneof("event") for output in outputs] == [
        *["tokens"] * 3,
        "kv_received",
        *["tokens"] * 2,
    ]
    assert [output.tokens.first_index for output in outputs] == [0, 1, 3, 0, 4, 5]


@pytest.mark.parametrize("how", ["end", "stop", "close", "no worker"])
async def test_the_end_of_the_session_reaches_every_stream(how: str) -> None:
    async with connected() as (worker, client, _):
        if how == "no worker":
            await worker.server.stop(0)
        readers = [Reader(client, name) for name in "abc"]
        if how != "no worker":
            await worker.commands.get()
        if how == "end":
            worker.answers.put_nowait(None)
        elif how == "stop":
            await worker.server.stop(0)
        elif how == "close":
            await client.close()
        for reader in readers:
            assert await reader.next() is None
        assert client.broken
        assert await Reader(client, "late").next() is None
        for reader in readers:
            reader.stream.cancel()


@pytest.mark.parametrize("drains", [True, False])
async def test_what_a_worker_that_drains_has_not_read_is_no_crash(drains: bool) -> None:
    async with connected() as (worker, client, _):
        reader = Reader(client, "a")
        await worker.commands.get()
        load = worker_pb2.WorkerLoad(draining=drains)
        worker.answers.put_nowait(worker_pb2.SessionResponse(load=load))
        worker.answers.put_nowait(None)
        assert await reader.next() is None
        assert reader.stream.failure is not None
        kind = worker_pb2.FAILURE_KIND_GONE if drains else worker_pb2.FAILURE_KIND_WORKER
        assert reader.stream.failure.kind == kind


async def test_a_draining_worker_suspends_as_many_sequences_as_others_have_room_for() -> None:
    room = [4]
    async with connected(lambda: room[0] - client.num_moving) as (worker, client, _):
        sizes = {"a": 1, "b": 4, "c": 2, "d": 1, "e": 1}
        readers = {name: Reader(client, name, num_choices=size) for name, size in sizes.items()}
        Reader(client, "prompt", task=worker_pb2.TASK_PREFILL)
        for _ in range(6):
            await worker.commands.get()
        load = worker_pb2.SessionResponse(load=worker_pb2.WorkerLoad(draining=True))

        async def told(count: int) -> list[str]:
            return [(await worker.commands.get()).suspend.request_id for _ in range(count)]

        worker.answers.put_nowait(load)
        assert await told(3) == ["a", "c", "d"]
        assert client.num_moving == 4
        for choice in range(2):
            readers["c"].stream.hold(choice)
        assert client.num_moving == 2
        worker.answers.put_nowait(load)
        assert await told(1) == ["e"]
        readers["a"].stream.cancel()
        await worker.commands.get()
        room[0] = 6
        worker.answers.put_nowait(load)
        assert await told(1) == ["b"]
        assert client.num_moving == 6
        assert worker.commands.empty()


async def test_what_came_before_the_break_is_still_there() -> None:
    async with connected() as (worker, client, _):
        reader = Reader(client, "a")
        await worker.commands.get()
        worker.send(token("a", 0))
        worker.answers.put_nowait(None)
        while not client.broken:
            await asyncio.sleep(0)
        assert reader.stream.failure is not None
        assert await tokens(reader, 1) == [0]
        assert await reader.next() is None


async def test_a_submit_at_the_moment_of_the_break_fails() -> None:
    """A request that sees the break first may submit again at once, while the client still cleans
    up.
    """
    async with connected() as (worker, client, _):
        first = Reader(client, "a")
        await worker.commands.get()
        worker.answers.put_nowait(None)
        assert await first.next() is None
        assert await Reader(client, "b").next() is None


async def test_a_client_closed_before_its_session_began_breaks_too() -> None:
    breaks: list[bool] = []
    client = open_session(WORKER, "127.0.0.1:1", on_break=lambda client: breaks.append(True))
    reader = Reader(client, "a")
    async with asyncio.timeout(WAIT):
        await client.close()
        assert await reader.next() is None
    assert breaks == [True]
