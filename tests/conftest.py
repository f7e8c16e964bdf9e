"""Settings that every test runs under, and the tiers of tests.

`make quick` (`pytest --quick`) runs the tests that need no network, no process and no model. Those
that do are named by SHARING_PATHS and IN_TURN_PATHS, or marked `io` one by one. Any other test that
opens a connection or starts a process fails, and so does `--quick` when anything imports torch, so
a new test belongs to the quick tier unless it must not. `--quick` leaves out the tests marked
`slow`, and tests of properties that leave the number of examples to Hypothesis's profile try fewer.

`make test` (tests/suite.py) runs all but the tests of IN_TURN_PATHS in three processes side by side
(`pytest --sharing -n 3`; a quarter of their time they wait), and at the same time the tests of
IN_TURN_PATHS one by one (`pytest --in-turn`). `pytest` without an option runs all one by one.
`make soak`, `make matrix` and `make pods` run the tests marked `soak`, `matrix` and `pods`, which
nothing else does.
"""

import faulthandler
import functools
import gc
import os
import signal
import sys
import threading
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any, Final

import hypothesis
import pytest

TESTS: Final = Path(__file__).parent
SHARING_PATHS: Final = (
    "bench",
    "cluster/bench/test_bench.py",
    "cluster/cli/test_bad_commands.py",
    "cluster/cli/test_check.py",
    "cluster/cli/test_cli.py",
    "cluster/cli/test_cli_client.py",
    "cluster/cli/test_drain.py",
    "cluster/cli/test_reset_cache.py",
    "cluster/cli/test_role.py",
    "cluster/sim/test_sleeping.py",
    "cluster/test_arithmetic.py",
    "router/dispatch/test_role_switch.py",
    "cluster/cli/test_plan.py",
    "cluster/cli/test_status_page.py",
    "cluster/eval",
    "cluster/explain",
    "cluster/local/test_batch_runs.py",
    "cluster/local/test_llm.py",
    "cluster/local/test_local_ranks.py",
    "cluster/planner/test_measure.py",
    "cluster/planner/test_service.py",
    "cluster/scaling/test_policy.py",
    "cluster/store",
    "cluster/test_app.py",
    "cluster/test_chat_template.py",
    "cluster/test_counts.py",
    "cluster/test_metrics.py",
    "cluster/test_ports.py",
    "cluster/test_ranks.py",
    "cluster/test_redeploy.py",
    "cluster/test_runtime.py",
    "cluster/test_service_url.py",
    "cluster/test_status.py",
    "cluster/test_usage.py",
    "e2e/test_generation.py",
    "e2e/test_parity.py",
    "fuzz/test_fuzz_plans.py",
    "k8s/test_copies.py",
    "k8s/test_manifests.py",
    "matrix",
    "proto/test_new_parameter.py",
    "router/api",
    "router/client",
    "router/dispatch/test_cancel.py",
    "router/dispatch/test_dispatcher.py",
    "router/dispatch/test_drain.py",
    "router/dispatch/test_faults.py",
    "router/dispatch/test_handoff.py",
    "router/dispatch/test_not_finite.py",
    "router/frontend/test_child_process.py",
    "router/frontend/test_constraint.py",
    "router/frontend/test_interpreter_lock.py",
    "router/frontend/test_spelled_tokens.py",
    "router/frontend/test_template.py",
    "router/frontend/test_tokenizer.py",
    "router/scheduling/test_simulation.py",
    "workers/engine/test_beam.py",
    "workers/model",
    "workers/test_adapters.py",
    "workers/test_cache_reports.py",
    "workers/test_cache_reset.py",
    "workers/test_choices.py",
    "workers/test_damaged_messages.py",
    "workers/test_disk_tier.py",
    "workers/test_drain.py",
    "workers/test_kv_handle.py",
    "workers/test_malloc.py",
    "workers/test_peer_tls.py",
    "workers/test_prefix_transfer.py",
    "workers/test_session.py",
    "workers/test_speculative.py",
    "workers/test_stats.py",
    "workers/test_strangers.py",
    "workers/test_suspend.py",
    "workers/test_worker.py",
    "workers/tp",
    "workers/transfer/test_connections.py",
    "workers/transfer/test_gpu_transfer.py",
    "workers/transfer/test_nixl.py",
    "workers/transfer/test_p2p_group.py",
    "workers/transfer/test_receiver.py",
    "workers/transfer/test_second_fetch.py",
    "workers/transfer/test_sender.py",
    "workers/transfer/test_shard_writer.py",
    "workers/transfer/test_shared_memory.py",
    "workers/transfer/test_states.py",
    "workers/transfer/test_toy_transport.py",
    "workers/transfer/test_unequal.py",
    "test_examples.py",
    "test_extending.py",
    "test_suite.py",
    "test_wheel.py",
)
"""Files and folders of tests that may use network, processes, models or many seconds, but share the
machine with other tests.
"""

