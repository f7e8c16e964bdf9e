"""Mixers with states: equality with transformers, and bits that do not depend on the steps."""

import random
from typing import Final

import pytest
import torch

from tandem.tests.workers.model.states.mixer_cases import (
    NUM_SLOTS,
    Case,
    Inputs,
    every_case,
    mamba2_case,
    run_cut,
    state_of,
)
from tandem.workers.model.kernels.c import cpu
from tandem.workers.model.kernels.c import states as kernels
from tandem.workers.model.states import mixers, reference
from tandem.workers.model.states.steps import StateStep, StateSteps

DTYPES: Final = (torch.float32, torch.bfloat16)
TOLERANCES: Final = {torch.float32: 2e-5, torch.bfloat16: 2**-7}
CASES: Final = [
    pytest.param(case, id=f"{case.name} {str(dtype)[6:]}")
    for dtype in DTYPES
    for case in every_case(dtype)
]
NUM_TOKENS: Final = 80


def make_inputs(case: Case, num_tokens: int = NUM_TOKENS, seed: int = 0) -> Inputs:
    return case.inputs(num_tokens, torch.Generator().manual_seed(seed))


def test_this_machine_has_kernels() -> None:
    assert cpu.usable(torch.zeros(1))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("module", [mixers, reference])
def test_a_sequence_in_two_steps_gives_what_transformers_gives(case: Case, module: object) -> None:
    inputs = make_inputs(case)
    result, _ = run_cut(case, module, inputs, (33, NUM_TOKENS), case.slots())
    expected = case.expected(inputs).reshape(result.shape)
    tolerance = TOLERANCES[case.dtype]
    torch.testing.assert_close(result.float(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("case", CASES)
def test_kernels_and_torch_write_the_same_memory(case: Case) -> None:
    """A state may move to a machine without kernels."""
    inputs = make_inputs(case)
    states = {module: case.slots() for module in (mixers, reference)}
    for module, memory in states.items():
        run_cut(case, module, inputs, (33, NUM_TOKENS), memory)
    ours, theirs = (state_of(memory, 1).float() for memory in states.values())
    tolerance = TOLERANCES[torch.float32]
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("case", CASES)
def test_the_bits_do_not_depend_on_the_cuts(case: Case) -> None:
    inputs = make_inputs(case)
    whole = case.slots()
    expected, slot = run_cut(case, mixers, inputs, (NUM_TOKENS,), whole)
    for seed in range(20):
        generator = random.Random(seed)
        cuts = sorted(generator.sample(range(1, NUM_TOKENS), generator.choice((1, 3, 30))))
        states = case.slots()
        result, last = run_cut(case, mixers, inputs, (*cuts, NUM_TOKENS), states)
        assert torch.equal(result, expected)
        assert torch.equal(state_of(states, last), state_of(whole, slot))


def together(case: Case, seed: int) -> tuple[list[Inputs], list[StateStep]]:
    """Inputs of three sequences of a step, of which two continue, and their slots.

    The second sequence is also wanted after two of its tokens and after all but one.
    """
    counts = [1, random.Random(seed).randrange(5, 40), 3]
    inputs = [make_inputs(case, count, seed + index) for index, count in enumerate(counts)]
    targets = [((1, 4),), ((2, 5), (counts[1] - 1, 6), (counts[1], 7)), ((3, 8),)]
    sources = [0, 1, None]
    firsts = [0, 1, 1 + counts[1]]
    steps = [
        StateStep(first_row=first, num_tokens=count, source=source, targets=target)
        for first, count, source, target in zip(firsts, counts, sources, targets, strict=True)
    ]
    return inputs, steps


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("seed", range(3))
def test_the_bits_do_not_depend_on_other_sequences(case: Case, seed: int) -> None:
    inputs, steps = together(case, seed)
    start = case.slots()
    for state in start:
        state[:2] = torch.randn(state[:2].shape, generator=torch.Generator().manual_seed(seed))
    states = [state.clone() for state in start]
    rows = {name: torch.cat([each[name] for each in inputs]) for name in inputs[0]}
    result = case.compute(mixers, rows, states, StateSteps(steps))
    for one, step in zip(inputs, steps, strict=True):
        for count, slot in step.targets:
            part = {name: each[:count] for name, each in one.items()}
            alone = [state.clone() for state in start]
            target = StateStep(
                first_row=0, num_tokens=count, source=step.source, targets=((count, 9),)
            )
            expected = case.compute(mixers, part, alone, StateSteps([target]))
            assert torch.equal(result[step.first_row :][:count], expected)
            assert torch.equal(state_of(states, slot), state_of(alone, 9))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("module", [mixers, reference])
def test_a_step_writes_its_targets_only(case: Case, module: object) -> None:
    inputs, steps = together(case, 0)
    states = case.slots()
    for state in states:
        state[:] = 0.5
    rows = {name: torch.cat([each[name] for each in inputs]) for name in inputs[0]}
    case.compute(module, rows, states, StateSteps(steps))
    written = {slot for step in steps for _, slot in step.targets}
    for slot in range(NUM_SLOTS):
        is_changed = not torch.equal(state_of(states, slot), state_of(states, 0))
        assert is_changed == (slot in written)
    assert torch.equal(state_of(states, 0), torch.full_like(state_of(states, 0), 0.5))


@pytest.mark.parametrize("num_threads", [1, 2, 5])
def test_the_bits_do_not_depend_on_the_threads(num_threads: int) -> None:
    (case,) = (each for each in every_case(torch.bfloat16) if each.name == "delta 32 x 80")
    inputs = make_inputs(case)
    expected, _ = run_cut(case, mixers, inputs, (NUM_TOKENS,), case.slots())
    threads = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        result, _ = run_cut(case, mixers, inputs, (40, NUM_TOKENS), case.slots())
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(result, expected)


def test_stores_past_the_caches_give_the_same_bits() -> None:
    """A step stores so if it writes at least 4 MiB."""
    case = mamba2_case(torch.bfloat16, groups=1, heads=16, rows=128, columns=64)
    assert NUM_SLOTS * 16 * 128 * 64 >= 1 << 20
    inputs = make_inputs(case, NUM_SLOTS)
    steps = [
        StateStep(first_row=row, num_tokens=1, source=None, targets=((1, row),))
        for row in range(NUM_SLOTS)
    ]
    states = case.slots()
    result = case.compute(mixers, inputs, states, StateSteps(steps))
    for row in range(NUM_SLOTS):
        alone = case.slots()
        part = {name: each[row : row + 1] for name, each in inputs.items()}
        expected, _ = run_cut(case, mixers, part, (1,), alone)
        assert torch.equal(result[row : row + 1], expected)
        assert torch.equal(state_of(states, row), state_of(alone, 0))


def test_larger_states_run_in_plain_torch() -> None:
    case = mamba2_case(torch.float32, groups=1, heads=1, rows=kernels.MAX_ROWS + 4, columns=16)
    inputs = make_inputs(case)
    result, _ = run_cut(case, mixers, inputs, (NUM_TOKENS,), case.slots())
    torch.testing.assert_close(result, case.expected(inputs), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("shape", [(2, 16, 32), (1, 5, 7), (3, 10, 20)])
def test_packed_matrices_are_unpacked(shape: tuple[int, int, int]) -> None:
    matrices = torch.randn(shape)
    assert torch.equal(reference.unpack(reference.pack(matrices), shape[1]), matrices)


@pytest.mark.parametrize(
    ("source", "targets", "problem"),
    [
        (3, ((4, 3),), "read in the same step"),
        (3, ((2, 5), (4, 5)), "written twice"),
        (3, ((4, 5), (2, 6)), "states after"),
        (3, ((0, 5),), "states after"),
        (3, ((5, 5),), "states after"),
    ],
)
def test_steps_that_no_kernel_can_compute_are_refused(
    source: int, targets: tuple[tuple[int, int], ...], problem: str
) -> None:
    with pytest.raises(ValueError, match=problem):
        StateSteps([StateStep(first_row=0, num_tokens=4, source=source, targets=targets)])
