"""Reads config.json as transformers does, and refuses decoders that cannot be served.

It searches the text of transformers' modelling code instead of importing it, because the import
takes seconds: most refusals need no import.
"""

import math
import re
import sys
from importlib.util import find_spec
from inspect import getsource
from pathlib import Path
from typing import Any, Final

import transformers
from transformers import CONFIG_MAPPING, PreTrainedConfig
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
)

from ....proto.limits import MAX_TOKENS
from ..config import (
    CONTEXT_NAMES,
    CheckpointError,
    Fields,
    context_tokens,
    text_fields,
)

INDEXED: Final = "indexed_attention"  # attention to the keys that an indexer chooses
LAYER_TYPES: Final = ("full_attention", "sliding_attention", INDEXED)
# Types of layers in models that also have layers with a state: those that attend, those that keep a
# state, and those that do neither.
ATTENDING: Final = (*LAYER_TYPES, "hybrid")
MIXING: Final = ("linear_attention", "conv", "hybrid")
STATELESS: Final = ("mlp", "moe")
_MAX_EXPERTS: Final = 2**15
_MAX_LAYERS: Final = 300
_MAX_SIZE: Final = 2**31 - 1
# Fields that count experts or layers, such as num_experts_per_tok, n_layer, encoder_layers, depth.
# Sizes whose names contain these words, such as vocab_size_per_layer_input, count neither.
_NUM_EXPERTS: Final = re.compile(r"(^|_)(num|n)_(\w+_)?experts?($|_)|(^|_)experts$")
_NUM_LAYERS: Final = re.compile(r"(^|_)(num|n)_(\w+_)?layers?($|_)|(^|_)layers$|^depth$")
_REFUSED_TYPES: Final = dict.fromkeys(
    (
        "deepseek_v4",
        "inkling_text",
        "inkling2_text",
        "minimax",
        "qwen4_exp_text",
        "recurrent_gemma",
        "rwkv",
        "xlstm",
        "zaya",
    ),
    "keeps state in a way that is not supported",
)
"""By model_type of the decoder: why it is refused whatever its other fields are."""
PUBLISHED_NAMES: Final = {
    "BailingMoeV3ForCausalLM": "BailingHybridForCausalLM",
    "ExaoneMoEForCausalLM": "ExaoneMoeForCausalLM",
    "InternLM3ForCausalLM": "LlamaForCausalLM",
    "IQuestCoderForCausalLM": "LlamaForCausalLM",
    "PhiMoEForCausalLM": "PhimoeForCausalLM",
}
"""By architecture of checkpoints that have another name for a class of transformers: that class.

A table, because a model_type alone does not tell the class: BailingMoeV2_5ForCausalLM, another
model, shares that of BailingMoeV3ForCausalLM.
"""
_STATE: Final = re.compile(
    r"\b(conv_states?|recurrent_states?|ssm_states?|cache_params)\b|\b_is_stateful = True"
)


def read_config(fields: Fields) -> PreTrainedConfig:
    """Returns transformers' config of the fields.

    Raises CheckpointError if transformers has no such decoder or rejects a field, or if the model
    keeps state beside the KV cache, has other kinds of attention layers, or has no text model of
    its own.
    """
    config = _parse(fields)
    architecture = architecture_of(fields)
    if architecture not in (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.model_type),
        MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES.get(config.model_type),
    ):
        raise fields.error(
            "architectures",
            f"{architecture!r:.60} is no decoder that transformers {transformers.__version__} has",
        )
    text = text_config(config)
    if text.model_type in _REFUSED_TYPES:
        name = "model_type" if text is config else "text_config.model_type"
        raise fields.error(name, f"{text.model_type!r} {_REFUSED_TYPES[text.model_type]}")
    for name in config.sub_configs:
        found = getattr(config, name, None)
        if text is config and getattr(found, "model_type", None):  # else a part of this decoder
            raise fields.error(name, f"transformers' {architecture} has no text model of its own")
    if keeps_state(text, architecture):
        return config
    for kind in getattr(text, "layer_types", None) or ():
        if kind not in LAYER_TYPES:
            raise fields.error(
                "layer_types", f"{kind!r:.40} is not supported, only {', '.join(LAYER_TYPES)}"
            )
    return config


def architecture_of(fields: Fields) -> str:
    """Returns the name that transformers has for the class of a config.json."""
    (architecture,) = fields.texts("architectures")
    return PUBLISHED_NAMES.get(architecture, architecture)


def keeps_state(config: PreTrainedConfig, architecture: str) -> bool:
    """Returns True if a decoder keeps a state for each sequence, by its config and its code."""
    kinds = getattr(config, "layer_types", None) or ()
    return not set(MIXING).isdisjoint(kinds) or bool(
        _STATE.search(_modelling_code(config, architecture))
    )


