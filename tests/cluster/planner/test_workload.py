"""Tests changes of planned requests: their lengths, and how long they arrive."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.cluster.planner.workload import PlannedWorkload
from tandem.cluster.traces.read import TracedRequest


def traced(time: float, input_length: int, hashes: tuple[int, ...] = ()) -> TracedRequest:
    return TracedRequest(
        time=time,
        input_length=input_length,
        output_length=100,
        block_hashes=hashes,
        block_tokens=64,
    )


@given(st.integers(1, 5_000), st.sampled_from([0.9, 1.1, 2.0]))
def test_a_prompt_of_another_length_keeps_its_blocks(length: int, factor: float) -> None:
    hashes = tuple(range(math.ceil(length / 64)))
    (scaled,) = PlannedWorkload([traced(0.0, length, hashes)]).with_lengths(factor).requests
    assert scaled.block_hashes == hashes
    assert math.ceil(scaled.input_length / scaled.block_tokens) == len(hashes)
    assert scaled.block_tokens == round(64 * factor)
    assert scaled.output_length == pytest.approx(100 * factor, abs=1.5)


def test_the_mean_length_counts_prompts_and_outputs() -> None:
    assert PlannedWorkload([traced(0.0, 128), traced(1.0, 64)]).mean_length == 196


def test_prompts_without_blocks_have_exactly_the_scaled_length() -> None:
    workload = PlannedWorkload.poisson(2.0, 1_000, 50, 10, seed=0)
    assert {each.input_length for each in workload.with_lengths(0.9).requests} == {900}
    assert {each.input_length for each in workload.with_lengths(1.1).requests} == {1_100}
    assert {each.output_length for each in workload.with_lengths(1.1).requests} == {55}


def test_requests_are_repeated_at_their_rate_until_they_last() -> None:
    workload = PlannedWorkload([traced(0.0, 128, (3, 4)), traced(1.0, 64, (3,)), traced(2.0, 10)])
    assert workload.lasting(2.0) is workload
    longer = workload.lasting(6.5)
    assert [each.time for each in longer.requests] == [0, 1, 2, 3, 4, 5, 6, 7]
    assert longer.rate == pytest.approx(workload.rate)
    assert [each.input_length for each in longer.requests[3:6]] == [128, 64, 10]
    # Prompts share blocks within a repetition, and none with another one.
    assert [each.block_hashes for each in longer.requests[3:6]] == [(8, 9), (8,), ()]
