"""Experts in one launch, as on GPUs, against expert by expert: by torch's `grouped_mm`, which runs
on CPUs, too, and by our kernel, which Triton interprets here.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from triton.runtime import interpreter

from tandem.tests.tiny import ROUTED, make_tiny_model
from tandem.tests.tiny_quantized import FP8, make_quantized_model
from tandem.tests.workers.model.helpers import load, multiply_row_by_row
from tandem.workers.model.kernels.c import cpu
from tandem.workers.model.kernels.triton.grouped import grouped_linear
from tandem.workers.model.layers.experts import RoutedExperts
from tandem.workers.model.layers.grouped import (
    ExpertRows,
    GroupedLinear,
    can_stack,
    multiplies_in_one_launch,
)
from tandem.workers.model.loader import (
    build_model,
    checkpoint_reader,
    load_weights,
    open_checkpoint,
)
from tandem.workers.model.quant import unquantized
from tandem.workers.model.quant.base import LinearMethod
from tandem.workers.model.quant.unquantized import UnquantizedLinearMethod


def layers_of(folder: Path, dtype: str = "float32") -> list[RoutedExperts]:
    modules = load(folder, dtype=dtype, num_blocks=4)._model.modules()
    return [module for module in modules if isinstance(module, RoutedExperts)]


def check(
    experts: RoutedExperts, inputs: list[torch.Tensor], tolerance: float, *, by_torch: bool
) -> None:
    expected = [experts(x, None) for x in inputs]
    assert experts._grouped is None
    experts.group(by_torch=by_torch)
    assert experts.maps() == ([], [])
    for x, theirs in zip(inputs, expected, strict=True):
        ours = experts(x, None)
        assert ours.dtype is theirs.dtype
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(
            experts(x, x.clone()), x + theirs, rtol=tolerance, atol=tolerance
        )


@pytest.mark.parametrize("by_torch", [True, False])
@pytest.mark.parametrize("family", ROUTED)
def test_the_outputs_are_those_of_single_experts(
    tmp_path: Path, family: str, by_torch: bool
) -> None:
    """One token leaves most experts without rows, and equal tokens leave all but a few."""
    layers = layers_of(make_tiny_model(tmp_path, family))
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(rows, 64, generator=generator) for rows in (1, 2, 7, 130)]
    inputs.append(inputs[0].expand(33, -1).contiguous())
    check(layers[0], inputs, 2e-5, by_torch=by_torch)


@pytest.mark.parametrize("by_torch", [True, False])
@pytest.mark.parametrize("family", ROUTED)
def test_in_bfloat16(
    tmp_path: Path, family: str, by_torch: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With plain weights, because GPUs do not pack them."""
    monkeypatch.setattr(cpu, "can_multiply", lambda weight: False)
    monkeypatch.setattr(unquantized, "_onednn_can_pack", lambda weight: False)
    monkeypatch.setattr(cpu, "can_gate", lambda weight: False)
    experts = layers_of(make_tiny_model(tmp_path, family), "bfloat16")[0]
    generator = torch.Generator().manual_seed(1)
    inputs = [torch.randn(40, 64, generator=generator).bfloat16()]
    check(experts, inputs, 0.05, by_torch=by_torch)


