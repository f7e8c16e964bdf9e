"""Text models of multimodal checkpoints: equality with transformers, names, and what is refused."""

import inspect
import json
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING, PreTrainedModel
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
)
from transformers.utils.import_utils import BACKENDS_MAPPING

from tandem.tests.tiny import make_tiny_model
from tandem.tests.tiny_multimodal import (
    IS_OLD,
    MISTRAL_TEXTS,
    MULTIMODAL,
    make_tiny_multimodal,
)
from tandem.tests.workers.model import decoder_checks as checks
from tandem.tests.workers.model.helpers import load, load_opened, reference
from tandem.tests.workers.model.test_generic import change_config
from tandem.workers.model.config import CheckpointError, read_fields, text_model_of
from tandem.workers.model.generic.config import read_config
from tandem.workers.model.generic.context import read_context_tokens
from tandem.workers.model.loader import open_checkpoint
from tandem.workers.model.registry import TEXT_MODELS, parse_model_config

NATIVE = [
    kind
    for kind in sorted(MULTIMODAL)
    if MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES[kind] in TEXT_MODELS
]
# Tied embeddings, experts, positions on three axes, windows, states.
SAMPLE = ("gemma3", "glm5_next", "kimi_k25", "llava", "qwen2_5_vl", "qwen3_vl_moe")
OTHERS = [kind for kind in sorted(MULTIMODAL) if kind not in SAMPLE]


def change_names(folder: Path, change: dict[str, str | None]) -> None:
    """Replaces beginnings of tensors' names; None removes the tensor."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    for old, new in change.items():
        for name in [name for name in tensors if name.startswith(old)]:
            tensor = tensors.pop(name)
            if new is not None:
                tensors[new + name.removeprefix(old)] = tensor
    save_file(tensors, path)


@pytest.mark.parametrize("kind", sorted(MULTIMODAL))
def test_a_text_model_gives_what_transformers_gives(tmp_path: Path, kind: str) -> None:
    """On one rank, and a sample with more prompts, on two ranks and after a transfer."""
    folder = make_tiny_multimodal(tmp_path, kind)
    checkpoint = open_checkpoint(folder)
    config = checkpoint.config
    generic = open_checkpoint(folder, "transformers") if kind in NATIVE else checkpoint
    tokens = checks.check_decoder(folder, generic, whole=kind in SAMPLE)
    assert config.text_model_of == MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES[kind]
    assert text_model_of(read_fields(folder)) == config.text_model_of
    if kind in NATIVE:
        assert config.transformers is None
        assert checks.tokens_alone(load_opened(checkpoint), len(tokens)) == tokens
    if kind in SAMPLE:
        assert checks.tokens_of_two_ranks(folder) in (None, [tokens] * 2)


@pytest.mark.matrix
@pytest.mark.parametrize("kind", OTHERS)
def test_two_ranks_give_what_transformers_gives(tmp_path: Path, kind: str) -> None:
    """As one rank does, with all prompts and after a transfer."""
    folder = make_tiny_multimodal(tmp_path, kind)
    tokens = checks.check_decoder(folder)
    assert checks.tokens_of_two_ranks(folder) in (None, [tokens] * 2)


@pytest.mark.parametrize("kind", MISTRAL_TEXTS)
def test_mistral_3_may_have_other_text_models(tmp_path: Path, kind: str) -> None:
    """As Ministral 3 and Mistral Small 4 are published."""
    folder = make_tiny_multimodal(tmp_path, "mistral3", **MISTRAL_TEXTS[kind])
    tokens = checks.check_decoder(folder, open_checkpoint(folder))
    assert checks.tokens_of_two_ranks(folder) == [tokens] * 2


def test_a_tied_head_that_the_plan_lacks_is_split_with_its_embedding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in the plan of Gemma 3 in transformers 5.17."""
    folder = make_tiny_multimodal(tmp_path, "gemma3")
    expected = checks.greedy_tokens(reference(folder))
    plan_of = inspect.getattr_static(PreTrainedModel, "tp_plan").fget

    def without_head(model: PreTrainedModel) -> dict[str, str]:
        return {name: style for name, style in plan_of(model).items() if name != "lm_head"}

    monkeypatch.setattr(PreTrainedModel, "tp_plan", property(without_head), raising=False)
    assert checks.tokens_of_two_ranks(folder) == [expected] * 2


