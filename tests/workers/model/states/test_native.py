"""Families of ours whose layers keep states, split over ranks: what one number of ranks writes,
another number reads, and the bits of a token do not depend on how it is computed.
"""

import itertools
import json
import random
from functools import partial
from inspect import signature
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.models.granitemoehybrid.modeling_granitemoehybrid import (
    GraniteMoeHybridRMSNormGated,
)

from tandem.tests.tiny import STATEFUL, make_tiny_model
from tandem.tests.workers.model.helpers import (
    Driver,
    load,
    prompt,
    recorded_logits,
    reference,
    reference_greedy,
    reference_logits,
)
from tandem.tests.workers.model.test_exact import cut
from tandem.tests.workers.model.test_parallel import on_ranks
from tandem.tests.workers.spans import read_now
from tandem.workers.kv_cache.layout import CacheGroup, KvSpan
from tandem.workers.kv_cache.sharding import kv_heads
from tandem.workers.kv_cache.tables import TableBlocks
from tandem.workers.model.config import CheckpointError, Fields
from tandem.workers.model.footprint import check_config_split
from tandem.workers.model.kernels.c import cpu
from tandem.workers.model.layers.experts import RoutedExperts
from tandem.workers.model.layers.linear import ColumnParallelLinear
from tandem.workers.model.quant.rounded import RoundedLinearMethod
from tandem.workers.model.registry import load_model_config, parse_model_config
from tandem.workers.model.runner import ModelRunner

Heads = dict[tuple[int, int], npt.NDArray[np.uint8]]
"""By group and head: [layers, planes, tokens, bytes of a row]."""

NUM_TOKENS = 40
NUM_DECODED = 8
TOLERANCE = 1e-4


def heads_of(group: CacheGroup, runner: ModelRunner) -> tuple[int, ...]:
    kv = runner.kv
    return kv_heads(group.part.num_heads, group.part.num_kv_heads, kv.tp, kv.rank)


def place(driver: Driver, number: int, state_slot: int) -> tuple[TableBlocks, KvSpan]:
    """All that sequence 1 keeps in a group."""
    kv = driver.runner.kv
    group = kv.layout.groups[number]
    is_state = bool(group.part.state)
    span = KvSpan(
        group=number,
        first_layer=0,
        num_layers=len(group.layers),
        first_token=0,
        num_tokens=1 if is_state else NUM_TOKENS,
        first_slot=0,
        num_slots=kv.num_slots(number),
    )
    return TableBlocks((state_slot,)) if is_state else driver.table(1, group.layers[0]), span


def prefill(runner: ModelRunner, ids: list[int]) -> tuple[list[int], Heads]:
    """Returns the next token, and what this rank keeps of the prompt."""
    driver = Driver(runner, seed=1)
    tokens = driver.run(driver.step(1, ids, 0))
    found: Heads = {}
    for number, group in enumerate(runner.kv.layout.groups):
        table, span = place(driver, number, driver.states[1][NUM_TOKENS])
        data = np.frombuffer(read_now(runner.kv, table, span), np.uint8)
        shape = (span.num_layers, group.part.planes, span.num_tokens, span.num_slots, -1)
        for slot, head in enumerate(heads_of(group, runner)):
            found[number, head] = data.reshape(shape)[:, :, :, slot]
    return tokens, found


def decode(runner: ModelRunner, tokens: list[int], held: Heads) -> list[int]:
    """Returns `tokens` and those that follow, computed from what other ranks kept."""
    driver = Driver(runner, seed=2)
    tokens = list(tokens)
    step = driver.step(1, tokens, NUM_TOKENS)
    for number, group in enumerate(runner.kv.layout.groups):
        table, span = place(driver, number, driver.imported[1])
        own = [held[number, head] for head in heads_of(group, runner)]
        data = np.ascontiguousarray(np.stack(own, axis=3))
        runner.kv.write(table, span, data.reshape(-1).data)
    tokens += driver.run(step)
    while len(tokens) < NUM_DECODED:
        start = NUM_TOKENS + len(tokens) - 1
        tokens += driver.run(driver.step(1, tokens[-1:], start))
    driver.drop_all()
    return tokens


@pytest.mark.parametrize("family", STATEFUL)
def test_any_number_of_ranks_continues_what_another_wrote(tmp_path: Path, family: str) -> None:
    folder = make_tiny_model(tmp_path, family)
    ids = prompt(NUM_TOKENS, seed=4)
    expected = reference_greedy(reference(folder), ids, NUM_DECODED)
    sizes = (1, 2, 4)
    written: list[Heads] = []
    for source in sizes:
        held: Heads = {}
        for tokens, part in on_ranks(folder, source, partial(prefill, ids=ids)):
            assert tokens == expected[:1]
            held = part | held
        written.append(held)

    def decode_all(runner: ModelRunner) -> list[list[int]]:
        return [decode(runner, expected[:1], held) for held in written]

    for target in sizes:
        assert on_ranks(folder, target, decode_all) == [[expected] * len(sizes)] * target, target


