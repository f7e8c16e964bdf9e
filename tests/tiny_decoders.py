"""The decoders of transformers that the Transformers implementation is tested with, each as a tiny
random model.
"""

from copy import deepcopy
from pathlib import Path
from typing import Any, Final

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, GenerationConfig, PreTrainedConfig
from transformers.configuration_utils import ALLOWED_LAYER_TYPES

from tandem.tests.tiny import SIZES, randomise
from tandem.tests.tiny_files import write_once
from tandem.tests.tiny_tokenizer import make_tokenizer

_EXPERTS: Final[dict[str, Any]] = {
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
}
_LATENT: Final[dict[str, Any]] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "first_k_dense_replace": 1,
    "head_dim": 8,
}
_INDEXER: Final[dict[str, Any]] = {"index_n_heads": 2, "index_head_dim": 16, "index_topk": 2048}
_ALTERNATING: Final[dict[str, Any]] = {
    "sliding_window": 24,
    "layer_types": ["sliding_attention", "full_attention"],
}
# The last two layers read the keys and values of the two before them.
_SHARED: Final[dict[str, Any]] = {
    "num_hidden_layers": 5,
    "num_kv_shared_layers": 2,
    "sliding_window": 24,
    "layer_types": ["full_attention", *["sliding_attention", "full_attention"] * 2],
    "hidden_size_per_layer_input": 16,
    "vocab_size_per_layer_input": SIZES["vocab_size"],
}

_PLAIN: Final = (
    *(
        "apertus",
        "arcee",
        "biogpt",
        "bitnet",
        "cohere",
        "cwm",
        "ernie4_5",
        "exaone4",
        "flint",
        "gemma",
        "glm",
        "glm4",
    ),
    *(
        "gpt2",
        "gpt_bigcode",
        "gpt_neox",
        "granite",
        "helium",
        "hunyuan_v1_dense",
        "hyperclovax",
        "jais2",
        "laguna",
    ),
    *("llama", "mellum", "nemotron", "olmo2", "opt", "phi3", "qwen2", "stablelm", "starcoder2"),
    *("nanochat", "persimmon", "phi", "seed_oss"),
)
_WINDOWED: Final = (
    *("cohere2", "gemma2", "gemma3_text", "granite_swa", "ministral", "mistral", "vaultgemma"),
)
_SPARSE: Final = (
    *(
        "afmoe",
        "aria_text",
        "beam",
        "cohere2_moe",
        "ernie4_5_moe",
        "exaone_moe",
        "flex_olmo",
        "glm4_moe",
        "gpt_oss",
    ),
    *("granitemoe", "granitemoeshared", "hunyuan_v1_moe", "hy_v3", "phimoe", "qwen3_moe"),
    "solar_open",
)

_DELTA: Final[dict[str, Any]] = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
_MAMBA2: Final[dict[str, Any]] = {
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_state": 16,
    "mamba_n_groups": 2,
    "mamba_chunk_size": 16,
}


def _layers(*kinds: str, name: str = "layer_types") -> dict[str, Any]:
    return {name: list(kinds), "num_hidden_layers": len(kinds)}


