"""Workers switch roles under streams: nothing is lost, altered or computed again, and the prefix
cache stays.
"""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from tandem.proto import worker_pb2
from tandem.proto.errors import Unavailable
from tandem.tests.fleet import VOCAB, Fleet, fake_rank, fleet, worker_stub
from tandem.tests.peers import peer_channel
from tandem.tests.router.dispatch.test_drain import until_running
from tandem.tests.token_request import token_request
from tandem.tests.waits import WAIT
from tandem.tests.workers.engine.fake import FakeExecutor, expected_choices
from tandem.tests.workers.raw_session import submit, worker_of
from tandem.workers.engine.config import Budgets
from tandem.workers.engine.engine import Engine
from tandem.workers.engine.plan import CpuShare, OnLayers, Samples, StepPlan
from tandem.workers.engine.sequence import SequenceSpec, Task
from tandem.workers.serve.worker import RoleConfig, Worker

ROLES = {
    "prefill": RoleConfig(
        budgets=Budgets(chunk_tokens=256, max_sequences=32), share=CpuShare(nice=1, num_threads=1)
    ),
    "decode": RoleConfig(
        budgets=Budgets(chunk_tokens=64, max_sequences=64), share=CpuShare(nice=0, num_threads=1)
    ),
}
WIDEST: dict[str, Any] = {"chunk_tokens": 256, "max_sequences": 64}


async def switch(running: Fleet, worker: Worker, role: str) -> int:
    """Switches a worker's role; the router learns of it as from the directory."""
    switching = asyncio.create_task(worker.switch_role(role, WAIT))
    await asyncio.sleep(0)
    running.registry.update(each.info() for each in running.workers)
    await running.dispatcher.update_sessions()
    return await switching


@pytest.mark.parametrize(("num_streams", "num_choices"), [(8, 1), (3, 3)])
async def test_streams_go_on_through_switches_both_ways(num_streams: int, num_choices: int) -> None:
    async with fleet(
        1,
        3,
        rank=lambda role: fake_rank(num_blocks=2000, step_seconds=0.05),
        roles=ROLES,
        **WIDEST,
    ) as running:

        async def one(number: int) -> int:
            prompt = range(number, number + 40)
            ids, timeline = await running.choices(
                token_request(prompt, 300, num_choices=num_choices)
            )
            assert ids == expected_choices(prompt, num_choices, 300, VOCAB)
            return timeline.attempts

        requests = [asyncio.create_task(one(number)) for number in range(num_streams)]
        await until_running(running.workers[1:], num_streams * num_choices)
        worker = max(running.workers[1:], key=lambda each: each.load().num_running)
        epochs = [worker.epoch]
        for role in ("prefill", "decode", "prefill"):
            assert await switch(running, worker, role) == 0
            epochs.append(worker.epoch)
            assert worker.info().role == worker_pb2.Role.Value(f"ROLE_{role.upper()}")
            assert worker.info().max_sequences == ROLES[role].budgets.max_sequences
            assert not worker.info().draining
        assert epochs == sorted(set(epochs))
        assert not all(request.done() for request in requests)
        running.hurry()
        assert max(await asyncio.gather(*requests)) > 1
        status = await running.statuses()
        assert sum(each.num_recomputed_tokens for each in status) == 0


async def test_the_prefix_cache_is_kept_and_known_and_old_sessions_end() -> None:
    prompt = range(64)
    async with fleet(0, 2, rank=lambda role: fake_rank(), roles=ROLES, **WIDEST) as running:
        await running.generate(token_request(prompt, 5))
        worker = max(running.workers, key=lambda each: each.load().cached_blocks)
        cached = worker.load().cached_blocks
        assert cached
        assert await switch(running, worker, "prefill") == 0
        assert worker.load().cached_blocks == cached
        request = token_request(prompt, 5)
        async with asyncio.timeout(WAIT):
            while running.registry._look_up(request).matched.num_tokens(worker.worker_id) < 48:
                await asyncio.sleep(0.002)
        placement = running.registry.place(request)
        assert placement is not None
        assert placement.prefill == worker.worker_id
        _, timeline = await running.generate(token_request(prompt, 5))
        assert timeline.cached_tokens >= 48
        async with asyncio.timeout(WAIT):
            while max(status.num_sessions for status in await running.statuses()) > 1:
                await asyncio.sleep(0.002)


async def test_without_another_decode_worker_streams_end_where_they_are() -> None:
    async with fleet(0, 1, rank=lambda role: fake_rank(step_seconds=0.002)) as running:
        request = asyncio.create_task(running.choices(token_request(range(40), 100)))
        await until_running(running.workers, 1)
        assert await switch(running, running.workers[0], "prefill") == 0
        ids, timeline = await request
        assert (ids, timeline.attempts) == (expected_choices(range(40), 1, 100, VOCAB), 1)
        # A prefill worker alone does both.
        await running.generate(token_request(range(40), 5))


