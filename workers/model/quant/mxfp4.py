"""Decodes weights in MXFP4 (OCP Microscaling Formats 1.0).

A block of 32 numbers of 4 bits shares an exponent.
"""

from typing import Final

import torch

BLOCK: Final = 32  # numbers
BLOCK_BYTES: Final = 16
NAN: Final = 255  # as an exponent

_VALUES: Final = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_BIAS: Final = 127


def dequantize(blocks: torch.Tensor, exponents: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Maps blocks and exponents to numbers [..., num_blocks * 32].

    Blocks [..., num_blocks, 16] and exponents [..., num_blocks] are uint8.
    """
    values = [*_VALUES, *(-value for value in _VALUES)]
    table = torch.tensor(values, dtype=torch.float32, device=blocks.device)
    # The lower half of a byte comes first.
    halves = torch.stack((blocks & 0x0F, blocks >> 4), dim=-1).int()
    numbers = table[halves].flatten(-2)  # [..., num_blocks, 32]
    return torch.ldexp(numbers, exponents.int()[..., None] - _BIAS).flatten(-2).to(dtype)
