"""A worker that is frozen or cut off: its streams go on elsewhere within three seconds, and nobody
is blamed.
"""

import asyncio
import signal
import time
from contextlib import AsyncExitStack

import pytest

from tandem.proto import worker_pb2
from tandem.proto.channel import SILENCE_SECONDS
from tandem.tests.matrix.cases import PROMPT_LENGTH, Case
from tandem.tests.matrix.cluster import Choice, Cluster, Result, collect, make_request
from tandem.tests.matrix.proxy import Proxy
from tandem.tests.matrix.scenario import audit, prepare, until
from tandem.tests.router.fake_worker import FakeWorker, open_session, token
from tandem.tests.waits import WAIT

LIMIT_SECONDS = 3.0  # of the silence
NOTICED_SECONDS = 20.0  # on a busy machine; without our options gRPC takes a minute
HELD_FROM = 200  # the position at which the worker is frozen
pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_a_session_over_which_nothing_comes_breaks_and_counts_against_no_request() -> None:
    worker, proxy = FakeWorker(), Proxy()
    await worker.server.start()
    await proxy.start()
    proxy.target = worker.address
    worker.server.answer_to(proxy.address)
    client = open_session(("d0", 1), proxy.address)
    try:
        stream = client.submit(worker_pb2.Submit(request_id="a", attempt=1), asyncio.Event())
        async with asyncio.timeout(WAIT):
            await worker.commands.get()
        worker.send(token("a", 0))
        await until(stream.take, "the first token")
        proxy.swallow()
        worker.send(token("a", 1))
        began = time.monotonic()
        await until(lambda: stream.failure, "the silence is noticed")
        assert time.monotonic() - began < NOTICED_SECONDS
        assert SILENCE_SECONDS < LIMIT_SECONDS
        assert stream.failure is not None
        assert stream.failure.kind == worker_pb2.FAILURE_KIND_GONE
        proxy.heal()
        await asyncio.sleep(0.1)  # it may say what it likes now
        assert not stream.take()
    finally:
        await client.close()
        await worker.server.stop(0)
        await proxy.close()


async def test_an_idle_session_stays() -> None:
    worker = FakeWorker()
    await worker.server.start()
    client = open_session(("d0", 1), worker.address)
    try:
        stream = client.submit(worker_pb2.Submit(request_id="a", attempt=1), asyncio.Event())
        async with asyncio.timeout(WAIT):
            await worker.commands.get()
        await asyncio.sleep(2 * SILENCE_SECONDS)
        worker.send(token("a", 0))
        await until(stream.take, "the token after the pause")
        assert not client.broken
    finally:
        await client.close()
        await worker.server.stop(0)


async def test_the_streams_of_a_frozen_worker_go_on_within_three_seconds(cluster: Cluster) -> None:
    first, other = await cluster.layout("0+2")
    cluster.show(first)
    progress: dict[int, Result] = {}

    async def one(number: int) -> list[Choice]:
        request = make_request("seed", cluster.name(), num_tokens=400)
        return (
            await collect(
                cluster.dispatcher, request, seen=lambda result: progress.update({number: result})
            )
        ).choices

    def num_beyond() -> int:
        """Counts the streams that have tokens which the frozen worker did not compute."""
        return sum(
            len(result.choices[0].ids) > HELD_FROM - PROMPT_LENGTH + 1
            for result in progress.values()
        )

    expected = await one(-1)
    progress.clear()
    first.control.hold_from = HELD_FROM
    streams = [asyncio.create_task(one(number)) for number in range(4)]
    await until(lambda: first.control.is_held, "the streams run")
    cluster.show(first, other)
    first.signal(signal.SIGSTOP)
    first.control.release()
    began = time.monotonic()
    await until(lambda: num_beyond() == 4, "the streams go on")  # while the worker is frozen
    assert time.monotonic() - began < NOTICED_SECONDS
    outputs = await asyncio.gather(*streams)
    first.signal(signal.SIGCONT)
    assert outputs == [expected] * 4
    await cluster.check_books([first, other])


async def test_a_case_begins_at_its_entry_after_the_session_there_broke(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the entry is lost, the decode worker would compute the prompt."""
    scenario = await prepare(cluster, Case("cut", "token", "seed", "1+1"))
    block, link = scenario._block, scenario.entry.router_link

    async def block_and_lose(stack: AsyncExitStack) -> None:
        await block(stack)
        link.swallow()
        await until(lambda: cluster.registry.has_lost, "the entry is lost")
        asyncio.get_running_loop().call_later(0.5, link.heal)

    monkeypatch.setattr(scenario, "_block", block_and_lose)
    await audit(scenario)
