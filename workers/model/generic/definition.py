"""Builds decoders of transformers on `meta`, and says why one cannot be served.

Code of a model's folder is never run: only the classes that the installed transformers brings."""

import math
import re
import sys
from inspect import getsource
from threading import Lock
from typing import Any, Final

import torch
import transformers
from transformers import CONFIG_MAPPING, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from ..config import CheckpointError, Fields
from .attention import ATTENTION, AttentionLayer, trace_layers
from .buffers import fix_rope

LAYER_TYPES: Final = ("full_attention", "sliding_attention")
_MAX_EXPERTS: Final = 4096
_MAX_LAYERS: Final = 300
_MAX_SIZE: Final = 2**31 - 1
_STATE: Final = re.compile(r"\b(conv_states?|recurrent_states?|ssm_states?|cache_params)\b")
_building = Lock()  # transformers builds under a default dtype and patches that are of the whole process


def build_on_meta(fields: Fields, dtype: torch.dtype) -> tuple[PreTrainedModel, list[AttentionLayer]]:
    """Returns the whole model of a config.json on `meta`, and its attention layers in their order.

    Raises CheckpointError if transformers has no such decoder, a field is not valid to it, or the model keeps state
    beside the KV cache or attends in a way that we cannot."""
    config = _config(fields)
    model_class = _model_class(fields, config)
    try:
        with _building, torch.device("meta"):
            model = model_class._from_config(  # type: ignore[no-untyped-call]
                config, dtype=dtype, attn_implementation=ATTENTION
            )
    except Exception as error:  # whatever a hostile field does to it
        raise _invalid(fields, config, error) from error
    model.eval().requires_grad_(False)
    fix_rope(model, fields)
    layers = trace_layers(model, fields)
    if len(layers) != config.num_hidden_layers:
        problem = (
            f"{config.num_hidden_layers}, but {len(layers)} of them attend through transformers' AttentionInterface"
        )
        raise fields.error("num_hidden_layers", problem)
    return model, layers


def _config(fields: Fields) -> PreTrainedConfig:
    kind = fields.text("model_type")
    if kind not in CONFIG_MAPPING:
        raise fields.error("model_type", f"{kind!r:.60} is not known to transformers {transformers.__version__}")
    if fields.boolean("is_encoder_decoder", False):
        raise fields.error("is_encoder_decoder", "models with an encoder are not supported")
    for name, value in fields.items():  # before transformers makes a list of so many
        most = _MAX_EXPERTS if "expert" in name else _MAX_LAYERS if "layer" in name else math.inf
        if type(value) is int and value > most:
            raise fields.error(name, f"must be at most {most}, is {value!r:.60}")
    config_class = CONFIG_MAPPING[kind]
    left_out = ("auto_map", "quantization_config", "dtype", "torch_dtype")
    values = {name: value for name, value in fields.items() if name not in left_out and not name.startswith("_")}
    try:
        config: PreTrainedConfig = config_class.from_dict(values)
    except Exception as error:
        raise _invalid(fields, config_class, error) from error
    for name in ("vocab_size", "hidden_size", "num_hidden_layers"):
        value, most = getattr(config, name, None), _MAX_LAYERS if name == "num_hidden_layers" else _MAX_SIZE
        if type(value) is not int or not 1 <= value <= most:
            raise fields.error(name, f"must be an integer from 1 to {most}, is {value!r:.60}")
    return config


def _model_class(fields: Fields, config: PreTrainedConfig) -> type[PreTrainedModel]:
    (architecture,) = fields.texts("architectures")
    if architecture != MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.model_type):
        problem = f"{architecture!r:.60} is no decoder that transformers {transformers.__version__} has"
        raise fields.error("architectures", problem)
    for name, sub_config in config.sub_configs.items():
        if getattr(config, name, None) is not None and sub_config is not None:
            raise fields.error(name, "models that take more than text are not supported")
    model_class: type[PreTrainedModel] = getattr(transformers, architecture)
    if getattr(model_class, "_is_stateful", False) or _STATE.search(getsource(sys.modules[model_class.__module__])):
        raise fields.error("architectures", f"{architecture} keeps state beside KV cache (recurrent or convolutional)")
    for kind in getattr(config, "layer_types", None) or ():
        if kind not in LAYER_TYPES:
            raise fields.error("layer_types", f"{kind!r:.40} is not supported, only {' and '.join(LAYER_TYPES)}")
    return model_class


def _invalid(fields: Fields, config: Any, error: Exception) -> CheckpointError:
    """Names the field that transformers' message names, if it names one."""
    name = config.__name__ if isinstance(config, type) else type(config).__name__
    words = set(re.findall(r"\w+", str(error)))
    field = next((each for each, _ in fields.items() if each in words), "model_type")
    return fields.error(field, f"not valid to transformers' {name} ({type(error).__name__})")
