"""Reads config.json as transformers does, and says by it, and by the text of transformers' code,
why a decoder cannot be served.

Imports no modelling code, which takes seconds: most models that are refused are refused before.
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
    """Returns what transformers makes of the fields.

    Raises CheckpointError if it has no such decoder, a field is not valid to it, or the model keeps
    state beside the KV cache, attends in a way that we cannot, takes more than text, or has
    quantised weights.
    """
    for name in ("quantization_config", "compression_config"):
        if fields.mapping(name):
            raise fields.error(
                name, "quantised weights run only through the families of Tandem's own"
            )
    config = _parse(fields)
    (architecture,) = fields.texts("architectures")
    if architecture != MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.model_type):
        problem = (
            f"{architecture!r:.60} is no decoder that transformers {transformers.__version__} has"
        )
        raise fields.error("architectures", problem)
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
    """Names the field that transformers' message names, if it names one."""
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
    for name, value in fields.items():  # before transformers makes a list of so many
        most = _MAX_EXPERTS if "expert" in name else _MAX_LAYERS if "layer" in name else math.inf
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
        value, most = (
            getattr(config, name, None),
            _MAX_LAYERS if name == "num_hidden_layers" else _MAX_SIZE,
        )
        if type(value) is not int or not 1 <= value <= most:
            raise fields.error(name, f"must be an integer from 1 to {most}, is {value!r:.60}")
    return config


def _modelling_code(config: PreTrainedConfig, architecture: str) -> str:
    """Returns the text of the module that has the architecture: that beside its config, else the
    one of another model whose class it takes, which is imported for it.
    """
    spec = find_spec(type(config).__module__.replace(".configuration_", ".modeling_"))
    if spec is not None and spec.origin is not None:
        return Path(spec.origin).read_text()
    return getsource(sys.modules[getattr(transformers, architecture).__module__])
