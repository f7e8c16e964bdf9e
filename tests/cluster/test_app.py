"""Tests the deployments as plain objects: stop after a failed start, end of a failed worker."""

import asyncio
import gc
import json
import warnings
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any, get_args
from unittest.mock import AsyncMock, Mock

import pytest
import ray
from starlette.requests import Request

from tandem.cluster.cli.client import _worker_table
from tandem.cluster.config import PoolRole, TandemConfig, load_config
from tandem.cluster.local.worker import worker_config
from tandem.cluster.serve import app, launch
from tandem.cluster.serve.directory import DirectoryClient
from tandem.cluster.serve.members import Continuity, Directory
from tandem.cluster.serve.status import WorkerStatuses
from tandem.cluster.serve.views.member_view import Members
from tandem.proto import worker_pb2
from tandem.proto.errors import Unavailable
from tandem.router.auth.authenticator import Authenticator
from tandem.tests.imported import imported
from tandem.tests.peers import IDENTITY
from tandem.tests.router.auth.keys import api_key
from tandem.tests.waits import WAIT

BLOCK_STATES = ("total", "free", "cached", "owned", "leased", "reserved")
CONTINUITY = Continuity(
    identity=IDENTITY, resume_key=b"k" * 32, layout=b"l" * 16, ends_with_launcher=True
)


class Stop(Exception):
    """The error of the start."""