@pytest.mark.skipif(
    not cpu.can_multiply(torch.zeros(32, 32, dtype=torch.bfloat16)),
    reason="no product of our own with AMX",
)
@pytest.mark.parametrize("family", STATEFUL)
def test_on_two_ranks_logits_depend_on_the_tokens_alone(
    tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In bfloat16, to the last bit, also where the ranks share a group of a norm."""
    folder = make_tiny_model(tmp_path, family, head_dim=32)
    ids = prompt(90, seed=6)

    def work(runner: ModelRunner, ends: list[int]) -> None:
        driver = Driver(runner)
        mate = prompt(150, seed=7)
        for index, (start, end) in enumerate(itertools.pairwise(ends)):
            steps = [driver.step(1, ids[start:end], start)]
            if ends is mixed:
                steps.append(driver.step(2, mate[index : index + 1], index))
            driver.run(*steps)

    mixed = cut(90, random.Random(3))
    singles = list(range(91))
    found: dict[int, torch.Tensor] = {}
    for ends in (singles, mixed):
        with recorded_logits(monkeypatch) as logits:
            on_ranks(folder, 2, partial(work, ends=ends), dtype="bfloat16")
        for position, first, second in zip(ends[1:], logits[::2], logits[1::2], strict=True):
            assert torch.equal(first[0], second[0])
            assert torch.equal(found.setdefault(position, first[0]), first[0]), position


@pytest.mark.parametrize("family", STATEFUL)
def test_weights_are_rounded_when_they_are_loaded(
    tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of mixers and experts, too; only routers keep theirs."""
    folder = make_tiny_model(tmp_path, family)
    ids = prompt(NUM_TOKENS, seed=8)
    expected = reference_logits(reference(folder), ids)[-1]
    driver = Driver(load(folder, quantization="int8"))
    with recorded_logits(monkeypatch) as logits:
        driver.run(driver.step(1, ids, 0))
    error = (logits[0][0] - expected).norm() / expected.norm()
    assert 1e-3 < error < 0.15
    modules = list(driver.runner._model.modules())
    layers = [each for each in modules if isinstance(each, ColumnParallelLinear)]
    assert all(isinstance(each.method, RoundedLinearMethod) for each in layers)
    for experts in (each for each in modules if isinstance(each, RoutedExperts)):
        assert all(
            isinstance(each, RoundedLinearMethod) for part in experts.maps() for each in part
        )


# transformers 5.17 normalises all groups of Granite's mixer together.
NORMALIZES_GROUPS = "group_size" in signature(GraniteMoeHybridRMSNormGated.__init__).parameters
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("lfm2", {"conv_bias": True, "conv_L_cache": 4, "block_auto_adjust_ff_dim": False}),
    ("lfm2", {"block_ffn_dim_multiplier": 1.3, "tie_word_embeddings": True}),
    (
        "lfm2_moe",
        {"use_expert_bias": False, "norm_topk_prob": False, "routed_scaling_factor": 2.0},
    ),
    (
        "granite_hybrid",
        {
            "mamba_proj_bias": True,
            "mamba_conv_bias": False,
            "mamba_n_groups": 4 if NORMALIZES_GROUPS else 1,
            "attention_bias": True,
            "time_step_limit": [0.01, 0.1],
        },
    ),
    ("nemotron_h", {"use_bias": True, "mlp_bias": True, "use_conv_bias": False}),
    ("nemotron_h", {"time_step_limit": [0.05, 0.5]}),
    ("nemotron_3", {"moe_latent_size": 32, "mlp_bias": True, "n_group": 2, "topk_group": 1}),
    ("qwen3_5", {"linear_conv_kernel_dim": 3, "attention_bias": True, "tie_word_embeddings": True}),
    ("qwen3_5", {"linear_num_key_heads": 1, "linear_num_value_heads": 6}),
    ("qwen3_5_moe", {"linear_num_key_heads": 4, "shared_expert_intermediate_size": 33}),
    ("qwen3_next", {"linear_num_key_heads": 3, "linear_num_value_heads": 6}),
    ("qwen3_next", {"norm_topk_prob": False, "decoder_sparse_step": 3, "mlp_only_layers": []}),
]