IN_TURN_PATHS: Final = (
    "cluster/cli/demo/test_demo.py",
    "cluster/cli/test_serve.py",
    "e2e/test_cluster.py",
    "e2e/test_keys.py",
    "e2e/test_node_loss.py",
    "e2e/test_readme.py",
    "e2e/test_redeploy.py",
    "e2e/test_routers.py",
    "e2e/test_tensor_parallel.py",
    "gpu",
    "k8s/test_pods.py",
    "k8s/test_serve_app.py",
    "soak",
)
"""Those that run one by one, in one process, at the same time as the others: whole services on Ray,
many of them on one cluster.
"""

IO_PATHS: Final = SHARING_PATHS + IN_TURN_PATHS
"""Those that are not in the quick tier."""

HANG_SECONDS: Final = 60.0
"""A test's process ends this long after the test's timeout, or after its last test."""

_IO_EVENTS: Final = {
    "socket.bind",
    "socket.connect",
    "subprocess.Popen",
    "os.fork",
    "os.posix_spawn",
    "os.system",
}
"""Audit events of the interpreter that a quick test must not cause."""

hypothesis.settings.register_profile("every", deadline=None)
hypothesis.settings.register_profile("quick", deadline=None, max_examples=25)
hypothesis.settings.register_profile("fuzz", deadline=None, max_examples=2_000)
hypothesis.settings.register_profile("thorough", deadline=None, max_examples=10_000)

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
# Of the clusters that tests start by hand; cluster/serve/environment.py has the reasons.
os.environ.setdefault("RAY_AUTH_MODE", "disabled")
os.environ.setdefault("RAY_SERVE_CONTROL_LOOP_INTERVAL_S", "0.3")
os.environ.setdefault("RAY_prestart_worker_first_driver", "0")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
# OpenMP threads that spin for long while another engine of the process wants the core cost a factor
# of 5 and more; threads that sleep at once cost one of 2.
os.environ.setdefault("GOMP_SPINCOUNT", "3000")
# A shell's background jobs ignore SIGINT, and so would the commands that tests interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)
if "PYTEST_XDIST_WORKER" in os.environ:  # the other cores have workers of their own
    os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the folder of a tiny random model, which no test changes."""
    from tandem.tests.tiny import make_tiny_model  # imports torch

    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def split_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the folder of a tiny random model that four ranks can split; no test changes it."""
    from tandem.tests.tiny import make_tiny_model  # imports torch

    folder = tmp_path_factory.mktemp("models") / "split"
    return make_tiny_model(folder, num_attention_heads=8, num_key_value_heads=2, hidden_size=128)


