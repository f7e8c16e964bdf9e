"""The C kernels of experts against plain torch, and their bits in any batch."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, strategies

from tandem.tests.tiny import ROUTED, make_tiny_model
from tandem.tests.tiny_decoders import DECODERS, make_tiny_decoder
from tandem.tests.workers.model.helpers import load
from tandem.workers.model.generic import causal_lm
from tandem.workers.model.generic.experts import ExpertsForward
from tandem.workers.model.kernels.c import cpu, experts
from tandem.workers.model.kernels.c.calls import Recorder
from tandem.workers.model.layers import experts as layer
from tandem.workers.model.layers.grouped import PackedExperts, can_pack
from tandem.workers.model.layers.scaling import relu_squared
from tandem.workers.model.quant.base import LinearMethod, LinearPartition
from tandem.workers.model.quant.fp8 import Fp8LinearMethod
from tandem.workers.model.quant.integer import IntegerLinearMethod
from tandem.workers.model.quant.unquantized import UnquantizedLinearMethod

METHODS: dict[str, Callable[[], LinearMethod]] = {
    "bfloat16": UnquantizedLinearMethod,
    "int8": lambda: IntegerLinearMethod(8),
    "int4": lambda: IntegerLinearMethod(4),
    "fp8": Fp8LinearMethod,
}
NUM_EXPERTS, INPUTS, OUTPUTS = 7, 64, 96
GEMMA_EXPERTS = {
    "enable_moe_block": True,
    "num_experts": 4,
    "top_k_experts": 2,
    "moe_intermediate_size": 32,
}

has_kernel = pytest.mark.skipif(
    not cpu.can_multiply(torch.zeros(32, 32, dtype=torch.bfloat16)),
    reason="no product of our own with AMX",
)
has_hy_v4 = pytest.mark.skipif(
    "hy_v4" not in DECODERS, reason="this release of transformers has no HY V4"
)


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@given(data=strategies.data())
def test_the_best_experts_are_chosen(data: strategies.DataObject) -> None:
    draw = data.draw
    num_groups = draw(strategies.integers(1, 4))
    size = draw(strategies.integers(2, 9))
    num_best = draw(strategies.integers(1, num_groups))
    num_chosen = draw(strategies.integers(1, num_best * size))
    softmax, normalised, biased = (draw(strategies.booleans()) for _ in range(3))
    dtype = draw(strategies.sampled_from([torch.float32, torch.bfloat16]))
    num_rows = draw(strategies.integers(1, 40))
    # Without equal numbers or sums of two, whose order is another question.
    ranks = torch.stack(
        [torch.randperm(num_groups * size, generator=make(row)) for row in range(num_rows)]
    )
    scores = (ranks / 4 if softmax else 1.3**ranks).to(dtype)
    bias = noise(num_groups * size) if biased else None
    chosen, weights = experts.route(
        scores,
        num_chosen,
        softmax=softmax,
        normalised=normalised,
        factor=2.5,
        bias=bias,
        num_groups=num_groups,
        num_chosen_groups=num_best,
    )
    found = scores.float().softmax(-1) if softmax else scores.float()
    ranked = found if bias is None else found + bias
    grouped = ranked.view(num_rows, num_groups, size)
    best = grouped.topk(2).values.sum(-1).topk(num_best).indices
    left_out = torch.ones(num_rows, num_groups).scatter(1, best, 0).bool()
    ranked = grouped.masked_fill(left_out[..., None], -torch.inf).flatten(1)
    expected = ranked.topk(num_chosen).indices.sort().values
    assert torch.equal(chosen, expected.int())
    wanted = found.gather(1, expected)
    wanted = 2.5 * (wanted / wanted.sum(-1, keepdim=True) if normalised else wanted)
    torch.testing.assert_close(weights, wanted, rtol=1e-5, atol=1e-6)


def make(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_of_equal_experts_the_first_ones_are_chosen() -> None:
    scores = torch.tensor([[0.5, 1, 0.5, 1, 0.5]])
    chosen, weights = experts.route(scores, 3, softmax=False, normalised=False)
    assert chosen.tolist() == [[0, 1, 3]]
    assert weights.tolist() == [[0.5, 1, 1]]


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("softmax", [True, False])
def test_weights_of_scores_that_are_not_finite(value: float, softmax: bool) -> None:
    scores = noise(3, 40)
    expected = experts.route(scores, 4, softmax=softmax, normalised=True)
    scores[1, 39] = value
    chosen, weights = experts.route(scores, 4, softmax=softmax, normalised=True)
    assert weights[1].isnan().all()
    assert all(0 <= each < 40 for each in chosen[1].tolist())
    for row in (0, 2):
        assert torch.equal(chosen[row], expected[0][row])
        assert torch.equal(weights[row], expected[1][row])


@given(
    rows=strategies.lists(
        strategies.lists(strategies.integers(0, 9), min_size=3, max_size=3, unique=True),
        min_size=1,
        max_size=50,
    )
)
def test_choices_are_sorted_by_expert_and_token(rows: list[list[int]]) -> None:
    chosen = torch.tensor(rows, dtype=torch.int32)
    choices = experts.sort_choices(chosen, 10)
    count = int(choices.groups[0])
    numbers, ends = choices.groups[1 : 1 + 2 * count].view(-1, 2).unbind(1)
    flat = chosen.flatten().long()
    assert numbers.tolist() == sorted({*flat.tolist()})
    assert ends.tolist() == flat.bincount().cumsum(0)[numbers.long()].tolist()
    order = flat.sort(stable=True).indices
    assert choices.tokens.tolist() == (order // 3).tolist()
    assert torch.equal(choices.places.flatten()[order], torch.arange(len(flat)).int())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_outputs_are_added_by_ascending_expert(dtype: torch.dtype) -> None:
    """In float32, one by one; 300 numbers are more than an item has."""
    chosen, weights = experts.route(noise(5, 8), 3, softmax=True, normalised=True)
    places = experts.sort_choices(chosen, 8).places
    y, residual = noise(15, 300, seed=1).to(dtype), noise(5, 300, seed=2).to(dtype)
    expected = torch.zeros(5, 300)
    for place in range(3):
        expected = torch.addcmul(expected, y.float()[places[:, place]], weights[:, place, None])
    found = experts.combine(y, places, weights)
    rounded = expected.to(dtype)
    torch.testing.assert_close(found, rounded, rtol=2**-7 if dtype.itemsize == 2 else 1e-6, atol=0)
    assert torch.equal(experts.combine(y, places, weights, residual), found + residual)
    alone = experts.combine(y, places[4:], weights[4:], residual[4:])
    assert torch.equal(alone, (found + residual)[4:])


def test_a_sum_in_another_order_is_seen() -> None:
    """The negative control of the test below: with large outputs the order changes the bits."""
    y = torch.tensor([[1e8], [1.0], [-1e8]])
    places, weights = torch.tensor([[0, 1, 2]]).int(), torch.ones(1, 3)
    assert experts.combine(y, places, weights).item() == 0
    assert experts.combine(y, places[:, [0, 2, 1]].contiguous(), weights).item() == 1


@pytest.fixture(params=["this processor's form", "widened"])
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """How weights are multiplied: also as on a processor without dot products of few bits."""
    if request.param == "widened":
        monkeypatch.setattr(cpu, "linear_form", lambda kind="": cpu.WIDENED)


def loaded(kind: str, seed: int, *, bias: bool, gated: bool) -> LinearMethod:
    method = METHODS[kind]()
    outputs = (("map", OUTPUTS, slice(None)),)
    partition = LinearPartition(
        outputs=outputs, num_inputs=INPUTS, has_bias=bias, gated=gated, is_expert=True
    )
    method.create_weights(partition, torch.bfloat16)
    shapes = ((OUTPUTS, INPUTS), (OUTPUTS,))
    for parameter, shape in zip(method.parameters(), shapes, strict=False):
        parameter.data = noise(*shape, seed=seed + len(shape)).bfloat16()
    method.process_after_load()
    return method


@has_kernel
@pytest.mark.usefixtures("form")
@pytest.mark.parametrize("kind", METHODS)
@pytest.mark.parametrize(
    ("bias", "gated", "activation"),
    [(True, False, None), (False, True, "silu"), (False, True, None)],
)
def test_products_have_the_bits_of_the_experts_own(
    kind: str, bias: bool, gated: bool, activation: str | None
) -> None:
    """One expert has no rows, and one has more than a block."""
    methods = [loaded(kind, 10 * expert, bias=bias, gated=gated) for expert in range(NUM_EXPERTS)]
    x = noise(40, INPUTS, seed=5).bfloat16()
    chosen = torch.tensor([[0, 2]] * 30 + [[2, 3]] * 3 + [[4, 6]] * 5 + [[0, 5], [3, 6]]).int()
    expected = torch.empty(40, 2, OUTPUTS // 2 if activation else OUTPUTS, dtype=x.dtype)
    for expert, method in enumerate(methods):
        rows, places = torch.where(chosen == expert)
        inputs = x[rows]
        if activation:
            expected[rows, places] = method.apply_gated(inputs, activation)
        else:
            expected[rows, places] = method.apply(inputs)
    assert can_pack(methods)
    assert not can_pack([*methods, loaded(kind, 0, bias=not bias, gated=False)])
    packed = PackedExperts(methods)
    assert not methods, "their memory is free"
    assert packed.alternates == gated
    for part in (slice(0, 40), slice(39, 40), slice(28, 36)):
        choices = experts.sort_choices(chosen[part].contiguous(), NUM_EXPERTS)
        found = packed.multiply(cpu.gather(x[part], choices.tokens), choices, activation)
        assert torch.equal(found[choices.places.long()], expected[part])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_activations_equal_plain_torch(dtype: torch.dtype) -> None:
    x = (6 * noise(30, 80)).to(dtype)
    gate, up = x.float()[:, ::2].clamp(max=7), x.float()[:, 1::2].clamp(-7, 7)
    wanted = (up + 1) * gate * torch.sigmoid(1.702 * gate)
    tolerance = 2**-8 if dtype.itemsize == 2 else 1e-5
    torch.testing.assert_close(
        cpu.clamped_gate(x, 1.702, 7.0).float(), wanted, rtol=tolerance, atol=1e-5
    )
    squared = x.float().relu() ** 2
    torch.testing.assert_close(relu_squared(x).float(), squared, rtol=tolerance, atol=0)


@pytest.mark.parametrize("at", [0, 1])
def test_activations_let_nan_pass(at: int) -> None:
    x = torch.ones(2, 40)
    x[0, at::2] = torch.nan
    assert cpu.clamped_gate(x, 1.702, 7.0).isnan().tolist() == [[True] * 20, [False] * 20]
    assert relu_squared(x).isnan().sum() == 20


def experts_of(folder: Path) -> layer.RoutedExperts:
    modules = load(folder, dtype="bfloat16", num_blocks=4)._model.modules()
    return next(module for module in modules if isinstance(module, layer.RoutedExperts))


@has_kernel
@pytest.mark.parametrize("family", [*ROUTED, "nemotron_3", "lfm2_moe"])
def test_a_layer_in_one_call_is_that_of_single_experts(
    tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_tiny_model(tmp_path, family)
    ours = experts_of(folder)
    monkeypatch.setattr(layer, "can_pack", lambda methods: False)
    single = experts_of(folder)
    assert (ours._packed is None, single._packed is None) == (False, True)
    x = noise(60, 256 if family == "lfm2_moe" else 64).bfloat16()
    expected = single(x, None).float()
    found = ours(x, x)
    assert (found.float() - (x.float() + expected)).norm() <= 2**-7 * found.float().norm()
    with Recorder() as recorder:
        y = ours(x, None)
    program = recorder.program(y, 60)
    for num_rows in (1, 17, 60):
        program.run(num_rows)
        assert torch.equal(program.result[:num_rows], ours(x, None)[:num_rows])
        assert torch.equal(ours(x[:num_rows], None), ours(x, None)[:num_rows])


def module_with_experts(folder: Path) -> Any:
    model: Any = load(folder, dtype="bfloat16", num_blocks=4, model_impl="transformers")._model
    return next(each for each in model._below.modules() if hasattr(each, "gate_up_proj"))


@has_kernel
@pytest.mark.parametrize(
    ("kind", "overrides"),
    [
        ("deepseek_v2", {}),
        ("glm4_moe", {}),
        ("granitemoe", {}),
        ("glm4_moe", {"hidden_act": "gelu"}),
        ("gemma4_text", GEMMA_EXPERTS),  # GELU
        pytest.param("hy_v4", {}, marks=has_hy_v4),  # a gate of its own, with limits
    ],
)
def test_experts_of_transformers_modules(
    tmp_path: Path, kind: str, overrides: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_tiny_decoder(tmp_path, kind, **overrides)
    ours = module_with_experts(folder)
    monkeypatch.setattr(causal_lm, "use_packed_experts", lambda model: None)
    theirs = module_with_experts(folder)
    assert isinstance(ours.forward, ExpertsForward)
    assert ours.gate_up_proj.numel() == 0, "their memory is free"
    x = noise(20, theirs.down_proj.shape[1]).bfloat16()
    chosen = torch.stack([torch.randperm(4, generator=make(row))[:2] for row in range(20)])
    weights = noise(20, 2, seed=3).sigmoid().bfloat16()
    found, expected = ours(x, chosen, weights), theirs(x, chosen, weights).float()
    assert (found.float() - expected).norm() <= 2**-6 * expected.norm()
    for part in (slice(3, 4), slice(5, 20)):
        assert torch.equal(ours(x[part], chosen[part], weights[part]), found[part])
