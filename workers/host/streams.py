"""Orders the work of a GPU's streams on the blocks of one KV cache.

Steps run on the device's default stream. Transfers and copies have streams of their own, so that
neither waits for the other without need.
"""

import asyncio
import queue
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from .threads import settle

T = TypeVar("T")
Ints = npt.NDArray[np.integer[Any]]
"""Numbers of blocks, in any order, also repeated."""

_NONE: Final[Ints] = np.zeros(0, np.int32)
_CHECKSUM_BITS: Final = 32
_NUM_WAITERS: Final = 4  # threads; a read whose blocks are still written delays few others


@dataclass(frozen=True, slots=True, eq=False)
class _Operation:
    """Describes work on a stream that the host does not know to have ended."""

    stream: Any
    is_step: bool
    touched: npt.NDArray[np.bool_]  # [num_blocks]
    written: npt.NDArray[np.bool_]  # [num_blocks]
    done: Any  # the event at its end


class BlockOrder:
    """Makes a stream wait for work on other streams that touches the same blocks, and no other.

    - A step and a write wait for unfinished work on the blocks that they write, and for unfinished
      writes of the blocks that they read.
    - A read waits for unfinished writes of its blocks, except by steps: its caller knows that the
      tokens are computed, while a step may add further tokens to the same block.

    Every access to blocks is made in one of the contexts below, in which the stream is current. A
    context begins after all contexts whose work it must follow have ended: blocks change owners by
    messages between threads, which are sent afterwards. Thread-safe.
    """

    def __init__(self, num_blocks: int) -> None:
        self._num_blocks = num_blocks
        self._lock = threading.Lock()
        self._unfinished: list[_Operation] = []

    @contextmanager
    def step(self, reads: Ints, writes: Ints) -> Iterator[Any]:
        """Orders a step on the current stream; yields the event at its end."""
        touched = np.concatenate((reads, writes))
        with self._ordered(torch.cuda.current_stream(), touched, writes, is_step=True) as done:
            yield done

    @contextmanager
    def reading(self, blocks: Ints, stream: Any = None) -> Iterator[Any]:
        """Orders a read on the stream, or the current one; yields the event at its end."""
        with self._ordered(stream or torch.cuda.current_stream(), blocks, _NONE) as done:
            yield done

    @contextmanager
    def writing(self, blocks: Ints, stream: Any = None) -> Iterator[Any]:
        """Orders a write on the stream, or the current one; yields the event at its end."""
        with self._ordered(stream or torch.cuda.current_stream(), blocks, blocks) as done:
            yield done

    @contextmanager
    def _ordered(
        self, stream: Any, touched: Ints, written: Ints, *, is_step: bool = False
    ) -> Iterator[Any]:
        done = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(stream):
            for event in self._awaited(stream, touched, written, is_step):
                stream.wait_event(event)
            try:
                yield done
            finally:  # a part of the work may be queued
                done.record(stream)
                operation = _Operation(
                    stream, is_step, self._mask(touched), self._mask(written), done
                )
                with self._lock:
                    self._unfinished.append(operation)

    def _awaited(self, stream: Any, touched: Ints, written: Ints, is_step: bool) -> list[Any]:
        """Returns the events of other streams that new work must wait for."""
        with self._lock:
            self._unfinished = [each for each in self._unfinished if not each.done.query()]
            others = [each for each in self._unfinished if each.stream != stream]
        is_read = not is_step and not len(written)
        return [
            each.done
            for each in others
            if each.touched[written].any()
            or (each.written[touched].any() and not (is_read and each.is_step))
        ]

    def _mask(self, blocks: Ints) -> npt.NDArray[np.bool_]:
        mask = np.zeros(self._num_blocks, np.bool_)
        mask[blocks] = True
        return mask


class EventWaiter:
    """Waits for events in threads of its own, so that no event loop blocks.

    The threads start with the first wait, and end with this object.
    """

    def __init__(self) -> None:
        self._waits: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._is_started = False

    def wait(self, event: Any, result: Callable[[], T]) -> "asyncio.Future[T]":
        """Returns a future of the running loop with `result()`, called after the event.

        A wait for a device that hangs does not end; the watchdog then ends the process.
        """
        if not self._is_started:
            self._is_started = True
            self._start()
        loop = asyncio.get_running_loop()
        done: asyncio.Future[T] = loop.create_future()

        def wait() -> None:
            found: T | None = None
            failure: Exception | None = None
            try:
                event.synchronize()
                found = result()
            except Exception as error:  # handed to the future
                failure = error
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(settle, done, found, failure)

        self._waits.put(wait)
        return done

    def _start(self) -> None:
        for _ in range(_NUM_WAITERS):
            run = partial(_run_all, self._waits)
            threading.Thread(target=run, name="tandem-kv-events", daemon=True).start()
            weakref.finalize(self, self._waits.put, None)


def _run_all(waits: "queue.SimpleQueue[Callable[[], object] | None]") -> None:
    while (wait := waits.get()) is not None:
        wait()
        del wait  # it holds the copied bytes


@dataclass(frozen=True, slots=True, eq=False)
class DeviceData:
    """Holds bytes in a GPU's memory. They are complete: nothing needs to wait for them."""

    tensor: torch.Tensor  # uint8 [nbytes], contiguous
    checksum: int = field(kw_only=True)  # as `device_checksum`

    @property
    def nbytes(self) -> int:
        return self.tensor.nbytes


def device_checksum(data: torch.Tensor) -> torch.Tensor:
    """Returns a checksum of uint8 [4 * n], as int64 without dimensions on the same device.

    It is below 2 ** 32, and depends on the value and the place of each 32-bit word.
    """
    words = data.view(torch.int32).to(torch.int64)
    # Odd factors, so that each changed bit changes the sum; sums of integers have one result in any
    # order.
    factors = torch.arange(1, 2 * len(words), 2, device=data.device)
    return (words * factors).sum() & ((1 << _CHECKSUM_BITS) - 1)
