"""Defines the family of all decoders of transformers."""

from typing import Final

from ..config import Fields, ModelConfig
from ..layers.linear import BuildOptions
from ..models.family import CausalLM, ModelFamily
from .config import read_config


def _parse_config(fields: Fields) -> ModelConfig:
    read_config(fields)  # before the import, which takes seconds
    from .causal_lm import parse_transformers_config

    return parse_transformers_config(fields)


def _build(config: ModelConfig, build: BuildOptions) -> CausalLM:
    from .causal_lm import TransformersForCausalLM

    return TransformersForCausalLM(config, build)


TRANSFORMERS: Final = ModelFamily(_parse_config, _build)
