"""Experts in one launch, as on GPUs, against expert by expert; `grouped_mm` runs on CPUs, too."""

from pathlib import Path

import pytest
import torch

from tandem.tests.tiny import ROUTED, make_tiny_model
from tandem.tests.workers.model.helpers import load
from tandem.workers.model.kernels.c import cpu
from tandem.workers.model.layers.experts import RoutedExperts
from tandem.workers.model.layers.grouped import ExpertRows, GroupedLinear, can_group
from tandem.workers.model.quant import unquantized
from tandem.workers.model.quant.base import LinearMethod
from tandem.workers.model.quant.unquantized import UnquantizedLinearMethod


def layers_of(folder: Path, dtype: str = "float32") -> list[RoutedExperts]:
    modules = load(folder, dtype=dtype, num_blocks=4)._model.modules()
    return [module for module in modules if isinstance(module, RoutedExperts)]


def check(experts: RoutedExperts, inputs: list[torch.Tensor], tolerance: float) -> None:
    expected = [experts(x, None) for x in inputs]
    assert experts._grouped is None
    experts.group()
    assert experts.maps() == ([], [])
    for x, theirs in zip(inputs, expected, strict=True):
        ours = experts(x, None)
        assert ours.dtype is theirs.dtype
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(
            experts(x, x.clone()), x + theirs, rtol=tolerance, atol=tolerance
        )


@pytest.mark.parametrize("family", ROUTED)
def test_the_outputs_are_those_of_single_experts(tmp_path: Path, family: str) -> None:
    """One token leaves most experts without rows, and equal tokens leave all but a few."""
    layers = layers_of(make_tiny_model(tmp_path, family))
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(rows, 64, generator=generator) for rows in (1, 2, 7, 130)]
    inputs.append(inputs[0].expand(33, -1).contiguous())
    assert layers
    for experts in layers:
        check(experts, inputs, 2e-5)


@pytest.mark.parametrize("family", ROUTED)
def test_in_bfloat16(tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With plain weights, because GPUs do not pack them."""
    monkeypatch.setattr(cpu, "can_multiply", lambda weight: False)
    monkeypatch.setattr(unquantized, "_onednn_can_pack", lambda weight: False)
    monkeypatch.setattr(cpu, "can_gate", lambda weight: False)
    experts = layers_of(make_tiny_model(tmp_path, family), "bfloat16")[0]
    generator = torch.Generator().manual_seed(1)
    check(experts, [torch.randn(40, 64, generator=generator).bfloat16()], 0.05)


def test_rows_are_sorted_by_expert() -> None:
    chosen = torch.tensor([[5, 0], [2, 5], [0, 2]])
    rows = ExpertRows.sort(chosen, 7)
    assert rows.order.tolist() == [1, 4, 2, 5, 0, 3]
    assert rows.experts.tolist() == [0, 0, 2, 2, 5, 5]
    assert rows.ends.tolist() == [2, 2, 4, 4, 4, 6, 6]
    assert rows.ends.dtype is torch.int32


def test_only_plain_aligned_weights_are_stacked() -> None:
    def maps(outputs: int, inputs: int) -> list[LinearMethod]:
        weights = (torch.randn(outputs, inputs) for _ in range(3))
        return [UnquantizedLinearMethod.from_tensors(each, torch.ones(outputs)) for each in weights]

    assert not can_group(maps(6, 8))
    assert not can_group(maps(8, 6))
    methods = maps(8, 4)
    assert can_group(methods)
    x = torch.randn(2, 4)
    expected = [methods[0].apply(x[:1]), methods[2].apply(x[1:])]
    rows = ExpertRows.sort(torch.tensor([[0], [2]]), 3)
    torch.testing.assert_close(GroupedLinear(methods)(x, rows), torch.cat(expected))
