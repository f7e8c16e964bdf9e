"""The statistics of the commands beside it."""

import math
import random

import pytest

from tandem.tests.soak.samples import Points, grows, line, quantile, rank_sum, trend


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
    assert line("name", [0.001, 0.002, 0.003]).split() == [
        "name",
        "3",
        "2.000",
        "2.800",
        "2.980",
        "3.000",
    ]


def series(slope: float, noise: float, count: int = 50, step: float = 0.0) -> Points:
    """Returns values of twenty minutes; the first tenth is lower by `step`."""
    rng = random.Random(count)
    start = [step * (number < count // 10) for number in range(count)]
    return [(24.0 * n, 500 + slope * n - start[n] + rng.gauss(0, noise)) for n in range(count)]


@pytest.mark.parametrize("count", [8, 12, 50])
def test_a_leak_is_told_from_noise_and_from_a_step_at_the_start(count: int) -> None:
    assert grows(series(1.0, 0.5, count), 2.0)
    assert not grows(series(0.0, 3.0, count), 2.0)
    assert not grows(series(0.0, 0.0, count), 2.0)
    assert not grows(series(-1.0, 0.5, count), 2.0)
    assert not grows(series(0.0, 1.0, count, step=20.0), 2.0)


def test_slow_leaks_of_a_long_run_are_found() -> None:
    assert grows(series(0.1, 0.5), 2.0)  # five in all
    assert grows(
        [(24.0 * n, 70 + n // 10) for n in range(50)], 1.0
    )  # four files, one after the other
    assert not grows([(24.0 * n, 70 + n // 25) for n in range(50)], 1.0)  # one more
    assert not any(grows(series(0.0, 3.0, count), 2.0) for count in range(8, 100))


def test_the_slope_of_a_line_is_its_own_and_few_points_tell_nothing() -> None:
    assert trend([(n, 3.0 * n) for n in range(20)]) == (3.0, 3.0)
    assert trend([(0, 1.0), (1, 5.0)]) == (4.0, -math.inf)
    assert trend([]) == trend([(0, 1.0)]) == (0.0, -math.inf)
