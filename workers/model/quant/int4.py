"""Multiplies rows in bfloat16 by weights of 4 bits (W4A16) on GPUs, by torch's int4 product."""

import math
from typing import Final, Self

import torch
from torch.nn import functional

from .. import kernels
from ..module import Parameter
from .base import LinearPartition, PlainLinearMethod
from .integer import ZERO_UNIT, round_weight
from .rounded import Numbers
from .unquantized import UnquantizedLinearMethod

ROUNDED_GROUP: Final = 32  # inputs of a group of weights that are rounded when they are loaded
_TERM_BYTES: Final = 4  # of a group's scale and zero
_GROUPS: Final = (256, 128, 64, 32)  # inputs of a group that `_weight_int4pack_mm` supports
_MIDDLE: Final = 8  # the product subtracts it from each number
_OUTPUTS: Final = 8  # of a tile of tensor cores
_INPUTS: Final = 16  # of a tile
_TILES: Final = (8, 4, 2)  # of inputs that a thread reads at once
# The product reads a weight again for every 16 rows. With more rows than these, the weight is
# restored in bfloat16 for a product of cuBLAS (published times of an A6000: pytorch/ao, HQQ).
FEW_ROWS: Final = 64


def can_pack(
    partition: LinearPartition, dtype: torch.dtype, device_type: str, *, batch_invariant: bool
) -> bool:
    """Returns True if a GPU multiplies by this weight's numbers of 4 bits; see `group_of`.

    Not with `batch_invariant`, because the two ways to multiply add in different orders; nor the
    weights of experts, which are multiplied together. Without a GPU here, assumes one that can.
    """
    outputs, _ = partition.local_shape
    return (
        device_type == "cuda"
        and dtype is torch.bfloat16
        and not batch_invariant
        and not partition.is_expert
        and outputs % _OUTPUTS == 0
        and (not torch.cuda.is_available() or torch.cuda.get_device_capability() >= (8, 0))
    )


def group_of(num_inputs: int, run: int) -> int | None:
    """Returns the largest supported group of inputs that divides `run`, or None.

    All groups of the weight consist of runs of `run` adjacent inputs.
    """
    if not any(num_inputs % (_INPUTS * tiles) == 0 for tiles in _TILES):
        return None
    return next((size for size in _GROUPS if run % size == 0), None)


