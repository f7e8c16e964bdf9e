"""Measures the floors of a step on this device: memory bandwidth and rate of matrix products."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch
from torch.nn import functional
from torch.utils.benchmark import Timer

from tandem.tests.bench.engine.shapes import StepCost
from tandem.workers.model.config import ModelConfig
from tandem.workers.model.quant.unquantized import UnquantizedLinearMethod

BUFFER_BYTES: Final = {"cpu": 1 << 28, "cuda": 1 << 31}  # several times the largest cache
GEMM_ROWS: Final = 512  # tokens of a prefill chunk
_TIMED_SECONDS: Final = 0.2  # for each function


@dataclass(frozen=True, slots=True, kw_only=True)
class Floors:
    """Holds the best results of several timings."""

    read_bytes_per_s: float  # sum of a large tensor
    copy_bytes_per_s: float  # read and written bytes of a large copy
    matmul_flops_per_s: float  # over the shapes of one decoder layer, GEMM_ROWS tokens

    @property
    def bytes_per_s(self) -> float:
        return max(self.read_bytes_per_s, self.copy_bytes_per_s)

    def seconds(self, cost: StepCost) -> float:
        """Returns the roofline: the longer time of moving the bytes and computing the products."""
        num_bytes, flops = cost
        return max(num_bytes / self.bytes_per_s, flops / self.matmul_flops_per_s)


def synchronize(device: torch.device) -> None:
    """Waits until the device has finished its queued work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@torch.inference_mode()
def measure_floors(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> Floors:
    """Measures the floors; takes about a second and twice BUFFER_BYTES of memory."""
    source = torch.ones(BUFFER_BYTES[device.type] // 4, device=device)
    target = torch.empty_like(source)
    num_bytes = source.numel() * source.element_size()
    return Floors(
        read_bytes_per_s=num_bytes / _best_seconds(source.sum),
        copy_bytes_per_s=2 * num_bytes / _best_seconds(lambda: target.copy_(source)),
        matmul_flops_per_s=_matmul_rate(config, dtype, device),
    )


def _matmul_rate(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> float:
    hidden = config.hidden_size
    inner = config.intermediate_size
    layer = config.layers[0]
    query = layer.num_heads * layer.head_dim
    kv = layer.num_kv_heads * layer.head_dim
    shapes = ((query + 2 * kv, hidden), (hidden, query), (2 * inner, hidden), (hidden, inner))
    seconds = sum(_gemm_seconds(rows, columns, dtype, device) for rows, columns in shapes)
    return sum(2 * GEMM_ROWS * rows * columns for rows, columns in shapes) / seconds


def _gemm_seconds(rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> float:
    """Returns the time of the faster of torch's linear layer and the model's own.

    The model's own may store the weight in another form.
    """
    weight = torch.randn(rows, columns, device=device).to(dtype)
    x = torch.randn(GEMM_ROWS, columns, device=device).to(dtype)
    method = UnquantizedLinearMethod.from_tensors(weight)
    return min(
        _best_seconds(lambda: functional.linear(x, weight)), _best_seconds(lambda: method.apply(x))
    )


def _best_seconds(function: Callable[[], object]) -> float:
    """Returns the shortest time of a call, in seconds, from many timings.

    There are many because undisturbed timings are rare on a shared machine.
    """
    timer = Timer("function()", globals={"function": function}, num_threads=torch.get_num_threads())
    return float(min(timer.blocked_autorange(min_run_time=_TIMED_SECONDS).times))
