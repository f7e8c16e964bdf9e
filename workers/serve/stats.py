"""Reports the state of one worker as metrics."""

import logging
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

import torch

from ...proto import worker_pb2
from ...proto.metrics import (
    BLOCKS,
    COMPUTED_TOKENS,
    CPU_POWER,
    GPU_MEMORY,
    GPU_POWER,
    GPU_UTILIZATION,
    GRAPH_REPLAYS,
    LEASES,
    SEQUENCES,
    STATES,
    STEP_SECONDS,
    STEP_TOKENS,
    TRANSFERS,
    Metrics,
)
from ..host.power import CpuPower
from ..tp.kv_group import KvGroup

logger = logging.getLogger(__name__)

_PERCENT: Final = 100.0
_MILLIWATTS: Final = 1_000.0  # in a watt


@dataclass(eq=False, kw_only=True)
class WorkerStats:
    """Reads a worker's state and reports it as metrics; lives in the worker's event loop."""

    load: Callable[[], worker_pb2.WorkerLoad]
    states: Callable[[], Mapping[str, int]]  # the numbers of states by their status
    kv: KvGroup
    steps: deque[tuple[float, int]]  # see `Watchdog`
    num_graph_replays: Callable[[], int]
    on_gpu: bool
    cpu_power: CpuPower = field(default_factory=CpuPower)
    # As of the last report; None: not known.
    cpu_watts: float | None = None
    gpu_watts: float | None = None
    _num_reported: int = 0  # graph replays
    _unread: set[str] = field(default_factory=set)  # the figures of NVML that could not be read

    def report(self, metrics: Metrics) -> None:
        """Reports the current state and the steps since the last call."""
        load = self.load()
        for state in BLOCKS.labels["state"]:
            metrics.set(BLOCKS, getattr(load, f"{state}_blocks"), state=state)
        for state, count in self.states().items():
            metrics.set(STATES, count, state=state)
        metrics.set(SEQUENCES, load.num_running, state="running")
        metrics.set(SEQUENCES, load.num_waiting, state="waiting")
        metrics.set(LEASES, self.kv.num_leases)
        metrics.set(TRANSFERS, self.kv.num_transfers)
        num_computed = 0
        for _ in range(len(self.steps)):
            seconds, num_tokens = self.steps.popleft()
            metrics.observe(STEP_SECONDS, seconds)
            if num_tokens:
                metrics.observe(STEP_TOKENS, num_tokens)
                num_computed += num_tokens
        metrics.add(COMPUTED_TOKENS, num_computed)
        self.cpu_watts = self.cpu_power.watts()
        if self.cpu_watts is not None:
            metrics.set(CPU_POWER, self.cpu_watts)
        if self.on_gpu:
            self._report_gpu(metrics)

    def _report_gpu(self, metrics: Metrics) -> None:
        num_replays = self.num_graph_replays()
        replays = num_replays - self._num_reported
        self._num_reported = num_replays
        if replays:
            metrics.add(GRAPH_REPLAYS, replays)
        free, total = torch.cuda.mem_get_info()
        metrics.set(GPU_MEMORY, free, state="free")
        metrics.set(GPU_MEMORY, total - free, state="used")
        percent = self._read_nvml("utilization", torch.cuda.utilization)
        if percent is not None:
            metrics.set(GPU_UTILIZATION, percent / _PERCENT)
        milliwatts = self._read_nvml("power", torch.cuda.power_draw)
        self.gpu_watts = None if milliwatts is None else milliwatts / _MILLIWATTS
        if self.gpu_watts is not None:
            metrics.set(GPU_POWER, self.gpu_watts)

    def _read_nvml(self, name: str, read: Callable[[], int]) -> int | None:
        """Returns a figure of NVML, or None if it cannot be read, which is logged once."""
        try:
            return read()
        except Exception as error:
            # pynvml's errors derive from Exception alone, and pynvml may be absent. Only these
            # figures come from NVML: an error of CUDA, as in mem_get_info, still ends the worker.
            if name not in self._unread:
                self._unread.add(name)
                logger.warning(
                    "the %s of the GPU cannot be read, as on a part of a GPU or without the "
                    "package nvidia-ml-py: %s: %s",
                    name,
                    type(error).__name__,
                    error,
                )
            return None
