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
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from ..config import CheckpointError, Fields

LAYER_TYPES: Final = ("full_attention", "sliding_attention")
_MAX_EXPERTS: Final = 4096
_MAX_LAYERS: Final = 300
_MAX_SIZE: Final = 2**31 - 1
_STATE: Final = re.compile(
    r"\b(conv_states?|recurrent_states?|ssm_states?|cache_params)\b|\b_is_stateful = True"
)


def read_config(fields: Fields) -> PreTrainedConfig:
    """Returns transformers' config of the fields.

    Raises CheckpointError if transformers has no such decoder or rejects a field, or if the model
    keeps state beside the KV cache, has other kinds of attention layers, needs more than text, or
    has quantized weights.
    """
    for name in ("quantization_config", "compression_config"):
        if fields.mapping(name):
            raise fields.error(
                name, "quantized weights run only through Tandem's own model families"
            )
    config = _parse(fields)
    (architecture,) = fields.texts("architectures")
    if architecture != MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.model_type):
        raise fields.error(
            "architectures",
            f"{architecture!r:.60} is no decoder that transformers {transformers.__version__} has",
        )
    for name, sub_config in config.sub_configs.items():
        if getattr(config, name, None) is not None and sub_config is not None:
            raise fields.error(name, "models that take more than text are not supported")
    if _STATE.search(_modelling_code(config, architecture)):
        raise fields.error(
            "architectures",
            f"{architecture} keeps state beside KV cache (recurrent or convolutional)",
        )
    for kind in getattr(config, "layer_types", None) or ():
        if kind not in LAYER_TYPES:
            raise fields.error(
                "layer_types", f"{kind!r:.40} is not supported, only {' and '.join(LAYER_TYPES)}"
            )
    return config


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
    # Checked first, because transformers makes a list of this length.
    for name, value in fields.items():
        most = math.inf
        if "expert" in name:
            most = _MAX_EXPERTS
        elif "layer" in name:
            most = _MAX_LAYERS
        if type(value) is int and value > most:
            raise fields.error(name, f"must be at most {most}, is {value!r:.60}")
    config_class = CONFIG_MAPPING[kind]
    left_out = ("auto_map", "quantization_config", "compression_config", "dtype", "torch_dtype")
    values = {
        name: value
        for name, value in fields.items()
        if name not in left_out and not name.startswith("_")
    }
    try:
        config: PreTrainedConfig = config_class.from_dict(values)
    except Exception as error:
        raise invalid(fields, config_class, error) from error
    for name in ("vocab_size", "hidden_size", "num_hidden_layers"):
        value = getattr(config, name, None)
        most = _MAX_LAYERS if name == "num_hidden_layers" else _MAX_SIZE
        if type(value) is not int or not 1 <= value <= most:
            raise fields.error(name, f"must be an integer from 1 to {most}, is {value!r:.60}")
    return config


def _modelling_code(config: PreTrainedConfig, architecture: str) -> str:
    """Returns the source of the module that has the architecture.

    It is the module beside the config's, else the module of another model whose class the
    architecture uses. The latter is imported.
    """
    spec = find_spec(type(config).__module__.replace(".configuration_", ".modeling_"))
    if spec is not None and spec.origin is not None:
        return Path(spec.origin).read_text()
    return getsource(sys.modules[getattr(transformers, architecture).__module__])
