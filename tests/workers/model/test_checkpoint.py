"""Folders that can be served, and a table of those that cannot: each refusal is one line naming
file and tensor.
"""

import json
import math
import mmap
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tandem.proto.errors import InvalidArgument
from tandem.tests.peers import IDENTITY
from tandem.tests.tiny import FAMILIES, TINY, make_tiny_model
from tandem.tests.workers.model.helpers import Driver, load, prompt, reference, reference_greedy
from tandem.workers.model import checkpoint, loader
from tandem.workers.model.config import CheckpointError, RopeConfig
from tandem.workers.model.footprint import check_disk, check_draft
from tandem.workers.model.generic.context import read_context_tokens
from tandem.workers.model.loader import check_checkpoint, open_checkpoint, weight_shapes
from tandem.workers.model.registry import load_model_config, longest_context
from tandem.workers.model.sampling.grammar_cache import GrammarCache
from tandem.workers.tp.rank import RankConfig, load_rank

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
QUERY = "model.layers.0.self_attn.q_proj.weight"
HEAD = "lm_head.weight"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_tiny_model(tmp_path / "model")


def edit_json(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    values = json.loads(path.read_text())
    change(values)
    path.write_text(json.dumps(values))


def set_config(**fields: Any) -> Callable[[Path], None]:
    return lambda folder: edit_json(folder / "config.json", lambda config: config.update(fields))


def unset_config(name: str) -> Callable[[Path], None]:
    return lambda folder: edit_json(folder / "config.json", lambda config: config.pop(name))


def edit_tensors(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        tensors = load_file(folder / SINGLE)
        tensors = {name: tensor.clone() for name, tensor in tensors.items()}
        change(tensors)
        save_file(tensors, folder / SINGLE, {"format": "pt"})

    return edit


def cut(file: str, size: int) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        data = (folder / file).read_bytes()
        (folder / file).write_bytes(data[:size])

    return edit


def edit_header(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        data = (folder / SINGLE).read_bytes()
        size = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + size])
        change(header)
        text = json.dumps(header).encode()
        (folder / SINGLE).write_bytes(len(text).to_bytes(8, "little") + text + data[8 + size :])

    return edit


def shard(folder: Path) -> None:
    """Splits the single file into one shard per half of the tensors."""
    tensors = load_file(folder / SINGLE)
    names = sorted(tensors)
    weight_map = {
        name: f"model-{1 + (index * 2 >= len(names))}-of-2.safetensors"
        for index, name in enumerate(names)
    }
    for file in set(weight_map.values()):
        save_file(
            {name: tensors[name].clone() for name in names if weight_map[name] == file},
            folder / file,
        )
    (folder / SINGLE).unlink()
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def sharded(change: Callable[[Path], object]) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        shard(folder)
        change(folder)

    return edit


def edit_index(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    return sharded(
        lambda folder: edit_json(folder / INDEX, lambda index: change(index["weight_map"]))
    )


def rope(**fields: Any) -> Callable[[Path], None]:
    return set_config(rope_parameters={"rope_theta": 10000.0} | fields)


BAD: dict[str, tuple[Callable[[Path], object], tuple[str, ...]]] = {
    "no config": (lambda folder: (folder / "config.json").unlink(), ("config.json",)),
    "config is no JSON": (cut("config.json", 50), ("config.json", "JSON")),
    "config is a list": (
        lambda folder: (folder / "config.json").write_text("[]"),
        ("config.json", "object"),
    ),
    "config is deep": (
        lambda folder: (folder / "config.json").write_text("[" * 100_000),
        ("config.json", "JSON"),
    ),
    "architecture": (
        set_config(architectures=["GPT2LMHeadModel"]),
        ("config.json", "architectures", "GPT2LMHeadModel"),
    ),
    "no architecture": (unset_config("architectures"), ("config.json", "architectures")),
    "bidirectional": (set_config(is_causal=False), ("config.json", "is_causal", "later tokens")),
    "bidirectional text model": (
        set_config(text_config={"is_causal": False}),
        ("config.json", "text_config.is_causal"),
    ),
    "activation": (set_config(hidden_act="gelu"), ("config.json", "hidden_act", "gelu")),
    "missing field": (unset_config("hidden_size"), ("config.json", "hidden_size")),
    "string for integer": (set_config(num_hidden_layers="2"), ("config.json", "num_hidden_layers")),
    "boolean for integer": (set_config(vocab_size=True), ("config.json", "vocab_size")),
    "huge integer": (set_config(num_hidden_layers=10**12), ("config.json", "num_hidden_layers")),
    "negative": (set_config(intermediate_size=-1), ("config.json", "intermediate_size")),
    "not a number": (set_config(rms_norm_eps=float("nan")), ("config.json", "rms_norm_eps")),
    "heads": (set_config(num_key_value_heads=3), ("config.json", "num_key_value_heads")),
    "odd head": (set_config(head_dim=15), ("config.json", "head_dim")),
    "boolean": (set_config(tie_word_embeddings=1), ("config.json", "tie_word_embeddings")),
    "dtype in config": (set_config(dtype="int8"), ("config.json", "dtype", "int8")),
    "eos is no id": (
        lambda folder: (folder / "generation_config.json").write_text('{"eos_token_id": [1, "2"]}'),
        ("generation_config.json", "eos_token_id"),
    ),
    "rope type": (rope(rope_type="axial"), ("config.json", "rope_parameters.rope_type", "axial")),
    "longrope without factors": (
        rope(rope_type="longrope"),
        ("config.json", "rope_parameters.short_factor"),
    ),
    "longrope with too few factors": (
        rope(rope_type="longrope", short_factor=[1.0, 2.0]),
        ("config.json", "rope_parameters", "8 factors"),
    ),
    "rope without factor": (rope(rope_type="linear"), ("config.json", "rope_parameters.factor")),
    "rope with bad factors": (
        rope(rope_type="llama3", factor=8, low_freq_factor=4, high_freq_factor=4),
        ("config.json", "rope_parameters.low_freq_factor"),
    ),
    "partial rotary": (
        rope(rope_type="default", partial_rotary_factor=0.5),
        ("config.json", "partial_rotary_factor"),
    ),
    "rope is no object": (set_config(rope_parameters=[1]), ("config.json", "rope_parameters")),
    "no weights": (lambda folder: (folder / SINGLE).unlink(), (SINGLE, "not found")),
    "pickled weights": (
        lambda folder: (folder / SINGLE).rename(folder / "pytorch_model.bin"),
        (
            SINGLE,
            "not found",
            "pytorch_model.bin is not read, because reading it may run code",
            "save_pretrained",
        ),
    ),
    "weights by another name": (
        lambda folder: (folder / SINGLE).rename(folder / "consolidated.safetensors"),
        (SINGLE, "not found", "consolidated.safetensors has neither name"),
    ),
    "a GGUF in a folder": (
        lambda folder: (folder / "config.json").rename(folder / "tiny.gguf"),
        ("config.json", "not found", "tiny.gguf is a complete model: give that file"),
    ),
    "an adapter": (
        lambda folder: (folder / "config.json").rename(folder / "adapter_config.json"),
        ("config.json", "not found", "adapter", "base model"),
    ),
    "weights truncated": (cut(SINGLE, -100), (SINGLE, "truncated", "model.")),
    "header truncated": (cut(SINGLE, 100), (SINGLE, "truncated")),
    "length truncated": (cut(SINGLE, 5), (SINGLE, "truncated")),
    "empty file": (cut(SINGLE, 0), (SINGLE, "truncated")),
    "trailing bytes": (
        lambda folder: (folder / SINGLE).write_bytes((folder / SINGLE).read_bytes() + b"x"),
        (SINGLE, "1 bytes follow"),
    ),
    "header is no JSON": (
        lambda folder: (folder / SINGLE).write_bytes(b"\x08" + bytes(7) + b"nonsense"),
        (SINGLE, "JSON"),
    ),
    "entry is no object": (edit_header(lambda header: header.update({QUERY: 5})), (SINGLE, QUERY)),
    "offsets do not fit": (
        edit_header(lambda header: header[QUERY].update(shape=[64, 65])),
        (SINGLE, QUERY, "data_offsets"),
    ),
    "gap": (edit_header(lambda header: header.pop(QUERY)), (SINGLE, "gap")),
    "missing tensor": (
        edit_tensors(lambda tensors: tensors.pop(QUERY)),
        (SINGLE, QUERY, "missing"),
    ),
    "missing head": (
        edit_tensors(lambda tensors: tensors.pop("lm_head.weight")),
        (SINGLE, "lm_head.weight", "missing"),
    ),
    "wrong shape": (
        edit_tensors(lambda tensors: tensors.update({QUERY: torch.zeros(64, 32)})),
        (SINGLE, QUERY, "[64, 32]", "[64, 64]"),
    ),
    "wrong dtype": (
        edit_tensors(
            lambda tensors: tensors.update({name: tensor.int() for name, tensor in tensors.items()})
        ),
        (SINGLE, "model.embed_tokens.weight", "I32"),
    ),
    "config of another size": (
        set_config(intermediate_size=128),
        (SINGLE, "mlp.gate_proj.weight", "[96, 64]"),
    ),
    "index is broken": (sharded(cut(INDEX, 20)), (INDEX, "JSON")),
    "index without map": (
        sharded(lambda folder: (folder / INDEX).write_text("{}")),
        (INDEX, "weight_map"),
    ),
    "missing shard": (
        sharded(lambda folder: (folder / "model-2-of-2.safetensors").unlink()),
        ("model-2-of-2.safetensors",),
    ),
    "truncated shard": (
        sharded(cut("model-2-of-2.safetensors", -1)),
        ("model-2-of-2.safetensors", "truncated"),
    ),
    "not in its shard": (
        edit_index(lambda shards: shards.update({QUERY: "model-2-of-2.safetensors"})),
        ("model-2-of-2.safetensors", QUERY, "missing"),
    ),
    "not in the index": (edit_index(lambda shards: shards.pop(QUERY)), (INDEX, QUERY, "missing")),
    "shard above": (
        edit_index(lambda shards: shards.update({QUERY: "../a.safetensors"})),
        (INDEX, QUERY, "../a"),
    ),
    "absolute shard": (
        edit_index(lambda shards: shards.update({QUERY: "/etc/passwd"})),
        (INDEX, QUERY, "/etc/passwd"),
    ),
    "shard with a surrogate": (
        edit_index(lambda shards: shards.update({QUERY: "\udc00.safetensors"})),
        (INDEX, QUERY, r"\udc00.safetensors"),
    ),
    "shard with NUL": (
        edit_index(lambda shards: shards.update({QUERY: "a\0.safetensors"})),
        (INDEX, QUERY, r"a\x00.safetensors"),
    ),
    "shard with a long name": (
        edit_index(lambda shards: shards.update({QUERY: "é" * 122 + ".safetensors"})),
        (INDEX, QUERY, "é.safetensors"),
    ),
    "tensor with a surrogate in the index": (
        edit_index(lambda shards: shards.update({"\udc00\n": "model-2-of-2.safetensors"})),
        ("model-2-of-2.safetensors", r"\udc00\n", "missing"),
    ),
    "tensor with a surrogate": (
        edit_header(lambda header: header.update({"\udc00\0": 5})),
        (SINGLE, r"\udc00\x00", "not a valid tensor entry"),
    ),
    "dots": (edit_index(lambda shards: shards.update({QUERY: ".."})), (INDEX, QUERY)),
    "no tokenizer": (lambda folder: (folder / "tokenizer.json").unlink(), ("tokenizer.json",)),
    "tokenizer is no JSON": (cut("tokenizer.json", 100), ("tokenizer.json", "JSON")),
    "tokenizer without vocabulary": (
        lambda folder: edit_json(
            folder / "tokenizer.json", lambda values: values["model"].pop("vocab")
        ),
        ("tokenizer.json", "vocab"),
    ),
    "tokenizer beyond the embedding": (
        lambda folder: edit_json(
            folder / "tokenizer.json", lambda values: values["model"]["vocab"].update(far=512)
        ),
        ("tokenizer.json", "'far'", "512", "model.embed_tokens.weight"),
    ),
    "added token below 0": (
        lambda folder: edit_json(
            folder / "tokenizer.json", lambda values: values["added_tokens"][1].update(id=-1)
        ),
        ("tokenizer.json", "-1"),
    ),
}


ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "cohere2": "Cohere2ForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
}


@pytest.mark.parametrize("name", BAD)
def test_bad_folder_is_refused_in_one_line(folder: Path, name: str) -> None:
    check_checkpoint(folder)
    damage, expected = BAD[name]
    damage(folder)
    with pytest.raises(CheckpointError) as raised:
        check_checkpoint(folder)
    message = str(raised.value)
    assert message.isprintable()
    for part in expected:
        assert part in message


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_weights_that_are_not_finite_are_refused_by_name_when_they_are_loaded(
    folder: Path, value: float
) -> None:
    def put(tensors: dict[str, torch.Tensor]) -> None:
        tensors[QUERY][3, 5] = value

    edit_tensors(put)(folder)
    with pytest.raises(
        CheckpointError, match=rf"^{SINGLE}: {QUERY}: has NaN or infinite numbers in torch.float32$"
    ):
        load(folder)


@pytest.mark.parametrize("model_impl", ["tandem", "transformers"])
@pytest.mark.parametrize("family", ["llama", "cohere2", "gemma3"])
@pytest.mark.parametrize("value", [10**9, -1, "2", [2]])
@pytest.mark.parametrize(
    "field", ["num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size"]
)
def test_security_hostile_sizes_are_refused_before_anything_has_them(
    tmp_path: Path, family: str, model_impl: str, field: str, value: object
) -> None:
    """Of a config alone: nobody gets as far as the weights."""
    config = TINY[family][0](**TINY[family][1]).to_dict() | {
        field: value,
        "architectures": [ARCHITECTURES[family]],
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        CheckpointError, match=r"^(config\.json: \w+: |model\.safetensors: not found)"
    ):
        check_checkpoint(tmp_path, model_impl)


def test_missing_folder(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such folder"):
        check_checkpoint(tmp_path / "nothing")


def test_a_checkpoint_need_not_have_one_dtype(folder: Path) -> None:
    """Weights are converted to the dtype that the model computes in; rounded ones give other logits
    than exact ones.
    """
    expected = Driver(load(folder)).generate(1, prompt(20), 8)
    edit_tensors(lambda tensors: tensors.update({QUERY: tensors[QUERY].bfloat16().float()}))(folder)
    rounded = Driver(load(folder)).generate(1, prompt(20), 8)
    edit_tensors(lambda tensors: tensors.update({QUERY: tensors[QUERY].bfloat16()}))(folder)
    assert Driver(load(folder)).generate(1, prompt(20), 8) == rounded
    assert len(expected) == len(rounded)


def test_a_start_checks_a_checkpoint_once_and_maps_each_file_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shard(folder)
    headers: list[str] = []
    maps: list[int] = []
    read_header, map_file = checkpoint._read_header, mmap.mmap

    def counted_header(path: Path) -> dict[str, checkpoint.StoredTensor]:
        headers.append(path.name)
        return read_header(path)

    def counted_map(fd: int, *rest: Any, **fields: Any) -> mmap.mmap:
        if fd >= 0:
            maps.append(fd)
        return map_file(fd, *rest, **fields)

    monkeypatch.setattr(checkpoint, "_read_header", counted_header)
    monkeypatch.setattr(loader, "mmap", SimpleNamespace(**vars(mmap) | {"mmap": counted_map}))
    load_rank(
        RankConfig(model=str(folder), identity=IDENTITY, dtype="float32", kv_cache_bytes=1 << 20)
    )
    assert sorted(headers) == ["model-1-of-2.safetensors", "model-2-of-2.safetensors"]
    assert len(maps) == 2


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_tree_takes_the_tensors_that_transformers_writes(
    tmp_path: Path, family: str, tied: bool
) -> None:
    folder = make_tiny_model(tmp_path, family, tie_word_embeddings=tied)
    stored = {name: tuple(tensor.shape) for name, tensor in load_file(folder / SINGLE).items()}
    config = check_checkpoint(folder)
    if config.experts and config.experts.may_be_stacked:
        # Experts that are one tensor in the file are read one by one.
        stacked = [name for name, shape in stored.items() if len(shape) == 3 and shape[1] > 1]
        parts = checkpoint.unstack_experts(
            checkpoint.read_tensors(folder), config.experts.num_experts
        )
        stored = {name: each.shape for name, each in parts.items() if name not in stacked}
    assert weight_shapes(config) == stored


def fingerprint(folder: Path) -> str:
    return open_checkpoint(folder).fingerprint()


def test_fingerprint_follows_weights_and_config_only(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "a")
    first = fingerprint(folder)
    assert fingerprint(make_tiny_model(tmp_path / "b")) == first
    assert fingerprint(make_tiny_model(tmp_path / "c", seed=1)) != first
    assert fingerprint(make_tiny_model(tmp_path / "d", rms_norm_eps=1e-5)) != first
    assert fingerprint(make_tiny_model(tmp_path / "e", dtype="bfloat16")) != first
    edit_json(folder / "generation_config.json", lambda values: values.update(eos_token_id=7))
    shard(folder)
    assert fingerprint(folder) == first


def test_the_fingerprint_follows_each_row_of_the_embedding(tmp_path: Path) -> None:
    """Training may add single tokens; a stale KV cache would have the keys of their old rows."""
    folder = make_tiny_model(tmp_path / "a")
    first = fingerprint(folder)
    tensors = load_file(folder / SINGLE)
    tensors["model.embed_tokens.weight"][300] += 1
    save_file(tensors, folder / SINGLE)
    assert fingerprint(folder) != first


def test_a_large_folder_is_checked_fast(folder: Path) -> None:
    """A sparse file of the size of a 70 GB model: little but its header is read."""
    config = load_model_config(folder)
    size = 70 * 10**9 // 4 // config.hidden_size // (3 * len(config.layers))
    set_config(intermediate_size=size)(folder)
    tensors = weight_shapes(load_model_config(folder))
    header, position = {}, 0
    for name, shape in tensors.items():
        num_bytes = 4 * torch.Size(shape).numel()
        header[name] = {
            "dtype": "F32",
            "shape": shape,
            "data_offsets": [position, position + num_bytes],
        }
        position += num_bytes
    text = json.dumps(header).encode()
    with (folder / SINGLE).open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + position)
    start = time.process_time()  # which other processes do not change
    check_checkpoint(folder)
    open_checkpoint(folder).fingerprint()
    assert time.process_time() - start < 5


def test_the_context_is_read_without_the_family(folder: Path) -> None:
    assert read_context_tokens(folder) == load_model_config(folder).max_position_embeddings == 2048


def test_older_rope_fields(folder: Path) -> None:
    """transformers 4 wrote `rope_theta` and `rope_scaling`, with `type` before it was
    `rope_type`.
    """
    unset_config("rope_parameters")(folder)
    set_config(rope_theta=5e5, rope_scaling={"type": "linear", "factor": 2.0})(folder)
    assert load_model_config(folder).ropes[0] == RopeConfig(kind="linear", theta=5e5, factor=2.0)
    set_config(rope_theta=5e5, rope_scaling=None)(folder)
    assert load_model_config(folder).ropes[0] == RopeConfig(theta=5e5)


def test_yarn_attention_factor_is_derived(folder: Path) -> None:
    def attention_factor() -> float:
        first = load_model_config(folder).ropes[0]
        assert first is not None
        return first.attention_factor

    rope(rope_type="yarn", factor=4.0, original_max_position_embeddings=512)(folder)
    assert attention_factor() == pytest.approx(1.138629436)
    rope(rope_type="yarn", factor=4.0, original_max_position_embeddings=512, attention_factor=0.5)(
        folder
    )
    assert attention_factor() == 0.5


@pytest.mark.parametrize(
    ("family", "fields", "windows"),
    [
        ("llama", {"sliding_window": 7}, (None, None)),
        ("mistral", {"sliding_window": 7}, (7, 7)),
        ("mistral", {"sliding_window": None}, (None, None)),
        ("qwen2", {"sliding_window": 7, "use_sliding_window": False}, (None, None)),
        (
            "qwen2",
            {
                "sliding_window": 7,
                "use_sliding_window": True,
                "layer_types": None,
                "max_window_layers": 1,
            },
            (None, 7),
        ),
        (
            "qwen3",
            {
                "sliding_window": 7,
                "use_sliding_window": True,
                "layer_types": ["sliding_attention", "full_attention"],
            },
            (7, None),
        ),
        ("phi3", {"sliding_window": 2047}, (2047, 2047)),
        ("phi3", {"sliding_window": 2048}, (None, None)),  # the context
        *(
            (
                "mistral",
                {
                    "sliding_window": window,
                    "rope_parameters": {
                        "rope_type": "linear",
                        "factor": 2.0,
                        "rope_theta": 10_000.0,
                    },
                },
                (kept, kept),
            )
            for window, kept in ((4095, 4095), (4096, None))
        ),
    ],
)
def test_windows(
    tmp_path: Path, family: str, fields: dict[str, Any], windows: tuple[int | None, ...]
) -> None:
    folder = make_tiny_model(tmp_path, family)
    set_config(**fields)(folder)
    assert tuple(layer.window for layer in load_model_config(folder).layers) == windows


@pytest.mark.parametrize("model_impl", ["tandem", "transformers"])
def test_a_model_whose_window_is_its_context_has_no_window(tmp_path: Path, model_impl: str) -> None:
    folder = make_tiny_model(tmp_path, "mistral", sliding_window=2048)
    config = load_model_config(folder, model_impl)
    assert {layer.window for layer in config.layers} == {None}
    check_disk(config)
    check_draft(config, config)
    ids = prompt(20)
    assert generate(folder, model_impl) == reference_greedy(reference(folder), ids, 8)


def test_the_context_of_a_service_changes_no_window(tmp_path: Path) -> None:
    """So workers with different contexts exchange KV cache."""
    folder = make_tiny_model(tmp_path, "mistral")
    whole, short = open_checkpoint(folder), open_checkpoint(folder, context_tokens=16)
    assert [layer.window for layer in short.config.layers] == [24, 24]
    assert short.fingerprint() == whole.fingerprint()


def test_a_scaling_without_bounds_is_a_context_without_bounds(folder: Path) -> None:
    """1e308 times the 2,048 positions is infinite."""
    rope(rope_type="yarn", factor=1e308)(folder)
    assert longest_context(load_model_config(folder)) == sys.maxsize


def test_end_of_sequence_tokens(folder: Path) -> None:
    """As `generate`: generation_config.json first, then config.json; one id or several."""
    edit_json(folder / "tokenizer_config.json", lambda values: values.pop("eos_token"))
    set_config(eos_token_id=[5, 6])(folder)
    assert load_model_config(folder).eos_token_ids == (1,)
    edit_json(folder / "generation_config.json", lambda values: values.pop("eos_token_id"))
    assert load_model_config(folder).eos_token_ids == (5, 6)
    (folder / "generation_config.json").unlink()
    set_config(eos_token_id=[-1, 7, 512])(folder)
    assert load_model_config(folder).eos_token_ids == (
        7,
    )  # the others are no tokens: they end nothing
    set_config(eos_token_id=None)(folder)
    assert load_model_config(folder).eos_token_ids == ()


@pytest.mark.parametrize("end", ["<|turn|>", {"content": "<|turn|>", "lstrip": False}])
def test_the_end_of_the_tokenizer_is_one_as_well(folder: Path, end: object) -> None:
    """A tool that trains a chat model may name its end there alone."""
    token = {"id": 9, "content": "<|turn|>", "special": True, "normalized": False}
    token |= {"single_word": False, "lstrip": False, "rstrip": False}
    edit_json(folder / "tokenizer.json", lambda values: values["added_tokens"].append(token))
    edit_json(folder / "tokenizer_config.json", lambda values: values.update(eos_token=end))
    assert load_model_config(folder).eos_token_ids == (1, 9)
    (folder / "special_tokens_map.json").write_text(json.dumps({"eos_token": "absent"}))
    assert load_model_config(folder).eos_token_ids == (
        1,
    )  # as transformers: the older file goes first
    edit_json(
        folder / "tokenizer_config.json",
        lambda values: values.update(added_tokens_decoder={"9": token}),
    )
    assert load_model_config(folder).eos_token_ids == (1, 9)


def test_an_added_token_may_lie_beyond_the_embedding(folder: Path) -> None:
    """As in Gemma 3; a grammar knows nothing of it."""
    edit_json(folder / "tokenizer.json", lambda values: values["added_tokens"][1].update(id=900))
    assert check_checkpoint(folder).vocab_size == 512
    assert GrammarCache(folder, 512, [0]).load(
        json.dumps({"grammars": [{"lark_grammar": "start: /[0-9]/"}]})
    )


@pytest.mark.parametrize(
    ("family", "model_impl"), [("llama", "tandem"), ("gemma3", "tandem"), ("llama", "transformers")]
)
def test_a_stored_head_is_used_though_the_config_ties_it(
    tmp_path: Path, family: str, model_impl: str
) -> None:
    folder = make_tiny_model(tmp_path / "model", family, tie_word_embeddings=True)
    embedding = load_file(folder / SINGLE)["model.embed_tokens.weight"]
    tied = generate(folder, model_impl)
    edit_tensors(lambda tensors: tensors.update({HEAD: embedding.clone()}))(folder)
    assert check_checkpoint(folder, model_impl).tie_word_embeddings
    assert generate(folder, model_impl) == tied
    edit_tensors(lambda tensors: tensors.update({HEAD: embedding.roll(1, 0)}))(folder)
    assert not check_checkpoint(folder, model_impl).tie_word_embeddings
    expected = reference_greedy(reference(folder), prompt(20), 8)
    assert generate(folder, model_impl) == expected != tied
    edit_tensors(lambda tensors: tensors.update({HEAD: embedding[:-1].clone()}))(folder)
    with pytest.raises(CheckpointError, match=r"lm_head\.weight: shape is \[511, "):
        check_checkpoint(folder, model_impl)
    edit_tensors(lambda tensors: tensors.update({HEAD: tensors.pop("model.embed_tokens.weight")}))(
        folder
    )
    assert generate(folder, model_impl) == tied  # transformers, too, takes the head for both


def test_a_context_beyond_the_models_is_refused_or_as_far_as_the_scaling_goes(folder: Path) -> None:
    with pytest.raises(
        InvalidArgument, match=r"^context_tokens: 2049 is above the model's context of 2048 tokens"
    ):
        open_checkpoint(folder, context_tokens=2049)
    whole, short = open_checkpoint(folder), open_checkpoint(folder, context_tokens=64)
    assert (whole.config.context_tokens, short.config.context_tokens) == (2048, 64)
    assert whole.fingerprint() == short.fingerprint()  # they may exchange KV cache
    yarn = {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "rope_theta": 10000.0,
    }
    set_config(max_position_embeddings=64, rope_parameters=yarn)(folder)
    assert load_model_config(folder).max_position_embeddings == 64
    longer = open_checkpoint(folder, context_tokens=256).fingerprint()
    assert longer not in (fingerprint(folder), whole.fingerprint())  # as in earlier releases
    runner = load(folder, context_tokens=256)
    ids = prompt(150)
    assert Driver(runner).generate(1, ids, 8) == reference_greedy(reference(folder), ids, 8)
    with pytest.raises(InvalidArgument, match="257 is above the model's context of 256 tokens"):
        open_checkpoint(folder, context_tokens=257)
    with pytest.raises(
        InvalidArgument, match=r"65 is above .* of 64 tokens \(max_position_embeddings in config"
    ):  # where YaRN does not raise it
        open_checkpoint(folder, "transformers", context_tokens=65)


def test_an_empty_rope_scaling_is_none(folder: Path) -> None:
    linear = {"rope_type": "linear", "factor": 8.0, "rope_theta": 300.0}
    set_config(rope_scaling={}, rope_parameters=linear)(folder)
    assert load_model_config(folder).ropes[0] == RopeConfig(kind="linear", theta=300.0, factor=8.0)
    set_config(rope_scaling=None, rope_parameters={"full_attention": linear})(folder)
    with pytest.raises(
        CheckpointError, match=r"rope_parameters\.full_attention: a rotary embedding per layer type"
    ):
        load_model_config(folder)


def generate(folder: Path, model_impl: str) -> list[int]:
    return Driver(load(folder, model_impl=model_impl)).generate(1, prompt(20), 8)
