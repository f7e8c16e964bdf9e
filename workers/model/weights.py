"""Reads tensors from a checked safetensors folder, one at a time, in the wanted dtype and place.

Knows nothing of the model's structure. Each read can take a slice, so that a tensor-parallel rank reads only its part.
"""

from pathlib import Path

import torch
from safetensors import safe_open

from .checkpoint import tensor_shards

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class Weights:
    """The tensors of one folder. Hold it only while loading: it keeps the shards mapped."""

    def __init__(self, folder: Path, *, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype = dtype
        self.device = device
        self._shards = tensor_shards(folder)
        self._files = {path: safe_open(path, framework="pt") for path in set(self._shards.values())}

    def has(self, name: str) -> bool:
        return name in self._shards

    def take(self, name: str, *slices: slice) -> torch.Tensor:
        """Copies one tensor, or the given slice of its first dimensions, out of its shard.

        Raises CheckpointError (at construction) if there are no weights, KeyError if `name` is not among them."""
        file = self._files[self._shards[name]]
        stored: torch.Tensor = file.get_slice(name)[slices or (slice(None),)]  # type: ignore[no-untyped-call]
        # A copy, even where nothing changes: a tensor over the mapped file would die with a truncated file.
        return torch.empty(stored.shape, dtype=self.dtype, device=self.device).copy_(stored)
