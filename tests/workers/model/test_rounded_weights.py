"""Weights of 8 and 4 bits and in FP8: the kernels against what their numbers stand for, and whole
models against transformers.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch.nn import functional

from tandem.tests.bench.engine.options import ROUNDED
from tandem.tests.tiny import make_tiny_model
from tandem.tests.workers.model.helpers import Driver, prompt, reference, reference_greedy
from tandem.tests.workers.model.test_parallel import on_ranks
from tandem.workers.model.config import CheckpointError, ExpertsConfig
from tandem.workers.model.device import DTYPES
from tandem.workers.model.kernels.c import cpu
from tandem.workers.model.loader import open_checkpoint, rank_weight_bytes
from tandem.workers.model.module import all_parameters
from tandem.workers.model.quant.fp8 import Fp8LinearMethod
from tandem.workers.model.quant.integer import (
    BITS,
    IntegerLinearMethod,
    restore_weight,
    round_weight,
)
from tandem.workers.model.quant.rounded import RoundedLinearMethod
from tandem.workers.model.registry import with_quantization
from tandem.workers.model.runner import ModelRunner

ROUNDS_INPUTS = cpu.linear_form("_int") not in (0, cpu.WIDENED)
needs_kernel = pytest.mark.skipif(not cpu.can_multiply_int(64, 64), reason="no kernel: no compiler")
needs_rounding = pytest.mark.skipif(
    not ROUNDS_INPUTS, reason="no dot product of integers: inputs stay as they are"
)

METHODS: dict[str, Callable[[], RoundedLinearMethod]] = {
    "int8": lambda: IntegerLinearMethod(8),
    "int4": lambda: IntegerLinearMethod(4),
    "fp8": Fp8LinearMethod,
}
NOT_FINITE = (float("nan"), -float("nan"), float("inf"), -float("inf"))


def rounded_inputs(x: torch.Tensor, group_size: int) -> torch.Tensor:
    """What the kernel makes of x [rows, inputs]: the same in 8 bits by groups."""
    groups = x.float().view(len(x), -1, group_size)
    scales = groups.abs().amax(-1, keepdim=True) / 127
    rounded: torch.Tensor = (groups / scales.where(scales > 0, 1)).round() * scales
    return rounded.view_as(x)


@pytest.fixture(params=METHODS)
def method(request: pytest.FixtureRequest) -> RoundedLinearMethod:
    """A method for which there is a kernel."""
    made = METHODS[request.param]()
    if not made.can_multiply(64, 64):
        pytest.skip("no kernel: no compiler")
    return made


def rounds_inputs(method: RoundedLinearMethod) -> bool:
    return ROUNDS_INPUTS and isinstance(method, IntegerLinearMethod)


def taken_inputs(method: RoundedLinearMethod, x: torch.Tensor, group_size: int) -> torch.Tensor:
    """What the kernel of a method makes of x [rows, inputs]."""
    return rounded_inputs(x, group_size) if rounds_inputs(method) else x.float()


@pytest.mark.parametrize("bits", BITS.values())
def test_weights_are_rounded_to_the_nearest_number(bits: int) -> None:
    weight = torch.randn(40, 128).bfloat16()
    weight[3] = 0
    numbers, scales, zeros = round_weight(weight, bits, 64)
    assert numbers.int().max() < 2**bits
    error = (restore_weight(numbers, scales, zeros, bits) - weight).abs().view(40, 2, 64)
    assert (error <= scales.float()[..., None] * 0.54).all()  # scales are bfloat16
    assert not restore_weight(numbers, scales, zeros, bits)[3].any()


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("value", NOT_FINITE)
def test_a_weight_that_is_not_finite_stays_so(name: str, value: float) -> None:
    method, weight = METHODS[name](), torch.randn(4, 128)
    expected = method.restore(method.round(weight, 64))
    weight[2, 70] = value
    numbers = method.round(weight, 64)
    restored = method.restore(numbers)
    assert numbers[0].int().max() < {"int4": 16}.get(name, 256)
    assert restored[2, 64:].isnan().all()
    restored[2, 64:] = expected[2, 64:]
    assert torch.equal(restored, expected)


@pytest.mark.parametrize("group_size", [64, 512])
def test_a_row_gives_the_same_alone_and_among_any_number_of_rows(
    method: RoundedLinearMethod, group_size: int
) -> None:
    """The rows are multiplied in one block, in several, or in several runs of blocks."""
    weight, x = torch.randn(96, 1024), torch.randn(200, 1024).bfloat16()
    method.take(method.round(weight, group_size), None, gated=False)
    alone = torch.cat([method.multiply(x[i : i + 1]) for i in range(len(x))])
    for rows in (2, 3, 6, 7, 13, 96, 97, 200):
        assert torch.equal(method.multiply(x[:rows]), alone[:rows])


@pytest.mark.parametrize("value", NOT_FINITE)
def test_an_input_that_is_not_finite_makes_its_row_nan_and_no_other(
    method: RoundedLinearMethod, value: float
) -> None:
    weight, x = torch.randn(96, 128), torch.randn(14, 128).bfloat16()
    method.take(method.round(weight, 64), None, gated=False)
    for activation in (None, *cpu.ACTIVATIONS):
        expected = method.multiply(x, activation=activation)
        bad = x.clone()
        bad[3, 100] = value
        found = method.multiply(bad, activation=activation)
        if value != value or rounds_inputs(method):
            assert found[3].isnan().all()
        elif activation is None:  # of what is infinite a gate may make 0
            assert not found[3].isfinite().any()
        assert torch.equal(
            torch.cat((found[:3], found[4:])), torch.cat((expected[:3], expected[4:]))
        )
    weight[5, 7] = value
    y = method.take(method.round(weight, 64), None, gated=False).multiply(x)
    assert y[:, 5].isnan().all()
    assert y.isnan().sum() == len(y)


@needs_rounding
def test_inputs_next_to_zero_are_zero() -> None:
    x = torch.full((1, 64), 1e-38).bfloat16()
    assert not cpu.linear_int(
        x, cpu.pack_linear_int(*round_weight(torch.ones(32, 64), 8, 64), 8), 32
    ).any()


@pytest.mark.parametrize(
    ("outputs", "inputs", "group_size"), [(96, 64, 64), (70, 192, 64), (64, 384, 192)]
)
def test_the_kernel_computes_what_its_numbers_stand_for(
    method: RoundedLinearMethod, outputs: int, inputs: int, group_size: int
) -> None:
    torch.manual_seed(outputs)
    numbers = method.round(torch.randn(outputs, inputs), group_size)
    weight, bias = method.restore(numbers), torch.randn(outputs).bfloat16()
    method.take(numbers, bias, gated=False)
    for rows in (1, 2, 7, 12, 13, 40, 64):
        x, residual = torch.randn(rows, inputs).bfloat16(), torch.randn(rows, outputs).bfloat16()
        x[0, :group_size] = 0
        expected = taken_inputs(method, x, group_size) @ weight.T + bias + residual
        y = method.apply(x, residual)
        assert torch.allclose(
            y.float(), expected, rtol=0.01, atol=0.2
        )  # of halves another neighbour may be taken
        alone = [method.apply(x[i : i + 1], residual[i : i + 1]) for i in range(rows)]
        assert torch.equal(torch.cat(alone), y)  # a row does not depend on the others


def test_each_number_of_fp8_is_multiplied_as_it_is() -> None:
    """Also the smallest, which are subnormal."""
    if not cpu.can_multiply_fp8(256, 2):
        pytest.skip("no kernel: no compiler")
    bits = torch.arange(256, dtype=torch.uint8)
    bits[bits & 0x7F == 0x7F] = 0  # NaN
    numbers = torch.stack([bits.roll(by) for by in range(70)])  # [outputs, inputs]
    scales = 2.0 ** torch.randint(-30, 30, (70, 128))
    packed, packed_scales = cpu.pack_linear_fp8(numbers, scales)
    y = cpu.linear(torch.eye(256).bfloat16(), packed, 70, scales=packed_scales)
    assert torch.equal(
        y.float().T, numbers.view(torch.float8_e4m3fn).float() * scales.repeat_interleave(2, dim=1)
    )


@needs_kernel
@pytest.mark.parametrize("bits", BITS.values())
@pytest.mark.parametrize(
    ("outputs", "inputs", "group_size"), [(96, 64, 64), (70, 192, 64), (64, 384, 8)]
)
def test_a_zero_of_each_output_and_group_is_subtracted(
    bits: int, outputs: int, inputs: int, group_size: int
) -> None:
    torch.manual_seed(bits + outputs)
    numbers, scales, _ = round_weight(torch.randn(outputs, inputs), bits, group_size)
    zeros = torch.randint(0, 256, scales.shape, dtype=torch.uint8)
    weight = restore_weight(numbers, scales, zeros, bits)
    packed = cpu.pack_linear_int(numbers, scales, zeros, bits)
    for rows in (1, 7, 13):
        x = torch.randn(rows, inputs).bfloat16()
        expected = (rounded_inputs(x, group_size) if ROUNDS_INPUTS else x.float()) @ weight.T
        found = cpu.linear_int(x, packed, outputs)
        assert ((found.float() - expected).norm() / expected.norm()).item() < 0.004
    middle = torch.full_like(zeros, 128)
    both = [
        cpu.linear_int(x, cpu.pack_linear_int(numbers, scales, each, bits), outputs)
        for each in (middle, None)
    ]
    assert torch.equal(*both)


@needs_kernel
@pytest.mark.parametrize("input_bits", [8, 16])
@pytest.mark.parametrize("bits", BITS.values())
@pytest.mark.parametrize(
    ("inputs", "group_size"), [(66_320, 66_320), (8 * 8_297, 8 * 8_297), (265_280, 132_640)]
)
def test_the_sum_of_many_inputs_does_not_overflow(
    inputs: int, group_size: int, bits: int, input_bits: int
) -> None:
    """Of extreme numbers and inputs, also at outputs past the last whole panel, and of inputs that
    cannot be halved.
    """
    outputs, largest = 33, 2**bits - 1
    numbers = torch.full((outputs, inputs), largest, dtype=torch.uint8)
    numbers[1], numbers[2, ::2] = 0, 0
    scales = torch.full((outputs, inputs // group_size), 2.0**-8).bfloat16()
    zeros = torch.zeros_like(scales, dtype=torch.uint8)
    zeros[1] = 255
    x = torch.ones(3, inputs).bfloat16()
    x[1], x[2, ::2] = -1, -1
    shift = zeros.double() / 2 ** (8 - bits)
    centred = numbers.double().view(outputs, -1, group_size) - shift[..., None]
    weight = (centred * scales.double()[..., None]).flatten(1)
    expected = x.double() @ weight.T
    for each in (zeros, None):
        if each is None:
            weight = (numbers.double() - 2 ** (bits - 1)) * 2.0**-8
            expected = x.double() @ weight.T
        packed = cpu.pack_linear_int(numbers, scales, each, bits)
        found = cpu.linear_int(x, packed, outputs, input_bits=input_bits)
        assert torch.allclose(found.double(), expected, rtol=0.01, atol=0.5)


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
    assert not ROUNDS_INPUTS or (y.float() - sums).norm() < 0.5 * (coarse.float() - sums).norm()
    alone = [cpu.linear_int(x[i : i + 1], packed, 96, input_bits=16) for i in range(len(x))]
    assert torch.equal(torch.cat(alone), y)
    x[3, 7] = torch.inf
    assert not cpu.linear_int(x, packed, 96, input_bits=16)[3].isfinite().any()


def test_weights_of_4_bits_with_a_step_and_a_smallest_weight_stay() -> None:
    """As Q4_1 keeps them in groups of 32."""
    torch.manual_seed(0)
    step, low = 0.01 + torch.rand(40, 4, 1), -torch.rand(40, 4, 1) * 8
    numbers = torch.randint(0, 16, (40, 4, 32))
    numbers[..., 0], numbers[..., 1] = 0, 15
    weight = ((numbers + low) * step).flatten(1)
    error = (restore_weight(*round_weight(weight, 4, 32), 4) - weight).view(40, 4, 32).abs()
    assert (error < 0.1 * step).all()


def test_gate_and_up_are_fused(method: RoundedLinearMethod) -> None:
    x = torch.randn(5, 64).bfloat16()
    numbers = method.round(torch.randn(128, 64).bfloat16(), 64)
    gate, up = (taken_inputs(method, x, 64) @ method.restore(numbers).T).chunk(2, dim=-1)
    method.take(numbers, None, gated=True)
    assert method.fuses_gate
    assert torch.allclose(
        method.apply_gated(x).float(), functional.silu(gate) * up, rtol=0.02, atol=0.3
    )
    assert torch.allclose(
        method.apply(x).float(), torch.cat((gate, up), dim=1), rtol=0.02, atol=0.3
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"))


def load(folder: Path, quantization: str, dtype: str) -> ModelRunner:
    checkpoint = open_checkpoint(folder, quantization=quantization)
    return ModelRunner.load(checkpoint, dtype=dtype, device="cpu", num_blocks=64, block_size=16)


def linears(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Linear]]:
    return (
        (name, each) for name, each in model.named_modules() if isinstance(each, torch.nn.Linear)
    )


def rounded(weight: torch.Tensor, quantization: str) -> torch.Tensor:
    """The weight [outputs, inputs] of a map as it is kept."""
    if quantization == "fp8":
        groups = weight.view(
            len(weight), -1, next(size for size in range(64, 0, -2) if weight.shape[1] % size == 0)
        )
        scales = groups.abs().amax(dim=-1, keepdim=True) / 448
        return ((groups / scales).to(torch.float8_e4m3fn).float() * scales).flatten(1)
    bits = BITS[quantization]
    group_size = next(
        size for size in range({8: 64, 4: 32}[bits], 0, -8) if weight.shape[1] % size == 0
    )
    return restore_weight(*round_weight(weight, bits, group_size), bits)


@pytest.mark.parametrize("quantization", ROUNDED)
def test_a_model_generates_as_transformers_with_the_rounded_weights(
    folder: Path, quantization: str
) -> None:
    expected = reference(folder)
    for name, linear in linears(expected):
        kept = rounded(linear.weight.data, "int8" if name == "lm_head" else quantization)
        linear.weight = torch.nn.Parameter(kept)
    driver = Driver(load(folder, quantization, "float32"))
    assert driver.generate(1, prompt(30), 12) == reference_greedy(expected, prompt(30), 12)


@pytest.mark.parametrize("quantization", ROUNDED)
def test_tokens_do_not_depend_on_batch_and_chunks(folder: Path, quantization: str) -> None:
    runner = load(folder, quantization, "bfloat16")
    runner.warmup()
    alone = Driver(runner).generate(1, prompt(45), 8)
    driver = Driver(runner)
    driver.run(driver.step(7, prompt(20, 3), 0))
    for position, (begin, end) in enumerate(pairwise((0, 7, 30, 45)), 20):
        tokens = driver.run(
            driver.step(1, prompt(45)[begin:end], begin), driver.step(7, [5], position)
        )
    generated = [tokens[0]]
    while len(generated) < 8:
        generated.append(driver.run(driver.step(1, generated[-1:], 44 + len(generated)))[0])
    assert generated == alone


@pytest.mark.parametrize("quantization", ROUNDED)
def test_two_ranks_round_as_one(tmp_path: Path, quantization: str) -> None:
    """Where their slices hold whole groups."""
    folder = make_tiny_model(tmp_path, hidden_size=128, intermediate_size=256, head_dim=32)
    expected = Driver(load(folder, quantization, "float32")).generate(1, prompt(30), 12)
    found = on_ranks(
        folder,
        2,
        lambda runner: Driver(runner).generate(1, prompt(30), 12),
        quantization=quantization,
    )
    assert found == [expected] * 2


def test_rounded_weights_take_fewer_bytes_and_have_caches_of_their_own(folder: Path) -> None:
    plain, *rounded = (
        open_checkpoint(folder, quantization=quantization) for quantization in (None, *ROUNDED)
    )
    whole, int8, int4, fp8 = (
        rank_weight_bytes(each.config, "bfloat16", 1, 0) for each in (plain, *rounded)
    )
    assert whole > max(int8, fp8)
    assert int8 > int4
    assert len({each.kv_layout("bfloat16").digest for each in (plain, *rounded)}) == 4


@pytest.mark.parametrize(
    ("quantization", "dtype"), [(name, dtype) for name in ROUNDED for dtype in DTYPES]
)
def test_the_plan_counts_the_bytes_that_are_kept(
    folder: Path, quantization: str, dtype: str
) -> None:
    """Of 4 bits in half a byte where there is a kernel, else in a byte."""
    config = open_checkpoint(folder, quantization=quantization).config
    tree = load(folder, quantization, dtype)._model
    methods = [
        each
        for each in tree.modules()
        if isinstance(each, RoundedLinearMethod) and not each._is_tied
    ]
    kept = sum(tensor.nbytes for each in methods for tensor in each._packed if tensor is not None)
    others = sum(each.data.nbytes for each in all_parameters(tree))
    assert rank_weight_bytes(config, dtype, 1, 0) == kept + others


def test_experts_in_mxfp4_are_not_plain(folder: Path) -> None:
    config = open_checkpoint(folder).config
    experts = ExpertsConfig(
        num_experts=4, num_chosen=2, intermediate_size=32, layers=(0,), is_mxfp4=True
    )
    with pytest.raises(
        CheckpointError, match="has a quantization_config, so int4 cannot be applied"
    ):
        with_quantization(replace(config, experts=experts), "int4")


def test_what_cannot_be_rounded_is_refused(folder: Path) -> None:
    rounded = open_checkpoint(folder, quantization="int8").config
    with pytest.raises(
        CheckpointError, match="has a quantization_config, so int4 cannot be applied"
    ):
        with_quantization(rounded, "int4")
