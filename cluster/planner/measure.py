"""Measures a model on this machine: steps, contention, KV transfers, the host and a router.

Workers and the router are processes of their own, as in a service, and speak gRPC and HTTP.
"""

import asyncio
import platform
import statistics
import subprocess
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version as version_of
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
import psutil

from ...proto.errors import InvalidArgument, Unavailable
from ...proto.identity import PeerIdentity
from ...proto.inference_pb2 import Timeline
from ...router.client.client import AsyncClient
from ...workers.host.threads import available_cores
from ..bench.load import send_load
from ..bench.metrics import RequestRecord
from ..bench.options import LoadOptions, ServerAddress, Workload
from ..bench.target import open_target
from ..bench.workload import BenchPrompt, Prompts
from ..config import PoolRole, TandemConfig
from ..sim.cost import StepCosts, StepSample, StepWork
from .process import Answer, MeasuredProcess, ProcessSpec, run_process
from .profile import Profile, ProfiledBudgets, RouterProfile, TransferProfile, WorkerProfile

LEAST_SECONDS: Final = 5.0
_GRID_SHARE: Final = 0.7  # of the time, for grids; the rest is for what a service adds
_PROBE: Final = 4  # every fourth scenario tells the contention
_STREAMS: Final = (1, 8)  # concurrent streams that tell the host's time between two steps
_PROMPT_TOKENS: Final = 16
_OUTPUT_TOKENS: Final = 32
_TRANSFER_TOKENS: Final = (64, 256, 1024)
_TRANSFERS: Final = 3  # of each length


def measure_profile(
    config: TandemConfig,
    folder: Path,
    *,
    workers: Sequence[int],
    seconds: float,
    context_tokens: int,
    report: Callable[[str], None],
) -> Profile:
    """Measures for `seconds`, besides the time to load the model, and returns the profile.

    `workers` are numbers of workers that share this machine. `context_tokens` is the length of the
    longest sequence to measure. `report` gets a line before each part.
    """
    if seconds < LEAST_SECONDS:
        raise InvalidArgument(f"must be at least {LEAST_SECONDS:g}, got {seconds:g}", "--seconds")
    return asyncio.run(
        _Measurement(config, folder, context_tokens, report).run(workers, seconds / len(workers))
    )


@dataclass(frozen=True, slots=True)
class _Group:
    """Holds the worker processes that share the machine; the last one is measured."""

    children: list[MeasuredProcess]
    first: list[Answer]


