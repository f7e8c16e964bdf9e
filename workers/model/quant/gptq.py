"""Reads weights that GPTQModel and AutoGPTQ (arXiv 2210.17323) or AutoAWQ (arXiv 2306.00978) wrote.

Both formats have scales and zeros [groups, outputs]. GPTQ packs the numbers along the inputs, AWQ
along the outputs; both pack the zeros along the outputs.
"""

from collections.abc import Callable, Mapping
from typing import Any, Final

import torch

from ..config import Fields
from ..module import Parameter, WeightSlice
from .base import LinearMethod, LinearPartition
from .rounded import Numbers
from .stored import (
    WORD_BITS,
    Decode,
    Format,
    StoredLinearMethod,
    StoredTensors,
    declare_order,
    quantization_fields,
    unpack,
    within_words,
    word_span,
)
from .targets import is_plain, matches
from .unquantized import UnquantizedLinearMethod

# The place of each output in a word of AWQ's GEMM packing.
_AWQ_ORDER: Final = [0, 4, 1, 5, 2, 6, 3, 7]


def gptq_method(quantization: Mapping[str, Any], name: str) -> LinearMethod:
    """Returns the method of a layer of a GPTQ checkpoint. Raises CheckpointError."""
    fields = quantization_fields(quantization)
    own = _own_settings(fields, name)
    if own is None or _is_left_out(fields, name):
        return UnquantizedLinearMethod()
    fields = quantization_fields({**quantization, **own})
    bits = _bits(fields, (4, 8))
    group_size = _group_size(fields)
    version = fields.text("checkpoint_format", "gptq")
    if version not in _GPTQ_DECODERS:
        raise fields.error(
            "checkpoint_format",
            f"{version!r:.60} is not supported, only {', '.join(_GPTQ_DECODERS)}",
        )
    symmetric = fields.boolean("sym", True)
    act_order = fields.boolean("desc_act", False)
    if name == "lm_head" and not fields.boolean("lm_head", False):
        return UnquantizedLinearMethod()
    return StoredLinearMethod(
        Format(
            scheme="GPTQ",
            declare=declare_gptq,
            decode=_GPTQ_DECODERS[version],
            group_size=group_size,
            bits=bits,
            symmetric=symmetric,
            act_order=act_order,
        )
    )


def awq_method(quantization: Mapping[str, Any], name: str) -> LinearMethod:
    """Returns the method of a layer of an AWQ checkpoint for GEMM. Raises CheckpointError."""
    fields = quantization_fields(quantization)
    bits = _bits(fields, (4,))
    group_size = _group_size(fields)
    if (version := fields.text("version", "gemm").lower()) != "gemm":
        raise fields.error("version", f"{version!r:.60} is not supported, only 'gemm'")
    symmetric = not fields.boolean("zero_point", True)
    if is_plain(fields, name):
        return UnquantizedLinearMethod()
    return StoredLinearMethod(
        Format(
            scheme="AWQ",
            declare=declare_awq,
            decode=decode_awq,
            group_size=group_size,
            bits=bits,
            symmetric=symmetric,
        )
    )


