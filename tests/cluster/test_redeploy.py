"""Tests what decides whether a service may be replaced, and whether one has been; see e2e/test_redeploy.py."""

from types import SimpleNamespace

import pytest

from tandem.cluster import redeploy
from tandem.cluster.members import Continuity, Members, RouterInfo
from tandem.cluster.status import following
from tandem.proto import worker_pb2
from tandem.proto.errors import Unavailable
from tandem.tests.peers import IDENTITY

LAYOUT = b"l" * 16


@pytest.fixture
def applications(monkeypatch: pytest.MonkeyPatch) -> dict[str, SimpleNamespace]:
    """The applications of the cluster."""
    found: dict[str, SimpleNamespace] = {}
    monkeypatch.setattr("ray.serve.status", lambda: SimpleNamespace(applications=found))
    return found


def test_each_deployment_of_a_service_is_an_application(applications: dict[str, SimpleNamespace]) -> None:
    assert redeploy.running_application("a") is None
    assert following("a", None) == "a"
    applications |= dict.fromkeys(("a-b", "ab", "b", "a.x"), SimpleNamespace(status="RUNNING"))
    assert redeploy.running_application("a") is None
    applications["a.9"] = SimpleNamespace(status="RUNNING")
    assert redeploy.running_application("a") == "a.9"
    assert following("a", "a.9") == "a.10"
    assert following("a", "a") == "a.2"
    applications["a.10"] = SimpleNamespace(status="DEPLOYING")
    assert redeploy.applications_of("a") == ["a.9", "a.10"]
    with pytest.raises(Unavailable, match="is being replaced already"):
        redeploy.running_application("a")


def test_only_a_later_deployment_replaces_one_that_goes(applications: dict[str, SimpleNamespace]) -> None:
    assert not redeploy.is_replaced("a", "a")  # Serve may be away
    applications["a.2"] = SimpleNamespace(status="RUNNING")
    assert redeploy.is_replaced("a", "a")
    assert not redeploy.is_replaced("a", "a.3")
    applications["a"] = SimpleNamespace(status="RUNNING")
    assert not redeploy.is_replaced("a", "a")
    applications["a"] = SimpleNamespace(status="DELETING")
    assert redeploy.is_replaced("a", "a")


def test_another_model_or_a_ray_that_ends_is_refused() -> None:
    running = Continuity(identity=IDENTITY, resume_key=b"secret", layout=LAYOUT, ends_with_launcher=False)
    redeploy.check_continuity("a", running, LAYOUT)
    with pytest.raises(Unavailable, match="serves another model, dtype, quantization or kv_cache_dtype; stop it first"):
        redeploy.check_continuity("a", running, b"m" * 16)
    local = Continuity(identity=IDENTITY, resume_key=b"secret", layout=LAYOUT, ends_with_launcher=True)
    with pytest.raises(Unavailable, match="ends with the command that started its Ray"):
        redeploy.check_continuity("a", local, LAYOUT)
    assert "secret" not in repr(running)


def worker(name: str, application: str, layout: bytes = LAYOUT) -> worker_pb2.WorkerInfo:
    """Returns a decode worker."""
    return worker_pb2.WorkerInfo(worker_id=name, role=worker_pb2.ROLE_DECODE, application=application, layout=layout)


def router(name: str, application: str, num_workers: int) -> RouterInfo:
    """Returns a router that knows so many workers."""
    return RouterInfo(
        router_id=name, grpc_address="h:1", http_address="h:2", num_workers=num_workers, application=application
    )


async def test_a_deployment_is_complete_when_every_router_knows_its_workers() -> None:
    """The routers of the one before, too: they will hand over sequences."""
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


async def test_a_worker_with_another_model_is_no_worker_of_the_service() -> None:
    """As after the files of the model have changed and a worker has been started again."""
    members = Members("a", LAYOUT)
    await members.update([worker("1", "a"), worker("2", "a", b"m" * 16)], [router("r", "a", 2)])
    assert [each.worker_id for each in members.fitting] == ["1"]
    assert members.is_complete(1, 0, 1)
    assert not members.is_complete(1, 0, 2)
