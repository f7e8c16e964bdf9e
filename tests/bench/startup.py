"""Measures how long a service and an LLM take to start: `python -m tandem.tests.bench.startup`.

Each round starts `tandem serve` and an LLM of the same installation, in new processes. With several
installations they take turns, so that all of them meet the same disturbances. On a machine that
other programs share, compare the CPU times.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event, Thread
from typing import Annotated, Final

import psutil
import typer

from tandem.cluster.tables import make_table, table_console

_SAMPLE_SECONDS: Final = 0.05
_READY_SECONDS: Final = 300.0
_END_SECONDS: Final = 30.0
_PROMPT: Final = "The capital of France is"
_ROLES: Final = {
    r"gcs_server": "Ray: GCS server",
    r"raylet/raylet|ray::raylet": "Ray: raylet",
    r"dashboard/agent.py|ray::DashboardAgent": "Ray: agent",
    r"runtime_env/agent|ray::RuntimeEnvAgent": "Ray: agent of runtime environments",
    r"dashboard.py": "Ray: dashboard",
    r"monitor.py": "Ray: monitor",
    r"ServeController|SERVE_CONTROLLER": "Serve: controller",
    r"ProxyActor|SERVE_PROXY": "Serve: proxy",
    r"ray::Directory": "directory",
    r"ray::ServeReplica:[^:]*:Router|#Router#": "router",
    r"ray::ServeReplica:[^:]*:PrefillPool|#PrefillPool#": "prefill worker",
    r"ray::ServeReplica:[^:]*:DecodePool|#DecodePool#": "decode worker",
    r"frontend.child_process": "renderers of chat templates",
    r"bin/tandem serve": "tandem serve",
}
"""What a process is, by a pattern of its command line; the first one that matches counts."""

_OTHERS: Final = "other processes"
_LLM: Final = """
import sys, time
from tandem import LLM, SamplingParams
with LLM(sys.argv[1]) as llm:
    llm.generate([sys.argv[2]], SamplingParams(max_tokens=1, temperature=0), progress=False)
    print(time.time(), time.process_time(), flush=True)