@pytest.mark.skipif(IS_OLD, reason="this transformers lacks some types")
def test_every_architecture_of_a_family_of_ours_is_tested() -> None:
    tested = {MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES[kind] for kind in MULTIMODAL}
    assert set(TEXT_MODELS) <= tested
    assert len(MULTIMODAL) >= 40


@pytest.mark.parametrize("model_impl", ["auto", "transformers"])
def test_checkpoints_may_have_the_names_of_transformers_modules(
    tmp_path: Path, model_impl: str
) -> None:
    folder = make_tiny_multimodal(tmp_path, "llava")
    expected = checks.tokens_alone(load(folder, model_impl=model_impl))
    change_names(
        folder,
        {"language_model.model.": "model.language_model.", "language_model.lm_head.": "lm_head."},
    )
    assert checks.tokens_alone(load(folder, model_impl=model_impl)) == expected


@pytest.mark.parametrize(
    ("kind", "model_impl", "has_new_names"),
    [
        ("mistral3", "auto", True),
        ("mistral3", "transformers", False),
        ("mistral3", "transformers", True),
        ("lfm2_vl", "transformers", False),
        ("qwen2_5_vl", "auto", False),
        ("hunyuan_vl", "auto", False),
    ],
)
def test_a_stored_head_is_used_though_the_config_ties_it(
    tmp_path: Path, kind: str, model_impl: str, has_new_names: bool
) -> None:
    """With a config that ties it in the fields of the text model, too."""
    folder = make_tiny_multimodal(tmp_path, kind, tie_word_embeddings=True)
    tie = {"tie_word_embeddings": True} | ({"tie_embedding": True} if kind == "lfm2_vl" else {})
    text = json.loads((folder / "config.json").read_text())["text_config"]
    change_config(folder, **tie, text_config=text | tie)
    if has_new_names:
        change_names(folder, {"language_model.model.": "model.language_model."})
    path = folder / "model.safetensors"
    tensors = load_file(path)
    (embedding,) = (name for name in tensors if name.endswith("embed_tokens.weight"))
    is_old = embedding.startswith("language_model.")
    head = "language_model.lm_head.weight" if is_old else "lm_head.weight"
    assert head not in tensors
    save_file(tensors | {head: tensors[embedding].clone()}, path)
    tied = load(folder, model_impl=model_impl)
    assert tied.config.tie_word_embeddings
    save_file(tensors | {head: tensors[embedding].roll(1, 0)}, path)
    runner = load(folder, model_impl=model_impl)
    assert checks.logit_difference(reference(folder), runner, (63,)) <= checks.TOLERANCE
    assert checks.tokens_alone(runner, 1) != checks.tokens_alone(tied, 1)


@pytest.mark.parametrize("model_impl", ["auto", "transformers"])
def test_a_text_model_alone_may_have_the_names_of_the_multimodal_model(
    tmp_path: Path, model_impl: str
) -> None:
    """As transformers saves a Qwen3_5ForCausalLM that it loaded from a multimodal checkpoint."""
    folder = make_tiny_model(tmp_path / "model", "qwen3_5")
    expected = checks.tokens_alone(load(folder, model_impl=model_impl))
    change_names(folder, {"model.": "model.language_model."})
    assert checks.tokens_alone(load(folder, model_impl=model_impl)) == expected


@pytest.mark.parametrize("model_impl", ["auto", "transformers"])
def test_weights_of_encoders_are_not_read(tmp_path: Path, model_impl: str) -> None:
    folder = make_tiny_multimodal(tmp_path, "gemma3")
    expected = checks.tokens_alone(load(folder, model_impl=model_impl))
    change_names(folder, {"vision_tower.": None, "multi_modal_projector.": None})
    assert checks.tokens_alone(load(folder, model_impl=model_impl)) == expected


