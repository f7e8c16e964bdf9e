"""Converts a GGUF file into a folder of safetensors.

Run as `python -m tandem.cluster.store.gguf_convert FILE DTYPE`. The working folder receives the
files that `save_pretrained` writes: config.json, model.safetensors, tokenizer.json,
tokenizer_config.json, chat_template.jinja. transformers converts; this module adds the parts that
transformers drops (RoPE, windows, end-of-turn tokens, splitting of digits, whole words, BOS, the
pooling of embeddings), and refuses a file of which more would be lost.
"""

import json
import math
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import numpy as np
import torch
import transformers
from tokenizers import Regex, Tokenizer
from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence, Split
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GgufConfig
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from ...workers.model.config import CheckpointError
from ...workers.model.loader import check_checkpoint, weight_shapes
from ...workers.model.registry import load_model_config
from .gguf_header import GgufHeader, GgufTensor, read_gguf_header
from .pooling import write_mode

_PROBE: Final = "In 2024,  7 naïve cafés served 日本茶 🍵\n\tfor 12.50!"
_ENDS: Final = tuple(f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom"))
_PRE: Final = "tokenizer.ggml.pre"  # llama.cpp's name for a byte-level tokenizer's splitting
_ADD_BOS: Final = "tokenizer.ggml.add_bos_token"
_GPT2_SPLIT: Final = frozenset(
    (
        "default",
        "gpt-2",
        "phi-2",
        "mpt",
        "olmo",
        "jais",
        "trillion",
        "granite-docling",
        "exaone4",
        "gigachat",
        "a.x-4.0",
        "mellum",
    )
)
"""Names of GPT-2's splitting, which transformers uses for every name that it does not know."""
_DIGITS_APART: Final = frozenset(
    ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b", "mellum2")
)
"""Names of GPT-2's splitting after single digits have been split off."""
_SAME_SPLIT: Final = {
    **dict.fromkeys(("stablelm2", "hunyuan", "solar-open", "grok-2"), "qwen2"),
    **dict.fromkeys(("glm4", "chatglm-bpe"), "llama-bpe"),
}
"""Names of splittings that transformers knows by another name."""
_WHOLE_WORDS: Final = frozenset(
    (
        "llama3",
        "llama-v3",
        "llama-bpe",
        "falcon3",
        "falcon-h1",
        "pixtral",
        "midm-2.0",
        "lfm2",
        "jina-v5-nano",
        "tekken",
    )
)
"""Names for which llama.cpp ignores the merges of words in the vocabulary, and adds BOS."""
_LAYERS_OF_27B: Final = {"gemma2": 46, "gemma3": 62}
"""The numbers of layers by which llama.cpp recognizes Gemma 27B."""
_POOLINGS: Final = {1: "mean", 2: "cls", 3: "lasttoken"}
"""llama.cpp's numbers of poolings; 0 is none, and 4 the head of a model that ranks."""
_ROPE_FREQS: Final = "rope_freqs.weight"
_ROPE_FACTORS: Final = ("rope_factors_short.weight", "rope_factors_long.weight")
_F32: Final = 0


def convert(gguf: Path, out: Path, dtype: str) -> None:
    """Writes the model of `gguf` to the existing folder `out`.

    Raises CheckpointError for a file that transformers cannot convert without loss, or that Tandem
    does not serve.
    """
    header = read_gguf_header(gguf)
    _check_splitting(header, gguf)
    with TemporaryDirectory(prefix=".gguf.", dir=out.parent) as folder:
        # transformers prefers files beside a GGUF file to the content of that file.
        alone = Path(folder, gguf.name)
        alone.symlink_to(gguf.resolve())
        _convert(alone, header, out, dtype)


def _convert(gguf: Path, header: GgufHeader, out: Path, dtype: str) -> None:
    """Converts a file that is alone in its folder. Raises as `convert`."""
    source: dict[str, Any] = {
        "pretrained_model_name_or_path": str(gguf.parent),
        "gguf_file": gguf.name,
    }
    config = AutoConfig.from_pretrained(**source)
    config.architectures = [
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.model_type, config.model_type)
    ]
    config.dtype = getattr(torch, dtype)
    if key_length := header.of_model("attention.key_length"):
        config.head_dim = key_length
    _restore_rope(config, header, gguf)
    _restore_attention(config, header)
    config.save_pretrained(out)
    _check_size(out, header, gguf.name)
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        **source,
        config=config,
        dtype=config.dtype,
        quantization_config=GgufConfig(dequantize=True),
        output_loading_info=True,
    )
    model, report = loaded
    if missing := min(report["missing_keys"], default=""):
        raise CheckpointError(f"{gguf.name}: {missing}: missing")
    tokenizer = AutoTokenizer.from_pretrained(**source)
    _restore_splitting(tokenizer.backend_tokenizer, header)
    _restore_whole_words(tokenizer, header)
    _check_tokenizer(tokenizer, header)
    ends = [header.values[name] for name in _ENDS if name in header.values]
    if len(ends) > 1:
        model.generation_config.eos_token_id = sorted(set(ends))
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    if mode := _POOLINGS.get(header.of_model("pooling_type")):
        write_mode(out, mode)
    _drop_invented_tokens(out, header.values.get("tokenizer.ggml.tokens", 0))
    check_checkpoint(out)


