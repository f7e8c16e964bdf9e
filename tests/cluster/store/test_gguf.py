"""Tests GGUF files: tokens as in transformers' dequantised load, conversion, hostile headers."""

import errno
import json
import math
import os
import re
import shutil
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from tokenizers import Regex
from tokenizers import Tokenizer as Backend
from tokenizers.pre_tokenizers import ByteLevel, PreTokenizer, Sequence, Split
from tokenizers.pre_tokenizers import Digits as PreDigits
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    AutoTokenizer,
    GgufConfig,
    LlamaConfig,
    Phi3Config,
    Starcoder2Config,
)
from transformers.integrations.gguf.gguf_tokenizer_mapping import (
    phi3_tokenizer,
    sentencepiece_tokenizer,
)
from typer.testing import CliRunner

from tandem import LLM, SamplingParams
from tandem.cluster.cli.main import app
from tandem.cluster.store import folders, gguf_convert, store
from tandem.cluster.store.gguf_header import GgufHeader, GgufTensor, read_gguf_header
from tandem.cluster.store.gguf_tokenizer import restore_tokenizer
from tandem.cluster.store.pooling import pooling_rules
from tandem.cluster.store.store import resolve_model
from tandem.router.frontend.tokenizer import Tokenizer
from tandem.router.pooling import PoolingRules
from tandem.tests.damaged import LEAK, damaged
from tandem.tests.tiny import make_tiny_model
from tandem.tests.tiny_gguf import write_gguf
from tandem.tests.workers.model.helpers import Driver, load, prompt, reference_greedy
from tandem.workers.model.config import CheckpointError
from tandem.workers.model.loader import weight_shapes
from tandem.workers.model.registry import load_model_config

NUM_TOKENS = 24
GEMMA3: dict[str, Any] = {
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "num_attention_heads": 2,
    "tie_word_embeddings": True,
}
GEMMA3 |= {"num_hidden_layers": 7, "sliding_window": 24, "layer_types": None}
TEXT = "In 2024,  7 naïve cafés <|end|> served\n\t12.50!"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TANDEM_HOME", str(tmp_path / "home"))
    return tmp_path / "home" / "models" / "gguf"


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    return write_gguf(make_tiny_model(folder / "model"), folder / "llama.gguf")


def expected(file: Path, ids: list[int]) -> list[int]:
    """Returns the greedy tokens of transformers for the file."""
    model: Any = AutoModelForCausalLM.from_pretrained(
        file.parent,
        gguf_file=file.name,
        dtype=torch.float32,
        quantization_config=GgufConfig(dequantize=True),
    )
    return reference_greedy(model, ids, NUM_TOKENS)


@pytest.mark.parametrize(
    ("family", "kind", "overrides"),
    [
        ("llama", Kind.F16, {}),
        ("llama", Kind.Q4_0, {"tie_word_embeddings": True}),
        ("qwen2", Kind.Q8_0, {}),
        ("qwen3", Kind.BF16, {"head_dim": 128}),
        ("gemma3", Kind.Q8_0, GEMMA3),
    ],
)
def test_a_converted_file_has_the_tokens_of_transformers(
    tmp_path: Path, family: str, kind: Kind, overrides: dict[str, Any]
) -> None:
    file = write_gguf(
        make_tiny_model(tmp_path / "model", family, **overrides), tmp_path / "x.gguf", kind
    )
    out = tmp_path / "out"
    out.mkdir()
    gguf_convert.convert(file, out, "float32")
    for length in (5, 40):
        ids = prompt(length)
        assert Driver(load(out)).generate(1, ids, NUM_TOKENS) == expected(file, ids)
    tokenizer, theirs = (
        Tokenizer.load(out),
        AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name),
    )
    assert tokenizer._encode(TEXT, True) == theirs.encode(TEXT)
    assert tokenizer.chat_template(tools=False) == theirs.chat_template