_HYBRID: Final = _layers("linear_attention", "full_attention", "linear_attention")
_CONV: Final = _layers("conv", "full_attention", "conv")
_STATEFUL: Final[dict[str, dict[str, Any]]] = {
    "bailing_hybrid": _EXPERTS | _LATENT | _HYBRID,
    "bamba": _MAMBA2 | {"attn_layer_indices": [1], "num_hidden_layers": 3},
    "falcon_h1": _MAMBA2 | {"mamba_d_ssm": 128},
    "falcon_mamba": {"state_size": 8},
    "granitemoehybrid": _EXPERTS | _MAMBA2 | _HYBRID,
    "jamba": {
        **_EXPERTS,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "num_hidden_layers": 3,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
    },
    "kimi_linear": _EXPERTS | _LATENT | _HYBRID | {"linear_num_heads": 4, "linear_head_dim": 16},
    "lfm2": _CONV,
    "lfm2_moe": _EXPERTS | _CONV,
    "lfm3": {"sliding_window": 24} | _layers("conv", "sliding_attention", "full_attention"),
    "mamba": {"state_size": 8},
    "mamba2": {"num_heads": 8, "head_dim": 16, "state_size": 16, "n_groups": 2, "chunk_size": 16},
    "nemotron_h": {
        **_EXPERTS,
        **_layers("linear_attention", "moe", "full_attention", "mlp", name="layers_block_type"),
        "mamba_num_heads": 8,
        "mamba_head_dim": 16,
        "ssm_state_size": 16,
        "n_groups": 2,
        "chunk_size": 16,
    },
    "olmo_hybrid": _DELTA | _HYBRID,
    "qwen3_5_moe_text": _EXPERTS | _DELTA | _HYBRID,
    "qwen3_5_text": _DELTA | _HYBRID,
    "qwen3_next": _EXPERTS | _DELTA | _HYBRID,
    "zamba2": {
        **_layers(*["linear_attention", "hybrid"] * 2, name="layers_block_type"),
        "mamba_d_state": 16,
        "mamba_ngroups": 2,
        "n_mamba_heads": 8,
        "mamba_headdim": 16,
        "chunk_size": 16,
        "num_mem_blocks": 1,
    },
}
_WITHOUT_CONTEXT: Final = ("falcon_mamba", "mamba", "mamba2")  # their config.json names none
_EVERY: Final[dict[str, dict[str, Any]]] = {
    **{kind: {} for kind in _PLAIN},
    **dict.fromkeys(_WINDOWED, _ALTERNATING),
    **dict.fromkeys(_SPARSE, _EXPERTS),
    "gemma3n_text": _SHARED
    | {
        "laurel_rank": 8,
        "altup_num_inputs": 2,
        "activation_sparsity_pattern": [0.95, 0.0, 0.0, 0.0, 0.0],
    },
    "gemma4_text": _SHARED | {"global_head_dim": 32},
    "gemma4_unified_text": _SHARED
    | {"global_head_dim": 32, "num_global_key_value_heads": 4, "attention_k_eq_v": True},
    "smollm3": _ALTERNATING | {"use_sliding_window": True, "no_rope_layers": [1, 0]},
    "ministral3": {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10_000.0,
            "factor": 64.0,
            "original_max_position_embeddings": 32,  # queries beyond it are scaled by a logarithm
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.1,
        }
    },
    "olmo": {"clip_qkv": 1.0},
    "olmo3": _ALTERNATING
    | {
        "rope_parameters": {
            "full_attention": {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 512,
            }
        }
    },
    "olmoe": _EXPERTS | {"clip_qkv": 1.0},
    "modernbert-decoder": {"local_attention": 48, "pad_token_id": 0},
    "kolibri1": _EXPERTS | _ALTERNATING | {"shared_expert_intermediate_size": 48},
    "dots1": _EXPERTS | _ALTERNATING | {"first_k_dense_replace": 1},
    "granitemoe_swa": _EXPERTS
    | _ALTERNATING
    | {
        "attention_multiplier": 0.25,
        "layer_rope_theta": [10_000.0, 0],  # no positions in the second layer
        "shared_intermediate_size": 48,
    },
    # The layer with a window has twice the key and value heads, and sinks.
    "mimo_v2_flash": _EXPERTS
    | {
        "head_dim": 24,
        "v_head_dim": 16,
        "sliding_window": 24,
        "layer_types": ["full_attention", "sliding_attention"],
    },
    "minimax_m2": _EXPERTS | {"rotary_dim": 8},
    "qwen2_moe": _EXPERTS
    | _ALTERNATING
    | {
        "use_sliding_window": True,
        "mlp_only_layers": [0],
        "shared_expert_intermediate_size": 48,
    },
    "dbrx": {
        "max_seq_len": SIZES["max_position_embeddings"],
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10_000.0},
        "d_model": SIZES["hidden_size"],
        "ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "deepseek_v2": _EXPERTS | _LATENT,
    "deepseek_v3": _EXPERTS | _LATENT,
    "glm4_moe_lite": _EXPERTS | _LATENT,
    "axk1": _EXPERTS | _LATENT,
    "longcat_flash": _EXPERTS
    | _LATENT
    | {
        "num_hidden_layers": 4,  # two for each of its layers
        "ffn_hidden_size": 96,
        "expert_ffn_hidden_size": 32,
        "moe_topk": 2,
        "zero_expert_num": 2,
    },
    "deepseek_v32": _EXPERTS | _LATENT | _INDEXER,
    "glm_moe_dsa": _EXPERTS | _LATENT | _INDEXER | {"indexer_types": ["full", "shared"]},
    "axk2": _EXPERTS | _LATENT | _INDEXER,
    # Its layers with a window have other heads and latents.
    "dots3_note_text": _EXPERTS
    | _LATENT
    | _INDEXER
    | {
        "head_dim": 24,
        "sliding_window": 24,
        "layer_types": ["indexed_attention", "sliding_attention"],
        "shared_experts_intermediate_size": 48,
        "swa_num_attention_heads": 8,
        "swa_num_key_value_heads": 8,
        "swa_q_lora_rank": 24,
        "swa_kv_lora_rank": 32,
        "swa_head_dim": 24,
        "swa_qk_nope_head_dim": 16,
        "swa_v_head_dim": 16,
    },
    "hy_v4": _EXPERTS | _LATENT | _INDEXER,
    "minicpm3": _LATENT,
    "youtu": _LATENT,
    **_STATEFUL,
}
# transformers 5.17 gives layers with an indexer another type, which Tandem does not know.
_HAS_INDEXERS: Final = "indexed_attention" in ALLOWED_LAYER_TYPES
DECODERS: Final = {
    kind: fields
    for kind, fields in _EVERY.items()
    if kind in CONFIG_MAPPING and (_HAS_INDEXERS or not fields.keys() >= _INDEXER.keys())
}
"""By `model_type` that this release of transformers has: what is set beside what all have."""
STATEFUL: Final = _STATEFUL.keys() & DECODERS.keys()
"""The types with layers that keep a state for each sequence."""


def tiny_config(kind: str, **overrides: Any) -> PreTrainedConfig:
    """Returns the config of a tiny model of a `model_type` of transformers."""
    sizes = SIZES | DECODERS.get(kind, {})
    if kind in _WITHOUT_CONTEXT:
        del sizes["max_position_embeddings"]
    # Configs change nested fields.
    config: PreTrainedConfig = CONFIG_MAPPING[kind](**deepcopy(sizes | overrides))
    return config


def make_tiny_decoder(folder: Path, kind: str, *, seed: int = 0, **overrides: Any) -> Path:
    """Writes a random model of a `model_type` of transformers into `folder` (made if missing);
    returns the folder.
    """

    def write(folder: Path) -> None:
        tokenizer = make_tokenizer()
        special = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
        config = tiny_config(kind, **(special | overrides))
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)  # type: ignore[no-untyped-call]
        # Recurrences with larger weights amplify rounding, transformers' own too.
        randomise(model, seed, gain=0.5 if kind in STATEFUL else 1.5)
        model.generation_config = GenerationConfig(**special)  # type: ignore[no-untyped-call]
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder, save_jinja_files=False)

    return write_once(folder, {"decoder": kind, "seed": seed, "config": overrides}, write)
