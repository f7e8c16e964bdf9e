"""Measures a model on this machine: steps, contention, and what a running service adds to them.

Steps are measured in processes of workers without a service, since only there can the work of a
step be chosen. Then a service with the same workers gets requests.
"""

import asyncio
import io
import platform
import statistics
import subprocess
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, redirect_stdout, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version as version_of
from pathlib import Path
from typing import Final

from ...proto.costs import TableCost
from ...proto.errors import InvalidArgument
from ...proto.identity import PeerIdentity
from ...workers.host.threads import available_cores
from ..config import PoolRole, TandemConfig
from ..serve.environment import prepare_ray_environment
from ..serve.ports import listening_children
from ..sim.cost import StepSample
from ..stop_signals import stopped_by_signals
from ..store.checked import check_folder, checked_folder
from .process import Answer, MeasuredProcess, ProcessSpec, run_process
from .profile import (
    LEAST_CONTEXT,
    Profile,
    ProfiledBudgets,
    RouterProfile,
    TransferProfile,
    WorkerProfile,
)
from .service_load import ServiceLoad, ServiceTimes

_STEPS_SHARE: Final = 0.5  # of the time, for steps; the rest is for a service
_GRID_SHARE: Final = 0.85  # of the time for steps, for the grid; the rest is for contention
_PROBE: Final = 4  # every fourth scenario tells the contention
_SERVICE: Final = "tandem-plan-measure"


