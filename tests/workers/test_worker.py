"""One worker alone, through its gRPC service."""

import asyncio
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import grpc
import grpc.aio
import pytest

from tandem.proto import worker_pb2
from tandem.proto.channel import PeerChannel, PeerStream
from tandem.proto.errors import Unavailable
from tandem.tests.fleet import VOCAB, fake_rank, fleet, worker_stub
from tandem.tests.peers import peer_channel
from tandem.tests.token_request import token_request
from tandem.tests.waits import NEVER, SLOW_STEP, WAIT
from tandem.tests.worker_config import worker_config
from tandem.tests.workers.engine.fake import expected_tokens
from tandem.tests.workers.raw_session import RawSession, ended, executor_of, idle, submit, worker_of
from tandem.workers.engine.plan import Executor, OnLayers, Samples, StepPlan
from tandem.workers.serve.worker import Worker
from tandem.workers.tp.rank import Rank
from tandem.workers.transfer.frames import PULL_METHOD, Open, TransferKey, encode

MALFORMED: dict[str, dict[str, Any]] = {
    "no tokens to generate": {"max_tokens": 0},
    "no prompt": {"token_ids": []},
    "token out of range": {"token_ids": [1, VOCAB]},
    "token far out of range": {"token_ids": [2**32 - 1]},
    "index beyond the tokens": {"first_index": 20},
    "temperature NaN": {"sampling": {"temperature": float("nan"), "top_p": 1}},
    "temperature infinite": {"sampling": {"temperature": float("inf"), "top_p": 1}},
    "temperature negative": {"sampling": {"temperature": -1, "top_p": 1}},
    "top_p zero": {"sampling": {"top_p": 0}},
    "top_p NaN": {"sampling": {"top_p": float("nan")}},
    "min_p over one": {"sampling": {"top_p": 1, "min_p": 1.5}},
    "no task": {"task": worker_pb2.TASK_UNSPECIFIED},
    "unknown task": {"task": 77},
    "decode without kv": {"task": worker_pb2.TASK_DECODE},
    "kv of another length": {
        "task": worker_pb2.TASK_DECODE,
        "kv": worker_pb2.KvHandle(num_tokens=19, endpoints=["127.0.0.1:1"]),
    },
    "kv without endpoint": {
        "task": worker_pb2.TASK_DECODE,
        "kv": worker_pb2.KvHandle(num_tokens=20),
    },
    "too many stop tokens": {"stop_token_ids": range(65)},
    "salt too long": {"cache_salt": bytes(65)},
}


async def test_a_malformed_submit_is_refused_and_the_session_goes_on() -> None:
    async with worker_of(fake_rank()) as (worker, session):
        for name, fields in MALFORMED.items():
            await session.send(submit(name, **fields))
            failure = await session.failure()
            assert failure.kind == worker_pb2.FAILURE_KIND_INVALID, name
            assert failure.message
            assert worker.address not in failure.message
        await session.send(submit())
        await session.until(ended)
        assert session.tokens() == expected_tokens(range(20), 5, VOCAB)


async def test_what_is_too_long_for_this_worker_may_be_valid_at_another_one() -> None:
    """Which may have more KV cache."""
    kv = worker_pb2.KvHandle(num_tokens=20, endpoints=["127.0.0.1:1"])
    longer: dict[str, dict[str, Any]] = {
        "one token more": {"max_tokens": 2048 - 19},
        "far more": {"max_tokens": 2**32 - 1},
        "the prompt": {"token_ids": [1] * 2048},
        "a stream": {"first_index": 5},
        "a prompt": {"task": worker_pb2.TASK_DECODE, "kv": kv},
    }
    async with worker_of(fake_rank()) as (_, session):
        for name, fields in longer.items():
            await session.send(submit(name, **({"max_tokens": 2048} | fields)))
            failure = await session.failure()
            assert failure.kind == worker_pb2.FAILURE_KIND_UNABLE, name
            assert failure.message.startswith("max_tokens: ")


async def test_a_key_in_use_is_refused_and_its_owner_goes_on() -> None:
    async with worker_of(fake_rank(step_seconds=0.01)) as (_, session):
        await session.send(submit(max_tokens=20))
        await session.send(submit(max_tokens=20, token_ids=[1, 2]))
        assert (await session.failure()).kind == worker_pb2.FAILURE_KIND_INVALID
        await session.until(ended)
        assert session.tokens() == expected_tokens(range(20), 20, VOCAB)