"""

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


@dataclass(slots=True)
class Part:
    """Describes the processes of one role in one start."""

    begin: float  # seconds from the start of the command to the first process
    named: float  # until a process had the name of its role: then it begins its own work
    cpu: float = 0.0  # seconds, of all processes of this role until the service is ready


@dataclass(slots=True)
class Start:
    """Holds the times of one start, in seconds."""

    ready: float = 0.0
    response: float = 0.0  # of the first request, after `ready`
    cpu: float = 0.0  # of all processes until `ready`
    token: float = 0.0  # from the start of a process to the first token of its LLM
    token_cpu: float = 0.0
    parts: dict[str, Part] = field(default_factory=dict)


def role_of(command: str) -> str:
    """Returns the role of a process by its command line; "" if it does not tell."""
    return next((role for known, role in _ROLES.items() if re.search(known, command)), "")


class Sampler:
    """Records the processes below one process, in a thread, until `stop`."""

    def __init__(self, root: psutil.Process, began: float) -> None:
        self._root = root
        self._began = began
        self._roles: dict[int, str] = {}
        self._named: dict[int, float] = {}
        self._begins: dict[int, float] = {}
        self._cpu: dict[int, float] = {}
        self._stopped = Event()
        self._thread = Thread(target=self._run, daemon=True)
        self._thread.start()

    def stop(self) -> dict[str, Part]:
        """Returns what was found, by role."""
        self._stopped.set()
        self._thread.join()
        parts: dict[str, Part] = {}
        for pid, role in self._roles.items():
            part = parts.setdefault(role, Part(self._begins[pid], self._named[pid]))
            part.begin = min(part.begin, self._begins[pid])
            part.named = min(part.named, self._named[pid])
            part.cpu += self._cpu[pid]
        return dict(sorted(parts.items(), key=lambda item: item[1].begin))

    def _run(self) -> None:
        while not self._stopped.wait(_SAMPLE_SECONDS):
            try:
                found = [self._root, *self._root.children(recursive=True)]
            except psutil.Error:
                return
            for process in found:
                try:
                    self._add(process)
                except psutil.Error:
                    continue  # it has ended

    def _add(self, process: psutil.Process) -> None:
        with process.oneshot():
            role = role_of(" ".join(process.cmdline()))
            times = process.cpu_times()
            begin = process.create_time()
        # A new process has the command line of its parent for a moment, so the last role counts.
        known = self._roles.setdefault(process.pid, _OTHERS)
        if role not in ("", known) or process.pid not in self._named:
            self._roles[process.pid] = role or _OTHERS
            self._named[process.pid] = time.time() - self._began
        self._begins.setdefault(process.pid, max(0.0, begin - self._began))
        self._cpu[process.pid] = times.user + times.system


def start_service(tandem: Path, model: str, made: Start) -> None:
    """Starts `tandem serve`, asks it once and stops it; adds the times to `made`."""
    began = time.time()
    command = [str(tandem), "serve", model, "--grpc-port", "0", "--http-port", "0"]
    server = subprocess.Popen(
        [*command, "--name", f"startup-{os.getpid()}"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    sampler = Sampler(psutil.Process(server.pid), began)
    guard = Thread(target=_kill_late, args=(server,), daemon=True)
    guard.start()
    try:
        assert server.stdout is not None
        line = next((each for each in server.stdout if each.startswith("tandem ready")), "")
        made.ready = time.time() - began
        made.parts = sampler.stop()
        made.cpu = sum(part.cpu for part in made.parts.values())
        address = re.search(r"http=([^ ,]+)", line)
        if address is None:
            raise RuntimeError(f"{tandem} serve has ended before it was ready")
        body = json.dumps({"model": model, "prompt": _PROMPT, "max_tokens": 1}).encode()
        request = urllib.request.Request(
            f"http://{address[1]}/v1/completions", body, {"content-type": "application/json"}
        )
        asked = time.time()
        urllib.request.urlopen(request, timeout=_END_SECONDS).read()
        made.response = time.time() - asked
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(_END_SECONDS)


def _kill_late(server: "subprocess.Popen[str]") -> None:
    """Ends a server that runs for too long; the reader of its output then gets the end."""
    try:
        server.wait(_READY_SECONDS)
    except subprocess.TimeoutExpired:
        server.kill()


def start_llm(python: Path, model: str, made: Start) -> None:
    """Makes an LLM in a new process; adds the times to `made`."""
    began = time.time()
    done = subprocess.run(
        [str(python), "-c", _LLM, model, _PROMPT],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        check=True,
        timeout=_READY_SECONDS,
    )
    ended, cpu = map(float, done.stdout.split()[-2:])
    made.token = ended - began
    made.token_cpu = cpu


def print_starts(starts: dict[Path, list[Start]]) -> None:
    """Prints the least times of each installation, and the parts of its quickest start."""
    console = table_console()
    table = make_table(
        "installation",
        "ready, s",
        "CPU, s",
        "first response, s",
        "LLM's first token, s",
        "CPU, s",
    )
    for tandem, made in starts.items():
        table.add_row(
            str(tandem),
            f"{min(each.ready for each in made):.1f}",
            f"{min(each.cpu for each in made):.1f}",
            f"{min(each.response for each in made):.2f}",
            f"{min(each.token for each in made):.1f}",
            f"{min(each.token_cpu for each in made):.1f}",
        )
    console.print(table)
    for tandem, made in starts.items():
        best = min(made, key=lambda each: each.ready)
        console.print(f"\n{tandem}: the quickest start, ready after {best.ready:.1f} s")
        parts = make_table("process", "starts, s", "begins its own work, s", "CPU, s")
        for role, part in best.parts.items():
            parts.add_row(role, f"{part.begin:.1f}", f"{part.named:.1f}", f"{part.cpu:.1f}")
        console.print(parts)


@app.command()
def main(
    model: Annotated[str, typer.Option(help="A MODEL of `tandem serve`.")] = (
        "smollm2-135m-instruct"
    ),
    rounds: Annotated[int, typer.Option(min=1, help="Starts of each installation.")] = 3,
    tandem: Annotated[
        list[Path] | None, typer.Option(help="A `tandem` command; several take turns.")
    ] = None,
) -> None:
    """Measures starts of a service and of an LLM."""
    starts: defaultdict[Path, list[Start]] = defaultdict(list)
    for _ in range(rounds):
        for command in tandem or [Path(sys.executable).with_name("tandem")]:
            made = Start()
            start_service(command, model, made)
            start_llm(command.with_name("python"), model, made)
            starts[command].append(made)
    print_starts(starts)


if __name__ == "__main__":
    app()
