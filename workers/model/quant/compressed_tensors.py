"""Reads weights in the formats of the package compressed-tensors.

llm-compressor and `tandem quantize` write them.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Final

import torch

from ..config import Fields
from ..module import Parameter, WeightSlice
from .base import LinearMethod, LinearPartition
from .rounded import Numbers
from .stored import (
    WORD_BITS,
    Format,
    StoredLinearMethod,
    StoredTensors,
    declare_order,
    declare_scale,
    decode_scale,
    quantization_fields,
    unpack,
    within_words,
    word_span,
)
from .stored_fp8 import Block, stored_fp8
from .targets import matches
from .unquantized import UnquantizedLinearMethod

PACKED: Final = "pack-quantized"
INTEGERS: Final = "int-quantized"
_FORMATS: Final = (PACKED, INTEGERS, "float-quantized", "naive-quantized")
_LINEAR: Final = "Linear"  # the target that selects every linear layer


def compressed_tensors_method(quantization: Mapping[str, Any], name: str) -> LinearMethod:
    """Returns the method of a layer by the config group that selects it. Raises CheckpointError."""
    fields = quantization_fields(quantization)
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


def declare_packed(form: Format, partition: LinearPartition) -> StoredTensors:
    """Creates numbers packed along the inputs, and zeros packed along the outputs."""
    inputs = partition.num_inputs
    per_word = WORD_BITS // form.bits
    words = -(-inputs // per_word)
    span = word_span(partition.inputs, inputs, per_word)
    parts = [
        WeightSlice(f"{name}.weight_packed", (size, words), (kept, span))
        for name, size, kept in partition.outputs
    ]
    return StoredTensors(
        weight=Parameter(*parts, dtype=torch.int32),
        zero=_declare_zero(form, partition, per_word, torch.int32),
        scale=declare_scale(form, partition),
        order=declare_order(form, partition, "weight_g_idx"),
    )


def declare_int8(form: Format, partition: LinearPartition) -> StoredTensors:
    """Creates numbers and zeros of one byte each."""
    return StoredTensors(
        weight=Parameter(*partition.slices("weight"), dtype=torch.int8),
        zero=_declare_zero(form, partition, 1, torch.int8),
        scale=declare_scale(form, partition),
        order=declare_order(form, partition, "weight_g_idx"),
    )


def _declare_zero(
    form: Format, partition: LinearPartition, per_item: int, dtype: torch.dtype
) -> Parameter | None:
    """Creates zeros [outputs / per_item, groups], unless the format is symmetric."""
    if form.symmetric:
        return None
    groups = form.num_groups(partition)
    return partition.whole(
        ("weight_zero_point",), lambda size: (-(-size // per_item), groups), dtype
    )


def decode_packed(form: Format, partition: LinearPartition, stored: StoredTensors) -> Numbers:
    """Unpacks numbers and zeros."""
    kept = within_words(partition.inputs, partition.num_inputs, WORD_BITS // form.bits)
    numbers = unpack(stored.weight.data, form.bits)[:, kept]
    scales = decode_scale(form, partition, stored.scale)
    if stored.zero is None:
        return numbers, scales, None
    zeros = [unpack(each.t(), form.bits).t() for each in stored.zero.parts()]
    return numbers, scales, partition.by_output(zeros)


def decode_int8(form: Format, partition: LinearPartition, stored: StoredTensors) -> Numbers:
    """Maps numbers and zeros from int8 to uint8."""
    numbers = _shifted(stored.weight.data)
    scales = decode_scale(form, partition, stored.scale)
    if stored.zero is None:
        return numbers, scales, None
    return numbers, scales, _shifted(partition.by_output(stored.zero.parts()))


def _shifted(numbers: torch.Tensor) -> torch.Tensor:
    """Maps int8 to uint8, -128 to 0."""
    return numbers.view(torch.uint8) ^ 0x80


def _group_of(fields: Fields, name: str) -> Fields | None:
    """Returns the group whose targets name the layer, else the group for all linear layers.

    Returns None without such a group.
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
    """Returns the method of a config group. Raises CheckpointError for an unsupported setting."""
    weights = group.nested("weights")
    form = group.text("format", fields.text("format"))
    bits = weights.integer("num_bits")
    kind = weights.text("type", "int")
    strategy = _strategy(weights)
    if form not in _FORMATS:
        raise fields.error("format", f"{form!r:.60} is not supported, only {', '.join(_FORMATS)}")
    inputs = group.nested("input_activations")
    input_bits = inputs.integer("num_bits") if inputs.has("num_bits") else 16
    scheme = f"compressed-tensors {form} W{bits}A{input_bits}"
    if kind == "float":
        if bits != 8 or form == PACKED:
            raise weights.error(
                "num_bits", f"{bits} of floating point is not supported in {form}, only 8"
            )
        return stored_fp8(f"{scheme} FP8", _block(weights, strategy), "weight_scale")
    if kind != "int" or form == "float-quantized":
        raise weights.error("type", f"{kind!r:.60} is not supported in {form}")
    has_one_scale = strategy == "tensor" and form != PACKED and weights.boolean("symmetric", True)
    if strategy not in ("channel", "group") and not has_one_scale:
        text = "only channel, group and, with symmetric int8, tensor"
        raise weights.error(
            "strategy", f"{strategy!r:.60} is not supported for integers in {form}, {text}"
        )
    if bits not in (4, 8):
        raise weights.error("num_bits", f"{bits} is not supported, only 4 and 8")
    order = dict(weights.items()).get("actorder")
    is_packed = form == PACKED
    return StoredLinearMethod(
        Format(
            scheme=scheme,
            declare=declare_packed if is_packed else declare_int8,
            decode=decode_packed if is_packed else decode_int8,
            group_size=weights.integer("group_size") if strategy == "group" else None,
            group_outputs=None if strategy == "tensor" else 1,
            bits=bits if is_packed else 8,
            symmetric=weights.boolean("symmetric", True),
            act_order=order in (True, "group", "dynamic"),
        )
    )


def _strategy(weights: Fields) -> str:
    return weights.text("strategy", "group" if weights.has("group_size") else "tensor")


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
