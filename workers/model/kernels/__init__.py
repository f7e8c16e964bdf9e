"""Kernels of our own: C on CPUs (`cpu`), Triton on GPUs (`gpu`).

Where there are none the model runs in plain torch, which is also what tests hold the kernels against."""

import importlib
import importlib.util
from functools import cache
from types import ModuleType
from typing import Protocol, cast

import torch

from . import cpu


class Kernels(Protocol):
    """What there is on every device that has kernels; tensors as `cpu` and `gpu` say."""

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor: ...

    def silu_mul(self, x: torch.Tensor) -> torch.Tensor: ...

    def rotate(self, heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None: ...


def of(tensor: torch.Tensor) -> Kernels | None:
    """The kernels for tensors of this device and dtype, if there are any."""
    if tensor.is_cuda:
        return cast(Kernels | None, _gpu())
    return cast(Kernels, cpu) if cpu.usable(tensor) else None


def on_gpu(tensor: torch.Tensor) -> bool:
    """Whether the kernels for this tensor are those of `gpu`."""
    return of(tensor) not in (None, cpu)


@cache
def _gpu() -> ModuleType | None:
    """`gpu`, if there is Triton, which torch brings along where it can use it. Only imported for GPUs: it takes a
    second, and with it in the process the CPU kernels were a tenth slower."""
    return importlib.import_module(f"{__name__}.gpu") if importlib.util.find_spec("triton") else None
