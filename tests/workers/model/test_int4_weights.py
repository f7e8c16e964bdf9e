"""Weights of 4 bits on GPUs: the layout of torch's int4 product, its scales and zeros, and the rows
for which it is used. The product itself is the one of CPUs, which takes the same scales and zeros.
"""

import math
from functools import cache

import pytest
import torch

from tandem.workers.model import kernels
from tandem.workers.model.kernels.triton.int4 import restore
from tandem.workers.model.quant.base import LinearPartition
from tandem.workers.model.quant.int4 import (
    FEW_ROWS,
    Int4LinearMethod,
    can_pack,
    group_of,
    kept_bytes,
    pack,
    unpack,
)
from tandem.workers.model.quant.integer import restore_weight, round_weight

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
SHIFTS = 4 * torch.arange(8)  # of the numbers of a word
SIZES = [(8, 32), (16, 64), (24, 96), (40, 128), (16, 640), (32, 256)]

without_gpu = pytest.mark.skipif(ON_GPU, reason="a stand-in of torch's product for GPUs")


def random_numbers(outputs: int, inputs: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(outputs * inputs)
    return torch.randint(0, 16, (outputs, inputs), dtype=torch.uint8, generator=generator)


@cache
def places(outputs: int, inputs: int) -> tuple[torch.Tensor, torch.Tensor]:
    """States the layout of torch's int4mm.cu, which is [tiles, blocks, threads, words].

    Returns the output of each word, [words, 1], and the inputs of its numbers, the lowest first,
    [words, 8].
    """
    rows = []
    columns = []
    tiles = max(each for each in (2, 4, 8) if inputs % (16 * each) == 0)
    for tile in range(outputs // 8):
        for block in range(inputs // (16 * tiles)):
            for thread in range(32):
                for word in range(tiles // 2):
                    first = (block * tiles + 2 * word) * 16 + thread % 4 * 2
                    even = [first, first + 8, first + 16, first + 24]
                    odd = [each + 1 for each in even]
                    columns.append(even + odd)
                    rows.append([tile * 8 + thread // 4])
    return torch.tensor(rows), torch.tensor(columns)


@pytest.mark.parametrize(("outputs", "inputs"), SIZES)
def test_the_layout_is_torchs(outputs: int, inputs: int) -> None:
    numbers = random_numbers(outputs, inputs)
    words = pack(numbers)
    assert words.dtype is torch.int32
    assert words.is_contiguous()
    rows, columns = places(outputs, inputs)
    expected = (numbers[rows, columns].long() << SHIFTS).sum(1)
    assert torch.equal(words.flatten().long() & 0xFFFFFFFF, expected)
    covered = (rows * inputs + columns).flatten().sort().values
    assert torch.equal(covered, torch.arange(outputs * inputs))
    assert torch.equal(unpack(words), numbers)


def random_method(
    outputs: int, inputs: int, group: int, *, zeros: bool, bias: bool = False
) -> tuple[Int4LinearMethod, torch.Tensor]:
    """Returns a method, and the weight in float64 that its numbers stand for."""
    torch.manual_seed(group)
    numbers = random_numbers(outputs, inputs)
    scales = (0.01 + torch.rand(outputs, inputs // group)).bfloat16()
    zero = torch.randint(0, 16, scales.shape, dtype=torch.uint8) if zeros else None
    centred = numbers.view(*scales.shape, group).double()
    centred -= 8 if zero is None else zero[..., None]
    weight = (centred * scales.double()[..., None]).flatten(1)
    method = Int4LinearMethod.from_numbers(
        (numbers.to(DEVICE), scales.to(DEVICE), None if zero is None else zero.to(DEVICE)),
        torch.randn(outputs).bfloat16().to(DEVICE) if bias else None,
    )
    return method, weight.to(DEVICE)


@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("group", [32, 64, 128, 256])
def test_the_weight_is_the_checkpoints(group: int, zeros: bool) -> None:
    """A weight is rounded to bfloat16, and so is the product of its zero and scale."""
    method, weight = random_method(48, 512, group, zeros=zeros)
    scales = method._terms[..., 0].t().double()[..., None]
    error = (method.restore().double() - weight).view(*scales.shape[:2], group).abs()
    bound = weight.view_as(error).abs() * 2**-8 + (scales * 8 * 2**-8 if zeros else 0)
    assert (error <= bound).all()


@pytest.mark.parametrize(("outputs", "inputs"), [(8, 32), (24, 96), (16, 1088), (48, 512)])
def test_the_kernel_restores_as_torch(
    outputs: int, inputs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In float32, because Triton's interpreter does not round to bfloat16 but cuts off."""
    method, _ = random_method(outputs, inputs, 32, zeros=True)
    monkeypatch.setattr(kernels, "on_gpu", lambda tensor: False)
    expected = method.restore()
    restored = restore(method._words, method._terms.float())
    assert torch.equal(restored.bfloat16(), expected)
    monkeypatch.setattr(kernels, "on_gpu", lambda tensor: True)
    torch.testing.assert_close(method.restore(), expected, rtol=0 if ON_GPU else 2**-7, atol=0)


def cpus_product(
    x: torch.Tensor, words: torch.Tensor, group: int, terms: torch.Tensor
) -> torch.Tensor:
    """Stands for `torch._weight_int4pack_mm`: reads its layout, and multiplies on the CPU."""
    assert x.is_contiguous()
    outputs, inputs = terms.shape[1], x.shape[1]
    numbers = torch.empty(outputs, inputs, dtype=torch.int32)
    rows, columns = places(outputs, inputs)
    numbers[rows, columns] = words.flatten()[:, None] >> SHIFTS.int() & 15
    packed = torch._convert_weight_to_int4pack_for_cpu(numbers, 1)
    product: torch.Tensor = torch._weight_int4pack_mm_for_cpu(x, packed, group, terms)
    return product


@pytest.fixture
def product(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Counts the rows of each call of torch's product, which runs on the CPU."""
    calls: list[int] = []

    def multiply(
        x: torch.Tensor, words: torch.Tensor, group: int, terms: torch.Tensor
    ) -> torch.Tensor:
        calls.append(len(x))
        return cpus_product(x, words, group, terms)

    monkeypatch.setattr(torch, "_weight_int4pack_mm", multiply)
    return calls


@without_gpu
@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("group", [32, 64, 128])
def test_products(product: list[int], group: int, zeros: bool) -> None:
    check_products(group, zeros=zeros)
    assert product == [1, 1, 7, 7, FEW_ROWS, FEW_ROWS]


def check_products(group: int, *, zeros: bool) -> None:
    """No rows, few and more, not adjacent, with bias and residual."""
    method, weight = random_method(64, 256, group, zeros=zeros, bias=True)
    assert method._bias is not None
    for rows in (0, 1, 7, FEW_ROWS, FEW_ROWS + 1, 100):
        x = torch.randn(rows, 512).bfloat16().to(DEVICE)[:, :256]
        residual = torch.randn(rows, 64).bfloat16().to(DEVICE)
        expected = x.double() @ weight.t() + method._bias.double()
        for found, exact in (
            (method.apply(x), expected),
            (method.apply(x, residual.clone()), expected + residual.double()),
        ):
            assert (found.dtype, found.shape) == (torch.bfloat16, exact.shape)
            assert (found.double() - exact).norm() <= 0.01 * exact.norm()


@without_gpu
def test_rounded_weights_are_the_cpus(product: list[int]) -> None:
    """`--quantization int4` rounds to the same numbers, groups and zeros as on CPUs."""
    torch.manual_seed(1)
    weight = (torch.randn(48, 96) * torch.logspace(-2, 2, 48)[:, None]).bfloat16()
    method = loaded(weight)
    numbers, scales, zeros = round_weight(weight, 4, 32)
    assert zeros is not None
    restored = restore_weight(numbers, scales, zeros, 4)
    error = (method.restore().float() - restored).view(48, 3, 32).abs()
    assert (error <= scales.float()[..., None] * 16 * 2**-8).all()
    x = torch.randn(5, 96).bfloat16()
    expected = x.float() @ restored.t()
    assert (method.apply(x).float() - expected).norm() <= 0.01 * expected.norm()
    assert product == [5]


def loaded(weight: torch.Tensor, *, exact: bool = False) -> Int4LinearMethod:
    """Returns a method that rounds this weight for a GPU."""
    method = Int4LinearMethod()
    method.device_type = "cuda"
    method.batch_invariant = exact
    maps = (("m", len(weight), slice(None)),)
    method.create_weights(LinearPartition(outputs=maps, num_inputs=weight.shape[1]), weight.dtype)
    method.weight.data = weight.clone()
    method.process_after_load()
    return method


def test_the_plan_counts_the_bytes_of_words_and_terms() -> None:
    for outputs, inputs, group in ((48, 512, 32), (8, 256, 256), (16, 96, 32)):
        method, _ = random_method(outputs, inputs, group, zeros=True)
        kept = method._words.nbytes + method._terms.nbytes
        assert kept_bytes(outputs, inputs, group) == kept


def test_weights_that_cannot_be_packed_stay_plain() -> None:
    weight = torch.randn(48, 96).bfloat16()
    assert loaded(weight)._plain is None
    assert loaded(weight, exact=True)._plain is not None
    assert loaded(weight[:, :80].contiguous())._plain is not None
    assert loaded(weight[:44])._plain is not None


def test_which_weights_are_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    def can(outputs: int = 96, *, expert: bool = False, exact: bool = False) -> bool:
        maps = (("m", outputs, slice(None)),)
        part = LinearPartition(outputs=maps, num_inputs=128, is_expert=expert)
        return can_pack(part, torch.bfloat16, "cuda", batch_invariant=exact)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert can()
    assert not can(92)
    assert not can(expert=True)
    assert not can(exact=True)
    part = LinearPartition(outputs=(("m", 96, slice(None)),), num_inputs=128)
    assert not can_pack(part, torch.float16, "cuda", batch_invariant=False)
    assert not can_pack(part, torch.bfloat16, "cpu", batch_invariant=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for capability, expected in (((7, 5), False), ((8, 0), True), ((9, 0), True)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda found=capability: found)
        assert can() is expected


def test_groups_that_torch_multiplies() -> None:
    """The largest that divides the stored groups, for whole tiles of inputs."""
    found = {run: group_of(3 * 1024, run) for run in (16, 32, 64, 96, 128, 256, 512, 1024, 3072)}
    assert found == {16: None} | {run: min(256, math.gcd(run, 256)) for run in found if run != 16}
    assert group_of(48, 48) is None
    assert group_of(96, 96) == 32
