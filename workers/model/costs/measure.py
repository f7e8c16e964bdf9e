"""Measures the limits of this device: memory bandwidth and rate of matrix products."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch
from torch.nn import functional
from torch.utils.benchmark import Timer

from ..config import ModelConfig
from ..quant.unquantized import UnquantizedLinearMethod
from .inference import Work
from .roofline import Roofline

BUFFER_BYTES: Final = {"cpu": 1 << 28, "cuda": 1 << 31}  # several times the largest cache
_TIMED_SECONDS: Final = 0.2  # the default for each function


@dataclass(frozen=True, slots=True, kw_only=True)
class Floors:
    """Holds the best results of several timings."""

    read_bytes_per_s: float  # sum of a large tensor
    copy_bytes_per_s: float  # read and written bytes of a large copy
    matmul_flops_per_s: float  # over the shapes of one decoder layer, a chunk's tokens

    @property
    def roofline(self) -> Roofline:
        """Returns the limits of the device."""
        return Roofline(bytes_per_s=self.bytes_per_s, flops_per_s=self.matmul_flops_per_s)

    @property
    def bytes_per_s(self) -> float:
        return max(self.read_bytes_per_s, self.copy_bytes_per_s)

    def seconds(self, work: Work) -> float:
        """Returns the least time of some work, as `Roofline.seconds`."""
        return self.roofline.seconds(work)


def synchronize(device: torch.device) -> None:
    """Waits until the device has finished its queued work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@torch.inference_mode()
def measure_floors(
    config: ModelConfig, dtype: torch.dtype, device: torch.device, num_rows: int
) -> Floors:
    """Measures the floors; takes about a second and twice BUFFER_BYTES of memory.

    `num_rows` is the number of tokens of a prefill chunk.
    """
    read, copy = measure_memory(device)
    return Floors(
        read_bytes_per_s=read,
        copy_bytes_per_s=copy,
        matmul_flops_per_s=matmul_rate(config, dtype, device, num_rows),
    )


@functools.cache
def measure_memory(device: torch.device) -> tuple[float, float]:
    """Returns the bytes per second of a large sum, and of a large copy, read and written."""
    source = torch.ones(BUFFER_BYTES[device.type] // 4, device=device)
    target = torch.empty_like(source)
    num_bytes = source.numel() * source.element_size()
    read = num_bytes / best_seconds(source.sum)
    return read, 2 * num_bytes / best_seconds(lambda: target.copy_(source))


def matmul_rate(
    config: ModelConfig, dtype: torch.dtype, device: torch.device, num_rows: int
) -> float:
    """Returns the FLOPs per second of one decoder layer's linear maps, for `num_rows` tokens."""
    shapes = linear_shapes(config)
    seconds = sum(
        _gemm_seconds(num_rows, outputs, inputs, dtype, device) for outputs, inputs in shapes
    )
    return sum(2 * num_rows * outputs * inputs for outputs, inputs in shapes) / seconds


def linear_shapes(config: ModelConfig) -> tuple[tuple[int, int], ...]:
    """Returns the outputs and inputs of each linear map of the first decoder layer."""
    hidden = config.hidden_size
    inner = config.intermediate_size
    layer = config.layers[0]
    query = layer.num_heads * layer.head_dim
    kv = layer.num_kv_heads * layer.head_dim
    return ((query + 2 * kv, hidden), (hidden, query), (2 * inner, hidden), (hidden, inner))


@functools.cache
def _gemm_seconds(
    num_rows: int, outputs: int, inputs: int, dtype: torch.dtype, device: torch.device
) -> float:
    """Returns the time of the faster of torch's linear layer and the model's own.

    The model's own may store the weight in another form.
    """
    weight = torch.randn(outputs, inputs, device=device).to(dtype)
    x = torch.randn(num_rows, inputs, device=device).to(dtype)
    method = UnquantizedLinearMethod.from_tensors(weight)
    return min(
        best_seconds(lambda: functional.linear(x, weight)), best_seconds(lambda: method.apply(x))
    )


def best_seconds(function: Callable[[], object], timed_seconds: float = _TIMED_SECONDS) -> float:
    """Returns the shortest time of a call, in seconds, from many timings.

    There are many because undisturbed timings are rare on a shared machine.
    """
    timer = Timer("function()", globals={"function": function}, num_threads=torch.get_num_threads())
    return float(min(timer.blocked_autorange(min_run_time=timed_seconds).times))
