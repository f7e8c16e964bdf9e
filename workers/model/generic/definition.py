"""Builds decoders of transformers on `meta`.

It uses only classes of the installed transformers: code in a model's folder never runs.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from threading import Lock

import torch
import transformers
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.core_model_loading import build_glob_alternation

from ..config import CheckpointError, Fields
from .attention import ATTENTION, TracedLayer
from .buffers import fix_rope
from .config import (
    ATTENDING,
    MIXING,
    STATELESS,
    architecture_of,
    invalid,
    keeps_state,
    read_config,
    text_config,
)
from .latent import keep_latents
from .sparse import see_all_keys
from .trace import trace_layers, unknown_state
from .weights import set_tensor

# While transformers builds a model, it changes the default dtype and patches of the whole process.
_building = Lock()


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoder:
    """Holds a decoder of transformers on `meta`, with its head."""

    model: PreTrainedModel  # has the head; its base model is, or contains, the decoder
    below: nn.Module  # the decoder without its head
    config: PreTrainedConfig  # of the decoder
    layers: list[TracedLayer]  # in the order of their calls


def build_on_meta(fields: Fields, dtype: torch.dtype) -> Decoder:
    """Returns the decoder of a config.json.

    Of a multimodal model it keeps the text model alone. Raises CheckpointError as `read_config` and
    `trace_layers`.
    """
    config = read_config(fields)
    text = text_config(config)
    model_class: type[PreTrainedModel] = getattr(transformers, architecture_of(fields))
    try:
        with _building, torch.device("meta"):
            model = model_class._from_config(  # type: ignore[no-untyped-call]
                config, dtype=dtype, attn_implementation=ATTENTION
            )
    except ImportError as error:
        raise _missing_package(fields, config, error) from error
    except Exception as error:  # a hostile field may cause any exception
        if isinstance(error, KeyError) and error.args == (ATTENTION,):
            problem = f"transformers' {model_class.__name__} attends without AttentionInterface"
            raise fields.error("architectures", problem) from error
        raise invalid(fields, config, error) from error
    model.eval().requires_grad_(False)
    _keep_float32(model, dtype)
    below = model.base_model if text is config else _keep_text(model, fields)
    fix_rope(model, fields)
    keep_latents(below)
    see_all_keys(below, text, fields)
    has_state = keeps_state(text, type(model).__name__)
    kinds = getattr(text, "layer_types", None) or ()
    if has_state and not {*ATTENDING, *MIXING, *STATELESS}.issuperset(kinds):
        raise unknown_state(fields)
    layers = trace_layers(below, text, fields, has_state=has_state)
    _check_layers(layers, text, fields, has_state)
    return Decoder(model=model, below=below, config=text, layers=layers)


def _keep_float32(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Gives float32 to the weights that transformers' `from_pretrained` loads as float32.

    These are, for example, the biases of routers: rounded to bfloat16, they choose other experts.
    """
    plan = model._get_dtype_plan(dtype)
    if not plan:
        return
    pattern, kept, _ = build_glob_alternation(list(plan))
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if match := pattern.search(name):
            set_tensor(model, name, tensor.to(plan[kept[str(match.lastgroup)]]))


def _check_layers(
    layers: Sequence[TracedLayer], config: PreTrainedConfig, fields: Fields, has_state: bool
) -> None:
    """Raises CheckpointError if other layers attend or keep a state than the config's types say."""
    num_mixers = sum(bool(layer.geometry.states) for layer in layers)
    num_attending = len(layers) - num_mixers
    kinds = getattr(config, "layer_types", None) or ()
    expected = (config.num_hidden_layers, 0)
    if has_state and kinds:
        expected = (
            sum(kind in ATTENDING for kind in kinds),
            sum(kind in MIXING for kind in kinds),
        )
    if (num_attending, num_mixers) == expected:
        return
    if has_state:
        raise unknown_state(fields)
    raise fields.error(
        "num_hidden_layers",
        f"{config.num_hidden_layers}, but {num_attending} of them attend through transformers' "
        "AttentionInterface",
    )


def _keep_text(model: PreTrainedModel, fields: Fields) -> nn.Module:
    """Removes all modules of a multimodal model but its decoder and head; returns the decoder.

    Raises CheckpointError if the decoder is not part of the base model.
    """
    below: nn.Module = model.get_decoder()  # type: ignore[no-untyped-call]
    head = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    names = {id(module): name for name, module in model.named_modules()}
    kept = [names.get(id(each), "") for each in (below, head)]
    if not kept[0].startswith(f"{model.base_model_prefix}.") or not kept[1]:
        raise fields.error(
            "architectures", f"transformers' {type(model).__name__} has no text model of its own"
        )
    # The modules on the paths to the two, and the two themselves.
    path = {part for each in kept for part in accumulate(each.split("."), "{}.{}".format)}
    for name in {name.rpartition(".")[0] for name in path}:
        parent = model.get_submodule(name)
        for leaf in list(parent._modules):
            if f"{name}.{leaf}".lstrip(".") not in path:
                del parent._modules[leaf]
    return below


def _missing_package(
    fields: Fields, config: PreTrainedConfig, error: ImportError
) -> CheckpointError:
    """Returns the error for a part of the model that needs a package that is not installed."""
    package = next(iter(re.findall(r"requires the (\S+) library", str(error))), str(error.name))
    name = next((each for each in config.sub_configs if each != "text_config"), "model_type")
    return fields.error(name, f"is built with the package {package}, which is not installed")
