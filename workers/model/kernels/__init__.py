"""Selects kernels: C on CPUs (folder `c`), Triton on GPUs (folder `triton`).

Without kernels the model runs in plain torch, which is also the reference of the kernels' tests.
"""

import importlib
import importlib.util
from functools import cache
from types import ModuleType
from typing import Protocol, cast

import torch

from .c import cpu


class Kernels(Protocol):
    """Defines the common kernels of all devices; see `c.cpu` and `triton.elementwise`."""

    def rms_norm(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        epsilon: float,
        offset: float = 0.0,
        residual: torch.Tensor | None = None,
    ) -> torch.Tensor: ...

    def silu_mul(self, x: torch.Tensor) -> torch.Tensor: ...

    def gelu_mul(self, x: torch.Tensor) -> torch.Tensor: ...

    def rotate(self, heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor: ...


def of(tensor: torch.Tensor) -> Kernels | None:
    """Returns the kernels for tensors of this device and dtype, or None."""
    if tensor.is_cuda:
        return cast(Kernels | None, _gpu())
    return cast(Kernels, cpu) if cpu.usable(tensor) else None


def on_gpu(tensor: torch.Tensor) -> bool:
    """Returns True if the kernels for this tensor are the Triton kernels."""
    return of(tensor) not in (None, cpu)


@cache
def _gpu() -> ModuleType | None:
    """Returns the Triton kernels, or None if Triton is not installed (torch depends on it).

    Imported only for GPUs: the import takes a second, and CPU kernels were a tenth slower in a
    process with Triton.
    """
    if not importlib.util.find_spec("triton"):
        return None
    return importlib.import_module(f"{__name__}.triton.elementwise")
