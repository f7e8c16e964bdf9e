"""The only decode worker is killed under a stream: this waits for the worker's successor, and goes
on as if nothing had been.
"""

import asyncio

import pytest

from tandem.tests.matrix.cases import NUM_TOKENS, PROMPT_LENGTH
from tandem.tests.matrix.cluster import Cluster, Result, collect, make_request
from tandem.tests.matrix.scenario import REQUEST_SECONDS, TOKEN_POINT, until

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.mark.parametrize("num_prefill", [0, 1])
@pytest.mark.parametrize(
    "num_tokens",
    [TOKEN_POINT, *(pytest.param(n, marks=pytest.mark.matrix) for n in (1, 11, NUM_TOKENS - 1))],
)
async def test_a_stream_waits_for_the_successor_of_the_only_decode_worker(
    cluster: Cluster, num_prefill: int, num_tokens: int
) -> None:
    """An idle prefill worker would do all meanwhile, so this one is full."""
    expected = await cluster.expect("seed", "1+1")
    decode = await cluster.node("d0")
    prefill = [await cluster.node("p0")] * num_prefill
    for node in (decode, *prefill):
        node.control.clear()
    cluster.show(decode, *prefill)
    decode.control.hold_from = PROMPT_LENGTH + num_tokens - 1
    got: list[Result] = []
    asked = asyncio.create_task(
        collect(cluster.dispatcher, make_request("seed", cluster.name()), seen=got.append)
    )
    try:
        await until(
            lambda: got and len(got[-1].choices[0].ids) == num_tokens, "the stream is under way"
        )
        await until(lambda: decode.control.is_held, "the next step is held")
        for node in prefill:
            node.control.refusals = 1_000
        (running,) = cluster.dispatcher._running
        await decode.kill()
        await until(lambda: running._parked and not running._attempts, "the stream waits")
        cluster.show(*prefill)
        successor = await cluster.node("d4")
        successor.control.clear()
        assert len(got[-1].choices[0].ids) == num_tokens
        assert not asked.done()
        for node in prefill:
            node.control.refusals = 0
        cluster.show(successor, *prefill)
        async with asyncio.timeout(REQUEST_SECONDS):
            result = await asked
    finally:
        asked.cancel()
    assert result.choices == expected.choices
    assert result.attempts > 1
    await cluster.check_books([successor, *prefill])
    await successor.stop()
    successor.is_spent = True