class _Measurement:
    """Measures one model."""

    def __init__(
        self,
        config: TandemConfig,
        folder: Path,
        context_tokens: int,
        report: Callable[[str], None],
    ) -> None:
        self._config = config
        self._folder = folder
        self._context_tokens = context_tokens
        self._report = report
        self._identity = PeerIdentity.generate().to_text()
        self._router: RouterProfile | None = None
        self._transfer: TransferProfile | None = None
        self._token_bytes = 0
        self._vocab_size = 0

    async def run(self, workers: Sequence[int], seconds: float) -> Profile:
        """Measures each number of workers for `seconds`."""
        profiles = [await self._measure(number, seconds) for number in sorted(workers)]
        config = self._config
        return Profile(
            model=config.served_name,
            dtype=config.dtype,
            quantization=config.quantization,
            kv_cache_dtype=config.kv_cache_dtype,
            device=config.device,
            device_name=_device_name(config.device),
            cores=available_cores(),
            tp=config.decode.tp,
            commit=_commit(),
            date=datetime.now(UTC).isoformat(timespec="seconds"),
            token_bytes=self._token_bytes,
            workers=tuple(profiles),
            router=self._router,
            transfer=self._transfer,
        )

    async def _measure(self, number: int, seconds: float) -> WorkerProfile:
        self._report(f"loading {number} worker" + ("s" if number > 1 else ""))
        async with self._workers(number) as group:
            first = group.first[-1]
            self._token_bytes = first.pop("token_bytes")
            self._vocab_size = first.pop("vocab_size")
            longest = min(self._context_tokens, first["context_tokens"])
            self._report(f"measuring steps of a worker with {first['threads']} threads")
            grid = await self._grid(group.children[-1], _GRID_SHARE * seconds, longest)
            rest = (1 - _GRID_SHARE) * seconds
            contention = 1.0
            if number > 1:
                self._report("measuring the contention of the workers")
                contention = await self._contention(group.children, rest / 4, longest)
                rest /= 2
            profile = WorkerProfile(
                workers=number,
                grid=tuple(each.as_row() for each in grid),
                contention=contention,
                budgets=ProfiledBudgets(**first.pop("budgets")),
                **first,
            )
            self._report("measuring a router, the host's time and KV transfers")
            host = await self._serve(group.children, profile.fit().costs, rest)
        return profile.model_copy(
            update={"host_seconds": host.fixed, "host_seconds_per_sequence": host.each}
        )

    @asynccontextmanager
    async def _workers(self, number: int) -> AsyncIterator[_Group]:
        """Runs worker processes; the first of several is a prefill worker."""
        roles: list[PoolRole] = ["decode"] * number
        if number > 1:
            roles[0] = "prefill"
        async with AsyncExitStack() as scope:
            started = [
                await scope.enter_async_context(
                    run_process(self._spec("worker", role=role, workers=number))
                )
                for role in roles
            ]
            yield _Group([child for child, _ in started], [first for _, first in started])

    def _spec(self, kind: str, **values: object) -> ProcessSpec:
        return ProcessSpec.model_validate(
            {
                "kind": kind,
                "config": self._config,
                "folder": str(self._folder),
                "identity": self._identity,
                **values,
            }
        )

    async def _grid(
        self, child: MeasuredProcess, seconds: float, longest: int, every: int = 1
    ) -> list[StepSample]:
        answer = await child.call(name="grid", seconds=seconds, context_tokens=longest, every=every)
        return [StepSample.of_row(row) for row in answer["samples"]]

    async def _contention(
        self, children: Sequence[MeasuredProcess], seconds: float, longest: int
    ) -> float:
        """Returns how much longer a worker's steps take while all others compute as well."""
        alone = await self._grid(children[-1], seconds, longest, _PROBE)
        *_, beside = await asyncio.gather(
            *(self._grid(child, seconds, longest, _PROBE) for child in children)
        )
        ratios = [
            both.seconds / one.seconds
            for one, both in zip(alone, beside, strict=False)
            if one.work.prompt_tokens == both.work.prompt_tokens
        ]
        return max(statistics.median(ratios), 1.0)

    async def _serve(
        self, children: Sequence[MeasuredProcess], costs: StepCosts, seconds: float
    ) -> "_HostTime":
        """Serves requests through a router; measures the router, the host and transfers."""
        infos = [(await child.call(name="serve"))["info"] for child in children]
        spec = self._spec("router", addresses=infos)
        async with run_process(spec) as (router, addresses):
            url = f"http://{addresses['http']}"
            load = seconds / (2 + len(_STREAMS))
            async with open_target(ServerAddress(url=url), ignore_eos=True) as target:

                async def send(streams: int, max_tokens: int) -> list[RequestRecord]:
                    options = LoadOptions(concurrency=streams, seconds=load)
                    prompts = self._prompts(_PROMPT_TOKENS, max_tokens)
                    return _completed(await send_load(target, prompts, options))

                await send(1, 2)
                used = [_cpu_seconds(router.pid)]
                short = await send(max(_STREAMS), 1)
                used.append(_cpu_seconds(router.pid))
                records = [await send(streams, _OUTPUT_TOKENS) for streams in _STREAMS]
                used.append(_cpu_seconds(router.pid))
            self._router = _router_profile(short, records, used)
            if len(children) > 1:
                self._transfer = await self._measure_transfer(f"grpc://{addresses['grpc']}")
        return _host_time(costs, records)

    async def _measure_transfer(self, url: str) -> TransferProfile:
        """Measures KV transfers of some prompts between the workers of a service."""
        found: list[Timeline] = []
        async with AsyncClient(url) as client:
            for num_tokens in _TRANSFERS * _TRANSFER_TOKENS:
                (prompt,) = self._prompts(num_tokens, 4, count=1, seed=len(found))
                ids = prompt.prompt
                completion = await client.generate(
                    ids, max_tokens=4, ignore_eos=True, temperature=0.0
                )
                found.append(completion.timeline)
        moved = [each for each in found if each.kv_transfer_bytes]
        if not moved:
            raise Unavailable("no KV cache moved between the workers of the measurement")
        rates = [each.kv_transfer_bytes / each.kv_transfer_active_seconds for each in moved]
        return TransferProfile(
            seconds=statistics.median(each.kv_transfer_seconds for each in moved),
            bytes_per_second=statistics.median(rates),
            transport=moved[0].kv_transport,
        )

    def _prompts(
        self, input_len: int, output_len: int, *, count: int | None = None, seed: int = 0
    ) -> Iterator[BenchPrompt]:
        """Returns random prompts, without end if `count` is None."""
        workload = Workload(input_len=input_len, output_len=output_len, vocab_size=self._vocab_size)
        return Prompts(workload).of_round(seed, LoadOptions(num_prompts=count, seconds=1.0))


