"""Writes the tiny models as GGUF files, as llama.cpp's converter does."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Kind
from transformers import AutoModelForCausalLM, AutoTokenizer

_CONTROL: Final = 3
_NORMAL: Final = 1
_ARCHITECTURES: Final = {
    "llama": gguf.MODEL_ARCH.LLAMA,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
    "gemma3_text": gguf.MODEL_ARCH.GEMMA3,
}


def write_gguf(
    folder: Path,
    file: Path,
    kind: Kind = Kind.F16,
    values: Mapping[str, str | float] = {},
    pre: str | None = "default",
    adds_bos: bool | None = None,
    control: Mapping[int, str] = {},
    ends: Sequence[int] = (),
) -> Path:
    """Writes the model of a folder, its matrices as `kind`, and `values`, further metadata, whose
    names begin with that of the architecture. `pre`: how the tokenizer splits texts. `adds_bos`:
    whether texts begin with BOS; None: the file does not say. `control`: control tokens that
    replace unused ones. `ends`: ids in `eos_token_ids`. Returns the file.
    """
    model = AutoModelForCausalLM.from_pretrained(folder)
    config = model.config
    architecture = _ARCHITECTURES[config.model_type]
    name = gguf.MODEL_ARCH_NAMES[architecture]
    writer = gguf.GGUFWriter(file, name)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_embedding_length(config.hidden_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_key_length(model.model.layers[0].self_attn.head_dim)
    writer.add_rope_dimension_count(model.model.layers[0].self_attn.head_dim)
    writer.add_vocab_size(config.vocab_size)
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    writer.add_rope_freq_base(rope["rope_theta"])
    if getattr(config, "sliding_window", None):
        writer.add_sliding_window(config.sliding_window)
    for key, value in values.items():
        adders: dict[type, Any] = {bool: writer.add_bool, str: writer.add_string}
        adders.get(type(value), writer.add_float32)(f"{name}.{key}", value)
    _add_tokenizer(writer, folder, config.vocab_size, pre, control)
    if ends:
        writer.add_array("tokenizer.ggml.eos_token_ids", ends)
    if adds_bos is not None:
        writer.add_add_bos_token(adds_bos)
    names = gguf.get_tensor_name_map(architecture, config.num_hidden_layers)
    for key, tensor in model.state_dict().items():
        if key == "lm_head.weight" and config.tie_word_embeddings:
            continue
        data = _as_llama_cpp(key, tensor.float().numpy(), config)
        stored = names.get_name(key, try_suffixes=(".weight", ".bias"))
        matrix = kind if data.ndim == 2 else Kind.F32
        assert stored is not None
        writer.add_tensor(stored, gguf.quants.quantize(data, matrix), raw_dtype=matrix)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def _as_llama_cpp(name: str, data: np.ndarray, config: Any) -> np.ndarray:
    if config.model_type == "gemma3_text" and "norm" in name:
        return data + 1
    if config.model_type == "llama" and ("q_proj" in name or "k_proj" in name):
        heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
        return data.reshape(heads, 2, -1, *data.shape[1:]).swapaxes(1, 2).reshape(data.shape)
    return data


def _add_tokenizer(
    writer: gguf.GGUFWriter,
    folder: Path,
    vocab_size: int,
    pre: str | None,
    control: Mapping[int, str],
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = json.loads((folder / "tokenizer.json").read_text())["model"]
    tokens = {**{index: token for token, index in tokenizer.get_vocab().items()}, **control}
    special = {*tokenizer.all_special_ids, *control}
    writer.add_tokenizer_model("gpt2")
    if pre is not None:
        writer.add_tokenizer_pre(pre)
    writer.add_token_list([tokens.get(index, f"[PAD{index}]") for index in range(vocab_size)])
    writer.add_token_types(
        [_CONTROL if index in special else _NORMAL for index in range(vocab_size)]
    )
    writer.add_token_merges([" ".join(merge) for merge in model["merges"]])
    writer.add_bos_token_id(tokenizer.bos_token_id)
    writer.add_eos_token_id(tokenizer.eos_token_id)
    writer.add_chat_template(tokenizer.chat_template)
