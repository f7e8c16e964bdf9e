"""Runs a whole service on a Ray cluster of several nodes while its processes are killed one after
the other.

    python -m tandem.tests.soak.nemesis --minutes 3 --streams 200 --tokens 200

Every stream must end with exactly the fault-free output, and afterwards no worker may hold
anything; with `--spare`, nothing that lived throughout may grow. Exits with 1 otherwise.
docs/reliability.md describes what is promised and what was measured.
"""

import argparse
import asyncio
import os
import signal
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import psutil

from tandem.cluster.config import TandemConfig, load_config
from tandem.cluster.serve.launch import Service, start_service
from tandem.tests.service import ray_cluster, wait_until_idle
from tandem.tests.soak.faults import Nemesis
from tandem.tests.soak.footprints import Footprints
from tandem.tests.soak.traffic import (
    LENGTHS,
    Traffic,
    fault_free,
    keep_going,
    make_cases,
    with_stops,
)
from tandem.tests.tiny import make_tiny_model

NODES: Final = {"router": "127.0.0.12", "prefill": "127.0.0.13", "decode": "127.0.0.14"}
"""Nodes beside the head; not those of the tests, which may run at the same time."""

MODEL: Final[dict[str, Any]] = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "head_dim": 32,
}
KILLED: Final = ("decode", "prefill", "directory", "controller", "router")
_MAX_SHOWN: Final = 12


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Describes a run: it ends when so many minutes have passed and so many streams have ended."""

    minutes: float
    streams: int
    tokens: int
    prompts: Sequence[int] = LENGTHS  # tokens of each
    concurrency: int = 16
    period: float = 10.0  # seconds between two kills
    whole_seconds: float = 90.0  # how long the service may take to be whole again
    kinds: Sequence[str] = KILLED
    tp: int = 1  # of every worker; of several ranks one is killed, too
    demo_model: bool = False
    gcs: bool = True
    spares: bool = False  # one process of each kind, to see whether it grows


@dataclass(frozen=True, kw_only=True)
class Report:
    """Holds the outcome of a run."""

    traffic: Traffic
    nemesis: Nemesis
    footprints: Footprints
    seconds: float
    faults: Sequence[
        str
    ]  # of the service beside streams: not whole again, not idle, processes left behind

    @property
    def passed(self) -> bool:
        return bool(self.traffic.ended) and not (
            self.traffic.failed or self.traffic.altered or self.faults
        )

    def __str__(self) -> str:
        ended = self.traffic.ended
        rows = [
            ["streams", str(len(ended))],
            ["tokens", str(sum(each.num_tokens for each in ended))],
            ["seconds", f"{self.seconds:.0f}"],
            ["kills", ", ".join(f"{kind} {count}" for kind, count in self.nemesis.kills.items())],
            [
                "running again after (worst)",
                ", ".join(f"{k} {s:.1f} s" for k, s in self.nemesis.slowest.items()),
            ],
            ["failed", str(len(self.traffic.failed))],
            ["altered", str(len(self.traffic.altered))],
            [
                "longest gap of a stream, p50 / p99 / max",
                _spread([each.longest_gap for each in ended]),
            ],
            ["first token, p50 / p99 / max", _spread([each.first_seconds for each in ended])],
            ["streams resumed by the client", str(sum(each.num_resumed > 0 for each in ended))],
        ]
        lines = [*_table(rows), "", *_table(self.footprints.rows())]
        lines += [f"FAILED  {each.case}: {each.error}" for each in self.traffic.failed[:_MAX_SHOWN]]
        lines += [
            f"ALTERED {each.case}: {each.difference}" for each in self.traffic.altered[:_MAX_SHOWN]
        ]
        return "\n".join(
            [
                *lines,
                *(f"FAULT   {each}" for each in self.faults),
                "passed" if self.passed else "FAILED",
            ]
        )


def run(plan: Plan) -> Report:
    """Starts the cluster and the service, carries out the plan, and ends all that was started."""
    before = set(psutil.Process().children(recursive=True))
    with tempfile.TemporaryDirectory(prefix="tandem-nemesis-") as scratch:
        folder = _model_folder(plan, Path(scratch))
        with (
            cluster() as address,
            start_service(_config(plan, folder), str(folder), address=address) as service,
        ):
            report = asyncio.run(_run(plan, service))
        _, left = psutil.wait_procs(
            set(psutil.Process().children(recursive=True)) - before, timeout=10
        )
    faults = [f"left behind: {each}" for each in left]
    for process in left:
        process.kill()
    return Report(**(vars(report) | {"faults": [*report.faults, *faults]}))


async def _run(plan: Plan, service: Service) -> Report:
    started = time.monotonic()
    known = await fault_free(service.grpc_addresses, make_cases(plan.tokens, plan.prompts))
    known += await fault_free(service.grpc_addresses, list(with_stops(known)))
    _say(started, f"{len(known)} requests without faults; {service.addresses}")
    traffic, footprints = Traffic(), Footprints()
    kinds = [*plan.kinds, *["rank"] * (plan.tp > 1)]
    nemesis = Nemesis(service, kinds, with_gcs=plan.gcs, spares=plan.spares)
    begun = time.monotonic()

    def is_over() -> bool:
        return time.monotonic() - begun >= plan.minutes * 60 and len(traffic.ended) >= plan.streams

    streams = asyncio.create_task(
        keep_going(
            service.grpc_addresses, known, traffic, concurrency=plan.concurrency, is_over=is_over
        )
    )
    while not is_over() and not streams.done():
        await asyncio.wait([streams], timeout=plan.period)
        if not is_over():
            await asyncio.to_thread(
                footprints.sample, service.status_url
            )  # the last fault has settled
            await _strike(plan, nemesis, traffic, started)
    await streams
    seconds = time.monotonic() - begun
    faults = [
        *nemesis.not_whole,
        *await asyncio.to_thread(_held, service),
        *(footprints.faults() * plan.spares),
    ]
    return Report(
        traffic=traffic, nemesis=nemesis, footprints=footprints, seconds=seconds, faults=faults
    )


async def _strike(plan: Plan, nemesis: Nemesis, traffic: Traffic, started: float) -> None:
    """Kills a process and waits until the service is whole again; says how the streams fare."""
    what = await asyncio.to_thread(nemesis.strike)
    _say(started, f"{what}; {traffic.num_running} streams running")
    since = time.monotonic()
    whole = await asyncio.to_thread(nemesis.wait_until_whole, what.split()[1], plan.whole_seconds)
    state = f"whole after {time.monotonic() - since:.1f} s" if whole else nemesis.not_whole[-1]
    counts = f"{len(traffic.failed)} failed, {len(traffic.altered)} altered"
    _say(started, f"  {state}; {len(traffic.ended)} streams ended, {counts}")
    for each in [*traffic.failed, *traffic.altered][-3:]:
        _say(started, f"  {each.case}: {each.error or each.difference}")


def _held(service: Service) -> list[str]:
    """Returns what is wrong with the workers once all streams have ended: leaks, blocks that do not
    add up.
    """
    try:
        wait_until_idle(service.status_url, 40)  # a lease lasts 30 s
    except (AssertionError, OSError) as error:
        return [f"workers are not idle: {error}"]
    return []


def _say(started: float, text: str) -> None:
    print(f"{time.monotonic() - started:7.1f} {text}", flush=True)


@contextmanager
def cluster() -> Iterator[str]:
    """Runs a Ray cluster of a head and three nodes on this machine; yields its address."""
    environment = {
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_AUTH_MODE": "disabled",
        "HF_HUB_OFFLINE": "1",
    }
    os.environ.update(environment | {"TOKENIZERS_PARALLELISM": "false", "GOMP_SPINCOUNT": "3000"})
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with ray_cluster(NODES, gcs_server_port=port) as started:
        yield str(started.address)


def _model_folder(plan: Plan, scratch: Path) -> Path:
    if plan.demo_model:
        from tandem.tests import demo_model

        return demo_model.folder()
    return make_tiny_model(scratch / "tiny", dtype="bfloat16", **MODEL)


def _config(plan: Plan, folder: Path) -> TandemConfig:
    overrides: dict[str, object] = {"model": str(folder), "name": "nemesis", "status_port": 8223}
    overrides |= {f"{name}.resources": {name: 1.0} for name in NODES}
    overrides |= {
        f"{pool}.num_threads": 1 for pool in ("prefill", "decode")
    }  # the nodes share this machine's cores
    overrides |= {f"{name}.replicas": 2 for name in NODES}
    # About 20,000 tokens, soon full: routers remember what each worker has cached, and grow until
    # it is.
    overrides |= {
        f"{pool}.kv_cache_gb": 0.25 if plan.demo_model else 0.02 for pool in ("prefill", "decode")
    }
    overrides |= {"router.grpc_port": 43_051, "router.http_port": 43_080}
    overrides |= {
        f"{pool}.tp": plan.tp for pool in ("prefill", "decode")
    }  # unequal splits round differently
    return load_config(None, overrides)


def _spread(seconds: Sequence[float]) -> str:
    if len(seconds) < 2:
        return "-"
    cuts = statistics.quantiles(seconds, n=100, method="inclusive")
    return f"{cuts[49]:.2f} / {cuts[98]:.2f} / {max(seconds):.2f} s"


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def _plan(arguments: Sequence[str]) -> Plan:
    parser = argparse.ArgumentParser(
        prog="python -m tandem.tests.soak.nemesis", description=__doc__
    )
    parser.add_argument(
        "--minutes", type=float, default=3.0, help="how long processes are killed at least"
    )
    parser.add_argument(
        "--streams", type=int, default=200, help="how many streams there are at least"
    )
    parser.add_argument("--tokens", type=int, default=200, help="of each stream")
    parser.add_argument(
        "--prompts", type=int, nargs="+", default=LENGTHS, help="their lengths in tokens"
    )
    parser.add_argument("--concurrency", type=int, default=16, help="streams at a time")
    parser.add_argument("--period", type=float, default=10.0, help="seconds between two kills")
    parser.add_argument(
        "--whole-seconds", type=float, default=90.0, help="how long the service may stay incomplete"
    )
    parser.add_argument(
        "--kinds",
        nargs="+",
        choices=KILLED,
        default=KILLED,
        help="which processes are killed in turn",
    )
    parser.add_argument(
        "--tp", type=int, default=1, help="ranks of each worker; above 1 one of them is killed, too"
    )
    parser.add_argument(
        "--demo-model",
        action="store_true",
        help="serve the demo model instead of a tiny random one",
    )
    parser.add_argument(
        "--spare",
        dest="spares",
        action="store_true",
        help="let one process of each kind live; it must not grow",
    )
    parser.add_argument("--no-gcs", dest="gcs", action="store_false", help="never stop the GCS")
    return Plan(**vars(parser.parse_args(arguments)))


def main() -> int:
    """Runs the command; returns its exit code. SIGTERM ends what was started, too."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    report = run(_plan(sys.argv[1:]))
    print(report)
    return 0 if report.passed else 1


if __name__ == "__main__":
    sys.exit(main())