LLAMA3_SPLIT = "|".join(
    (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    )
)
DIGITS = Sequence([PreDigits(individual_digits=True), ByteLevel(add_prefix_space=False)])
LLAMA3 = Sequence(
    [Split(Regex(LLAMA3_SPLIT), "isolated"), ByteLevel(add_prefix_space=False, use_regex=False)]
)
ONE_DIGIT = Split(Regex(LLAMA3_SPLIT.replace("{1,3}", "")), "isolated")
SPLITS: dict[str, PreTokenizer] = {
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone"), DIGITS),
    **dict.fromkeys(("llama-bpe", "smaug-bpe", "glm4"), LLAMA3),
    **dict.fromkeys(
        ("qwen2", "stablelm2"),
        Sequence([ONE_DIGIT, ByteLevel(add_prefix_space=False, use_regex=False)]),
    ),
    **dict.fromkeys(("gpt-2", "olmo"), ByteLevel(add_prefix_space=False)),
}


@pytest.mark.parametrize("pre", SPLITS)
def test_texts_are_split_as_the_file_says(tmp_path: Path, pre: str) -> None:
    file = write_gguf(make_tiny_model(tmp_path / "model"), tmp_path / "x.gguf", pre=pre)
    out = tmp_path / "out"
    out.mkdir()
    gguf_convert.convert(file, out, "float32")
    split = Tokenizer.load(out)._backend.pre_tokenizer
    text = "with sails.  1  22 333 4444\n\n don't  (it's)  7"
    assert split is not None
    assert split.pre_tokenize_str(text) == SPLITS[pre].pre_tokenize_str(text)


@pytest.mark.parametrize(
    ("pre", "adds_bos", "is_whole", "has_bos"),
    [
        ("llama-bpe", None, True, True),
        ("llama-bpe", False, True, False),
        ("tekken", None, True, True),
        ("smaug-bpe", None, False, False),
        ("smaug-bpe", True, False, True),
    ],
)
def test_words_that_no_merges_make_and_bos_are_as_in_llama_cpp(
    tmp_path: Path, pre: str, adds_bos: bool | None, is_whole: bool, has_bos: bool
) -> None:
    """Llama 3 has such words: in llama.cpp " Việt" is one token, 101798."""
    folder = make_tiny_model(tmp_path / "model")
    path = folder / "tokenizer.json"
    fields = json.loads(path.read_text())
    pair = fields["model"]["merges"].pop()
    path.write_text(json.dumps(fields))
    token = fields["model"]["vocab"]["".join(pair)]
    word = Backend.from_file(str(path)).decode([token])
    out = tmp_path / "out"
    out.mkdir()
    file = write_gguf(folder, tmp_path / "x.gguf", pre=pre, adds_bos=adds_bos)
    gguf_convert.convert(file, out, "float32")
    ids = Tokenizer.load(out)._encode(word, True)
    assert (ids[0] == 0) == has_bos
    assert (ids[-1] == token) == is_whole


@pytest.mark.parametrize(
    ("pre", "reason"),
    [
        ("deepseek-coder", "'deepseek-coder' is not supported"),
        ("new", "'new' is not supported"),
        (None, "is missing"),
    ],
)
def test_a_file_that_splits_texts_in_an_unknown_way_is_refused(
    tmp_path: Path, pre: str | None, reason: str
) -> None:
    """transformers would split them as GPT-2 does, without a warning."""
    file = write_gguf(make_tiny_model(tmp_path / "model"), tmp_path / "x.gguf", pre=pre)
    with pytest.raises(CheckpointError, match=rf"^x\.gguf: tokenizer\.ggml\.pre: {reason}"):
        gguf_convert.convert(file, tmp_path / "out", "float32")


