"""Converts a Llama-family GGUF file into a bf16 safetensors folder: `python -m tandem.cluster.store.gguf_convert FILE`.

The result, written to the working folder, is what `save_pretrained` makes: config.json, model.safetensors,
tokenizer.json, tokenizer_config.json, chat_template.jinja. transformers converts; this module adds what it leaves out,
and refuses a result that disagrees with the file's own header.
"""

import sys
from pathlib import Path
from typing import Any

import torch
from gguf import GGUFReader
from tokenizers import Tokenizer
from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

_PROBE = "In 2024,  7 naïve cafés served 日本茶 🍵\n\tfor 12.50!"


def convert(gguf: Path, out: Path) -> None:
    """Writes the model of `gguf` to the existing folder `out`. Raises ValueError if the result differs."""
    header = {name: field.contents() for name, field in GGUFReader(gguf).fields.items() if _is_small(name)}
    source: dict[str, Any] = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    model = AutoModelForCausalLM.from_pretrained(
        **source, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
    )
    tokenizer = AutoTokenizer.from_pretrained(**source)
    _restore_digit_splitting(tokenizer.backend_tokenizer, header)
    _check_config(model.config, header)
    _check_tokenizer(tokenizer, header)
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)


def _is_small(name: str) -> bool:
    # The vocabulary's three arrays take seconds to decode, and transformers reads them anyway.
    return name not in ("tokenizer.ggml.tokens", "tokenizer.ggml.token_type", "tokenizer.ggml.merges")


def _restore_digit_splitting(tokenizer: Tokenizer, header: dict[str, Any]) -> None:
    """Restores the splitting of digits: the `smollm` pre-tokenizer splits off every digit first, which transformers
    drops when it reads GGUF.

    Without it two blanks before a number become two tokens where the model was trained on one.
    """
    if header["tokenizer.ggml.pre"] == "smollm":
        tokenizer.pre_tokenizer = Sequence([Digits(individual_digits=True), ByteLevel(add_prefix_space=False)])


def _check_config(config: Any, header: dict[str, Any]) -> None:
    expected = {
        "num_hidden_layers": header["llama.block_count"],
        "hidden_size": header["llama.embedding_length"],
        "intermediate_size": header["llama.feed_forward_length"],
        "num_attention_heads": header["llama.attention.head_count"],
        "num_key_value_heads": header["llama.attention.head_count_kv"],
        "max_position_embeddings": header["llama.context_length"],
        "vocab_size": header["llama.vocab_size"],
        "rms_norm_eps": header["llama.attention.layer_norm_rms_epsilon"],
        "eos_token_id": header["tokenizer.ggml.eos_token_id"],
    }
    for name, value in expected.items():
        if getattr(config, name) != value:
            raise ValueError(f"{name} became {getattr(config, name)}, the GGUF header has {value}")
    if config.rope_parameters["rope_theta"] != header["llama.rope.freq_base"]:
        raise ValueError(f"rope_theta became {config.rope_parameters}, not {header['llama.rope.freq_base']}")


def _check_tokenizer(tokenizer: Any, header: dict[str, Any]) -> None:
    if tokenizer.chat_template != header["tokenizer.chat_template"]:
        raise ValueError("the chat template was lost")
    if tokenizer.eos_token_id != header["tokenizer.ggml.eos_token_id"]:
        raise ValueError(f"eos_token became {tokenizer.eos_token!r}")
    if tokenizer.decode(tokenizer.encode(_PROBE)) != _PROBE:
        raise ValueError("the tokenizer does not decode to the text that it encoded")


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path.cwd())