async def test_an_empty_command_and_a_cancel_of_nothing_change_nothing() -> None:
    async with worker_of(fake_rank()) as (_, session):
        await session._call.write(worker_pb2.SessionRequest())
        await session.send(worker_pb2.Cancel(request_id="never", attempt=3))
        await session.send(submit())
        await session.until(ended)


async def test_a_full_queue_and_a_pool_too_small_are_different_failures() -> None:
    rank = fake_rank(num_blocks=8, step_seconds=0.1)
    async with worker_of(rank, max_sequences=1, max_waiting=1) as (worker, session):
        assert worker.info().context_tokens == 8 * 16
        await session.send(submit("too long", max_tokens=8 * 16))
        assert (await session.failure()).kind == worker_pb2.FAILURE_KIND_UNABLE
        await session.send(submit("runs", max_tokens=60))
        await session.until(lambda output: output.HasField("admitted"))
        await session.send(submit("waits"))
        await session.send(submit("is refused"))
        (refused,) = await session.until(lambda output: output.HasField("failure"))
        executor_of(rank).step_seconds = 0.0
        assert (refused.request_id, refused.failure.kind) == (
            "is refused",
            worker_pb2.FAILURE_KIND_FULL,
        )
        await session.until(ended, count=2)
        assert session.tokens("waits") == expected_tokens(range(20), 5, VOCAB)


async def test_one_message_a_step_whatever_the_batch() -> None:
    rank = fake_rank(num_blocks=512)
    async with worker_of(rank) as (_, session):
        for n in range(16):
            await session.send(submit(str(n), token_ids=range(n, n + 20), max_tokens=50))
        await session.until(ended, count=16)
        async with asyncio.timeout(WAIT):
            while not ((last := await session.read()) and last.load.total_blocks):
                pass  # the last load follows within a quarter of a second
    with_tokens = [
        m for m in session.messages if any(output.HasField("tokens") for output in m.outputs)
    ]
    assert len(with_tokens) <= executor_of(rank).num_steps < 16 * 50 / 4
    assert len(session.messages) <= 2 * executor_of(rank).num_steps
    for n in range(16):
        assert session.tokens(str(n)) == expected_tokens(range(n, n + 20), 50, VOCAB)
    loads = [message.load for message in session.messages if message.HasField("load")]
    assert loads[0].num_waiting + loads[0].num_running == 0  # sent before any command is read
    assert loads[-1].num_running == 0
    for load in loads:
        blocks = (
            load.free_blocks
            + load.cached_blocks
            + load.owned_blocks
            + load.leased_blocks
            + load.reserved_blocks
        )
        assert blocks == load.total_blocks == 512


async def test_the_end_of_the_stream_cancels_what_came_over_it() -> None:
    async with worker_of(fake_rank(step_seconds=SLOW_STEP)) as (worker, session):
        for n in range(8):
            await session.send(submit(str(n), max_tokens=1000))
        await session.until(lambda output: output.HasField("tokens"))
        await session.half_close()
        while await session.read() is not None:
            pass
        status = await idle(worker)
        assert status.num_sessions == 0


@pytest.mark.parametrize(
    "task", [worker_pb2.TASK_COLOCATED, worker_pb2.TASK_PREFILL, worker_pb2.TASK_DECODE]
)
async def test_a_cancelled_request_is_silent_and_frees_all(task: int) -> None:
    rank = fake_rank(step_seconds=SLOW_STEP)
    async with worker_of(rank) as (worker, session):
        kv = worker_pb2.KvHandle(num_tokens=20, endpoints=[worker.address], transfer_id=b"?")
        await session.send(submit(task=task, max_tokens=1000, kv=kv))
        await session.until(lambda output: True)
        await session.send(worker_pb2.Cancel(request_id="a", attempt=1))
        await idle(worker)
        await session.send(submit("b"))
        await session.until(ended)


# --- the engine fails
# ----------------------------------------------------------------------------------------------


async def test_a_failed_engine_fails_every_request_at_once() -> None:
    rank = fake_rank(step_seconds=0.002)
    worker = await Worker.serve(rank, worker_config(), worker_id="worker", role="decode")
    async with peer_channel(worker.address) as channel:
        session = RawSession(channel)
        for n in range(4):
            await session.send(submit(str(n), max_tokens=1000))
        await session.until(lambda output: output.HasField("tokens"))
        executor_of(rank).fail_after_steps = 0
        failures = await session.until(lambda output: output.HasField("failure"), count=4)
        assert {output.failure.kind for output in failures} == {worker_pb2.FAILURE_KIND_WORKER}
        assert await session.read() is None
        with pytest.raises(RuntimeError, match="has failed"):
            worker.check_health()
        status = await worker_stub(channel).GetStatus(worker_pb2.GetStatusRequest(), timeout=WAIT)
        assert not status.integrity_ok
        again = RawSession(channel)
        await again.send(submit("late"))
        assert (await again.failure()).kind == worker_pb2.FAILURE_KIND_GONE
    await worker.stop()


