"""Tests that the commands for transfers do not overtake the plans of steps."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import cast

import pytest

from tandem.proto import worker_pb2
from tandem.tests.fleet import split_fleet
from tandem.tests.service import expected_tokens
from tandem.tests.token_request import token_request
from tandem.tests.waits import WAIT
from tandem.tests.worker_config import worker_config
from tandem.workers.tp.kv_group import KvGroup
from tandem.workers.tp.rank_server import LaunchedPlans, RankServer
from tandem.workers.transfer.frames import FetchTarget

PROMPT = [(17 * i) % 400 + 3 for i in range(40)]


class Targets:
    """Stands in for a rank's transfers; records the sequences whose target is set."""

    def __init__(self) -> None:
        self.sequences: list[int] = []

    def set_target(self, sequence_id: int, target: FetchTarget) -> None:
        self.sequences.append(sequence_id)


@pytest.mark.parametrize("launches_ahead", [True, False])
async def test_a_command_waits_for_the_plans_that_were_sent_before_it(launches_ahead: bool) -> None:
    """A step that is not launched yet would overwrite what the transfer brings."""
    server = RankServer(worker_config().rank)
    targets = Targets()
    server._kv = cast(KvGroup, targets)
    server._plans.are_awaited = launches_ahead

    async def commands() -> AsyncIterator[worker_pb2.RankControlRequest]:
        for sequence_id, num_plans in ((1, 0), (2, 2), (3, 2)):
            yield worker_pb2.RankControlRequest(
                sequence_id=sequence_id,
                num_plans=num_plans,
                kv_target=worker_pb2.KvTransfer(tables=[worker_pb2.BlockTable(blocks=[0])]),
            )

    joined: asyncio.Future[worker_pb2.JoinGroup] = asyncio.get_running_loop().create_future()
    reading = asyncio.create_task(server._read(commands(), joined))
    found = []
    for _ in range(3):
        for _ in range(20):  # lets the reader come as far as it can
            await asyncio.sleep(0)
        found.append(list(targets.sequences))
        await asyncio.to_thread(server._plans.add)
    async with asyncio.timeout(WAIT):
        await reading
    assert found == ([[1], [1], [1, 2, 3]] if launches_ahead else [[1, 2, 3]] * 3)
    server._kv = None  # nothing to close
    await server.stop()


async def test_two_split_workers_transfer_while_commands_wait_for_plans(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reached: list[int] = []
    reach = LaunchedPlans.reach

    async def record(plans: LaunchedPlans, count: int) -> None:
        await reach(plans, count)
        reached.append(count)

    monkeypatch.setattr(LaunchedPlans, "reach", record)
    always = property(lambda plans: True, lambda plans, value: None)
    monkeypatch.setattr(LaunchedPlans, "are_awaited", always, raising=False)
    (expected,) = expected_tokens(tiny_model, [PROMPT], 8)
    async with split_fleet(tiny_model, {"prefill": [2], "decode": [2]}) as fleet:
        for _ in range(2):
            tokens, timeline = await fleet.generate(token_request(PROMPT, 8, ignore_eos=True))
            assert tokens == expected
            assert timeline.attempts == 1
    assert max(reached) > 2, "the commands name the plans before them"
