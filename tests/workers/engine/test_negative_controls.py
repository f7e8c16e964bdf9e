"""Builds of the engine with a bug put in: each must be caught by the checks that the other tests
rely on.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from tandem.proto.hashing import hash_chain
from tandem.tests.workers.engine.fake import FakeKv
from tandem.tests.workers.engine.harness import Worker, engine_config
from tandem.tests.workers.engine.pair import Pair, Request
from tandem.workers.engine.block_pool import BlockPool
from tandem.workers.engine.block_table import SequenceTable
from tandem.workers.engine.config import EngineConfig
from tandem.workers.engine.engine import Engine
from tandem.workers.engine.events import Event, NewTokens, Progress
from tandem.workers.engine.plan import OnLayers, Samples, SequenceStep, StepPlan
from tandem.workers.engine.request_table import RequestTable
from tandem.workers.engine.scheduler import Scheduler
from tandem.workers.engine.sequence import BeamSearch
from tandem.workers.engine.sequence import Sequence as EngineSequence
from tandem.workers.engine.update import update
from tandem.workers.kv_cache.layout import KvSpan

UPDATE = "tandem.workers.engine.engine.update"
HASH_CHAIN = "tandem.workers.engine.sequence.hash_chain"
CONFIG = engine_config(num_blocks=16, block_size=2, chunk_tokens=8, growth_tokens=2)
OVERLAP = replace(CONFIG, overlap=True)

Serve = Callable[[], Pair]


@pytest.fixture(params=[CONFIG, OVERLAP], ids=["stepwise", "overlap"])
def serve(request: pytest.FixtureRequest) -> Serve:
    return lambda: serve_with(request.param)


def serve_with(config: EngineConfig, *, late: bool = False) -> Pair:
    """Six requests, whole and split, of two tenants, with prefixes in common."""
    pair = Pair(config, config, late=late)
    for number in range(6):
        prompt = (1, 2, 3, 4, 5, 6, 7)[: 3 + number % 4]
        pair.submit(Request(prompt, 6, split=number % 2 == 0, salt=b"other" if number > 3 else b""))
    pair.drain()
    return pair


@pytest.mark.parametrize("late", [False, True])
def test_the_unbroken_build_passes(late: bool) -> None:
    assert serve_with(CONFIG, late=late).active == []
    assert serve_with(OVERLAP, late=late).active == []


def test_leaked_block_is_caught(monkeypatch: pytest.MonkeyPatch, serve: Serve) -> None:
    release = BlockPool.release
    monkeypatch.setattr(BlockPool, "release", lambda pool, blocks: release(pool, blocks[1:]))
    with pytest.raises(RuntimeError, match=r"block \d+: \d owners, 0 leases; the pool has"):
        serve()


def test_leaked_lease_is_caught(monkeypatch: pytest.MonkeyPatch, serve: Serve) -> None:
    monkeypatch.setattr(BlockPool, "unlease", lambda pool, blocks: None)
    with pytest.raises(RuntimeError, match=r"the pool has \(0, 1\)"):
        serve()


def test_leaked_reservation_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BlockPool, "unreserve", lambda pool, blocks: None)
    pair = Pair(CONFIG, CONFIG)
    request = Request((1, 2, 3), 6)
    pair.submit(request)
    pair.step(pair.decode)
    with pytest.raises(RuntimeError, match="reserved"):
        pair.cancel(request)


def test_repeated_token_is_caught(monkeypatch: pytest.MonkeyPatch, serve: Serve) -> None:
    def repeat(table: RequestTable, plan: StepPlan, samples: Samples) -> list[Event]:
        events = update(table, plan, samples)
        return events + [
            event for event in events if isinstance(event, NewTokens) and event.first_index == 2
        ]

    monkeypatch.setattr(UPDATE, repeat)
    with pytest.raises(AssertionError, match="an index is missing or repeated"):
        serve()


def test_lost_token_is_caught(monkeypatch: pytest.MonkeyPatch, serve: Serve) -> None:
    def lose(table: RequestTable, plan: StepPlan, samples: Samples) -> list[Event]:
        return [
            e
            for e in update(table, plan, samples)
            if not isinstance(e, NewTokens) or e.first_index != 2
        ]

    monkeypatch.setattr(UPDATE, lose)
    with pytest.raises(AssertionError, match="an index is missing or repeated"):
        serve()


def test_block_given_to_two_sequences_is_caught(
    monkeypatch: pytest.MonkeyPatch, serve: Serve
) -> None:
    monkeypatch.setattr(BlockPool, "_take", lambda pool: 0)
    with pytest.raises(RuntimeError):
        serve()


def test_prefix_found_under_the_wrong_hash_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hash that forgets what came before a block."""

    def forgetful(tokens: Sequence[int], block_size: int, salt: bytes = b"") -> list[bytes]:
        return [
            salt + bytes(tokens[i : i + block_size])
            for i in range(0, len(tokens) - block_size + 1, block_size)
        ]

    monkeypatch.setattr(HASH_CHAIN, forgetful)
    pair = Pair(CONFIG, CONFIG)
    pair.submit(Request((1, 2, 3, 4, 5), 2))
    pair.drain()
    pair.submit(Request((3, 4, 1, 2, 5), 2))
    with pytest.raises(RuntimeError, match="KV of something else"):
        pair.drain()