@pytest.fixture
def config(monkeypatch: pytest.MonkeyPatch) -> Iterator[TandemConfig]:
    """A service whose replicas have a context of Serve, and whose objects start by failing."""

    async def fail(*args: object, **kwargs: object) -> None:
        raise Stop

    context = SimpleNamespace(replica_id=SimpleNamespace(unique_id="x"), app_name="tandem")
    monkeypatch.setattr("ray.serve.get_replica_context", lambda: context)
    monkeypatch.setattr("tandem.workers.serve.worker.Worker.start", fail)
    monkeypatch.setattr("tandem.cluster.serve.runtime.RouterRuntime.start", fail)
    monkeypatch.setattr(
        "tandem.cluster.serve.directory.DirectoryClient.changes", Directory().changes
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield load_config(None, {"model": "m", "host": "127.0.0.1"})


@pytest.mark.parametrize(
    ("deployment", "args"),
    [
        (app.WorkerPool, ("prefill", 1, IDENTITY, {})),
        (app.WorkerPool, ("decode", 1, IDENTITY, {})),
        (app.Router, (1, CONTINUITY)),
    ],
)
async def test_a_start_that_fails_can_be_stopped_like_any_other(
    deployment: Any, args: tuple[object, ...], config: TandemConfig
) -> None:
    replica = deployment.__new__(deployment)
    with pytest.raises(Stop):
        await replica.__init__(config, "/no/folder", *args)
    replica.check_health()
    await replica.__del__()  # as Serve does
    # The collector's call would not be awaited.
    deployment.__del__, removed = (
        lambda self: None,
        deployment.__del__,
    )
    del replica
    gc.collect()  # a router holds itself, in what describes its workers
    deployment.__del__ = removed


@pytest.mark.parametrize("function", ["ray.init", "ray.serve.start", "ray.serve.run_many"])
def test_a_start_that_times_out_is_one_line(
    config: TandemConfig, monkeypatch: pytest.MonkeyPatch, function: str
) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise Exception(
            "The current node timed out during startup. This could happen because ...\nand more"
        )

    for name in ("ray.init", "ray.serve.start", "ray.serve.delete"):
        monkeypatch.setattr(name, lambda *args, **kwargs: None)
    monkeypatch.setattr("ray.serve.status", lambda: SimpleNamespace(applications={}))
    monkeypatch.setattr("ray.nodes", lambda: [])
    monkeypatch.setattr(
        "tandem.cluster.serve.launch.serve_http_address", lambda: ("127.0.0.1", 8000)
    )
    for name in ("open_directory", "close_directory"):
        monkeypatch.setattr(f"tandem.cluster.serve.launch.{name}", lambda *args: None)
    monkeypatch.setattr(
        "tandem.workers.model.loader.open_checkpoint", lambda *args, **options: Mock()
    )
    monkeypatch.setattr(function, fail)
    with pytest.raises(Unavailable) as raised, launch.start_service(config, "/no/folder"):
        pass
    assert "did not start: The current node timed out during startup." in str(raised.value)
    assert "\n" not in str(raised.value)


async def test_a_worker_that_cannot_stop_is_exited_from_and_registers_no_more(
    config: TandemConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Happens after a step that never ends; the heartbeat must not undo the removal."""
    calls: list[str] = []
    exited = asyncio.Event()

    async def record(name: str, *_: object) -> None:
        await asyncio.sleep(0)
        calls.append(name)

    def exit_with(code: int) -> None:
        calls.append(f"exit {code}")
        exited.set()

    monkeypatch.setattr("os._exit", exit_with)
    monkeypatch.setattr(app, "HEARTBEAT_SECONDS", 0.01)
    worker: Any = SimpleNamespace(
        failed=asyncio.Event(),
        has_news=asyncio.Event(),
        worker_id="w",
        info=worker_pb2.WorkerInfo,
        stop=asyncio.Event().wait,
        check_health=lambda: None,
    )
    directory = SimpleNamespace(
        register=partial(record, "register"), remove=partial(record, "remove")
    )
    # A WorkerPool's collection would not be awaited.
    replica: Any = SimpleNamespace(_directory=directory, _application="tandem")
    loops = (
        app.WorkerPool._heartbeat(replica, worker),
        app.WorkerPool._exit_on_failure(replica, worker),
    )
    tasks = [asyncio.create_task(loop) for loop in loops]
    async with asyncio.timeout(WAIT):
        while "register" not in calls:
            await asyncio.sleep(0.001)
        worker.failed.set()
        await exited.wait()
        await asyncio.gather(*tasks)
    assert calls[-2:] == ["remove", "exit 1"]


async def test_an_engine_that_hangs_ends_its_worker_without_the_serve_controller(
    config: TandemConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the controller calls the replica's health check."""
    exited = asyncio.Event()
    monkeypatch.setattr("os._exit", lambda code: exited.set())
    monkeypatch.setattr(app, "HEARTBEAT_SECONDS", 0.01)
    failed = asyncio.Event()
    checks: list[str] = []

    def check_health() -> None:
        checks.append("hangs" if len(checks) == 2 else "runs")
        if checks[-1] == "hangs":
            failed.set()
            raise RuntimeError("the engine of w has failed")

    worker: Any = SimpleNamespace(
        failed=failed, worker_id="w", stop=AsyncMock(), check_health=check_health
    )
    replica: Any = SimpleNamespace(_directory=SimpleNamespace(remove=AsyncMock()))
    async with asyncio.timeout(WAIT):
        await app.WorkerPool._exit_on_failure(replica, worker)
    assert exited.is_set()
    assert checks == ["runs", "runs", "hangs"]
    worker.stop.assert_awaited_once()
    replica._directory.remove.assert_awaited_once_with("w")


async def test_a_replica_whose_task_has_failed_still_stops_its_server_in_order(
    config: TandemConfig,
) -> None:
    """Serve awaits `__del__` of a replica that is not healthy, and Ray may still be failing."""

    async def fail() -> None:
        raise ray.exceptions.WorkerCrashedError

    stopped: list[float] = []

    async def stop(seconds: float) -> None:
        stopped.append(seconds)

    directory = DirectoryClient("tandem")
    directory._handle = SimpleNamespace(remove=SimpleNamespace(remote=lambda member: fail()))
    running = asyncio.create_task(asyncio.Event().wait())
    failed = asyncio.create_task(fail())
    await asyncio.wait([failed])
    replica: Any = SimpleNamespace(
        _tasks=[running, failed],
        _stop_server=stop,
        _directory=directory,
        _member_id="w",
        _config=config,
    )
    with pytest.raises(ray.exceptions.WorkerCrashedError):
        app.Replica.check_health(replica)
    await app.Replica.__del__(replica)
    assert stopped == [config.grace_seconds]
    with pytest.raises(asyncio.CancelledError):
        await running


def test_a_router_loads_no_torch() -> None:
    """torch takes seconds and hundreds of megabytes."""
    assert "torch" not in imported("import tandem.cluster.serve.app, tandem.cluster.serve.runtime")


def test_a_launcher_loads_neither_torch_nor_transformers_before_ray_starts() -> None:
    """They take two seconds, and load while Ray starts."""
    assert not {"torch", "transformers"} & imported("import tandem.cluster.serve.launch")


def test_the_limits_of_liveness_reach_a_worker() -> None:
    config = load_config(
        None, {"model": "m", "host": "127.0.0.1", "silence_seconds": 7, "hang_seconds": 77}
    )
    made = worker_config(
        config, "decode", "/folder", 1, IDENTITY, host="127.0.0.1", ranks_per_node=1
    )
    assert (made.rank.silence_seconds, made.hang_seconds) == (7, 77)


def test_a_worker_of_one_thread_computes_short_chunks() -> None:
    def chunk_tokens(role: PoolRole, num_threads: int, **fields: object) -> int:
        made = worker_config(
            load_config(None, {"model": "m", **fields}),
            role,
            "/folder",
            num_threads,
            IDENTITY,
            host="127.0.0.1",
            ranks_per_node=2,
        )
        return made.budgets.chunk_tokens

    assert [chunk_tokens("prefill", num_threads) for num_threads in (1, 2)] == [128, 512]
    assert chunk_tokens("prefill", 1, **{"prefill.tp": 2}) == 512  # of each of two ranks
    assert chunk_tokens("decode", 1, **{"decode.chunk_tokens": 64}) == 64


@pytest.mark.parametrize(("replicas", "expected"), [(0, True), (1, False)])
def test_only_without_a_prefill_pool_decode_workers_take_whole_chunks_in_bursts(
    replicas: int, expected: bool
) -> None:
    config = load_config(None, {"model": "m", "prefill.replicas": replicas})
    made = worker_config(config, "decode", "/m", 2, IDENTITY, host="127.0.0.1", ranks_per_node=1)
    assert made.budgets.burst_chunks == expected


def test_state_slots_reach_a_worker_with_the_states_of_one_sequence() -> None:
    """A prefill takes three, because it keeps its result for the transfer."""
    overrides = {"model": "m", "prefill.state_slots": 9, "decode.max_sequences": 5}
    config = load_config(None, overrides)
    roles: tuple[PoolRole, ...] = ("prefill", "decode")
    prefill, decode = (
        worker_config(config, role, "/m", 1, IDENTITY, host="127.0.0.1", ranks_per_node=1).rank
        for role in roles
    )
    assert (prefill.state_slots, prefill.max_sequences, prefill.sequence_states) == (9, 64, 3)
    assert (decode.state_slots, decode.max_sequences, decode.sequence_states) == (None, 5, 2)


@pytest.mark.parametrize(
    ("speculative", "kept"),
    [
        ({"model": "small"}, ["decode"]),
        ({"method": "ngram"}, ["prefill", "decode"]),
    ],
)
def test_a_worker_without_a_draft_model_waits_for_no_drafts(
    speculative: dict[str, str], kept: list[str]
) -> None:
    """Not in another role either: it loads no model when it takes one."""
    config = load_config(None, {"model": "m", "speculative": speculative})
    for role in get_args(PoolRole):
        made = worker_config(config, role, "/m", 1, IDENTITY, host="127.0.0.1", ranks_per_node=1)
        expected = config.speculative if role in kept else None
        assert made.rank.draft_model == (expected.model if expected else None)
        assert made.budgets.speculative == expected
        assert [each.budgets.speculative for each in made.roles.values()] == [expected] * 2


@pytest.mark.parametrize(("key", "sees_loads"), [("ada", False), ("ops", True)])
async def test_the_status_page_shows_the_load_of_workers_to_operators(
    config: TandemConfig, key: str, sees_loads: bool
) -> None:
    """Applies to services with keys; `tandem status` reads either answer."""

    async def status() -> dict[str, Any]:
        load = dict.fromkeys(
            (
                "num_running",
                "num_waiting",
                "held_states",
                *(f"{state}_blocks" for state in BLOCK_STATES),
            ),
            7,
        )
        worker = {
            "id": "w",
            "role": "decode",
            "state": "ready",
            "num_leases": 7,
            "num_transfers": 7,
            "load": load,
        }
        return {"service": "a", "workers": [worker]}

    keys = [api_key("ada"), api_key("ops", operator=True)]
    router: Any = SimpleNamespace(_config=config, _authenticator=Authenticator(keys), status=status)
    headers = [(b"host", b"127.0.0.1"), (b"authorization", f"Bearer {key}".encode())]
    answer = await app.Router.__call__(
        router, Request({"type": "http", "method": "GET", "headers": headers})
    )
    (worker,) = json.loads(bytes(answer.body))["workers"]
    assert (worker["id"], worker["state"]) == ("w", "ready")
    assert ("load" in worker, "num_leases" in worker) == (sees_loads, sees_loads)
    cells = [next(iter(column.cells)) for column in _worker_table([worker]).columns]
    assert cells == ["decode", "w", "ready", *["7" if sees_loads else "-"] * 10]
    *_, states = _worker_table([worker | {"num_states": 12}]).columns
    assert next(iter(states.cells)) == ("7/12" if sees_loads else "-/12")


@pytest.mark.parametrize(
    ("method", "headers", "status"),
    [
        ("GET", {"host": "127.0.0.1:8000"}, 200),
        ("GET", {"host": "localhost:8000"}, 200),
        ("GET", {"host": "models.example.com"}, 200),
        ("GET", {"host": "evil.example:8000"}, 403),  # DNS rebinding
        ("GET", {"host": "127.0.0.1:8000", "origin": "https://evil.example"}, 403),
        ("POST", {"host": "127.0.0.1:8000"}, 405),
    ],
)
async def test_pages_in_browsers_do_not_read_the_status_page(
    config: TandemConfig, method: str, headers: dict[str, str], status: int
) -> None:
    # These hold for the API alone.
    names = {
        "host_names": ("models.example.com",),
        "cors_origins": ("https://evil.example",),
    }
    config = config.model_copy(update={"router": config.router.model_copy(update=names)})
    router: Any = SimpleNamespace(
        _config=config,
        _members=Members("tandem", b""),
        _authenticator=Authenticator(),
        _statuses=WorkerStatuses(list, IDENTITY),
        _ray_dashboard="",
    )
    router.status = partial(app.Router.status, router)
    raw = [(name.encode(), value.encode()) for name, value in headers.items()]
    answer = await app.Router.__call__(
        router, Request({"type": "http", "method": method, "headers": raw})
    )
    assert answer.status_code == status
    assert (b"workers" in answer.body) == (status == 200)
