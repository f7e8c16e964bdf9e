"""Weights in FP8 (E4M3, arXiv 2209.05433), blocks of which share a scale."""

from collections.abc import Mapping
from typing import Any, Final

import torch

from ..config import Fields
from ..module import Parameter
from .base import LinearMethod, LinearPartition
from .stored import StoredLinearMethod, is_plain
from .unquantized import UnquantizedLinearMethod

_ROWS: Final = 1024  # that are restored at once

Block = tuple[int | None, int | None]
"""Outputs and inputs that share a scale; None: all."""


class Fp8LinearMethod(StoredLinearMethod):
    """Computes with W = number * scale in the model's dtype: no CPU here multiplies FP8."""

    def __init__(self, scheme: str, block: Block, scale: str) -> None:
        """`scale` is the name of the tensor of scales."""
        outputs, inputs = block
        blocks = f"blocks of {outputs} x {inputs}" if inputs else f"a scale for each {'output' if outputs else 'map'}"
        self._text, self._block, self._scale_name = f"{scheme}, {blocks}", block, scale

    @classmethod
    def for_layer(cls, quantization: Mapping[str, Any], name: str) -> LinearMethod:
        """See `LinearMethod.for_layer`; the format is that of DeepSeek-V3 (arXiv 2412.19437) and Qwen3."""
        fields = Fields("config.json", dict(quantization), "quantization_config.")
        block = fields.integers("weight_block_size")
        if len(block) != 2 or not all(block):
            raise fields.error("weight_block_size", "must be two integers above 0: other scales are not supported")
        if (kind := fields.text("fmt", "e4m3")) != "e4m3":
            raise fields.error("fmt", f"{kind!r:.60} is not supported, only 'e4m3'")
        if is_plain(fields, name):
            return UnquantizedLinearMethod()
        return cls("FP8", (block[0], block[1]), "weight_scale_inv")

    def declare(self, partition: LinearPartition) -> None:
        """See `StoredLinearMethod.declare`."""
        self.weight = Parameter(*partition.slices("weight"), dtype=torch.float8_e4m3fn)
        outputs, inputs = self._block
        columns = -(-partition.num_inputs // (inputs or partition.num_inputs))
        if outputs is None:
            self.scale = self.whole(self._scale_name, lambda size: (1,), torch.float32)
        else:
            self.scale = self.whole(self._scale_name, lambda size: (-(-size // outputs), columns), torch.float32)

    def restore(self) -> torch.Tensor:
        """See `StoredLinearMethod.restore`."""
        outputs, inputs = self._block
        scales = [each.view(len(each), -1) for each in self.scale.parts()]
        by_output = self.by_output(scales, outputs or max(self._partition.maps.values()))
        begin, end, _ = self._partition.inputs.indices(self._partition.num_inputs)
        columns = torch.arange(begin, end) // (inputs or self._partition.num_inputs)
        restored = torch.empty(self.weight.data.shape, dtype=self._dtype, device=self.weight.data.device)
        for first in range(0, len(restored), _ROWS):
            rows = slice(first, first + _ROWS)
            restored[rows] = self.weight.data[rows].float() * by_output[rows][:, columns]
        return restored

    def scheme(self) -> str:
        """See `LinearMethod.scheme`."""
        return f"{self._text}, {super().scheme()}"
