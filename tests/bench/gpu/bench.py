"""Holds the surroundings of one part: the device, the sizes, and the file of its results."""

import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

import psutil
import torch

from tandem.tests.bench.engine.shapes import SHAPES, random_weight
from tandem.tests.bench.engine.steps import BenchRunner
from tandem.workers.model.config import ModelConfig
from tandem.workers.model.costs.measure import best_seconds
from tandem.workers.model.runner import ModelRunner

T = TypeVar("T")

NEEDS_GPU: Final = "not measured: needs a GPU"


@dataclass(frozen=True, kw_only=True)
class Bench:
    """Describes one part's run. Picklable."""

    device: str  # cpu, cuda or cuda:N
    shape: str  # of SHAPES
    seconds: float  # until the part is cut off
    folder: Path  # for logs
    rows: Path  # the file of results, one JSON object a line

    @property
    def is_gpu(self) -> bool:
        return self.device != "cpu"

    @property
    def torch_device(self) -> torch.device:
        return torch.device(self.device)

    @property
    def config(self) -> ModelConfig:
        return SHAPES[self.shape]

    @property
    def chunk(self) -> int:
        """Returns the number of tokens of a prefill chunk."""
        return self.pick(2048, 64)

    def pick(self, full: T, tiny: T) -> T:
        """Returns `tiny` for the shape `tiny`, with which every part takes about a second."""
        return tiny if self.shape == "tiny" else full

    def row(self, name: str, **figures: Any) -> None:
        """Writes a result at once, so that it is not lost if the part is cut off."""
        rounded = {key: _rounded(value) for key, value in figures.items()}
        with self.rows.open("a") as file:
            file.write(json.dumps({"name": name, **rounded}) + "\n")

    def time(self, name: str, function: Callable[[], object], **facts: Any) -> None:
        """Measures a call."""
        self.row(name, **facts, ms=best_seconds(function, self.pick(0.2, 0.01)) * 1e3)

    def attempt(self, name: str, function: Callable[[], object], **facts: Any) -> None:
        """Measures a call that this device or this release of torch may not support."""
        from triton.errors import TritonError  # not every part needs Triton

        try:
            self.time(name, function, **facts)
        except (AttributeError, RuntimeError, TritonError, TypeError, ValueError) as error:
            reason = str(error).strip().partition("\n")[0]
            self.row(name, **facts, note=f"not supported here: {reason[:120]}")

    def check_graphs(self, runner: ModelRunner) -> None:
        """Raises RuntimeError on a GPU if no step of the runner ran as a CUDA graph."""
        if self.is_gpu and not runner.num_graph_replays():
            raise RuntimeError("no step ran as a CUDA graph; the log has the reason")

    def memory_mib(self, *, peak: bool = False) -> float:
        """Returns the memory of tensors on a GPU, or of this process on a CPU."""
        if not self.is_gpu:
            return float(psutil.Process().memory_info().rss / 2**20)
        used = torch.cuda.max_memory_allocated if peak else torch.cuda.memory_allocated
        return used(self.torch_device) / 2**20

    def reset_peak(self) -> None:
        """Begins a new measurement of the peak memory."""
        if self.is_gpu:
            torch.cuda.reset_peak_memory_stats(self.torch_device)

    def load(
        self,
        num_blocks: int,
        *,
        shape: str | None = None,
        dtype: str = "bfloat16",
        on_loaded: Callable[[str], None] = lambda stage: None,
    ) -> BenchRunner:
        """Returns a model of random weights on the device."""
        return BenchRunner(
            SHAPES[shape or self.shape],
            random_weight,
            dtype=dtype,
            device=self.torch_device,
            num_blocks=num_blocks,
            chunk=self.chunk,
            exact=False,
            on_loaded=on_loaded,
        )


class Stopwatch:
    """Measures the seconds since it was made."""

    def __init__(self) -> None:
        self._began = time.perf_counter()

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self._began

    @property
    def ms(self) -> float:
        return self.seconds * 1e3


def _rounded(value: Any) -> Any:
    """Returns a value whose floats have five significant digits."""
    if isinstance(value, dict):
        return {key: _rounded(each) for key, each in value.items()}
    if not isinstance(value, float) or not math.isfinite(value) or not value:
        return value
    return round(value, 4 - math.floor(math.log10(abs(value))))