class _HostTime(NamedTuple):
    """Holds the seconds between two steps of served streams, in addition to the step."""

    fixed: float
    each: float  # for each sequence


def _host_time(costs: StepCosts, records: Sequence[Sequence[RequestRecord]]) -> _HostTime:
    """Returns the part of the streams' time per token that their steps do not explain."""
    context = _PROMPT_TOKENS + _OUTPUT_TOKENS // 2
    rest = []
    for streams, sent in zip(_STREAMS, records, strict=True):
        seconds = statistics.median(each.tpot or 0.0 for each in sent)
        work = StepWork(sequences=streams, context_tokens=streams * context)
        rest.append(max(seconds - costs.seconds(work), 0.0))
    each = max(rest[1] - rest[0], 0.0) / (_STREAMS[1] - _STREAMS[0])
    return _HostTime(max(rest[0] - each, 0.0), each)


def _router_profile(
    short: Sequence[RequestRecord],
    streams: Sequence[Sequence[RequestRecord]],
    used: Sequence[float],
) -> RouterProfile:
    """Solves the CPU time of two loads for the time per request and per token."""
    loads = [list(short), [each for sent in streams for each in sent]]
    counts = np.array(
        [[len(sent), sum(each.output_tokens for each in sent)] for sent in loads], dtype=float
    )
    seconds = np.diff(np.array(used))
    request, token = np.maximum(np.linalg.solve(counts, seconds), 0.0)
    return RouterProfile(seconds_per_request=float(request), seconds_per_token=float(token))


def _completed(records: list[RequestRecord]) -> list[RequestRecord]:
    """Returns the same records. Raises Unavailable if a request has failed."""
    for each in records:
        if each.failure is not None:
            raise Unavailable(f"a request of the measurement failed: {each.failure.detail}")
    return records


def _cpu_seconds(pid: int) -> float:
    """Returns the CPU time of a process."""
    times = psutil.Process(pid).cpu_times()
    return times.user + times.system


def _device_name(device: str) -> str:
    """Returns the name of the processor or GPU."""
    if device != "cpu":
        from torch.cuda import get_device_name  # with torch, which takes a second

        return str(get_device_name())
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _commit() -> str:
    """Returns the commit of this code, or its version if it is not in a repository."""
    command = ("git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD")
    with suppress(OSError):
        found = subprocess.run(command, capture_output=True, text=True, check=False)
        if found.returncode == 0:
            return found.stdout.strip()
    return version_of("tandem-llm")
