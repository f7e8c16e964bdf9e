"""Weights of 8 and 4 bits: the kernel against what its numbers stand for, and whole models against transformers."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch.nn import functional

from tandem.tests.tiny import make_tiny_model
from tandem.workers.model.config import CheckpointError, ExpertsConfig
from tandem.workers.model.device import DTYPES
from tandem.workers.model.kernels import cpu
from tandem.workers.model.loader import open_checkpoint, rank_weight_bytes
from tandem.workers.model.module import all_parameters
from tandem.workers.model.quant.integer import BITS, IntegerLinearMethod, restore_weight, round_weight
from tandem.workers.model.registry import with_quantization
from tandem.workers.model.runner import ModelRunner

from .helpers import Driver, prompt, reference, reference_greedy

needs_kernel = pytest.mark.skipif(
    not cpu.can_multiply_int(64, 64), reason="no kernel: AVX-512 VNNI and BF16 are missing"
)

NOT_FINITE = (float("nan"), -float("nan"), float("inf"), -float("inf"))


def rounded_inputs(x: torch.Tensor, group_size: int) -> torch.Tensor:
    """What the kernel makes of x [rows, inputs]: the same in 8 bits by groups."""
    groups = x.float().view(len(x), -1, group_size)
    scales = groups.abs().amax(-1, keepdim=True) / 127
    rounded: torch.Tensor = (groups / scales.where(scales > 0, 1)).round() * scales
    return rounded.view_as(x)


@pytest.mark.parametrize("bits", BITS.values())
def test_weights_are_rounded_to_the_nearest_number(bits: int) -> None:
    weight = torch.randn(40, 128).bfloat16()
    weight[3] = 0
    numbers, scales, zeros = round_weight(weight, bits, 64)
    assert numbers.int().max() < 2**bits
    error = (restore_weight(numbers, scales, zeros, bits) - weight).abs().view(40, 2, 64)
    assert (error <= scales.float()[..., None] * 0.54).all()  # scales are bfloat16
    assert not restore_weight(numbers, scales, zeros, bits)[3].any()


@pytest.mark.parametrize("bits", BITS.values())
@pytest.mark.parametrize("value", NOT_FINITE)
def test_a_weight_that_is_not_finite_stays_so(bits: int, value: float) -> None:
    weight = torch.randn(4, 128)
    plain = weight.clone()
    weight[2, 70] = value
    numbers, scales, zeros = round_weight(weight, bits, 64)
    assert numbers.int().max() < 2**bits
    restored = restore_weight(numbers, scales, zeros, bits)
    assert restored[2, 64:].isnan().all()
    expected = restore_weight(*round_weight(plain, bits, 64), bits)
    restored[2, 64:] = expected[2, 64:]
    assert torch.equal(restored, expected)


@needs_kernel
@pytest.mark.parametrize("bits", BITS.values())
@pytest.mark.parametrize("value", NOT_FINITE)
def test_an_input_that_is_not_finite_makes_its_row_nan_and_no_other(bits: int, value: float) -> None:
    weight, x = torch.randn(96, 128), torch.randn(14, 128).bfloat16()
    packed = cpu.pack_linear_int(*round_weight(weight, bits, 64), bits)
    for activation in (None, *cpu.ACTIVATIONS):
        expected = cpu.linear_int(x, packed, 96, activation=activation)
        bad = x.clone()
        bad[3, 100] = value
        expected[3] = float("nan")
        found = cpu.linear_int(bad, packed, 96, activation=activation)
        assert torch.equal(found.isnan(), expected.isnan())
        assert torch.equal(found.nan_to_num(), expected.nan_to_num())
    weight[5, 7] = value
    y = cpu.linear_int(x, cpu.pack_linear_int(*round_weight(weight, bits, 64), bits), 96)
    assert y[:, 5].isnan().all()
    assert y.isnan().sum() == len(y)


@needs_kernel
def test_inputs_next_to_zero_are_zero() -> None:
    x = torch.full((1, 64), 1e-38).bfloat16()
    assert not cpu.linear_int(x, cpu.pack_linear_int(*round_weight(torch.ones(32, 64), 8, 64), 8), 32).any()


@needs_kernel
@pytest.mark.parametrize("bits", BITS.values())
@pytest.mark.parametrize(("outputs", "inputs", "group_size"), [(96, 64, 64), (70, 192, 64), (64, 384, 192)])
def test_the_kernel_computes_what_its_numbers_stand_for(bits: int, outputs: int, inputs: int, group_size: int) -> None:
    torch.manual_seed(bits + outputs)
    numbers, scales, zeros = round_weight(torch.randn(outputs, inputs), bits, group_size)
    packed = cpu.pack_linear_int(numbers, scales, zeros, bits)
    for rows in (1, 2, 7, 12, 13, 40):
        x, residual = torch.randn(rows, inputs).bfloat16(), torch.randn(rows, outputs).bfloat16()
        bias = torch.randn(outputs).bfloat16()
        x[0, :group_size] = 0
        expected = rounded_inputs(x, group_size) @ restore_weight(numbers, scales, zeros, bits).T + bias + residual
        y = cpu.linear_int(x, packed, outputs, bias, residual)
        assert torch.allclose(y.float(), expected, rtol=0.01, atol=0.1)
        alone = [cpu.linear_int(x[i : i + 1], packed, outputs, bias, residual[i : i + 1]) for i in range(rows)]
        assert torch.equal(torch.cat(alone), y)  # a row does not depend on the others


@needs_kernel
@pytest.mark.parametrize("bits", BITS.values())
@pytest.mark.parametrize(("outputs", "inputs", "group_size"), [(96, 64, 64), (70, 192, 64), (64, 384, 8)])
def test_a_zero_of_each_output_and_group_is_subtracted(bits: int, outputs: int, inputs: int, group_size: int) -> None:
    torch.manual_seed(bits + outputs)
    numbers, scales, _ = round_weight(torch.randn(outputs, inputs), bits, group_size)
    zeros = torch.randint(0, 256, scales.shape, dtype=torch.uint8)
    weight = restore_weight(numbers, scales, zeros, bits)
    packed = cpu.pack_linear_int(numbers, scales, zeros, bits)
    for rows in (1, 7, 13):
        x = torch.randn(rows, inputs).bfloat16()
        expected = rounded_inputs(x, group_size) @ weight.T
        found = cpu.linear_int(x, packed, outputs)
        assert ((found.float() - expected).norm() / expected.norm()).item() < 0.004
    middle = torch.full_like(zeros, 128)
    both = [cpu.linear_int(x, cpu.pack_linear_int(numbers, scales, each, bits), outputs) for each in (middle, None)]
    assert torch.equal(*both)


@needs_kernel
@pytest.mark.parametrize("bits", BITS.values())
def test_inputs_of_16_bits_are_the_inputs(bits: int) -> None:
    torch.manual_seed(bits)
    rounded = round_weight(torch.randn(96, 128), bits, 64)
    packed, weight = cpu.pack_linear_int(*rounded, bits), restore_weight(*rounded, bits)
    x = torch.randn(13, 128).bfloat16()
    x[0, :64] = 0
    x[1, 64:] = 1e-38
    x[2, 5] = 200.0
    y, sums = cpu.linear_int(x, packed, 96, input_bits=16), x.float() @ weight.T
    assert torch.allclose(y.float(), sums, rtol=0.005, atol=0.05)  # y is bfloat16
    coarse = cpu.linear_int(x, packed, 96)
    assert (y.float() - sums).norm() < 0.5 * (coarse.float() - sums).norm()
    alone = [cpu.linear_int(x[i : i + 1], packed, 96, input_bits=16) for i in range(len(x))]
    assert torch.equal(torch.cat(alone), y)
    x[3, 7] = torch.inf
    assert cpu.linear_int(x, packed, 96, input_bits=16)[3].isnan().all()


def test_weights_of_4_bits_with_a_step_and_a_smallest_weight_stay() -> None:
    """As Q4_1 keeps them in groups of 32."""
    torch.manual_seed(0)
    step, low = 0.01 + torch.rand(40, 4, 1), -torch.rand(40, 4, 1) * 8
    numbers = torch.randint(0, 16, (40, 4, 32))
    numbers[..., 0], numbers[..., 1] = 0, 15
    weight = ((numbers + low) * step).flatten(1)
    error = (restore_weight(*round_weight(weight, 4, 32), 4) - weight).view(40, 4, 32).abs()
    assert (error < 0.1 * step).all()


@needs_kernel
@pytest.mark.parametrize("bits", BITS.values())
def test_gate_and_up_are_fused(bits: int) -> None:
    weight = torch.randn(128, 64).bfloat16()
    x = torch.randn(5, 64).bfloat16()
    plain, fused = (round_weight(each, bits, 64) for each in (weight, cpu.alternate(*weight.chunk(2))))
    gate, up = (rounded_inputs(x, 64) @ restore_weight(*plain, bits).T).chunk(2, dim=-1)
    y = cpu.linear_int(x, cpu.pack_linear_int(*fused, bits), 128, activation="silu")
    assert torch.allclose(y.float(), functional.silu(gate) * up, rtol=0.02, atol=0.3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"))


def load(folder: Path, quantization: str, dtype: str) -> ModelRunner:
    checkpoint = open_checkpoint(folder, quantization=quantization)
    return ModelRunner.load(checkpoint, dtype=dtype, device="cpu", num_blocks=64, block_size=16)


def linears(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Linear]]:
    return ((name, each) for name, each in model.named_modules() if isinstance(each, torch.nn.Linear))


@pytest.mark.parametrize("quantization", BITS)
def test_a_model_generates_as_transformers_with_the_rounded_weights(folder: Path, quantization: str) -> None:
    expected = reference(folder)
    for name, linear in linears(expected):
        bits = BITS["int8"] if name == "lm_head" else BITS[quantization]
        weight = linear.weight.data
        group_size = next(size for size in range({8: 64, 4: 32}[bits], 0, -8) if weight.shape[1] % size == 0)
        linear.weight = torch.nn.Parameter(restore_weight(*round_weight(weight, bits, group_size), bits))
    driver = Driver(load(folder, quantization, "float32"))
    assert driver.generate(1, prompt(30), 12) == reference_greedy(expected, prompt(30), 12)


@pytest.mark.parametrize("quantization", BITS)
def test_tokens_do_not_depend_on_batch_and_chunks(folder: Path, quantization: str) -> None:
    runner = load(folder, quantization, "bfloat16")
    runner.warmup()
    alone = Driver(runner).generate(1, prompt(45), 8)
    driver = Driver(runner)
    driver.run(driver.step(7, prompt(20, 3), 0))
    for position, (begin, end) in enumerate(pairwise((0, 7, 30, 45)), 20):
        tokens = driver.run(driver.step(1, prompt(45)[begin:end], begin), driver.step(7, [5], position))
    generated = [tokens[0]]
    while len(generated) < 8:
        generated.append(driver.run(driver.step(1, generated[-1:], 44 + len(generated)))[0])
    assert generated == alone


def test_rounded_weights_take_fewer_bytes_and_have_caches_of_their_own(folder: Path) -> None:
    plain, *rounded = (open_checkpoint(folder, quantization=quantization) for quantization in (None, *BITS))
    sizes = [rank_weight_bytes(each.config, "bfloat16", 1, 0) for each in (plain, *rounded)]
    assert sizes == sorted(sizes, reverse=True)
    assert len({each.kv_layout("bfloat16").digest for each in (plain, *rounded)}) == 3


@pytest.mark.parametrize(("quantization", "dtype"), [(name, dtype) for name in BITS for dtype in DTYPES])
def test_the_plan_counts_the_bytes_that_are_kept(folder: Path, quantization: str, dtype: str) -> None:
    """Packed in 4 bits where there is a kernel, else in a byte."""
    config = open_checkpoint(folder, quantization=quantization).config
    tree = load(folder, quantization, dtype)._model
    methods = [each for each in tree.modules() if isinstance(each, IntegerLinearMethod) and not each._is_tied]
    kept = sum(tensor.nbytes for each in methods for tensor in each._packed if tensor is not None)
    others = sum(each.data.nbytes for each in all_parameters(tree))
    assert rank_weight_bytes(config, dtype, 1, 0) == kept + others


def test_experts_in_mxfp4_are_not_plain(folder: Path) -> None:
    config = open_checkpoint(folder).config
    experts = ExpertsConfig(num_experts=4, num_chosen=2, intermediate_size=32, layers=(0,), is_mxfp4=True)
    with pytest.raises(CheckpointError, match="has a quantization_config, so int4 cannot be asked for"):
        with_quantization(replace(config, experts=experts), "int4")


def test_what_cannot_be_rounded_is_refused(folder: Path) -> None:
    rounded = open_checkpoint(folder, quantization="int8").config
    with pytest.raises(CheckpointError, match="has a quantization_config, so int4 cannot be asked for"):
        with_quantization(rounded, "int4")
    with pytest.raises(CheckpointError, match="runs by transformers' code, whose weights stay as they are"):
        open_checkpoint(folder, "transformers", quantization="int4")