def _check_splitting(header: GgufHeader, gguf: Path) -> None:
    """Raises CheckpointError for a byte-level tokenizer whose splitting of texts is unknown.

    transformers would split as GPT-2 does, and the model would read other tokens.
    """
    pre = header.values.get(_PRE)
    if header.values.get("tokenizer.ggml.model") != "gpt2":
        return
    if pre is None:
        raise CheckpointError(
            f"{gguf.name}: {_PRE}: is missing, so the splitting of texts is unknown; convert the "
            "model again"
        )
    known = (*GGUF_PRE_TOKENIZER_SPLITS, *_GPT2_SPLIT, *_DIGITS_APART, *_SAME_SPLIT)
    if pre not in known:
        raise CheckpointError(f"{gguf.name}: {_PRE}: {pre!r:.60} is not supported")


def _restore_splitting(tokenizer: Tokenizer, header: GgufHeader) -> None:
    """Restores the splitting of texts if transformers, reading GGUF, replaced it by GPT-2's.

    Otherwise two blanks before a number would become two tokens; the model was trained on one.
    """
    pre = header.values.get(_PRE)
    if header.values.get("tokenizer.ggml.model") != "gpt2":
        return
    if pre in _DIGITS_APART:
        tokenizer.pre_tokenizer = Sequence(
            [Digits(individual_digits=True), ByteLevel(add_prefix_space=False)]
        )
    elif pre in _SAME_SPLIT:
        pattern = Regex(GGUF_PRE_TOKENIZER_SPLITS[_SAME_SPLIT[pre]])
        split = Split(pattern, behavior="isolated")
        tokenizer.pre_tokenizer = Sequence(
            [split, ByteLevel(add_prefix_space=False, use_regex=False)]
        )


def _restore_whole_words(tokenizer: Any, header: GgufHeader) -> None:
    """Restores the vocabularies of Llama 3 and Mistral's Tekken, whose merges lack some words.

    A word of the vocabulary is one token there, also if no merges lead to it. A file that does not
    say whether texts begin with BOS means that they do.
    """
    if header.values.get("tokenizer.ggml.model") != "gpt2":
        return
    if header.values.get(_PRE) in _WHOLE_WORDS:
        tokenizer.backend_tokenizer.model.ignore_merges = True
        if _ADD_BOS not in header.values:
            tokenizer.add_bos_token = True


def _drop_invented_tokens(folder: Path, num_tokens: int) -> None:
    """Removes special tokens that transformers' classes add; the model has no rows for them."""
    path = folder / "tokenizer.json"
    fields = json.loads(path.read_bytes())
    config_path = folder / "tokenizer_config.json"
    config = json.loads(config_path.read_bytes())
    invented = [token["content"] for token in fields["added_tokens"] if token["id"] >= num_tokens]
    if invented:
        fields["added_tokens"] = [
            token for token in fields["added_tokens"] if token["id"] < num_tokens
        ]
        path.write_text(json.dumps(fields, ensure_ascii=False), encoding="utf-8")
        kept = {name: value for name, value in config.items() if value not in invented}
        config_path.write_text(json.dumps(kept, ensure_ascii=False), encoding="utf-8")


