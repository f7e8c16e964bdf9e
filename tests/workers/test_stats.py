"""What one worker reports of itself, and the steps that it makes to see whether it can."""

import asyncio
import logging
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tandem.cluster.serve.status import WorkerStatuses
from tandem.proto import worker_pb2
from tandem.proto.metrics import (
    BLOCKS,
    COMPUTED_TOKENS,
    CPU_POWER,
    GPU_MEMORY,
    GPU_POWER,
    GPU_UTILIZATION,
    KV_FAILURES,
    LEASES,
    SEQUENCES,
    STATES,
    STEP_SECONDS,
    STEP_TOKENS,
    SUSPENDS,
    TRANSFERS,
    UNBALANCED,
    Metric,
    Metrics,
)
from tandem.proto.worker_pb2 import Cancel, Suspend
from tandem.tests.fleet import fake_rank, fleet
from tandem.tests.peers import IDENTITY, peer_channel
from tandem.tests.token_request import token_request
from tandem.tests.waits import WAIT
from tandem.tests.worker_config import worker_config
from tandem.tests.workers.engine.fake import FakeExecutor, expected_tokens
from tandem.tests.workers.raw_session import RawSession, idle, submit, worker_of
from tandem.tests.workers.test_power import Host
from tandem.workers.engine.engine import Engine
from tandem.workers.engine.plan import Executor, OnLayers, Samples, StepPlan
from tandem.workers.serve import load_reports
from tandem.workers.serve.load_reports import LOAD_SECONDS
from tandem.workers.serve.stats import WorkerStats
from tandem.workers.serve.watchdog import Watchdog
from tandem.workers.serve.worker import Worker
from tandem.workers.tp.kv_group import KvGroup
from tandem.workers.transfer.frames import TransferError


class Figures(Metrics):
    """Keeps what is reported."""

    def __init__(self) -> None:
        self.sums: Counter[tuple[Metric, tuple[str, ...]]] = Counter()
        self.values: dict[tuple[Metric, tuple[str, ...]], float] = {}
        self.observed: defaultdict[Metric, list[float]] = defaultdict(list)

    def add(self, metric: Metric, amount: float = 1.0, **labels: str) -> None:
        self.sums[metric, tuple(labels.values())] += int(amount)

    def set(self, metric: Metric, value: float, **labels: str) -> None:
        self.values[metric, tuple(labels.values())] = value

    def observe(self, metric: Metric, value: float, count: int = 1, **labels: str) -> None:
        self.observed[metric] += [value] * count


async def wait_until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT):
        while not condition():
            await asyncio.sleep(0.005)


async def test_a_worker_reports_what_it_has_and_has_done() -> None:
    figures = Figures()
    worker = await Worker.serve(
        fake_rank(), worker_config(), worker_id="w", role="decode", metrics=figures
    )
    async with peer_channel(worker.address) as channel:
        session = RawSession(channel)
        await session.send(submit(max_tokens=5))
        await session.until(
            lambda output: output.HasField("tokens") and output.tokens.finish_reason != 0
        )
        await wait_until(lambda: not worker.load().num_running)
        await worker.report_metrics(with_integrity=True)
        assert figures.values[UNBALANCED, ()] == 0
        assert sum(figures.values[BLOCKS, (state,)] for state in BLOCKS.labels["state"]) == 256
        assert figures.values[BLOCKS, ("cached",)] == 1  # of 20 + 4 tokens
        assert [figures.values[SEQUENCES, (state,)] for state in ("running", "waiting")] == [0, 0]
        assert figures.values[LEASES, ()] == figures.values[TRANSFERS, ()] == 0
        assert sum(figures.observed[STEP_TOKENS]) == figures.sums[COMPUTED_TOKENS, ()] == 20 + 4
        assert len(figures.observed[STEP_SECONDS]) >= 5
        assert min(figures.observed[STEP_SECONDS]) > 0
        figures.observed.clear()
        await worker.report_metrics(with_integrity=False)
        assert not figures.observed[STEP_TOKENS]  # nothing is reported twice
        assert figures.sums[COMPUTED_TOKENS, ()] == 20 + 4
    await worker.stop()


class NvmlError(Exception):
    """Stands for pynvml's errors, which derive from Exception alone."""


