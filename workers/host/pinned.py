"""Pins host memory, so that a GPU copies from and to it without the processor.

torch's own pinned memory is not used for large buffers: its allocator rounds each one up to the
next power of two, so that 40 GiB lock 64.
"""

import mmap
from typing import Any, Final

import torch

_PORTABLE: Final = 1  # cudaHostRegisterPortable: pinned for all devices of the process


def pinned_memory(num_bytes: int) -> torch.Tensor:
    """Returns zeros in pinned host memory, uint8 [num_bytes], for `unpin`.

    Raises MemoryError if CUDA cannot pin them. All pages are allocated.
    """
    pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory = torch.frombuffer(pages, dtype=torch.uint8)
    error = int(_cudart().cudaHostRegister(memory.data_ptr(), num_bytes, _PORTABLE))
    if error:
        raise MemoryError(f"cudaHostRegister of {num_bytes} bytes: CUDA error {error}")
    return memory


def unpin(memory: torch.Tensor, device: torch.device) -> None:
    """Unpins the memory of `pinned_memory` after the copies of the device that are in progress."""
    torch.cuda.synchronize(device)
    _cudart().cudaHostUnregister(memory.data_ptr())


def _cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]
