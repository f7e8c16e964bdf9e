"""The statistics of the commands beside it."""

import random

import pytest

from tandem.tests.soak.samples import line, quantile, rank_sum


def test_samples_of_one_distribution_are_not_told_apart_and_others_are() -> None:
    rng = random.Random(7)
    one, other = ([rng.gauss(5, 1) for _ in range(200)] for _ in range(2))
    assert abs(rank_sum(one, other)) < 3.3
    assert rank_sum([each + 0.5 for each in one], other) > 3.3
    assert rank_sum([each - 0.5 for each in one], other) < -3.3
    assert rank_sum([1.0] * 20, [1.0] * 30) == 0
    assert rank_sum([1, 2, 3], [4, 5]) == pytest.approx(-(3**0.5))


def test_a_row_has_the_figures_of_a_sample() -> None:
    assert quantile([3, 1, 2], 0.5) == 2
    assert quantile([0, 10], 0.99) == pytest.approx(9.9)
    assert line("name", [0.001, 0.002, 0.003]).split() == ["name", "3", "2.000", "2.800", "2.980", "3.000"]
