"""Defines the interface of model families: a config parser and a module tree over a flat batch of
tokens.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import ClassVar, NamedTuple

import torch

from ...engine.plan import OnLayers
from ..attention.backend import StepAttention
from ..config import Fields, ModelConfig
from ..layers.linear import BuildOptions
from ..layers.lora import LoraStep
from ..layers.rotary import CosSin
from ..module import Module


class CausalLM(Module, ABC):
    """Computes a decoder-only model; its parameters are on `meta` until the loader fills them."""

    can_capture: ClassVar[bool] = True
    """Whether what it launches on a GPU depends on nothing but the number of tokens."""
    lora: LoraStep | None = None
    """The layers that adapters may change; None if it takes no adapters."""

    @property
    def code(self) -> type:
        """The class whose code computes the layers."""
        return type(self)

    @abstractmethod
    def __call__(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        attention: StepAttention,
        on_layers: OnLayers | None = None,
    ) -> torch.Tensor:
        """Maps token_ids and positions [num_tokens], those of a sequence one after the other, to
        the hidden states after the last layer, [num_tokens, hidden].

        Calls `on_layers` between some layers with the number of layers whose KV cache is stored.
        """

    @abstractmethod
    def normalize(self, hidden: torch.Tensor) -> torch.Tensor:
        """Maps hidden states [num_rows, hidden] to those after the last norm, which transformers
        calls last_hidden_state.
        """

    @abstractmethod
    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Maps hidden states [num_rows, hidden] to logits [num_rows, vocab_size]."""


class DecoderLayer(Module, ABC):
    """Computes one layer of a decoder."""

    @abstractmethod
    def __init__(self, config: ModelConfig, index: int, build: BuildOptions) -> None:
        """Raises ValueError if the heads cannot be split over the ranks."""

    @abstractmethod
    def __call__(
        self, x: torch.Tensor, rotary: CosSin | None, attention: StepAttention
    ) -> torch.Tensor:
        """Maps x [num_tokens, hidden] to the same shape; x may be overwritten."""


class ModelFamily(NamedTuple):
    """Holds what `registry` knows of an architecture."""

    parse_config: Callable[[Fields], ModelConfig]
    """Returns the model's shape, from config.json. Raises CheckpointError that names a field."""
    build: Callable[[ModelConfig, BuildOptions], CausalLM]
    """Returns a rank's tree. Raises ValueError if the heads cannot be split over the ranks."""
