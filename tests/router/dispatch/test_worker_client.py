"""The session between a router and a worker, against a worker that the test plays."""

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.proto import worker_pb2
from tandem.router.dispatch.worker_client import WorkerClient, WorkerStream
from tandem.tests.router.played import PlayedWorker, token


class Reader:
    """Submits, and takes answers one by one."""

    def __init__(self, link: WorkerClient, request_id: str, **submit: Any) -> None:
        self._wake = asyncio.Event()
        fields = {"attempt": 1, "num_choices": 1} | submit
        self.attempt = link.submit(worker_pb2.Submit(request_id=request_id, **fields), self._wake)
        self._taken: list[worker_pb2.Output] = []

    async def next(self) -> worker_pb2.Output | None:
        """None when the link has broken."""
        while not self._taken:
            if self.attempt.broken:
                return None
            await self._wake.wait()
            self._wake.clear()
            self._taken = self.attempt.take()
        return self._taken.pop(0)


@asynccontextmanager
async def linked() -> AsyncIterator[tuple[PlayedWorker, WorkerClient, list[int]]]:
    worker = PlayedWorker()
    await worker.server.start()
    loads: list[int] = []
    link = WorkerClient(worker.address, lambda message: loads.append(message.load.num_waiting))
    try:
        async with asyncio.timeout(20):
            yield worker, link, loads
    finally:
        await link.close()
        await worker.server.stop(0)


async def tokens(reader: Reader, count: int) -> list[int]:
    """The indices of the next tokens, however many are in one answer."""
    found: list[int] = []
    while len(found) < count:
        output = await reader.next()
        assert output is not None
        found += range(output.tokens.first_index, output.tokens.first_index + len(output.tokens.ids))
    return found


async def test_each_attempt_gets_its_own_answers_in_order() -> None:
    async with linked() as (worker, link, loads):
        readers = {name: Reader(link, name) for name in "abc"}
        for name in "abc":
            assert (await worker.commands.get()).submit.request_id == name
        for index in range(3):
            worker.say(*(token(name, index) for name in "cab"), waiting=index)
        for reader in readers.values():
            assert await tokens(reader, 3) == [0, 1, 2]
        assert loads == [0, 1, 2]


async def test_answers_to_an_older_attempt_are_dropped() -> None:
    async with linked() as (worker, link, _):
        first = Reader(link, "a", attempt=1)
        first.attempt.end()
        first.attempt.end()
        second = Reader(link, "a", attempt=2)
        worker.say(token("a", 0, attempt=1), token("b", 5), token("a", 9, attempt=2))
        assert await tokens(second, 1) == [9]
        commands = [await worker.commands.get() for _ in range(3)]
        assert [command.WhichOneof("command") for command in commands] == ["submit", "cancel", "submit"]
        assert commands[1].cancel == worker_pb2.Cancel(request_id="a", attempt=1)


async def test_what_the_worker_ended_is_not_cancelled() -> None:
    async with linked() as (worker, link, _):
        finished, failed = Reader(link, "a"), Reader(link, "b")
        failure = worker_pb2.Output(request_id="b", attempt=1, failure=worker_pb2.Failure())
        worker.say(token("a", 0, last=True), failure)
        assert await tokens(finished, 1) == [0]
        answer = await failed.next()
        assert answer is not None
        assert answer.HasField("failure")
        finished.attempt.end()
        failed.attempt.end()
        Reader(link, "c")
        commands = [await worker.commands.get() for _ in range(3)]
        assert [command.submit.request_id for command in commands] == ["a", "b", "c"]


async def test_choices_end_one_by_one() -> None:
    """Choice 0 by itself, choice 1 at our wish, so that the cancel of the last is one of the whole."""
    async with linked() as (worker, link, _):
        reader = Reader(link, "a", num_choices=3)
        await worker.commands.get()
        worker.say(token("a", 0, choice=0, last=True), token("a", 0, choice=1), token("a", 0, choice=2))
        for choice in range(3):
            answer = await reader.next()
            assert answer is not None
            assert answer.choice == choice
        reader.attempt.end_choice(0)
        reader.attempt.end_choice(1)
        worker.say(token("a", 1, choice=1, number=66), token("a", 1, choice=2, number=77))
        answer = await reader.next()
        assert answer is not None
        assert list(answer.tokens.ids) == [77]
        reader.attempt.end_choice(2)
        reader.attempt.end()
        cancels = [(await worker.commands.get()).cancel for _ in range(2)]
        assert cancels[0] == worker_pb2.Cancel(request_id="a", attempt=1, choice=1)
        assert cancels[1] == worker_pb2.Cancel(request_id="a", attempt=1)
        assert worker.commands.empty()


