"""The fake must catch what it is there to catch."""

import random
from dataclasses import replace

import numpy as np
import pytest

from tandem.tests.workers.engine.fake import FakeExecutor, expected_choices, expected_tokens
from tandem.tests.workers.spans import read_now, span
from tandem.workers.engine.plan import PENDING_TOKEN, SamplingParams, SequenceStep, StepPlan
from tandem.workers.kv_cache.tables import TableBlocks

BLOCK_SIZE = 4
TOKENS = (5, 6, 7, 8, 9, 10)


def plan(
    tokens: tuple[int, ...],
    *,
    start: int = 0,
    blocks: tuple[int, ...] = (),
    first: bool = True,
    sequence_id: int = 1,
) -> StepPlan:
    step = SequenceStep(
        sequence_id=sequence_id,
        token_ids=tokens,
        start=start,
        new_blocks=(TableBlocks(blocks, 0 if first else -(-start // BLOCK_SIZE)),)
        if blocks
        else (),
        sampling=SamplingParams() if first else None,
        num_samples=1,
    )
    return StepPlan(sequences=(step,), dropped=())


def computed() -> FakeExecutor:
    """An executor that holds TOKENS in blocks 3 and 1."""
    executor = FakeExecutor(8, BLOCK_SIZE)
    executor.execute(plan(TOKENS, blocks=(3, 1)))
    return executor


def test_tokens_follow_from_the_history_alone() -> None:
    want = expected_tokens(TOKENS, 3, 512)
    whole, chunked = FakeExecutor(8, BLOCK_SIZE), FakeExecutor(8, BLOCK_SIZE)
    assert whole.execute(plan(TOKENS, blocks=(0, 1))) == want[:1]
    chunked.execute(plan(TOKENS[:3], blocks=(5,)))
    assert chunked.execute(plan(TOKENS[3:], start=3, blocks=(2,), first=False)) == want[:1]
    assert chunked.execute(plan((want[0],), start=6, first=False)) == want[1:2]
    assert chunked.execute(plan((want[1],), start=7, first=False)) == want[2:]
    assert expected_tokens(TOKENS[1:], 3, 512) != want


@pytest.mark.parametrize("tokens_at_a_time", [1, 3, 6])
@pytest.mark.parametrize("layers_at_a_time", [1, 3])
@pytest.mark.parametrize("slot_ranges", [(range(2),), (range(1, 2), range(1))])
def test_copied_kv_continues_the_sequence(
    tokens_at_a_time: int, layers_at_a_time: int, slot_ranges: tuple[range, ...]
) -> None:
    source, target = computed().kv, FakeExecutor(16, 2)
    table = (9, 4, 11)
    for token in range(0, len(TOKENS), tokens_at_a_time):
        for layer in range(0, 3, layers_at_a_time):
            for slots in slot_ranges:
                part = replace(
                    span(source, token, tokens_at_a_time, layer, layers_at_a_time),
                    first_slot=slots.start,
                    num_slots=len(slots),
                )
                data = read_now(source, (3, 1), part)
                assert data.nbytes == part.size(source.layout)
                target.kv.write(table, part, data)
    first, second = expected_tokens(TOKENS, 2, 512)
    assert target.execute(plan((first,), start=6, blocks=(*table, 0))) == [second]


def test_every_misplaced_element_is_found() -> None:
    """Swapping any two unequal float32 elements of the canonical form is found when the sequence
    goes on.
    """
    kv = computed().kv
    whole = span(kv, 0, 6)
    data = bytes(read_now(kv, (3, 1), whole))
    rng = random.Random(1)
    for _ in range(200):
        a, b = (4 * rng.randrange(len(data) // 4) for _ in range(2))
        swapped = bytearray(data)
        swapped[a : a + 4], swapped[b : b + 4] = data[b : b + 4], data[a : a + 4]
        executor = FakeExecutor(8, BLOCK_SIZE)
        executor.kv.write((0, 1), whole, memoryview(swapped))
        if swapped == data:
            executor.execute(plan((1,), start=6, blocks=(0, 1)))
        else:
            with pytest.raises(RuntimeError, match="KV of something else"):
                executor.execute(plan((1,), start=6, blocks=(0, 1)))


@pytest.mark.parametrize(
    "step",
    [
        plan((1,), start=6, blocks=(1, 3), sequence_id=2),  # the table in the wrong order
        plan((1,), start=6, blocks=(3, 2), sequence_id=2),  # a block never written
        plan((1,), start=7, blocks=(3, 1), sequence_id=2),  # a position never written
        plan((1,), start=7, first=False),  # a gap
        plan((1,), start=5, first=False),  # a repetition
        plan((1,), start=6, blocks=(1, 3)),  # a known sequence anew, the table in the wrong order
        plan((1,), start=6, first=False, sequence_id=2),  # a new one as if known
        plan((), start=6, first=False),
        plan((PENDING_TOKEN, 1), start=6, first=False),
        plan((1, PENDING_TOKEN), start=6, first=False),
        plan((PENDING_TOKEN,), start=6, blocks=(3, 1), sequence_id=2),  # never sampled
    ],
)
def test_bad_plans_are_refused(step: StepPlan) -> None:
    with pytest.raises(RuntimeError):
        computed().execute(step)


def test_a_step_does_not_read_what_its_neighbour_writes_in_it() -> None:
    executor = FakeExecutor(8, BLOCK_SIZE)
    writer = plan(TOKENS[:4], blocks=(0,)).sequences[0]
    reader = plan(TOKENS[4:], start=4, blocks=(0, 1), sequence_id=2).sequences[0]
    with pytest.raises(RuntimeError, match="KV of something else"):
        executor.execute(StepPlan(sequences=(writer, reader), dropped=()))


def test_dropped_sequences_are_forgotten_and_unknown_ones_ignored() -> None:
    executor = computed()
    again = replace(plan(TOKENS, blocks=(0, 2)), dropped=(1, 77))
    assert executor.execute(again) == expected_tokens(TOKENS, 1, 512)


def test_a_slot_is_a_head_of_every_key_and_value() -> None:
    kv = computed().kv
    whole = np.frombuffer(read_now(kv, (3, 1), span(kv, 1, 4)), np.float32).reshape(3, 2, 4, 2, 4)
    for slot in (0, 1):
        part = read_now(kv, (3, 1), replace(span(kv, 1, 4), first_slot=slot, num_slots=1))
        assert bytes(part) == whole[:, :, :, slot].tobytes()


def test_kv_refuses_lengths_and_ranges() -> None:
    kv = computed().kv
    part = span(kv, 0, 2, 0, 1)
    size = part.size(kv.layout)
    for wrong in (0, size - 1, size + 1):
        with pytest.raises(ValueError, match="data"):
            kv.write((3,), part, memoryview(bytes(wrong)))
    changes: tuple[tuple[str, dict[str, int]], ...] = (
        ("tokens 0 \\+ 5", {"num_tokens": 5}),
        ("layers", {"first_layer": 2, "num_layers": 2}),
        ("layers", {"first_layer": -1}),
        ("layers", {"num_layers": 0}),
        ("KV slots", {"first_slot": 1}),
        ("KV slots", {"first_slot": -1}),
        ("KV slots", {"num_slots": 3}),
        ("KV slots", {"num_slots": 0}),
    )
    for text, change in changes:
        outside = replace(part, **change)
        with pytest.raises(ValueError, match=text):
            read_now(kv, (3,), outside)
        with pytest.raises(ValueError, match=text):
            kv.write((3,), outside, memoryview(bytes(max(0, outside.size(kv.layout)))))


def test_failure_comes_when_asked_for() -> None:
    executor = FakeExecutor(8, BLOCK_SIZE)
    executor.fail_after_steps = 1
    executor.execute(plan(TOKENS, blocks=(0, 1)))
    with pytest.raises(RuntimeError, match="fails after 1"):
        executor.execute(plan((1,), start=6, first=False))
    assert executor.num_steps == 1


def test_pending_token_is_what_the_step_before_sampled() -> None:
    want = expected_tokens(TOKENS, 3, 512)
    executor = FakeExecutor(8, BLOCK_SIZE)
    first = executor.launch(plan(TOKENS, blocks=(0, 1)))
    second = executor.launch(plan((PENDING_TOKEN,), start=6, first=False))
    assert first().tokens == want[:1]
    third = executor.launch(plan((PENDING_TOKEN,), start=7, first=False))
    assert [second().tokens, third().tokens] == [want[1:2], want[2:]]


def test_pending_token_of_an_earlier_step_is_refused() -> None:
    executor = computed()
    executor.execute(StepPlan(sequences=(), dropped=()))
    executor.execute(plan((5,), blocks=(4,), sequence_id=2))
    with pytest.raises(RuntimeError, match="has not sampled"):
        executor.execute(plan((PENDING_TOKEN,), start=6, first=False))


def test_pending_token_of_a_dropped_sequence_is_refused() -> None:
    again = replace(plan((PENDING_TOKEN,), start=6, blocks=(3, 1)), dropped=(1,))
    with pytest.raises(RuntimeError, match="has not sampled"):
        computed().execute(again)


def test_a_third_launch_waits_for_the_first_step_s_collection() -> None:
    executor = FakeExecutor(8, BLOCK_SIZE)
    first, _ = (executor.launch(plan(TOKENS, blocks=(n, n + 1), sequence_id=n)) for n in (0, 2))
    with pytest.raises(RuntimeError, match="two steps are uncollected"):
        executor.launch(plan(TOKENS, blocks=(4, 5), sequence_id=4))
    first()
    executor.launch(plan(TOKENS, blocks=(4, 5), sequence_id=4))
    assert executor.num_steps == 3


def test_steps_are_collected_once_and_in_order() -> None:
    executor = FakeExecutor(8, BLOCK_SIZE)
    first, second = (
        executor.launch(plan(TOKENS, blocks=(n, n + 1), sequence_id=n)) for n in (0, 2)
    )
    with pytest.raises(RuntimeError, match="out of order"):
        second()
    first()
    with pytest.raises(RuntimeError, match="twice"):
        first()
    assert second().tokens == expected_tokens(TOKENS, 1, 512)


def test_a_known_sequence_made_known_anew_has_the_new_table_alone() -> None:
    executor = computed()
    executor.kv.copy(3, 5)
    executor.kv.copy(1, 6)
    first, second = expected_tokens(TOKENS, 2, 512)
    assert executor.execute(plan((first,), start=6, blocks=(5, 6))) == [second]


def test_blocks_are_copied_before_the_step() -> None:
    executor = computed()
    first, second = expected_tokens(TOKENS, 2, 512)
    goes_on = plan((first,), start=6, first=False).sequences[0]
    forked = plan((7,), start=6, blocks=(3, 5), sequence_id=2).sequences[0]
    both = StepPlan(sequences=(goes_on, forked), dropped=(), copies=((1, 5),))
    assert executor.execute(both) == [second, expected_tokens((*TOKENS, 7), 1, 512)[0]]


def test_a_block_that_is_copied_is_no_target() -> None:
    with pytest.raises(RuntimeError, match="copied and copied to"):
        computed().execute(StepPlan(sequences=(), dropped=(), copies=((3, 5), (5, 6))))


def test_several_samples_use_consecutive_seeds() -> None:
    step = plan(TOKENS, blocks=(0, 1)).sequences[0]
    executor = FakeExecutor(8, BLOCK_SIZE)
    step = replace(step, num_samples=3, sampling=SamplingParams(seed=2**64 - 1))
    drawn = executor.execute(StepPlan(sequences=(step,), dropped=()))
    assert drawn == [tokens[0] for tokens in expected_choices(TOKENS, 3, 1, 512, 2**64 - 1)]
    assert drawn[1] == expected_tokens(TOKENS, 1, 512)[0]
    assert len(set(drawn)) == 3
    with pytest.raises(RuntimeError, match="has not sampled"):
        executor.execute(plan((PENDING_TOKEN,), start=6, first=False))


@pytest.mark.parametrize("history", [(), TOKENS])
def test_a_history_is_asked_for_and_not_in_vain(history: tuple[int, ...]) -> None:
    sampling = SamplingParams(presence_penalty=0.0 if history else 0.5)
    step = replace(plan(TOKENS, blocks=(0, 1)).sequences[0], sampling=sampling, history=history)
    with pytest.raises(RuntimeError, match="missing or superfluous"):
        FakeExecutor(8, BLOCK_SIZE).execute(StepPlan(sequences=(step,), dropped=()))
