"""Tests that a placement among a bounded number of workers is about as good as a full scan."""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import mean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.proto import worker_pb2
from tandem.proto.hashing import hash_chain
from tandem.proto.worker_pb2 import ROLE_DECODE, ROLE_PREFILL
from tandem.router.request import TokenRequest
from tandem.router.scheduling import pool
from tandem.router.scheduling.capacity import required_capacity
from tandem.router.scheduling.policy import (
    Candidate,
    colocated_seconds,
    decode_seconds,
    source_seconds,
)
from tandem.router.scheduling.pool import MAX_CANDIDATES, MAX_HOLDERS, make_candidate
from tandem.router.scheduling.prefix_index import Prefix
from tandem.router.scheduling.ranking import NEAR
from tandem.router.scheduling.registry import WorkerRegistry
from tandem.tests.examples import num_examples
from tandem.tests.router.pools import Clock, info, report, request

NUM_BLOCKS = 4_096
TYPICAL = request(range(512))


def busy_registry(
    rng: random.Random, prefill: int, decode: int, clock: Clock | None = None
) -> WorkerRegistry:
    """Returns a registry of workers of equal speed with random loads and room for any prompt."""
    registry = WorkerRegistry(rng=rng, clock=clock or Clock())
    names = [(f"p{n}", ROLE_PREFILL) for n in range(prefill)]
    names += [(f"d{n}", ROLE_DECODE) for n in range(decode)]
    registry.update(
        [info(name, role, num_blocks=NUM_BLOCKS, max_sequences=64) for name, role in names]
    )
    for name, role in names:
        computes = role == ROLE_PREFILL or not prefill
        waiting = rng.randrange(1, 6) if computes else 0
        load = worker_pb2.WorkerLoad(
            num_waiting=waiting,
            waiting_tokens=waiting * rng.randrange(100, 2_000),
            num_running=0 if role == ROLE_PREFILL else rng.randrange(1, 40),
            free_blocks=NUM_BLOCKS,
            total_blocks=NUM_BLOCKS,
            step_seconds=0.02,
            version=1,
        )
        report(registry, name, load=load)
    return registry


def candidates(
    registry: WorkerRegistry, role: "worker_pb2.Role", asked: TokenRequest
) -> dict[str, Candidate]:
    """Returns all workers of a role as a full scan sees them."""
    matched = registry._look_up(asked).matched
    return {
        worker_id: make_candidate(worker, registry._speeds)._replace(
            matched_tokens=matched.num_tokens(worker_id)
        )
        for worker_id, worker in registry._workers.items()
        if worker.info.role == role
    }


def costs(registry: WorkerRegistry, asked: TokenRequest) -> list[dict[str, float]]:
    """Returns the cost of each worker by id: of prefill and decode workers, or of both in one."""
    needed = required_capacity(asked, registry.capacity.cost)
    prefill = candidates(registry, ROLE_PREFILL, asked)
    decode = candidates(registry, ROLE_DECODE, asked)
    cost = decode_seconds if prefill else colocated_seconds
    found = [{name: cost(needed, each) for name, each in decode.items()}]
    if prefill:
        num_tokens = needed.prompt_tokens
        found.insert(0, {name: source_seconds(num_tokens, each) for name, each in prefill.items()})
    return found


def placed(registry: WorkerRegistry, asked: TokenRequest) -> Sequence[str]:
    placement = registry.place(asked)
    assert placement is not None
    return [each for each in placement if each is not None]


def hold(registry: WorkerRegistry, workers: Sequence[str], tokens: Sequence[int]) -> None:
    chain = hash_chain(tokens, 16)
    for worker_id in workers:
        report(registry, worker_id, stored=chain)


