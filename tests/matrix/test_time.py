"""max_time_ms through faults: the request ends with its output so far, whoever computes it."""

import pytest

from tandem.proto import inference_pb2
from tandem.tests.matrix.cases import NUM_TOKENS, Case
from tandem.tests.matrix.cluster import Cluster
from tandem.tests.matrix.scenario import OverBefore, prepare

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.mark.parametrize("fault", ["kill", "stop"])
async def test_the_time_ends_a_request_whose_worker_is_lost(cluster: Cluster, fault: str) -> None:
    """No other worker can continue it. On a busy machine it gets more time to reach the fault."""
    for max_seconds in (1.0, 4.0, 16.0):
        scenario = await prepare(cluster, Case(fault, "token", "seed", "1+1"))
        scenario.max_seconds = max_seconds
        try:
            result = await scenario.play()
        except OverBefore:
            continue
        finally:
            await scenario.recover()
        (choice,) = result.choices
        (whole,) = scenario.expected.choices
        assert choice.finish == inference_pb2.FINISH_REASON_TIME
        assert 0 < len(choice.ids) < NUM_TOKENS
        assert choice.ids == whole.ids[: len(choice.ids)]
        assert choice.scores == whole.scores[: len(choice.ids)]
        return
    raise AssertionError("the fault was never reached")