def kept_bytes(outputs: int, inputs: int, group: int) -> int:
    """Returns the bytes of a packed weight with groups of this size."""
    return outputs * (inputs // 2 + inputs // group * _TERM_BYTES)


def pack(numbers: torch.Tensor) -> torch.Tensor:
    """Packs numbers [outputs, inputs], uint8 below 16, in the layout of `_weight_int4pack_mm`.

    Returns int32 [outputs / 8, inputs / (16 * tiles), 32, tiles / 2]: a word for each thread of a
    warp and each two tiles of 8 outputs and 16 inputs. A thread has one output, and of each half of
    a tile's inputs two adjacent ones. The lower half of a word has those with even numbers.
    """
    outputs, inputs = numbers.shape
    tiles = next(each for each in _TILES if inputs % (_INPUTS * each) == 0)
    # [tile of outputs, output, block of inputs, word, half of a tile, thread's place, even or odd]
    parts = numbers.view(outputs // 8, 8, inputs // (_INPUTS * tiles), tiles // 2, 4, 4, 2)
    ordered = parts.permute(0, 2, 1, 5, 3, 6, 4).flatten(-2)  # a word's 8 numbers, lowest first
    data = ordered[..., ::2] | ordered[..., 1::2] << 4
    return data.contiguous().view(torch.int32).view(outputs // 8, -1, 32, tiles // 2)


def unpack(words: torch.Tensor) -> torch.Tensor:
    """Returns the numbers [outputs, inputs] of `pack`."""
    tiles = 2 * words.shape[-1]
    data = words.contiguous().view(torch.uint8)
    parts = torch.stack((data & 15, data >> 4), -1).view(*words.shape[:2], 8, 4, tiles // 2, 2, 4)
    return parts.permute(0, 2, 1, 4, 6, 3, 5).reshape(words.shape[0] * 8, -1)


class Int4LinearMethod(PlainLinearMethod):
    """Computes y = x W^T + b with numbers of 4 bits, and a scale and a zero for each group.

    A weight is (number - 8) * scale + zero, rounded to bfloat16, for any number of rows. Plain
    weights are rounded when they are loaded, unless a GPU cannot multiply by them.
    """

    _plain: UnquantizedLinearMethod | None = None

    def create_weights(self, partition: LinearPartition, dtype: torch.dtype) -> None:
        super().create_weights(partition, dtype)
        inputs = partition.local_shape[1]
        self._is_packed = (
            can_pack(partition, dtype, self.device_type, batch_invariant=self.batch_invariant)
            and group_of(inputs, math.gcd(inputs, ROUNDED_GROUP)) == ROUNDED_GROUP
        )

    def tie(self, weight: Parameter) -> bool:
        return False

    @classmethod
    def from_numbers(
        cls, numbers: Numbers, bias: torch.Tensor | None, *, zero_unit: int = 1
    ) -> Self:
        """Returns a method with adjacent groups of a supported size; see `group_of`.

        A zero of 1 stands for 1 / `zero_unit`; without zeros, each is in the middle.
        """
        method = cls()
        method._keep(numbers, bias, zero_unit)
        return method

    def process_after_load(self) -> None:
        weight = self.weight.data
        bias = self.bias.data if self.bias else None
        del self.weight
        if self._is_packed:
            self._keep(round_weight(weight, 4, ROUNDED_GROUP), bias, ZERO_UNIT)
        else:
            self._plain = UnquantizedLinearMethod.from_tensors(
                weight, bias, batch_invariant=self.batch_invariant, gated=self._gated
            )

    def _keep(self, numbers: Numbers, bias: torch.Tensor | None, zero_unit: int) -> None:
        rounded, scales, zeros = numbers
        scales = scales.bfloat16()
        shift = torch.zeros_like(scales)
        if zeros is not None:
            shift = ((_MIDDLE - zeros.float() / zero_unit) * scales.float()).bfloat16()
        self._words = pack(rounded)
        # [num_groups, outputs, 2]
        self._terms = torch.stack((scales, shift), dim=-1).transpose(0, 1).contiguous()
        self._bias = bias

    def plain_form(self) -> tuple[torch.Tensor, torch.Tensor | None] | None:
        return self._plain.plain_form() if self._plain else None

    def apply(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        if self._plain:
            return self._plain.apply(x, residual)
        if not len(x):  # a step that samples nothing; torch's kernel fails on a GPU
            y = x.new_empty(0, self._terms.shape[1])
        elif len(x) > FEW_ROWS:
            y = functional.linear(x, self.restore(), self._bias)
        else:
            group = x.shape[1] // len(self._terms)
            y = torch._weight_int4pack_mm(x.contiguous(), self._words, group, self._terms)
            if self._bias is not None:
                y += self._bias
        return y if residual is None else residual.add_(y)

    def restore(self) -> torch.Tensor:
        """Returns the weight [outputs, inputs] in bfloat16."""
        if kernels.on_gpu(self._words):
            from ..kernels.triton.int4 import restore  # imports Triton

            return restore(self._words, self._terms)
        numbers = unpack(self._words)
        scales, shift = self._terms.float().transpose(0, 1).unbind(-1)  # [outputs, num_groups]
        groups = numbers.view(*scales.shape, -1).float() - _MIDDLE
        restored = torch.addcmul(shift[..., None], groups, scales[..., None])
        return restored.flatten(1).bfloat16()

    def saved_bytes(self) -> int:
        if not self._is_packed:
            return 0
        weight = self.weight.data
        outputs, inputs = weight.shape
        return weight.nbytes - kept_bytes(outputs, inputs, ROUNDED_GROUP)