@pytest.mark.parametrize(
    "error",
    [NvmlError("Not Supported"), ModuleNotFoundError("nvidia-ml-py"), RuntimeError("no driver")],
    ids=lambda error: type(error).__name__,
)
async def test_a_part_of_a_gpu_reports_what_it_can_read_and_logs_once(
    error: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> int:
        raise error

    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (3, 10))
    monkeypatch.setattr(torch.cuda, "utilization", fail)
    monkeypatch.setattr(torch.cuda, "power_draw", fail)
    figures = Figures()
    worker = await Worker.serve(fake_rank(), worker_config(), worker_id="w", role="decode")
    stats = WorkerStats(
        load=worker.load,
        states=worker.states,
        kv=worker._kv,
        steps=Watchdog().steps,
        num_graph_replays=lambda: 0,
        on_gpu=True,
    )
    with caplog.at_level(logging.WARNING, "tandem.workers.serve.stats"):
        for _ in range(3):
            stats.report(figures)
    assert figures.values[GPU_MEMORY, ("free",)] == 3
    assert figures.values[GPU_MEMORY, ("used",)] == 7
    assert (GPU_UTILIZATION, ()) not in figures.values
    assert (GPU_POWER, ()) not in figures.values
    assert stats.gpu_watts is None
    of_utilization, of_power = caplog.records
    assert str(error) in of_utilization.message
    assert str(error) in of_power.message
    monkeypatch.setattr(torch.cuda, "utilization", lambda: 40)
    monkeypatch.setattr(torch.cuda, "power_draw", lambda: 215_500)
    stats.report(figures)
    assert figures.values[GPU_UTILIZATION, ()] == 0.4
    assert figures.values[GPU_POWER, ()] == 215.5
    await worker.stop()


async def test_power_is_reported_only_where_it_is_known(tmp_path: Path) -> None:
    figures = Figures()
    worker = await Worker.serve(
        fake_rank(), worker_config(), worker_id="w", role="decode", metrics=figures
    )
    host = Host(tmp_path)
    worker._stats.cpu_power = host.power()
    for joules in (0, 30):
        status = await described(worker)
        assert not {"cpu_power_watts", "gpu_power_watts"} & status.keys()
        assert (CPU_POWER, ()) not in figures.values
        host.count(joules * 1_000_000, 0)
        await worker.report_metrics(with_integrity=False)
        host.now += 2.0
    assert figures.values[CPU_POWER, ()] == 15.0
    status = await described(worker)
    assert status["cpu_power_watts"] == 15.0
    assert "gpu_power_watts" not in status
    await worker.stop()


async def described(worker: Worker) -> dict[str, Any]:
    statuses = WorkerStatuses(lambda: [worker.info()], IDENTITY)
    try:
        (status,) = await statuses.get()
    finally:
        await statuses.close()
    assert status["state"] == "ready"
    return status


@pytest.mark.parametrize("kind", ["blocks", "states"])
async def test_books_that_do_not_balance_are_reported(kind: str) -> None:
    figures = Figures()
    rank = replace(fake_rank(num_states=12), num_states=12)
    worker = await Worker.serve(
        rank, worker_config(), worker_id="w", role="decode", metrics=figures
    )

    def reserve(engine: Engine) -> None:
        requests = engine.requests
        (requests.states.pool if kind == "states" else requests.pool).reserve(1)

    worker._thread.post(reserve)
    await worker.report_metrics(with_integrity=True)
    assert figures.values[UNBALANCED, ()] == 1
    assert worker.load().held_states == (kind == "states")
    await worker.stop()


async def test_states_are_counted_and_checked_as_blocks() -> None:
    figures = Figures()
    rank = replace(fake_rank(num_states=12), num_states=12)
    worker = await Worker.serve(
        rank, worker_config(), worker_id="w", role="decode", metrics=figures
    )
    async with peer_channel(worker.address) as channel:
        session = RawSession(channel)
        await session.send(submit(max_tokens=5))
        await session.until(
            lambda output: output.HasField("tokens") and output.tokens.finish_reason != 0
        )
        await wait_until(lambda: not worker.load().num_running)
        await worker.report_metrics(with_integrity=True)
        counts = {state: figures.values[STATES, (state,)] for state in STATES.labels["state"]}
        # The resume point after the first block.
        assert counts == {"free": 11, "cached": 1, "owned": 0, "leased": 0, "reserved": 0}
        assert figures.values[UNBALANCED, ()] == 0
        assert worker.load().held_states == 0
        assert worker.info().max_sequences == 6, "a running sequence takes two states"
    await worker.stop()


async def test_suspended_choices_are_counted() -> None:
    figures = Figures()
    worker = await Worker.serve(
        fake_rank(step_seconds=0.002),
        worker_config(),
        worker_id="w",
        role="decode",
        metrics=figures,
    )
    async with peer_channel(worker.address) as channel:
        session = RawSession(channel)
        await session.send(submit(max_tokens=1_000))
        await session.until(lambda output: output.HasField("tokens"))
        await session.send(Suspend(request_id="a", attempt=1))
        await session.until(lambda output: output.HasField("suspended"))
    assert figures.sums[SUSPENDS, ()] == 1
    await worker.stop()


