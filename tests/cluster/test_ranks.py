"""Tests how many threads a rank uses of the cores of its node."""

import pytest

from tandem.cluster.local import worker


@pytest.mark.parametrize(
    ("cores", "num_threads", "ranks_per_node", "num_cpus", "threads"),
    [
        (2, None, 2, 0.0, 1),
        (16, None, 4, 0.0, 4),
        (2, None, 8, 0.0, 1),
        (16, None, 1, 4.0, 4),
        (16, None, 4, 8.0, 4),
        (16, None, 1, 0.5, 16),
        (2, 7, 2, 1.0, 7),
    ],
)
def test_a_rank_takes_its_share_of_the_cores_that_its_process_may_use(
    monkeypatch: pytest.MonkeyPatch,
    cores: int,
    num_threads: int | None,
    ranks_per_node: int,
    num_cpus: float,
    threads: int,
) -> None:
    monkeypatch.setattr(worker, "available_cores", lambda: cores)
    assert worker.rank_threads(num_threads, ranks_per_node, num_cpus) == threads
