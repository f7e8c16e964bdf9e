"""Decoders that run through transformers' code: equality with transformers, and what is refused."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tandem.proto.limits import MAX_TOKENS
from tandem.tests.decoders_page import PAGE, head
from tandem.tests.tiny import SIZES, make_tiny_model
from tandem.tests.tiny_decoders import DECODERS, STATEFUL, make_tiny_decoder
from tandem.tests.workers.model import decoder_checks as checks
from tandem.tests.workers.model.engine_runs import (
    NUM_TOKENS,
    PROMPT,
    RecordedEngine,
    resumed_turns,
    run_turn,
)
from tandem.tests.workers.model.helpers import (
    load,
    mixed_steps,
    recorded_logits,
    reference,
    reference_greedy,
)
from tandem.workers.kv_cache.layout import LayerGeometry
from tandem.workers.model.config import CheckpointError, read_fields, text_model_of
from tandem.workers.model.footprint import (
    CacheBytes,
    check_cache_dtype,
    check_config_split,
    kv_bytes_per_token,
    kv_layout,
    sequence_memory,
)
from tandem.workers.model.generic.config import PUBLISHED_NAMES
from tandem.workers.model.generic.context import read_context_tokens
from tandem.workers.model.kernels.c import cpu
from tandem.workers.model.loader import open_checkpoint
from tandem.workers.model.registry import parse_model_config

# Learned activations, windows, latent attention, soft caps, layers that read another layer's cache,
# experts, learned positions, sinks, scales of all kinds, states.
SAMPLE = (
    "apertus",
    "cohere2",
    "deepseek_v2",
    "deepseek_v3",
    "gemma2",
    "gemma3n_text",
    "gemma4_text",
    "glm4_moe",
    "gpt2",
    "gpt_oss",
    "granitemoe",
    "qwen3_5_text",
)
LATENT = tuple(
    kind
    for kind in (
        "axk1",
        "deepseek_v2",
        "deepseek_v3",
        "glm4_moe_lite",
        "longcat_flash",
        "minicpm3",
        "youtu",
    )
    if kind in DECODERS
)
OTHERS = [kind for kind in sorted(DECODERS) if kind not in SAMPLE]
# Those with more than one geometry of layers, latents or states, and a sample of the others.
CHECKED_WHOLE = {*SAMPLE, *LATENT, *STATEFUL}
CHECKED_WHOLE |= {"deepseek_v32", "gemma3_text", "granite_swa", "mistral"}
CHECKED_WHOLE |= {"dots3_note_text", "gemma4_unified_text", "mimo_v2_flash"}


@pytest.mark.parametrize("kind", sorted(DECODERS))
def test_a_decoder_of_transformers_gives_what_transformers_gives(tmp_path: Path, kind: str) -> None:
    """On one rank; a sample on two ranks, and those that differ with more prompts and moved."""
    if kind == "longcat_flash" and transformers.__version__.startswith("5.17."):
        pytest.skip("float32 logits of transformers 5.17 differ by 4e-4 from those in float64")
    folder = make_tiny_decoder(tmp_path, kind)
    assert text_model_of(read_fields(folder)) == ""
    tokens = checks.check_decoder(folder, whole=kind in CHECKED_WHOLE)
    if kind in SAMPLE:
        assert checks.tokens_of_two_ranks(folder) in (None, [tokens] * 2)


def test_two_ranks_split_norms_that_have_a_row_for_each_head(tmp_path: Path) -> None:
    folder = make_tiny_decoder(tmp_path, "cohere", use_qk_norm=True)
    tokens = checks.check_decoder(folder)
    assert checks.tokens_of_two_ranks(folder) == [tokens] * 2


@pytest.mark.matrix
@pytest.mark.parametrize("kind", OTHERS)
def test_two_ranks_give_what_transformers_gives(tmp_path: Path, kind: str) -> None:
    """As one rank does, with all prompts and after a transfer."""
    folder = make_tiny_decoder(tmp_path, kind)
    tokens = checks.check_decoder(folder)
    assert checks.tokens_of_two_ranks(folder) in (None, [tokens] * 2)


@pytest.mark.parametrize("kind", LATENT)
def test_latent_attention_keeps_one_row_of_a_token(tmp_path: Path, kind: str) -> None:
    config = parse_model_config(read_fields(make_tiny_decoder(tmp_path, kind)))
    row = LayerGeometry(num_heads=4, num_kv_heads=1, head_dim=24, value_dim=16)
    assert set(config.layers) == {row}
    assert kv_bytes_per_token(config, 1, "bfloat16") == len(config.layers) * 24 * 2
    assert kv_bytes_per_token(config, 4, "bfloat16") == len(config.layers) * 24 * 2


def test_a_token_of_deepseek_v3_takes_an_85th_of_expanded_keys_and_values(tmp_path: Path) -> None:
    write_config(tmp_path, "deepseek_v3")  # transformers' defaults are its shape
    config = parse_model_config(read_fields(tmp_path))
    assert kv_bytes_per_token(config, 8, "bfloat16") == 61 * 576 * 2 == 70_272
    expanded = 61 * 2 * 128 * 192 * 2  # values are padded to the length of the keys
    assert expanded > 70_272 * 85


def test_latents_are_not_quantized(tmp_path: Path) -> None:
    config = parse_model_config(read_fields(make_tiny_decoder(tmp_path, "deepseek_v2")))
    message = "^kv_cache_dtype: int8 is not supported for latent keys$"
    with pytest.raises(ValueError, match=message):
        kv_bytes_per_token(config, 1, "bfloat16", "int8")
    check_cache_dtype(config, "auto")


SHARED = tuple(
    kind for kind in ("gemma3n_text", "gemma4_text", "gemma4_unified_text") if kind in DECODERS
)


@pytest.mark.parametrize("kind", SHARED)
def test_layers_that_read_another_layers_cache_keep_none(tmp_path: Path, kind: str) -> None:
    config = parse_model_config(read_fields(make_tiny_decoder(tmp_path, kind)))
    assert [layer.reads for layer in config.layers] == [None, None, None, 1, 2]
    whole, own = (
        kv_layout(each, "bfloat16") for each in (config, replace(config, layers=config.layers[:3]))
    )
    for tp in (1, 2):
        found, expected = (
            (
                CacheBytes.of(each, tp, block_size=16),
                sequence_memory(each, tp, block_size=16, num_tokens=100),
            )
            for each in (whole, own)
        )
        assert found == expected


@pytest.mark.parametrize(
    ("kind", "alignment", "spacing"), [("gemma3_text", 4, 24), ("gemma4_text", 16, 16)]
)
def test_resume_points_give_what_transformers_gives(
    tmp_path: Path, kind: str, alignment: int, spacing: int
) -> None:
    """Prompts of more than four windows, which continue from each kind of resume point."""
    if kind not in DECODERS:
        pytest.skip("not in this transformers")
    folder = make_tiny_decoder(tmp_path, kind)
    model = reference(folder)
    runner = load(folder, model_impl="transformers", block_size=4, num_blocks=400)
    answer = reference_greedy(model, PROMPT, NUM_TOKENS)
    for turn in resumed_turns(answer, alignment=alignment, spacing=spacing).values():
        found = run_turn(RecordedEngine(runner), turn, num_mates=2)
        expected = reference_greedy(model, turn.last, NUM_TOKENS)
        assert found.tokens == expected
        # The windows of two points may have all blocks of one between them.
        assert turn.num_cached <= found.num_cached < len(turn.last)


@pytest.mark.skipif("flint" not in DECODERS, reason="the page is of a newer transformers")
def test_the_page_lists_every_decoder_that_is_tested() -> None:
    assert PAGE.read_text().startswith(head()), "run `python -m tandem.tests.decoders_page`"
    listed = [
        line.split(" | ")[1]
        for line in PAGE.read_text().splitlines()
        if line.startswith("| ") and "model_type" not in line
    ]
    assert listed == sorted(DECODERS)
    assert len(DECODERS) >= 40


SPARSE = tuple(
    kind
    for kind in ("axk2", "deepseek_v32", "dots3_note_text", "glm_moe_dsa", "hy_v4")
    if kind in DECODERS
)


@pytest.mark.parametrize("kind", SPARSE)
def test_sparse_attention_is_refused_beyond_what_is_dense(tmp_path: Path, kind: str) -> None:
    make_tiny_decoder(tmp_path, kind, index_topk=64)
    message = (
        "^config.json: index_topk: sparse attention beyond 64 tokens is not supported; set "
        "context_tokens to at most 64$"
    )
    for context in (None, 65):
        with pytest.raises(CheckpointError, match=message):
            open_checkpoint(tmp_path, context_tokens=context)
    assert open_checkpoint(tmp_path, context_tokens=64).config.dense_tokens == 64


def change_config(folder: Path, **fields: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        *((kind, "of them attend|cannot be traced") for kind in ("bloom", "mpt")),
        ("codegen", "0 of them attend through transformers' AttentionInterface"),
        ("falcon", "architectures: transformers' Falcon.* attends without AttentionInterface"),
        ("gptj", "architectures: transformers' GPTJ.* attends without AttentionInterface"),
        ("gpt_neo", "architectures: transformers' GPTNeo.* attends without AttentionInterface"),
        ("whisper", "models with an encoder are not supported"),
    ],
)
def test_what_cannot_run_is_refused_by_its_config_alone(
    tmp_path: Path, kind: str, reason: str
) -> None:
    write_config(tmp_path, kind)
    with pytest.raises(CheckpointError, match=reason) as caught:
        open_checkpoint(tmp_path)
    assert str(caught.value).startswith("config.json: ")


@pytest.mark.parametrize("kind", ["bart", "plbart", "marian", "pegasus", "blenderbot"])
def test_a_decoder_that_counts_positions_by_itself_is_refused(tmp_path: Path, kind: str) -> None:
    write_config(
        tmp_path,
        kind,
        is_encoder_decoder=False,
        is_decoder=True,
        encoder_layers=2,
        decoder_layers=2,
    )
    with pytest.raises(
        CheckpointError, match=r"^config.json: architectures: .* takes no position_ids$"
    ):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("kind", ["roberta", "camembert", "xlm-roberta-xl"])
def test_a_decoder_whose_positions_begin_past_its_padding_is_refused(
    tmp_path: Path, kind: str
) -> None:
    write_config(tmp_path, kind, is_decoder=True, num_hidden_layers=2, pad_token_id=1)
    with pytest.raises(CheckpointError, match=r"^config.json: architectures: .* padding token"):
        open_checkpoint(tmp_path)


def test_a_window_that_only_a_mask_would_know_is_refused(tmp_path: Path) -> None:
    write_config(
        tmp_path, "phimoe", num_hidden_layers=2, max_position_embeddings=256, sliding_window=255
    )
    with pytest.raises(
        CheckpointError,
        match=r"^config.json: sliding_window: is not supported: "
        r"the model applies it in its own mask$",
    ):
        parse_model_config(read_fields(tmp_path))
    write_config(
        tmp_path, "phimoe", num_hidden_layers=2, max_position_embeddings=256, sliding_window=256
    )
    assert parse_model_config(read_fields(tmp_path)).transformers is not None


@pytest.mark.parametrize(
    ("kind", "left_out", "expected"),
    [
        *((kind, "", MAX_TOKENS) for kind in ("falcon_mamba", "mamba", "mamba2")),
        ("kimi_linear", "", 2048),  # as model_max_length
        ("bailing_hybrid", "model_max_length", 262_144),
        ("gpt2", "n_positions", 1024),
        ("cohere", "max_position_embeddings", 8192),
    ],
)
def test_routers_read_the_context_that_workers_read(
    tmp_path: Path, kind: str, left_out: str, expected: int
) -> None:
    """Also if config.json leaves it out, or its decoder has no limit."""
    if kind not in DECODERS:
        pytest.skip(f"this release of transformers has no {kind}")
    path = make_tiny_decoder(tmp_path, kind) / "config.json"
    fields = json.loads(path.read_text())
    fields.pop(left_out, None)
    path.write_text(json.dumps(fields))
    assert read_context_tokens(tmp_path) == expected
    assert parse_model_config(read_fields(tmp_path)).max_position_embeddings == expected


def write_config(folder: Path, kind: str, **overrides: Any) -> None:
    config = CONFIG_MAPPING[kind](**overrides)
    name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind]
    (folder / "config.json").write_text(
        json.dumps(config.to_dict() | {"architectures": [name]}, default=str)
    )


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"model_type": "gone"}, "model_type: 'gone' is not known to transformers"),
        ({"model_type": None}, "model_type: is missing"),
        ({"architectures": ["CohereForConditionalGeneration"]}, "architectures: .* is no decoder"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config.bits: "),
        ({"is_causal": False}, "is_causal: false, attention to later tokens, is not supported"),
        ({"num_key_value_heads": 3}, "num_key_value_heads: 3 does not divide the 4 query heads"),
        ({"num_experts": 10**9}, "num_experts: must be at most"),
        ({"hidden_size": "wide"}, "hidden_size: not valid to transformers' CohereConfig"),
        ({"num_hidden_layers": 10**6}, "num_hidden_layers: must be at most "),
        ({"layer_norm_eps": []}, "layer_norm_eps: not valid"),
        ({"max_position_embeddings": 10**12}, "max_position_embeddings: must be an integer"),
    ],
)
def test_bad_fields_are_refused_by_name(
    tmp_path: Path, change: dict[str, Any], reason: str
) -> None:
    folder = make_tiny_decoder(tmp_path, "cohere")
    change_config(folder, **change)
    with pytest.raises(CheckpointError, match=f"config.json: {reason}"):
        open_checkpoint(folder)


def test_code_in_the_folder_is_not_run(tmp_path: Path) -> None:
    folder = make_tiny_decoder(tmp_path, "cohere")
    change_config(
        folder, auto_map={"AutoModelForCausalLM": "modeling.Model", "AutoConfig": "modeling.Config"}
    )
    (folder / "modeling.py").write_text(f"open({str(folder / 'ran')!r}, 'w')")
    load(folder)
    change_config(folder, model_type="mine", architectures=["Model"])
    with pytest.raises(CheckpointError, match="model_type: 'mine' is not known"):
        open_checkpoint(folder)
    assert not (folder / "ran").exists()


def test_a_model_without_a_plan_is_for_one_rank(tmp_path: Path) -> None:
    config = open_checkpoint(make_tiny_decoder(tmp_path, "gpt2")).config
    check_config_split(config, 1)
    with pytest.raises(
        ValueError, match="transformers has no plan to split GPT2LMHeadModel; use 1"
    ):
        check_config_split(config, 2)


@pytest.mark.parametrize("published", sorted(PUBLISHED_NAMES))
def test_a_checkpoint_may_have_its_publishers_name_of_the_class(
    tmp_path: Path, published: str
) -> None:
    kind = {
        "BailingMoeV3ForCausalLM": "bailing_hybrid",
        "ExaoneMoEForCausalLM": "exaone_moe",
        "InternLM3ForCausalLM": "internlm3",
        "IQuestCoderForCausalLM": "iquestcoder",
        "PhiMoEForCausalLM": "phimoe",
    }[published]
    if kind not in CONFIG_MAPPING:
        pytest.skip(f"this release of transformers has no {kind}")
    folder = make_tiny_decoder(tmp_path, kind)
    change_config(folder, architectures=[published])
    checkpoint = open_checkpoint(folder)
    assert checkpoint.config.architecture == PUBLISHED_NAMES[published]
    checks.check_decoder(folder, checkpoint, whole=False)


def test_another_model_that_shares_a_model_type_is_refused(tmp_path: Path) -> None:
    if "bailing_hybrid" not in DECODERS:
        pytest.skip("this release of transformers has no bailing_hybrid")
    folder = make_tiny_decoder(tmp_path, "bailing_hybrid")
    change_config(folder, architectures=["BailingMoeV2_5ForCausalLM"])
    with pytest.raises(CheckpointError, match=r"architectures: 'BailingMoeV2_5.* is no decoder"):
        open_checkpoint(folder)


@pytest.mark.parametrize("original", [64, SIZES["max_position_embeddings"]])
def test_phimoe_takes_the_long_factors_if_its_context_is_longer(
    tmp_path: Path, original: int
) -> None:
    """For every prompt. transformers always takes the short factors: here they are the long ones.

    Its scale depends on the length of the prompt.
    """
    rope: dict[str, Any] = {
        "rope_type": "longrope",
        "rope_theta": 10_000.0,
        "original_max_position_embeddings": original,
        "long_factor": [1.0 + index for index in range(8)],
        "short_factor": [1.0 + 0.1 * index for index in range(8)],
        "long_mscale": 1.3,
        "short_mscale": 1.1,
    }
    folder = make_tiny_decoder(tmp_path, "phimoe", rope_parameters=rope)
    runner = load(folder)
    if original == 64:
        rope |= {"short_factor": rope["long_factor"], "short_mscale": rope["long_mscale"]}
        change_config(folder, rope_parameters=rope)
    assert checks.logit_difference(reference(folder), runner) <= checks.TOLERANCE


def test_names_of_weights_may_lack_their_first_part(tmp_path: Path) -> None:
    """As those of GPT-2 on the hub."""
    folder = make_tiny_decoder(tmp_path, "gpt2")
    expected = checks.tokens_alone(load(folder))
    path = folder / "model.safetensors"
    bare = {name.removeprefix("transformer."): each for name, each in load_file(path).items()}
    assert "wte.weight" in bare
    save_file(bare, path)
    assert checks.tokens_alone(load(folder)) == expected


def test_a_stored_head_is_used_beside_names_that_lack_their_first_part(tmp_path: Path) -> None:
    """Though the config ties it: the embedding is found by its shorter name."""
    folder = make_tiny_decoder(tmp_path, "gpt2")
    path = folder / "model.safetensors"
    bare = {name.removeprefix("transformer."): each for name, each in load_file(path).items()}
    bare["lm_head.weight"] = bare["wte.weight"].roll(1, 0)
    save_file(bare, path, {"format": "pt"})
    runner = checks.load_generic(folder)
    assert checks.logit_difference(reference(folder), runner, (63,)) <= checks.TOLERANCE


def test_ours_is_taken_where_there_is_one(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path)
    assert open_checkpoint(folder).config.transformers is None
    assert open_checkpoint(folder, "transformers").config.transformers is not None
    with pytest.raises(
        CheckpointError, match="'CohereForCausalLM' is not supported by model_impl tandem, only "
    ):
        open_checkpoint(make_tiny_decoder(tmp_path / "cohere", "cohere"), "tandem")


@pytest.mark.skipif(
    not cpu.can_multiply(torch.zeros(32, 32, dtype=torch.bfloat16)),
    reason="no product of our own with AMX",
)
def test_steps_of_transformers_code_are_recorded_as_programs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And give what the same code computes call by call, but for what torch rounds otherwise."""
    folder = make_tiny_decoder(tmp_path, "llama", hidden_size=256, head_dim=64)
    results = []
    for is_recorded in (True, False):
        runner = load(folder, dtype="bfloat16", model_impl="transformers")
        assert None not in (runner._decode_program, runner._token_program)
        if not is_recorded:
            runner._decode_program = runner._token_program = None
        with recorded_logits(monkeypatch) as logits:
            tokens = mixed_steps(runner)
        results.append((tokens, torch.cat(logits).float()))
    (tokens, logits_of_program), (expected, logits_of_calls) = results
    assert tokens == expected
    assert (logits_of_program - logits_of_calls).abs().max() < 0.1
