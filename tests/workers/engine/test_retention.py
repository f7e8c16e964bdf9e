"""Retained prefixes: the cache keeps them for their time, within the tenant's share."""

from dataclasses import replace

import pytest

from tandem.tests.workers.engine.drive import (
    MakeWorker,
    cached_of,
    expected,
    run,
    spec,
    tokens_of,
)
from tandem.tests.workers.engine.harness import Worker
from tandem.tests.workers.engine.test_states import CONFIG
from tandem.workers.engine.config import EngineConfig
from tandem.workers.engine.sequence import PrefixRetention, SequenceSpec, Task
from tandem.workers.kv_cache.tables import TableSpec

KEPT = tuple(range(100, 117))  # four full blocks of four tokens, and one token
STATES = replace(CONFIG, num_blocks=96, num_states=24)
WINDOWS = replace(STATES, num_states=0)


def retaining(
    number: int, tokens: tuple[int, ...] = KEPT, seconds: float = 300, tenant: bytes = b"ada"
) -> SequenceSpec:
    retention = PrefixRetention(num_tokens=len(tokens), seconds=seconds)
    return spec(number, tokens, max_tokens=1, tenant=tenant, retentions=(retention,))


def others(target: Worker, first: int, count: int = 20) -> None:
    """Other prompts, one after another, which together need several times the pool."""
    for number in range(first, first + count):
        target.submit(spec(number, tuple(range(7 * number, 7 * number + 30)), max_tokens=2))
        run(target)


def cached(target: Worker, number: int, tokens: tuple[int, ...] = KEPT) -> int:
    """The cached tokens of a prompt whose answer is right."""
    target.submit(spec(number, tokens, max_tokens=2))
    events = run(target)
    assert tokens_of(events, number) == expected(tokens, 2)
    target.check_idle()
    return cached_of(events, number)


@pytest.mark.parametrize("num_host_blocks", [0, 8])
def test_a_prefix_outlives_other_prompts_until_its_time_is_over(
    worker: MakeWorker, num_host_blocks: int
) -> None:
    now = 0.0
    target = worker(num_host_blocks=num_host_blocks)
    target.engine.requests.clock = lambda: now
    target.submit(retaining(1))
    run(target)
    others(target, 10)
    assert cached(target, 2) == 16
    others(target, 40)
    now = 299.0
    target.submit(retaining(3))  # again, from now on
    assert cached_of(run(target), 3) == 16
    now = 598.0
    others(target, 70)
    assert cached(target, 4) == 16
    now = 599.0
    others(target, 100)
    assert cached(target, 5) == 0


def test_a_prefill_retains_its_prefix_and_a_decode_does_not(worker: MakeWorker) -> None:
    target = worker()
    target.submit(replace(retaining(1), task=Task.PREFILL))
    run(target)
    target.engine.cancel(1)
    others(target, 10)
    assert cached(target, 2) == 16


def test_the_newest_prefix_has_the_tenants_share(worker: MakeWorker) -> None:
    """A quarter of 32 blocks are two prefixes of four, and another tenant has its own share."""
    target = worker()
    prompts = [tuple(range(first, first + 17)) for first in (1000, 2000, 3000, 4000)]
    for number, tokens in enumerate(prompts):
        target.submit(retaining(number, tokens, tenant=b"eve" if number == 0 else b"ada"))
        run(target)
    others(target, 10)
    assert [cached(target, 50 + i, tokens) for i, tokens in enumerate(prompts)] == [16, 0, 16, 16]


def test_of_a_long_prefix_the_share_keeps_its_first_blocks(worker: MakeWorker) -> None:
    target = worker()
    tokens = tuple(range(1000, 1061))
    target.submit(retaining(1, tokens))
    run(target)
    others(target, 10)
    assert cached(target, 2, tokens) == 32


@pytest.mark.parametrize(
    ("config", "num_cached"),
    [
        (WINDOWS, 44),
        (STATES, 44),
        (replace(STATES, tables=(TableSpec(block_size=2),)), 48),
        (replace(WINDOWS, tables=(TableSpec(block_size=2, window=5),)), 80),
    ],
)
def test_of_a_long_prefix_the_share_keeps_the_last_resume_point_that_fits(
    config: EngineConfig, num_cached: int
) -> None:
    """With its window and its state; without them, its first blocks would be useless."""
    target = Worker(config)
    tokens = tuple(range(1000, 1081))
    target.submit(retaining(1, tokens))
    run(target)
    others(target, 10)
    assert cached(target, 2, tokens) == num_cached


@pytest.mark.parametrize("config", [WINDOWS, STATES])
def test_a_mark_without_a_resume_point_keeps_the_one_before_it(config: EngineConfig) -> None:
    """The prompt continues from a cached point after the mark, so that it leaves none there."""
    target = Worker(config)
    tokens = tuple(range(1000, 1041))
    target.submit(spec(1, tokens, max_tokens=1))
    run(target)
    retention = PrefixRetention(num_tokens=22, seconds=300)
    target.submit(spec(2, tokens, max_tokens=1, retentions=(retention,)))
    assert cached_of(run(target), 2) == 40
    others(target, 10)
    assert cached(target, 3, tokens) == 12


def test_retention_never_keeps_a_sequence_from_running(worker: MakeWorker) -> None:
    """A prompt that needs the whole pool gets it."""
    target = worker(growth_tokens=0)
    target.submit(retaining(1))
    run(target)
    tokens = tuple(range(1000, 1000 + 32 * 4 - 2))
    assert cached(target, 2, tokens) == 0
    assert cached(target, 3) == 0
    assert not len(target.engine.requests.pool.retained)


@pytest.mark.parametrize("config", [WINDOWS, STATES])
def test_a_prompt_leaves_a_resume_point_at_the_end_of_its_retained_prefix(
    config: EngineConfig,
) -> None:
    """Another continuation finds it; without it, a window or a state is missing there."""
    system = tuple(range(1, 15))
    for seconds, num_cached in ((300.0, 12), (0.0, 0)):
        target = Worker(config)
        retention = PrefixRetention(num_tokens=len(system), seconds=seconds)
        first = (*system, *range(20, 45))
        retentions = (retention,) if seconds else ()
        target.submit(spec(1, first, max_tokens=1, retentions=retentions))
        run(target)
        others(target, 10)
        assert cached(target, 2, (*system, 9, 9, 9)) == num_cached
