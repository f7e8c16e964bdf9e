"""Tests the times of simulated transfers that share links."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.cluster.sim.links import Flow, Link
from tandem.cluster.sim.loop import run_simulated

SPEED = 100.0  # bytes a second


def flow(source: Link, target: Link, num_bytes: float) -> Flow:
    return Flow(source, target, num_bytes=num_bytes, bytes_per_second=SPEED)


async def ended(moving: Flow) -> float:
    await moving.wait()
    return asyncio.get_running_loop().time()


def test_flows_share_a_link_while_both_run() -> None:
    async def run() -> list[float]:
        source = Link()
        one, other = flow(source, Link(), 100), flow(source, Link(), 300)
        one.make_ready(100)
        other.make_ready(300)
        return list(await asyncio.gather(ended(one), ended(other)))

    # Both get half of the link until one has its 100 bytes; the other then needs 2 s for 200.
    assert run_simulated(run()) == pytest.approx([2.0, 4.0])


def test_flows_with_links_of_their_own_do_not_wait_for_each_other() -> None:
    async def run() -> list[float]:
        flows = [flow(Link(), Link(), 100) for _ in range(3)]
        for each in flows:
            each.make_ready(100)
        return list(await asyncio.gather(*map(ended, flows)))

    assert run_simulated(run()) == pytest.approx([1.0] * 3)


def test_a_flow_waits_for_ready_bytes_and_lends_its_share_meanwhile() -> None:
    async def run() -> tuple[float, float, float]:
        source = Link()
        slow, other = flow(source, Link(), 100), flow(source, Link(), 100)
        other.make_ready(100)
        asyncio.get_running_loop().call_later(5.0, slow.make_ready, 100)
        times = await asyncio.gather(ended(slow), ended(other))
        return times[0], times[1], slow.active_seconds

    assert run_simulated(run()) == pytest.approx((6.0, 1.0, 1.0))


def test_a_flow_that_fails_gives_its_share_to_the_others() -> None:
    async def run() -> float:
        source = Link()
        lost, other = flow(source, Link(), 1000), flow(source, Link(), 100)
        lost.make_ready(1000)
        other.make_ready(100)
        asyncio.get_running_loop().call_later(1.0, lost.fail, OSError("lost"))
        with pytest.raises(OSError, match="lost"):
            await lost.wait()
        return await ended(other)

    assert run_simulated(run()) == pytest.approx(1.5)


@given(
    sizes=st.lists(st.tuples(st.floats(0, 5), st.integers(0, 500)), min_size=1, max_size=8),
    steps=st.integers(1, 4),
)
def test_a_shared_link_is_never_idle_and_never_faster_than_its_speed(
    sizes: list[tuple[float, int]], steps: int
) -> None:
    """The last of several transfers from one sender ends when a queue would have ended."""

    async def run() -> float:
        loop, source = asyncio.get_running_loop(), Link()
        flows = []
        for delay, num_bytes in sizes:
            moving = flow(source, Link(), num_bytes)
            for step in range(1, steps + 1):
                loop.call_later(delay, moving.make_ready, num_bytes * step / steps)
            flows.append(moving)
        return max(await asyncio.gather(*map(ended, flows)))

    free_at = 0.0
    for delay, num_bytes in sorted(sizes):
        free_at = max(free_at, delay if num_bytes else 0.0) + num_bytes / SPEED
    assert run_simulated(run()) == pytest.approx(free_at, abs=1e-6)
