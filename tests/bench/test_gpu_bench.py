"""The benchmark of GPUs runs without one, and no part affects the results of the others."""

import json
import os
import shlex
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from triton.runtime.errors import OutOfResources

from tandem.tests.bench.engine.shapes import random_weight
from tandem.tests.bench.engine.steps import BenchRunner
from tandem.tests.bench.gpu import attention, fuzz, kv, sampler, speed, tree
from tandem.tests.bench.gpu.bench import Bench
from tandem.tests.bench.gpu.driver import PRELOADED, Run, as_text, run_parts
from tandem.tests.bench.gpu.parts import PARTS, Part, find_parts
from tandem.tests.paths import ROOT
from tandem.tests.waits import WAIT
from tandem.tests.workers.engine.fake import FakeKv
from tandem.tests.workers.transfer.played import LAYOUT
from tandem.workers.engine.plan import StepPlan
from tandem.workers.model.module import WeightSlice
from tandem.workers.model.sampling.sampler import Sampler
from tandem.workers.tp.process_group import TpGroup
from tandem.workers.transfer.connector import TransferContext
from tandem.workers.transfer.registry import capabilities

CALLS = {"facts": "imports of worker modules", "serve": "the prefill worker is killed"}


def finish(bench: Bench) -> None:
    bench.row("finished", pid=os.getpid())


def die(bench: Bench) -> None:
    bench.row("before the end", value=1.5)
    os.kill(os.getpid(), signal.SIGKILL)


def hang(bench: Bench) -> None:
    """Starts a process, which must not outlive the part."""
    child = subprocess.Popen(["sleep", "600"])
    bench.row("before the wait", child=child.pid)
    threading.Event().wait()


def fail(bench: Bench) -> None:
    raise RuntimeError("kernel 7 is missing")


def bench_of(folder: Path, device: str) -> Bench:
    return Bench(device=device, shape="tiny", seconds=60, folder=folder, rows=folder / "rows")


def faulty(name: str, seconds: float = 60) -> Part:
    return Part(
        name=name, group="A", seconds=seconds, function=f"tandem.tests.bench.test_gpu_bench:{name}"
    )


def run(out: Path, seconds: float, *parts: Part) -> dict[str, Any]:
    """Returns gpu.json."""
    returned = run_parts(Run(device="cpu", shape="tiny", seconds=seconds, out=out), parts)
    written: dict[str, Any] = json.loads((out / "gpu.json").read_text())
    assert written == returned
    return written


def test_parts_that_die_hang_or_fail_lose_only_their_own_results(tmp_path: Path) -> None:
    lost = Part(name="lost", group="A", seconds=60, function="tandem.tests.bench.nowhere:measure")
    found = run(
        tmp_path, 300, faulty("die"), faulty("hang", 8), faulty("fail"), lost, faulty("finish")
    )
    parts = found["parts"]
    assert {name: part["status"] for name, part in parts.items()} == {
        "die": "failed: signal 9",
        "hang": "cut off after 8 s",
        "fail": "failed: RuntimeError: kernel 7 is missing",
        "lost": "failed: ModuleNotFoundError: No module named 'tandem.tests.bench.nowhere'",
        "finish": "ok",
    }
    assert parts["die"]["rows"] == [{"name": "before the end", "value": 1.5}]
    (waiting,) = parts["hang"]["rows"]
    assert not psutil.pid_exists(waiting["child"]) or (
        psutil.Process(waiting["child"]).status() == psutil.STATUS_ZOMBIE
    )
    assert parts["finish"]["rows"][0]["name"] == "finished"
    assert "before the end" in as_text(found)


