"""The multimodal models of transformers whose text models are tested, each as a tiny random
model.
"""

from copy import deepcopy
from pathlib import Path
from typing import Any, Final

import torch
import transformers
from packaging.version import Version
from transformers import CONFIG_MAPPING, GenerationConfig, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES

from tandem.tests.tiny import SIZES, randomise
from tandem.tests.tiny_decoders import DECODERS, STATEFUL
from tandem.tests.tiny_files import write_once
from tandem.tests.tiny_tokenizer import make_tokenizer

_ENCODER_SIZES: Final = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "depth": 2,
    "num_attention_heads": 2,
    "num_heads": 2,
    "embed_dim": 32,
    "encoder_layers": 2,
    "encoder_ffn_dim": 48,
    "d_model": 32,
    "encoder_attention_heads": 2,
    "out_hidden_size": 64,
    "projection_intermediate_size": 48,
    "mm_embed_dim": 32,
    "mm_posemb_size": 32,
    "output_proj_dims": 32,
}
"""Of vision and audio encoders, where they have the field."""


def _axes(*section: int) -> dict[str, Any]:
    """Rotary positions on three axes, with this number of frequencies for each."""
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": list(section)}
    return {"rope_parameters": rope}


_EXPERTS: Final = DECODERS["qwen3_moe"]
_PLAIN: Final = (
    *("aria", "aya_vision", "cohere2_vision", "cosmos3_omni", "deepseek_vl", "exaone4_5", "fuyu"),
    *("gemma3", "got_ocr2", "granite_docling", "hyperclovax_vision_v2", "idefics2"),
    *("idefics3", "internvl", "lighton_ocr", "llava", "llava_next", "llava_next_video"),
    *("llava_onevision", "mistral3", "ovis2", "qianfan_ocr", "qwen2_audio", "qwen3_asr"),
    *("smolvlm", "video_llama_3", "video_llava", "vipllava", "glmasr", "voxtral"),
    *("moss_transcribe_diarize", "kimi_k25", "muse_glimmer"),
    *("lfm2_vl", "lfm3_vl", "minicpmv4_6", "qwen3_5", "qwen3_5_moe"),
)

