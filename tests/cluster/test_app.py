"""Tests the deployments as plain objects: their stop after a start that has failed."""

import warnings
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from tandem.cluster import app
from tandem.cluster.config import TandemConfig, load_config


class Stop(Exception):
    """What the start fails with."""


@pytest.fixture
def config(monkeypatch: pytest.MonkeyPatch) -> Iterator[TandemConfig]:
    """A service whose replicas have a context of Serve, and whose objects start by failing."""

    async def fail(*args: object, **kwargs: object) -> None:
        raise Stop

    context = SimpleNamespace(replica_id=SimpleNamespace(unique_id="x"))
    monkeypatch.setattr("ray.serve.get_replica_context", lambda: context)
    monkeypatch.setattr("tandem.workers.worker.Worker.start", fail)
    monkeypatch.setattr("tandem.cluster.runtime.RouterRuntime.start", fail)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield load_config(None, {"model": "m", "host": "127.0.0.1"})


@pytest.mark.parametrize(
    ("deployment", "args"), [(app.WorkerPool, ("prefill", 1)), (app.WorkerPool, ("decode", 1)), (app.Router, (1, b""))]
)
async def test_a_start_that_fails_can_be_stopped_like_any_other(
    deployment: Any, args: tuple[object, ...], config: TandemConfig
) -> None:
    replica = deployment.__new__(deployment)
    with pytest.raises(Stop):
        await replica.__init__(config, "/no/folder", *args)
    replica.check_health()
    await replica.__del__()  # as Serve does
    deployment.__del__, removed = lambda self: None, deployment.__del__  # the collector's call would not be awaited
    del replica
    deployment.__del__ = removed
