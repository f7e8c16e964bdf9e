"""Requests cancelled at any moment: within a second no worker holds anything for them, and the
others go on.
"""

import asyncio
import gc
import random
from contextlib import aclosing, suppress
from itertools import pairwise

import pytest

from tandem.proto import inference_pb2
from tandem.proto.errors import Unavailable
from tandem.router.dispatch.worker_client import WorkerClient
from tandem.router.request import TokenRequest
from tandem.tests.fleet import VOCAB, Fleet, fake_rank, fleet
from tandem.tests.token_request import token_request
from tandem.tests.waits import WAIT
from tandem.tests.workers.engine.fake import expected_tokens
from tandem.workers.tp.rank import Rank

NUM_AT_ONCE = 40


def small_rank(role: str) -> Rank:
    """So few blocks that most requests queue."""
    return fake_rank(num_blocks=48, step_seconds=0.002)


def clients(running: Fleet) -> list[WorkerClient]:
    return list(running.dispatcher._clients.values())


async def abandon(running: Fleet, request: TokenRequest, num_tokens: int) -> None:
    """Closes the generator after num_tokens tokens."""
    async with aclosing(running.dispatcher.generate(request, inference_pb2.Timeline())) as deltas:
        async for delta in deltas:
            if delta.first_index + 1 >= num_tokens:
                return


async def abandon_after(running: Fleet, request: TokenRequest, seconds: float) -> None:
    """Cancels the task that reads, wherever the request is by then."""
    task = asyncio.create_task(abandon(running, request, request.submit.max_tokens))
    asyncio.get_running_loop().call_later(seconds, task.cancel)
    with suppress(asyncio.CancelledError):
        await task


@pytest.mark.parametrize("num_cancels", [80, pytest.param(200, marks=pytest.mark.soak)])
async def test_cancels_leave_nothing(num_cancels: int) -> None:
    chance = random.Random(5)
    turns = asyncio.Semaphore(NUM_AT_ONCE)
    num_exact = 0
    async with fleet(2, 2, rank=small_rank, chunk_tokens=64, growth_tokens=16) as running:

        async def one(number: int) -> None:
            nonlocal num_exact
            prompt = [chance.randrange(VOCAB) for _ in range(chance.randrange(20, 300))]
            request = token_request(prompt, chance.randrange(8, 40))
            async with turns:
                if number % 3 == 0:
                    tokens, _ = await running.generate(request)
                    assert tokens == expected_tokens(prompt, request.submit.max_tokens, VOCAB)
                    num_exact += 1
                elif number % 3 == 1:
                    await abandon(running, request, chance.randrange(1, 8))
                else:
                    await abandon_after(running, request, chance.expovariate(10))

        await asyncio.gather(*(one(number) for number in range(num_cancels * 3 // 2)))
        await running.check_idle()
        assert num_exact == num_cancels // 2
        assert [client._streams for client in clients(running)] == [{}] * 4
        tokens, _ = await running.generate(token_request(range(300), 30))
        assert tokens == expected_tokens(range(300), 30, VOCAB)


@pytest.mark.parametrize("how", ["close", "channel"])
async def test_a_router_that_disconnects_leaves_nothing(how: str) -> None:
    # So slow that no request ends by itself before the deadline of `check_idle`.
    async with fleet(
        1,
        1,
        rank=lambda role: fake_rank(num_blocks=48, step_seconds=0.2),
        chunk_tokens=64,
        park_seconds=1.0,
    ) as running:
        requests = [token_request(range(n, n + 120), 600, name=str(n)) for n in range(12)]
        tasks = [asyncio.create_task(running.generate(request)) for request in requests]
        async with asyncio.timeout(WAIT):
            while not any(status.info.load.num_waiting for status in await running.statuses()):
                await asyncio.sleep(0.005)
        if how == "close":
            await running.dispatcher.close()
        else:
            running.dispatcher._closed = True  # it is dead: it sends nothing more
            await asyncio.gather(*(client._channel.close() for client in clients(running)))
        await running.check_idle()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(result, Unavailable) for result in results), results
        assert all(status.num_sessions == 0 for status in await running.statuses())


async def drop_cancelled_timers() -> None:
    """Has asyncio remove the timers that were cancelled.

    It keeps them until there are more than a hundred, and more than other timers: how many it
    keeps at a moment depends on the speed of the machine.
    """
    loop = asyncio.get_running_loop()
    for _ in range(400):
        loop.call_later(60, gc.collect).cancel()
    await asyncio.sleep(0)


async def test_five_hundred_requests_leave_no_object_behind() -> None:
    async with fleet(1, 2) as running:
        prompts = [[(n * i) % VOCAB for i in range(20 + n)] for n in range(1, 26)]
        slots = asyncio.Semaphore(25)

        async def one(prompt: list[int]) -> None:
            async with slots:
                await running.generate(token_request(prompt, 6))

        def held() -> list[int]:
            counts = [
                len(asyncio.all_tasks()),
                len(asyncio.get_running_loop()._scheduled),  # type: ignore[attr-defined]
                len(clients(running)),
                sum(len(client._streams) for client in clients(running)),
            ]
            for worker in running.workers:
                counts += [
                    len(worker._requests),
                    len(worker._requests.reports.sessions),
                    len(worker._endpoint._channels),
                    worker._endpoint.sender.num_offers,
                ]
            return counts + [len(worker.requests) for worker in running.registry._workers.values()]

        async def num_objects(rounds: int) -> int:
            """After so many rounds of 25 requests, when all is quiet."""
            await asyncio.gather(*(one(prompt) for prompt in prompts * rounds))
            await running.check_idle()
            await drop_cancelled_timers()
            async with asyncio.timeout(WAIT):
                while any(now > then for now, then in zip(held(), quiet, strict=False)):
                    await asyncio.sleep(0.01)
                    await drop_cancelled_timers()
                # Collecting gRPC's request iterators schedules their closing on this loop.
                while gc.collect():
                    await asyncio.sleep(0.01)
            await drop_cancelled_timers()
            return len(gc.get_objects())

        quiet: list[int] = []
        await num_objects(8)  # fills the prefix caches of both decode workers
        quiet = held()
        for _ in range(20):  # some timers come and go when nothing runs
            await asyncio.sleep(0.02)
            quiet = [max(pair) for pair in zip(quiet, held(), strict=True)]
        quiet[1] += 1  # the timer of the timeout there
        counts = [await num_objects(5) for _ in range(4)]
        grown = [after - before for before, after in pairwise(counts)]
        assert min(grown) < 12, "a leak of one object in ten requests"
