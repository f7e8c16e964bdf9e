"""Tests the blocks and bytes of a sequence's KV cache, and the line through the times of work."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.proto import worker_pb2
from tandem.proto.costs import NEUTRAL_COST, KvCost, LinearCost, TableCost, fit_line

LAYER_BYTES = 4 * 256 * 2 * 2  # of a token of Gemma 3 4B: keys and values of 4 heads in bfloat16
GEMMA = KvCost(16, (TableCost(96, 5 * LAYER_BYTES), TableCost(16, 29 * LAYER_BYTES, 1024)))


def test_gemma_moves_and_holds_what_the_design_says() -> None:
    assert GEMMA.moved_bytes(32_768) == pytest.approx(0.79e9, rel=0.01)
    dense = KvCost(16, (TableCost(16, 34 * LAYER_BYTES),))
    assert dense.moved_bytes(32_768) == pytest.approx(4.56e9, rel=0.01)
    # 342 blocks of all tokens and 65 of the window, instead of 2,321 blocks of the same bytes.
    assert GEMMA.kv_tokens(32_768) / 16 == pytest.approx(342 + 65, abs=1)
    assert GEMMA.report_blocks == 6


@given(st.integers(0, 9999), st.integers(0, 9999))
def test_a_model_without_windows_counts_tokens(num_tokens: int, num_cached: int) -> None:
    cost = KvCost(16, (TableCost(16, 100),))
    num_cached = min(num_cached, num_tokens)
    assert cost.kv_tokens(num_tokens, num_cached) == num_tokens - num_cached
    assert cost.moved_bytes(num_tokens, num_cached) == 100 * (num_tokens - num_cached)
    assert cost.report_blocks == 1


@given(
    st.lists(st.tuples(st.integers(1, 8), st.none() | st.integers(1, 99)), min_size=1, max_size=3),
    st.integers(0, 300),
    st.integers(0, 300),
)
def test_windows_move_just_what_the_next_token_sees(
    windows: list[tuple[int, int | None]], num_tokens: int, num_cached: int
) -> None:
    num_cached = min(num_cached, num_tokens)
    cost = KvCost(
        4, tuple(TableCost(4 * ratio, 10 + ratio, window) for ratio, window in windows), 7
    )
    expected = 7
    for ratio, window in windows:
        for token in range(num_cached, num_tokens):
            if window is None or num_tokens - token < window:
                expected += 10 + ratio
    assert cost.moved_bytes(num_tokens, num_cached) == expected
    assert 0 <= cost.kv_tokens(num_tokens, num_cached) <= cost.kv_tokens(num_tokens)
    assert cost.kv_tokens(num_tokens) <= cost.kv_tokens(num_tokens + 1)


def test_a_worker_describes_its_tables() -> None:
    info = worker_pb2.WorkerInfo(
        block_size=16,
        kv_bytes_per_token=34 * LAYER_BYTES,
        tables=[
            worker_pb2.KvTable(block_size=96, token_bytes=5 * LAYER_BYTES),
            worker_pb2.KvTable(block_size=16, token_bytes=29 * LAYER_BYTES, window=1024),
        ],
    )
    assert KvCost.of(info) == GEMMA
    info.state_bytes = 51_500_000
    info.has_sparse_points = True
    sparse = KvCost.of(info)
    assert sparse.moved_bytes(32_768) == GEMMA.moved_bytes(32_768) + 51_500_000
    assert sparse.report_blocks == 6
    del info.tables[:]
    info.state_bytes = 0
    assert KvCost.of(info).moved_bytes(10) == 340 * LAYER_BYTES


def test_an_unknown_worker_has_one_table() -> None:
    assert KvCost.of(worker_pb2.WorkerInfo()) == NEUTRAL_COST


SECONDS = st.floats(0, 10)


@given(
    amount=st.floats(1, 1e4),
    seconds=SECONDS,
    variance=st.floats(0, 1e6),
    covariance=st.floats(-1e3, 1e3),
    prior=st.builds(LinearCost, fixed=SECONDS, each=SECONDS),
)
def test_a_line_meets_the_means_and_has_no_negative_part(
    amount: float, seconds: float, variance: float, covariance: float, prior: LinearCost
) -> None:
    line = fit_line(amount, seconds, variance, covariance, prior)
    assert line.each >= 0
    assert line.fixed >= -1e-9
    assert line.seconds(amount) == pytest.approx(seconds, abs=1e-9)


def test_a_line_follows_amounts_that_differ_and_the_prior_if_they_do_not() -> None:
    prior = LinearCost(fixed=0.0, each=1.0)
    # Through 0.010 + 0.001 * amount at 0 and at 20.
    assert fit_line(10, 0.020, 100, 0.1, prior).each == pytest.approx(0.001, rel=0.02)
    assert fit_line(10, 0.020, 0, 0, prior).each == pytest.approx(0.002)
