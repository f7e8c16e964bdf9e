"""Defines the interface of linear methods: how a linear layer's weights are stored, kept and
multiplied.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn import functional

from .. import kernels
from ..module import Module, Parameter, WeightSlice


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearPartition:
    """Describes a rank's part of one or several linear maps that take the same input and lie below
    each other.
    """

    outputs: tuple[
        tuple[str, int, slice], ...
    ]  # name in the checkpoint, outputs of the whole map, outputs kept
    num_inputs: int  # of the whole map
    inputs: slice = field(default_factory=lambda: slice(None))  # kept
    has_bias: bool = False
    gated: bool = False  # two maps, gate and up, of which `LinearMethod.apply_gated` is used

    @property
    def local_shape(self) -> tuple[int, int]:
        """Returns the numbers of outputs and inputs kept."""
        outputs = sum(len(range(*kept.indices(size))) for _, size, kept in self.outputs)
        return outputs, len(range(*self.inputs.indices(self.num_inputs)))

    @property
    def maps(self) -> dict[str, int]:
        """Returns the outputs of the whole maps by their names."""
        return {name: size for name, size, _ in self.outputs}

    def slices(self, suffix: str) -> tuple[WeightSlice, ...]:
        """Returns the parts of the tensors [outputs, inputs] called NAME.suffix."""
        return tuple(
            WeightSlice(f"{name}.{suffix}", (size, self.num_inputs), (kept, self.inputs))
            for name, size, kept in self.outputs
        )

    def output_slices(self, suffix: str) -> tuple[WeightSlice, ...]:
        """Returns the parts of the tensors [outputs] called NAME.suffix."""
        return tuple(
            WeightSlice(f"{name}.{suffix}", (size,), (kept,)) for name, size, kept in self.outputs
        )


class LinearMethod(Module, ABC):
    """Holds the weights of one linear layer and multiplies by them; one instance a layer.

    A quantised format is one subclass, which `registry` finds by `quantization_config.quant_method`
    of config.json.
    """

    batch_invariant = False
    """Whether on GPUs a row's result must not depend on the number of rows; on CPUs it never does
    where the kernels of ours are used.
    """

    fuses_gate = False
    """Whether `apply_gated` computes outputs of gate and up in turn, 16 of each, and takes its
    residual so.
    """

    @classmethod
    def for_layer(cls, quantization: Mapping[str, Any], name: str) -> "LinearMethod":
        """Returns the method of the layer `name`; `quantization` is the checkpoint's
        quantization_config. Override it to read settings or to leave some layers to another method.
        Raises CheckpointError.
        """
        return cls()

    @abstractmethod
    def create_weights(self, partition: LinearPartition, dtype: torch.dtype) -> None:
        """Sets the layer's parameters as attributes. `dtype` is what the layer computes in."""

    def tie(self, weight: Parameter) -> bool:
        """Instead of `create_weights`, takes the weight [outputs, inputs] of an embedding, which
        keeps it. Returns
        whether the method can: a format of checkpoints, with parameters of its own, cannot.
        """
        return False

    def scheme(self) -> str:
        """Says in a few words how a format of checkpoints keeps the weights, and how they are
        multiplied; empty for plain ones. `create_weights` has been called.
        """
        return ""

    @abstractmethod
    def apply(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """Maps x [num_tokens, inputs] to [num_tokens, outputs], plus bias and plus `residual` of
        the result's shape, which may be overwritten.
        """

    def apply_gated(
        self, x: torch.Tensor, activation: str = "silu", residual: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Maps x [num_tokens, inputs] to activation(gate) * up, [num_tokens, outputs / 2], for a
        gated partition; the activation is silu or gelu_tanh. `residual` [num_tokens, outputs] is
        added to gate and up before; it may be overwritten.
        """
        return activate_and_mul(self.apply(x, residual), activation)


class PlainLinearMethod(LinearMethod):
    """Loads plain weights; a subclass may give them another form once they are loaded."""

    weight: Parameter  # [outputs, inputs]
    bias: Parameter | None = None  # [outputs]
    _gated = False

    def create_weights(self, partition: LinearPartition, dtype: torch.dtype) -> None:
        """See `LinearMethod.create_weights`."""
        self._gated = partition.gated
        self.weight = Parameter(*partition.slices("weight"), dtype=dtype)
        if partition.has_bias:
            self.bias = Parameter(*partition.output_slices("bias"), dtype=dtype)

    def tie(self, weight: Parameter) -> bool:
        """See `LinearMethod.tie`."""
        self.weight = weight
        return True


LinearMethodOf = Callable[[str], LinearMethod]
"""Returns a new method for the layer of this name."""


def activate_and_mul(gate_up: torch.Tensor, activation: str) -> torch.Tensor:
    """Computes activation(gate) * up (SwiGLU and GeGLU, arXiv 2002.05202) of [num_tokens, 2 *
    size], gate first: [num_tokens, size].
    """
    if native := kernels.of(gate_up):
        return native.silu_mul(gate_up) if activation == "silu" else native.gelu_mul(gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    return (
        functional.silu(gate) if activation == "silu" else functional.gelu(gate, approximate="tanh")
    ) * up
