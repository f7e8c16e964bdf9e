"""Defines the benchmark's shapes without a checkpoint, and random weights."""

import json
import zlib
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any, Final

import torch

from tandem.tests.tiny_tokenizer import make_tokenizer
from tandem.workers.kv_cache.layout import ITEM_BYTES
from tandem.workers.model.config import Fields, ModelConfig
from tandem.workers.model.costs.inference import InferenceCost, inference_cost
from tandem.workers.model.costs.sizes import model_sizes
from tandem.workers.model.loader import weight_shapes
from tandem.workers.model.module import WeightSlice
from tandem.workers.model.registry import parse_model_config


def _hf_config(
    family: str, sizes: tuple[int, int, int, int, int, int, int], **fields: Any
) -> dict[str, Any]:
    """Returns config.json of a model of a family.

    `sizes` are the layers, hidden size, intermediate size, heads, KV heads, head_dim and
    vocabulary.
    """
    names = (
        "num_hidden_layers",
        "hidden_size",
        "intermediate_size",
        "num_attention_heads",
        "num_key_value_heads",
    )
    described = dict(zip((*names, "head_dim", "vocab_size"), sizes, strict=True))
    fixed = {
        "architectures": [f"{family}ForCausalLM"],
        "model_type": family.lower(),
        "rms_norm_eps": 1e-5,
    }
    tokens = {
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
        "tie_word_embeddings": False,
    }
    return {
        **fixed,
        **described,
        **tokens,
        "sliding_window": None,
        "rope_theta": 500_000.0,
        **fields,
    }


def _qwen3_moe(sizes: tuple[int, int, int, int, int, int, int], **fields: Any) -> dict[str, Any]:
    """Returns config.json of a mixture of experts; `sizes` as in `_hf_config`."""
    described = _hf_config(
        "Qwen3Moe",
        sizes,
        max_position_embeddings=40_960,
        rms_norm_eps=1e-6,
        rope_theta=1e6,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        **fields,
    )
    return described | {"model_type": "qwen3_moe"}


HF_CONFIGS: Final[Mapping[str, Mapping[str, Any]]] = {
    "tiny": _hf_config("Llama", (2, 64, 96, 4, 2, 16, 512), max_position_embeddings=8192),
    "smollm2-135m": _hf_config(
        "Llama",
        (30, 576, 1536, 9, 3, 64, 49_152),
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        rope_theta=100_000.0,
    ),
    "llama-3-8b": _hf_config(
        "Llama", (32, 4096, 14_336, 32, 8, 128, 128_256), max_position_embeddings=131_072
    ),
    "mistral-7b": _hf_config(
        "Mistral",
        (32, 4096, 14_336, 32, 8, 128, 32_768),
        max_position_embeddings=32_768,
        rope_theta=1e6,
    ),
    "qwen3-8b": _hf_config(
        "Qwen3",
        (36, 4096, 12_288, 32, 8, 128, 151_936),
        max_position_embeddings=40_960,
        rms_norm_eps=1e-6,
        rope_theta=1e6,
    ),
    "qwen3-30b-a3b": _qwen3_moe(
        (48, 2048, 6144, 32, 4, 128, 151_936),
        num_experts=128,
        num_experts_per_tok=8,
        moe_intermediate_size=768,
    ),
    "qwen3-moe-0.5b": _qwen3_moe(
        (16, 768, 2048, 12, 4, 64, 32_000),
        num_experts=32,
        num_experts_per_tok=4,
        moe_intermediate_size=384,
    ),
    # Three of four layers have a gated delta net, with a state of 1.07 MB.
    "qwen3.5-0.8b": _hf_config(
        "Qwen3_5",
        (24, 1024, 3584, 8, 2, 256, 248_320),
        model_type="qwen3_5_text",
        max_position_embeddings=262_144,
        rms_norm_eps=1e-6,
        tie_word_embeddings=True,
        rope_theta=1e7,
        partial_rotary_factor=0.25,
        linear_num_key_heads=16,
        linear_num_value_heads=16,
    ),
    # With four of the 27 layers, the first of which has no experts.
    "deepseek-v2-lite": _hf_config(
        "DeepseekV2",
        (4, 2048, 10_944, 16, 16, 64, 102_400),
        model_type="deepseek_v2",
        max_position_embeddings=163_840,
        rms_norm_eps=1e-6,
        rope_theta=10_000.0,
        q_lora_rank=None,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        first_k_dense_replace=1,
        n_routed_experts=64,
        num_experts_per_tok=6,
        n_shared_experts=2,
        moe_intermediate_size=1408,
        n_group=1,
        topk_group=1,
        topk_method="greedy",
    ),
    "lfm2-350m": _hf_config(
        "Lfm2",
        (16, 1024, 6656, 16, 8, 64, 65_536),
        max_position_embeddings=128_000,
        norm_eps=1e-5,
        rope_theta=1e6,
        tie_word_embeddings=True,
        full_attn_idxs=[2, 5, 8, 10, 12, 14],
        conv_L_cache=3,
        block_multiple_of=256,
        block_ffn_dim_multiplier=1.0,
        block_auto_adjust_ff_dim=True,
    ),
    # Granite 4.0 H Tiny with 8 of its 40 layers: about a billion parameters.
    "granite-moe-1b": _hf_config(
        "GraniteMoeHybrid",
        (8, 1536, 512, 12, 4, 128, 100_352),
        model_type="granitemoehybrid",
        max_position_embeddings=131_072,
        tie_word_embeddings=True,
        layer_types=[*["mamba"] * 5, "attention", *["mamba"] * 2],
        num_local_experts=64,
        num_experts_per_tok=6,
        shared_intermediate_size=1024,
        mamba_n_heads=48,
        mamba_d_head=64,
        mamba_d_state=128,
        mamba_n_groups=1,
        embedding_multiplier=12,
        attention_multiplier=0.0078125,
        residual_multiplier=0.22,
        logits_scaling=6,
    ),
    # Granite 4.0 H 1B, without experts.
    "granite-h-1b": _hf_config(
        "GraniteMoeHybrid",
        (40, 1536, 4096, 12, 4, 128, 100_352),
        model_type="granitemoehybrid",
        max_position_embeddings=131_072,
        tie_word_embeddings=True,
        layer_types=["attention" if index % 10 == 5 else "mamba" for index in range(40)],
        num_local_experts=0,
        num_experts_per_tok=0,
        shared_intermediate_size=4096,
        mamba_n_heads=48,
        mamba_d_head=64,
        mamba_d_state=128,
        mamba_n_groups=1,
        embedding_multiplier=12,
        attention_multiplier=0.0078125,
        residual_multiplier=0.22,
        logits_scaling=6,
    ),
    # With 8 of the 52 layers, three of which have experts, and with 32 of the 128 experts.
    "nemotron-3-nano": _hf_config(
        "NemotronH",
        (8, 2688, 1856, 32, 2, 128, 131_072),
        model_type="nemotron_h",
        max_position_embeddings=262_144,
        hybrid_override_pattern="MEMEM*EM",
        mamba_num_heads=64,
        mamba_head_dim=64,
        ssm_state_size=128,
        n_groups=8,
        n_routed_experts=32,
        num_experts_per_tok=6,
        moe_intermediate_size=1856,
        moe_shared_expert_intermediate_size=3712,
        routed_scaling_factor=2.5,
    ),
    "tiny-moe": _qwen3_moe(
        (2, 64, 96, 4, 2, 16, 512), num_experts=6, num_experts_per_tok=2, moe_intermediate_size=48
    ),
}
"""The fields of config.json by shape; llama-3-8b has the positions of 3.1 without its scaling."""