@pytest.mark.parametrize("kind", ["qwen2_vl", "qwen2_5_vl", "paddleocr_vl", "hunyuan_vl"])
def test_a_config_without_text_config_is_that_of_a_text_model_too(
    tmp_path: Path, kind: str
) -> None:
    """As published: the fields of the text model are beside vision_config."""
    if kind not in CONFIG_MAPPING:
        pytest.skip("only a newer transformers has this type")
    folder = make_tiny_multimodal(tmp_path, kind)
    path = folder / "config.json"
    fields = json.loads(path.read_text())
    path.write_text(json.dumps(fields.pop("text_config") | fields))
    expected = open_checkpoint(folder).config.text_model_of
    assert expected == MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES[kind]
    assert text_model_of(read_fields(folder)) == expected


def test_fields_that_text_config_leaves_out_have_transformers_defaults(tmp_path: Path) -> None:
    folder = make_tiny_multimodal(tmp_path, "gemma3")
    text = json.loads((folder / "config.json").read_text())["text_config"]
    for name in ("max_position_embeddings", "hidden_activation", "query_pre_attn_scalar"):
        del text[name]
    change_config(folder, text_config=text)
    default = CONFIG_MAPPING["gemma3_text"]().max_position_embeddings
    assert read_context_tokens(folder) == default
    for model_impl in ("auto", "transformers"):
        assert (
            parse_model_config(read_fields(folder), model_impl).max_position_embeddings == default
        )


def test_end_tokens_come_from_text_config_if_nothing_else_has_them(tmp_path: Path) -> None:
    folder = make_tiny_multimodal(tmp_path, "gemma3", eos_token_id=7)
    (folder / "generation_config.json").unlink()
    change_config(folder, eos_token_id=None)
    assert 7 in open_checkpoint(folder).config.eos_token_ids


def test_a_quantization_config_names_layers_of_the_whole_model(tmp_path: Path) -> None:
    folder = make_tiny_multimodal(tmp_path, "llava")
    ignored = ["language_model.lm_head", "model.language_model.layers.0.mlp", "re:vision_tower.*"]
    change_config(
        folder,
        quantization_config={"quant_method": "awq", "modules_to_not_convert": ignored},
    )
    config = parse_model_config(read_fields(folder))
    assert config.quantization["modules_to_not_convert"] == [
        "lm_head",
        "model.layers.0.mlp",
        "re:vision_tower.*",
    ]


def write_config(folder: Path, kind: str, names: dict[str, Any], **fields: Any) -> None:
    config = CONFIG_MAPPING[kind]().to_dict() | {"architectures": [names[kind]]} | fields
    (folder / "config.json").write_text(json.dumps(config, default=str))


@pytest.mark.parametrize("kind", ["qwen2_moe", "nemotron", "gemma3n_text"])
def test_sizes_whose_names_mention_experts_or_layers_are_no_counts(
    tmp_path: Path, kind: str
) -> None:
    fields = {"shared_expert_intermediate_size": 5632, "vocab_size_per_layer_input": 262_144}
    write_config(tmp_path, kind, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, **fields)
    read_config(read_fields(tmp_path))


@pytest.mark.parametrize("name", ["num_hidden_layers", "num_experts"])
def test_counts_of_sub_configs_are_bounded(tmp_path: Path, name: str) -> None:
    folder = make_tiny_multimodal(tmp_path, "gemma3")
    text = json.loads((folder / "config.json").read_text())["text_config"]
    change_config(folder, text_config=text | {name: 10**6})
    with pytest.raises(CheckpointError, match=f"config.json: text_config.{name}: must be at most"):
        open_checkpoint(folder)


def test_a_config_that_is_nested_too_deeply_is_refused(tmp_path: Path) -> None:
    folder = make_tiny_multimodal(tmp_path, "gemma3")
    path = folder / "config.json"
    nested = '{"a":' * 900 + "{}" + "}" * 900
    path.write_text(path.read_text().replace("{", '{"deep": ' + nested + ",", 1))
    for model_impl in ("auto", "transformers"):
        with pytest.raises(CheckpointError, match=r"^config\.json: "):
            open_checkpoint(folder, model_impl)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("phi4_multimodal", "_config: transformers' .* has no text model of its own"),
        ("blip-2", "architectures: transformers' .* has no text model of its own"),
        ("paligemma", "architectures: attention to later tokens is not supported"),
    ],
)
def test_refusals_name_the_reason(tmp_path: Path, kind: str, reason: str) -> None:
    write_config(tmp_path, kind, MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES)
    with pytest.raises(CheckpointError, match=f"^config.json: .*{reason}"):
        parse_model_config(read_fields(tmp_path))


