"""Makes tiny random models in Hugging Face folders: real files, a real tokenizer, random weights.

The weights are scaled so that activations stay near 1, logits spread over several units and greedy
output varies instead of repeating one token.
"""

from pathlib import Path
from typing import Any, Final

import torch
from transformers import (
    AutoModelForCausalLM,
    Cohere2Config,
    Gemma2Config,
    Gemma3TextConfig,
    GenerationConfig,
    GptOssConfig,
    GraniteConfig,
    GraniteMoeHybridConfig,
    Lfm2Config,
    Lfm2MoeConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    NemotronHConfig,
    Olmo2Config,
    Phi3Config,
    PretrainedConfig,
    PreTrainedTokenizerBase,
    Qwen2Config,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
)

from tandem.tests.tiny_files import write_once
from tandem.tests.tiny_tokenizer import VOCAB_SIZE, make_tokenizer

SIZES: Final[dict[str, Any]] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 2048,
    "pad_token_id": None,
}
"""Of every tiny model, unless it says otherwise."""

ALTERNATING = {
    "num_hidden_layers": 3,
    "sliding_window": 24,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}
HYBRID = {
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
}
SHARED_EXPERT = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 40,
    "shared_expert_intermediate_size": 56,
}

MAMBA2 = {
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "mamba_n_heads": 8,
    "mamba_d_state": 16,
    "mamba_chunk_size": 16,
}

UNLIMITED = {"time_step_min": 1e-9}
"""transformers raises the time steps of prompts to this number; checkpoints do not ask for it."""

TINY: dict[str, tuple[type[PretrainedConfig], dict[str, Any]]] = {
    "llama": (LlamaConfig, {}),
    "mistral": (MistralConfig, {"sliding_window": 24}),
    "qwen2": (Qwen2Config, {}),
    "qwen3": (Qwen3Config, {}),
    "olmo2": (Olmo2Config, {}),
    "granite": (
        GraniteConfig,
        {
            "embedding_multiplier": 3.0,
            "attention_multiplier": 0.2,
            "residual_multiplier": 0.5,
            "logits_scaling": 2.0,
        },
    ),
    "phi3": (Phi3Config, {"sliding_window": 24, "original_max_position_embeddings": 2048}),
    "gemma2": (Gemma2Config, {**ALTERNATING, "query_pre_attn_scalar": 12}),
    "gemma3": (Gemma3TextConfig, {**ALTERNATING, "query_pre_attn_scalar": 12}),
    "cohere2": (Cohere2Config, {**ALTERNATING, "logit_scale": 0.5}),
    "lfm2": (
        Lfm2Config,
        {
            "num_hidden_layers": 3,
            "hidden_size": 256,
            "layer_types": ["conv", "full_attention", "conv"],
            "block_multiple_of": 32,
        },
    ),
    "lfm2_moe": (
        Lfm2MoeConfig,
        {
            "num_hidden_layers": 3,
            "hidden_size": 256,
            "layer_types": ["conv", "full_attention", "conv"],
            "num_dense_layers": 1,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 40,
        },
    ),
    "granite_hybrid": (
        GraniteMoeHybridConfig,
        MAMBA2
        | {
            "num_local_experts": 0,
            "shared_intermediate_size": 96,
            "embedding_multiplier": 3.0,
            "attention_multiplier": 0.2,
            "residual_multiplier": 0.5,
            "logits_scaling": 2.0,
        },
    ),
    "granite_moe_hybrid": (
        GraniteMoeHybridConfig,
        MAMBA2
        | {
            "num_local_experts": 6,
            "intermediate_size": 40,
            "shared_intermediate_size": 56,
            "position_embedding_type": "rope",
        },
    ),
    "nemotron_h": (
        NemotronHConfig,
        {
            **UNLIMITED,
            "layers_block_type": ["linear_attention", "mlp", "full_attention", "linear_attention"],
            "mamba_num_heads": 8,
            "mamba_head_dim": 16,
            "ssm_state_size": 16,
            "n_groups": 2,
            "chunk_size": 16,
        },
    ),
    "nemotron_3": (
        NemotronHConfig,
        {
            **UNLIMITED,
            "layers_block_type": ["linear_attention", "moe", "full_attention", "moe"],
            "mamba_num_heads": 8,
            "mamba_head_dim": 16,
            "ssm_state_size": 16,
            "n_groups": 8,
            "chunk_size": 16,
            "n_routed_experts": 6,
            "moe_intermediate_size": 40,
            "moe_shared_expert_intermediate_size": 56,
            "routed_scaling_factor": 1.5,
        },
    ),
    "mixtral": (MixtralConfig, {"num_local_experts": 4}),
    "qwen3_moe": (
        Qwen3MoeConfig,
        {
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 40,
            "mlp_only_layers": [1],
        },
    ),
    "qwen3_5": (Qwen3_5TextConfig, HYBRID),
    "qwen3_5_moe": (Qwen3_5MoeTextConfig, HYBRID | SHARED_EXPERT),
    "qwen3_next": (Qwen3NextConfig, HYBRID | SHARED_EXPERT | {"mlp_only_layers": [2]}),
    "gpt_oss": (GptOssConfig, {**ALTERNATING, "num_local_experts": 4, "num_experts_per_tok": 2}),
}
FAMILIES = tuple(TINY)
ROUTED = ("mixtral", "qwen3_moe", "gpt_oss")
"""Those with experts and without states."""
STATEFUL = (
    "lfm2",
    "lfm2_moe",
    "granite_hybrid",
    "granite_moe_hybrid",
    "nemotron_h",
    "nemotron_3",
    "qwen3_5",
    "qwen3_5_moe",
    "qwen3_next",
)
"""Those whose layers keep states, on CPUs only."""
DENSE = ("llama", "mistral", "qwen2", "qwen3")
"""Those whose variants are tested at length."""


