"""Weights in FP8 (E4M3, arXiv 2209.05433), blocks of which share a scale."""

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any, Final

import torch

from ..config import Fields
from ..kernels.c import cpu
from ..module import Parameter
from .base import LinearMethod, LinearPartition
from .integer import MAX_GROUP, IntegerLinearMethod
from .rounded import Numbers, RoundedLinearMethod, finite_scales, largest_group
from .stored import StoredLinearMethod, is_plain, largest_run
from .unquantized import UnquantizedLinearMethod

FP8: Final = "fp8"  # quant_method
_ROWS: Final = 1024  # that are restored at once
_LARGEST: Final = 448.0  # number
_SCALE_BYTES: Final = 4


Block = tuple[int | None, int | None]
"""Outputs and inputs that share a scale; None: all."""


class Fp8LinearMethod(RoundedLinearMethod):
    """Keeps numbers in FP8. Where there is a kernel, x is taken as it is: numbers become bfloat16,
    which holds each of them, as they are multiplied.
    """

    def __init__(self) -> None:
        super().__init__(bits=8, term_bytes=_SCALE_BYTES)

    @classmethod
    def for_layer(cls, quantization: Mapping[str, Any], name: str) -> RoundedLinearMethod:
        """See `LinearMethod.for_layer`."""
        return IntegerLinearMethod.for_head() if name == "lm_head" else cls()

    def group_size(self, inputs: int) -> int:
        """See `RoundedLinearMethod.group_size`."""
        return largest_group(inputs, MAX_GROUP, 2)

    def can_multiply(self, inputs: int, group_size: int) -> bool:
        """See `RoundedLinearMethod.can_multiply`."""
        return cpu.can_multiply_fp8(inputs, group_size)

    def round(self, weight: torch.Tensor, group_size: int) -> Numbers:
        """See `RoundedLinearMethod.round`. The scale of a group in which a weight is not finite is
        NaN.
        """
        groups = weight.to(torch.float32, copy=True).view(
            len(weight), -1, group_size
        )  # [outputs, groups, group_size]
        low, high = groups.aminmax(dim=-1)
        scales = finite_scales(torch.maximum(-low, high) / _LARGEST)
        groups.div_(scales[..., None]).clamp_(-_LARGEST, _LARGEST).nan_to_num_()
        return groups.to(torch.float8_e4m3fn).flatten(1).view(torch.uint8), scales, None

    def restore(self, numbers: Numbers) -> torch.Tensor:
        """See `RoundedLinearMethod.restore`."""
        rounded, scales, _ = numbers
        groups = (
            rounded.view(torch.float8_e4m3fn).float().view(*scales.shape, -1)
        )  # [outputs, groups, group_size]
        return (groups * scales[..., None]).flatten(1)

    def pack(self, numbers: Numbers) -> cpu.PackedNumbers:
        """See `RoundedLinearMethod.pack`."""
        rounded, scales, _ = numbers
        return *cpu.pack_linear_fp8(rounded, scales), None

    def multiply(
        self,
        x: torch.Tensor,
        bias: torch.Tensor | None = None,
        residual: torch.Tensor | None = None,
        activation: str | None = None,
    ) -> torch.Tensor:
        """See `RoundedLinearMethod.multiply`."""
        packed, scales, _ = self._packed
        return cpu.linear(x, packed, self._num_outputs, bias, residual, activation, scales)