_WITH_AXES: Final = (
    *("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "glm4v", "glm46v", "glm_ocr", "hunyuan_vl"),
    "paddleocr_vl",
)

# Experts, latent attention and indexers; an older transformers lacks it and the types that use it.
_INDEXED: Final = DECODERS.get("glm_moe_dsa", {})
_RECENT: Final[dict[str, dict[str, Any]]] = {
    # Their models need the token for the places of images.
    "gemma4": {"pad_token_id": 0},
    "gemma4_unified": {"pad_token_id": 0},
    "glm5_next": _INDEXED
    | {
        "num_hidden_layers": 3,
        "layer_types": ["linear_attention", "indexed_attention", "indexed_attention"],
        "mlp_layer_types": ["dense", "sparse", "sparse"],
        "indexer_types": ["full", "full", "shared"],
        "index_kpool": 4,
        "qk_rope_head_dim": 0,
        "linear_num_heads": 4,
        "linear_head_dim": 16,
        "hc_mult": 2,
    },
    # The last two layers read the latents of the two before them; every second has no positions.
    "mistral_large4": _INDEXED
    | {
        "num_hidden_layers": 4,
        "no_rope_layers": [1, 0, 1, 0],
        "kv_source_layers": [0, 1, 0, 1],
        "indexer_types": ["full", "shared", "full", "shared"],
    },
    # The layer with a window has more query heads, and each kind of layer its own rotations.
    "step3p7": _EXPERTS
    | {
        "pad_token_id": 0,
        "sliding_window": 24,
        "layer_types": ["sliding_attention", "full_attention"],
        "mlp_layer_types": ["dense", "sparse"],
        "num_sliding_attention_heads": 8,
        "rope_theta": [10_000.0, 5_000.0],
        "partial_rotary_factors": [1.0, 0.5],
        "share_expert_dim": 48,
        "swiglu_limits": [0.0, 1.0],
        "swiglu_limits_shared": [0.0, 1.0],
        "moe_router_scaling_factor": 1.5,
    },
}

# transformers 5.17, which GPU machines have, lacks some types and saves others by wrong names.
IS_OLD: Final = Version(transformers.__version__) < Version("5.18")
_SAVED_WRONGLY: Final = ("glmasr", "qwen2_audio", "voxtral") if IS_OLD else ()

MULTIMODAL: Final[dict[str, dict[str, Any]]] = {
    **{
        kind: {}
        for kind in _PLAIN
        if kind in MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES and kind not in _SAVED_WRONGLY
    },
    **{kind: fields for kind, fields in _RECENT.items() if kind in CONFIG_MAPPING},
    **dict.fromkeys(_WITH_AXES, _axes(2, 3, 3)),
    "qwen3_vl_moe": _EXPERTS | _axes(2, 3, 3),
    "ernie4_5_vl_moe": _EXPERTS | _axes(3, 3, 2) | {"moe_intermediate_size": [32, 32]},
    "glm4v_moe": _EXPERTS | _axes(1, 1, 2),
}
"""By `model_type`: fields of text_config beside those of all tiny models and of the text model."""
MISTRAL_TEXTS: Final[dict[str, dict[str, Any]]] = {
    kind: {"model_type": kind, **fields}
    for kind, fields in {
        "ministral3": DECODERS.get("ministral3", {}),
        "mistral4": DECODERS["deepseek_v3"] | DECODERS.get("ministral3", {}) | {"head_dim": 24},
    }.items()
    if kind in CONFIG_MAPPING
}
"""By `model_type`: fields of the other text models that `mistral3` may have."""


def make_tiny_multimodal(folder: Path, kind: str, *, seed: int = 0, **text: Any) -> Path:
    """Writes a random model of a `model_type` of transformers, and returns the folder.

    `text` overrides fields of text_config.
    """

    def write(folder: Path) -> None:
        config = tiny_multimodal_config(kind, **text)
        architecture = getattr(transformers, MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES[kind])
        model = architecture._from_config(config, dtype=torch.float32)
        # As of tiny decoders.
        text_type = config.get_text_config(decoder=True).model_type
        randomise(model, seed, gain=0.5 if text_type in (*STATEFUL, "glm5_next_text") else 1.5)
        tokenizer = make_tokenizer()
        special = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
        model.generation_config = GenerationConfig(**special)  # type: ignore[no-untyped-call]
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder, save_jinja_files=False)

    return write_once(folder, {"multimodal": kind, "seed": seed, "text": text}, write)


def tiny_multimodal_config(kind: str, **text: Any) -> PreTrainedConfig:
    """Returns the config of a tiny model of a `model_type`; `text` as in `make_tiny_multimodal`."""
    config_class = CONFIG_MAPPING[kind]
    default = config_class()
    text_type = default.get_text_config(decoder=True).model_type
    # These models pass their window on by themselves, so kinds of layers would not be noticed.
    of_type = {} if text_type in ("mistral", "cohere2") else DECODERS.get(text_type, {})
    # Configs change nested fields.
    fields = deepcopy({"model_type": text_type, **SIZES, **of_type, **MULTIMODAL[kind], **text})
    encoders = {
        name: _shrink(getattr(default, name))
        for name in default.sub_configs
        if name != "text_config" and getattr(default, name, None) is not None
    }
    given: dict[str, Any] = {"text_config": fields, **encoders}
    config: PreTrainedConfig = config_class(**given)
    return config


def _shrink(config: PreTrainedConfig) -> dict[str, Any]:
    fields = config.to_dict()
    return {
        name: size for name, size in _ENCODER_SIZES.items() if fields.get(name, None) is not None
    } | ({"model_type": config.model_type} if config.model_type else {})
