"""`tandem role`: what it prints, what it refuses and how it exits."""

import asyncio
from typing import Any

import pytest
from typer.testing import CliRunner

from tandem.cluster.cli import workers as commands
from tandem.cluster.cli.main import app
from tandem.cluster.service_url import ServiceAccess
from tandem.proto.errors import InvalidArgument, NotFound, Unavailable
from tandem.tests.fleet import fake_rank
from tandem.tests.peers import IDENTITY
from tandem.tests.workers.raw_session import worker_of
from tandem.workers.serve.worker import Worker


async def run(
    monkeypatch: pytest.MonkeyPatch, known: list[Worker], *args: str
) -> tuple[str, BaseException | None]:
    """Runs the command on a service of these workers; returns what it printed and raised."""
    described: list[dict[str, Any]] = [
        {"id": each.worker_id, "address": each.address, "role": each.role, "state": "ready"}
        for each in known
    ]
    found = {"workers": described}
    monkeypatch.setattr(ServiceAccess, "status", lambda access: (access.url, found))
    monkeypatch.setattr(commands, "read_identity", lambda *args: IDENTITY)
    result = await asyncio.to_thread(CliRunner().invoke, app, ["role", *args])
    return result.output, result.exception


async def test_a_worker_gets_the_role_unless_none_would_decode(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with worker_of(fake_rank()) as (one, _), worker_of(fake_rank()) as (two, _):
        two.worker_id = "other"
        known = [one, two]
        output, error = await run(monkeypatch, known, "worker", "prefill")
        assert error is None
        assert output.startswith("worker: prefill after 0.")
        assert output.endswith(" s, 0 requests left\n")
        assert (one.role, two.role) == ("prefill", "decode")
        _, error = await run(monkeypatch, known, "other", "prefill")
        assert isinstance(error, InvalidArgument)
        assert str(error) == (
            "WORKER: no other worker decodes; make one decode first: `tandem role OTHER decode`"
        )
        _, error = await run(monkeypatch, known, "nobody", "prefill")
        assert isinstance(error, NotFound)
        await one.drain(0)
        _, error = await run(monkeypatch, known, "worker", "decode")
        assert isinstance(error, Unavailable)
        assert str(error) == "the worker drains or stops; switch another one"
    # Another process may have the address by now.
    _, error = await run(monkeypatch, [two], "other", "decode")
    assert isinstance(error, Unavailable)
    assert str(error) == "the worker does not answer, or --identity is of another service"
