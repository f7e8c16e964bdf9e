"""Kernels of gates: equality with torch, and bits that do not depend on the other rows."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch.nn import functional

from tandem.workers.model.kernels.c import cpu, gates
from tandem.workers.model.kernels.c.calls import Recorder
from tandem.workers.model.layers.norm import GatedRMSNorm, SharedGatedRMSNorm
from tandem.workers.model.layers.scaling import sigmoid_gated
from tandem.workers.model.module import WeightSlice
from tandem.workers.model.parallel import TensorParallel
from tandem.workers.model.states import mixers, reference

ROWS = 300
HEADS, DIM = 5, 24

Compute = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, ...]]
"""Maps two tensors [rows, HEADS, DIM] to results of as many rows."""


def noise(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def inputs(dtype: torch.dtype, num_rows: int = ROWS) -> tuple[torch.Tensor, torch.Tensor]:
    """Large and small numbers, in rows with gaps between them."""
    rows = (4 * noise(num_rows, 2 * HEADS * DIM + 7, seed=1)).to(dtype)
    x, y = (rows[:, begin : begin + HEADS * DIM] for begin in (0, HEADS * DIM + 7))
    return x.view(-1, HEADS, DIM), y.view(-1, HEADS, DIM)


def delta_gates(dtype: torch.dtype) -> Compute:
    rate, bias = -noise(HEADS, seed=3).exp(), noise(HEADS, seed=4)
    return lambda x, y: mixers.delta_gates(x[:, 0, :HEADS], y[:, 0, :HEADS], rate, bias)


def sigmoid(dtype: torch.dtype) -> Compute:
    return lambda x, y: (sigmoid_gated(x.flatten(1), y.flatten(1)),)


def sigmoid_of_one(dtype: torch.dtype) -> Compute:
    """A gate of each row, not of each number."""
    return lambda x, y: (sigmoid_gated(x.flatten(1), y[:, 0, :1]),)


def norm(dtype: torch.dtype, *, heads: int, gate_first: bool) -> Compute:
    """A norm whose weight has `heads` heads."""
    shape = (heads * DIM,)
    made = GatedRMSNorm(WeightSlice("norm", shape), DIM, 1e-5, dtype, gate_first=gate_first)
    made.weight.data = noise(*shape, seed=2).to(dtype)
    made.process_after_load()
    return lambda x, y: (made(x, y),)


def shared_norm(dtype: torch.dtype) -> Compute:
    """The norm of one group of all heads, which ranks may share."""
    shape = (HEADS * DIM,)
    weight = WeightSlice("norm", shape)
    made = SharedGatedRMSNorm(weight, DIM, HEADS * DIM, 1e-5, dtype, TensorParallel())
    made.weight.data = noise(*shape, seed=2).to(dtype)
    made.process_after_load()
    return lambda x, y: (made(x, y),)


def scores(dtype: torch.dtype) -> Compute:
    """The scores of 37 experts."""
    weight = noise(37, HEADS * DIM, seed=9) / 20

    def compute(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        rows = x.flatten(1)
        if cpu.usable(rows):
            return (gates.sigmoid_scores(rows, weight),)
        return ((rows.float() @ weight.T).sigmoid(),)

    return compute


RECORDED: dict[str, Callable[[torch.dtype], Compute]] = {
    "delta gates": delta_gates,
    "sigmoid": sigmoid,
    "sigmoid of one gate": sigmoid_of_one,
    "norm, then gate": partial(norm, heads=1, gate_first=False),
    "gate, then norm of each head": partial(norm, heads=HEADS, gate_first=True),
}
CASES = RECORDED | {"gate, then norm of shared heads": shared_norm, "scores of experts": scores}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CASES)
def test_kernels_give_what_torch_gives(
    name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    compute = CASES[name](dtype)
    ours = compute(*inputs(dtype))
    monkeypatch.setattr(cpu, "usable", lambda tensor: False)
    theirs = compute(*inputs(dtype))
    for one, other in zip(ours, theirs, strict=True):
        assert one.dtype == other.dtype
        tolerance = 1e-5 if one.dtype == torch.float32 else 2**-7
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CASES)
def test_the_bits_of_a_row_do_not_depend_on_other_rows(name: str, dtype: torch.dtype) -> None:
    compute = CASES[name](dtype)
    whole = compute(*inputs(dtype))
    for first, end in ((0, 1), (7, 9), (100, 300)):
        part = compute(*(each[first:end] for each in inputs(dtype)))
        for one, other in zip(part, whole, strict=True):
            assert torch.equal(one, other[first:end])


@pytest.mark.parametrize("name", RECORDED)
def test_they_are_recorded(name: str) -> None:
    dtype = torch.bfloat16
    compute = CASES[name](dtype)
    rows = inputs(dtype)
    expected = compute(*rows)
    for index, other in enumerate(expected):
        with Recorder() as recorder:
            result = compute(*rows)[index]
        program = recorder.program(result, ROWS)
        program.run(ROWS)
        assert torch.equal(program.result, other)


def test_the_gates_are_those_of_the_gated_delta_rule() -> None:
    """As Qwen3.5 computes them in transformers."""
    a, b = 4 * noise(ROWS, HEADS, seed=5), noise(ROWS, HEADS, seed=6)
    log_rate, bias = noise(HEADS, seed=7), noise(HEADS, seed=8)
    gate, beta = mixers.delta_gates(a, b, -log_rate.exp(), bias)
    torch.testing.assert_close(gate, -log_rate.exp() * functional.softplus(a + bias))
    torch.testing.assert_close(beta, b.sigmoid())


@pytest.mark.parametrize("value", [-1e4, -100.0, 100.0, 1e4])
def test_gates_of_large_numbers_are_finite(value: float) -> None:
    x = torch.full((1, HEADS), value)
    one = torch.ones(HEADS)
    for ours, theirs in zip(
        mixers.delta_gates(x, x, -one, one), reference.delta_gates(x, x, -one, one), strict=True
    ):
        torch.testing.assert_close(ours, theirs)


def test_a_gate_of_one_number_does_not_depend_on_the_rows_beside_it() -> None:
    """Of the expert for all tokens; torch's sigmoid differs in the last rows of a batch."""
    gate = noise(1001, 1, seed=5)
    ones = torch.ones_like(gate)
    alone = torch.cat([sigmoid_gated(ones[:1], row) for row in torch.split(gate, 1)])
    assert torch.equal(sigmoid_gated(ones, gate), alone)
    assert torch.allclose(alone, torch.sigmoid(gate))
