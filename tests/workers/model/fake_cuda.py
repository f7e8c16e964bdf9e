"""Runs the GPU path on torch's fake tensors, without a GPU and on the CPU build of torch.

FakeTensorMode computes the shapes, dtypes and devices of tensors, but no numbers. So within
`fake_cuda` a `ModelRunner` on the device "cuda" launches whole steps in milliseconds, and these
faults raise in the line that makes them:

- an operation on tensors of different devices (torch raises), a Triton kernel with a tensor that is
  not on the GPU (`WrongDevice`);
- a host sync: a number that leaves the device (`item`, `tolist`, a branch), a shape that depends on
  numbers (`nonzero`, a mask as index), or a copy between host and device that blocks because it
  lacks `non_blocking` or pinned memory (`HostSync`).

Numbers, the order of streams and events, and memory are not checked: a Triton kernel writes
nothing, events and streams do nothing (`stream_model` checks their order).

The CPU build of torch has no device guard for cuda, so the Python bindings of some methods (`to`,
`copy_`, indexing and others) fail before they reach the fake tensor. They are replaced by functions
that call the operation below the binding.
"""

import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from types import EllipsisType, SimpleNamespace
from typing import Any, Final

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.jit import KernelInterface

aten = torch.ops.aten

CAPABILITY: Final = (9, 0)
"""The compute capability of the fake GPU, an H100's."""

_NUMBERS_TO_HOST: Final = (
    "_local_scalar_dense",
    "bincount",
    "equal",
    "is_nonzero",
    "masked_select",
    "nonzero",
    "unique",
)

_INT64_MAX: Final = 2**63 - 1


class HostSync(AssertionError):
    """The host would wait for the device."""


class WrongDevice(AssertionError):
    """A Triton kernel would read host memory."""


class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Raises HostSync at operations that would wait; within `loading`, copies may wait."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.launched: set[str] = set()  # names of Triton kernels
        self._is_loading = False
        self._pinned: set[int] = set()  # addresses of the storages of pinned tensors

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Allows copies that wait, as while weights are loaded."""
        self._is_loading = True
        try:
            yield
        finally:
            self._is_loading = False

    def __torch_dispatch__(
        self,
        func: Any,
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "aten":
            # In inference mode, operations that consist of others arrive whole.
            with self:
                whole = func.decompose(*args, **kwargs)
            if whole is not NotImplemented:
                return whole
        name = func.name().removeprefix("aten::").partition(".")[0]
        on_gpu = any(isinstance(each, torch.Tensor) and each.is_cuda for each in args)
        if on_gpu and name.lstrip("_") in {each.lstrip("_") for each in _NUMBERS_TO_HOST}:
            raise HostSync(f"{name} of a tensor on the device")
        if on_gpu and name.startswith("index"):
            self._check_index(args)
        result = func(*args, **kwargs)
        if name in ("_to_copy", "copy_"):
            source = args[0] if name == "_to_copy" else args[1]
            self._check_copy(source, result, non_blocking=_is_non_blocking(name, args, kwargs))
        if kwargs.get("pin_memory"):
            self._pinned.add(_storage(result))
        return result

    def _check_index(self, args: Sequence[Any]) -> None:
        lists = [each for each in args if isinstance(each, (list, tuple))]
        for index in (index for each in lists for index in each if isinstance(index, torch.Tensor)):
            if index.dtype in (torch.bool, torch.uint8):
                raise HostSync("a mask as index: the shape depends on its numbers")
            if not index.is_cuda and not self._is_loading:
                raise HostSync("an index in host memory is copied to the device")

    def _check_copy(
        self, source: torch.Tensor, target: torch.Tensor, *, non_blocking: bool
    ) -> None:
        if source.device.type == target.device.type or self._is_loading:
            return
        route = f"copy from {source.device.type} to {target.device.type}"
        if not non_blocking:
            raise HostSync(f"{route} without non_blocking")
        host = target if source.is_cuda else source
        if _storage(host) not in self._pinned:
            raise HostSync(f"{route}: the host memory is not pinned")


@contextmanager
def fake_cuda() -> Iterator[Watch]:
    """Makes "cuda" a fake device for the calling thread; see the module's docstring."""
    watch = Watch()
    with pytest.MonkeyPatch.context() as patch:
        for name, method in _methods(watch).items():
            patch.setattr(torch.Tensor, name, method)
        patch.setattr(KernelInterface, "__getitem__", _launcher(watch))
        patch.setattr(torch.cuda, "Event", _Idle)
        patch.setattr(torch.cuda, "Stream", _Idle)
        patch.setattr(torch.cuda, "stream", nullcontext)
        patch.setattr(torch.cuda, "current_stream", _Idle)
        patch.setattr(torch.cuda, "get_device_capability", lambda device=None: CAPABILITY)
        properties = SimpleNamespace(
            multi_processor_count=132, shared_memory_per_multiprocessor=233_472
        )
        patch.setattr(torch.cuda, "get_device_properties", lambda device=None: properties)
        with FakeTensorMode(allow_non_fake_inputs=True), watch:
            yield watch