def text_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """Returns the config of a multimodal model's decoder; the config itself for other models."""
    return config.get_text_config(decoder=True)


def context_tokens_of(config: PreTrainedConfig, fields: Fields) -> int:
    """Returns the context length of a decoder's config. Raises CheckpointError for its fields.

    Mamba and other decoders without positions have none. Their context is the longest prompt that
    a service accepts.
    """
    found = [getattr(config, name) for name in CONTEXT_NAMES if hasattr(config, name)]
    default = next((each for each in found if type(each) is int), None if found else MAX_TOKENS)
    return context_tokens(fields, default)


def parsed_context_tokens(fields: Fields) -> int:
    """Returns the context length by transformers' config of the fields.

    Other fields than CONTEXT_NAMES may set it, or the default of the class. Raises CheckpointError
    if transformers rejects a field.
    """
    return context_tokens_of(text_config(_parse(fields)), text_fields(fields))


def text_model_fields(fields: Fields) -> Fields | None:
    """Returns the text model of a multimodal model as the fields of a decoder's config.json.

    Fields that text_config leaves out have transformers' defaults. Returns None if the text model
    is no decoder that also exists alone. Raises CheckpointError if transformers rejects a field.
    """
    config = _parse(fields)
    text = text_config(config)
    architecture = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(text.model_type)
    (whole,) = fields.texts("architectures")
    if text is config or whole != MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES.get(config.model_type):
        return None
    if not isinstance(architecture, str):
        return None
    kept = {
        name: value
        for name, value in fields.items()
        if name in ("dtype", "torch_dtype", "quantization_config", "compression_config")
    }
    values = {
        **text.to_dict(),
        **kept,
        "architectures": [architecture],
        "tie_word_embeddings": getattr(
            config, "tie_word_embeddings", getattr(text, "tie_word_embeddings", False)
        ),
    }
    return fields.replaced(values, "text_config")


def invalid(fields: Fields, config: Any, error: Exception) -> CheckpointError:
    """Returns an error that names the field in transformers' message, else model_type."""
    name = config.__name__ if isinstance(config, type) else type(config).__name__
    words = set(re.findall(r"\w+", str(error)))
    field = next((each for each, _ in fields.items() if each in words), "model_type")
    return fields.error(field, f"not valid to transformers' {name} ({type(error).__name__})")


def _parse(fields: Fields) -> PreTrainedConfig:
    kind = fields.text("model_type")
    if kind not in CONFIG_MAPPING:
        raise fields.error(
            "model_type", f"{kind!r:.60} is not known to transformers {transformers.__version__}"
        )
    if fields.boolean("is_encoder_decoder", False):
        raise fields.error("is_encoder_decoder", "models with an encoder are not supported")
    _check_counts(fields)
    config_class = CONFIG_MAPPING[kind]
    left_out = ("auto_map", "quantization_config", "compression_config", "dtype", "torch_dtype")
    values = {
        name: value
        for name, value in fields.items()
        if name not in left_out and not name.startswith("_")
    }
    try:
        # Infinity is stored as an object.
        decoded = PreTrainedConfig._decode_special_floats(values)
        config: PreTrainedConfig = config_class.from_dict(decoded)
    except Exception as error:
        raise invalid(fields, config_class, error) from error
    text = text_config(config)
    for name in ("vocab_size", "hidden_size", "num_hidden_layers"):
        value = getattr(text, name, None)
        most = _MAX_LAYERS if name == "num_hidden_layers" else _MAX_SIZE
        if type(value) is not int or not 1 <= value <= most:
            raise fields.error(name, f"must be an integer from 1 to {most}, is {value!r:.60}")
    return config


def _check_counts(fields: Fields) -> None:
    """Raises CheckpointError for a number of experts or layers above its bound.

    Checked before transformers parses the fields, because it makes lists of this length.
    """
    waiting = [fields]
    while waiting:  # no recursion: the objects of a hostile file may be nested deeply
        fields = waiting.pop()
        for name, value in fields.items():
            if isinstance(value, dict):
                waiting.append(fields.nested(name))
            most = math.inf
            if _NUM_EXPERTS.search(name):
                most = _MAX_EXPERTS
            elif _NUM_LAYERS.search(name):
                most = _MAX_LAYERS
            if type(value) is int and value > most:
                raise fields.error(name, f"must be at most {most}, is {value!r:.60}")


def _modelling_code(config: PreTrainedConfig, architecture: str) -> str:
    """Returns the source of the module that has the architecture.

    It is the module beside the config's, else the module of another model whose class the
    architecture uses. The latter is imported.
    """
    spec = find_spec(type(config).__module__.replace(".configuration_", ".modeling_"))
    if spec is not None and spec.origin is not None:
        return Path(spec.origin).read_text()
    return getsource(sys.modules[getattr(transformers, architecture).__module__])