def declare_gptq(form: Format, partition: LinearPartition) -> StoredTensors:
    """Creates the parameters of GPTQ, whose qweight is [words of inputs, outputs]."""
    inputs = partition.num_inputs
    per_word = WORD_BITS // form.bits
    words = -(-inputs // per_word)
    span = word_span(partition.inputs, inputs, per_word)
    parts = [
        WeightSlice(f"{name}.qweight", (words, size), (span, kept))
        for name, size, kept in partition.outputs
    ]
    return _declare_transposed(form, partition, parts)


def declare_awq(form: Format, partition: LinearPartition) -> StoredTensors:
    """Creates the parameters of AWQ, whose qweight is [inputs, words of outputs]."""
    per_word = WORD_BITS // form.bits
    parts = [
        WeightSlice(
            f"{name}.qweight",
            (partition.num_inputs, -(-size // per_word)),
            (partition.inputs, word_span(kept, size, per_word)),
        )
        for name, size, kept in partition.outputs
    ]
    return _declare_transposed(form, partition, parts)


def _declare_transposed(
    form: Format, partition: LinearPartition, weight: list[WeightSlice]
) -> StoredTensors:
    groups = form.num_groups(partition)
    per_word = WORD_BITS // form.bits
    return StoredTensors(
        weight=Parameter(*weight, dtype=torch.int32, dim=1),
        zero=partition.whole(
            ("qzeros",), lambda size: (groups, -(-size // per_word)), torch.int32, dim=1
        ),
        scale=partition.whole(("scales",), lambda size: (groups, size), torch.float32, dim=1),
        order=declare_order(form, partition, "g_idx"),
    )


def decode_gptq(form: Format, partition: LinearPartition, stored: StoredTensors) -> Numbers:
    """Decodes the first version of GPTQ, which stores each zero less one."""
    numbers, scales, zeros = decode_gptq_v2(form, partition, stored)
    assert zeros is not None
    return numbers, scales, zeros + 1 & 2**form.bits - 1


def decode_gptq_v2(form: Format, partition: LinearPartition, stored: StoredTensors) -> Numbers:
    """Decodes the second version of GPTQ, which stores each zero as it is."""
    kept = within_words(partition.inputs, partition.num_inputs, WORD_BITS // form.bits)
    numbers = unpack(stored.weight.data.t(), form.bits)[:, kept]
    return numbers, *_decode_terms(partition, stored, lambda words: unpack(words, form.bits))


def decode_awq(form: Format, partition: LinearPartition, stored: StoredTensors) -> Numbers:
    """Decodes AWQ, which reorders the outputs of a word."""
    per_word = WORD_BITS // form.bits
    rows = [
        _unpack_awq(words)[:, within_words(kept, size, per_word)]
        for words, (_, size, kept) in zip(stored.weight.parts(), partition.outputs, strict=True)
    ]
    numbers = torch.cat(rows, dim=1).t().contiguous()
    return numbers, *_decode_terms(partition, stored, _unpack_awq)


_GPTQ_DECODERS: Final[dict[str, Decode]] = {"gptq": decode_gptq, "gptq_v2": decode_gptq_v2}


def _decode_terms(
    partition: LinearPartition,
    stored: StoredTensors,
    unpack_words: Callable[[torch.Tensor], torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the scales and zeros [outputs, groups]."""
    assert stored.zero is not None
    scales = partition.by_output([each.t() for each in stored.scale.parts()])
    zeros = partition.by_output([unpack_words(each).t() for each in stored.zero.parts()])
    return scales, zeros


def _unpack_awq(words: torch.Tensor) -> torch.Tensor:
    """Maps words [rows, words of outputs] to [rows, outputs]."""
    numbers = unpack(words, 4)
    return numbers.view(len(words), -1, len(_AWQ_ORDER))[:, :, _AWQ_ORDER].flatten(1)


def _own_settings(fields: Fields, name: str) -> dict[str, Any] | None:
    """Returns the settings of one layer in `dynamic`; None if its weight is plain.

    As in GPTQModel, the first pattern that matches the beginning of the layer's name counts. A
    pattern after `-:` excludes layers, and `+:` may precede the others. Raises CheckpointError.
    """
    for pattern, settings in fields.mapping("dynamic").items():
        if matches(fields, "dynamic", f"re:{pattern.removeprefix('-:').removeprefix('+:')}", name):
            if pattern.startswith("-:"):
                return None
            if not isinstance(settings, dict):
                raise fields.error("dynamic", f"{pattern!r:.60}: must be an object")
            return settings
    return {}


def _is_left_out(fields: Fields, name: str) -> bool:
    """Returns True if modules_in_block_to_quantize does not list the layer by an end of its name.

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
    """Returns the bits of a number, which AWQ's own files call w_bit."""
    bits = fields.integer("bits" if fields.has("bits") or not fields.has("w_bit") else "w_bit")
    if bits not in supported:
        raise fields.error(
            "bits", f"{bits} is not supported, only {' and '.join(map(str, supported))}"
        )
    return bits


def _group_size(fields: Fields) -> int | None:
    """Returns the inputs of a group, which AWQ's own files call q_group_size.

    The files have -1 for all inputs; this returns None for it.
    """
    name = "group_size"
    if fields.has("q_group_size") and not fields.has(name):
        name = "q_group_size"
    size = fields.integer(name, minimum=-1)
    if size == 0:
        raise fields.error("group_size", "must be -1 or above 0")
    return None if size < 0 else size