def test_what_lies_beside_a_file_does_not_count(tmp_path: Path) -> None:
    file = write_gguf(make_tiny_model(tmp_path / "model"), tmp_path / "x.gguf")
    beside = write_gguf(tmp_path / "model", tmp_path / "model" / "x.gguf")
    (tmp_path / "model" / "generation_config.json").write_text('{"eos_token_id": 7}')
    (tmp_path / "model" / "tokenizer.json").write_text("{}")
    (tmp_path / "model" / "config.json").write_text('{"model_type": "gpt2"}')
    made = []
    for each, name in ((file, "alone"), (beside, "not alone")):
        out = tmp_path / name
        out.mkdir()
        gguf_convert.convert(each, out, "float32")
        made.append({path.name: path.read_bytes() for path in out.iterdir()})
    assert made[0] == made[1]


YARN: dict[str, str | float] = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0}
BETAS: dict[str, str | float] = {
    "rope.scaling.yarn_beta_fast": 16.0,
    "rope.scaling.yarn_beta_slow": 2.0,
}


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (YARN | BETAS, ("yarn", 4.0, 2048, 16.0, 2.0)),
        ({"rope.scale_linear": 4.0}, ("linear", 4.0, 0, 32.0, 1.0)),
    ],
)
def test_scaled_rotary_embeddings_are_not_lost(
    tmp_path: Path, values: dict[str, str | float], expected: tuple[object, ...]
) -> None:
    """transformers drops them: a model of 131,072 tokens would then know 8,192."""
    file = write_gguf(make_tiny_model(tmp_path / "model"), tmp_path / "x.gguf", values=values)
    out = tmp_path / "out"
    out.mkdir()
    gguf_convert.convert(file, out, "float32")
    (rope, _) = load_model_config(out).ropes
    assert rope is not None
    found = (rope.kind, rope.factor, rope.original_max_position, rope.beta_fast, rope.beta_slow)
    assert found == expected


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, ("default", None)),
        ({"rope.scaling.factor": 4.0}, ("linear", 4.0)),
        ({"rope.scaling.factor": 2.0, "rope.scale_linear": 4.0}, ("linear", 2.0)),
        ({"rope.scaling.factor": 0.0}, ("default", None)),
        ({"rope.scale_linear": 1.0}, ("default", None)),
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 0.0}, ("linear", 1.0)),
        ({"rope.scaling.type": "none", "rope.scaling.factor": 4.0}, ("default", None)),
        (YARN | {"rope.scaling.yarn_attn_factor": 1.0}, ("yarn", 4.0)),
        (YARN | {"rope.scaling.yarn_attn_factor": 1.1386294}, ("yarn", 4.0)),  # 1 + 0.1 ln 4
    ],
)
def test_a_scale_without_a_type_is_linear(
    values: dict[str, str | float], expected: tuple[str, float | None]
) -> None:
    """As in llama.cpp, which also reads the older of two names."""
    config: Any = LlamaConfig()
    gguf_convert._restore_rope(config, made_header("llama", **values), Path("x.gguf"))
    rope = config.rope_parameters
    assert (rope["rope_type"], rope.get("factor")) == expected


def test_an_unclear_factor_of_attention_is_refused() -> None:
    header = made_header("llama", **YARN, **{"rope.scaling.yarn_attn_factor": 0.8})
    reason = (
        r"^x\.gguf: llama\.rope\.scaling\.yarn_attn_factor: 0\.8 is not supported, only 1 and "
        r"1\.138629, which follows from the factor 4\.0$"
    )
    with pytest.raises(CheckpointError, match=reason):
        gguf_convert._restore_rope(LlamaConfig(), header, Path("x.gguf"))


def test_a_bidirectional_model_is_refused(tmp_path: Path) -> None:
    """transformers would run it as causal, and its embeddings would be wrong."""
    folder = make_tiny_model(tmp_path / "model")
    file = write_gguf(folder, tmp_path / "x.gguf", values={"attention.causal": False})
    (tmp_path / "out").mkdir()
    reason = r"^x\.gguf: llama\.attention\.causal: false, attention to later tokens, is not support"
    with pytest.raises(CheckpointError, match=reason):
        gguf_convert.convert(file, tmp_path / "out", "float32")


