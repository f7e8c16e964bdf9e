"""`tandem drain`: which workers it drains, what it prints and how it exits."""

import asyncio
from typing import Any

import pytest
from typer.testing import CliRunner

from tandem.cluster.cli import workers as commands
from tandem.cluster.cli.main import app
from tandem.cluster.service_url import ServiceAccess
from tandem.proto.errors import NotFound, Unavailable
from tandem.tests.fleet import fake_rank
from tandem.tests.peers import IDENTITY
from tandem.tests.worker_config import worker_config
from tandem.tests.workers.raw_session import submit, worker_of
from tandem.workers.serve.worker import Worker

NOBODY = "127.0.0.2:1"


async def run(
    monkeypatch: pytest.MonkeyPatch, workers: dict[str, str], *args: str
) -> tuple[str, BaseException | None]:
    return await run_command(monkeypatch, workers, "drain", *args)


async def run_command(
    monkeypatch: pytest.MonkeyPatch, workers: dict[str, str], *args: str
) -> tuple[str, BaseException | None]:
    """Runs a command on a service that has these workers, by id; returns what it printed and what
    it raised.
    """
    service = {"workers": [{"id": name, "address": address} for name, address in workers.items()]}
    monkeypatch.setattr(ServiceAccess, "status", lambda access: (access.url, service))
    monkeypatch.setattr(commands, "read_identity", lambda *args: IDENTITY)
    result = await asyncio.to_thread(CliRunner().invoke, app, args)
    return result.output, result.exception


async def test_workers_are_chosen_by_id_by_host_or_all(monkeypatch: pytest.MonkeyPatch) -> None:
    workers = [
        await Worker.serve(fake_rank(), worker_config(), worker_id=f"w{n}", role="decode")
        for n in range(3)
    ]
    known = {worker.worker_id: worker.address for worker in workers}
    try:
        assert await run(monkeypatch, known, "w1") == ("w1: 0 requests left\n", None)
        assert [worker.info().draining for worker in workers] == [False, True, False]
        everyone = "".join(f"w{n}: 0 requests left\n" for n in range(3))
        assert await run(monkeypatch, known, "127.0.0.1") == (everyone, None)
        assert [worker.info().draining for worker in workers] == [True] * 3
        assert await run(monkeypatch, known, "all") == (everyone, None)
        for target in ("w", "127.0.0.2", known["w0"]):
            output, error = await run(monkeypatch, known, target)
            assert output == ""
            assert isinstance(error, NotFound)
            assert str(error) == (
                f"TARGET: no worker has the id or the host {target}; `tandem status` lists them"
            )
    finally:
        await asyncio.gather(*(worker.stop() for worker in workers))


async def test_requests_left_and_no_answer_are_failures(monkeypatch: pytest.MonkeyPatch) -> None:
    async with worker_of(fake_rank(step_seconds=0.01)) as (worker, session):
        await session.send(submit(max_tokens=1000))
        await session.until(lambda output: bool(output.tokens.ids))
        known: dict[str, Any] = {"busy": worker.address, "gone": NOBODY}
        output, error = await run(monkeypatch, known, "all", "--timeout", "0.05")
        assert output == "busy: 1 requests left\ngone: no answer\n"
        assert isinstance(error, Unavailable)
        await session.half_close()
