"""Configures this process's memory allocator."""

import ctypes
from typing import Final

_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3
_MMAP_BYTES: Final = 32 << 20  # the largest value that glibc accepts
_TRIM_BYTES: Final = 256 << 20


def keep_freed_memory() -> None:
    """Lets glibc keep up to 256 MiB of freed memory for later allocations. Does nothing without glibc.

    By default it returns megabytes to the kernel at once, and to get them again page by page costs several times what
    copying into them does: with frames of 1 MiB, gRPC alone is at 1.0 GB/s, with this setting at 2.9 GB/s."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _MMAP_BYTES)
        mallopt(_M_TRIM_THRESHOLD, _TRIM_BYTES)
