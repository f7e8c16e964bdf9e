"""Defines the interface of model families: a config parser and a module tree.

The tree computes a flat batch of tokens.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import NamedTuple

import torch

from ...engine.plan import OnLayers
from ..attention.backend import StepAttention
from ..config import Fields, ModelConfig
from ..layers.linear import BuildOptions
from ..layers.lora import LoraStep
from ..layers.rotary import CosSin
from ..layers.rows import EmbeddingRows
from ..module import Module
from ..states.steps import StepStates

Attend = Callable[[torch.Tensor, torch.Tensor | None, CosSin | None, StepAttention], torch.Tensor]
"""Maps x [num_tokens, hidden] to the same shape by attention, and adds the residual."""

Mix = Callable[[torch.Tensor, torch.Tensor | None, StepStates], torch.Tensor]
"""Does the same by a mixer, which reads and writes the states of the step's sequences."""


class CausalLM(Module, ABC):
    """Computes a decoder-only model; parameters are on `meta` until the loader fills them."""

    lora: LoraStep | None = None
    """The layers that adapters may change; None if the model supports no adapters."""

    @property
    def code(self) -> type:
        """Returns the class whose code computes the layers."""
        return type(self)

    @abstractmethod
    def __call__(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        attention: StepAttention,
        on_layers: OnLayers | None = None,
        rows: EmbeddingRows | None = None,
        states: StepStates | None = None,
    ) -> torch.Tensor:
        """Maps token_ids and positions [num_tokens] to the last layer's output.

        Tokens of a sequence are adjacent. The output is [num_tokens, hidden], before the last norm.
        Calls `on_layers` between some layers with the number of layers whose KV cache is stored.
        `rows` replace the embeddings of some tokens. `states` belong to the sequences of the step,
        if the model keeps states.
        """

    @abstractmethod
    def normalize(self, hidden: torch.Tensor) -> torch.Tensor:
        """Applies the last norm to hidden states [num_rows, hidden].

        transformers calls the result last_hidden_state.
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
        self,
        x: torch.Tensor,
        rotary: CosSin | None,
        attention: StepAttention,
        states: StepStates | None = None,
    ) -> torch.Tensor:
        """Maps x [num_tokens, hidden] to the same shape; x may be overwritten."""


class HybridDecoderLayer(DecoderLayer):
    """Computes attention or, in its place, a mixer that keeps a state."""

    self_attn: Attend | None
    mixer: Mix | None

    def mix(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        rotary: CosSin | None,
        attention: StepAttention,
        states: StepStates | None,
    ) -> torch.Tensor:
        """Maps normalized x [num_tokens, hidden] to the same shape, added to `residual`."""
        if self.self_attn is not None:
            return self.self_attn(x, residual, rotary, attention)
        assert self.mixer is not None
        assert states is not None
        return self.mixer(x, residual, states)


class ModelFamily(NamedTuple):
    """Holds the config parser and the tree builder of an architecture."""

    parse_config: Callable[[Fields], ModelConfig]
    """Parses config.json to the model's shape. Raises CheckpointError, which names the field."""
    build: Callable[[ModelConfig, BuildOptions], CausalLM]
    """Builds a rank's tree. Raises ValueError if the heads cannot be split over the ranks."""
