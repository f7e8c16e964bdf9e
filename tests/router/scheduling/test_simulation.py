"""Compares the cost function with blind placement of thousands of requests in simulated time."""

import pytest

from tandem.tests.router.scheduling.simulation import (
    Figures,
    Pools,
    Simulation,
    Traffic,
    at_random,
    by_cost,
    in_turns,
)


@pytest.fixture(scope="module")
def ours() -> Figures:
    return Simulation(by_cost).run()


@pytest.mark.parametrize(
    ("other", "mean", "p95"), [(at_random(), 3.0, 3.0), (in_turns(), 1.6, 1.3)]
)
def test_placing_by_cost_hits_more_and_answers_sooner(
    ours: Figures, other: object, mean: float, p95: float
) -> None:
    theirs = Simulation(other).run()  # type: ignore[arg-type]
    assert ours.num_requests == theirs.num_requests == 1800
    assert ours.hit_rate > 1.3 * theirs.hit_rate
    assert mean * ours.mean_ttft < theirs.mean_ttft
    assert p95 * ours.p95_ttft < theirs.p95_ttft
    assert 1.4 * ours.transfer_rate < theirs.transfer_rate


def test_reports_let_two_routers_place_as_well_as_one(ours: Figures) -> None:
    two = Simulation(by_cost, routers=2).run()
    assert two.hit_rate > ours.hit_rate - 0.03
    assert two.mean_ttft < 1.2 * ours.mean_ttft


def test_load_spreads_although_prefixes_attract(ours: Figures) -> None:
    for pool in ("p", "d"):
        shares = [share for name, share in ours.shares.items() if name.startswith(pool)]
        assert min(shares) > 0.08
        assert max(shares) < 0.18


def test_a_slow_worker_gets_less_and_is_not_starved() -> None:
    traffic = Traffic(conversations=150)
    got = Simulation(
        by_cost, traffic=traffic, pools=Pools(prefill=4, decode=4, slow={"p0": 3.0})
    ).run()
    even = Simulation(by_cost, traffic=traffic, pools=Pools(prefill=4, decode=4)).run()
    assert 0.01 < got.shares["p0"] < 0.7 * even.shares["p0"]


def test_short_rests_of_prompts_are_computed_on_decode_workers_when_the_prefill_pool_is_busy() -> (
    None
):
    traffic = Traffic(conversations=150, turn_tokens=(4, 30), answer_tokens=(8, 20))
    pools = Pools(prefill=1, decode=4)
    apart = Simulation(by_cost, traffic=traffic, pools=pools).run()
    mixed = Simulation(by_cost, traffic=traffic, pools=pools, local_prefill_tokens=64).run()
    assert apart.locally == 0
    assert mixed.locally > 0.1
    assert mixed.mean_ttft < apart.mean_ttft
