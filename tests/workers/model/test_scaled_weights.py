"""FP8 weights on GPUs: `_scaled_mm` runs on CPUs, too; its numbers are compared with the CPU's."""

from functools import cache

import pytest
import torch

from tandem.workers.model import kernels
from tandem.workers.model.kernels.triton import elementwise
from tandem.workers.model.quant import scaled
from tandem.workers.model.quant.base import LinearPartition, PlainLinearMethod
from tandem.workers.model.quant.fp8 import Fp8LinearMethod
from tandem.workers.model.quant.scaled import ScaledLinearMethod, can_scale, quantize_rows

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu does it on the GPU")


@cache
def takes_scales_of_rows() -> bool:
    """Returns True if `_scaled_mm` takes them on CPUs; torch 2.11 does not."""
    numbers, scales = quantize_rows(torch.randn(16, 32))
    try:
        ScaledLinearMethod.from_numbers(numbers, scales, None).apply(torch.ones(3, 32).bfloat16())
    except RuntimeError:
        return False
    return True


needs_product = pytest.mark.skipif(
    not takes_scales_of_rows(), reason="this torch has one scale for a product on CPUs"
)

BOUND = 0.06
"""The relative error in the 2-norm: x and W are rounded to 4 significant bits each (2.6 % each)."""


def partition(outputs: int, inputs: int, *, is_expert: bool = False) -> LinearPartition:
    maps = (("m", outputs, slice(None)),)
    return LinearPartition(outputs=maps, num_inputs=inputs, has_bias=True, is_expert=is_expert)


@needs_product
@pytest.mark.parametrize("rows", [1, 5, 70])
def test_a_rounded_layer_is_near_the_cpus(rows: int) -> None:
    """Rows and outputs have sizes from 1e-3 to 1e3, so each of their scales matters."""
    torch.manual_seed(0)
    weight = (torch.randn(96, 128) * torch.logspace(-2, 2, 96)[:, None]).bfloat16()
    x = (torch.randn(rows, 128) * torch.logspace(-3, 3, rows)[:, None]).bfloat16()
    sizes = x.double().norm(dim=1)[:, None] * weight.double().norm(dim=1)
    exact = x.double() @ weight.double().t() / sizes
    ours, cpus = (
        loaded(made, weight, torch.zeros(96)).apply(x).double() / sizes
        for made in (ScaledLinearMethod(), Fp8LinearMethod())
    )
    assert (ours - cpus).norm() <= BOUND * exact.norm()
    assert (ours - exact).norm() <= BOUND * exact.norm()


@needs_product
def test_bias_and_residual_are_added() -> None:
    torch.manual_seed(0)
    weight = torch.randn(96, 128).bfloat16()
    bias = torch.randn(96)
    x = torch.randn(7, 128).bfloat16()
    residual = torch.randn(7, 96).bfloat16()
    expected = loaded(ScaledLinearMethod(), weight, torch.zeros(96)).apply(x)
    found = loaded(ScaledLinearMethod(), weight, bias).apply(x, residual.clone())
    torch.testing.assert_close(found, expected + bias.bfloat16() + residual, rtol=0.02, atol=0.1)


def loaded(made: PlainLinearMethod, weight: torch.Tensor, bias: torch.Tensor) -> PlainLinearMethod:
    """Returns a method with this weight and bias: on a GPU if it is scaled, else on CPUs."""
    made.device_type = "cuda" if isinstance(made, ScaledLinearMethod) else "cpu"
    made.create_weights(partition(*weight.shape), torch.bfloat16)
    assert made.bias is not None
    made.weight.data = weight.clone()
    made.bias.data = bias.bfloat16()
    made.process_after_load()
    return made


def test_the_kernel_rounds_rows_as_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    x = torch.randn(40, 200).bfloat16()[:, :180] * torch.logspace(-30, 30, 40)[:, None].bfloat16()
    x[0] = 0
    x[1, 3] = torch.nan
    x[2, 7] = -torch.inf
    numbers, scales = quantize_rows(x)
    monkeypatch.setattr(kernels, "of", lambda tensor: elementwise)
    ours, our_scales = scaled.quantize_rows(x)
    assert torch.equal(ours.view(torch.uint8), numbers.view(torch.uint8))
    torch.testing.assert_close(our_scales, scales, rtol=0, atol=0, equal_nan=True)
    restored = numbers[3:].float() * scales[3:, None]
    peaks = x[3:].float().abs().amax(1, keepdim=True)
    bounds = (x[3:].float().abs() / 16).maximum(peaks / 448 * 2**-10)
    assert ((restored - x[3:].float()).abs() <= bounds * 1.001).all()


@needs_product
def test_a_row_that_is_not_finite_spoils_no_other() -> None:
    x = torch.ones(3, 32).bfloat16()
    x[1, 4] = torch.inf
    numbers, scales = quantize_rows(torch.randn(16, 32))
    y = ScaledLinearMethod.from_numbers(numbers, scales, None).apply(x)
    assert y[1].isnan().all()
    assert y[[0, 2]].isfinite().all()


def test_which_weights_are_multiplied_in_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    def can(part: LinearPartition, *, exact: bool = False, device: str = "cuda") -> bool:
        return can_scale(part, torch.bfloat16, device, batch_invariant=exact)

    assert can(partition(96, 128))
    assert not can(partition(96, 128), exact=True)
    assert not can(partition(96, 128), device="cpu")
    assert not can(partition(96, 120))
    assert not can(partition(90, 128))
    assert not can(partition(96, 128, is_expert=True))
    assert not can_scale(partition(96, 128), torch.float16, "cuda", batch_invariant=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for capability, expected in (((8, 0), False), ((8, 9), True), ((9, 0), True)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda found=capability: found)
        assert can(partition(96, 128)) is expected
