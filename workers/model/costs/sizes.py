"""Counts a model's parameters, by what a step does with them."""

import re
from collections.abc import Mapping
from dataclasses import replace
from math import prod
from typing import Any, Final

from ..config import ModelConfig
from ..loader import weight_bytes, weight_shapes
from .inference import ModelSizes

_EXPERT: Final = re.compile(r"(.*)\.experts\.(\d+)\.")
_CHOSEN_NAMES: Final = (
    "num_experts_per_tok",
    "num_experts_per_token",
    "moe_topk",
    "moe_top_k",
    "moe_k",
    "top_k_experts",
)
"""The names in config.json for the number of experts that a token chooses."""


def model_sizes(config: ModelConfig, dtype: str, device_type: str = "cpu") -> ModelSizes:
    """Counts the parameters of a model from its tree, which is built without memory.

    `dtype` and `device_type` as in `rank_weight_bytes`. Takes seconds for a model that runs through
    transformers' code.
    """
    unquantized = replace(config, quantization={})
    shapes = weight_shapes(unquantized)
    plain = weight_bytes(unquantized, 1, dtype)
    experts: dict[str, int] = {}
    numbers: set[str] = set()
    for name, shape in shapes.items():
        if found := _EXPERT.match(name):
            experts[name] = prod(shape)
            numbers.add(found[2])
    return ModelSizes(
        parameters=sum(map(prod, shapes.values())),
        linear=sum(prod(shape) for name, shape in shapes.items() if _is_linear(name, shape)),
        head=config.vocab_size * config.hidden_size,
        experts=sum(experts.values()),
        num_experts=len(numbers),
        num_chosen=min(_num_chosen(config), len(numbers)),
        weight_bytes=weight_bytes(config, 1, dtype, device_type) if config.quantization else plain,
        plain_bytes=plain,
    )


def _is_linear(name: str, shape: tuple[int, ...]) -> bool:
    return ".layers." in name and len(shape) in (2, 3) and shape[1] > 1


def _num_chosen(config: ModelConfig) -> int:
    """Returns the experts that a token chooses in each layer; a large number if it is unknown."""
    if config.experts is not None:
        return config.experts.num_chosen
    fields: Mapping[str, Any] = config.transformers or {}
    nested = fields.get("text_config")
    for source in (fields, nested if isinstance(nested, Mapping) else {}):
        for name in _CHOSEN_NAMES:
            if isinstance(source.get(name), int):
                return int(source[name])
    return 2**31