async def test_kv_transfers_that_break_are_counted_by_transport() -> None:
    figures, num_streams = Figures(), 0

    async def cut_once(frames: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        """Ends the first stream before its first frame."""
        nonlocal num_streams
        num_streams += 1
        if num_streams == 1:
            raise TransferError("cut")
        async for frame in frames:
            yield frame

    prompt = list(range(200))
    async with fleet(1, 1, frame_hook=cut_once, metrics=figures) as running:
        tokens, _ = await running.generate(token_request(prompt, 10))
    assert tokens == expected_tokens(prompt, 10, 1000)
    failures = {
        labels: count for (metric, labels), count in figures.sums.items() if metric is KV_FAILURES
    }
    assert failures == {("grpc",): 1}


async def test_an_idle_worker_makes_a_step_when_asked_after_its_health() -> None:
    """It leaves nothing behind."""
    figures = Figures()
    settings = worker_config(canary_seconds=0.0)
    worker = await Worker.serve(
        fake_rank(), settings, worker_id="w", role="prefill", metrics=figures
    )
    async with peer_channel(worker.address) as channel:
        for _ in range(3):
            figures.observed.clear()
            worker.check_health()
            async with asyncio.timeout(WAIT):
                while len(figures.observed[STEP_TOKENS]) < 2:
                    await worker.report_metrics(with_integrity=False)
                    await asyncio.sleep(0.005)
            assert figures.observed[STEP_TOKENS] == [1, 1]  # a prefill and a decode
            await idle(worker)
        session = RawSession(channel)  # an ordinary request is as before
        await session.send(submit(max_tokens=2))
        await session.until(
            lambda output: output.HasField("tokens") and output.tokens.finish_reason != 0
        )
    await worker.stop()


async def test_a_worker_that_only_reads_its_metrics_is_idle() -> None:
    figures = Figures()
    settings = worker_config(canary_seconds=0.05)
    worker = await Worker.serve(
        fake_rank(), settings, worker_id="w", role="decode", metrics=figures
    )
    async with asyncio.timeout(WAIT):
        while len(figures.observed[STEP_TOKENS]) < 2:
            worker._thread.post(Engine.check_integrity)
            worker.check_health()
            await worker.report_metrics(with_integrity=False)
            await asyncio.sleep(0.001)
    await idle(worker)
    await worker.stop()


async def test_a_canary_without_a_place_waits_and_a_full_worker_is_healthy() -> None:
    """It is due until there is a place, however often the health is checked, and runs once then."""
    settings = worker_config(max_waiting=1, max_sequences=1, canary_seconds=0.0)
    worker = await Worker.serve(
        fake_rank(step_seconds=0.002), settings, worker_id="w", role="decode"
    )
    async with peer_channel(worker.address) as channel:
        session = RawSession(channel)
        await session.send(submit("runs", max_tokens=2000))
        await session.until(lambda output: output.HasField("tokens"))
        await session.send(submit("waits", max_tokens=5))
        async with asyncio.timeout(WAIT):
            while not worker.load().num_waiting:
                await asyncio.sleep(0)
            worker._canary.run()
            while not worker._canary.is_due:
                await asyncio.sleep(0)
            for _ in range(5):
                worker.check_health()
                await asyncio.sleep(0)
            assert not worker.failed.is_set()
            await session.send(Cancel(request_id="runs", attempt=1))
            await session.until(lambda output: output.tokens.finish_reason != 0)
            while worker._canary.is_due or worker._canary._is_running:
                worker.check_health()
                await asyncio.sleep(0.005)
    await idle(worker)
    await worker.stop()


async def test_a_busy_worker_makes_no_step_of_its_own() -> None:
    worker = await Worker.serve(fake_rank(), worker_config(), worker_id="w", role="decode")
    figures = Figures()
    worker.check_health()
    worker._metrics = figures
    await worker.report_metrics(with_integrity=True)  # after what the check may have posted
    await worker.report_metrics(with_integrity=False)
    assert not figures.observed[STEP_TOKENS]
    await worker.stop()


class Broken(Executor):
    """Fails in each step, as a GPU that has been lost does."""

    def launch(self, plan: StepPlan, on_layers: OnLayers | None = None) -> Callable[[], Samples]:
        raise RuntimeError("the device is lost")


async def test_a_device_that_is_lost_while_nothing_runs_is_found() -> None:
    rank = fake_rank()
    assert isinstance(rank.executor, FakeExecutor)
    settings = worker_config(canary_seconds=0.0)
    worker = await Worker.serve(
        replace(rank, executor=Broken()), settings, worker_id="w", role="decode"
    )
    worker.check_health()
    async with asyncio.timeout(WAIT):
        await worker.failed.wait()
    with pytest.raises(RuntimeError, match="has failed"):
        worker.check_health()
    await worker.stop()


async def test_blocks_that_a_transfer_used_for_long_after_the_request_are_reported_as_free(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stop = KvGroup.stop

    def stop_later(self: KvGroup, sequence_id: int, then: Callable[[], None]) -> None:
        asyncio.get_running_loop().call_later(3 * LOAD_SECONDS, stop, self, sequence_id, then)

    monkeypatch.setattr(KvGroup, "stop", stop_later)
    monkeypatch.setattr(load_reports, "IDLE_SECONDS", 0.0)
    async with worker_of(fake_rank(), "prefill") as (_, session):
        await session.send(submit(task=worker_pb2.TASK_PREFILL))
        await session.until(lambda output: bool(output.tokens.ids))
        await session.send(Cancel(request_id="a", attempt=1))
        load = worker_pb2.WorkerLoad(num_running=1)
        while load.num_running or load.leased_blocks or load.owned_blocks:
            message = await session.read()
            assert message is not None
            load = message.load if message.HasField("load") else load
