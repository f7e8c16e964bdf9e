"""Copies between host and device memory, in order with the device's work and without waiting."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
import torch

DTYPES: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
"""The dtypes of weights, activations and KV cache, by the names that configs use."""

FP8_GPUS: Final = "a GPU of compute capability 8.9 or later (L40S, H100)"

Ints = np.ndarray[Any, np.dtype[np.integer[Any]]]  # one-dimensional


def enter_device(device: torch.device | str) -> None:
    """Makes a GPU the calling thread's current device.

    Otherwise the thread allocates and launches on GPU 0. Call it in each thread that uses the
    device. Does nothing on CPUs, or for a device without an index.
    """
    device = torch.device(device)
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)


def check_gpu(device: str) -> None:
    """Raises ValueError, a one-line message, if `device` is a GPU and this process can use none."""
    if device == "cpu" or torch.cuda.is_available():
        return
    if torch.version.cuda is None:
        reason = "torch has no CUDA; install it from PyPI, without the index for CPUs"
    else:
        reason = "torch finds no GPU; check the driver and CUDA_VISIBLE_DEVICES"
    raise ValueError(f"device: {device} cannot be used: {reason}")


def can_compute_fp8(device: torch.device) -> bool:
    """Returns True if the device has instructions for E4M3, or is no GPU."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= (8, 9)


def to_device(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Returns the tensor on the device.

    A copy to a GPU is queued behind the running work; a plain copy would wait for it.
    """
    if device.type == "cuda":
        return host.pin_memory().to(device, non_blocking=True)
    return host.to(device)


def copy_to_device(arrays: Sequence[Ints], device: torch.device) -> list[torch.Tensor]:
    """Copies integer arrays to int32 tensors on the device, in one transfer."""
    if device.type == "cpu":
        return [torch.from_numpy(array.astype(np.int32, copy=False)) for array in arrays]
    # Each array begins at a multiple of 16 bytes. For other pointers Triton would compile its
    # kernels again.
    begins = [0, *itertools.accumulate(-(-len(array) // 4) * 4 for array in arrays)]
    host = np.zeros(begins[-1], np.int32)
    for array, begin in zip(arrays, begins, strict=False):
        host[begin : begin + len(array)] = array
    flat = to_device(torch.from_numpy(host), device)
    return [flat[begin : begin + len(array)] for array, begin in zip(arrays, begins, strict=False)]


def column(values: Sequence[float], like: torch.Tensor) -> torch.Tensor:
    """Returns float32 [num_rows, 1] on the device of `like`."""
    return to_device(torch.tensor(values, dtype=torch.float32), like.device)[:, None]


def indices(values: Sequence[int], device: torch.device) -> torch.Tensor:
    """Returns int64 [len(values)] on the device."""
    return to_device(torch.tensor(values, dtype=torch.int64), device)


def take_rows(x: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
    """Returns these rows of x.

    If there are as many as x has, they must be all of its rows in order, and x itself is returned.
    """
    return x if len(rows) == len(x) else x[indices(rows, x.device)]


def to_host(*tensors: torch.Tensor) -> Callable[[], list[Any]]:
    """Queues a copy of tensors to the host.

    The result, when called, waits for the copy and all work queued before it. It returns the
    tensors as lists of numbers.
    """
    if not tensors[0].is_cuda:
        return lambda: [tensor.tolist() for tensor in tensors]
    hosts = [torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True) for tensor in tensors]
    for host, tensor in zip(hosts, tensors, strict=True):
        host.copy_(tensor, non_blocking=True)
    done = torch.cuda.Event()  # type: ignore[no-untyped-call]
    done.record()

    def wait() -> list[Any]:
        done.synchronize()
        return [host.tolist() for host in hosts]

    return wait
