"""Tests the lines and tables that `tandem status` and `tandem serve` print about a service."""

from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from tandem.cluster.cli.main import app
from tandem.cluster.cli.serve import print_pages
from tandem.cluster.service_url import ServiceAccess
from tandem.cluster.tables import table_console
from tandem.proto import worker_pb2

LOAD = {field.name: 3 for field in worker_pb2.WorkerLoad.DESCRIPTOR.fields}


def worker(name: str, transports: dict[str, str]) -> dict[str, Any]:
    state = {"id": name, "role": "decode", "state": "ready", "load": LOAD, "transports": transports}
    return state | {"num_leases": 1, "num_transfers": 2}


ROUTERS = [
    {"id": "r-0", "grpc": "a:1", "http": "a:2", "ops": "a:5"},
    {"id": "r-1", "grpc": "a:3", "http": "a:4", "ops": "a:6"},
]


def printed(monkeypatch: pytest.MonkeyPatch, *workers: dict[str, Any]) -> list[str]:
    service = {"service": "tandem", "model": "m", "routers": ROUTERS, "workers": list(workers)}
    monkeypatch.setattr(ServiceAccess, "status", lambda access: (access.url, service))
    result = CliRunner().invoke(app, ["status"])
    assert result.exit_code == 0
    return [line.rstrip() for line in result.output.splitlines()]


def test_every_router_is_shown_with_its_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = printed(monkeypatch, worker("d-0", {}))
    assert lines[:3] == [
        "tandem: m",
        "router r-0  grpc=a:1 http=a:2 ops=a:5",
        "router r-1  grpc=a:3 http=a:4 ops=a:6",
    ]


def test_the_transport_of_each_pair_of_ranks_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    transports = {"10.0.0.1:7000": "shared", "10.0.0.2:7000": "grpc", "[fd00:a::1]:7000": "grpc"}
    lines = printed(monkeypatch, worker("d-0", transports), worker("d-1", {}))
    assert [line.split() for line in lines[-4:]] == [
        ["worker", "pulls", "from", "transport"],
        ["d-0", "10.0.0.1:7000", "shared"],
        ["d-0", "10.0.0.2:7000", "grpc"],
        ["d-0", "[fd00:a::1]:7000", "grpc"],
    ]


def test_the_pages_of_a_service_on_ipv6_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    service: Any = SimpleNamespace(
        status_url="http://[fd00:a::1]:8000/tandem",
        console_url="http://[fd00:a::1]:8080/console",
        dashboard_url="",
    )
    print_pages(table_console(stderr=True), service)
    assert capsys.readouterr().err.splitlines() == [
        "status page: http://[fd00:a::1]:8000/tandem",
        "console: http://[fd00:a::1]:8080/console",
    ]


def test_a_pipe_gets_each_worker_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "decode-" + "x" * 200
    *_, header, row = printed(monkeypatch, worker(name, {}))
    assert header.split()[:4] == ["pool", "worker", "state", "running"]
    assert row.split() == ["decode", name, "ready", *"33333333", "1", "2"]


def test_workers_that_have_pulled_nothing_have_no_such_table(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lines = printed(monkeypatch, worker("d-0", {}))
    assert not any("pulls from" in line for line in lines)
    assert lines[-1].split()[1] == "d-0"