@settings(max_examples=num_examples(60), deadline=None)
@given(
    seed=st.integers(0, 2**32),
    prefill=st.integers(0, 60),
    decode=st.integers(1, 60),
    num_tokens=st.integers(1, 4_000),
    holders=st.lists(st.integers(1, 250), max_size=6),
)
def test_the_regret_against_a_full_scan_is_bounded(
    seed: int, prefill: int, decode: int, num_tokens: int, holders: list[int]
) -> None:
    """With at most MAX_HOLDERS holders, the best one and the least loaded are considered.

    The order by load counts loads within a tenth as equal, and the policy does the same with costs.
    """
    rng = random.Random(seed)
    registry = busy_registry(rng, prefill, decode)
    asked = request(range(num_tokens))
    names = list(registry._workers)
    for num_blocks in holders:
        some = rng.sample(names, min(len(names), MAX_HOLDERS // 6))
        hold(registry, some, range(16 * num_blocks))
    empty = max(min(each.values()) for each in costs(busy_registry(rng, prefill, 1), TYPICAL))
    for chosen, all_costs in zip(placed(registry, asked), costs(registry, asked), strict=True):
        least = min(all_costs.values())
        assert all_costs[chosen] <= NEAR * (NEAR * least + (NEAR - 1) * empty) + 1e-9


def regrets(is_shared: bool) -> list[float]:
    """Returns costs relative to the least one, of requests of which a third of the pool has 2,000
    tokens."""
    found = []
    for seed in range(12):
        rng = random.Random(seed)
        registry = busy_registry(rng, 200, 200)
        hold(registry, [name for name in registry._workers if int(name[1:]) % 3 == 0], range(2_000))
        asked = request(range(2_400) if is_shared else range(10_000, 12_400))
        for chosen, all_costs in zip(placed(registry, asked), costs(registry, asked), strict=True):
            found.append(all_costs[chosen] / min(all_costs.values()))
    return found


@pytest.mark.parametrize("is_shared", [False, True])
def test_a_prefix_on_hundreds_of_workers_costs_no_more_on_average(is_shared: bool) -> None:
    assert mean(regrets(is_shared)) < 1.05


def test_the_number_of_candidates_does_not_depend_on_the_number_of_workers() -> None:
    registry = busy_registry(random.Random(1), 500, 500)
    hold(registry, list(registry._workers), range(160))
    matched = registry._prefixes.match(Prefix(range(160)))
    for role in (ROLE_PREFILL, ROLE_DECODE):
        found = registry.capacity.pool(role).select(matched, {"d1", "p1"}, computes=True)
        assert MAX_CANDIDATES - 4 <= len(found) <= MAX_CANDIDATES
        assert len(set(found)) == len(found)
        assert {"d1", "p1"}.isdisjoint(found)


def test_requests_of_one_affinity_go_to_one_of_many_idle_workers() -> None:
    registry = WorkerRegistry(rng=random.Random(5), clock=Clock())
    registry.update([info(f"d{n}", ROLE_DECODE, num_blocks=NUM_BLOCKS) for n in range(200)])
    asked = [replace(request(range(n, n + 600)), affinity="a") for n in range(20)]
    assert len({placed(registry, each)[0] for each in asked}) == 1


def test_the_only_worker_with_room_for_a_long_prompt_is_found() -> None:
    registry = busy_registry(random.Random(2), 0, 200)
    for worker_id in registry._workers:
        load = worker_pb2.WorkerLoad(free_blocks=64, total_blocks=NUM_BLOCKS, version=2)
        if worker_id == "d77":
            load = worker_pb2.WorkerLoad(
                free_blocks=600, total_blocks=NUM_BLOCKS, num_running=50, version=2
            )
        report(registry, worker_id, load=load)
    for number in range(10):
        assert placed(registry, request(range(number, number + 8_000))) == ["d77"]


def test_an_idle_worker_that_was_slow_long_ago_is_tried_again() -> None:
    clock = Clock()
    registry = busy_registry(random.Random(3), 100, 1, clock)
    for _ in range(6):
        registry.record_prefill("p50", 512, 30.0)
        registry.record_prefill("p1", 512, 0.1)
    report(
        registry,
        "p50",
        load=worker_pb2.WorkerLoad(free_blocks=NUM_BLOCKS, total_blocks=NUM_BLOCKS, version=2),
    )
    assert "p50" not in {placed(registry, request(range(n, n + 600)))[0] for n in range(100)}
    clock.now = 3_600.0  # its estimate has aged, and it has nothing to report
    assert "p50" in {placed(registry, request(range(n, n + 600)))[0] for n in range(200)}


Step = tuple[str, int, int]
STEPS = st.tuples(st.sampled_from("rrrdddpelxjms"), st.integers(0, 5), st.integers(1, 40))


@settings(max_examples=num_examples(60), deadline=None)
@given(steps=st.lists(STEPS, max_size=40))
def test_running_sums_equal_a_scan(steps: list[Step]) -> None:
    registry = busy_registry(random.Random(4), 3, 3)
    names = list(registry._workers)
    for version, (kind, number, amount) in enumerate(steps, 2):
        apply_step(registry, kind, names[number], amount, version)
        pools = [registry.capacity.pool(role) for role in (ROLE_PREFILL, ROLE_DECODE)]
        fresh = [pool.Pool(each._role, each._workers, each._speeds, each._rng) for each in pools]
        for worker in registry._workers.values():
            fresh[worker.info.role == ROLE_DECODE].count(worker)
        for counted, expected in zip(pools, fresh, strict=True):
            assert counted.totals == expected.totals
            # The look-ahead of an unmeasured worker follows the best one at its next report.
            no_look_ahead = {"prompt_tokens": 0}
            assert counted.free._replace(**no_look_ahead) == expected.free._replace(**no_look_ahead)
            assert counted.largest() == expected.largest()


def apply_step(
    registry: WorkerRegistry, kind: str, worker_id: str, amount: int, version: int
) -> None:
    asked = request(range(10 * amount), f"{amount}")
    role = ROLE_PREFILL if worker_id.startswith("p") else ROLE_DECODE
    others = [each for each in registry.workers() if each.worker_id != worker_id]
    actions: dict[str, Callable[[], object]] = {
        "r": lambda: report(
            registry,
            worker_id,
            load=worker_pb2.WorkerLoad(
                num_running=amount,
                waiting_tokens=10 * amount,
                free_blocks=100,
                total_blocks=100 + amount % 3,
                prompt_token_seconds=1e-4 * (amount % 2),
                version=version,
            ),
        ),
        "d": lambda: registry.dispatched(worker_id, asked, 10 * amount),
        "p": lambda: registry.prefilled(worker_id, f"{amount}"),
        "e": lambda: registry.ended(worker_id, f"{amount}"),
        "l": lambda: registry.session_lost(worker_id, 1),
        "x": lambda: registry.update(others),
        "j": lambda: registry.update([*others, info(worker_id, role, max_sequences=amount)]),
        "m": lambda: registry.record_prefill(worker_id, amount, 1e-3 * amount),
        "s": lambda: registry.update([*others, info(worker_id, role, epoch=amount, draining=True)]),
    }
    actions[kind]()


def test_equal_workers_are_ranked_alike_in_each_process() -> None:
    """The states of the workers have other addresses in each registry."""
    found = []
    states = []
    for number in range(5):
        registry = WorkerRegistry(rng=random.Random(7), clock=Clock())
        registry.update([info(f"d{n}", ROLE_DECODE, num_blocks=NUM_BLOCKS) for n in range(100)])
        states.append(list(registry._workers.values())[number::2])  # their memory is not used again
        matched = registry._prefixes.match(Prefix(range(160)))
        found.append(registry.capacity.pool(ROLE_DECODE).select(matched, computes=True))
    assert found == [found[0]] * 5
