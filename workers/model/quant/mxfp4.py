"""Weights in MXFP4 (OCP Microscaling Formats 1.0): blocks of 32 numbers of 4 bits that share an
exponent.
"""

from typing import Final

import torch

BLOCK: Final = 32  # numbers
BLOCK_BYTES: Final = 16

_VALUES: Final = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_BIAS: Final = 127


def dequantise(blocks: torch.Tensor, exponents: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Maps blocks [..., num_blocks, 16] and exponents [..., num_blocks], both uint8, to [...,
    num_blocks * 32].
    """
    table = torch.tensor(
        [*_VALUES, *(-value for value in _VALUES)], dtype=torch.float32, device=blocks.device
    )
    halves = torch.stack(
        (blocks & 0x0F, blocks >> 4), dim=-1
    ).int()  # the lower half of a byte comes first
    numbers = table[halves].flatten(-2)  # [..., num_blocks, 32]
    return torch.ldexp(numbers, exponents.int()[..., None] - _BIAS).flatten(-2).to(dtype)
