"""Shares a GPU's memory with other processes of the host by CUDA's interprocess handles.

The handles also open memory of devices that CUDA_VISIBLE_DEVICES hides from the other process. A
handle allows writes, so it must only reach trusted processes.
"""

from typing import Any, Final

import msgpack
import torch

_TYPES: Final = (bytes, int, int, bytes, int, bytes, bool)


def export_memory(memory: torch.Tensor) -> bytes:
    """Returns a description by which another process opens the storage of a tensor.

    The memory must exist for as long as other processes use it. Raises OSError if the device or the
    allocator cannot share it.
    """
    try:
        storage = memory.untyped_storage()
        _, *shared = storage._share_cuda_()  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        raise OSError(f"GPU memory cannot be shared: {_first_line(error)}") from error
    packed: bytes = msgpack.packb(shared)
    return packed


def open_memory(description: bytes, device: torch.device) -> torch.Tensor:
    """Returns another process's memory as uint8 [num_bytes], addressable from `device`.

    Raises OSError if the device cannot open it, such as without peer access between two devices,
    and ValueError for a description that `export_memory` did not make.
    """
    shared: Any = msgpack.unpackb(description)
    if not isinstance(shared, list) or tuple(map(type, shared)) != _TYPES:
        raise ValueError("GPU memory: fields or types of the description are wrong")
    try:
        # torch makes the current stream wait for the work that the owner has queued. Not the stream
        # of the steps: nothing is read before the owner says that it has written it.
        with torch.cuda.stream(torch.cuda.Stream(device)):  # type: ignore[no-untyped-call]
            storage = torch.UntypedStorage._new_shared_cuda(device.index or 0, *shared)
        return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)
    except RuntimeError as error:
        raise OSError(f"GPU memory cannot be opened: {_first_line(error)}") from error


def _first_line(error: RuntimeError) -> str:
    return str(error).partition("\n")[0]
