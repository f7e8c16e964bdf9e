"""Reads tensors from a checked safetensors folder, one at a time, in the wanted dtype and place.

Knows nothing of the model's structure. Each read can take a slice, so that a tensor-parallel rank reads only its part.
"""

import math
import mmap
from pathlib import Path

import torch
from safetensors import safe_open

from .checkpoint import tensor_shards

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class Weights:
    """The tensors of one folder."""

    def __init__(self, folder: Path, *, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype = dtype
        self.device = device
        self._shards = tensor_shards(folder)

    def has(self, name: str) -> bool:
        return name in self._shards

    def take(self, name: str, *slices: slice) -> torch.Tensor:
        """Copies one tensor, or the given slice of its first dimensions, out of its shard.

        Raises CheckpointError (at construction) if there are no weights, KeyError if `name` is not among them."""
        return self.stack((name, *slices))

    def stack(self, *parts: tuple[str, *tuple[slice, ...]]) -> torch.Tensor:
        """The slices of several tensors, each as `take` takes it, one below the other."""
        stored = [self._stored(*part) for part in parts]
        sizes = [len(part) for part in stored]
        # A copy, even where nothing changes: a tensor over the mapped file would die with a truncated file.
        stacked = _empty((sum(sizes), *stored[0].shape[1:]), self.dtype, self.device)
        for place, part in zip(torch.split(stacked, sizes), stored, strict=True):
            place.copy_(part)
        return stacked

    def _stored(self, name: str, *slices: slice) -> torch.Tensor:
        """As the shard has it, over a mapping that ends with the tensor: what has been read through one counts as
        memory of the process as long as it is there."""
        with safe_open(self._shards[name], framework="pt") as file:
            stored: torch.Tensor = file.get_slice(name)[slices or (slice(None),)]
            return stored


def _empty(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """On CPUs in memory that goes back to the system with the tensor: much of what is read is packed and then dropped,
    and the holes that it would leave in the heap were up to a third of a rank's memory."""
    if device.type != "cpu":
        return torch.empty(shape, dtype=dtype, device=device)
    num_bytes = math.prod(shape) * dtype.itemsize
    memory = mmap.mmap(-1, max(num_bytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=torch.uint8)[:num_bytes].view(dtype).view(shape)
