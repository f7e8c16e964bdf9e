"""Reads weights in FP8 (E4M3, arXiv 2209.05433), blocks of which share a scale."""

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any, Final

import torch

from ..module import Parameter
from .base import LinearMethod, LinearPartition
from .fp8 import Fp8LinearMethod
from .integer import IntegerLinearMethod
from .rounded import Numbers
from .stored import (
    Format,
    StoredLinearMethod,
    StoredTensors,
    declare_scale,
    decode_scale,
    quantization_fields,
)
from .targets import is_plain
from .unquantized import UnquantizedLinearMethod

FP8: Final = "fp8"  # quant_method


def fp8_method(quantization: Mapping[str, Any], name: str) -> LinearMethod:
    """Returns the method of a layer in FP8. Raises CheckpointError.

    With weight_block_size the checkpoint's format is the one of DeepSeek-V3 (arXiv 2412.19437) and
    Qwen3, else the one of AutoFP8. A quant_method without settings is not from a checkpoint: plain
    weights are rounded when they are loaded.
    """
    if quantization.keys() == {"quant_method"}:
        return IntegerLinearMethod.for_head() if name == "lm_head" else Fp8LinearMethod()
    fields = quantization_fields(quantization)
    block = fields.integers("weight_block_size")
    if block and (len(block) != 2 or not all(block)):
        raise fields.error(
            "weight_block_size", "must be two integers above 0, or null for one scale of a map"
        )
    if (kind := fields.text("fmt", "e4m3")) != "e4m3":
        raise fields.error("fmt", f"{kind!r:.60} is not supported, only 'e4m3'")
    if is_plain(fields, name):
        return UnquantizedLinearMethod()
    if not block:
        return stored_fp8("FP8", (None, None), "weight_scale", "weight_scale_inv")
    return stored_fp8("FP8", (block[0], block[1]), "weight_scale_inv")


def fbgemm_fp8_method(quantization: Mapping[str, Any], name: str) -> LinearMethod:
    """Returns the method of a layer in FBGEMM's format, with a scale for each output.

    Llama 3.1 405B uses it. Raises CheckpointError.
    """
    if is_plain(quantization_fields(quantization), name):
        return UnquantizedLinearMethod()
    return stored_fp8("FP8", (1, None), "weight_scale")


def modelopt_method(quantization: Mapping[str, Any], name: str) -> LinearMethod:
    """Returns the method of a layer in the FP8 format of NVIDIA's ModelOpt, one scale for each map.

    Raises CheckpointError.
    """
    fields = quantization_fields(quantization)
    if (algorithm := fields.text("quant_algo")) != "FP8":
        raise fields.error("quant_algo", f"{algorithm!r:.60} is not supported, only 'FP8'")
    lists = [field for field in ("exclude_modules", "ignore") if fields.has(field)]
    excluded = [each for field in lists for each in fields.texts(field)]
    if name == "lm_head" or any(
        fnmatchcase(name, each) or name.startswith(f"{each}.") for each in excluded
    ):
        return UnquantizedLinearMethod()
    return stored_fp8("ModelOpt FP8", (None, None), "weight_scale")


Block = tuple[int | None, int | None]
"""The numbers of outputs and inputs that share a scale; None: all."""


def stored_fp8(scheme: str, block: Block, *scale_names: str) -> StoredLinearMethod:
    """Returns the method of a weight in FP8; checkpoints use one of the `scale_names`."""
    outputs, inputs = block
    return StoredLinearMethod(
        Format(
            scheme=scheme,
            declare=declare_fp8,
            decode=decode_fp8,
            group_size=inputs,
            group_outputs=outputs,
            is_float=True,
            scale_names=scale_names,
        )
    )


def declare_fp8(form: Format, partition: LinearPartition) -> StoredTensors:
    """Creates the weight [outputs, inputs] and the scales of its blocks."""
    return StoredTensors(
        weight=Parameter(*partition.slices("weight"), dtype=torch.float8_e4m3fn),
        zero=None,
        scale=declare_scale(form, partition),
        order=None,
    )


def decode_fp8(form: Format, partition: LinearPartition, stored: StoredTensors) -> Numbers:
    """Returns the numbers as they are stored."""
    return stored.weight.data, decode_scale(form, partition, stored.scale), None
