"""Negative controls: a router or a worker with a defect fails the matrix, which passes it
without.
"""

import asyncio
import inspect
import textwrap
from contextlib import AsyncExitStack
from typing import Any

import pytest

from tandem.proto import worker_pb2
from tandem.proto.errors import InternalError, InvalidArgument
from tandem.router.dispatch import execution
from tandem.router.dispatch.attempt import Attempt
from tandem.router.dispatch.causes import CAUSES, Cause
from tandem.router.dispatch.execution import RequestExecution
from tandem.router.request import TokenRequest
from tandem.tests.matrix.cases import Case
from tandem.tests.matrix.cluster import Choice, Cluster, collect, make_request
from tandem.tests.matrix.nodes import Node
from tandem.tests.matrix.scenario import check, until
from tandem.tests.peers import peer_channel
from tandem.tests.workers.raw_session import RawSession, submit

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def block(node: Node, stack: AsyncExitStack) -> None:
    """Has the engine of a node busy, so that what is submitted next waits there."""
    node.control.clear()
    node.control.hold_from = 0
    session = RawSession(await stack.enter_async_context(peer_channel(node.address)))
    await session.send(
        submit("blocker", token_ids=range(3, 11), max_tokens=1, cache_salt=b"blocker")
    )
    await until(lambda: node.control.is_held, "the node is blocked")


async def drain(node: Node) -> None:
    """Drains a node where a request waits, which is to be refused before it begins."""
    draining = asyncio.create_task(node.drain())
    await until(lambda: node.control.num_suspends, "it is told to suspend the request")
    node.release()
    await draining


async def drain_twice(cluster: Cluster) -> list[Choice]:
    """Drains one worker after the other while a request waits there; returns what the request
    gives.
    """
    first, second = await cluster.layout("0+2")
    async with AsyncExitStack() as stack:
        cluster.show(first)
        for node in (first, second):
            await block(node, stack)
        request = make_request("seed", cluster.name())
        asked = asyncio.create_task(collect(cluster.dispatcher, request))
        stack.callback(asked.cancel)
        await until(lambda: first.control.num_submits == 2, "it waits at the first")
        cluster.show(first, second)
        await drain(first)
        await until(lambda: second.control.num_submits == 2, "it waits at the second")
        await first.restart()
        cluster.show(first, second)
        await drain(second)
        result = await asked
    await cluster.check_books([first])
    return result.choices


async def test_drains_count_against_no_request(cluster: Cluster) -> None:
    expected = await cluster.expect("seed", "0+2")
    assert await drain_twice(cluster) == expected.choices


async def test_drains_that_count_as_crashes_are_seen(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(CAUSES, worker_pb2.FAILURE_KIND_GONE, Cause.CRASH)
    with pytest.raises(InternalError):
        await drain_twice(cluster)
    await cluster.renew()  # the old one refuses the prompt


async def test_an_attempt_that_is_reused_is_seen(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case("kill", "token", "choices", "0+2")
    await check(cluster, case)

    def first_attempt(
        part: TokenRequest, submit: worker_pb2.Submit, *args: Any, **kw: Any
    ) -> Attempt:
        submit.attempt = 1
        return Attempt(part, submit, *args, **kw)

    monkeypatch.setattr(execution, "Attempt", first_attempt)
    with pytest.raises(InvalidArgument, match="already in use"):
        await check(cluster, case)


async def test_a_handle_of_another_length_is_not_used(cluster: Cluster) -> None:
    nodes = [await cluster.node("d2", hooks=[{"name": "shorten"}]), await cluster.node("d1")]
    result = await check(cluster, Case("drain", "token", "logprobs", "0+2"), nodes)
    assert result.attempts > 1


async def test_a_handle_of_another_length_that_is_used_is_seen(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = textwrap.dedent(inspect.getsource(RequestExecution._take_over))
    without = source.replace(" or suspended.kv.num_tokens != known", "")
    assert without != source
    made: dict[str, Any] = {}
    exec(without, vars(execution), made)
    monkeypatch.setattr(RequestExecution, "_take_over", made["_take_over"])
    nodes = [await cluster.node("d2", hooks=[{"name": "shorten"}]), await cluster.node("d1")]
    with pytest.raises(InvalidArgument):
        await check(cluster, Case("drain", "token", "logprobs", "0+2"), nodes)


async def test_another_order_of_accumulation_is_seen(cluster: Cluster) -> None:
    """The worker that goes on computes chunks by plain torch."""
    nodes = [await cluster.node("d0"), await cluster.node("d3", hooks=[{"name": "plain"}])]
    with pytest.raises(AssertionError, match="the output is altered"):
        await check(cluster, Case("kill", "last", "logprobs", "0+2"), nodes)
