"""Weights in the formats of the package compressed-tensors, which llm-compressor and `tandem
quantize` write.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Final

import torch

from ..config import Fields
from ..module import Parameter, WeightSlice
from .base import LinearMethod, LinearPartition
from .fp8 import Block, StoredFp8LinearMethod
from .stored import WORD_BITS, GroupedLinearMethod, matches, unpack, within_words, word_span
from .unquantized import UnquantizedLinearMethod

PACKED: Final = "pack-quantized"
INTEGERS: Final = "int-quantized"
_FORMATS: Final = (PACKED, INTEGERS, "float-quantized", "naive-quantized")
_LINEAR: Final = "Linear"  # the target that means every linear layer


class CompressedTensorsMethod(GroupedLinearMethod):
    """Reads weights packed into words along the inputs, and zeros along the outputs; chooses by the
    config groups how each layer is read.
    """

    zero_point: Parameter | None = None
    has_one_scale = False  # of a whole map, not of each output

    @classmethod
    def for_layer(cls, quantization: Mapping[str, Any], name: str) -> LinearMethod:
        """See `LinearMethod.for_layer`."""
        fields = Fields("config.json", dict(quantization), "quantization_config.")
        for other in ("sparsity_config", "transform_config"):
            nested = fields.nested(other)
            if nested.text("format", "dense") != "dense" or nested.mapping("config_groups"):
                raise fields.error(other, "is not supported")
        if fields.has("ignore") and any(
            matches(fields, "ignore", each, name) for each in fields.texts("ignore")
        ):
            return UnquantizedLinearMethod()
        group = _group_of(fields, name)
        return UnquantizedLinearMethod() if group is None else _method(fields, group)

    def declare(self, partition: LinearPartition) -> None:
        """See `StoredLinearMethod.declare`."""
        self.declare_numbers(partition)
        shape = (
            (lambda size: (1,)) if self.has_one_scale else (lambda size: (size, self.num_groups()))
        )
        self.scale = self.whole("weight_scale", shape, torch.float32)
        self.g_idx = self.group_order("weight_g_idx")

    def declare_numbers(self, partition: LinearPartition) -> None:
        """Sets the parameters of numbers and zeros."""
        inputs, per_word = partition.num_inputs, WORD_BITS // self._bits
        words, span = -(-inputs // per_word), word_span(partition.inputs, inputs, per_word)
        parts = [
            WeightSlice(f"{name}.weight_packed", (size, words), (kept, span))
            for name, size, kept in partition.outputs
        ]
        self.weight = Parameter(*parts, dtype=torch.int32)
        if not self._symmetric:
            groups = self.num_groups()
            self.zero_point = self.whole(
                "weight_zero_point", lambda size: (-(-size // per_word), groups), torch.int32
            )

    def numbers(self) -> torch.Tensor:
        """See `GroupedLinearMethod.numbers`."""
        partition, per_word = self._partition, WORD_BITS // self._bits
        return unpack(self.weight.data, self._bits)[
            :, within_words(partition.inputs, partition.num_inputs, per_word)
        ]

    def scales(self) -> torch.Tensor:
        """See `GroupedLinearMethod.scales`."""
        sizes = self._partition.maps.values()
        parts = zip(self.scale.parts(), sizes, strict=True)
        return self.by_output(
            [each.expand(size, 1) if self.has_one_scale else each for each, size in parts]
        )

    def zeros(self) -> torch.Tensor | None:
        """See `GroupedLinearMethod.zeros`."""
        if self.zero_point is None:
            return None
        return self.by_output(
            [unpack(each.t(), self._bits).t() for each in self.zero_point.parts()]
        )


class IntQuantizedLinearMethod(CompressedTensorsMethod):
    """Reads weights and zeros of a byte each."""

    def declare_numbers(self, partition: LinearPartition) -> None:
        """See `CompressedTensorsMethod.declare_numbers`."""
        self.weight = Parameter(*partition.slices("weight"), dtype=torch.int8)
        if not self._symmetric:
            groups = self.num_groups()
            self.zero_point = self.whole(
                "weight_zero_point", lambda size: (size, groups), torch.int8
            )

    def numbers(self) -> torch.Tensor:
        """See `GroupedLinearMethod.numbers`."""
        return _shifted(self.weight.data)

    def zeros(self) -> torch.Tensor | None:
        """See `GroupedLinearMethod.zeros`."""
        return _shifted(self.by_output(self.zero_point.parts())) if self.zero_point else None


def _shifted(numbers: torch.Tensor) -> torch.Tensor:
    """Maps int8 to uint8, -128 to 0."""
    return numbers.view(torch.uint8) ^ 0x80


def _group_of(fields: Fields, name: str) -> Fields | None:
    """Returns the group whose targets name the layer, else the one for all linear layers, if there
    is one.
    """
    groups = list(_groups(fields))
    for group in groups:
        if any(matches(group, "targets", each, name) for each in group.texts("targets")):
            return group
    return next((group for group in groups if _LINEAR in group.texts("targets")), None)


def _groups(fields: Fields) -> Iterator[Fields]:
    groups = fields.nested("config_groups")
    for key, _ in groups.items():
        yield groups.nested(key)


def _method(fields: Fields, group: Fields) -> LinearMethod:
    """Returns the method of a config group. Raises CheckpointError that names what is not
    supported.
    """
    weights = group.nested("weights")
    form = group.text("format", fields.text("format"))
    bits, kind, strategy = (
        weights.integer("num_bits"),
        weights.text("type", "int"),
        _strategy(weights),
    )
    if form not in _FORMATS:
        raise fields.error("format", f"{form!r:.60} is not supported, only {', '.join(_FORMATS)}")
    inputs = group.nested("input_activations")
    scheme = f"compressed-tensors {form} W{bits}A{inputs.integer('num_bits') if inputs.has('num_bits') else 16}"
    if kind == "float":
        if bits != 8 or form == PACKED:
            raise weights.error(
                "num_bits", f"{bits} of floating point is not supported in {form}, only 8"
            )
        return StoredFp8LinearMethod(f"{scheme} FP8", _block(weights, strategy), "weight_scale")
    if kind != "int" or form == "float-quantized":
        raise weights.error("type", f"{kind!r:.60} is not supported in {form}")
    has_one_scale = strategy == "tensor" and form != PACKED and weights.boolean("symmetric", True)
    if strategy not in ("channel", "group") and not has_one_scale:
        text = "only channel, group and, with symmetric int8, tensor"
        raise weights.error(
            "strategy", f"{strategy!r:.60} is not supported for integers in {form}, {text}"
        )
    return _integer_method(weights, scheme, bits, strategy, is_packed=form == PACKED)


def _strategy(weights: Fields) -> str:
    return weights.text("strategy", "group" if weights.has("group_size") else "tensor")


def _integer_method(
    weights: Fields, scheme: str, bits: int, strategy: str, *, is_packed: bool
) -> LinearMethod:
    if bits not in (4, 8):
        raise weights.error("num_bits", f"{bits} is not supported, only 4 and 8")
    group_size = weights.integer("group_size") if strategy == "group" else None
    order = dict(weights.items()).get("actorder")
    symmetric, act_order = weights.boolean("symmetric", True), order in (True, "group", "dynamic")
    if is_packed:
        return CompressedTensorsMethod(
            scheme, bits, group_size, symmetric=symmetric, act_order=act_order
        )
    method = IntQuantizedLinearMethod(
        scheme, 8, group_size, symmetric=symmetric, act_order=act_order
    )
    method.has_one_scale = strategy == "tensor"
    return method


def _block(weights: Fields, strategy: str) -> Block:
    if strategy == "block":
        block = weights.integers("block_structure")
        if len(block) != 2 or not all(block):
            raise weights.error("block_structure", "must be two integers above 0")
        return block[0], block[1]
    if strategy == "group":
        return 1, weights.integer("group_size")
    if strategy in ("channel", "tensor"):
        return (1 if strategy == "channel" else None), None
    raise weights.error(
        "strategy", f"{strategy!r:.60} is not supported, only tensor, channel, group and block"
    )
