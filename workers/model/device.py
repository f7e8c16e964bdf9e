"""Host memory to device memory and back, in the order of the device's work and without waiting for it."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

Ints = np.ndarray[Any, np.dtype[np.integer[Any]]]  # one-dimensional


def to_device(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The tensor on the device. A copy to a GPU is queued behind what runs there: a plain one would wait for it."""
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host.to(device)


def ship(arrays: Sequence[Ints], device: torch.device) -> list[torch.Tensor]:
    """Integer arrays to int32 tensors on the device, in one copy."""
    if device.type == "cpu":
        return [torch.from_numpy(array.astype(np.int32, copy=False)) for array in arrays]
    # Each begins at a multiple of 16 bytes: for pointers that do not, Triton would compile its kernels anew.
    begins = [0, *itertools.accumulate(-(-len(array) // 4) * 4 for array in arrays)]
    host = np.zeros(begins[-1], np.int32)
    for array, begin in zip(arrays, begins, strict=False):
        host[begin : begin + len(array)] = array
    flat = to_device(torch.from_numpy(host), device)
    return [flat[begin : begin + len(array)] for array, begin in zip(arrays, begins, strict=False)]


def to_host(tokens: torch.Tensor) -> Callable[[], list[int]]:
    """Queues the copy of tokens [n]; the result waits for it, and for all work queued before it."""
    if not tokens.is_cuda:
        return tokens.tolist
    host = torch.empty(tokens.shape, dtype=tokens.dtype, pin_memory=True)
    host.copy_(tokens, non_blocking=True)
    done = torch.cuda.Event()  # type: ignore[no-untyped-call]
    done.record()

    def wait() -> list[int]:
        done.synchronize()
        values: list[int] = host.tolist()
        return values

    return wait