def _restore_rope(config: Any, header: GgufHeader, gguf: Path) -> None:
    """Restores the scaling of rotary embeddings, which transformers drops when it reads GGUF.

    Without it the model handles only short prompts. Also restores the base, which transformers
    drops for StarCoder 2. Raises CheckpointError for an unknown scaling.
    """
    if not getattr(config, "rope_parameters", None):
        return
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    # Of several kinds of layers, only full attention is scaled.
    target = config.rope_parameters.get("full_attention", config.rope_parameters)
    if (rotated := header.of_model("rope.dimension_count", head_dim)) < head_dim:
        target["partial_rotary_factor"] = rotated / head_dim
    if base := header.of_model("rope.freq_base"):
        target["rope_theta"] = base
    kind = header.of_model("rope.scaling.type", "none")
    original = header.of_model(
        "rope.scaling.original_context_length", config.max_position_embeddings
    )
    rope: dict[str, Any]
    short, long, computed = (
        _read_factors(gguf, header.tensors.get(name)) for name in (*_ROPE_FACTORS, _ROPE_FREQS)
    )
    if short and long:
        rope = {
            "rope_type": "longrope",
            "short_factor": short,
            "long_factor": long,
            "attention_factor": header.of_model("rope.scaling.attn_factor", 1.0),
        }
    elif computed:  # the divisors of the frequencies, computed as for Llama 3.1
        rope = {
            "rope_type": "longrope",
            "short_factor": computed,
            "long_factor": computed,
            "attention_factor": 1.0,
        }
    elif kind in ("linear", "yarn"):
        rope = {"rope_type": kind, "factor": header.of_model("rope.scaling.factor", 1.0)}
    elif kind == "none":
        return
    else:
        field = f"{header.architecture}.rope.scaling.type"
        raise CheckpointError(
            f"{gguf.name}: {field}: {kind!r:.60} is not supported; supported: linear, yarn, "
            "longrope"
        )
    if rope["rope_type"] != "linear":
        rope["original_max_position_embeddings"] = original
        if hasattr(config, "original_max_position_embeddings"):
            config.original_max_position_embeddings = original
    target.update(rope)


def _restore_attention(config: Any, header: GgufHeader) -> None:
    """Restores the window of Phi-3, and the scale of Gemma 27B, which no field of a file has."""
    window = header.of_model("attention.sliding_window")
    if window and getattr(config, "sliding_window", 0) is None:
        config.sliding_window = window
    if header.of_model("block_count") == _LAYERS_OF_27B.get(header.architecture):
        config.query_pre_attn_scalar = config.hidden_size // config.num_attention_heads


def _read_factors(gguf: Path, tensor: GgufTensor | None) -> list[float]:
    if tensor is None or tensor.kind != _F32:
        return []
    values = np.fromfile(gguf, dtype="<f4", count=math.prod(tensor.shape), offset=tensor.begin)
    return [float(value) for value in values]


def _check_size(folder: Path, header: GgufHeader, name: str) -> None:
    """Checks, before the model is built, that its parameters are exactly the numbers of the file.

    transformers ignores tensors that it does not know, and gives missing ones random values.
    """
    config = load_model_config(folder)
    num_parameters = sum(map(math.prod, weight_shapes(config).values()))
    num_held = sum(
        math.prod(tensor.shape)
        for key, tensor in header.tensors.items()
        if key not in (_ROPE_FREQS, *_ROPE_FACTORS)
    )
    if num_parameters != num_held:
        raise CheckpointError(
            f"{name}: tensors: hold {num_held} numbers; {config.architecture} of transformers has "
            f"{num_parameters} parameters"
        )


def _check_tokenizer(tokenizer: Any, header: GgufHeader) -> None:
    if tokenizer.chat_template != header.values.get("tokenizer.chat_template"):
        raise CheckpointError("tokenizer.chat_template: was lost")
    if tokenizer.eos_token_id != header.values.get(_ENDS[0]):
        raise CheckpointError(f"{_ENDS[0]}: became {tokenizer.eos_token!r:.60}")
    is_byte_level = header.values.get("tokenizer.ggml.model") == "gpt2"
    if (
        is_byte_level
        and tokenizer.decode(tokenizer.encode(_PROBE, add_special_tokens=False)) != _PROBE
    ):
        raise CheckpointError("tokenizer.ggml.tokens: do not decode to the text that they encode")


def main(gguf: Path, dtype: str) -> None:
    """Converts into the working folder; if that fails, the last line of stderr tells why."""
    try:
        convert(gguf, Path.cwd(), dtype)
    except CheckpointError as error:
        sys.exit(f"ERROR: {error}")
    except Exception as error:  # transformers may raise any exception for a hostile file
        reason = " ".join(str(error).replace(str(gguf), gguf.name).split())
        sys.exit(
            f"ERROR: transformers {transformers.__version__} cannot read it: "
            f"{type(error).__name__} {reason:.200}"
        )


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
