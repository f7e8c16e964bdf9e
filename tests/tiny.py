"""Makes tiny random models in Hugging Face folders: real files, a real tokenizer, random weights.

The weights are scaled so that activations stay near 1, logits spread over several units and greedy output varies
instead of repeating one token.
"""

from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    PreTrainedTokenizerBase,
    Qwen2Config,
    Qwen3Config,
)

from tandem.tests.tiny_tokenizer import VOCAB_SIZE, make_tokenizer

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")


def make_tiny_model(
    folder: Path, family: str = "llama", *, seed: int = 0, dtype: str = "float32", **config_overrides: Any
) -> Path:
    """Writes a random model of one of FAMILIES into `folder` (made if missing) and returns the folder.

    Keyword arguments go to the transformers config class, for example `num_hidden_layers=3`,
    `tie_word_embeddings=True` or `rope_parameters={"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}`.
    Equal arguments give equal files.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = make_tokenizer()
    config = _config(family, tokenizer, config_overrides)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)  # type: ignore[no-untyped-call]
    _randomise(model, seed)
    model.to(getattr(torch, dtype))
    special = {"bos_token_id": config.bos_token_id, "eos_token_id": config.eos_token_id}
    model.generation_config = GenerationConfig(**special)  # type: ignore[no-untyped-call]
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder, save_jinja_files=False)
    return folder


def _config(family: str, tokenizer: PreTrainedTokenizerBase, overrides: dict[str, Any]) -> PretrainedConfig:
    values: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": False,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": None,
    }
    if family == "mistral":
        values["sliding_window"] = 24
    if family == "qwen2":
        del values["head_dim"]
    classes: dict[str, type[PretrainedConfig]] = {
        "llama": LlamaConfig,
        "mistral": MistralConfig,
        "qwen2": Qwen2Config,
        "qwen3": Qwen3Config,
    }
    return classes[family](**(values | overrides))


@torch.no_grad()
def _randomise(model: torch.nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in sorted(model.named_parameters()):
        noise = torch.randn(parameter.shape, generator=generator)
        if "norm" in name:
            parameter.copy_(1 + 0.3 * noise)
        elif name.endswith("bias"):
            parameter.copy_(0.5 * noise)
        elif "embed" in name or "lm_head" in name:
            parameter.copy_(0.4 * noise)
        else:
            parameter.copy_(1.5 * noise / parameter.shape[-1] ** 0.5)
