"""Measures the router's CPU time per token: `python -m tandem.tests.bench.router`.

Runs three processes on this machine: a worker with the real engine and no model, a router with both
API servers, and this process, which reads the streams and the CPU times of the others.
"""

import asyncio
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Coroutine, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from operator import itemgetter
from pathlib import Path
from statistics import median
from typing import Annotated, Any, Final

import typer
import uvloop

from tandem.cluster.bench.options import ServerAddress
from tandem.cluster.bench.target import StreamCompletion, open_target
from tandem.cluster.bench.workload import BenchPrompt
from tandem.cluster.certificate import make_peer_tls
from tandem.cluster.serve.status import WorkerStatuses
from tandem.cluster.tables import make_table, table_console
from tandem.proto import worker_pb2, worker_pb2_grpc
from tandem.proto.channel import PeerChannel
from tandem.proto.identity import PeerIdentity
from tandem.proto.metrics import NULL_METRICS, Metrics
from tandem.router.api.console.feed import ConsoleFeed
from tandem.router.api.server.servers import ApiServers
from tandem.router.api.service import GenerationService
from tandem.router.auth.authenticator import Authenticator
from tandem.router.auth.keys import create_key, load_keys
from tandem.router.auth.tls import ServerTls, TlsConfig
from tandem.router.client import ClientTls
from tandem.router.dispatch.dispatcher import Dispatcher
from tandem.router.frontend.served_model import ServedModel
from tandem.router.scheduling.admission import Admission
from tandem.router.scheduling.registry import WorkerRegistry
from tandem.router.telemetry.prometheus import PrometheusMetrics
from tandem.router.telemetry.requests import RequestTelemetry
from tandem.tests.router.fake_source import byte_tokenizer

CONTEXT_TOKENS: Final = 4096
_APIS: Final = ("grpc", "http")
_MODEL: Final = "null"
_PROMPT: Final = "The quick brown fox jumps over the lazy dog."
_START_SECONDS: Final = 60.0
_MODULE: Final = "tandem.tests.bench.router"
_WORKER_MODULE: Final = "tandem.tests.bench.null_worker"  # imports torch; the others do not

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


