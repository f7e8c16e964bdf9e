"""KV cache that a decode worker refuses or cannot fetch: another decode worker gets it, as long as
it is held.
"""

import random

import pytest

from tandem.proto import worker_pb2
from tandem.proto.errors import Overloaded
from tandem.router.dispatch.execution import RequestExecution
from tandem.tests.router.fake_pools import (
    SEED,
    Caller,
    FakePools,
    Submitted,
    choices_request,
    completion,
    start,
)


def tasks_of(pools: FakePools) -> str:
    """The submits so far: w a whole request, p a prefill, d a decode."""
    return "".join(" wpd"[submit.task] for submit in pools.submits)


def admit(pools: FakePools, execution: RequestExecution) -> tuple[Submitted, Submitted]:
    """Lets the prefill worker admit the request; returns the submits of both workers."""
    pools.step(pools.running[0])
    assert list(execution.deltas()) == []
    prefill, decode = pools.running
    assert decode.submit.kv.transfer_id == b"1"
    return prefill, decode


@pytest.mark.parametrize("has_first_tokens", [False, True])
@pytest.mark.parametrize(
    "fault", [worker_pb2.FAILURE_KIND_FULL, worker_pb2.FAILURE_KIND_TRANSFER, None]
)
def test_another_decode_worker_gets_the_kv_cache_that_the_prefill_worker_holds(
    fault: "worker_pb2.FailureKind | None", has_first_tokens: bool
) -> None:
    """At once, also while the prompt is still computed. `fault` None is a crash."""
    pools, caller = FakePools(random.Random(3), pairs=True, decode=("d1", "d2")), Caller(3)
    execution, timeline = start(pools, choices_request(3))
    prefill, decode = admit(pools, execution)
    if has_first_tokens:
        pools.step(prefill, 3)
        caller.read(execution)
    if fault is None:
        decode.client.kill()
    else:
        pools.fail(decode, fault)
        pools.running.remove(decode)
    caller.read(execution)
    again = pools.running[-1]
    assert again.worker == {"d1": "d2", "d2": "d1"}[decode.worker]
    assert again.submit.kv == decode.submit.kv
    assert (again.submit.attempt, again.submit.token_ids) == (2, decode.submit.token_ids)
    assert timeline.decode_worker == again.worker
    assert prefill.client.cancels() == []
    caller.read_until(pools, execution, 30)
    assert caller.ids == [completion((5, 6, 7, 8), SEED + choice, 30) for choice in range(3)]
    assert (tasks_of(pools), timeline.attempts, pools.num_transfers) == ("pdd", 2, 1)
    assert execution.done
    assert not pools.held


def test_after_two_failed_transfers_one_worker_computes_the_prompt_again() -> None:
    pools, caller = FakePools(random.Random(3), pairs=True), Caller(1)
    execution, _ = start(pools, choices_request(1))
    prefill, decode = admit(pools, execution)
    pools.fail(decode, worker_pb2.FAILURE_KIND_TRANSFER)
    list(execution.deltas())
    pools.fail(pools.running[-1], worker_pb2.FAILURE_KIND_TRANSFER)
    list(execution.deltas())
    assert tasks_of(pools) == "pddw"
    assert prefill.client.cancels() == [worker_pb2.Cancel(request_id="r", attempt=1)]
    pools.running = pools.running[-1:]
    caller.read_until(pools, execution, 30)
    assert caller.ids == [completion((5, 6, 7, 8), SEED, 30)]


def test_a_failed_transfer_from_a_lost_prefill_worker_is_not_tried_again() -> None:
    pools, caller = FakePools(random.Random(3), pairs=True), Caller(1)
    execution, _ = start(pools, choices_request(1))
    prefill, decode = admit(pools, execution)
    pools.step(prefill)
    caller.read(execution)
    prefill.client.kill()
    assert list(execution.deltas()) == []  # the decode worker may have the KV cache already
    pools.step(decode, 2)
    caller.read(execution)
    assert tasks_of(pools) == "pdp"
    assert list(pools.submits[-1].token_ids) == [5, 6, 7, 8, *caller.ids[0]]


def test_a_crash_after_the_kv_cache_was_received_needs_another_prefill() -> None:
    pools, caller = FakePools(random.Random(3), pairs=True), Caller(1)
    execution, _ = start(pools, choices_request(1))
    prefill, decode = admit(pools, execution)
    pools.step(decode, 2)
    decode.client.kill()
    assert list(execution.deltas()) == []  # before the first token nothing is lost yet
    pools.step(prefill)
    caller.read(execution)
    assert tasks_of(pools) == "pdp"


def test_a_choice_that_was_dropped_is_cancelled_at_the_next_decode_worker() -> None:
    pools, caller, ended = FakePools(random.Random(3), pairs=True), Caller(2), {1}
    execution, _ = start(pools, choices_request(2), ended)
    prefill, decode = admit(pools, execution)
    pools.step(prefill, 2)
    caller.read(execution)
    assert decode.client.cancels() == [worker_pb2.Cancel(request_id="r", attempt=1, choice=1)]
    pools.fail(decode, worker_pb2.FAILURE_KIND_FULL)
    caller.read(execution)
    again = pools.running[-1]
    assert again.client.cancels() == [worker_pb2.Cancel(request_id="r", attempt=2, choice=1)]


@pytest.mark.parametrize(
    ("fault", "expected"),
    [(worker_pb2.FAILURE_KIND_TRANSFER, "pdd"), (worker_pb2.FAILURE_KIND_FULL, "pd")],
)
def test_a_single_decode_worker_gets_the_kv_cache_again_unless_it_is_full(
    fault: "worker_pb2.FailureKind", expected: str
) -> None:
    pools = FakePools(random.Random(3), pairs=True, decode=("d1",))
    execution, _ = start(pools, choices_request(1))
    _, decode = admit(pools, execution)
    pools.fail(decode, fault)
    if fault == worker_pb2.FAILURE_KIND_FULL:
        with pytest.raises(Overloaded):
            list(execution.deltas())
    else:
        assert list(execution.deltas()) == []
    assert tasks_of(pools) == expected
    execution.end()
    assert not pools.held
