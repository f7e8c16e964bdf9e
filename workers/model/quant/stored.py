"""Linear weights in formats of checkpoints: numbers of few bits, blocks of which share a scale."""

import math
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Final

import regex
import torch

from ..config import Fields
from ..kernels.c import cpu
from ..module import Parameter, WeightSlice
from .base import LinearMethod, LinearPartition
from .integer import MAX_GROUP, UNIT, IntegerLinearMethod
from .unquantized import UnquantizedLinearMethod

WORD_BITS: Final = 32  # that a format packs numbers into
_MATCH_SECONDS: Final = 1.0  # which no pattern takes that is meant well
_ROWS: Final = 1024  # that are restored at once: their float32 form is several times larger


class StoredLinearMethod(LinearMethod):
    """Computes y = x W^T + b with W in a format of checkpoints: as it is, where there is a kernel
    for that, else in the model's dtype, into which it is turned when it is loaded.
    """

    bias: Parameter | None = None

    def create_weights(self, partition: LinearPartition, dtype: torch.dtype) -> None:
        """See `LinearMethod.create_weights`."""
        self._partition, self._dtype = partition, dtype
        self.declare(partition)
        first, *others = self.parameters()
        first.num_bytes = self.kept_bytes()
        for each in others:
            each.num_bytes = 0
        if partition.has_bias:
            self.bias = Parameter(*partition.output_slices("bias"), dtype=dtype)

    def process_after_load(self) -> None:
        """Makes the method that multiplies, and lets go of the stored form."""
        self._method = self.make_method(self.bias.data if self.bias else None)
        self.fuses_gate = self._method.fuses_gate
        for name in [name for name, value in vars(self).items() if isinstance(value, Parameter)]:
            delattr(self, name)

    def apply(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """See `LinearMethod.apply`."""
        return self._method.apply(x, residual)

    def apply_gated(
        self, x: torch.Tensor, activation: str = "silu", residual: torch.Tensor | None = None
    ) -> torch.Tensor:
        """See `LinearMethod.apply_gated`."""
        return self._method.apply_gated(x, activation, residual)

    @abstractmethod
    def declare(self, partition: LinearPartition) -> None:
        """Sets the parameters but for the bias."""

    @abstractmethod
    def restore(self) -> torch.Tensor:
        """Returns the weight [outputs, inputs] in the model's dtype."""

    def make_method(self, bias: torch.Tensor | None) -> LinearMethod:
        """Returns what multiplies by the loaded weight."""
        gated = self._partition.gated
        return UnquantizedLinearMethod.from_tensors(
            self.restore(), bias, batch_invariant=self.batch_invariant, gated=gated
        )

    def kept_bytes(self) -> int:
        """Returns the bytes of the weight that `make_method` keeps."""
        outputs, inputs = self._partition.local_shape
        return outputs * inputs * self._dtype.itemsize

    def kernel_group(self) -> int | None:
        """Returns the largest number of inputs that a kernel for the numbers as they are can take
        as a group without changing a scale; None if there is none.
        """
        return None

    def scheme(self) -> str:
        """See `LinearMethod.scheme`."""
        if self.kernel_group() is not None:
            return "multiplied so on CPUs like this one"
        return f"turned into {str(self._dtype).removeprefix('torch.')} when they are loaded"

    def groups(self, size: int | None) -> torch.Tensor:
        """Returns the group of each input kept, [inputs], where groups of `size` lie one behind the
        other; None: all inputs are one.
        """
        begin, end, _ = self._partition.inputs.indices(self._partition.num_inputs)
        return torch.arange(begin, end) // (size or self._partition.num_inputs)

    def whole(
        self,
        suffixes: str | tuple[str, ...],
        shape: Callable[[int], tuple[int, ...]],
        dtype: torch.dtype,
        *,
        dim: int = 0,
    ) -> Parameter:
        """Returns the tensors called NAME.suffix of the layer's maps, one behind the other in
        `dim`; `shape` is that of a map by its number of outputs, `suffixes` are several where
        checkpoints differ. They are small, and a rank reads all of them.
        """
        suffix, *others = (suffixes,) if isinstance(suffixes, str) else suffixes
        parts = [
            WeightSlice(
                f"{name}.{suffix}",
                shape(size),
                other_names=tuple(f"{name}.{each}" for each in others),
            )
            for name, size in self._partition.maps.items()
        ]
        return Parameter(*parts, dtype=dtype, dim=dim)

    def by_output(self, blocks: Sequence[torch.Tensor], block: int = 1) -> torch.Tensor:
        """Maps tensors [blocks of outputs, ...] of the layer's maps to [outputs kept, ...]."""
        by_name = dict(zip(self._partition.maps, blocks, strict=True))
        rows = [
            by_name[name][torch.arange(size)[kept] // block]
            for name, size, kept in self._partition.outputs
        ]
        return torch.cat(rows)


class GroupedLinearMethod(StoredLinearMethod):
    """Computes with W = (number - zero) * scale, where the zero and the scale are those of the
    output and of the group of inputs.

    The kernel rounds x to 8 bits, by groups of inputs of its own, whatever the checkpoint says of
    activations.
    """

    g_idx: Parameter | None = (
        None  # [maps * inputs], the group of each input; None: they lie one behind the other
    )

    def __init__(
        self, scheme: str, bits: int, group_size: int | None, *, symmetric: bool, act_order: bool
    ) -> None:
        """`group_size` None: all inputs of an output are a group. `symmetric`: the zero is 2**(bits
        - 1) everywhere. `act_order`: groups are as `g_idx` says.
        """
        order = ", act-order" if act_order else ""
        groups = f"groups of {group_size}" if group_size else "a scale for each output"
        self._text = (
            f"{scheme}, {bits} bits, {groups}{order}{'' if symmetric else ', with zero points'}"
        )
        self._bits, self._group_size = bits, group_size
        self._symmetric, self._act_order = symmetric, act_order

    @abstractmethod
    def numbers(self) -> torch.Tensor:
        """Returns the numbers, [outputs, inputs] uint8, below 2**bits."""

    @abstractmethod
    def scales(self) -> torch.Tensor:
        """Returns the scales [outputs, groups]."""

    @abstractmethod
    def zeros(self) -> torch.Tensor | None:
        """Returns the zeros [outputs, groups] uint8; None: all are 2**(bits - 1)."""

    def num_groups(self) -> int:
        """Returns the groups of an output in the whole map."""
        return -(-self._partition.num_inputs // (self._group_size or self._partition.num_inputs))

    def group_order(self, suffix: str) -> Parameter | None:
        """Returns the parameter `g_idx`, if there is one."""
        partition = self._partition
        if not self._act_order:
            return None
        shape, kept = (partition.num_inputs,), (partition.inputs,)
        parts = [
            WeightSlice(f"{name}.{suffix}", shape, kept, below=self.num_groups())
            for name in partition.maps
        ]
        return Parameter(*parts, dtype=torch.int32)

    def make_method(self, bias: torch.Tensor | None) -> LinearMethod:
        """See `StoredLinearMethod.make_method`."""
        numbers, scales, zeros = self.numbers().contiguous(), self.scales(), self.zeros()
        unit = self.kernel_group()
        if unit is None or numbers.device.type != "cpu":
            return super().make_method(bias)
        groups = self.groups(self._group_size)[::unit]
        scales = scales[:, groups].bfloat16()
        is_centred = zeros is None or bool((zeros == 2 ** (self._bits - 1)).all())
        zeros = None if zeros is None or is_centred else zeros[:, groups] << 8 - self._bits
        return IntegerLinearMethod(self._bits).take(
            (numbers, scales, zeros), bias, gated=self._partition.gated
        )

    def restore(self) -> torch.Tensor:
        """See `StoredLinearMethod.restore`."""
        numbers, scales, zeros = self.numbers(), self.scales().float(), self.zeros()
        if zeros is None:
            zeros = torch.full_like(scales, 2 ** (self._bits - 1), dtype=torch.uint8)
        groups = [self.groups(self._group_size)] * len(self._partition.maps)
        if self.g_idx:
            groups = [each.long() for each in self.g_idx.parts()]
        groups_of = dict(zip(self._partition.maps, groups, strict=True))
        restored = torch.empty(numbers.shape, dtype=self._dtype, device=numbers.device)
        begin = 0
        for name, size, kept in self._partition.outputs:
            end = begin + len(range(*kept.indices(size)))
            for first in range(begin, end, _ROWS):
                rows, columns = slice(first, min(first + _ROWS, end)), groups_of[name]
                centred = numbers[rows].float() - zeros[rows][:, columns]
                restored[rows] = centred * scales[rows][:, columns]
            begin = end
        return restored

    def kept_bytes(self) -> int:
        """See `StoredLinearMethod.kept_bytes`."""
        if (unit := self.kernel_group()) is None:
            return super().kept_bytes()
        outputs, inputs = self._partition.local_shape
        return outputs * (inputs * self._bits // 8 + inputs // unit * (2 if self._symmetric else 3))

    def scheme(self) -> str:
        """See `LinearMethod.scheme`."""
        return f"{self._text}, {super().scheme()}"

    def kernel_group(self) -> int | None:
        """See `StoredLinearMethod.kernel_group`."""
        unit, inputs = largest_run(self.groups(self._group_size)), self._partition.local_shape[1]
        if self._act_order or self._dtype is not torch.bfloat16:
            return None
        sizes = (size for size in range(MAX_GROUP, 0, -UNIT) if unit % size == 0)
        return next((size for size in sizes if cpu.can_multiply_int(inputs, size)), None)


def largest_run(groups: torch.Tensor) -> int:
    """Returns into how long runs the inputs can be cut such that each run is of one group, by
    `groups` [inputs].
    """
    changes = (groups[1:] != groups[:-1]).nonzero().flatten() + 1
    return math.gcd(len(groups), *changes.tolist())


def is_plain(fields: Fields, name: str) -> bool:
    """Returns whether a layer is left out by modules_to_not_convert or ignored_layers, names, parts
    of names, or `re:` and a pattern of its beginning, or is the head. Raises CheckpointError.
    """
    lists = [field for field in ("modules_to_not_convert", "ignored_layers") if fields.has(field)]
    plain = [(field, each) for field in lists for each in fields.texts(field)]
    return name == "lm_head" or any(
        matches(fields, field, each, name) or f".{each}." in f".{name}." for field, each in plain
    )


def matches(fields: Fields, field: str, target: str, name: str) -> bool:
    """Returns whether a target of a field, a name or `re:` and a pattern of its beginning, is about
    the layer. Raises CheckpointError.
    """
    if not target.startswith("re:"):
        return target == name
    try:
        return regex.match(target[3:], name, timeout=_MATCH_SECONDS) is not None
    except (regex.error, TimeoutError, RecursionError, MemoryError, OverflowError):
        raise fields.error(field, f"{target!r:.60} is not a pattern that can be matched") from None


def word_span(kept: slice, size: int, per_word: int) -> slice:
    """Returns the words that hold some of `size` packed numbers."""
    begin, end, _ = kept.indices(size)
    return slice(begin // per_word, -(-end // per_word))


def within_words(kept: slice, size: int, per_word: int) -> slice:
    """Returns where the same lie in the unpacked numbers of these words."""
    begin, end, step = kept.indices(size)
    first = begin // per_word * per_word
    return slice(begin - first, end - first, step)


def unpack(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Maps int32 [rows, words], of numbers of 4 or 8 bits, the lowest bits first, to uint8 [rows,
    numbers].
    """
    data = words.contiguous().view(torch.uint8)
    return data if bits == 8 else torch.stack((data & 0x0F, data >> 4), dim=-1).flatten(-2)
