"""Measures matrix products of few rows: torch's, ours, and those of fewer bits."""

from functools import partial
from typing import Final

import torch
from torch.nn import functional

from tandem.tests.bench.gpu.bench import Bench
from tandem.workers.model.costs.measure import linear_shapes
from tandem.workers.model.kernels.triton.int4 import restore
from tandem.workers.model.kernels.triton.linear import linear
from tandem.workers.model.quant.int4 import pack

_FP8: Final = torch.float8_e4m3fn
_GROUP: Final = 128  # inputs that share a scale, in int4


@torch.inference_mode()
def measure(bench: Bench) -> None:
    """Measures every linear map of a layer with 1 to 128 rows, and grouped products of experts."""
    for num_rows in bench.pick((1, 2, 4, 8, 16, 32, 64, 128), (1, 4)):
        for outputs, inputs in linear_shapes(bench.config)[: bench.pick(4, 1)]:
            _linear(bench, num_rows, outputs, inputs)
        _grouped(bench, num_rows)


def _linear(bench: Bench, num_rows: int, outputs: int, inputs: int) -> None:
    device = bench.torch_device
    name = f"{num_rows} x {inputs} x {outputs}"
    weight = torch.randn(outputs, inputs, device=device).bfloat16()
    x = torch.randn(num_rows, inputs, device=device).bfloat16()
    bench.attempt(f"{name}: torch, bfloat16", partial(functional.linear, x, weight))
    bench.time(f"{name}: ours, row by row", partial(linear, x, weight, None, None))
    x8 = x.to(_FP8)
    weight8 = weight.to(_FP8)
    scales = torch.ones(num_rows, 1, device=device)
    weight_scales = torch.ones(1, outputs, device=device)

    def fp8() -> torch.Tensor:
        return torch._scaled_mm(
            x8,
            weight8.t(),
            scale_a=scales,
            scale_b=weight_scales,
            out_dtype=torch.bfloat16,
        )

    bench.attempt(f"{name}: torch, FP8, a scale a row", fp8)
    numbers = torch.randint(0, 16, (outputs, inputs), dtype=torch.uint8, device=device)
    terms = torch.ones(max(1, inputs // _GROUP), outputs, 2, device=device).bfloat16()
    words = pack(numbers)
    packed = words if bench.is_gpu else torch._convert_weight_to_int4pack_for_cpu(numbers.int(), 1)
    bench.attempt(f"{name}: torch, int4", lambda: _int4(x, packed, terms))
    if bench.is_gpu:
        bench.time(f"{name}: int4, restored", lambda: functional.linear(x, restore(words, terms)))


def _int4(x: torch.Tensor, words: torch.Tensor, terms: torch.Tensor) -> torch.Tensor:
    group = x.shape[1] // len(terms)
    if x.is_cuda:
        return torch._weight_int4pack_mm(x, words, group, terms)
    return torch._weight_int4pack_mm_for_cpu(x, words, group, terms)


def _grouped(bench: Bench, num_rows: int) -> None:
    """Multiplies each row by 8 of 128 experts, as Qwen3-30B-A3B does."""
    experts, chosen, inputs, outputs = bench.pick((128, 8, 2048, 1536), (6, 2, 64, 96))
    device = bench.torch_device
    weight = torch.randn(experts, inputs, outputs, device=device).bfloat16()
    x = torch.randn(num_rows * chosen, inputs, device=device).bfloat16()
    numbers = torch.randint(0, experts, (num_rows * chosen,), device=device).sort().values
    ends = torch.searchsorted(
        numbers, torch.arange(experts, device=device), right=True, out_int32=True
    )
    bench.attempt(
        f"{num_rows} rows, {chosen} of {experts} experts",
        partial(functional.grouped_mm, x, weight, offs=ends),
    )
