"""Checks that the code runs on this device at all: versions, imports, steps, tests."""

import importlib
import pkgutil
import platform
import shutil
import subprocess
import sys
from contextlib import nullcontext
from importlib.metadata import version
from typing import Final

import torch

from tandem import workers
from tandem.tests.bench.gpu.bench import NEEDS_GPU, Bench, Stopwatch
from tandem.tests.paths import ROOT
from tandem.tests.suite import run_pytest
from tandem.tests.workers.model.helpers import Driver, prompt
from tandem.workers.engine.plan import PENDING_TOKEN, SequenceStep, StepPlan
from tandem.workers.model.costs.measure import matmul_rate, measure_memory
from tandem.workers.model.graphs import no_waiting
from tandem.workers.model.runner import ModelRunner

_PACKAGES: Final = ("torch", "triton", "transformers", "numpy", "grpcio", "protobuf", "llguidance")
_STEPS: Final = 50
_WRITE_SECONDS: Final = 15.0  # of a part's time, to end pytest and to write its failures
_KERNEL_TESTS: Final = ROOT / "tests/workers/model/test_gpu_kernels.py"
_SAMPLER_TESTS: Final = ROOT / "tests/workers/model/test_gpu_sampling.py"


def facts(bench: Bench) -> None:
    """Records versions, the device and its rates; fails if a worker module has no import."""
    bench.row("versions", python=platform.python_version(), **{p: version(p) for p in _PACKAGES})
    if bench.is_gpu:
        device = torch.cuda.get_device_properties(bench.torch_device)
        bench.row(
            "device",
            gpu=device.name,
            capability=f"{device.major}.{device.minor}",
            memory_gb=device.total_memory / 1e9,
            multiprocessors=device.multi_processor_count,
            cuda=torch.version.cuda,
        )
    else:
        bench.row("device", note=NEEDS_GPU)
    read, copy = measure_memory(bench.torch_device)
    bench.row("memory", read_gb_per_s=read / 1e9, copy_gb_per_s=copy / 1e9)
    for num_rows in bench.pick((512, 2048, 8192), (16,)):
        rate = matmul_rate(bench.config, torch.bfloat16, bench.torch_device, num_rows)
        bench.row(f"linear maps of a layer, {num_rows} rows", tflops=rate / 1e12)
    modules = [each.name for each in pkgutil.walk_packages(workers.__path__, "tandem.workers.")]
    failed = []
    for name in modules:
        try:
            importlib.import_module(name)
        except ImportError as error:
            failed.append(f"{name}: {error}")
    bench.row("imports of worker modules", modules=len(modules), failed=failed)
    if failed:
        raise RuntimeError(failed[0])


def smoke(bench: Bench) -> None:
    """Loads, warms up and captures; then launches steps that must not wait for the device."""
    for shape in dict.fromkeys(("tiny", bench.shape)):
        clock = Stopwatch()

        def loaded(stage: str, shape: str = shape, clock: Stopwatch = clock) -> None:
            bench.row(f"{shape}: {stage}", seconds=clock.seconds, mib=bench.memory_mib())

        runner = bench.load(64, shape=shape, on_loaded=loaded).runner
        clock = Stopwatch()
        tokens = _launch_steps(bench, runner)
        bench.row(
            f"{shape}: {_STEPS} steps without a wait" if bench.is_gpu else f"{shape}: steps",
            ms=clock.ms / _STEPS,
            graph_replays=runner.num_graph_replays(),
            different_tokens=len(set(tokens)),
            mib=bench.memory_mib(),
        )
        bench.check_graphs(runner)


def _launch_steps(bench: Bench, runner: ModelRunner) -> list[int]:
    """Prefills 30 tokens and decodes; tokens stay on the device until all steps are launched."""
    driver = Driver(runner)
    driver.generate(9, prompt(20), 3)  # anything that is done at first use
    collects = []

    def launch(step: SequenceStep) -> None:
        with no_waiting() if bench.is_gpu else nullcontext():
            collects.append(runner.launch(StepPlan(sequences=(step,), dropped=())))

    launch(driver.step(1, prompt(30), 0))
    for at in range(30, 30 + _STEPS - 1):
        launch(driver.step(1, [PENDING_TOKEN], at))
    return [collect().tokens[0] for collect in collects]


def tests(bench: Bench) -> None:
    """Runs tests/gpu and the tests of the kernels; fails if one of them does."""
    options = bench.pick(
        ("-n", "12", str(ROOT / "tests/gpu"), str(_KERNEL_TESTS), str(_SAMPLER_TESTS)),
        ("-n", "0", str(_KERNEL_TESTS), "-k", "silu_mul or tiles_hold"),
    )
    path = bench.folder / "failed_tests"
    path.unlink(missing_ok=True)
    seconds = max(bench.seconds - _WRITE_SECONDS, 1)
    found = run_pytest((*options, "-q", "-p", "no:cacheprovider"), path, seconds)
    for test, text in found.failures.items():
        bench.row(test, error=text.strip().splitlines()[-1])
    bench.row("pytest", exit_code=found.code, failed=len(found.failures), ended=len(found.ended))
    if found.code:
        raise RuntimeError(f"{len(found.failures)} tests failed, exit code {found.code}")


def sanitize(bench: Bench) -> None:
    """Runs each kernel on tiny shapes under NVIDIA's checks of memory and of races."""
    chosen = "silu_mul or rotate or rms_norm or far_apart or stored_keys or many_splits"
    arguments = ["-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", str(_KERNEL_TESTS)]
    command = [sys.executable, *arguments, "-k", bench.pick(chosen, "silu_mul")]
    tool = shutil.which("compute-sanitizer")
    checks = ("memcheck", "racecheck") if bench.is_gpu and tool else ("none",)
    for check in checks:
        under = [] if check == "none" else [str(tool), "--tool", check, "--error-exitcode", "9"]
        code = subprocess.run([*under, *command], cwd=ROOT).returncode
        note = {} if under else {"note": "not measured: needs a GPU and compute-sanitizer"}
        bench.row(f"kernels under {check}", exit_code=code, **note)
        if code:
            raise RuntimeError(f"{check}: exit code {code}")