async def test_a_session_of_the_earlier_role_is_refused_and_a_new_one_is_not() -> None:
    async with worker_of(fake_rank(step_seconds=0.005), roles=ROLES, **WIDEST) as (worker, session):
        await session.send(submit(max_tokens=1000))
        await session.first_tokens()
        async with peer_channel(worker.address) as channel:
            stub = worker_stub(channel)
            request = worker_pb2.SwitchRoleRequest(role=worker_pb2.ROLE_PREFILL)
            assert (await stub.SwitchRole(request)).num_requests == 1
            assert (await stub.SwitchRole(request)).num_requests == 1, "it has the role"
            await session.send(submit("late"))
            assert (await session.failure()).kind == worker_pb2.FAILURE_KIND_GONE
            assert any(message.load.draining for message in session.messages)
            async with peer_channel(worker.address) as other:
                fresh = type(session)(other)
                await fresh.send(submit("new"))
                await fresh.until(lambda output: bool(output.tokens.finish_reason))
                assert not any(message.load.draining for message in fresh.messages)
                await fresh.half_close()
            bad = await stub.SwitchRole(worker_pb2.SwitchRoleRequest())
            assert bad.error == "role: must be prefill or decode"
            await session.half_close()
            await worker.drain(0)
            with pytest.raises(Unavailable, match="drains"):
                await worker.switch_role("decode", 0)


async def test_steps_take_the_budgets_and_the_share_of_the_role(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[StepPlan] = []
    launch = FakeExecutor.launch

    def record(
        executor: FakeExecutor, plan: StepPlan, on_layers: OnLayers | None = None
    ) -> Callable[[], Samples]:
        made.append(plan)
        return launch(executor, plan, on_layers)

    monkeypatch.setattr(FakeExecutor, "launch", record)
    async with worker_of(fake_rank(), roles=ROLES, **WIDEST) as (worker, session):
        for number, role in enumerate(("prefill", "decode")):
            first = len(made)
            await worker.switch_role(role, 0)
            async with peer_channel(worker.address) as channel:
                fresh = type(session)(channel)
                await fresh.send(submit(role, token_ids=range(number, number + 200)))
                await fresh.until(lambda output: bool(output.tokens.finish_reason))
                await fresh.half_close()
            plans = made[first:]
            settings = ROLES[role]
            assert [plan.share for plan in plans if plan.share] == [settings.share]
            longest = max(plan.num_prompt_tokens for plan in plans)
            assert longest == min(settings.budgets.chunk_tokens, 200)


async def test_a_prompt_that_is_computed_in_the_earlier_role_is_decoded() -> None:
    """Also by the worker that has computed it, which is then the only decode worker."""
    async with fleet(
        1, 1, rank=lambda role: fake_rank(step_seconds=0.002), roles=ROLES, **WIDEST
    ) as running:
        first, second = running.workers
        requests = [
            asyncio.create_task(running.choices(token_request(range(n, n + 300), 50)))
            for n in range(12)
        ]
        async with asyncio.timeout(WAIT):
            while not len(first._requests):
                await asyncio.sleep(0)
        await asyncio.gather(switch(running, first, "decode"), switch(running, second, "prefill"))
        for n, request in enumerate(requests):
            ids, _ = await request
            assert ids == expected_choices(range(n, n + 300), 1, 50, VOCAB)


async def test_a_sequence_that_was_meant_for_the_worker_goes_to_another_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its prompt is computed while the chosen decode worker gets the other role."""
    decoding: list[Engine] = []
    engine_submit = Engine.submit

    def record(engine: Engine, spec: SequenceSpec, submitted: float | None = None) -> None:
        if spec.task is Task.DECODE:
            decoding.append(engine)
        engine_submit(engine, spec, submitted)

    monkeypatch.setattr(Engine, "submit", record)
    async with fleet(
        1, 2, rank=lambda role: fake_rank(step_seconds=0.02), roles=ROLES, **WIDEST
    ) as running:
        # A session that begins after the switch may bring requests of a router that has not heard
        # of it; the worker decodes them.
        await running.dispatcher.update_sessions()
        async with asyncio.timeout(WAIT):
            while not all(worker._requests.reports.sessions for worker in running.workers):
                await asyncio.sleep(0.001)
        requests = [
            asyncio.create_task(running.choices(token_request(range(n, n + 600), 50)))
            for n in range(8)
        ]
        async with asyncio.timeout(WAIT):
            while not running.workers[0].load().num_running:
                await asyncio.sleep(0.001)
        switched = running.workers[1]
        assert await switch(running, switched, "prefill") == 0
        decoding.clear()
        for n, request in enumerate(requests):
            ids, _ = await request
            assert ids == expected_choices(range(n, n + 600), 1, 50, VOCAB)
        assert set(decoding) == {running.workers[2]._engine}


async def test_streams_are_right_while_two_workers_switch_in_turn() -> None:
    """Each has just refused requests in its earlier role when the other's streams move to it."""
    async with fleet(
        1,
        2,
        rank=lambda role: fake_rank(num_blocks=2000, step_seconds=0.002),
        roles=ROLES,
        **WIDEST,
    ) as running:
        is_over = False

        async def keep_going(number: int) -> None:
            while not is_over:
                prompt = range(number, number + 40)
                ids, _ = await running.choices(token_request(prompt, 20 + number))
                assert ids == expected_choices(prompt, 1, 20 + number, VOCAB)

        requests = [asyncio.create_task(keep_going(number)) for number in range(16)]
        await until_running(running.workers, 8)
        for _ in range(3):
            for worker in running.workers[1:]:
                for role in ("prefill", "decode"):
                    assert await switch(running, worker, role) == 0
        is_over = True
        await asyncio.gather(*requests)