async def test_a_choice_by_itself_keeps_its_number() -> None:
    async with linked() as (worker, link, _):
        reader = Reader(link, "a", first_choice=3)
        worker.say(token("a", 4))
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
def test_merging_changes_nothing_but_the_number_of_answers(
    lengths: list[int], order: random.Random, takes: set[int]
) -> None:
    """Answers that wait are at most one for each choice; together they say what the worker said."""
    link = WorkerClient.__new__(WorkerClient)
    submit = worker_pb2.Submit(request_id="a", attempt=1, num_choices=len(lengths))
    attempt = WorkerStream(link, submit, asyncio.Event())
    said = [0] * len(lengths)
    found: dict[int, list[int]] = {choice: [] for choice in range(len(lengths))}
    ended: set[int] = set()

    def take() -> None:
        outputs = attempt.take()
        assert len(outputs) == len({output.choice for output in outputs})
        for output in outputs:
            tokens, ids = output.tokens, found[output.choice]
            assert output.choice not in ended
            assert tokens.first_index == len(ids)
            assert [-scores.logprob for scores in tokens.logprobs] == list(tokens.ids)
            assert bool(tokens.finish_reason) == (tokens.score == 2.5)
            ids += tokens.ids
            if tokens.finish_reason:
                ended.add(output.choice)

    step = 0
    while open_choices := [choice for choice, length in enumerate(lengths) if said[choice] < length]:
        choice = order.choice(open_choices)
        first, count = said[choice], order.randint(1, lengths[choice] - said[choice])
        said[choice] += count
        is_last = said[choice] == lengths[choice]
        over = attempt.put(scored(choice, first, range(first, first + count), is_last))
        assert over == (said == lengths)
        if step in takes:
            take()
        step += 1
    take()
    assert found == {choice: list(range(length)) for choice, length in enumerate(lengths)}
    assert ended == set(found)


def test_merging_hides_no_gap_and_keeps_the_order_of_events() -> None:
    attempt = WorkerStream(
        WorkerClient.__new__(WorkerClient), worker_pb2.Submit(request_id="a", attempt=1), asyncio.Event()
    )
    joined = worker_pb2.Output(request_id="a", attempt=1, kv_received=worker_pb2.KvReceived())
    for output in (token("a", 0), token("a", 1), token("a", 3), joined, token("a", 4), token("a", 5)):
        attempt.put(output)
    outputs = attempt.take()
    assert [output.WhichOneof("event") for output in outputs] == ["tokens", "tokens", "kv_received", "tokens"]
    assert [(o.tokens.first_index, len(o.tokens.ids)) for o in outputs] == [(0, 2), (3, 1), (0, 0), (4, 2)]


@pytest.mark.parametrize("how", ["end", "stop", "close", "nobody"])
async def test_the_end_of_the_stream_reaches_every_attempt(how: str) -> None:
    async with linked() as (worker, link, _):
        if how == "nobody":
            await worker.server.stop(0)
        readers = [Reader(link, name) for name in "abc"]
        if how != "nobody":
            await worker.commands.get()
        if how == "end":
            worker.answers.put_nowait(None)
        elif how == "stop":
            await worker.server.stop(0)
        elif how == "close":
            await link.close()
        for reader in readers:
            assert await reader.next() is None
        assert link.broken
        assert await Reader(link, "late").next() is None
        for reader in readers:
            reader.attempt.end()


async def test_what_came_before_the_break_is_still_there() -> None:
    async with linked() as (worker, link, _):
        reader = Reader(link, "a")
        await worker.commands.get()
        worker.say(token("a", 0))
        worker.answers.put_nowait(None)
        while not link.broken:
            await asyncio.sleep(0)
        assert not reader.attempt.broken
        assert await tokens(reader, 1) == [0]
        assert await reader.next() is None


async def test_a_submit_in_the_very_moment_of_the_break_is_told() -> None:
    """Whoever hears of the break first may submit again at once, while the link still tidies up."""
    async with linked() as (worker, link, _):
        first = Reader(link, "a")
        await worker.commands.get()
        worker.answers.put_nowait(None)
        assert await first.next() is None
        assert await Reader(link, "b").next() is None


async def test_a_link_closed_before_it_began_breaks_too() -> None:
    breaks: list[bool] = []
    link = WorkerClient("127.0.0.1:1", lambda message: None, lambda: breaks.append(True))
    reader = Reader(link, "a")
    async with asyncio.timeout(5):
        await link.close()
        assert await reader.next() is None
    assert breaks == [True]