def measure_profile(
    config: TandemConfig,
    *,
    workers: Sequence[int],
    seconds: float,
    context_tokens: int,
    report: Callable[[str], None],
) -> Profile:
    """Measures for `seconds`, besides the starts of workers and services; returns the profile.

    In less than LEAST_SECONDS, parts of the grid are not measured. The steps of a slow model may
    take longer than their part of `seconds`, because the costs need LEAST_SAMPLES of them.
    `workers` are numbers of workers that share this machine. `context_tokens` is the length of the
    longest sequence to measure. `report` gets a line before each part. Raises InvalidArgument on a
    Ray cluster, whose nodes are other machines, the errors of `checked_folder`, and
    KeyboardInterrupt at SIGINT, SIGTERM and SIGHUP, after all processes have ended.
    """
    if prepare_ray_environment(None) is not None:
        raise InvalidArgument(
            "must be unset: the measurement starts its own Ray on this machine", "RAY_ADDRESS"
        )
    measurement = _Measurement(config, checked_folder(config), context_tokens, report)
    with stopped_by_signals():
        return measurement.run(workers, seconds / len(workers))
    raise KeyboardInterrupt


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
        self._context_tokens = max(context_tokens, LEAST_CONTEXT)
        self._report = report
        self._identity = PeerIdentity.generate().to_text()
        self._router: RouterProfile | None = None
        self._transfer: TransferProfile | None = None
        self._token_bytes = 0
        self._tables: tuple[TableCost, ...] = ()
        self._vocab_size = 0

    def run(self, workers: Sequence[int], seconds: float) -> Profile:
        """Measures each number of workers for `seconds`."""
        profiles = [self._measure(number, seconds) for number in sorted(workers)]
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
            tables=self._tables,
            workers=tuple(profiles),
            router=self._router,
            transfer=self._transfer,
        )

    def _measure(self, number: int, seconds: float) -> WorkerProfile:
        steps = asyncio.run(self._measure_steps(number, _STEPS_SHARE * seconds))
        self._report(f"starting a service with {_count(number)}")
        times = self._serve(number, steps, (1 - _STEPS_SHARE) * seconds)
        self._router = times.router
        self._transfer = times.transfer or self._transfer
        return steps.model_copy(
            update={
                "background": times.background,
                "prefill_contention": times.prefill_contention,
                "decode_contention": times.decode_contention,
                "request_seconds": times.request_seconds,
                "host_seconds": times.host_seconds,
                "host_seconds_per_sequence": times.host_seconds_per_sequence,
            }
        )

    async def _measure_steps(self, number: int, seconds: float) -> WorkerProfile:
        """Measures the steps of one of `number` workers."""
        self._report(f"loading {_count(number)}")
        async with self._workers(number) as group:
            first = group.first[-1]
            self._token_bytes = first.pop("token_bytes")
            self._tables = tuple(TableCost(*each) for each in first.pop("tables"))
            self._vocab_size = first.pop("vocab_size")
            longest = min(self._context_tokens, first["context_tokens"])
            self._report(f"measuring steps of a worker with {first['threads']} threads")
            share = _GRID_SHARE if number > 1 else 1.0
            grid = await self._grid(group.children[-1], share * seconds, longest)
            contention = 1.0
            if number > 1:
                self._report("measuring the contention of the workers")
                rest = (1 - share) * seconds
                contention = await self._contention(group.children, rest / 2, longest)
        return WorkerProfile(
            workers=number,
            grid=tuple(each.as_row() for each in grid),
            contention=contention,
            budgets=ProfiledBudgets(**first.pop("budgets")),
            **first,
        )

    def _serve(self, number: int, steps: WorkerProfile, seconds: float) -> ServiceTimes:
        """Measures a service of `number` workers, one of which computes prompts only."""
        from ..serve.launch import start_service  # imports Ray, which reads the environment

        config = self._service_config(number)
        # Ray prints on sys.stdout.
        with (
            redirect_stdout(io.StringIO()),
            start_service(
                config,
                str(self._folder),
                check=partial(check_folder, config, self._folder),
            ) as service,
        ):
            self._report("measuring the service")
            load = ServiceLoad(
                service.grpc_address,
                listening_children()[service.grpc_address],
                steps.fit().costs,
                chunk_tokens=steps.budgets.chunk_tokens,
                context_tokens=min(self._context_tokens, steps.context_tokens),
                vocab_size=self._vocab_size,
            )
            return asyncio.run(load.measure(seconds, has_prefill=number > 1))

    def _service_config(self, number: int) -> TandemConfig:
        config = self._config
        num_prefill = min(number - 1, 1)
        ports = {"grpc_port": 0, "http_port": 0, "ops_port": 0}
        return config.model_copy(
            update={
                "name": _SERVICE,
                "router": config.router.model_copy(update=ports),
                "prefill": config.prefill.model_copy(update={"replicas": num_prefill}),
                "decode": config.decode.model_copy(update={"replicas": number - num_prefill}),
            }
        )

    @asynccontextmanager
    async def _workers(self, number: int) -> AsyncIterator[_Group]:
        """Runs worker processes; the first of several is a prefill worker."""
        roles: list[PoolRole] = ["decode"] * number
        if number > 1:
            roles[0] = "prefill"
        async with AsyncExitStack() as scope:
            started = [
                await scope.enter_async_context(run_process(self._spec(role=role, workers=number)))
                for role in roles
            ]
            yield _Group([child for child, _ in started], [first for _, first in started])

    def _spec(self, **values: object) -> ProcessSpec:
        return ProcessSpec.model_validate(
            {
                "config": self._config,
                "folder": str(self._folder),
                "identity": self._identity,
                **values,
            }
        )

    async def _grid(
        self, child: MeasuredProcess, seconds: float, longest: int, every: int = 1
    ) -> list[StepSample]:
        answer = await child.measure(seconds=seconds, context_tokens=longest, every=every)
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


def _count(number: int) -> str:
    return "1 worker" if number == 1 else f"{number} workers"


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
    file = Path(__file__)
    git = ("git", "-C", str(file.parent))
    with suppress(OSError, subprocess.CalledProcessError):
        # A package may be installed in the folder of another repository, which does not track it.
        _output_of(*git, "ls-files", "--error-unmatch", file.name)
        return _output_of(*git, "rev-parse", "--short", "HEAD").strip()
    return version_of("tandem-llm")


def _output_of(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout
