"""Holds what every layer of a tree is built with."""

from dataclasses import dataclass

import torch

from ..parallel import TensorParallel
from ..quant.base import LinearMethodOf


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildOptions:
    """Says how a model's tree is built."""

    dtype: torch.dtype  # that the model computes in
    tp: TensorParallel
    linear_method: LinearMethodOf