@pytest.mark.parametrize(
    ("control", "ends", "expected"),
    [
        ({}, (), {1}),
        ({510: "<end_of_turn>", 511: "<other>"}, (), {1, 510}),  # as in Gemma 2
        ({510: "<a>"}, (510, 1), {1, 510}),
        # As in gpt-oss, where <|end|>, in these files token 1, ends only a message.
        ({509: "<|return|>", 510: "<|call|>"}, (509,), {509, 510}),
    ],
)
def test_all_tokens_that_end_an_answer_are_found(
    tmp_path: Path, control: dict[int, str], ends: tuple[int, ...], expected: set[int]
) -> None:
    """By their texts, as llama.cpp does: many files name only the token that ends a text."""
    folder = make_tiny_model(tmp_path / "model")
    file = write_gguf(folder, tmp_path / "x.gguf", control=control, ends=ends)
    out = tmp_path / "out"
    out.mkdir()
    gguf_convert.convert(file, out, "float32")
    saved = json.loads((out / "generation_config.json").read_text())
    assert set(saved["eos_token_id"]) == expected


PIECES = ["<unk>", "<s>", "</s>", "a", "b", "▁", "▁a", "▁b", "ab", "▁ab"]


@pytest.mark.parametrize("architecture", ["llama", "phi3"])
def test_texts_begin_without_a_blank_if_the_file_says_so(architecture: str) -> None:
    fields = {"tokens": PIECES, "scores": [-float(index) for index in range(len(PIECES))]}
    build: Any = {"llama": sentencepiece_tokenizer, "phi3": phi3_tokenizer}[architecture]
    for adds, expected in ((False, ["ab", "▁b"]), (True, ["▁ab", "▁b"])):
        tokenizer = build(fields)
        values: dict[str, Any] = {
            "general.architecture": architecture,
            "tokenizer.ggml.model": "llama",
            "tokenizer.ggml.add_space_prefix": adds,
            "tokenizer.ggml.eos_token_id": 2,
        }
        restore_tokenizer(tokenizer, GgufHeader(values=values, tensors={}))
        encoding = tokenizer.backend_tokenizer.encode("ab b", add_special_tokens=False)
        assert encoding.tokens == expected
        assert tokenizer.backend_tokenizer.decode(encoding.ids) == "ab b"
        if not adds:
            ids = tokenizer.backend_tokenizer.encode(" b", add_special_tokens=False).ids
            assert tokenizer.backend_tokenizer.decode(ids) == " b"


@pytest.mark.parametrize(("number", "mode"), [(1, "mean"), (2, "cls"), (3, "lasttoken")])
def test_the_pooling_of_embeddings_is_not_lost(tmp_path: Path, number: int, mode: str) -> None:
    folder = make_tiny_model(tmp_path / "model")
    file = write_gguf(folder, tmp_path / "x.gguf", values={"pooling_type": number})
    out = tmp_path / "out"
    out.mkdir()
    gguf_convert.convert(file, out, "float32")
    assert pooling_rules(out) == PoolingRules(mode=mode)


def made_header(architecture: str, **values: str | float) -> GgufHeader:
    named = {f"{architecture}.{name.replace('__', '.')}": each for name, each in values.items()}
    return GgufHeader(values={"general.architecture": architecture} | named, tensors={})


def test_the_base_of_rotary_embeddings_is_not_lost() -> None:
    """transformers reads it for most architectures, but not for StarCoder 2."""
    config: Any = Starcoder2Config()
    header = made_header("starcoder2", rope__freq_base=1e6)
    gguf_convert._restore_rope(config, header, Path("x.gguf"))
    assert config.rope_parameters["rope_theta"] == 1e6