def real(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function whose tensors are real also within `fake_cuda`."""

    def call(*args: Any, **kwargs: Any) -> Any:
        with unset_fake_temporarily():
            return function(*args, **kwargs)

    return call


class _Idle:
    """Stands for a stream or an event."""

    def __init__(self, *args: object, **options: object) -> None: ...

    def record(self, stream: object = None) -> None: ...

    def query(self) -> bool:
        return True

    def wait_event(self, event: object) -> None: ...

    def synchronize(self) -> None: ...


def _launcher(watch: Watch) -> Callable[..., Any]:
    def getitem(kernel: Any, grid: object) -> Callable[..., None]:
        name: str = kernel.fn.__name__

        def launch(*args: Any, **options: Any) -> None:
            for each in (*args, *options.values()):
                if isinstance(each, torch.Tensor) and not each.is_cuda:
                    raise WrongDevice(f"{name} takes a tensor on {each.device}")
            watch.launched.add(name)

        return launch

    return getitem


def _methods(watch: Watch) -> dict[str, Callable[..., Any]]:
    """Returns replacements of the methods of torch.Tensor that need a device guard."""
    original_getitem = torch.Tensor.__getitem__
    original_setitem = torch.Tensor.__setitem__
    original_to = torch.Tensor.to

    def getitem(self: torch.Tensor, key: Any) -> torch.Tensor:
        if not self.is_cuda:
            return original_getitem(self, key)
        view, places = _split_key(self, key)
        if all(place is None for place in places):
            return view
        indexed: torch.Tensor = aten.index.Tensor(view, places)
        return indexed

    def setitem(self: torch.Tensor, key: Any, value: Any) -> None:
        if not self.is_cuda:
            original_setitem(self, key, value)
            return
        view, places = _split_key(self, key)
        if not isinstance(value, torch.Tensor):
            value = torch.full((), value, dtype=self.dtype, device=self.device)
        if all(place is None for place in places):
            view.copy_(value)
        else:
            aten.index_put_.default(view, places, value)

    def to(self: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        device: Any = options.pop("device", None)
        dtype: torch.dtype | None = options.pop("dtype", None)
        for each in args:
            if isinstance(each, torch.dtype):
                dtype = each
            elif isinstance(each, torch.Tensor):
                device = each.device
                dtype = each.dtype
            else:
                device = each
        if device is None or torch.device(device).type == self.device.type:
            return original_to(self, dtype or self.dtype, **options)
        options.pop("copy", None)
        target = torch.device(device)
        copied: torch.Tensor = aten._to_copy.default(self, dtype=dtype, device=target, **options)
        return copied

    def copy_(self: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        copied: torch.Tensor = aten.copy_.default(self, source, non_blocking)
        return copied

    def contiguous(self: torch.Tensor) -> torch.Tensor:
        if self.is_contiguous():
            return self
        cloned: torch.Tensor = aten.clone.default(self, memory_format=torch.contiguous_format)
        return cloned

    def pin_memory(self: torch.Tensor) -> torch.Tensor:
        return torch.empty(self.shape, dtype=self.dtype, pin_memory=True)

    def numpy(self: torch.Tensor) -> "np.ndarray[Any, Any]":
        if self.is_cuda:
            raise HostSync("numpy of a tensor on the device")
        size = (*self.shape[:-1], self.shape[-1] * self.itemsize)
        return np.zeros(size, np.uint8).view(f"i{self.itemsize}")

    return {
        "__getitem__": getitem,
        "__setitem__": setitem,
        "to": to,
        "copy_": copy_,
        "contiguous": contiguous,
        "pin_memory": pin_memory,
        "numpy": numpy,
        "record_stream": lambda self, stream: None,
    }


def _split_key(tensor: torch.Tensor, key: Any) -> tuple[torch.Tensor, list[torch.Tensor | None]]:
    """Applies the slices and integers of an index.

    Returns the view, and for each of its first dimensions the index tensor or None.
    """
    parts = list(key) if isinstance(key, tuple) else [key]
    kinds = [type(part) for part in parts]
    if EllipsisType in kinds:
        at = kinds.index(EllipsisType)
        num_named = sum(part is not None for part in parts) - 1
        parts[at : at + 1] = [slice(None)] * (tensor.ndim - num_named)
    places: list[torch.Tensor | None] = []
    for part in parts:
        dim = len(places)
        if isinstance(part, torch.Tensor):
            places.append(part)
        elif isinstance(part, list):
            places.append(torch.tensor(part))
        elif part is None:
            tensor = aten.unsqueeze.default(tensor, dim)
            places.append(None)
        elif isinstance(part, slice):
            stop = _INT64_MAX if part.stop is None else part.stop
            tensor = aten.slice.Tensor(tensor, dim, part.start, stop, part.step or 1)
            places.append(None)
        else:
            tensor = aten.select.int(tensor, dim, operator.index(part))
    return tensor, places


def _is_non_blocking(name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    if name == "copy_" and len(args) > 2:
        return bool(args[2])
    return bool(kwargs.get("non_blocking", False))


def _storage(tensor: torch.Tensor) -> int:
    """Returns a number that views of the same memory share."""
    return int(tensor.untyped_storage()._cdata)
