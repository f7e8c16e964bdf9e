"""Settings that every test runs under, and the tiers of tests.

`make quick` (`pytest --quick`) runs the tests that need no network, no process and no model. Those that do are named by
IO_PATHS, or marked `io` one by one; any other test that opens a connection, starts a process or imports torch under
`--quick` fails, so a new test belongs to the quick tier unless it must not. `make soak` runs the tests marked `soak`,
which nothing else does.
"""

import os
import sys
import threading
from collections.abc import Generator
from pathlib import Path
from typing import Any, Final

import hypothesis
import pytest

TESTS: Final = Path(__file__).parent
IO_PATHS: Final = (
    *("e2e", "gpu", "matrix", "test_examples.py", "test_extending.py", "proto/test_new_parameter.py"),
    *("cluster/bench/test_bench.py", "cluster/cli/test_cli.py", "cluster/cli/test_cli_client.py"),
    *("cluster/cli/test_plan.py", "cluster/eval", "cluster/store", "cluster/test_app.py", "cluster/test_runtime.py"),
    *("router/api", "router/client", "router/dispatch/test_cancel.py", "router/dispatch/test_dispatcher.py"),
    *("router/dispatch/test_faults.py", "router/dispatch/test_rehand.py", "router/frontend/test_template.py"),
    "router/frontend/test_tokenizer.py",
    *("workers/bench", "workers/model", "workers/tp"),
    *(f"workers/test_{name}.py" for name in ("cache_reports", "choices", "kv_handle", "session", "worker")),
    *(f"workers/transfer/test_{name}.py" for name in ("connections", "nixl", "pair")),
    *(f"workers/transfer/test_{name}.py" for name in ("receiver", "second_fetch", "sender")),
    *(f"workers/transfer/test_{name}.py" for name in ("shared_memory", "toy_transport", "unequal")),
)
"""Files and folders of tests whose tests may use network, processes and models."""

_IO_EVENTS: Final = {"socket.bind", "socket.connect", "subprocess.Popen", "os.fork", "os.posix_spawn", "os.system"}
"""Audit events of the interpreter that a quick test must not cause."""

hypothesis.settings.register_profile("tandem", deadline=None)
hypothesis.settings.load_profile("tandem")

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_AUTH_MODE", "disabled")  # of the clusters that tests start by hand
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
# OpenMP threads that spin for long while another engine of the process wants the core cost a factor of 5 and more;
# threads that sleep at once cost one of 2.
os.environ.setdefault("GOMP_SPINCOUNT", "3000")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--quick", action="store_true", help="only tests without network, processes and models")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(IoGuard(forbid_torch=config.getoption("--quick")))
    if config.getoption("--quick"):
        return
    import torch  # a second that the quick tier does not pay

    if not torch.cuda.is_available():
        os.environ.setdefault("TRITON_INTERPRET", "1")  # the kernels of the GPU path run here, too: slowly


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    return True if config.getoption("--quick") and in_io_tier(collection_path) else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--quick"):
        config.hook.pytest_deselected(items=[item for item in items if item.get_closest_marker("io")])
        items[:] = [item for item in items if not item.get_closest_marker("io")]


def in_io_tier(path: Path) -> bool:
    """Returns whether IO_PATHS names the file or folder, or a folder above it."""
    relative = path.relative_to(TESTS) if path.is_relative_to(TESTS) else path
    return any(relative.is_relative_to(entry) for entry in IO_PATHS)


class IoGuard:
    """Fails a test outside the I/O tier that opens a connection, starts a process or, if `forbid_torch`, imports torch.

    Sees what Python itself does in the main thread: threads there may belong to the services of other tests."""

    def __init__(self, *, forbid_torch: bool) -> None:
        self._forbid_torch = forbid_torch
        self._guarded: str | None = None  # the test under way, if it must do no I/O
        sys.addaudithook(self._audit)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, Any, Any]:
        allowed = in_io_tier(item.path) or item.get_closest_marker("io")
        self._guarded = None if allowed else item.nodeid
        try:
            return (yield)
        finally:
            self._guarded = None

    def _audit(self, event: str, args: tuple[Any, ...]) -> None:
        if self._guarded is None:
            return
        is_io = event in _IO_EVENTS or (self._forbid_torch and event == "import" and args[0] == "torch")
        if is_io and threading.current_thread() is threading.main_thread():
            pytest.fail(f"{self._guarded} is in the quick tier, but causes {event}{args!r}; see tests/conftest.py")