class StoredFp8LinearMethod(StoredLinearMethod):
    """Computes with W = number * scale."""

    def __init__(self, scheme: str, block: Block, *scale_names: str) -> None:
        """`scale_names` are those that checkpoints have for the tensor of scales."""
        outputs, inputs = block
        blocks = (
            f"blocks of {outputs} x {inputs}"
            if inputs
            else f"a scale for each {'output' if outputs else 'map'}"
        )
        self._text, self._block, self._scale_names = f"{scheme}, {blocks}", block, scale_names

    @classmethod
    def for_layer(cls, quantization: Mapping[str, Any], name: str) -> LinearMethod:
        """See `LinearMethod.for_layer`; with weight_block_size the format is that of DeepSeek-V3
        (arXiv 2412.19437) and Qwen3, else that of AutoFP8. A name alone is not from a checkpoint:
        plain weights are rounded.
        """
        if quantization.keys() == {"quant_method"}:
            return Fp8LinearMethod.for_layer(quantization, name)
        fields = Fields("config.json", dict(quantization), "quantization_config.")
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
            return cls("FP8", (None, None), "weight_scale", "weight_scale_inv")
        return cls("FP8", (block[0], block[1]), "weight_scale_inv")

    def declare(self, partition: LinearPartition) -> None:
        """See `StoredLinearMethod.declare`."""
        self.weight = Parameter(*partition.slices("weight"), dtype=torch.float8_e4m3fn)
        outputs, inputs = self._block
        columns = -(-partition.num_inputs // (inputs or partition.num_inputs))
        if outputs is None:
            self.scale = self.whole(self._scale_names, lambda size: (1,), torch.float32)
        else:
            self.scale = self.whole(
                self._scale_names, lambda size: (-(-size // outputs), columns), torch.float32
            )

    def make_method(self, bias: torch.Tensor | None) -> LinearMethod:
        """See `StoredLinearMethod.make_method`."""
        unit, weight = self.kernel_group(), self.weight.data
        if unit is None or weight.device.type != "cpu":
            return super().make_method(bias)
        scales = self._scales()[:, self.groups(self._block[1])[::unit]]
        return Fp8LinearMethod().take(
            (weight.view(torch.uint8), scales, None), bias, gated=self._partition.gated
        )

    def restore(self) -> torch.Tensor:
        """See `StoredLinearMethod.restore`."""
        scales, columns = self._scales(), self.groups(self._block[1])
        restored = torch.empty(
            self.weight.data.shape, dtype=self._dtype, device=self.weight.data.device
        )
        for first in range(0, len(restored), _ROWS):
            rows = slice(first, first + _ROWS)
            restored[rows] = self.weight.data[rows].float() * scales[rows][:, columns]
        return restored

    def kept_bytes(self) -> int:
        """See `StoredLinearMethod.kept_bytes`."""
        if (unit := self.kernel_group()) is None:
            return super().kept_bytes()
        outputs, inputs = self._partition.local_shape
        return outputs * (inputs + inputs // unit * _SCALE_BYTES)

    def scheme(self) -> str:
        """See `LinearMethod.scheme`."""
        return f"{self._text}, {super().scheme()}"

    def kernel_group(self) -> int | None:
        """See `StoredLinearMethod.kernel_group`."""
        inputs, unit = self._partition.local_shape[1], largest_run(self.groups(self._block[1]))
        return (
            unit if self._dtype is torch.bfloat16 and cpu.can_multiply_fp8(inputs, unit) else None
        )

    def _scales(self) -> torch.Tensor:
        """Returns the scales of each output kept, [outputs, blocks of inputs]."""
        outputs = self._block[0] or max(self._partition.maps.values())
        return self.by_output([each.view(len(each), -1) for each in self.scale.parts()], outputs)


class FbgemmFp8LinearMethod(StoredFp8LinearMethod):
    """Reads the format of FBGEMM, a scale for each output, as Llama 3.1 405B has it."""

    @classmethod
    def for_layer(cls, quantization: Mapping[str, Any], name: str) -> LinearMethod:
        """See `LinearMethod.for_layer`."""
        fields = Fields("config.json", dict(quantization), "quantization_config.")
        return (
            UnquantizedLinearMethod()
            if is_plain(fields, name)
            else cls("FP8", (1, None), "weight_scale")
        )


class ModelOptLinearMethod(StoredFp8LinearMethod):
    """Reads the FP8 format of NVIDIA's ModelOpt, a scale for each map."""

    @classmethod
    def for_layer(cls, quantization: Mapping[str, Any], name: str) -> LinearMethod:
        """See `LinearMethod.for_layer`."""
        fields = Fields("config.json", dict(quantization), "quantization_config.")
        if (algorithm := fields.text("quant_algo")) != "FP8":
            raise fields.error("quant_algo", f"{algorithm!r:.60} is not supported, only 'FP8'")
        lists = [field for field in ("exclude_modules", "ignore") if fields.has(field)]
        excluded = [each for field in lists for each in fields.texts(field)]
        if name == "lm_head" or any(
            fnmatchcase(name, each) or name.startswith(f"{each}.") for each in excluded
        ):
            return UnquantizedLinearMethod()
        return cls("ModelOpt FP8", (None, None), "weight_scale")
