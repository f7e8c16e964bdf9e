"""Runs parts one after the other, each in a process with a deadline, and keeps their results.

A part that fails, hangs or dies loses its own remaining results only. The processes are forked from
one that has imported torch and has not touched the GPU, so that each part starts at once.
"""

import importlib
import json
import multiprocessing
import os
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any, Final

from tandem.tests.bench.gpu.parts import Part

PRELOADED: Final = ("torch", "tandem.tests.bench.gpu.bench", "tandem.tests.workers.model.helpers")
_END_SECONDS: Final = 10.0  # for a killed process to end

Results = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Run:
    """Describes a run of the benchmark."""

    device: str
    shape: str
    seconds: float  # of all parts together
    out: Path  # the folder of gpu.json and of the archive of logs

    @property
    def logs(self) -> Path:
        """The folder of the logs while parts run."""
        return self.out / "logs"


def run_parts(run: Run, parts: Sequence[Part]) -> Results:
    """Runs the parts; writes gpu.json before the first and after each, and returns its content.

    Packs the logs of all parts into logs.tar.gz at the end.
    """
    if run.device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"  # the parts inherit it
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # cuInit in the fork server would break forks
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOADED))
    run.logs.mkdir(parents=True, exist_ok=True)
    results: Results = {
        "device": run.device,
        "shape": run.shape,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "parts": {part.name: {"status": "not started"} for part in parts},
    }
    end = time.monotonic() + run.seconds
    _write(run.out, results)
    for part in parts:
        left = end - time.monotonic()
        if left <= 0:
            results["parts"][part.name]["status"] = f"not started: {run.seconds:.0f} s are over"
        else:
            print(f"gpu bench: {part.group} {part.name}", file=sys.stderr, flush=True)
            results["parts"][part.name] = _run(context, run, part, min(left, part.seconds))
        _write(run.out, results)
    shutil.make_archive(str(run.logs), "gztar", run.out, run.logs.name)
    shutil.rmtree(run.logs)
    return results


def _run(context: ForkServerContext, run: Run, part: Part, seconds: float) -> Results:
    rows = run.logs / f"{part.name}.jsonl"
    log = run.logs / f"{part.name}.log"
    for path in (rows, log):
        path.write_text("")
    given = (part.function, run.device, run.shape, seconds, run.logs, rows, log)
    began = time.monotonic()
    process = context.Process(target=_child, args=given)
    process.start()
    process.join(seconds)
    status = "ok"
    if process.is_alive():
        status = f"cut off after {seconds:.0f} s"
    elif process.exitcode:
        words = log.read_text(errors="replace").strip().splitlines()
        cause = f"signal {-process.exitcode}" if process.exitcode < 0 else (words or ["?"])[-1]
        status = f"failed: {cause}"
    _end(process)
    return {
        "status": status,
        "seconds": round(time.monotonic() - began, 1),
        "rows": [
            json.loads(line)
            for line in rows.read_text().splitlines(keepends=True)
            if line.endswith("\n")  # else the part was cut off while it wrote
        ],
    }


def _end(process: Any) -> None:
    """Kills a part's process and those that it started, which are a session of their own."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.kill()
    process.join(_END_SECONDS)


def _child(
    function: str, device: str, shape: str, seconds: float, folder: Path, rows: Path, log: Path
) -> None:
    os.setsid()
    with log.open("a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    from tandem.tests.bench.gpu.bench import Bench  # imports torch, which the driver does not
    from tandem.workers.model.device import enter_device

    bench = Bench(device=device, shape=shape, seconds=seconds, folder=folder, rows=rows)
    enter_device(device)
    module, _, name = function.partition(":")
    getattr(importlib.import_module(module), name)(bench)


def _write(folder: Path, results: Results) -> None:
    whole = folder / "gpu.json.new"
    whole.write_text(json.dumps(results, indent=1) + "\n")
    whole.replace(folder / "gpu.json")


def as_text(results: Results) -> str:
    """Returns a table of all results, a line each."""
    lines = [f"{results['device']}, {results['shape']}, {results['date']}"]
    for name, part in results["parts"].items():
        lines.append(f"\n{name}: {part['status']}, {part.get('seconds', 0)} s")
        for row in part.get("rows", []):
            figures = "  ".join(f"{key} {value}" for key, value in row.items() if key != "name")
            lines.append(f"  {row['name']:<44} {figures}")
    return "\n".join(lines)
