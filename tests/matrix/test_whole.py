"""The whole fault matrix, for `make matrix`: every case, and a worker killed at every token of a
stream.
"""

import pytest

from tandem.tests.matrix.cases import SAMPLINGS, Case, whole_product
from tandem.tests.matrix.cluster import Cluster
from tandem.tests.matrix.scenario import audit, check, prepare

NUM_KILLS = 64
pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.matrix]


@pytest.mark.parametrize("case", whole_product(), ids=str)
async def test_a_fault_alters_nothing(cluster: Cluster, case: Case) -> None:
    await check(cluster, case)


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("num_tokens", range(1, NUM_KILLS + 1))
async def test_a_decode_worker_is_killed_after_any_number_of_tokens(
    cluster: Cluster, sampling: str, num_tokens: int
) -> None:
    scenario = await prepare(
        cluster, Case("kill", "token", sampling, "0+2"), num_tokens=NUM_KILLS + 2
    )
    scenario.token_point = num_tokens
    await audit(scenario)