@pytest.mark.parametrize(
    ("kind", "line"),
    [
        *(
            (kind, f"model_type: {kind!r} keeps state in a way that is not supported")
            for kind in ("deepseek_v4", "minimax", "recurrent_gemma", "rwkv", "xlstm", "zaya")
        ),
        *(
            (kind, f"text_config.model_type: {text!r} keeps state in a way that is not supported")
            for kind, text in (
                ("inkling_mm_model", "inkling_text"),
                ("qwen4_exp", "qwen4_exp_text"),
            )
        ),
        *(
            (
                kind,
                "layer_types: 'chunked_attention' is not supported, only full_attention, "
                "sliding_attention, indexed_attention",
            )
            for kind in ("llama4", "llama4_text")
        ),
        (
            "bloom",  # ALiBi
            "num_hidden_layers: 2, but 0 of them attend through transformers' AttentionInterface",
        ),
        (
            "jetmoe",  # experts compute its queries
            "num_hidden_layers: 12, but 0 of them attend through transformers' AttentionInterface",
        ),
        ("doge", "architectures: attention with its own mask is not supported"),
        *(
            (kind, "architectures: layers that share one attention module are not supported")
            for kind in ("diffllama", "hrm_text")
        ),
    ],
)
def test_a_type_is_refused_in_one_line(tmp_path: Path, kind: str, line: str) -> None:
    names = {**MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, **MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES}
    if kind not in names:
        pytest.skip("only a newer transformers has this type")
    write_config(tmp_path, kind, names)
    with pytest.raises(CheckpointError) as caught:
        parse_model_config(read_fields(tmp_path))
    assert str(caught.value) == f"config.json: {line}"


def test_the_sparse_attention_of_minimax_m3_is_refused(tmp_path: Path) -> None:
    kind = "minimax_m3_vl"
    if kind not in CONFIG_MAPPING:
        pytest.skip("only a newer transformers has this type")
    text = CONFIG_MAPPING[kind]().to_dict()["text_config"] | {
        "layer_types": None,
        "num_hidden_layers": 2,
        "mlp_layer_types": None,
        "sparse_attention_config": {"sparse_attention_freq": [0, 1]},
    }
    write_config(tmp_path, kind, MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES, text_config=text)
    with pytest.raises(CheckpointError, match="layer_types: 'minimax_m3_sparse' is not supported"):
        parse_model_config(read_fields(tmp_path))


@pytest.mark.skipif("glm5_next" not in MULTIMODAL, reason="only a newer transformers has it")
def test_an_indexer_that_leaves_out_the_last_keys_is_refused(tmp_path: Path) -> None:
    make_tiny_multimodal(tmp_path, "glm5_next", index_kpool_always_select_tail=False)
    message = (
        "^config.json: text_config.index_kpool_always_select_tail: false, no attention to the "
        "last keys, is not supported$"
    )
    with pytest.raises(CheckpointError, match=message):
        parse_model_config(read_fields(tmp_path))


@pytest.mark.parametrize("package", ["PIL", "timm", "scipy"])
def test_a_missing_package_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    """transformers looks for PIL and timm by their names, and may import others without a look."""
    monkeypatch.setitem(sys.modules, package, None)  # its import fails

    def is_available() -> bool:
        return package not in ("PIL", "timm") and bool(import_module(package))

    backends = dict.fromkeys(("vision", "timm"), (lambda: True, ""))
    backends["vision" if package == "PIL" else "timm"] = (
        is_available,
        f"{{0}} requires the {package} library but it was not found in your environment.",
    )
    for name, backend in backends.items():
        monkeypatch.setitem(BACKENDS_MAPPING, name, backend)
    write_config(tmp_path, "gemma3n", MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES)
    with pytest.raises(CheckpointError) as caught:
        parse_model_config(read_fields(tmp_path))
    assert str(caught.value) == (
        f"config.json: vision_config: is built with the package {package}, which is not installed"
    )