def test_the_window_of_phi_3_is_not_lost() -> None:
    for window, expected in ((2047, 2047), (0, None)):
        config = Phi3Config()
        header = made_header("phi3", attention__sliding_window=window, block_count=32)
        gguf_convert._restore_attention(config, header)
        assert config.sliding_window == expected


@pytest.mark.parametrize(
    ("architecture", "layers", "hidden", "scalar"),
    [
        ("gemma3", 62, 5376, 168),
        ("gemma3", 34, 2560, 256),
        ("gemma2", 46, 4608, 144),
        ("gemma2", 42, 3584, 256),
    ],
)
def test_the_scale_of_gemma_27b_is_known_by_its_layers(
    architecture: str, layers: int, hidden: int, scalar: int
) -> None:
    """No field of the file has it."""
    make: Any = CONFIG_MAPPING[{"gemma3": "gemma3_text"}.get(architecture, architecture)]
    config = make(num_hidden_layers=layers, hidden_size=hidden, num_attention_heads=32)
    header = made_header(architecture, block_count=layers, attention__sliding_window=1024)
    gguf_convert._restore_attention(config, header)
    assert config.query_pre_attn_scalar == scalar


def test_a_file_is_converted_once_for_each_dtype(
    llama: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    converted: list[str] = []

    def convert(gguf: Path, out: Path, dtype: str) -> None:
        converted.append(dtype)
        out.mkdir()
        (out / "config.json").write_text("{}")

    monkeypatch.setattr(store, "_convert", convert)
    monkeypatch.setattr(store, "_MAX_CONVERTED", 1)
    first = resolve_model(str(llama))
    assert resolve_model(str(llama)) == first
    assert resolve_model(str(llama), dtype="float32") != first
    assert converted == ["bfloat16", "float32"]
    assert first.exists()  # this process may use it
    os.utime(llama, (1, 1))
    assert resolve_model(str(llama)) != first
    assert len(converted) == 3
    # Nobody holds those any more but the process that asks, for another file.
    script = f"""
from pathlib import Path
from tandem.cluster.store import store
store._MAX_CONVERTED = 1
def convert(gguf, out, dtype):
    out.mkdir()
    (out / "config.json").write_text("{{}}")
store._convert = convert
store.resolve_model({str(llama)!r}, dtype="float16")
"""
    for file in folders._kept.values():
        os.close(file)
    folders._kept.clear()
    subprocess.run([sys.executable, "-c", script], check=True)
    assert [path.name for path in home.iterdir() if path.is_dir()] == [
        resolve_model(str(llama), dtype="float16").name
    ]


def made_folder(home: Path, name: str, *files: str) -> Path:
    """Makes a converted folder that was used long ago."""
    folder = home / name
    folder.mkdir(parents=True)
    for file in files:
        (folder / file).write_text("{}")
    os.utime(folder, (1, 1))
    return folder


def convert_to_nothing(gguf: Path, out: Path, dtype: str) -> None:
    """Stands in for the conversion."""
    out.mkdir()
    (out / "config.json").write_text("{}")


def test_an_old_folder_that_cannot_be_removed_keeps_no_model_away(
    llama: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    half = made_folder(home, "half", "model.safetensors")
    old = made_folder(home, "old", "config.json")
    stale = made_folder(home, "stale", "config.json")
    stat = Path.stat

    def stat_over_nfs(path: Path, **options: Any) -> os.stat_result:
        if path == stale:
            raise OSError(errno.ESTALE, "Stale file handle")
        return stat(path, **options)

    monkeypatch.setattr(store, "_convert", convert_to_nothing)
    monkeypatch.setattr(store, "_MAX_CONVERTED", 1)
    monkeypatch.setattr(Path, "stat", stat_over_nfs)
    assert resolve_model(str(llama)).is_dir()
    assert half.is_dir()
    assert not old.exists()


def test_a_killed_removal_leaves_no_half_folder_under_the_name_of_a_model(
    llama: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = made_folder(home, "old", "config.json")
    rmtree = shutil.rmtree

    def die(path: Path, **options: Any) -> None:
        if Path(path).parent == home and "old" in Path(path).name:
            raise KeyboardInterrupt
        rmtree(path, **options)

    monkeypatch.setattr(store, "_convert", convert_to_nothing)
    monkeypatch.setattr(store, "_MAX_CONVERTED", 1)
    with monkeypatch.context() as patched:
        patched.setattr(shutil, "rmtree", die)
        with pytest.raises(KeyboardInterrupt):
            resolve_model(str(llama))
    assert not old.exists()
    folder = resolve_model(str(llama))
    assert [path for path in home.iterdir() if path.is_dir()] == [folder]


def test_a_converted_file_on_a_disk_that_cannot_be_written_is_taken(
    llama: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "_convert", convert_to_nothing)
    folder = resolve_model(str(llama))

    def refuse(*_: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(os, "utime", refuse)
    assert resolve_model(str(llama)) == folder


def test_the_engine_and_the_check_take_a_file(llama: Path, home: Path) -> None:
    ids = prompt(12)
    with LLM(str(llama), dtype="float32", max_num_seqs=2, kv_cache_gb=0.01, num_threads=1) as llm:
        params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
        (output,) = llm.generate(prompt_token_ids=ids, sampling_params=params, progress=False)
    assert output.outputs[0].token_ids == expected(llama, ids)
    result = CliRunner().invoke(app, ["check", str(llama), "--dtype", "float32"])
    assert result.exit_code == 0
    assert "runs, by Tandem's own LlamaForCausalLM" in result.output


def test_a_file_with_tensors_that_transformers_drops_is_refused(tmp_path: Path) -> None:
    file = write_gguf(make_tiny_model(tmp_path / "m", attention_bias=True), tmp_path / "x.gguf")
    (tmp_path / "out").mkdir()
    with pytest.raises(
        CheckpointError,
        match=r"^x.gguf: tensors: hold \d+ numbers; LlamaForCausalLM of transformers has",
    ):
        gguf_convert.convert(file, tmp_path / "out", "float32")


def test_only_blocks_that_predict_further_tokens_may_be_left_out(tmp_path: Path) -> None:
    """transformers gives Qwen3.5 one layer less than the file has blocks."""
    folder = make_tiny_model(tmp_path / "model", "qwen3_5")
    config = load_model_config(folder)
    num_layers = len(config.layers)
    sizes = {
        "token_embd.weight": sum(map(math.prod, weight_shapes(config).values())),
        f"blk.{num_layers}.attn_q.weight": 64,
        f"blk.{num_layers}.nextn.eh_proj.weight": 128,
    }

    def header(architecture: str, **more: int) -> GgufHeader:
        tensors = {
            name: GgufTensor(kind=0, shape=(size,), begin=0, end=4 * size)
            for name, size in (sizes | more).items()
        }
        values = made_header(architecture, block_count=num_layers + 1).values
        return GgufHeader(values=values, tensors=tensors)

    gguf_convert._check_size(folder, header("qwen35"), "x.gguf")
    for refused in (header("qwen35", **{"blk.0.nextn.eh_proj.weight": 128}), header("qwen3")):
        with pytest.raises(CheckpointError, match=r"^x\.gguf: tensors: hold"):
            gguf_convert._check_size(folder, refused, "x.gguf")


def text(value: str | bytes) -> bytes:
    data = value if isinstance(value, bytes) else value.encode()
    return struct.pack("<Q", len(data)) + data


def value(key: str, kind: int, data: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + data


def array(kind: int, count: int, data: bytes = b"") -> bytes:
    return struct.pack("<IQ", kind, count) + data


def tensor(name: str, *shape: int, kind: int = 0, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


NAME = value("general.architecture", 8, text("llama"))
LAYERS = value("llama.block_count", 4, struct.pack("<I", 1))


def made(
    *values: bytes, tensors: tuple[bytes, ...] = (), num_values: int = -1, num_tensors: int = -1
) -> bytes:
    counts = (
        len(tensors) if num_tensors < 0 else num_tensors,
        len(values) if num_values < 0 else num_values,
    )
    header = b"GGUF" + struct.pack("<IQQ", 3, *counts) + b"".join((*values, *tensors))
    return header + bytes(-len(header) % 32 + 128)


HOSTILE: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "is empty"),
    "other": (b"PK\x03\x04" + bytes(100), "header: is not a GGUF file"),
    "version": (
        b"GGUF" + struct.pack("<IQQ", 1, 0, 0),
        "header: version 1 is not supported; supported: 2, 3",
    ),
    "big-endian": (
        b"GGUF" + struct.pack(">IQQ", 3, 0, 0),
        "header: version 50331648 is not supported",
    ),
    "tensors": (made(num_tensors=2**60), f"tensor_count: {2**60} is above the maximum, 65536"),
    "values": (made(num_values=2**60), f"metadata_kv_count: {2**60} is above the maximum, 4096"),
    "key": (made(struct.pack("<Q", 2**60)), f"metadata 0: {2**60} is above the maximum, 256"),
    "text": (
        made(value("x", 8, struct.pack("<Q", 2**40))),
        f"x: {2**40} is above the maximum, 1048576",
    ),
    "cut": (
        made(NAME, value("x", 8, struct.pack("<Q", 2**20))),
        "x: truncated: the header is longer than",
    ),
    "array": (made(value("x", 9, array(4, 2**60))), f"x: {2**60} is above the maximum, 4194304"),
    "bomb": (
        made(value("x", 9, array(8, 2**22, bytes(2**25))), value("y", 9, array(8, 1))),
        "y: 1 is above the maximum, 0",
    ),
    "entry": (
        made(value("x", 9, array(8, 1, text("x" * 2_000)))),
        "x: has an entry of 2000 bytes; the maximum is 1024",
    ),
    "entries": (made(value("x", 9, array(8, 2**20))), "x: truncated: the header is longer than"),
    "nested": (
        made(value("x", 9, array(9, 1, array(9, 1)))),
        "x: an array of type 9 is not supported",
    ),
    "kind": (made(value("x", 99, b"")), "x: type 99 is unknown"),
    "twice": (made(NAME, NAME), "general.architecture: occurs twice"),
    "letters": (made(value("x", 8, text(b"\xff\xfe"))), "x: is not UTF-8"),
    "unnamed": (
        made(LAYERS, tensors=(tensor("a", 1),)),
        "general.architecture: is missing, or not a text",
    ),
    "alignment": (
        made(NAME, value("general.alignment", 4, bytes(4))),
        "general.alignment: must be a power of 2",
    ),
    "layers": (
        made(
            NAME, value("llama.block_count", 4, struct.pack("<I", 10**9)), tensors=(tensor("a", 1),)
        ),
        "llama.block_count: must be from 1 to the number of tensors, 1, got 1000000000",
    ),
    "ends": (
        made(NAME, LAYERS, value("tokenizer.ggml.eos_token_ids", 9, array(4, 65, bytes(260)))),
        "tokenizer.ggml.eos_token_ids: 65 is above the maximum, 64",
    ),
    "end": (
        made(NAME, LAYERS, value("tokenizer.ggml.eos_token_ids", 4, bytes(4))),
        "tokenizer.ggml.eos_token_ids: must be an array of numbers",
    ),
    "split": (
        made(NAME, LAYERS, value("split.count", 2, b"\3\0")),
        "split.count: is one of 3 files; join them first",
    ),
    "dimensions": (
        made(NAME, tensors=(tensor("a", *[1] * 9),)),
        "a: has 9 dimensions; the maximum is 4",
    ),
    "size": (
        made(NAME, LAYERS, tensors=(tensor("a", 2**62, 2**62),)),
        "a: truncated: ends at byte ",
    ),
    "place": (
        made(NAME, LAYERS, tensors=(tensor("a", 1, offset=2**63),)),
        "a: truncated: ends at byte ",
    ),
    "nothing": (
        made(NAME, LAYERS, tensors=(tensor("a", 0),)),
        "a: shape [0] does not fit blocks of 1",
    ),
    "blocks": (
        made(NAME, LAYERS, tensors=(tensor("a", 33, kind=2),)),
        "a: shape [33] does not fit blocks of 32",
    ),
    "quantised": (
        made(NAME, LAYERS, tensors=(tensor("a", 32, kind=99),)),
        "a: type 99 is unknown",
    ),
    "over": (
        made(NAME, LAYERS, tensors=(tensor("a", 8), tensor("b", 8))),
        "b: overlaps another tensor",
    ),
    "double": (
        made(NAME, LAYERS, tensors=(tensor("a", 1), tensor("a", 1, offset=32))),
        "a: occurs twice",
    ),
}


@pytest.mark.parametrize("damage", HOSTILE)
def test_security_a_hostile_header_is_refused_by_field_before_anything_is_allocated(
    tmp_path: Path, home: Path, damage: str
) -> None:
    data, reason = HOSTILE[damage]
    file = tmp_path / "x.gguf"
    file.write_bytes(data)
    with pytest.raises(CheckpointError) as failure:
        resolve_model(str(file))
    assert str(failure.value).startswith(f"x.gguf: {reason}")
    assert not home.exists()  # nothing was begun


def refusal(file: Path) -> str:
    try:
        read_gguf_header(file)
    except CheckpointError as error:
        return str(error)
    return ""


def test_damaged_headers_are_refused_in_a_line_or_read(llama: Path, tmp_path: Path) -> None:
    whole = llama.read_bytes()
    start = min(tensor.begin for tensor in read_gguf_header(llama).tensors.values())
    file, num_refused = tmp_path / "x.gguf", 0
    for header in damaged([whole[:2_000], whole[start - 2_000 : start]]):
        first = header if header[:4] == b"GGUF" else whole[: start - 2_000] + header
        file.write_bytes(first + (whole[2_000:] if first is header else whole[start:]))
        refused = refusal(file)
        num_refused += bool(refused)
        assert not LEAK.search(refused), refused
        assert len(refused) < 500
        assert "\n" not in refused
    assert num_refused > 100


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        ("cut", "x.gguf: .*: truncated: ends at byte"),
        ("unknown", "cannot convert x.gguf: .*GGUF model with architecture nosuc is not supported"),
        ("heads", "cannot convert x.gguf: .*number of attention heads"),
    ],
)
def test_the_check_refuses_in_a_line(
    llama: Path, tmp_path: Path, home: Path, damage: str, reason: str
) -> None:
    file = tmp_path / "x.gguf"
    data = llama.read_bytes()
    if damage == "cut":
        data = data[:-100]
    elif damage == "unknown":
        data = data.replace(b"llama", b"nosuc")
    else:
        key = text("llama.attention.head_count")
        place = data.index(key) + len(key) + 4
        data = data[:place] + struct.pack("<I", 7) + data[place + 4 :]
    file.write_bytes(data)
    result = CliRunner().invoke(app, ["check", str(file)])
    assert result.exit_code == 1, result.output
    line = result.output.splitlines()[-1]
    assert line.startswith(f"{file}: refused: ")
    assert re.search(reason, line), line
    assert "Traceback" not in result.output


def test_numbers_of_the_file_are_read_as_they_lie(llama: Path) -> None:
    reader = gguf.GGUFReader(llama)
    header = read_gguf_header(llama)
    assert {each.name: (each.data_offset, each.n_bytes) for each in reader.tensors} == {
        name: (each.begin, each.end - each.begin) for name, each in header.tensors.items()
    }
    assert header.of_model("embedding_length") == 64
    assert np.prod(header.tensors["token_embd.weight"].shape) == 512 * 64
