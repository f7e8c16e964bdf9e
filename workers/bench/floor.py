"""The floors under a step, measured on the device at hand: memory bandwidth and the rate of matrix products."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch
from torch.nn import functional

from ..model.config import ModelConfig
from ..model.layers.linear import Linear
from .shapes import StepCost

BUFFER_BYTES: Final = {"cpu": 1 << 28, "cuda": 1 << 31}  # several times the largest cache
GEMM_ROWS: Final = 512  # tokens of a prefill chunk
_LEAST_RUNS: Final = 10
_LEAST_SECONDS: Final = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Floors:
    """Best of several runs."""

    read_bytes_per_s: float  # sum of a large tensor
    copy_bytes_per_s: float  # read and written bytes of a large copy
    matmul_flops_per_s: float  # over the shapes of one decoder layer, GEMM_ROWS tokens

    @property
    def bytes_per_s(self) -> float:
        return max(self.read_bytes_per_s, self.copy_bytes_per_s)

    def seconds(self, cost: StepCost) -> float:
        """The roofline: the longer of moving the bytes and computing the products."""
        return max(cost.num_bytes / self.bytes_per_s, cost.flops / self.matmul_flops_per_s)


def synchronize(device: torch.device) -> None:
    """Waits until the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@torch.inference_mode()
def measure_floors(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> Floors:
    """Takes about a second and, for that long, twice BUFFER_BYTES of memory."""
    source = torch.ones(BUFFER_BYTES[device.type] // 4, device=device)
    target = torch.empty_like(source)
    num_bytes = source.numel() * source.element_size()
    return Floors(
        read_bytes_per_s=num_bytes / _best_seconds(source.sum, device),
        copy_bytes_per_s=2 * num_bytes / _best_seconds(lambda: target.copy_(source), device),
        matmul_flops_per_s=_matmul_rate(config, dtype, device),
    )


def _matmul_rate(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> float:
    hidden, inner = config.hidden_size, config.intermediate_size
    query, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    seconds, flops = 0.0, 0
    for rows, columns in ((query + 2 * kv, hidden), (hidden, query), (2 * inner, hidden), (hidden, inner)):
        seconds += _gemm_seconds(rows, columns, dtype, device)
        flops += 2 * GEMM_ROWS * rows * columns
    return flops / seconds


def _gemm_seconds(rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> float:
    """The faster of torch's linear map and the model's own, which may keep another form of the weight."""
    weight = torch.randn(rows, columns, device=device).to(dtype)
    x = torch.randn(GEMM_ROWS, columns, device=device).to(dtype)
    linear = Linear(weight)
    return min(_best_seconds(lambda: functional.linear(x, weight), device), _best_seconds(lambda: linear(x), device))


def _best_seconds(function: Callable[[], object], device: torch.device) -> float:
    """Repeats a short function for longer: on a shared machine its best time is rare."""
    best, runs, until = float("inf"), 0, time.perf_counter() + _LEAST_SECONDS
    while runs < _LEAST_RUNS or time.perf_counter() < until:
        runs += 1
        synchronize(device)
        begin = time.perf_counter()
        function()
        synchronize(device)
        best = min(best, time.perf_counter() - begin)
    return best
