"""Builds decoders of transformers on `meta`.

It uses only classes of the installed transformers: code in a model's folder never runs.
"""

from threading import Lock

import torch
import transformers
from transformers import PreTrainedModel

from ..config import Fields
from .attention import ATTENTION, AttentionLayer, trace_layers
from .buffers import fix_rope
from .config import invalid, read_config

# While transformers builds a model, it changes the default dtype and patches of the whole process.
_building = Lock()


def build_on_meta(
    fields: Fields, dtype: torch.dtype
) -> tuple[PreTrainedModel, list[AttentionLayer]]:
    """Returns the whole model of a config.json on `meta`, and its attention layers in their order.

    Raises CheckpointError as `read_config` and `trace_layers`.
    """
    config = read_config(fields)
    model_class: type[PreTrainedModel] = getattr(transformers, fields.texts("architectures")[0])
    try:
        with _building, torch.device("meta"):
            model = model_class._from_config(  # type: ignore[no-untyped-call]
                config, dtype=dtype, attn_implementation=ATTENTION
            )
    except Exception as error:  # a hostile field may cause any exception
        raise invalid(fields, config, error) from error
    model.eval().requires_grad_(False)
    fix_rope(model, fields)
    layers = trace_layers(model, fields)
    if len(layers) != config.num_hidden_layers:
        raise fields.error(
            "num_hidden_layers",
            f"{config.num_hidden_layers}, but {len(layers)} of them attend through transformers' "
            "AttentionInterface",
        )
    return model, layers
