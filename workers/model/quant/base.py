"""Defines how a linear layer's weights are stored, kept and multiplied."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.nn import functional

from .. import kernels
from ..module import Module, Parameter, WeightSlice


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearPartition:
    """Describes a rank's part of one or several linear maps of the same input.

    The outputs of the maps are concatenated.
    """

    # The name in the checkpoint, the number of outputs of the whole map, and the outputs kept.
    outputs: tuple[tuple[str, int, slice], ...]
    num_inputs: int  # of the whole map
    inputs: slice = field(default_factory=lambda: slice(None))  # kept
    has_bias: bool = False
    gated: bool = False  # the maps are gate and up, and `LinearMethod.apply_gated` is used
    is_expert: bool = False  # one of many, for some of the rows

    @property
    def local_shape(self) -> tuple[int, int]:
        """Returns the numbers of outputs and inputs kept."""
        outputs = sum(len(range(*kept.indices(size))) for _, size, kept in self.outputs)
        return outputs, len(range(*self.inputs.indices(self.num_inputs)))

    @property
    def maps(self) -> dict[str, int]:
        """Returns the number of outputs of each whole map by its name."""
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

    def whole(
        self,
        suffixes: Sequence[str],
        shape: Callable[[int], tuple[int, ...]],
        dtype: torch.dtype,
        *,
        dim: int = 0,
    ) -> Parameter:
        """Returns the whole tensors called NAME.suffix, concatenated along `dim`.

        It is for small tensors, which every rank reads as a whole. `shape` maps a map's number of
        outputs to its tensor's shape. Checkpoints use one of the `suffixes`.
        """
        parts = []
        for name, size in self.maps.items():
            first, *others = (f"{name}.{suffix}" for suffix in suffixes)
            parts.append(WeightSlice(first, shape(size), other_names=tuple(others)))
        return Parameter(*parts, dtype=dtype, dim=dim)

    def by_output(self, blocks: Sequence[torch.Tensor], block: int = 1) -> torch.Tensor:
        """Maps each map's tensor [blocks of outputs, ...] to one tensor [outputs kept, ...].

        A block has `block` outputs.
        """
        by_name = dict(zip(self.maps, blocks, strict=True))
        rows = [
            by_name[name][torch.arange(size)[kept] // block] for name, size, kept in self.outputs
        ]
        return torch.cat(rows)

    def input_groups(self, size: int | None) -> torch.Tensor:
        """Returns the group of each input kept, [inputs], for adjacent groups of `size` inputs.

        None: all inputs are one group.
        """
        begin, end, _ = self.inputs.indices(self.num_inputs)
        return torch.arange(begin, end) // (size or self.num_inputs)


class StackedForm(NamedTuple):
    """Holds an expert's weight in the form in which the weights of all experts are multiplied."""

    weight: torch.Tensor  # [outputs, inputs] in the model's dtype or E4M3
    scales: torch.Tensor | None  # [outputs, groups of inputs] float32, of a weight in E4M3
    bias: torch.Tensor | None  # [outputs]


class PackedForm(NamedTuple):
    """Holds an expert's weight as the C kernels multiply it."""

    weight: torch.Tensor  # as `kernels.c.cpu` packs it, as the next two
    scales: torch.Tensor | None  # None: of a weight in bfloat16
    zeros: torch.Tensor | None
    num_outputs: int
    bias: torch.Tensor | None  # [outputs]
    alternates: bool  # as `LinearMethod.fuses_gate`


class LinearMethod(Module, ABC):
    """Holds the weights of one linear layer and multiplies by them; one instance per layer."""

    batch_invariant = False
    """On GPUs, a row's result must not depend on the number of rows.

    On CPUs it never does where our own kernels are used.
    """

    device_type = "cpu"
    """The kind of device that will hold the weights, cpu or cuda; set before `create_weights`."""

    fuses_gate = False
    """`apply_gated` computes outputs of gate and up in turn, 16 of each; its residual is in this
    order.
    """

    @abstractmethod
    def create_weights(self, partition: LinearPartition, dtype: torch.dtype) -> None:
        """Sets the layer's parameters as attributes. The layer computes in `dtype`."""

    def tie(self, weight: Parameter) -> bool:
        """Uses the weight [outputs, inputs] of an embedding instead of calling `create_weights`.

        The embedding keeps it. Returns False if the method cannot: a checkpoint format has
        parameters other than a plain weight.
        """
        return False

    def scheme(self) -> str:
        """Describes a checkpoint format and how its weights are multiplied; empty for plain ones.

        Requires a call of `create_weights`.
        """
        return ""

    def plain_form(self) -> tuple[torch.Tensor, torch.Tensor | None] | None:
        """Returns the loaded weight [outputs, inputs] and bias [outputs] in the model's dtype.

        Returns None if the method keeps the weight in another form.
        """
        return None

    def stacked_form(self) -> StackedForm | None:
        """Returns an expert's loaded weight, or None if experts must be multiplied one by one."""
        form = self.plain_form()
        return None if form is None else StackedForm(form[0], None, form[1])

    def packed_form(self) -> PackedForm | None:
        """Returns an expert's loaded weight, or None if no C kernel multiplies it."""
        return None

    @abstractmethod
    def apply(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """Maps x [num_tokens, inputs] to [num_tokens, outputs], adding the bias and `residual`.

        `residual` has the result's shape and may be overwritten.
        """

    def apply_gated(
        self, x: torch.Tensor, activation: str = "silu", residual: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Maps x [num_tokens, inputs] to activation(gate) * up, [num_tokens, outputs / 2].

        The partition must be gated; the activation is silu or gelu_tanh. `residual` [num_tokens,
        outputs] is added to gate and up before the activation; it may be overwritten.
        """
        return activate_and_mul(self.apply(x, residual), activation)


class PlainLinearMethod(LinearMethod):
    """Loads plain weights; a subclass may convert them to another form after loading."""

    weight: Parameter  # [outputs, inputs]
    bias: Parameter | None = None  # [outputs]
    _gated = False

    def create_weights(self, partition: LinearPartition, dtype: torch.dtype) -> None:
        self._gated = partition.gated
        self.weight = Parameter(*partition.slices("weight"), dtype=dtype)
        if partition.has_bias:
            self.bias = Parameter(*partition.output_slices("bias"), dtype=dtype)

    def tie(self, weight: Parameter) -> bool:
        self.weight = weight
        return True


LinearMethodOf = Callable[[str], LinearMethod]
"""Creates the linear method of the layer of this name."""

QuantizationFormat = Callable[[Mapping[str, Any], str], LinearMethod]
"""Creates a layer's linear method from the checkpoint's quantization_config and the layer's name.

It may leave some layers to another method. Raises CheckpointError.
"""


def activate_and_mul(gate_up: torch.Tensor, activation: str) -> torch.Tensor:
    """Computes activation(gate) * up: [num_tokens, size].

    `gate_up` is [num_tokens, 2 * size], gate first. SwiGLU and GeGLU: arXiv 2002.05202.
    """
    if native := kernels.of(gate_up):
        return native.silu_mul(gate_up) if activation == "silu" else native.gelu_mul(gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    if activation == "silu":
        return functional.silu(gate) * up
    return functional.gelu(gate, approximate="tanh") * up
