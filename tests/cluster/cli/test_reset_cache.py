"""`tandem reset-cache`: what it resets, what it prints and how it exits."""

import pytest

from tandem.proto.errors import Unavailable
from tandem.tests.cluster.cli.test_drain import NOBODY, run_command
from tandem.tests.fleet import fake_rank
from tandem.tests.workers.raw_session import ended, idle, submit, worker_of


async def test_all_workers_are_reset_and_one_that_is_gone_is_a_failure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with worker_of(fake_rank()) as (worker, session):
        await session.send(submit(token_ids=range(40)))
        await session.until(ended)
        await idle(worker)
        assert worker.load().cached_blocks > 0
        known = {"one": worker.address}
        assert await run_command(monkeypatch, known, "reset-cache") == ("one: empty\n", None)
        assert worker.load().cached_blocks == 0
        output, error = await run_command(monkeypatch, known | {"gone": NOBODY}, "reset-cache")
        assert output == "one: empty\ngone: no answer\n"
        assert isinstance(error, Unavailable)