class _Shapes(dict[str, ModelConfig]):
    """Parses the config of a shape at its first use.

    A shape without a family of Tandem's needs transformers' code, whose import takes seconds.
    """

    def __missing__(self, name: str) -> ModelConfig:
        config = self[name] = parse_model_config(Fields(name, dict(HF_CONFIGS[name])))
        return config


SHAPES: Final = _Shapes()


def random_weight(part: WeightSlice, target: torch.Tensor) -> None:
    """Implements `ReadWeight` without a file.

    A weight depends only on its name. Activations stay near 1.
    """
    whole = torch.empty(part.shape, dtype=target.dtype, device=target.device)
    if "norm" in part.name:
        whole.fill_(1)
    else:
        generator = torch.Generator(target.device).manual_seed(zlib.crc32(part.name.encode()))
        whole.normal_(
            0, 0.4 if "embed" in part.name else part.shape[-1] ** -0.5, generator=generator
        )
    target.copy_(whole[part.slices])


def write_unread_weights(folder: Path, shape: str) -> None:
    """Writes a model folder that passes the checks, with a file of weights that only has a header.

    The numbers, a hole in the file, must not be read: use `random_weight` in their place.
    """
    config = dict(HF_CONFIGS[shape]) | {"dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(config))
    make_tokenizer().save_pretrained(folder)
    header: dict[str, dict[str, Any]] = {}
    end = 0
    for name, sizes in weight_shapes(SHAPES[shape]).items():
        begin = end
        end += 2 * prod(sizes)
        header[name] = {"dtype": "BF16", "shape": list(sizes), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)


def cost_of(
    config: ModelConfig, dtype: str, cache_dtype: str = "auto", device_type: str = "cpu"
) -> InferenceCost:
    """Returns the arithmetic of a model's inference."""
    return inference_cost(config, model_sizes(config, dtype, device_type), dtype, cache_dtype)


def loaded_bytes(config: ModelConfig, dtype: str, device: torch.device) -> int:
    """Returns the bytes of the loaded model and of the largest copy that loading makes."""
    params = sum(prod(shape) for shape in weight_shapes(config).values())
    head = config.vocab_size * config.hidden_size
    if config.tie_word_embeddings and device.type == "cpu":
        params += head  # the embedding's rows and the head's packed form
    copied = max(head, 2 * config.intermediate_size * config.hidden_size)
    return (params + copied) * ITEM_BYTES[dtype]
