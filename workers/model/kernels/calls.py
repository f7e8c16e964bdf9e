"""Runs calls of C kernels at once, or records them into a program that one native call runs again."""

import ctypes
import struct
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Final, Protocol, cast

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from .build import address, library

_MAX_ARGS: Final = 16  # as in team.c
_ALLOCATIONS: Final = (torch.ops.aten.empty.memory_format, torch.ops.aten.new_empty.default)

Argument = torch.Tensor | int | float | None


class _Call(ctypes.Structure):
    """See team.c."""

    _fields_ = (
        ("kernel", ctypes.c_void_p),
        ("rows", ctypes.c_int64),
        ("shared", ctypes.c_int64),
        ("args", ctypes.c_int64 * _MAX_ARGS),
    )


class _Library(Protocol):
    """Names the functions of team.c; calls are given by reference, numbers as int64."""

    def run_call(self, call: object, threads: object) -> None: ...

    def run_program(self, calls: object, *numbers: object) -> None: ...

    def wait_for_helpers(self) -> None: ...


def call(name: str, dtype: torch.dtype | None, rows: int, *args: Argument, shared: bool = False) -> None:
    """Calls a kernel, of a dtype where it has variants, for `rows` rows; tensors are given by their address.

    While a program is recorded it is recorded instead. `shared` says that the kernel reads or writes memory that others
    use between the program's runs, as the KV cache."""
    numbers = [_number(each) for each in args]
    numbers += [0] * (_MAX_ARGS - len(numbers))
    made = _Call(address(name, dtype), rows, shared, (ctypes.c_int64 * _MAX_ARGS)(*numbers))
    program = _recorded.get()
    if program is None:
        _library().run_call(ctypes.byref(made), ctypes.c_int64(torch.get_num_threads()))
    else:
        program.add(made, [each for each in args if isinstance(each, torch.Tensor)])


def _number(argument: Argument) -> int:
    if isinstance(argument, torch.Tensor):
        return argument.data_ptr()
    if isinstance(argument, float):
        return cast(int, struct.unpack("q", struct.pack("d", argument))[0])
    return argument or 0


class Program:
    """Holds recorded calls, and runs them for any number of rows up to that for which they were recorded.

    It is for one thread. Its memory is in use until the run after the next begins: see team.c."""

    def __init__(self, max_rows: int) -> None:
        self._max_rows = max_rows
        self._calls: list[_Call] = []
        self._memory: list[torch.Tensor] = []  # that the calls name
        weakref.finalize(self, _library().wait_for_helpers)

    def add(self, made: _Call, tensors: list[torch.Tensor]) -> None:
        """Appends a call, which uses these tensors."""
        self._calls.append(made)
        self._memory += tensors

    def freeze(self) -> None:
        """Ends the recording."""
        self._array = (_Call * len(self._calls))(*self._calls)

    def run(self, rows: int) -> None:
        """Runs the calls."""
        numbers = (len(self._array), rows, self._max_rows, torch.get_num_threads())
        _library().run_program(self._array, *map(ctypes.c_int64, numbers))


_recorded: ContextVar[Program | None] = ContextVar("recorded", default=None)


class NotRecordedError(Exception):
    """Reports an operation that is no kernel of ours, so that a program would leave it out."""


class _OnlyViews(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuses operations of torch that compute something."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not (func.is_view or func in _ALLOCATIONS):
            raise NotRecordedError(str(func))
        return func(*args, **(kwargs or {}))


@contextmanager
def record(max_rows: int) -> Iterator[Program]:
    """Records the kernels that are called inside, which are not run. They must be called for max_rows rows, or a
    multiple. Raises NotRecordedError for anything else that computes."""
    program = Program(max_rows)
    token = _recorded.set(program)
    try:
        with _OnlyViews():  # type: ignore[no-untyped-call]
            yield program
    finally:
        _recorded.reset(token)
    program.freeze()


def _library() -> _Library:
    kernels = library()
    if kernels is None:
        raise RuntimeError("no kernels")
    return cast(_Library, kernels)
