"""Multiplies by linear weights in formats of checkpoints: numbers of few bits and their scales."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import torch

from ..config import Fields
from ..kernels.c import cpu
from ..module import Parameter, WeightSlice
from .base import LinearMethod, LinearPartition, PackedForm, StackedForm
from .fp8 import SCALE_BYTES, Fp8LinearMethod, can_stack
from .int4 import Int4LinearMethod, can_pack, group_of, kept_bytes
from .integer import MAX_GROUP, UNIT, IntegerLinearMethod
from .rounded import Numbers
from .scaled import ScaledLinearMethod, can_scale
from .unquantized import UnquantizedLinearMethod

WORD_BITS: Final = 32  # of a word of packed numbers
# Rows that are restored at once; their float32 form is several times larger.
_ROWS: Final = 1024


class StoredTensors(NamedTuple):
    """Holds the parameters of a stored weight in the order of loading."""

    weight: Parameter
    zero: Parameter | None  # None: no zero, or the same for all numbers
    scale: Parameter
    order: Parameter | None  # [maps * inputs], the group of each input; None: groups are adjacent


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """Describes how a checkpoint stores a weight: W = (number - zero) * scale.

    Scale and zero belong to an output and a group of inputs. Equal formats have equal fields, so
    the functions must not be closures.
    """

    scheme: str
    declare: "Declare"
    decode: "Decode"
    group_size: int | None  # inputs that share a scale; None: all
    group_outputs: int | None = 1  # outputs that share a scale; None: all of a map
    is_float: bool = False  # FP8 without zeros
    bits: int = 8
    symmetric: bool = True  # every zero is `middle`
    act_order: bool = False  # `StoredTensors.order` has the groups
    scale_names: tuple[str, ...] = ("weight_scale",)  # alternatives

    @property
    def middle(self) -> int:
        """Returns the zero of a symmetric format."""
        return 0 if self.is_float else 2 ** (self.bits - 1)

    @property
    def term_bytes(self) -> int:
        """Returns the bytes of a group's scale and zero in a kernel's form."""
        if self.is_float:
            return SCALE_BYTES
        return 2 if self.symmetric else 3

    def num_groups(self, partition: LinearPartition) -> int:
        """Returns the number of groups of an output in the whole map."""
        return -(-partition.num_inputs // (self.group_size or partition.num_inputs))

    def describe(self) -> str:
        """Returns scheme, bits and groups in a few words."""
        if self.is_float:
            if self.group_size:
                return f"{self.scheme}, blocks of {self.group_outputs} x {self.group_size}"
            return f"{self.scheme}, a scale for each {'output' if self.group_outputs else 'map'}"
        groups = f"groups of {self.group_size}" if self.group_size else "a scale for each output"
        order = ", act-order" if self.act_order else ""
        zeros = "" if self.symmetric else ", with zero points"
        return f"{self.scheme}, {self.bits} bits, {groups}{order}{zeros}"


Declare = Callable[[Format, LinearPartition], StoredTensors]
"""Creates the parameters of a rank's part of a layer."""

Decode = Callable[[Format, LinearPartition, StoredTensors], Numbers]
"""Returns the numbers [outputs, inputs] of loaded tensors, their scales and their zeros.

Numbers are uint8 below 2**bits, or float8_e4m3fn. Scales, and zeros in uint8, are [outputs,
groups]. Zeros are None if all of them are `Format.middle`.
"""