class Hanging(Executor):
    """Never returns from a step until `released`."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self.released = threading.Event()
        self.hangs = threading.Event()

    def launch(self, plan: StepPlan, on_layers: OnLayers | None = None) -> Callable[[], Samples]:
        self.hangs.set()
        assert self.released.wait(2 * WAIT)
        return self._executor.launch(plan, on_layers)


async def test_a_worker_whose_step_never_ends_fails() -> None:
    rank = fake_rank()
    executor = Hanging(rank.executor)
    settings = worker_config(hang_seconds=0.5)
    worker = await Worker.serve(
        replace(rank, executor=executor), settings, worker_id="worker", role="decode"
    )
    async with peer_channel(worker.address) as channel:
        session = RawSession(channel)
        await session.send(submit())
        assert await asyncio.to_thread(executor.hangs.wait, WAIT)
        async with asyncio.timeout(WAIT):
            while not worker.failed.is_set():
                with suppress(RuntimeError):
                    worker.check_health()
                await asyncio.sleep(0.05)
            with pytest.raises(RuntimeError, match="has failed") as raised:
                worker.check_health()
            assert isinstance(raised.value.__cause__, TimeoutError)
            assert (await session.failure()).kind == worker_pb2.FAILURE_KIND_WORKER
    executor.released.set()
    await worker.stop()


# --- draining and stopping
# -----------------------------------------------------------------------------------------


async def test_a_draining_worker_ends_what_it_has_and_takes_nothing_new() -> None:
    worker = await Worker.serve(
        fake_rank(step_seconds=0.005), worker_config(), worker_id="worker", role="decode"
    )
    async with peer_channel(worker.address) as channel:
        session = RawSession(channel)
        await session.send(submit(max_tokens=40))
        await session.until(lambda output: output.HasField("tokens"))
        stopping = asyncio.create_task(worker.stop(grace=NEVER))
        await asyncio.sleep(0)
        assert worker.info().draining
        await session.send(submit("new"))
        assert (await session.failure()).kind == worker_pb2.FAILURE_KIND_GONE
        await session.until(ended)
        assert session.tokens() == expected_tokens(range(20), 40, VOCAB)
        while (last := await session.read()) is not None:  # it says at its end that it drains
            assert not last.outputs
            assert last.load.draining
        async with asyncio.timeout(WAIT):  # it does not wait for routers that have nothing there
            await stopping


@pytest.mark.parametrize("how", ["drain", "switch", "stop"])
async def test_a_session_that_has_just_begun_learns_that_it_ends(how: str) -> None:
    """Its first message is still on its way to the router."""
    messages: list[worker_pb2.SessionResponse] = []
    arrives = asyncio.Event()

    async def send(message: worker_pb2.SessionResponse) -> None:
        messages.append(message)
        await arrives.wait()

    async def commands() -> AsyncIterator[worker_pb2.SessionRequest]:
        await asyncio.Event().wait()
        yield worker_pb2.SessionRequest()

    worker = await Worker.serve(fake_rank(), worker_config(), worker_id="worker", role="decode")
    serving = asyncio.create_task(worker.serve_session(commands(), send))
    async with asyncio.timeout(WAIT):
        while not messages:
            await asyncio.sleep(0)
        if how == "drain":
            await worker.drain(0)
        elif how == "switch":
            await worker.switch_role("prefill", 0)
        else:
            await worker.stop()
        arrives.set()
        if how != "stop":
            while not messages[-1].load.draining:
                await asyncio.sleep(0.001)
            await worker.stop()
        await serving


async def test_a_draining_prefill_worker_still_sends_its_kv_cache() -> None:
    """The decode worker may open its stream after the drain has begun."""
    ranks = iter([fake_rank(step_seconds=0.02), fake_rank()])
    async with fleet(1, 1, rank=lambda role: next(ranks), chunk_tokens=16) as running:
        request = asyncio.create_task(running.generate(token_request(range(200), 4)))
        async with asyncio.timeout(WAIT):
            while not (await running.statuses())[0].num_requests:
                await asyncio.sleep(0.002)
        await running.workers.pop(0).stop(grace=WAIT)
        tokens, timeline = await request
        assert tokens == expected_tokens(range(200), 4, VOCAB)
        assert timeline.attempts == 1


async def test_stop_with_requests_under_way_is_quick() -> None:
    async with fleet(
        1, 1, rank=lambda role: fake_rank(step_seconds=SLOW_STEP), park_seconds=0.1
    ) as running:
        requests = [
            asyncio.create_task(running.generate(token_request(range(n, 300), 1000)))
            for n in range(8)
        ]
        async with asyncio.timeout(WAIT):
            while not all(status.num_requests for status in await running.statuses()):
                await asyncio.sleep(0.002)
        async with asyncio.timeout(WAIT):
            await asyncio.gather(*(worker.stop() for worker in running.workers))
        running.workers.clear()
        for result in await asyncio.gather(*requests, return_exceptions=True):
            assert isinstance(result, Unavailable), "a worker that stops blames no request"


async def test_a_port_that_is_taken_is_an_os_error() -> None:
    async with worker_of(fake_rank()) as (worker, _):
        port = int(worker.address.rpartition(":")[2])
        with pytest.raises(OSError, match="cannot bind"):
            await Worker.serve(
                fake_rank(), worker_config(port=port), worker_id="other", role="decode"
            )


# --- leases
# --------------------------------------------------------------------------------------------------


async def pull(channel: PeerChannel, handle: worker_pb2.KvHandle, epoch: int, rank: Rank) -> str:
    """Asks for the cache of a handle; returns how the worker refuses."""
    key = TransferKey(transfer_id=handle.transfer_id, epoch=epoch)
    call: PeerStream[bytes, bytes] = channel.stream_stream(PULL_METHOD)()
    try:
        # No Pull follows: gRPC may give INTERNAL for a message that the refusal of the first one
        # meets.
        await call.write(encode(key, Open(layout=rank.kv.layout.digest)))
        while isinstance(await call.read(), bytes):
            pass
    except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
        pass
    assert await call.code() is grpc.StatusCode.ABORTED
    return await call.details() or ""


async def prefilled(session: RawSession) -> worker_pb2.KvHandle:
    await session.send(submit(task=worker_pb2.TASK_PREFILL))
    (admitted,) = await session.until(lambda output: output.HasField("admitted"))
    if not session.tokens():
        await session.until(lambda output: output.HasField("tokens"))
    return admitted.admitted.kv


async def test_an_expired_lease_is_freed() -> None:
    rank = fake_rank()
    async with worker_of(rank, "prefill", lease_seconds=0.05) as (worker, session):
        handle = await prefilled(session)
        await idle(worker)  # although the session lives and nobody has cancelled
        async with peer_channel(worker.address) as channel:
            assert await pull(channel, handle, handle.epoch, rank) == "KV cache gone"


async def test_cache_of_another_life_of_the_worker_is_gone() -> None:
    rank = fake_rank()
    async with worker_of(rank, "prefill") as (worker, session):
        handle = await prefilled(session)
        async with peer_channel(worker.address) as channel:
            assert await pull(channel, handle, handle.epoch - 1, rank) == "KV cache gone"
            status = await worker_stub(channel).GetStatus(worker_pb2.GetStatusRequest())
        assert status.num_leases == 1
        assert status.info.load.leased_blocks == 2
        await session.send(worker_pb2.Cancel(request_id="a", attempt=1))
        await idle(worker)


# --- without Ray
# --------------------------------------------------------------------------------------------------

NO_RAY = """
import sys
sys.modules["ray"] = None
import tandem.workers.serve.worker
from tandem.workers.engine.config import EngineConfig
from tandem.workers.engine.engine import Engine
from tandem.tests.workers.engine.fake import FakeExecutor, expected_tokens
from tandem.workers.engine.plan import SamplingParams
from tandem.workers.engine.sequence import SequenceSpec, Task
engine = Engine(FakeExecutor(4, 16), EngineConfig(num_blocks=4))
greedy = SamplingParams(temperature=0)
engine.submit(
    SequenceSpec(id=1, task=Task.COLOCATED, tokens=(1, 2), max_tokens=1, sampling=greedy)
)
found = [t for e in engine.step() if hasattr(e, "token_ids") for t in e.token_ids]
assert found == expected_tokens((1, 2), 1, 512)
"""


def test_a_worker_needs_no_ray() -> None:
    done = subprocess.run(
        [sys.executable, "-c", NO_RAY], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
