"""Weights as GPTQModel and AutoGPTQ (arXiv 2210.17323) and AutoAWQ (arXiv 2306.00978) write them.

Both have scales and zeros [groups, outputs]. GPTQ packs the numbers along the inputs, AWQ along the
outputs; both pack the zeros along the outputs. Versions of GPTQ: "gptq" stores a zero less one,
"gptq_v2" as it is.
"""

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, Final

import torch

from ..config import Fields
from ..module import Parameter, WeightSlice
from .base import LinearMethod, LinearPartition
from .stored import WORD_BITS, GroupedLinearMethod, is_plain, unpack, within_words, word_span
from .unquantized import UnquantizedLinearMethod

_GPTQ_VERSIONS: Final = {"gptq": 1, "gptq_v2": 0}  # what is added to a stored zero
_AWQ_ORDER: Final = (
    0,
    4,
    1,
    5,
    2,
    6,
    3,
    7,
)  # where in a word of AWQ's GEMM packing the outputs lie


class TransposedLinearMethod(GroupedLinearMethod):
    """Has the tensors qweight, qzeros and scales, inputs and groups first."""

    def declare(self, partition: LinearPartition) -> None:
        """See `StoredLinearMethod.declare`."""
        groups, per_word = self.num_groups(), WORD_BITS // self._bits
        self.qweight = Parameter(*self.weight_slices(partition, per_word), dtype=torch.int32, dim=1)
        self.qzeros = self.whole(
            "qzeros", lambda size: (groups, -(-size // per_word)), torch.int32, dim=1
        )
        self.scale = self.whole("scales", lambda size: (groups, size), torch.float32, dim=1)
        self.g_idx = self.group_order("g_idx")

    @abstractmethod
    def weight_slices(self, partition: LinearPartition, per_word: int) -> list[WeightSlice]:
        """Returns the slices that qweight is made of."""

    @abstractmethod
    def unpacked(self, words: torch.Tensor) -> torch.Tensor:
        """Maps words [rows, words of outputs] to [rows, outputs]."""

    def scales(self) -> torch.Tensor:
        """See `GroupedLinearMethod.scales`."""
        return self.by_output([each.t() for each in self.scale.parts()])

    def zeros(self) -> torch.Tensor:
        """See `GroupedLinearMethod.zeros`."""
        return self.by_output([self.unpacked(each).t() for each in self.qzeros.parts()])


class GptqLinearMethod(TransposedLinearMethod):
    """Reads GPTQ's format."""

    _zero_offset = 0

    @classmethod
    def for_layer(cls, quantization: Mapping[str, Any], name: str) -> LinearMethod:
        """See `LinearMethod.for_layer`."""
        fields = Fields("config.json", dict(quantization), "quantization_config.")
        if _is_left_out(fields, name):
            return UnquantizedLinearMethod()
        bits, group_size = _bits(fields, (4, 8)), _group_size(fields)
        version = fields.text("checkpoint_format", "gptq")
        if version not in _GPTQ_VERSIONS:
            raise fields.error(
                "checkpoint_format",
                f"{version!r:.60} is not supported, only {', '.join(_GPTQ_VERSIONS)}",
            )
        if fields.mapping("dynamic"):
            raise fields.error("dynamic", "layers with settings of their own are not supported")
        symmetric, act_order = fields.boolean("sym", True), fields.boolean("desc_act", False)
        if name == "lm_head" and not fields.boolean("lm_head", False):
            return UnquantizedLinearMethod()
        method = cls("GPTQ", bits, group_size, symmetric=symmetric, act_order=act_order)
        method._zero_offset = _GPTQ_VERSIONS[version]
        return method

    def weight_slices(self, partition: LinearPartition, per_word: int) -> list[WeightSlice]:
        """See `TransposedLinearMethod.weight_slices`."""
        inputs = partition.num_inputs
        words, span = -(-inputs // per_word), word_span(partition.inputs, inputs, per_word)
        return [
            WeightSlice(f"{name}.qweight", (words, size), (span, kept))
            for name, size, kept in partition.outputs
        ]

    def unpacked(self, words: torch.Tensor) -> torch.Tensor:
        """See `TransposedLinearMethod.unpacked`."""
        return unpack(words, self._bits)

    def numbers(self) -> torch.Tensor:
        """See `GroupedLinearMethod.numbers`."""
        partition, per_word = self._partition, WORD_BITS // self._bits
        return unpack(self.qweight.data.t(), self._bits)[
            :, within_words(partition.inputs, partition.num_inputs, per_word)
        ]

    def zeros(self) -> torch.Tensor:
        """See `GroupedLinearMethod.zeros`."""
        zeros: torch.Tensor = super().zeros() + self._zero_offset & 2**self._bits - 1
        return zeros


class AwqLinearMethod(TransposedLinearMethod):
    """Reads AWQ's format for GEMM."""

    @classmethod
    def for_layer(cls, quantization: Mapping[str, Any], name: str) -> LinearMethod:
        """See `LinearMethod.for_layer`."""
        fields = Fields("config.json", dict(quantization), "quantization_config.")
        bits, group_size = _bits(fields, (4,)), _group_size(fields)
        if (version := fields.text("version", "gemm").lower()) != "gemm":
            raise fields.error("version", f"{version!r:.60} is not supported, only 'gemm'")
        if not fields.boolean("zero_point", True):
            raise fields.error("zero_point", "must be true")
        if is_plain(fields, name):
            return UnquantizedLinearMethod()
        return cls("AWQ", bits, group_size, symmetric=False, act_order=False)

    def weight_slices(self, partition: LinearPartition, per_word: int) -> list[WeightSlice]:
        """See `TransposedLinearMethod.weight_slices`."""
        inputs = partition.num_inputs
        return [
            WeightSlice(
                f"{name}.qweight",
                (inputs, -(-size // per_word)),
                (partition.inputs, word_span(kept, size, per_word)),
            )
            for name, size, kept in partition.outputs
        ]

    def unpacked(self, words: torch.Tensor) -> torch.Tensor:
        """See `TransposedLinearMethod.unpacked`."""
        numbers = unpack(words, self._bits)
        return numbers.view(len(words), -1, len(_AWQ_ORDER))[:, :, list(_AWQ_ORDER)].flatten(1)

    def numbers(self) -> torch.Tensor:
        """See `GroupedLinearMethod.numbers`."""
        per_word = WORD_BITS // self._bits
        parts = zip(self.qweight.parts(), self._partition.outputs, strict=True)
        rows = [
            self.unpacked(words)[:, within_words(kept, size, per_word)]
            for words, (_, size, kept) in parts
        ]
        return torch.cat(rows, dim=1).t().contiguous()


def _is_left_out(fields: Fields, name: str) -> bool:
    """Returns whether modules_in_block_to_quantize, lists of ends of names, leaves out a layer.
    Raises CheckpointError.
    """
    given = dict(fields.items()).get("modules_in_block_to_quantize")
    if given is None or name == "lm_head":
        return False
    lists = given if isinstance(given, list) else [given]
    ends = [end for each in lists for end in (each if isinstance(each, list) else [each])]
    if not all(isinstance(end, str) for end in ends):
        raise fields.error("modules_in_block_to_quantize", "must be lists of names")
    return not any(f".{name}".endswith(f".{end}") for end in ends)


def _bits(fields: Fields, supported: tuple[int, ...]) -> int:
    """Returns the bits, which AWQ's own files call w_bit."""
    bits = fields.integer("bits" if fields.has("bits") or not fields.has("w_bit") else "w_bit")
    if bits not in supported:
        raise fields.error(
            "bits", f"{bits} is not supported, only {' and '.join(map(str, supported))}"
        )
    return bits


def _group_size(fields: Fields) -> int | None:
    """Returns the inputs of a group, which AWQ's own files call q_group_size; None for all, which
    is written as -1.
    """
    name = (
        "group_size"
        if fields.has("group_size") or not fields.has("q_group_size")
        else "q_group_size"
    )
    size = fields.integer(name, minimum=-1)
    if size == 0:
        raise fields.error("group_size", "must be -1 or above 0")
    return None if size < 0 else size