class StoredLinearMethod(LinearMethod):
    """Computes y = x W^T + b with W in a format of checkpoints.

    If a kernel supports the numbers, they stay as they are. The kernel for integers rounds x to 8
    bits by its own groups and ignores the checkpoint's settings for activations. Without a kernel
    the weight is converted to the model's dtype when it is loaded.
    """

    bias: Parameter | None = None

    def __init__(self, form: Format) -> None:
        self._format = form
        self._stored: StoredTensors | None = None

    def create_weights(self, partition: LinearPartition, dtype: torch.dtype) -> None:
        self._partition = partition
        self._dtype = dtype
        self._int4_group = self._find_int4_group()
        self._stacked_group = self._find_stacked_group()
        self._stored = self._format.declare(self._format, partition)
        for each in self.parameters():
            each.num_bytes = 0
        self._stored.weight.num_bytes = self._kept_bytes()
        if partition.has_bias:
            self.bias = Parameter(*partition.output_slices("bias"), dtype=dtype)

    def parameters(self) -> Iterator[Parameter]:
        return (each for each in (*(self._stored or ()), self.bias) if each is not None)

    def process_after_load(self) -> None:
        """Creates the method that multiplies, and drops the stored form."""
        assert self._stored is not None
        bias = self.bias.data if self.bias else None
        self._method = self._make_method(self._stored, bias)
        self.fuses_gate = self._method.fuses_gate
        self._stored = None
        self.bias = None

    def plain_form(self) -> tuple[torch.Tensor, torch.Tensor | None] | None:
        return self._method.plain_form()

    def stacked_form(self) -> StackedForm | None:
        return self._method.stacked_form()

    def packed_form(self) -> PackedForm | None:
        return self._method.packed_form()

    def apply(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        return self._method.apply(x, residual)

    def apply_gated(
        self, x: torch.Tensor, activation: str = "silu", residual: torch.Tensor | None = None
    ) -> torch.Tensor:
        return self._method.apply_gated(x, activation, residual)

    def scheme(self) -> str:
        if self._kernel_group() is not None:
            return f"{self._format.describe()}, multiplied so on CPUs like this one"
        if self._is_scaled():
            return f"{self._format.describe()}, multiplied so on GPUs with FP8"
        if self._stacked_group is not None:
            return f"{self._format.describe()}, multiplied in bfloat16 by experts on GPUs with FP8"
        if self._int4_group is not None:
            return f"{self._format.describe()}, kept so on GPUs"
        dtype = str(self._dtype).removeprefix("torch.")
        return f"{self._format.describe()}, turned into {dtype} when they are loaded"

    def _make_method(self, stored: StoredTensors, bias: torch.Tensor | None) -> LinearMethod:
        form = self._format
        partition = self._partition
        unit = self._kernel_group()
        if self._is_scaled():
            numbers, scales, _ = form.decode(form, partition, stored)
            return ScaledLinearMethod.from_numbers(numbers, scales[:, 0], bias)
        if size := self._stacked_group:
            numbers, scales, _ = form.decode(form, partition, stored)
            scales = scales[:, partition.input_groups(form.group_size)[::size]].float()
            return Fp8LinearMethod().take(
                (numbers.contiguous().view(torch.uint8), scales, None),
                bias,
                gated=partition.gated,
                uses_kernel=False,
            )
        if size := self._int4_group:
            numbers, scales, zeros = form.decode(form, partition, stored)
            groups = partition.input_groups(form.group_size)[::size]
            zeros = None if zeros is None else zeros[:, groups]
            return Int4LinearMethod.from_numbers((numbers, scales[:, groups], zeros), bias)
        if unit is None:
            return UnquantizedLinearMethod.from_tensors(
                self._restore(stored),
                bias,
                batch_invariant=self.batch_invariant,
                gated=partition.gated,
            )
        numbers, scales, zeros = form.decode(form, partition, stored)
        numbers = numbers.contiguous().view(torch.uint8)
        groups = partition.input_groups(form.group_size)[::unit]
        scales = scales[:, groups]
        if form.is_float:
            return Fp8LinearMethod().take((numbers, scales, None), bias, gated=partition.gated)
        if zeros is not None:
            is_centred = bool((zeros == form.middle).all())
            zeros = None if is_centred else zeros[:, groups] << 8 - form.bits
        return IntegerLinearMethod(form.bits).take(
            (numbers, scales.bfloat16(), zeros), bias, gated=partition.gated
        )

    def _restore(self, stored: StoredTensors) -> torch.Tensor:
        """Returns the weight [outputs, inputs] in the model's dtype."""
        form = self._format
        partition = self._partition
        numbers, scales, zeros = form.decode(form, partition, stored)
        scales = scales.float()
        groups_of = dict.fromkeys(partition.maps, partition.input_groups(form.group_size))
        if stored.order:
            orders = (each.long() for each in stored.order.parts())
            groups_of = dict(zip(partition.maps, orders, strict=True))
        restored = torch.empty(numbers.shape, dtype=self._dtype, device=numbers.device)
        begin = 0
        for name, size, kept in partition.outputs:
            end = begin + len(range(*kept.indices(size)))
            groups = groups_of[name]
            for first in range(begin, end, _ROWS):
                rows = slice(first, min(first + _ROWS, end))
                weight = numbers[rows].float()
                weight -= form.middle if zeros is None else zeros[rows][:, groups]
                restored[rows] = weight * scales[rows][:, groups]
            begin = end
        return restored

    def _kept_bytes(self) -> int:
        """Returns the bytes of the weight after loading."""
        form = self._format
        outputs, inputs = self._partition.local_shape
        unit = self._kernel_group()
        if self._is_scaled():
            return outputs * (inputs + SCALE_BYTES)
        if size := self._stacked_group:
            return outputs * (inputs + inputs // size * SCALE_BYTES)
        if size := self._int4_group:
            return kept_bytes(outputs, inputs, size)
        if unit is None:
            return outputs * inputs * self._dtype.itemsize
        return outputs * (inputs * form.bits // 8 + inputs // unit * form.term_bytes)

    def _is_scaled(self) -> bool:
        """Returns True if a GPU multiplies by the numbers as they are stored."""
        return (
            self._format.is_float
            and self._format.num_groups(self._partition) == 1
            and can_scale(
                self._partition,
                self._dtype,
                self.device_type,
                batch_invariant=self.batch_invariant,
            )
        )

    def _find_stacked_group(self) -> int | None:
        """Returns the groups of inputs by which a GPU multiplies experts in FP8, or None."""
        form = self._format
        partition = self._partition
        if not form.is_float or not partition.is_expert:
            return None
        run = _longest_run(partition.input_groups(form.group_size))
        return run if can_stack(partition, self._dtype, self.device_type, run) else None

    def _find_int4_group(self) -> int | None:
        """Returns the groups of inputs by which a GPU multiplies by numbers of 4 bits, or None."""
        form = self._format
        partition = self._partition
        if (
            form.bits != 4
            or form.act_order
            or not can_pack(
                partition, self._dtype, self.device_type, batch_invariant=self.batch_invariant
            )
        ):
            return None
        run = _longest_run(partition.input_groups(form.group_size))
        return group_of(partition.local_shape[1], run)

    def _kernel_group(self) -> int | None:
        """Returns the largest group of inputs that a kernel can use without changing a scale.

        None: no kernel supports the numbers.
        """
        form = self._format
        inputs = self._partition.local_shape[1]
        if self.device_type != "cpu" or self._dtype is not torch.bfloat16 or form.act_order:
            return None
        unit = _longest_run(self._partition.input_groups(form.group_size))
        if form.is_float:
            return unit if cpu.can_multiply_fp8(inputs, unit) else None
        sizes = (size for size in range(MAX_GROUP, 0, -UNIT) if unit % size == 0)
        return next((size for size in sizes if cpu.can_multiply_int(inputs, size)), None)


def _longest_run(groups: torch.Tensor) -> int:
    """Returns the largest length of equal runs of inputs such that each is within one group.

    `groups` [inputs] has the group of each input.
    """
    changes = (groups[1:] != groups[:-1]).nonzero().flatten() + 1
    return math.gcd(len(groups), *changes.tolist())


def declare_scale(form: Format, partition: LinearPartition) -> Parameter:
    """Creates the scales [blocks of outputs, groups] of the layer's maps, or [1] of a whole map."""

    def shape(size: int) -> tuple[int, ...]:
        if form.group_outputs is None:
            return (1,)
        return -(-size // form.group_outputs), form.num_groups(partition)

    return partition.whole(form.scale_names, shape, torch.float32)


def decode_scale(form: Format, partition: LinearPartition, scale: Parameter) -> torch.Tensor:
    """Returns the scales [outputs, groups] of `declare_scale`."""
    outputs = form.group_outputs or max(partition.maps.values())
    return partition.by_output([each.view(len(each), -1) for each in scale.parts()], outputs)


def declare_order(form: Format, partition: LinearPartition, suffix: str) -> Parameter | None:
    """Creates the groups of the inputs with act-order, else returns None."""
    if not form.act_order:
        return None
    parts = [
        WeightSlice(
            f"{name}.{suffix}",
            (partition.num_inputs,),
            (partition.inputs,),
            below=form.num_groups(partition),
        )
        for name in partition.maps
    ]
    return Parameter(*parts, dtype=torch.int32)


def word_span(kept: slice, size: int, per_word: int) -> slice:
    """Returns the words that contain the kept ones of `size` packed numbers."""
    begin, end, _ = kept.indices(size)
    return slice(begin // per_word, -(-end // per_word))


def within_words(kept: slice, size: int, per_word: int) -> slice:
    """Returns the place of the kept numbers among the unpacked numbers of `word_span`."""
    begin, end, step = kept.indices(size)
    first = begin // per_word * per_word
    return slice(begin - first, end - first, step)


def unpack(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Maps int32 [rows, words] to uint8 [rows, numbers], the lowest bits of a word first.

    A number has 4 or 8 bits.
    """
    data = words.contiguous().view(torch.uint8)
    return data if bits == 8 else torch.stack((data & 0x0F, data >> 4), dim=-1).flatten(-2)


def quantization_fields(quantization: Mapping[str, Any]) -> Fields:
    """Returns the fields of quantization_config in config.json."""
    return Fields("config.json", dict(quantization), "quantization_config.")
