"""Calls C kernels, or records the calls into a program that one native call runs again."""

import ctypes
import struct
import weakref
from collections.abc import Callable
from contextvars import ContextVar
from itertools import pairwise
from typing import Any, Final, cast

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from .build import address, loaded_library

_MAX_ARGS: Final = 17  # as in team.c
_ALIGNMENT: Final = 64  # bytes
_ALLOCATIONS: Final = (torch.ops.aten.empty.memory_format, torch.ops.aten.new_empty.default)

OPERATORS: Final[dict[Any, Callable[..., torch.Tensor]]] = {}
"""Replacements for torch operators while a program is recorded; see `elementwise`."""

Argument = torch.Tensor | int | float | None


class _Call(ctypes.Structure):
    """Mirrors the struct Call of team.c."""

    _fields_ = (
        ("kernel", ctypes.c_void_p),
        ("rows", ctypes.c_int64),
        ("shared", ctypes.c_int64),
        ("distance", ctypes.c_int64),
        ("args", ctypes.c_int64 * _MAX_ARGS),
    )


def call(
    name: str, dtype: torch.dtype | None, rows: int, *args: Argument, shared: bool = False
) -> None:
    """Calls a kernel for `rows` rows, or records the call if a program is being recorded.

    `dtype` selects a variant of the kernel. Tensors are passed by address. `shared` means that the
    kernel reads or writes memory that is used between the program's runs, such as the KV cache.
    """
    numbers = [_number(each) for each in args]
    numbers += [0] * (_MAX_ARGS - len(numbers))
    made = _Call(address(name, dtype), rows, shared, 0, (ctypes.c_int64 * _MAX_ARGS)(*numbers))
    recorder = _recorder.get()
    if recorder is None:
        loaded_library().run_call(ctypes.byref(made), ctypes.c_int64(torch.get_num_threads()))
    else:
        recorder.calls.append((made, args))


def _number(argument: Argument) -> int:
    if isinstance(argument, torch.Tensor):
        return argument.data_ptr()
    if isinstance(argument, float):
        return cast(int, struct.unpack("q", struct.pack("d", argument))[0])
    return argument or 0


class Program:
    """Runs recorded calls for any number of rows up to the recorded number; for one thread only."""

    def __init__(
        self,
        calls: list[_Call],
        marks: list[int],
        result: torch.Tensor,
        memory: list[torch.Tensor],
        max_rows: int,
    ) -> None:
        self.result = result  # overwritten by the next run
        self.max_rows = max_rows
        self._calls = (_Call * len(calls))(*calls)
        self._parts = list(pairwise((0, *marks, len(calls))))
        self._memory = memory  # keeps the memory of the calls alive
        weakref.finalize(self, loaded_library().wait_for_helpers)

    def run(self, rows: int, on_mark: Callable[[int], None] | None = None) -> None:
        """Runs the calls; calls `on_mark(index)` at each mark of the recording."""
        numbers = (rows, self.max_rows, torch.get_num_threads())
        for index, (begin, end) in enumerate(self._parts if on_mark else [(0, len(self._calls))]):
            if index and on_mark:
                on_mark(index - 1)
            part = (_Call * (end - begin)).from_buffer(self._calls, begin * ctypes.sizeof(_Call))
            loaded_library().run_program(part, *map(ctypes.c_int64, (end - begin, *numbers)))