@pytest.fixture(scope="session", autouse=True)
def _one_tls_context() -> Iterator[None]:
    """Has all clients of httpx share what it reads for TLS: a hundred certificates of CAs."""
    transports = sys.modules.get("httpx._transports.default")
    with pytest.MonkeyPatch.context() as patch:
        if transports is not None:
            once = functools.cache(transports.create_ssl_context)
            patch.setattr(transports, "create_ssl_context", once)
        yield


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--quick", action="store_true", help="only tests without network, processes and models"
    )
    parser.addoption(
        "--sharing", action="store_true", help="only tests that several processes may run at once"
    )
    parser.addoption("--in-turn", action="store_true", help="only tests that run one by one")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(IoGuard(forbid_torch=config.getoption("--quick")))
    if config.pluginmanager.hasplugin("timeout"):  # a bare GPU machine may lack pytest-timeout
        config.pluginmanager.register(HangGuard(float(config.getini("timeout"))))
    # Modules in C tell at the exit what of them is left. This runs last, after pytest's collections
    # of garbage, which would take seconds for what was imported.
    config.add_cleanup(gc.unfreeze)
    profile = "quick" if config.getoption("--quick") else "every"
    hypothesis.settings.load_profile(config.getoption("--hypothesis-profile") or profile)
    if config.getoption("--quick") or config.getoption("numprocesses", None):
        return  # a process that runs no test itself starts those that do
    import torch  # a second that the quick tier does not pay

    if not torch.cuda.is_available():
        os.environ.setdefault(
            "TRITON_INTERPRET", "1"
        )  # the kernels of the GPU path run here, too: slowly


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, Any, Any]:
    """Imports without garbage collection, which then looks at none of it again."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    ignored = [
        config.getoption("--quick") and is_below(collection_path, IO_PATHS),
        config.getoption("--sharing") and is_below(collection_path, IN_TURN_PATHS),
        config.getoption("--in-turn")
        and collection_path.is_file()
        and not is_below(collection_path, IN_TURN_PATHS),
    ]
    return True if any(ignored) else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--quick"):
        left_out = [item for item in items if any(map(item.get_closest_marker, ("io", "slow")))]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]
        if "torch" in sys.modules:
            raise pytest.UsageError("a file of the quick tier imports torch; see tests/conftest.py")


@functools.cache  # asked for every test
def is_below(path: Path, entries: tuple[str, ...]) -> bool:
    """Returns whether `entries`, paths in the folder of the tests, name the file or folder, or a
    folder above it.
    """
    relative = path.relative_to(TESTS) if path.is_relative_to(TESTS) else path
    return any(relative.is_relative_to(entry) for entry in entries)


class HangGuard:
    """Ends the process, with the stack of every thread on stderr, if a test or the exit hangs.

    pytest-timeout raises an exception in the test, which does not end a test that is in C code, nor
    one whose fixtures or event loop then wait for ever.
    """

    def __init__(self, timeout: float) -> None:
        """Takes the timeout of tests without a marker of their own, in seconds."""
        self._timeout = timeout
        self._stderr = os.dup(2)  # as it is now: pytest captures it during tests

    def _arm(self, seconds: float) -> None:
        faulthandler.dump_traceback_later(seconds, exit=True, file=self._stderr)

    def _arm_for(self, item: pytest.Item) -> None:
        marker = item.get_closest_marker("timeout")
        timeout = float(marker.args[0]) if marker else self._timeout
        self._arm(timeout + HANG_SECONDS)

    # Armed for each phase anew, because pytest disarms it when a phase has failed.
    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        self._arm_for(item)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_call(self, item: pytest.Item) -> None:
        self._arm_for(item)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> None:
        self._arm_for(item)

    def pytest_runtest_logfinish(self) -> None:
        faulthandler.cancel_dump_traceback_later()

    def pytest_unconfigure(self) -> None:
        if "PYTEST_XDIST_WORKER" not in os.environ:  # xdist ends its processes when all are done
            self._arm(HANG_SECONDS)


class IoGuard:
    """Fails a test outside the I/O tier that opens a connection, starts a process or, if
    `forbid_torch`, imports torch.

    Sees what Python itself does in the main thread: threads there may belong to the services of
    other tests.
    """

    def __init__(self, *, forbid_torch: bool) -> None:
        self._forbid_torch = forbid_torch
        self._guarded: str | None = None  # the test under way, if it must do no I/O
        sys.addaudithook(self._audit)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, Any, Any]:
        allowed = is_below(item.path, IO_PATHS) or item.get_closest_marker("io")
        self._guarded = None if allowed else item.nodeid
        try:
            return (yield)
        finally:
            self._guarded = None

    def _audit(self, event: str, args: tuple[Any, ...]) -> None:
        if self._guarded is None:
            return
        is_io = event in _IO_EVENTS or (
            self._forbid_torch and event == "import" and args[0] == "torch"
        )
        if is_io and threading.current_thread() is threading.main_thread():
            pytest.fail(
                f"{self._guarded} is in the quick tier, but causes {event}{args!r}; see "
                "tests/conftest.py"
            )
