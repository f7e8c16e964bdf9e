"""Each pair of fault, point, sampling and layout at least once, and what else can be switched on:
no output is lost or altered, nothing is left."""

import gc
import itertools

import psutil
import pytest

from tandem.tests.matrix.cases import (
    FAULTS,
    LAYOUTS,
    OPTIONS,
    POINTS,
    SAMPLINGS,
    Case,
    pairs_of,
    pairwise,
    whole_product,
    with_options,
)
from tandem.tests.matrix.cluster import Cluster
from tandem.tests.matrix.scenario import check

PAIRS = pairwise()
pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_every_pair_is_covered() -> None:
    covered = {
        pair
        for case in PAIRS
        for pair in pairs_of((case.fault, case.point, case.sampling, case.layout))
    }
    values = (FAULTS, POINTS, SAMPLINGS, LAYOUTS)
    assert len(covered) == sum(len(a) * len(b) for a, b in itertools.combinations(values, 2))


async def test_each_layout_meets_both_variants_of_each_fault() -> None:
    met = {(case.fault, case.point, case.layout, case.variant) for case in whole_product()}
    assert len(met) == len(FAULTS) * len(POINTS) * len(LAYOUTS + OPTIONS) * 2


@pytest.mark.parametrize("case", PAIRS + with_options(), ids=str)
async def test_a_fault_alters_nothing(cluster: Cluster, case: Case) -> None:
    await check(cluster, case)


async def test_the_router_holds_no_more_than_before(cluster: Cluster) -> None:
    """Compares the files and threads of the router's process before and after more cases."""
    case = Case("cut", "token", "seed", "1+1")
    held = []
    for _ in range(3):
        for _ in range(3):
            await check(cluster, case)
        # in a process with many objects, Python itself seldom looks for closed connections among
        # them
        gc.collect()
        held.append((psutil.Process().num_fds(), psutil.Process().num_threads()))
    assert held[2][0] <= held[0][0] + 2, held
    assert held[2][1] <= held[0][1] + 2, held