@pytest.mark.parametrize("family", ROUTED)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_tokens_output_is_the_same_bits_in_any_batch(
    tmp_path: Path, family: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Alone, beside others, and among more rows of an expert than a tile has."""
    multiply_row_by_row(monkeypatch)
    monkeypatch.setattr(cpu, "can_multiply", lambda weight: False)
    monkeypatch.setattr(unquantized, "_onednn_can_pack", lambda weight: False)
    monkeypatch.setattr(cpu, "can_gate", lambda weight: False)
    experts = layers_of(make_tiny_model(tmp_path, family), dtype)[0]
    experts.group(by_torch=False)
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(90, 64, generator=generator).to(getattr(torch, dtype))
    chosen, weights = experts._route(x)
    whole = fixed_order(experts, x, chosen, weights)
    for start, stop in ((0, 1), (0, 0), (89, 90), (30, 33), (5, 90)):
        part = slice(start, stop)
        found = fixed_order(experts, x[part], chosen[part], weights[part])
        assert torch.equal(found, whole[part])


def fixed_order(
    experts: RoutedExperts, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    assert experts._grouped is not None
    return experts._in_fixed_order(x, chosen, weights, *experts._grouped)


def test_rows_are_sorted_by_expert() -> None:
    chosen = torch.tensor([[5, 0], [2, 5], [0, 2]])
    rows = ExpertRows.sort(chosen, 7)
    assert rows.order.tolist() == [1, 4, 2, 5, 0, 3]
    assert rows.experts.tolist() == [0, 0, 2, 2, 5, 5]
    assert rows.ends.tolist() == [2, 2, 4, 4, 4, 6, 6]
    assert rows.ends.dtype is torch.int32


def test_which_weights_are_stacked(monkeypatch: pytest.MonkeyPatch) -> None:
    def maps(outputs: int, inputs: int) -> list[LinearMethod]:
        weights = (torch.randn(outputs, inputs) for _ in range(3))
        return [UnquantizedLinearMethod.from_tensors(each, torch.ones(outputs)) for each in weights]

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert not multiplies_in_one_launch(maps(8, 8)), "not on a GPU"
    methods = maps(8, 4)
    assert can_stack(methods)
    assert not can_stack([*maps(8, 4), *maps(4, 8)])
    x = torch.randn(2, 4)
    expected = [methods[0].apply(x[:1]), methods[2].apply(x[1:])]
    rows = ExpertRows.sort(torch.tensor([[0], [2]]), 3)
    torch.testing.assert_close(GroupedLinear(methods).sorted(x, rows), torch.cat(expected))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("group", [64, 192])
def test_weights_in_fp8(dtype: str, group: int) -> None:
    """With scales of groups of inputs, and bias; 70 rows of one expert, none of another."""
    torch.manual_seed(0)
    x = torch.randn(40, 192).to(getattr(torch, dtype))
    numbers = torch.randn(5, 80, 192).to(torch.float8_e4m3fn)
    scales = torch.rand(5, 80, 192 // group) + 0.1
    bias = torch.randn(5, 80).to(x.dtype)
    restored = numbers.double().view(5, 80, -1, group) * scales.double()[..., None]
    weight = restored.flatten(2)
    chosen = torch.tensor([[0, 2]] * 35 + [[2, 3]] * 3 + [[4, 2], [3, 0]])
    rows = ExpertRows.sort(chosen, 5)
    expected = torch.einsum("ti,tcoi->tco", x.double(), weight[chosen]) + bias.double()[chosen]
    arguments = (numbers, scales, bias, rows.order, rows.ends, 2)
    by_row = grouped_linear(x, *arguments, from_tokens=True)
    by_place = torch.empty_like(by_row).index_copy_(0, rows.order, by_row)
    tolerance = 1e-5 if dtype == "float32" else 1e-2
    assert (by_place - expected.flatten(0, 1)).norm() <= tolerance * expected.norm()
    of_rows = grouped_linear(x[rows.order // 2], *arguments, from_tokens=False)
    assert torch.equal(of_rows, by_place)


def test_the_kernel_reads_its_operands_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in programs without rows: the launch has the largest number of tiles."""
    builder = interpreter.interpreter_builder
    load_masked = builder.create_masked_load
    addresses: list[int] = []

    def load_recorded(pointers: Any, mask: Any, *rest: Any) -> Any:
        addresses.extend(pointers.data[mask.data].tolist())
        return load_masked(pointers, mask, *rest)

    monkeypatch.setattr(builder, "create_masked_load", load_recorded)
    rows = ExpertRows.sort(torch.tensor([[0], [0], [2]]), 3)
    x, weight, bias = torch.randn(3, 64), torch.randn(3, 80, 64), torch.randn(3, 80)
    grouped_linear(x, weight, None, bias, rows.order, rows.ends, 1, from_tokens=True)
    places = {
        address
        for each in (x, weight, bias, rows.order, rows.ends)
        for address in range(each.data_ptr(), each.data_ptr() + each.nbytes, each.itemsize)
    }
    assert addresses
    assert places.issuperset(addresses)


def test_a_checkpoint_in_fp8_is_multiplied_as_its_dequantised_weights(tmp_path: Path) -> None:
    """The tree of a GPU, in this machine's memory."""
    sizes = {"hidden_size": 128, "moe_intermediate_size": 64, "family": "qwen3_moe"}
    blocks = {**FP8, "weight_block_size": [32, 64]}
    folders = make_quantized_model(tmp_path, blocks, **sizes)
    found = []
    for folder, dtype in zip(folders, (torch.bfloat16, torch.float32), strict=True):
        checkpoint = open_checkpoint(folder)
        model = build_model(checkpoint.config, dtype, device_type="cuda")
        load_weights(model, checkpoint_reader(checkpoint), torch.device("cpu"))
        layer = next(each for each in model.modules() if isinstance(each, RoutedExperts))
        layer.group(by_torch=dtype is torch.float32)
        x = torch.randn(20, 128, generator=torch.Generator().manual_seed(0)).to(dtype)
        found.append(layer(x, None).float())
        assert layer._grouped is not None
        is_float8 = [stack._weight.dtype is torch.float8_e4m3fn for stack in layer._grouped]
        assert is_float8 == [dtype is torch.bfloat16] * 2
    assert (found[0] - found[1]).norm() <= 0.02 * found[1].norm()
