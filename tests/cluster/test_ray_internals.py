"""Tests that one module alone uses private parts of Ray, and that the installed Ray has them."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tandem.cluster.serve import ray_internals
from tandem.proto.errors import Unavailable
from tandem.tests.source import Module, imported_names, package_modules

GUARDED = "tandem.cluster.serve.ray_internals"

CALLS = """
import os
import signal
import subprocess
import threading
import time
from contextlib import suppress

import psutil

from tandem.cluster.serve.environment import prepare_ray_environment

prepare_ray_environment(None)

from ray import serve

from tandem.cluster.config import load_config
from tandem.cluster.serve.ray_internals import begin_delete, serve_http_address
from tandem.cluster.serve.ray_session import _processes_of, local_ray
from tandem.proto.addresses import free_port


class App:
    pass


def titles(processes):
    found = set()
    for process in processes:
        with suppress(psutil.Error):
            found.add(process.name()[:15])  # all that the kernel keeps
    return found


signal.signal(signal.SIGTERM, lambda signum, frame: received.append(signum))
received = []
with local_ray(load_config(None, {"model": "m"})) as wait_for_ray:
    processes = wait_for_ray()
    assert sorted(each.name() for each in processes) == ["gcs_server", "raylet"]
    for process in processes:
        process.send_signal(signal.SIGHUP)  # as a terminal that closes; Serve starts below
    os.kill(os.getpid(), signal.SIGTERM)
    assert received == [signal.SIGTERM]
    assert len(psutil.Process().children()) == 2  # no log monitor, no autoscaler, no dashboard
    port = free_port("127.0.0.1")
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    assert serve_http_address() == ("127.0.0.1", port)
    serve.run(serve.deployment(App).bind(), name="app", route_prefix="/app")
    assert serve.status().applications["app"].status == "RUNNING"
    sleep, slept = time.sleep, []

    def recorded(seconds):
        if threading.current_thread() is threading.main_thread():
            slept.append(seconds)
        sleep(seconds)

    time.sleep = recorded  # with it, Serve's own call waits until the application is gone
    begin_delete("app")
    time.sleep = sleep
    assert not slept
    began = time.monotonic()
    while "app" in serve.status().applications:
        assert time.monotonic() - began < 60
        time.sleep(0.1)
    folder = processes[0].environ()["TANDEM_RAY_FOLDER"]
    # Two agents of Ray, two processes of Serve, and the servers.
    expected = {"ray::DashboardA", "ray::RuntimeEnv", "ray::ServeContr", "ray::ProxyActor"}
    while not expected | {"gcs_server", "raylet"} <= titles(_processes_of(folder)):
        assert time.monotonic() - began < 60
        time.sleep(0.1)
    family = _processes_of(folder)
    log = os.path.join(folder, "session_latest", "logs", "raylet.out")
    # It ends with this process; a service must not end it.
    reader = subprocess.Popen(
        ["tail", "-F", f"--pid={os.getpid()}", log],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
assert reader.poll() is None
_, alive = psutil.wait_procs(family, timeout=60)
assert not alive, alive
"""


def private_uses(module: Module) -> Iterator[str]:
    """Yields the private names of Ray that a module imports, reads or passes as keywords."""
    yield from filter(is_private, imported_names(module))
    for node in module.nodes:
        if isinstance(node, ast.Attribute) and is_private(name := dotted(node)):
            yield name
        if isinstance(node, ast.Call) and is_of_ray(name := dotted(node.func)):
            yield from (f"{name}({each.arg}=)" for each in node.keywords if is_private_arg(each))
        if (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and is_private(node.value)
        ):
            yield node.value


def dotted(node: ast.expr) -> str:
    """Returns a name with its attributes, `a.b.c`; "" for attributes of any other expression."""
    if isinstance(node, ast.Attribute):
        return f"{base}.{node.attr}" if (base := dotted(node.value)) else ""
    return node.id if isinstance(node, ast.Name) else ""


def is_of_ray(name: str) -> bool:
    return name.split(".")[0] in ("ray", "serve")


def is_private(name: str) -> bool:
    return is_of_ray(name) and "._" in name and "\n" not in name


def is_private_arg(keyword: ast.keyword) -> bool:
    return keyword.arg is not None and keyword.arg.startswith("_")


def test_one_module_alone_uses_private_parts_of_ray() -> None:
    # A module that does not name them is not parsed, which takes a second for all.
    named = [each for each in package_modules() if re.search(r"\b(ray|serve)\b", each.source)]
    found = {module.name: list(private_uses(module)) for module in named}
    assert {name for name, uses in found.items() if uses} == {GUARDED}


@pytest.mark.parametrize(
    "source",
    [
        "from ray.serve._private import client",
        "from ray.serve.context import _get_global_client",
        "import ray._raylet",
        "import ray\nray._private.worker._global_node",
        "from ray import serve\nserve.delete('x', _blocking=False)",
        "import_module('ray._private.worker')",
    ],
)
def test_private_uses_are_found(source: str) -> None:
    assert list(private_uses(Module(name="tandem.cluster.x", source=source)))


def test_a_missing_part_is_named_with_the_version_of_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("ray.serve.context._get_global_client")
    with pytest.raises(
        Unavailable, match=r"^Ray [\d.]+ lacks ray.serve.context._get_global_client"
    ):
        ray_internals.serve_http_address()
    monkeypatch.delattr("ray._private.node.Node.start_monitor")
    with (
        pytest.raises(Unavailable, match=r"^Ray [\d.]+ lacks `start_monitor` of its class Node"),
        ray_internals.without_idle_processes(dashboard=True),
    ):
        pass
    monkeypatch.delattr("ray._private.services.start_ray_process")
    with (
        pytest.raises(Unavailable, match=r"^Ray [\d.]+ lacks `start_ray_process` of its module"),
        ray_internals.with_variables({}),
    ):
        pass
    monkeypatch.setattr("ray.serve.delete", lambda name: None)
    with pytest.raises(Unavailable, match=r"^Ray [\d.]+ lacks the parameter `_blocking`"):
        ray_internals.begin_delete("tandem")


@pytest.mark.io
def test_the_installed_ray_has_every_private_part() -> None:
    done = subprocess.run(
        [sys.executable, "-c", CALLS], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
