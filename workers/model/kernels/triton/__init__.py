"""Holds the Triton kernels for GPUs."""

from typing import Final

FP_FUSION: Final = True
"""The `enable_fp_fusion` of every launch: a product and a sum are rounded once.

Explicit, because the default of Triton 3.10 is another one. Workers with different versions of
Triton must compute the same bits with `numerics: exact`.
"""