@app.command("run")
def main(
    streams: Annotated[
        list[int], typer.Option(help="Streams at the same time; may be given several times.")
    ] = [1, 64, 512],  # noqa: B006
    tokens: Annotated[int, typer.Option(help="Tokens of each stream.")] = 512,
    rounds: Annotated[int, typer.Option(help="Rounds of each case; the best one counts.")] = 3,
    step_ms: Annotated[
        float, typer.Option(help="Duration of a step of the worker: one token of each stream.")
    ] = 0.0,
    metrics: Annotated[bool, typer.Option(help="Whether the router counts metrics.")] = True,
    with_keys: Annotated[
        bool, typer.Option("--keys", help="Accept only callers with an API key.")
    ] = False,
    with_tls: Annotated[bool, typer.Option("--tls", help="TLS at the API servers.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Measure the router's tokens/s and CPU time per token, over gRPC and HTTP."""
    identity = PeerIdentity.generate()
    with tempfile.TemporaryDirectory() as scratch:
        access = _Access.make(Path(scratch), keys=with_keys, tls=with_tls)
        with (
            worker_process(identity, step_ms) as worker,
            router_process(identity, worker, scratch, _flag(metrics)) as router,
        ):
            costs = [
                max(
                    (
                        asyncio.run(_measure(api, access, router, worker, number, tokens))
                        for _ in range(rounds)
                    ),
                    key=itemgetter("tokens_per_second"),
                )
                for api in _APIS
                for number in streams
            ]
    if as_json:
        typer.echo(json.dumps(costs, indent=2))
        return
    numbers = (
        "streams",
        "tokens/s",
        "tokens/message",
        "router us/token",
        "worker us/token",
        "client us/token",
    )
    table = make_table("API", numbers=numbers, boxed=False)
    for cost in costs:
        api, num_streams, per_second, *others = cost.values()
        table.add_row(
            api, str(num_streams), f"{per_second:,.0f}", *(f"{number:.1f}" for number in others)
        )
    table_console().print(table)


class Feature(StrEnum):
    """Names the features that a router can be measured with and without."""

    METRICS = "metrics"
    KEYS = "keys"
    TLS = "tls"


@app.command()
def compare(
    feature: Annotated[Feature, typer.Argument(help="The feature whose cost is measured.")],
    streams: Annotated[int, typer.Option(help="Streams at the same time.")] = 32,
    tokens: Annotated[int, typer.Option(help="Tokens of each stream.")] = 512,
    rounds: Annotated[
        int, typer.Option(help="Rounds, each with and without; the medians count.")
    ] = 9,
    step_ms: Annotated[
        float, typer.Option(help="Duration of a step of the worker: one token of each stream.")
    ] = 3.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Measure the cost of metrics, keys or TLS: a router's CPU time per token with and without.

    One worker serves two routers in turns. A router merges tokens that wait for the client into one
    message. So the difference is the cost of the feature only if both routers send equally many
    tokens per message. Make steps longer (--step-ms) until that number is 1.
    """
    identity = PeerIdentity.generate()
    with (
        tempfile.TemporaryDirectory() as scratch,
        tempfile.TemporaryDirectory() as empty,
        worker_process(identity, step_ms) as worker,
    ):
        access = _Access.make(
            Path(scratch), keys=feature == Feature.KEYS, tls=feature == Feature.TLS
        )
        without_metrics = _flag(feature != Feature.METRICS)
        with (
            router_process(identity, worker, scratch) as one,
            router_process(identity, worker, empty, without_metrics) as other,
        ):
            both = ((access, one), (_Access(Path(empty)), other))
            costs = [_compare(api, both, worker, streams, tokens, rounds) for api in _APIS]
    if as_json:
        typer.echo(json.dumps(costs, indent=2))
        return
    numbers = ("router us/token", f"without {feature}", "cost, %", "tokens/message", "without")
    table = make_table("API", numbers=numbers, boxed=False)
    for cost in costs:
        api, *values = cost.values()
        table.add_row(api, *(f"{value:.2f}" for value in values))
    table_console().print(table)


def _compare(
    api: str,
    both: "tuple[tuple[_Access, ChildProcess], tuple[_Access, ChildProcess]]",
    worker: "ChildProcess",
    streams: int,
    tokens: int,
    rounds: int,
) -> dict[str, Any]:
    """Returns the CPU time per token in both routers, and the extra cost of the first in percent.

    These are medians of the rounds; each round measures both routers, one after the other.
    """
    times: tuple[list[float], list[float]] = ([], [])
    merged: tuple[list[float], list[float]] = ([], [])
    for turn in range(rounds):
        for index in (0, 1) if turn % 2 else (1, 0):
            access, router = both[index]
            found = asyncio.run(_measure(api, access, router, worker, streams, tokens))
            times[index].append(found["router_us"])
            merged[index].append(found["tokens_per_message"])
    costs = [100 * (one / other - 1) for one, other in zip(*times, strict=True)]
    return {
        "api": api,
        "with_us": median(times[0]),
        "without_us": median(times[1]),
        "cost_percent": median(costs),
        "tokens_per_message_with": median(merged[0]),
        "tokens_per_message_without": median(merged[1]),
    }


@app.command(hidden=True)
def serve_router(worker: str, scratch: Path, metrics: bool = True) -> None:
    """Runs the router until stdin ends.

    Reads its identity from stdin and prints its gRPC and HTTP addresses.
    """
    counts = PrometheusMetrics(_MODEL) if metrics else NULL_METRICS
    run_as_replica(_serve_router(worker, _Access(scratch), counts))


def run_as_replica(work: Coroutine[Any, Any, None]) -> None:
    """Runs `work` on uvloop, as a replica of Ray Serve does.

    The TLS of uvloop is not written in Python.
    """
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(work)


@dataclass(frozen=True, slots=True)
class _Access:
    """Holds a folder that may have files of API keys and certificates."""

    folder: Path
    api_key: str = field(default="", repr=False)

    @classmethod
    def make(cls, folder: Path, *, keys: bool, tls: bool) -> "_Access":
        """Makes the files in an empty folder."""
        access = cls(
            folder, create_key(folder / "keys.json", name="bench", tenant="bench") if keys else ""
        )
        if tls:
            made = make_peer_tls("localhost")
            Path(access.tls.certificate).write_bytes(made.certificate)
            Path(access.tls.key).write_bytes(made.key)
        return access

    @property
    def tls(self) -> TlsConfig:
        return TlsConfig(certificate=str(self.folder / "tls.crt"), key=str(self.folder / "tls.key"))

    @property
    def has_tls(self) -> bool:
        return Path(self.tls.key).exists()

    def authenticator(self) -> Authenticator:
        file = self.folder / "keys.json"
        return Authenticator(load_keys(file) if file.exists() else None)

    def address(self, url: str) -> ServerAddress:
        """Returns the address and credentials of a router's server for the client."""
        if not self.has_tls:
            return ServerAddress(url=url, model=_MODEL, api_key=self.api_key)
        scheme, _, place = url.partition("://")
        secure = f"{scheme}s://localhost:{place.rpartition(':')[2]}"
        return ServerAddress(
            url=secure,
            model=_MODEL,
            api_key=self.api_key,
            tls=ClientTls(ca=self.tls.certificate),
        )


def _flag(metrics: bool) -> str:
    return "--metrics" if metrics else "--no-metrics"


ChildProcess = tuple[int, str]
"""The id of a process of the benchmark, and the addresses that it has printed.

A worker prints one address, a router the addresses of both API servers.
"""


def worker_process(identity: PeerIdentity, step_ms: float) -> AbstractContextManager[ChildProcess]:
    """Runs the worker while the context lasts."""
    return _child_process(identity, _WORKER_MODULE, str(step_ms))


def router_process(
    identity: PeerIdentity, worker: ChildProcess, folder: str, *flags: str
) -> AbstractContextManager[ChildProcess]:
    """Runs a router of the worker while the context lasts.

    `folder` has the files of its keys and certificates.
    """
    return _child_process(identity, _MODULE, "serve-router", worker[1], folder, *flags)


@contextmanager
def _child_process(identity: PeerIdentity, *command: str) -> Iterator[ChildProcess]:
    arguments = [sys.executable, "-m", *command]
    with subprocess.Popen(
        arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        print(identity.to_text(), file=process.stdin, flush=True)
        try:
            yield process.pid, process.stdout.readline().strip()
        finally:
            process.stdin.close()
            process.wait(_START_SECONDS)


async def _serve_router(worker: str, access: _Access, metrics: Metrics) -> None:
    identity = PeerIdentity.from_text(sys.stdin.readline())
    async with PeerChannel(worker, identity) as channel:
        stub = worker_pb2_grpc.WorkerStub(channel)  # type: ignore[no-untyped-call]
        status = await stub.GetStatus(worker_pb2.GetStatusRequest(), timeout=_START_SECONDS)
    registry = WorkerRegistry()
    registry.update([status.info])
    dispatcher = Dispatcher(registry, Admission(registry), identity=identity, metrics=metrics)
    model = ServedModel(name=_MODEL, tokenizer=byte_tokenizer(None), context_tokens=CONTEXT_TOKENS)
    tls = ServerTls(access.tls.load()) if access.has_tls else None
    service = GenerationService([model], dispatcher, telemetry=RequestTelemetry(metrics))
    statuses = WorkerStatuses(registry.workers, identity)
    console = ConsoleFeed(service.telemetry, partial(_describe, statuses), registry.workers)
    server = await ApiServers.start(
        service, authenticator=access.authenticator(), tls=tls, console=console
    )
    await server.set_serving(True)
    sampling = asyncio.create_task(console.run())
    gc.collect()
    gc.freeze()  # as replicas do
    await until_stdin_ends(f"grpc://{server.grpc_address} http://{server.http_address}")
    sampling.cancel()
    await server.stop(0)
    await statuses.close()
    await dispatcher.close()


async def _describe(statuses: WorkerStatuses) -> dict[str, Any]:
    return {"service": _MODEL, "model": _MODEL, "routers": [], "workers": await statuses.get()}


async def until_stdin_ends(addresses: str) -> None:
    """Prints the addresses and returns when the parent has closed stdin."""
    print(addresses, flush=True)
    await asyncio.to_thread(sys.stdin.read)


async def _measure(
    api: str,
    access: _Access,
    router: ChildProcess,
    worker: ChildProcess,
    num_streams: int,
    num_tokens: int,
) -> dict[str, Any]:
    """Returns the rates and CPU microseconds per token of one round over an API, grpc or http.

    A router merges tokens that wait for the client into one message.
    """
    address = access.address(router[1].split()[_APIS.index(api)])
    processes = (router[0], worker[0], os.getpid())

    async def read_all(stream_completion: StreamCompletion, length: int) -> int:
        chunk_times: list[float] = []
        prompt = BenchPrompt(prompt=_PROMPT, max_tokens=length)
        counts = await asyncio.gather(
            *(stream_completion(prompt, chunk_times) for _ in range(num_streams))
        )
        if {count for _, count in counts} != {length}:
            raise RuntimeError(f"{counts} tokens, {length} were requested of each stream")
        return len(chunk_times)

    async with open_target(address, ignore_eos=True) as stream_completion:
        # Opens the connections first, because handshakes must not count as cost of tokens.
        await read_all(stream_completion, 2)
        before = list(map(cpu_seconds, processes))
        begin = time.perf_counter()
        num_messages = await read_all(stream_completion, num_tokens)
        seconds = time.perf_counter() - begin
        after = list(map(cpu_seconds, processes))
    total = num_streams * num_tokens
    used = [1e6 * (end - start) / total for start, end in zip(before, after, strict=True)]
    rates = {"tokens_per_second": total / seconds, "tokens_per_message": total / num_messages}
    times = dict(zip(("router_us", "worker_us", "client_us"), used, strict=True))
    return {"api": api, "num_streams": num_streams} | rates | times


def cpu_seconds(pid: int) -> float:
    """Returns the CPU time that a process has used."""
    # The clock of clock_getcpuclockid(3), because /proc counts in ticks of 10 ms.
    return time.clock_gettime(~pid << 3 | 2)


if __name__ == "__main__":
    app()