def test_salt_that_is_ignored_is_caught(monkeypatch: pytest.MonkeyPatch, serve: Serve) -> None:
    monkeypatch.setattr(HASH_CHAIN, lambda tokens, block_size, salt: hash_chain(tokens, block_size))
    with pytest.raises(AssertionError):
        serve()


def test_blocks_published_before_they_are_computed_are_caught(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    admit = Scheduler._admit

    def eager(scheduler: Scheduler, sequence: EngineSequence) -> Event:
        event = admit(scheduler, sequence)
        for block, digest in zip(sequence.tables[0].blocks, sequence.chain, strict=False):
            scheduler.pool.publish(block, digest)
        return event

    monkeypatch.setattr(Scheduler, "_admit", eager)
    pair = Pair(CONFIG, CONFIG)
    for _ in range(2):
        pair.submit(Request((1, 2, 3, 4, 5), 2))
    with pytest.raises(RuntimeError, match="KV of something else"):
        pair.drain()


def test_import_that_lacks_a_layer_is_caught(monkeypatch: pytest.MonkeyPatch, serve: Serve) -> None:
    write = FakeKv.write

    def skip(kv: FakeKv, blocks: Sequence[int], span: KvSpan, data: memoryview) -> None:
        if span.first_layer != 1:
            write(kv, blocks, span, data)

    monkeypatch.setattr(FakeKv, "write", skip)
    with pytest.raises(RuntimeError, match="layer 1, position"):
        serve()


def test_starvation_is_caught(monkeypatch: pytest.MonkeyPatch, serve: Serve) -> None:
    monkeypatch.setattr(Scheduler, "_can_admit", lambda scheduler: False)
    with pytest.raises(AssertionError, match="somebody starves"):
        serve()


# Bugs that only overlap can have.


def test_blocks_published_when_they_are_scheduled_are_caught(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A reader of a cached prefix reads at once, on no step's account."""
    schedule_step = Scheduler._step

    def eager(
        scheduler: Scheduler,
        sequence: EngineSequence,
        count: int,
        copies: list[tuple[int, int]],
        *draft: Any,
    ) -> SequenceStep:
        step = schedule_step(scheduler, sequence, count, copies, *draft)
        num_computed, sequence.num_computed = (
            sequence.num_computed,
            min(sequence.num_scheduled, sequence.num_tokens),
        )
        scheduler._requests.publish(sequence)
        sequence.num_computed = num_computed
        return step

    monkeypatch.setattr(Scheduler, "_step", eager)
    monkeypatch.setattr(
        Worker, "check", lambda worker: None
    )  # the integrity check would catch it, too
    pair = Pair(
        replace(OVERLAP, budgets=replace(OVERLAP.budgets, chunk_tokens=2)), OVERLAP, late=True
    )
    for _ in range(2):
        pair.submit(Request((1, 2, 3, 4, 5, 6, 7), 2, split=True))
    with pytest.raises(RuntimeError, match="KV of something else"):
        pair.drain()


def test_progress_reported_when_it_is_scheduled_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def hasty(table: RequestTable, plan: StepPlan, samples: Samples) -> list[Event]:
        events = update(table, plan, samples)
        numbers = {s.spec.id: s.num_scheduled for s in table.sequences.values()}
        return [
            replace(e, num_computed=numbers[e.id]) if isinstance(e, Progress) else e for e in events
        ]

    monkeypatch.setattr(UPDATE, hasty)
    pair = Pair(
        replace(OVERLAP, budgets=replace(OVERLAP.budgets, chunk_tokens=2)), OVERLAP, late=True
    )
    request = Request((1, 2, 3, 4, 5, 6, 7), 3, split=True)
    pair.submit(request)
    with pytest.raises(RuntimeError, match="KV of something else"):
        pair.drain()


def test_engine_that_collects_the_wrong_step_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    step = Engine.step

    def swapped(engine: Engine, emit: Callable[[list[Event]], object] | None = None) -> list[Event]:
        launch, waiting = engine._executor.launch, engine._in_flight

        def newest(plan: StepPlan, on_layers: OnLayers | None = None) -> Callable[[], Samples]:
            collect = launch(plan, on_layers)
            if waiting is not None:
                engine._in_flight = (waiting[0], collect)
                return waiting[1]
            return collect

        with monkeypatch.context() as patch:
            patch.setattr(engine._executor, "launch", newest)
            return step(engine, emit)

    monkeypatch.setattr(Engine, "step", swapped)
    with pytest.raises(RuntimeError, match="out of order"):
        serve_with(OVERLAP)


def test_step_beyond_the_last_token_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def blind(sequence: EngineSequence) -> int:
        return max(sequence.num_tokens, sequence.num_scheduled + 1) - sequence.num_scheduled

    monkeypatch.setattr(EngineSequence, "num_unscheduled", property(blind))
    assert serve_with(CONFIG).active == [], "without overlap there is nothing to foresee"
    with pytest.raises(AssertionError):
        serve_with(OVERLAP)


def test_token_of_a_sequence_that_has_ended_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that reports the token that the step in flight samples for a sequence that was
    cancelled.
    """

    def loud(table: RequestTable, plan: StepPlan, samples: Samples) -> list[Event]:
        samplers = [step.sequence_id for step in plan.sequences if step.num_samples]
        gone = [(number, token) for number, token in zip(samplers, samples.tokens, strict=True)]
        gone = [(number, token) for number, token in gone if number not in table.sequences]
        late: list[Event] = [
            NewTokens(id=n, first_index=0, token_ids=(t,), finish=None, prefill_seconds=0.0)
            for n, t in gone
        ]
        return late + update(table, plan, samples)

    monkeypatch.setattr(UPDATE, loud)
    pair = Pair(OVERLAP, OVERLAP)
    request = Request((1, 2, 3), 6)
    pair.submit(request)
    pair.step(pair.decode)
    pair.cancel(request)
    with pytest.raises(AssertionError, match="of no request that lives"):
        pair.step(pair.decode)


# Bugs that only forks can have.


def serve_forks(config: EngineConfig) -> None:
    """Choices and beams of several lengths, whole and split."""
    pair = Pair(config, config)
    for number in range(6):
        prompt = (1, 2, 3, 4, 5, 6, 7)[: 3 + number % 4]
        beam = BeamSearch(num_best=2) if number % 3 == 0 else None
        pair.submit(Request(prompt, 6, split=number % 2 == 0, n=3, beam=beam))
    pair.drain()


FORKS = [replace(CONFIG, num_blocks=48), replace(OVERLAP, num_blocks=48)]


@pytest.mark.parametrize("config", FORKS)
def test_the_unbroken_build_forks(config: EngineConfig) -> None:
    serve_forks(config)


@pytest.mark.parametrize("config", FORKS)
def test_partial_block_that_is_not_copied_is_caught(
    monkeypatch: pytest.MonkeyPatch, config: EngineConfig
) -> None:
    monkeypatch.setattr(FakeKv, "copy", lambda kv, source, target: None)
    with pytest.raises(RuntimeError, match="KV of something else"):
        serve_forks(config)


@pytest.mark.parametrize("config", FORKS)
def test_block_that_is_copied_and_not_held_is_caught(
    monkeypatch: pytest.MonkeyPatch, config: EngineConfig
) -> None:
    def forget(pool: BlockPool, table: SequenceTable, source: SequenceTable) -> None:
        table.copy_source = source.blocks[-1]

    monkeypatch.setattr("tandem.workers.engine.fork._copy_last", forget)
    with pytest.raises(RuntimeError, match=r"block \d+ is free|block \d+: \d owners"):
        serve_forks(config)


@pytest.mark.parametrize("config", FORKS)
def test_sequence_that_changes_unbeknown_to_the_ranks_is_caught(
    monkeypatch: pytest.MonkeyPatch, config: EngineConfig
) -> None:
    monkeypatch.setattr(EngineSequence, "forget_sent", lambda sequence: None)
    with pytest.raises(RuntimeError, match="sampling or tokens are missing"):
        serve_forks(config)


def test_token_that_is_awaited_by_none_of_several_is_caught(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    prepare = EngineSequence.__post_init__

    def hasty(sequence: EngineSequence) -> None:
        prepare(sequence)
        sequence.may_pend = True

    monkeypatch.setattr(EngineSequence, "__post_init__", hasty)
    with pytest.raises(RuntimeError, match="has not sampled"):
        serve_forks(FORKS[1])
