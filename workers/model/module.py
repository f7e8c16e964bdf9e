"""Defines trees of modules whose parameters know their place in a checkpoint.

A tree is built on torch's `meta` device, where tensors have shapes but no memory. The checkpoint
check, the memory plan and the loader all read names, shapes and slices from it. `torch.nn.Module`
is not used: its attribute lookup and call hooks cost about 0.25 ms in a decode step of 30 layers.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class WeightSlice:
    """Describes the part of one checkpoint tensor that a rank keeps."""

    name: str
    shape: tuple[int, ...]  # of the whole tensor
    slices: tuple[slice, ...] = ()  # of its first dimensions; the others are kept whole
    below: int | None = None  # its numbers must be at least 0 and below this
    other_names: tuple[str, ...] = ()  # alternative names in checkpoints

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Returns the shape of the part."""
        kept = [
            len(range(*taken.indices(size)))
            for taken, size in zip(self.slices, self.shape, strict=False)
        ]
        return (*kept, *self.shape[len(kept) :])


class Parameter:
    """Holds one tensor of a rank: slices of checkpoint tensors, concatenated along a dimension.

    `data` is on `meta` until the loader has read it.
    """

    def __init__(self, *slices: WeightSlice, dtype: torch.dtype, dim: int = 0) -> None:
        self.slices = slices
        self._dim = dim
        shape = list(slices[0].local_shape)
        if shape:
            shape[dim] = sum(part.local_shape[dim] for part in slices)
        self.data = torch.empty(shape, dtype=dtype, device="meta")
        self.num_bytes = self.data.nbytes  # bytes that stay in memory after loading

    def parts(self, data: torch.Tensor | None = None) -> tuple[torch.Tensor, ...]:
        """Splits `data`, or a tensor of its shape, into the slices."""
        data = self.data if data is None else data
        sizes = [part.local_shape[self._dim] for part in self.slices if part.shape]
        return torch.split(data, sizes, self._dim) if sizes else (data,)


class Module:
    """Holds parameters and other modules as attributes or in lists."""

    waits_for_device = False
    """True if computing on a GPU waits for a result, so that no CUDA graph can be captured."""

    def modules(self) -> Iterator["Module"]:
        """Yields all modules below this one in the order of attributes, then this one."""
        for value in list(vars(self).values()):
            for part in value if isinstance(value, list) else (value,):
                if isinstance(part, Module):
                    yield from part.modules()
        yield self

    def parameters(self) -> Iterator[Parameter]:
        """Yields the parameters of this module, without those of the modules below."""
        return (value for value in list(vars(self).values()) if isinstance(value, Parameter))

    def tensors(self) -> Iterator[torch.Tensor]:
        """Yields the tensors of this module, without those of the modules below."""
        for value in vars(self).values():
            for part in value if isinstance(value, tuple) else (value,):
                data = part.data if isinstance(part, Parameter) else part
                if isinstance(data, torch.Tensor):
                    yield data

    def process_after_load(self) -> None:
        """Runs once after the parameters of this module and of those below are loaded.

        It may convert this module's parameters to another form.
        """

    def saved_bytes(self) -> int:
        """Returns the bytes that `process_after_load` saves of the module's loaded parameters."""
        return 0


def all_parameters(tree: Module) -> list[Parameter]:
    """Returns the parameters of a whole tree; a shared one occurs once."""
    return list(
        {id(each): each for module in tree.modules() for each in module.parameters()}.values()
    )