@pytest.mark.parametrize(("family", "overrides"), VARIANTS)
def test_every_option_of_config_json_counts(
    tmp_path: Path, family: str, overrides: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole and over two ranks, in a chunk and in single tokens."""
    folder = make_tiny_model(tmp_path, family, **overrides)
    ids = prompt(NUM_TOKENS, seed=9)
    model = reference(folder)
    limits = overrides.get("time_step_limit", (0.0, inf))
    for module in model.modules():  # transformers' Nemotron-H does not read this field
        if "time_step_limit" in vars(module):
            vars(module)["time_step_limit"] = limits
    expected = reference_logits(model, ids)[-1]

    def work(runner: ModelRunner) -> None:
        driver = Driver(runner)
        driver.run(driver.step(1, ids[:-5], 0, num_samples=0))
        for start in range(len(ids) - 5, len(ids)):
            last = start + 1 == len(ids)
            driver.run(driver.step(1, ids[start : start + 1], start, num_samples=int(last)))

    with recorded_logits(monkeypatch) as logits:
        work(load(folder))
        on_ranks(folder, 2, work)
    assert len(logits) == 3
    for each in logits:
        assert (each[0] - expected).abs().max() <= TOLERANCE


@pytest.mark.parametrize(
    ("family", "names", "published"),
    [
        (
            "lfm2",
            ("layer_types", "tie_word_embeddings", "intermediate_size", "rope_parameters"),
            {
                "full_attn_idxs": [1],
                "tie_embedding": False,
                "block_ff_dim": 96,
                "rope_theta": 1_000_000.0,
            },
        ),
        ("granite_hybrid", (), {"layer_types": ["mamba", "attention", "mamba"]}),
        ("granite_hybrid", ("time_step_limit",), {"mamba_d_head": "auto"}),
        ("nemotron_h", ("layers_block_type", "layer_types"), {"hybrid_override_pattern": "M-*M"}),
        ("nemotron_h", ("time_step_limit",), {"time_step_min": 0.05}),  # of new weights alone
        ("nemotron_h", (), {"num_hidden_layers": 3}),  # the kinds of layers decide
        (
            "nemotron_h",
            ("layers_block_type", "layer_types"),
            {"hybrid_override_pattern": "M-*M", "num_hidden_layers": 5},
        ),
        ("qwen3_5", ("layer_types",), {"full_attention_interval": 2}),
        ("qwen3_5", ("rope_parameters",), {"rope_theta": 10_000.0}),
    ],
)
def test_published_names_of_fields_mean_the_same(
    tmp_path: Path, family: str, names: tuple[str, ...], published: dict[str, Any]
) -> None:
    """Those of the first checkpoints, which transformers converts."""
    fields = json.loads((make_tiny_model(tmp_path, family) / "config.json").read_text())
    expected = parse_model_config(Fields("config.json", fields))
    others = {name: value for name, value in fields.items() if name not in names}
    assert parse_model_config(Fields("config.json", others | published)) == expected


@pytest.mark.parametrize(
    ("family", "change", "problem"),
    [
        ("lfm2", {"layer_types": ["conv", "mamba", "conv"]}, "layer_types: must be a list of 3"),
        ("granite_hybrid", {"mamba_n_heads": 7}, "mamba_n_heads: 7 heads of 16 are not the 128"),
        ("granite_hybrid", {"hidden_act": "gelu_pytorch_tanh"}, "hidden_act: must be silu"),
        ("granite_hybrid", {"mamba_n_groups": 3}, "mamba_n_groups: 3 does not divide the 8 heads"),
        ("granite_hybrid", {"time_step_limit": [1.0, 0.5]}, "time_step_limit: must be ascending"),
        ("granite_hybrid", {"time_step_limit": "all"}, "time_step_limit: must be two numbers"),
        (
            "granite_hybrid",
            {"position_embedding_type": "alibi"},
            "position_embedding_type: 'alibi'",
        ),
        ("nemotron_h", {"mlp_hidden_act": "silu"}, "mlp_hidden_act: 'silu' is not supported"),
        ("nemotron_h", {"mamba_hidden_act": "gelu"}, "mamba_hidden_act: 'gelu' is not supported"),
        ("nemotron_h", {"time_step_limit": [0.1]}, "time_step_limit: must be two numbers"),
        ("nemotron_h", {"mamba_dt_limit": [1.0, 0.5]}, "mamba_dt_limit: must be ascending"),
        ("nemotron_h", {"layers_block_type": ["mlp", "conv"]}, "layers_block_type: must be a list"),
        ("nemotron_3", {"n_group": 4}, "n_group: 4 does not divide the 6 experts"),
        ("qwen3_5", {"linear_num_value_heads": 5}, "linear_num_value_heads: 5 is not a multiple"),
        ("qwen3_5", {"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim: must be an integer"),
        ("qwen3_5", {"attn_output_gate": False}, "attn_output_gate: must be true"),
        ("qwen3_5", {"hidden_act": "gelu_pytorch_tanh"}, "hidden_act: must be silu"),
        ("qwen3_5", {"layer_types": ["conv"] * 3}, "layer_types: must be a list of 3"),
        ("qwen3_5_moe", {"num_experts": 2**20}, "num_experts: must be an integer"),
    ],
)
def test_wrong_fields_are_named(
    tmp_path: Path, family: str, change: dict[str, Any], problem: str
) -> None:
    fields = json.loads((make_tiny_model(tmp_path, family) / "config.json").read_text())
    with pytest.raises(CheckpointError, match=f"^config.json: {problem}"):
        parse_model_config(Fields("config.json", fields | change))


def test_channels_that_ranks_cannot_split_are_refused(tmp_path: Path) -> None:
    config = load_model_config(make_tiny_model(tmp_path, "lfm2"))  # 256 channels, in runs of 64
    check_config_split(config, 4)
    with pytest.raises(ValueError, match="tp: 8 does not divide"):
        check_config_split(config, 8)


@pytest.mark.parametrize("family", STATEFUL)
def test_the_state_after_each_draft_token_is_that_of_single_tokens(
    tmp_path: Path, family: str
) -> None:
    """To the last bit in bfloat16, so that it does not matter how many tokens are accepted."""
    runner = load(make_tiny_model(tmp_path, family, head_dim=32), dtype="bfloat16")
    states = runner.kv.states
    assert states is not None
    driver, ids = Driver(runner), prompt(45, seed=10)
    mate = driver.step(3, prompt(9), 0)
    driver.run(driver.step(1, ids[:40], 0), mate)
    driver.run(driver.step(1, ids[40:], 40, num_draft=4, num_samples=5))
    after_drafts = {at: states.slots[slot].clone() for at, slot in driver.states[1].items()}
    assert sorted(after_drafts) == [41, 42, 43, 44, 45]
    driver.run(driver.step(2, ids[:17], 0))
    driver.run(driver.step(2, ids[17:40], 17))
    for at in range(40, 45):
        driver.run(driver.step(2, ids[at : at + 1], at))
        assert torch.equal(states.slots[driver.states[2][at + 1]], after_drafts[at + 1]), at


def test_the_experts_of_a_layer_may_be_one_tensor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in published checkpoints of Qwen3.5."""
    single = make_tiny_model(tmp_path / "single", "qwen3_5_moe")
    stacked = make_tiny_model(tmp_path / "stacked", "qwen3_5_moe")
    weights = load_file(stacked / "model.safetensors")
    for layer in range(3):
        prefix = f"model.layers.{layer}.mlp.experts"
        gates, ups, downs = (
            torch.stack(
                [weights.pop(f"{prefix}.{number}.{name}_proj.weight") for number in range(6)]
            )
            for name in ("gate", "up", "down")
        )
        weights[f"{prefix}.gate_up_proj"] = torch.cat([gates, ups], dim=1)
        weights[f"{prefix}.down_proj"] = downs
    save_file(weights, stacked / "model.safetensors", {"format": "pt"})
    ids = prompt(NUM_TOKENS, seed=11)

    def work(runner: ModelRunner) -> None:
        driver = Driver(runner)
        driver.run(driver.step(1, ids, 0))

    for size in (1, 2):
        with recorded_logits(monkeypatch) as logits:
            on_ranks(single, size, work)
            on_ranks(stacked, size, work)
        assert len(logits) == 2 * size
        assert all(torch.equal(each, logits[0]) for each in logits)


@pytest.mark.parametrize("sizes", [(4, 12, 64), (6, 13, 64), (6, 12, 63)])
def test_a_stack_of_experts_of_another_shape_is_refused(
    tmp_path: Path, sizes: tuple[int, int, int]
) -> None:
    folder = make_tiny_model(tmp_path, "qwen3_5_moe", moe_intermediate_size=6)
    weights = load_file(folder / "model.safetensors")
    prefix = "model.layers.1.mlp.experts"
    kept = {name: each for name, each in weights.items() if not name.startswith(prefix)}
    kept[f"{prefix}.gate_up_proj"] = torch.zeros(sizes)
    save_file(kept, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"experts\.0\.gate_proj"):
        load(folder)
