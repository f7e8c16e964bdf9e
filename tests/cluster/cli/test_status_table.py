"""What `tandem status` prints of a service."""

from typing import Any

import pytest
from typer.testing import CliRunner

from tandem.cluster.cli import client
from tandem.cluster.cli.main import app
from tandem.proto import worker_pb2

LOAD = {field.name: 3 for field in worker_pb2.WorkerLoad.DESCRIPTOR.fields}


def worker(name: str, peers: list[dict[str, Any]]) -> dict[str, Any]:
    return {"id": name, "role": "decode", "state": "ready", "leases": 1, "transfers": 2, "load": LOAD, "peers": peers}


def printed(monkeypatch: pytest.MonkeyPatch, *workers: dict[str, Any]) -> list[str]:
    service = {"service": "tandem", "model": "m", "grpc": "a:1", "http": "a:2", "workers": list(workers)}
    monkeypatch.setattr(client, "_fetch", lambda url: service)
    result = CliRunner().invoke(app, ["status"])
    assert result.exit_code == 0
    return [line.rstrip() for line in result.output.splitlines()]


def test_ways_of_kv_cache_are_shown_with_their_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    peers = [
        {"endpoint": "10.0.0.1:7000", "transport": "shared", "gb_per_second": 21.346},
        {"endpoint": "10.0.0.2:7000", "transport": "grpc", "gb_per_second": 1.9},
    ]
    lines = printed(monkeypatch, worker("d-0", peers), worker("d-1", []))
    assert lines[-3].split() == ["worker", "pulls", "from", "transport", "GB/s"]
    assert lines[-2].split() == ["d-0", "10.0.0.1:7000", "shared", "21.35"]
    assert lines[-1].split() == ["d-0", "10.0.0.2:7000", "grpc", "1.90"]


def test_workers_that_have_pulled_nothing_have_no_such_table(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = printed(monkeypatch, worker("d-0", []))
    assert not any("pulls from" in line for line in lines)
    assert lines[-1].split()[1] == "d-0"
