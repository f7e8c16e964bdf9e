"""Counts a model's parameters, by what a step does with them."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from math import prod
from typing import Final

from ..config import ModelConfig
from ..loader import weight_bytes, weight_shapes
from .inference import ModelSizes

_LAYER: Final = re.compile(r"\.\d+\.")
"""A part of the names of the layers' tensors, which begin with model.layers.0., transformer.h.0. or
transformer.blocks.0.
"""
_EXPERT: Final = re.compile(r"\.experts\.(\d+)\.")
_STACKED: Final = (".input_linear.weight", ".output_linear.weight")
"""The ends of the names of GraniteMoe's experts if the tensors have three dimensions."""
_COUNT_NAMES: Final = ("moe_num_experts",)
"""The name in config.json for the number of experts of DBRX, whose tensors do not show it."""
_CHOSEN_NAMES: Final = (
    "num_experts_per_tok",
    "num_experts_per_token",
    "moe_topk",
    "moe_top_k",
    "moe_k",
    "top_k_experts",
)
"""The names in config.json for the number of experts that a token chooses."""

_Shapes = Mapping[str, tuple[int, ...]]


def model_sizes(config: ModelConfig, dtype: str, device_type: str = "cpu") -> ModelSizes:
    """Counts the parameters of a model from its tree, which is built without memory.

    `dtype` and `device_type` as in `rank_weight_bytes`. Takes seconds for a model that runs through
    transformers' code.
    """
    unquantized = _without_quantization(config)
    shapes = weight_shapes(unquantized)
    plain = weight_bytes(unquantized, 1, dtype)
    linear = {name: shape for name, shape in shapes.items() if _is_linear(name, shape)}
    experts = {name: shape for name, shape in linear.items() if _is_expert(name, shape)}
    num_experts = _num_experts(config, experts)
    return ModelSizes(
        parameters=_sum(shapes),
        linear=_sum(linear),
        head=config.vocab_size * config.hidden_size,
        experts=_sum(experts),
        num_experts=num_experts,
        num_chosen=min(_num_chosen(config), num_experts),
        weight_bytes=weight_bytes(config, 1, dtype, device_type) if config.quantization else plain,
        plain_bytes=plain,
    )


def _without_quantization(config: ModelConfig) -> ModelConfig:
    """Returns the config of the same model in its dtype, whose tensors have all parameters."""
    experts = config.experts and replace(config.experts, is_mxfp4=False)
    return replace(config, quantization={}, experts=experts)


def _sum(shapes: _Shapes) -> int:
    return sum(map(prod, shapes.values()))


def _is_linear(name: str, shape: tuple[int, ...]) -> bool:
    """Returns True for a matrix of a layer, or for the stacked matrices of its experts."""
    is_matrix = len(shape) in (2, 3) and shape[1] > 1
    return is_matrix and bool(_LAYER.search(name)) and not name.endswith("bias")


def _is_expert(name: str, shape: tuple[int, ...]) -> bool:
    """Returns True for a matrix of a routed expert, or for the stacked matrices of all."""
    return ".experts." in name or (len(shape) == 3 and name.endswith(_STACKED))


def _num_experts(config: ModelConfig, experts: _Shapes) -> int:
    """Returns the routed experts of each layer that has any, by the names and shapes of these."""
    if not experts:
        return 0
    numbers = {found[1] for name in experts if (found := _EXPERT.search(name))}
    stacked = [shape[0] for shape in experts.values() if len(shape) == 3]
    return max([len(numbers), *stacked]) or _find_integer(config, _COUNT_NAMES) or 1


def _num_chosen(config: ModelConfig) -> int:
    """Returns the experts that a token chooses in each layer; a large number if it is unknown."""
    if config.experts is not None:
        return config.experts.num_chosen
    return _find_integer(config, _CHOSEN_NAMES) or 2**31


def _find_integer(config: ModelConfig, names: Iterable[str]) -> int | None:
    """Returns the first of these fields of config.json that is an integer; None without any.

    Of a list of integers, such as one for each layer of Hunyuan-A13B, returns the largest. The
    fields of a multimodal model's text model, and of DBRX's experts, are nested.
    """
    fields = config.transformers or {}
    for source in (fields, fields.get("text_config"), fields.get("ffn_config")):
        if not isinstance(source, Mapping):
            continue
        for name in names:
            value = source.get(name)
            numbers = value if isinstance(value, list) else [value]
            if numbers and all(isinstance(each, int) for each in numbers):
                return int(max(numbers))
    return None