_Buffer = tuple[int, int, int]
"""An allocation of a recording: its bytes, and the first and the last call that use it."""


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the kernel calls of a `with` block instead of running them.

    Any other computation raises NotImplementedError.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[tuple[_Call, tuple[Argument, ...]]] = []
        self._allocated: list[torch.Tensor] = []
        self._bases: set[int] = set()
        self._marks: list[int] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Returns False: True would import torch._dynamo, which takes a second of each start."""
        return False

    def __enter__(self) -> "Recorder":
        self._token = _recorder.set(self)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        _recorder.reset(self._token)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_known = func.is_view or func in _ALLOCATIONS
        if not is_known and (func not in OPERATORS or not self._has_step(args)):
            raise NotImplementedError(f"no kernel for {func}")
        result = (func if is_known else OPERATORS[func])(*args, **(kwargs or {}))
        if not func.is_view:
            self._allocated.append(result)
            self._bases.add(_base(result))
        return result

    def _has_step(self, args: Any) -> bool:
        """Returns True if a tensor was created by this step; only those have one row per token."""
        flat = [each for arg in args for each in (arg if isinstance(arg, list | tuple) else (arg,))]
        return any(isinstance(each, torch.Tensor) and _base(each) in self._bases for each in flat)

    def mark(self) -> None:
        """Marks a place at which `Program.run` can call `on_mark`."""
        self._marks.append(len(self.calls))

    def program(
        self, result: torch.Tensor, max_rows: int, reuse_distance: int | None = None
    ) -> Program:
        """Returns the program of the recorded calls, whose `result` the caller reads.

        The calls must have `max_rows` rows or multiples of it. A call may reuse memory that was
        last used at least `reuse_distance` calls before; None: only the next run reuses it. With a
        larger distance, a thread may be late for longer before others wait for it.
        """
        if any(made.rows % max_rows for made, _ in self.calls):
            raise NotImplementedError("some call has no rows for the step's tokens")
        buffers = self._buffers()
        num_calls = len(self.calls)
        offsets = _place(list(buffers.values()), reuse_distance or num_calls)
        placed = list(zip(offsets, buffers.values(), strict=True))
        size = max(offset + num_bytes for offset, (num_bytes, *_) in placed)
        arena = torch.empty(size + _ALIGNMENT, dtype=torch.uint8)
        arena = arena[-arena.data_ptr() % _ALIGNMENT :]
        moves = {base: offset - base for base, offset in zip(buffers, offsets, strict=True)}
        calls: list[_Call] = []
        for index, (made, args) in enumerate(self.calls):
            for position, each in enumerate(args):
                if isinstance(each, torch.Tensor) and (base := _base(each)) in moves:
                    made.args[position] += moves[base] + arena.data_ptr()
            made.distance = _distance(index, placed, num_calls)
            calls.append(made)
        at = result.data_ptr() + moves[_base(result)]
        moved = arena[at : at + result.nbytes].view(result.dtype).view(result.shape)
        others = [each for _, args in self.calls for each in args if isinstance(each, torch.Tensor)]
        memory = [arena, *(each for each in others if _base(each) not in moves)]
        return Program(calls, self._marks, moved, memory, max_rows)

    def _buffers(self) -> dict[int, _Buffer]:
        """Returns the used allocations by address."""
        sizes = {_base(each): each.untyped_storage().nbytes() for each in self._allocated}
        buffers: dict[int, _Buffer] = {}
        for index, (_, args) in enumerate(self.calls):
            for base in {
                _base(each) for each in args if isinstance(each, torch.Tensor)
            } & sizes.keys():
                num_bytes = -(-sizes[base] // _ALIGNMENT) * _ALIGNMENT
                buffers[base] = (num_bytes, buffers[base][1] if base in buffers else index, index)
        return buffers


def _base(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _place(buffers: list[_Buffer], distance: int) -> list[int]:
    """Returns the first free offset for each buffer."""
    placed: list[tuple[int, _Buffer]] = []
    for buffer in buffers:
        num_bytes, first, _ = buffer
        taken = sorted(
            (offset, size) for offset, (size, _, last) in placed if last + distance > first
        )
        free = 0
        for offset, size in taken:
            if offset - free >= num_bytes:
                break
            free = max(free, offset + size)
        placed.append((free, buffer))
    return [offset for offset, _ in placed]


def _distance(index: int, placed: list[tuple[int, _Buffer]], num_calls: int) -> int:
    """Returns the number of calls since the memory of the call's new buffers was last used.

    New buffers are those that call `index` uses first. The last use may be in the previous run. The
    result is 0 if the call has no new buffers.
    """
    distances = [0]
    for offset, (num_bytes, first, _) in placed:
        if first == index:
            for start, (size, _, last) in placed:
                if start < offset + num_bytes and offset < start + size:
                    distances.append(index - last + (num_calls if last >= index else 0))
    return min(filter(None, distances), default=0)


_recorder: ContextVar[Recorder | None] = ContextVar("recorder", default=None)
