"""The test for a watermark: its probabilities, and which tokens it scores."""

from fractions import Fraction
from math import comb

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.router.watermark.detect import Evidence, find_evidence

KEY = bytes(range(16))
TOKENS = st.lists(st.integers(0, 50), max_size=60)


@pytest.mark.parametrize("gamma", [Fraction(1, 100), Fraction(1, 4), Fraction(1, 2)])
@pytest.mark.parametrize("count", [0, 1, 2, 5, 40, 200])
def test_p_is_the_exact_tail_of_the_binomial_distribution(count: int, gamma: Fraction) -> None:
    tail = Fraction(0)
    for num_green in range(count, -1, -1):
        tail += comb(count, num_green) * gamma**num_green * (1 - gamma) ** (count - num_green)
        found = Evidence(num_tokens=count, num_green=num_green, gamma=float(gamma))
        assert found.p == pytest.approx(float(tail), rel=1e-9, abs=1e-13)
        assert 0 <= found.p <= 1


def test_z_is_of_the_paper() -> None:
    """(green - gamma T) / sqrt(T gamma (1 - gamma)), with the numbers of the paper's example."""
    assert Evidence(num_tokens=36, num_green=28, gamma=0.25).z == pytest.approx(19 / 6.75**0.5)
    assert Evidence(num_tokens=36, num_green=9, gamma=0.25).z == 0
    assert (
        Evidence(num_tokens=0, num_green=0, gamma=0.25).z,
        Evidence(num_tokens=0, num_green=0, gamma=0.25).p,
    ) == (0, 1)


@given(TOKENS, st.integers(1, 8))
def test_each_pair_of_a_context_and_a_token_is_scored_once(ids: list[int], width: int) -> None:
    pairs = {tuple(ids[at : at + width + 1]) for at in range(len(ids) - width)}
    found = find_evidence(ids, KEY, 0.25, width)
    assert found.num_tokens == len(pairs)
    # One pair after the other gives the same count.
    green = sum(find_evidence(pair, KEY, 0.25, width).num_green for pair in pairs)
    assert found.num_green == green


def test_a_repeated_passage_is_no_evidence() -> None:
    ids = [5, 9, 7, 3]
    once = find_evidence([*ids, *ids[:2]], KEY, 0.25, 2)
    assert find_evidence(ids * 200, KEY, 0.25, 2) == once
    assert once.num_tokens == 4


def test_texts_of_a_hundred_thousand_tokens() -> None:
    ids = [(7 * n * n + n) % 50_000 for n in range(100_000)]
    found = find_evidence(ids, KEY, 0.25, 2)
    assert found.num_tokens > 40_000
    assert abs(found.z) < 5