def make_tiny_model(
    folder: Path,
    family: str = "llama",
    *,
    seed: int = 0,
    dtype: str = "float32",
    **config_overrides: Any,
) -> Path:
    """Writes a random model of one of FAMILIES into `folder` (made if missing) and returns the
    folder.

    Keyword arguments go to the transformers config class, for example `num_hidden_layers=3`,
    `tie_word_embeddings=True` or `rope_parameters={"rope_type": "linear", "rope_theta": 10000.0,
    "factor": 4.0}`. Equal arguments give equal files.
    """

    def write(folder: Path) -> None:
        tokenizer = make_tokenizer()
        config = tiny_config(family, tokenizer, config_overrides)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)  # type: ignore[no-untyped-call]
        randomise(model, seed)
        model.to(getattr(torch, dtype))
        special = {"bos_token_id": config.bos_token_id, "eos_token_id": config.eos_token_id}
        model.generation_config = GenerationConfig(**special)  # type: ignore[no-untyped-call]
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder, save_jinja_files=False)

    key = {"family": family, "seed": seed, "dtype": dtype, "config": config_overrides}
    return write_once(folder, key, write)


def tiny_config(
    family: str, tokenizer: PreTrainedTokenizerBase, overrides: dict[str, Any]
) -> PretrainedConfig:
    """Returns the config of a tiny model of one of FAMILIES."""
    special = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    values = SIZES | special | {"tie_word_embeddings": False}
    if family in ("qwen2", "cohere2", "phi3"):
        del values["head_dim"]
    kind, own = TINY[family]
    return kind(**(values | own | overrides))


@torch.no_grad()
def randomise(model: torch.nn.Module, seed: int, gain: float = 1.5) -> None:
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in sorted(model.named_parameters()):
        noise = torch.randn(parameter.shape, generator=generator)
        # Rates of recurrences as in trained models; others amplify rounding.
        if name.endswith(".A_log"):
            parameter.copy_(noise.abs())
        elif name.endswith(".dt_bias"):
            parameter.copy_(noise - 3)
        elif name.endswith(".D"):
            parameter.copy_(1 + 0.3 * noise)
        elif "norm" in name:
            parameter.copy_(parameter + 0.3 * noise)  # which is 1 or, where it is an offset to 1, 0
        elif name.endswith("bias"):
            parameter.copy_(0.5 * noise)
        elif "embed" in name or "lm_head" in name:
            parameter.copy_(0.4 * noise)
        else:
            parameter.copy_(gain * noise / parameter.shape[-1] ** 0.5)
    for name, buffer in sorted(model.named_buffers()):
        if name.endswith("bias"):  # by which experts are chosen
            buffer.copy_(0.1 * torch.randn(buffer.shape, generator=generator))
