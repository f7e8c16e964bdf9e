"""Tests the conditions for replacing a service, and the detection of a replacement.

e2e/test_redeploy.py tests the replacement itself.
"""

import logging
import os
import threading
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from tandem.cluster.config import TandemConfig, load_config
from tandem.cluster.serve import identity_file, launch, redeploy
from tandem.cluster.serve.identity_file import kept_salt
from tandem.cluster.serve.members import Continuity, RouterInfo
from tandem.cluster.serve.status import following
from tandem.cluster.serve.views.member_view import Members
from tandem.proto import worker_pb2
from tandem.proto.errors import Unavailable
from tandem.tests.peers import IDENTITY
from tandem.tests.waits import WAIT
from tandem.workers.model import loader

LAYOUT = b"l" * 16


@pytest.fixture
def applications(monkeypatch: pytest.MonkeyPatch) -> dict[str, SimpleNamespace]:
    """The applications of the cluster."""
    found: dict[str, SimpleNamespace] = {}
    monkeypatch.setattr("ray.serve.status", lambda: SimpleNamespace(applications=found))
    return found


def test_each_deployment_of_a_service_is_an_application(
    applications: dict[str, SimpleNamespace], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert redeploy.running_application("a", 0.0) is None
    assert following("a", None) == "a"
    applications |= dict.fromkeys(("a-b", "ab", "b", "a.x"), SimpleNamespace(status="RUNNING"))
    assert redeploy.running_application("a", 0.0) is None
    applications["a.9"] = SimpleNamespace(status="RUNNING")
    assert redeploy.running_application("a", 0.0) == "a.9"
    assert following("a", "a.9") == "a.10"
    assert following("a", "a") == "a.2"
    applications["a.10"] = SimpleNamespace(status="DEPLOYING")
    assert redeploy.applications_of("a") == ["a.9", "a.10"]
    announced: list[str] = []
    monkeypatch.setattr("ray.get_actor", lambda name, namespace: announced.append(name))
    with pytest.raises(Unavailable, match=r"'a' already, with a\.9 and a\.10; wait"):
        redeploy.running_application("a", 0.0)
    assert announced == ["a.10-replacement"]


@pytest.mark.parametrize(
    ("old", "new", "ended"),
    [
        ("RUNNING", "DEPLOYING", "a.2"),
        ("RUNNING", "RUNNING", "a"),
        ("DELETING", "UNHEALTHY", "a"),
    ],
)
@pytest.mark.parametrize("ends", [True, False])
def test_a_command_that_died_while_it_replaced_a_service_leaves_one_application(
    applications: dict[str, SimpleNamespace],
    monkeypatch: pytest.MonkeyPatch,
    old: str,
    new: str,
    ended: str,
    ends: bool,
) -> None:
    """The new one is not needed before it is ready. Later the old one may be drained."""
    applications |= {"a": SimpleNamespace(status=old), "a.2": SimpleNamespace(status=new)}
    deleted: list[str] = []

    def begin_delete(name: str) -> None:
        deleted.append(name)
        if ends:
            del applications[name]

    router = Mock()
    router.drain_others.remote.return_value.result.return_value = 0
    monkeypatch.setattr("ray.serve.get_app_handle", {"a.2": router}.get)
    monkeypatch.setattr("ray.get_actor", Mock(side_effect=ValueError("no such actor")))
    monkeypatch.setattr(redeploy, "begin_delete", begin_delete)
    monkeypatch.setattr(redeploy, "_CHECK_SECONDS", 0.01)
    if ends:
        (left,) = {"a", "a.2"} - {ended}
        assert redeploy.running_application("a", 0.0) == left
    else:
        with pytest.raises(Unavailable, match=rf"^name: {ended} of the service 'a' has not"):
            redeploy.running_application("a", 0.0)
    assert deleted == [ended]
    assert router.drain_others.remote.called == (ended == "a")


def lone(status: str, router: str = "RUNNING", **states: int) -> SimpleNamespace:
    """Returns an application by its status and the states of its router and decode workers."""
    deployments = {
        "Router": SimpleNamespace(replica_states={router: 1}),
        "DecodePool": SimpleNamespace(replica_states=states),
    }
    return SimpleNamespace(status=status, deployments=deployments)


@pytest.mark.parametrize(
    ("left_over", "is_ended"),
    [
        (lone("DEPLOY_FAILED"), True),
        (lone("DEPLOY_FAILED", STARTING=1, STOPPING=1), True),
        (SimpleNamespace(status="DEPLOY_FAILED", deployments={}), True),
        (lone("DEPLOY_FAILED", "STARTING", RUNNING=1), True),  # the router does not start
        (lone("DEPLOY_FAILED", RUNNING=1, STARTING=1), False),  # an update failed, and it serves
        (lone("DEPLOYING", STARTING=1), False),  # perhaps by a configuration of Serve
        (lone("UNHEALTHY"), False),  # Serve starts its workers again
    ],
)
def test_a_start_that_failed_after_its_command_died_leaves_nothing(
    applications: dict[str, SimpleNamespace],
    monkeypatch: pytest.MonkeyPatch,
    left_over: SimpleNamespace,
    is_ended: bool,
) -> None:
    applications["a"] = left_over
    monkeypatch.setattr("ray.get_actor", Mock(side_effect=ValueError("no such actor")))
    monkeypatch.setattr(redeploy, "begin_delete", applications.pop)
    assert redeploy.running_application("a", 0.0) == (None if is_ended else "a")
    if is_ended:
        applications["a"] = left_over
        monkeypatch.setattr(redeploy, "begin_delete", lambda name: None)
        monkeypatch.setattr(redeploy, "_CHECK_SECONDS", 0.01)
        with pytest.raises(Unavailable, match=r"^name: a of the service 'a' has not ended yet"):
            redeploy.running_application("a", 0.0)


def test_a_first_start_is_announced_as_long_as_it_lasts(
    applications: dict[str, SimpleNamespace], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two commands would share one application, and the first to end would end it for both."""
    applications["a"] = lone("DEPLOY_FAILED")
    monkeypatch.setattr("ray.get_actor", Mock())
    with pytest.raises(Unavailable, match="starts or replaces the service 'a' already, with a;"):
        redeploy.running_application("a", 0.0)
    applications.clear()
    actor, deploy, delete = Mock(), Mock(), Mock()
    actor.return_value.options.return_value.remote.side_effect = ValueError("the name is taken")
    monkeypatch.setattr(launch, "joined_ray", lambda address: nullcontext())
    monkeypatch.setattr(launch, "_start_serve", lambda config, local: "http://127.0.0.1:8000")
    for name in ("_nodes", "check_gpus", "take_over", "close_directory"):
        monkeypatch.setattr(launch, name, Mock())
    monkeypatch.setattr(launch, "_deploy", deploy)
    monkeypatch.setattr(launch, "begin_delete", delete)
    monkeypatch.setattr("ray.remote", actor)
    config = load_config(None, {"model": "m", "name": "a"})
    with (
        pytest.raises(Unavailable, match="another command starts a already"),
        launch.start_service(config, "m", address="127.0.0.1:1"),
    ):
        pass
    assert not deploy.called
    assert not delete.called


def test_only_a_later_deployment_replaces_one_that_goes(
    applications: dict[str, SimpleNamespace],
) -> None:
    assert not redeploy.is_replaced("a", "a")  # Serve may be away
    applications["a.2"] = SimpleNamespace(status="RUNNING")
    assert redeploy.is_replaced("a", "a")
    assert not redeploy.is_replaced("a", "a.3")
    applications["a"] = SimpleNamespace(status="RUNNING")
    assert not redeploy.is_replaced("a", "a")
    applications["a"] = SimpleNamespace(status="DELETING")
    assert redeploy.is_replaced("a", "a")


def test_a_signal_during_the_drain_ends_the_replaced_application_as_well(
    applications: dict[str, SimpleNamespace], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its workers drain without end: alone it would refuse everything."""
    deleted: list[str] = []
    monkeypatch.setattr(redeploy, "begin_delete", deleted.append)
    router = Mock()
    router.drain_others.remote.return_value.result.side_effect = KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt):
        redeploy.retire("a", router, 1.0)
    assert deleted == ["a"]


def test_the_last_application_waits_for_others_that_end_and_closes_the_directory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It does not wait for an application that it failed to replace."""
    ending = SimpleNamespace(status="DELETING")
    running = SimpleNamespace(status="RUNNING")
    both = {"a": ending, "a.2": ending}
    statuses: list[dict[str, SimpleNamespace]] = []
    closed: list[str] = []
    monkeypatch.setattr("ray.serve.status", lambda: SimpleNamespace(applications=statuses.pop(0)))
    monkeypatch.setattr(launch, "begin_delete", lambda name: None)
    monkeypatch.setattr(launch, "close_directory", closed.append)
    monkeypatch.setattr(launch, "_DELETE_CHECK_SECONDS", 0.0)
    config = load_config(None, {"model": "m", "name": "a"})
    statuses += [both, both, {"a": ending}, {"a": ending}, {}, {}]
    assert launch._stop_service(config, "a.2", [])
    assert closed == ["a"]
    statuses += [both, {"a": running}, {"a": running}]
    assert launch._stop_service(config, "a.2", [])
    assert closed == ["a"]
    assert not statuses


@pytest.mark.parametrize("ray_ends", [False, True])
def test_a_controller_that_starts_again_is_waited_for_while_ray_runs(
    monkeypatch: pytest.MonkeyPatch, ray_ends: bool
) -> None:
    waited = threading.Event()  # beyond the grace
    restarted = threading.Event()

    def has_ended(process: object) -> bool:
        waited.set()
        if not ray_ends:
            restarted.set()
        return ray_ends

    monkeypatch.setattr(launch, "_ANSWER_SECONDS", 0.0)
    monkeypatch.setattr(launch, "has_ended", has_ended)
    monkeypatch.setattr(launch, "is_replaced", lambda *names: not restarted.wait(WAIT))
    monkeypatch.setattr(launch, "is_ending", lambda *names: False)
    monkeypatch.setattr(launch, "applications_of", lambda name: ["another"])
    monkeypatch.setattr(launch, "begin_delete", lambda name: None)
    config = load_config(None, {"model": "m", "grace_seconds": 0})
    assert launch._stop_service(config, "a", [Mock()]) is not ray_ends
    assert waited.is_set()
    restarted.set()


def test_another_model_or_a_ray_that_ends_is_refused() -> None:
    running = Continuity(
        identity=IDENTITY, resume_key=b"secret", layout=LAYOUT, ends_with_launcher=False
    )
    redeploy.check_continuity("a", running, LAYOUT)
    with pytest.raises(
        Unavailable,
        match="serves another model, dtype, quantization or kv_cache_dtype; stop it first",
    ):
        redeploy.check_continuity("a", running, b"m" * 16)
    local = Continuity(
        identity=IDENTITY, resume_key=b"secret", layout=LAYOUT, ends_with_launcher=True
    )
    with pytest.raises(Unavailable, match="ends with the command that started its Ray"):
        redeploy.check_continuity("a", local, LAYOUT)
    assert "secret" not in repr(running)


def worker(name: str, application: str, layout: bytes = LAYOUT) -> worker_pb2.WorkerInfo:
    """Returns a decode worker."""
    return worker_pb2.WorkerInfo(
        worker_id=name, role=worker_pb2.ROLE_DECODE, application=application, layout=layout
    )


def router(name: str, application: str, num_workers: int) -> RouterInfo:
    """Returns a router that knows this number of workers."""
    return RouterInfo(
        router_id=name,
        grpc_address="h:1",
        http_address="h:2",
        num_workers=num_workers,
        application=application,
    )


async def test_a_deployment_is_complete_when_every_router_knows_its_workers() -> None:
    """This includes the old deployment's routers: they will hand over sequences."""
    members = Members("a.2", LAYOUT)
    workers = [worker("1", "a"), worker("2", "a.2")]
    await members.update(workers, [router("r1", "a", 1), router("r2", "a.2", 2)])
    assert not members.is_complete(1, 0, 1)
    await members.update(workers, [router("r1", "a", 2), router("r2", "a.2", 2)])
    assert members.is_complete(1, 0, 1)
    assert not members.is_complete(2, 0, 1)
    assert not members.is_complete(1, 0, 2)
    assert not members.is_complete(1, 1, 1)
    assert [each.worker_id for each in members.other_workers] == ["1"]
    assert [each.router_id for each in members.own_routers] == ["r2"]
    assert [each.router_id for each in members.other_routers] == ["r1"]


async def test_workers_that_have_switched_their_roles_count_as_those_of_the_pools() -> None:
    """Roles may follow the load before the last router has started."""
    members = Members("a", LAYOUT)
    workers = [worker(name, "a") for name in "123"]
    workers[0].role = worker_pb2.ROLE_PREFILL
    await members.update(workers, [router("r", "a", 3)])
    for num_prefill, num_decode in ((1, 2), (2, 1), (0, 3)):
        assert members.is_complete(1, num_prefill, num_decode)
    assert not members.is_complete(1, 2, 2)
    for each in workers:
        each.role = worker_pb2.ROLE_PREFILL
    assert not members.is_complete(1, 2, 1)


async def test_a_worker_with_another_model_is_no_worker_of_the_service() -> None:
    """Such a worker starts after the files of the model have changed."""
    members = Members("a", LAYOUT)
    await members.update([worker("1", "a"), worker("2", "a", b"m" * 16)], [router("r", "a", 2)])
    assert [each.worker_id for each in members.fitting] == ["1"]
    assert members.is_complete(1, 0, 1)
    assert not members.is_complete(1, 0, 2)


@pytest.fixture
def disk_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TandemConfig:
    """A service with keys and KV cache on disk."""
    monkeypatch.setattr("ray.nodes", lambda: [])
    monkeypatch.setattr(loader, "open_checkpoint", lambda *args, **options: Mock())
    fields: dict[str, object] = {
        "model": "m",
        "name": "a",
        "auth.keys_file": str(tmp_path / "keys.json"),
    }
    for pool in ("prefill", "decode"):
        fields |= {f"{pool}.kv_disk": str(tmp_path / pool), f"{pool}.kv_disk_gb": 1.0}
    return load_config(None, fields)


def test_the_secret_of_cached_prefixes_outlives_a_restart_with_the_cache(
    disk_config: TandemConfig, tmp_path: Path
) -> None:
    first, again = (redeploy.first_continuity(disk_config, "m") for _ in range(2))
    assert first.identity != again.identity
    assert first.cache_secret == again.cache_secret is not None
    other = redeploy.first_continuity(disk_config.model_copy(update={"name": "b"}), "m")
    assert other.cache_secret != first.cache_secret  # services that share a disk share no prefix
    files = [tmp_path / pool / "prefix-salt" for pool in ("prefill", "decode")]
    assert {file.stat().st_mode & 0o777 for file in files} == {0o600}
    assert [len(list(file.parent.iterdir())) for file in files] == [1, 1]
    files[0].unlink()  # with one of two caches
    assert redeploy.first_continuity(disk_config, "m").cache_secret == first.cache_secret
    assert files[0].read_bytes() == files[1].read_bytes()
    for file in files:
        file.unlink()
    assert redeploy.first_continuity(disk_config, "m").cache_secret != first.cache_secret


def test_no_salt_is_kept_where_nothing_needs_one(disk_config: TandemConfig, tmp_path: Path) -> None:
    """Without keys nothing is salted; an identity in a file does not change."""
    open_to_all = disk_config.model_copy(
        update={"auth": disk_config.auth.model_copy(update={"keys_file": None})}
    )
    assert redeploy.first_continuity(open_to_all, "m").cache_secret is None
    assert not list(tmp_path.rglob("prefix-salt"))


def lay_salt(path: Path, content: bytes = bytes(32), mode: int = 0o600) -> None:
    path.write_bytes(content)
    path.chmod(mode)


@pytest.mark.parametrize(
    "fault", ["readable", "short", "long", "link", "folder", "pipe", "no folder"]
)
def test_a_salt_that_others_may_know_is_not_used(
    disk_config: TandemConfig, tmp_path: Path, fault: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The same holds for a damaged salt; the service starts nevertheless and logs the loss."""
    folder = tmp_path / "decode"
    path = folder / "prefix-salt"
    if fault == "no folder":
        folder.write_text("")
    else:
        folder.mkdir()
        lay_salt(tmp_path / "elsewhere")
        faults: dict[str, Callable[[], object]] = {
            "readable": lambda: lay_salt(path, mode=0o640),
            "short": lambda: lay_salt(path, bytes(31)),
            "long": lambda: lay_salt(path, bytes(33)),
            "link": lambda: path.symlink_to(tmp_path / "elsewhere"),
            "folder": path.mkdir,
            "pipe": lambda: os.mkfifo(path, 0o600),
        }
        faults[fault]()
    with caplog.at_level(logging.WARNING):
        assert redeploy.first_continuity(disk_config, "m").cache_secret is None
    (record,) = caplog.records
    assert str(folder) in record.getMessage()
    assert "\n" not in record.getMessage()


def test_two_launchers_at_once_keep_one_salt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    both = threading.Barrier(2)
    write = identity_file._write_salt

    def write_together(path: Path, salt: bytes) -> bytes:
        both.wait(WAIT)
        return write(path, salt)

    monkeypatch.setattr(identity_file, "_write_salt", write_together)
    found: list[bytes] = []
    threads = [
        threading.Thread(target=lambda: found.append(kept_salt([tmp_path / "kv"])))
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT)
    assert len(found) == 2
    assert found[0] == found[1] == kept_salt([tmp_path / "kv"])
    assert os.listdir(tmp_path / "kv") == ["prefix-salt"]