def test_the_process_that_is_forked_has_not_asked_for_a_gpu() -> None:
    script = f"""
import importlib, torch
def asked(*args): raise SystemExit("a GPU was asked for")
torch.cuda.is_available = torch.cuda.init = torch.cuda.device_count = asked
for name in {PRELOADED}: importlib.import_module(name)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_part_without_time_is_not_started(tmp_path: Path) -> None:
    found = run(tmp_path, 0, faulty("finish"))
    assert found["parts"]["finish"] == {"status": "not started: 0 s are over"}


def test_every_part_runs_on_a_cpu(tmp_path: Path) -> None:
    """With --device cpu and the tiny shape; what needs a GPU says so."""
    command = [sys.executable, "-m", "tandem.tests.bench.gpu", "--device", "cpu", "--shape", "tiny"]
    done = subprocess.run(
        [*command, "--out", str(tmp_path)], capture_output=True, text=True, timeout=850
    )
    found = json.loads((tmp_path / "gpu.json").read_text())
    statuses = {name: part["status"] for name, part in found["parts"].items()}
    assert statuses == dict.fromkeys((part.name for part in PARTS), "ok"), done.stdout
    assert done.returncode == 0
    for name, part in found["parts"].items():
        measured = [row for row in part["rows"] if "note" not in row]
        assert measured or name == "sanitize", name
        assert all("seconds" in part and row["name"] in done.stdout for row in part["rows"])
    notes = {
        row["note"] for part in found["parts"].values() for row in part["rows"] if "note" in row
    }
    assert "not measured: needs a GPU" in notes
    for name, row_name in CALLS.items():
        assert row_name in {row["name"] for row in found["parts"][name]["rows"]}
    assert (tmp_path / "gpu.txt").read_text() == done.stdout
    files = {path.name for path in tmp_path.iterdir()}
    assert files == {"gpu.json", "gpu.txt", "logs.tar.gz"}, "a rented machine returns few files"


def test_models_of_all_devices_have_the_same_weights() -> None:
    """A device that has no generator of its own gets them too."""
    part = WeightSlice("model.layers.0.mlp.up_proj.weight", (96, 64), (slice(3, 9),))
    target, expected = torch.empty(6, 64), torch.empty(6, 64)
    fuzz.read_weight(part, target)
    random_weight(part, expected)
    assert torch.equal(target, expected)
    fuzz.read_weight(part, torch.empty(6, 64, device="meta"))


def test_a_kernel_that_needs_more_than_the_gpu_has_is_not_supported(tmp_path: Path) -> None:
    def launch() -> None:
        raise OutOfResources(300_000, 232_448, "shared memory")

    bench = bench_of(tmp_path, "cpu")
    bench.attempt("a large tile", launch)
    assert "not supported here: out of resource: shared memory" in bench.rows.read_text()
    with pytest.raises(OutOfResources):
        bench.time("a large tile", launch)


def test_steps_of_a_gpu_without_graphs_fail(tmp_path: Path) -> None:
    class Runner:
        def __init__(self, replays: int) -> None:
            self.num_graph_replays = lambda: replays

    eager: Any = Runner(0)
    replayed: Any = Runner(1)
    bench_of(tmp_path, "cpu").check_graphs(eager)
    gpu = bench_of(tmp_path, "cuda")
    gpu.check_graphs(replayed)
    with pytest.raises(RuntimeError, match="no step ran as a CUDA graph"):
        gpu.check_graphs(eager)


def test_the_transports_of_gpus_take_ranks_on_gpus() -> None:
    context = TransferContext(
        kv=FakeKv(1, 16, LAYOUT), transports=kv.DEVICE_TRANSPORTS, device="cuda:0"
    )
    assert tuple(capabilities(context)) == kv.DEVICE_TRANSPORTS


def refuse(*arguments: object, **options: object) -> None:
    raise RuntimeError("kernel 7 is missing")


def test_a_decode_that_fails_beside_reads_fails_the_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(BenchRunner, "decode", refuse)
    with pytest.raises(RuntimeError, match="kernel 7 is missing"):
        kv._reads_and_writes(bench_of(tmp_path, "cpu"))


def test_a_wrong_sum_fails_the_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TpGroup, "all_reduce", lambda group, x: x + 1)
    with pytest.raises(RuntimeError, match=r"the sum is 16\.0, expected 8\.0"):
        kv._lonely_group(bench_of(tmp_path, "cpu"))


def test_a_sampler_that_fails_fails_the_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Sampler, "__call__", refuse)
    with pytest.raises(RuntimeError, match="kernel 7 is missing"):
        sampler.measure(bench_of(tmp_path, "cpu"))


def test_the_busy_thread_ends_with_a_step_that_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = bench_of(tmp_path, "cpu")
    runner = bench.load(64).runner
    before = set(threading.enumerate())
    busy: set[threading.Thread] = set()
    launch = runner.launch

    def fail_beside(plan: StepPlan) -> Any:
        busy.update(set(threading.enumerate()) - before)
        return refuse() if busy else launch(plan)

    monkeypatch.setattr(runner, "launch", fail_beside)
    with pytest.raises(RuntimeError, match="kernel 7 is missing"):
        speed._beside_a_busy_thread(bench, runner, 1, 32)
    (thread,) = busy
    thread.join(WAIT)
    assert not thread.is_alive()


def test_attention_that_differs_from_torch_s_fails_the_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attend = attention.Layer.attend
    monkeypatch.setattr(attention.Layer, "attend", lambda layer: attend(layer) + 1)
    with pytest.raises(RuntimeError, match=r"chunk of 6 in 40: ours differs from torch's by"):
        attention._chunk(bench_of(tmp_path, "cpu"), 6, 40)


def test_parts_are_found_by_group_and_by_name() -> None:
    assert [part.name for part in find_parts("C,kv")] == [
        "kv",
        "serve",
        "fuzz",
        "memory",
        "sanitize",
    ]
    with pytest.raises(ValueError, match="--parts: Z is not one of A, B, C, attention"):
        find_parts("A,Z")


def test_a_tree_that_is_too_large_names_its_largest_file(tmp_path: Path) -> None:
    (tmp_path / "small").write_bytes(bytes(10))
    (tmp_path / ".whl").mkdir()
    (tmp_path / ".whl" / "large.whl").write_bytes(bytes(90))
    assert tree.check_size(tmp_path, 100) == 100
    with pytest.raises(tree.TreeTooLarge, match=r"has 100 bytes, the maximum is 99; .*large\.whl"):
        tree.check_size(tmp_path, 99)


def test_a_tree_takes_the_versions_of_constraints() -> None:
    constraints = (ROOT / "constraints.txt").read_text()
    packages = tree.pinned(tree.WHEELS, constraints)
    assert len(packages) == len(tree.WHEELS)
    assert set(packages) <= set(constraints.splitlines())
    command = tree.download_command(packages, Path("there"))
    assert command[command.index("--dest") + 1] == "there"
    with pytest.raises(KeyError):
        tree.pinned(["not-a-package"], constraints)


def test_the_command_of_a_tree_runs_the_bench_of_its_own_files(tmp_path: Path) -> None:
    """The real command, in a copy of the repository, with other places and without the packages."""
    folder = tmp_path / "copy"
    tree.copy_repository(folder)
    site, link = tmp_path / "site", tmp_path / "tree"
    command = tree.run_command("python3 -m tandem.tests.bench.gpu --list")
    install, _, rest = command.partition(" && ")
    words = shlex.split(install)
    assert words[:4] == ["python3", "-m", "pip", "install"]
    assert {"--no-index", "--no-deps", "--target"} <= set(words)
    rest = rest.replace("/tmp/site", str(site)).replace("/tmp/tree", str(link))
    rest = rest.replace("python3", f"{sys.executable} -P")
    script = f"{rest} && {sys.executable} -c 'import tandem; print(tandem.__file__)'"
    done = subprocess.run(["bash", "-c", script], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    *listed, origin = done.stdout.splitlines()
    assert listed == [f"{part.group} {part.name} {part.seconds:.0f}" for part in PARTS]
    assert origin == str(link / "tandem" / "__init__.py")
