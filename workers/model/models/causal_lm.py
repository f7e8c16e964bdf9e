"""Defines the interface of model families: a config parser and a module tree over a flat batch of tokens."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch

from ...engine.plan import OnLayers
from ..attention.backend import StepAttention
from ..config import Fields, ModelConfig
from ..layers.build import BuildOptions
from ..module import Module


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBatch:
    """Holds the tokens of one step, those of a sequence one after the other."""

    token_ids: torch.Tensor  # [num_tokens]
    positions: torch.Tensor  # [num_tokens]
    attention: StepAttention


class CausalLM(Module, ABC):
    """A decoder-only model. `registry` finds the subclass of an architecture.

    Building one reads no weights: all parameters are on `meta` until the loader fills them."""

    @classmethod
    @abstractmethod
    def parse_config(cls, fields: Fields) -> ModelConfig:
        """Returns the model's shape, from the fields of config.json. Raises CheckpointError that names a field."""

    @abstractmethod
    def __init__(self, config: ModelConfig, build: BuildOptions) -> None:
        """Raises ValueError if the heads cannot be split over the ranks."""

    @abstractmethod
    def __call__(self, batch: StepBatch, on_layers: OnLayers | None = None) -> torch.Tensor:
        """Returns the hidden states after the last layer, [num_tokens, hidden].

        Calls `on_layers` between some layers with the number of layers whose KV cache is stored."""

    @abstractmethod
    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Maps hidden states [num_rows, hidden] to logits [num_rows, vocab_size]."""
