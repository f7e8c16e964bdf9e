"""Stands for the streams and events of a GPU, without one, and finds work that is not ordered.

Each stream and the host have a vector clock. Work on a stream follows the earlier work of the
stream, the work that the stream was made to wait for, and all work whose end the host knew when it
launched it. Nothing else is ordered, as on a GPU whose streams run at any speed.
"""

import itertools
import threading
from collections.abc import Collection, Hashable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import pytest
import torch

from tandem.workers.host.streams import BlockOrder, Ints
from tandem.workers.model.kv.gpu import GpuKv
from tandem.workers.model.kv.store import PagedKv

Clock = dict[int, int]
"""How much of each stream comes before: the number of its last operation, by the stream's number.
"""


def joined(clocks: Iterable[Clock]) -> Clock:
    """The least clock that comes after all of these."""
    result: Clock = {}
    for clock in clocks:
        for stream, number in clock.items():
            result[stream] = max(result.get(stream, 0), number)
    return result


class Stream:
    """Stands for torch.cuda.Stream."""

    def __init__(self, model: "StreamModel") -> None:
        self.model = model
        self.number = len(model.streams)
        self.clock: Clock = {self.number: 0}
        self.last: Clock = {}  # of the last operation
        model.streams.append(self)

    def wait_event(self, event: "Event") -> None:
        self.clock = joined((self.clock, event.clock))

    def advance(self) -> Clock:
        """Launches an operation and returns its clock."""
        self.clock = joined((self.clock, self.model.host))
        self.clock[self.number] += 1
        self.last = dict(self.clock)
        return self.last


class Event:
    """Stands for torch.cuda.Event."""

    def __init__(self, model: "StreamModel") -> None:
        self.model = model
        self.clock: Clock = {}

    def record(self, stream: Stream | None = None) -> None:
        self.clock = dict((stream or self.model.current).clock)

    def query(self) -> bool:
        """Tells the host whether the work has ended; what it knows comes before later work."""
        with self.model.lock:
            if any(number > self.model.ended.get(at, 0) for at, number in self.clock.items()):
                return False
            self.model.host = joined((self.model.host, self.clock))
            return True

    def synchronize(self) -> None:
        with self.model.lock:
            self.model.ended = joined((self.model.ended, self.clock))
            self.query()


@dataclass(eq=False)
class Operation:
    """Work on a stream, and the places that it reads and writes."""

    kind: str  # step, read, write, copy (of the host tier) or message
    stream: Stream
    clock: Clock
    known: Clock  # what the host knew to have ended when it launched this
    before: Clock  # of the stream's earlier operations
    done: Clock = field(default_factory=dict)  # at its end
    reads: Collection[Hashable] = ()
    writes: Collection[Hashable] = ()

    def follows(self, other: "Operation") -> bool:
        at = other.stream.number
        return self.clock.get(at, 0) >= other.clock[at]

    def touches(self, other: "Operation") -> bool:
        """Whether both touch a place that one of them writes."""
        mine, theirs = set(self.reads) | set(self.writes), set(other.reads) | set(other.writes)
        return not (mine.isdisjoint(other.writes) and theirs.isdisjoint(self.writes))


class StreamModel:
    """The streams of one GPU, and the operations that were launched on them."""

    def __init__(self) -> None:
        self.host: Clock = {}  # the work that the host knows to have ended
        self.ended: Clock = {}  # the work that has ended
        self.streams: list[Stream] = []
        self.operations: list[Operation] = []
        self.default: Final = Stream(self)
        self._local = threading.local()
        self.lock = threading.RLock()

    @property
    def current(self) -> Stream:
        """The calling thread's stream."""
        return getattr(self._local, "stream", self.default)

    def set_stream(self, stream: Stream) -> None:
        self._local.stream = stream

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before = self.current
        self.set_stream(stream)
        try:
            yield
        finally:
            self.set_stream(before)

    def launch(self, kind: str) -> Operation:
        """Launches an operation on the current stream."""
        stream = self.current
        with self.lock:
            before = stream.last
            known = dict(self.host)
            operation = Operation(kind, stream, stream.advance(), known, before)
            operation.done = operation.clock
            self.operations.append(operation)
            return operation

    def end(self, operation: Operation) -> None:
        """Lets the device finish an operation, and all work before it."""
        self.ended = joined((self.ended, operation.done))

    def synchronize(self, operation: Operation) -> None:
        """Lets the host wait for an operation."""
        self.end(operation)
        self.host = joined((self.host, operation.done))

    def check(self, block_of: Any = lambda place: place) -> None:
        """Raises AssertionError if operations are not ordered, or transfers without need.

        `block_of` returns the block of a place. Two operations need an order if they touch the same
        block and one of them writes it. A read needs none with a step, because its caller knows
        that the step has ended that wrote the places which it reads.
        """
        for index, later in enumerate(self.operations):
            earlier = self.operations[:index]
            for each in earlier:
                assert not later.touches(each) or later.follows(each), (
                    f"a {later.kind} is not ordered after a {each.kind} of the same places"
                )
            for each in earlier:
                assert (
                    (later.kind, each.kind) != ("step", "message")
                    or not later.follows(each)
                    or later.known.get(each.stream.number, 0) >= each.clock[each.stream.number]
                ), "a step waits for a message"
            if later.kind in ("step", "copy"):
                continue
            needed = [
                each.done
                for each in earlier
                if _shares_block(later, each, block_of)
                and (later.kind, each.kind) != ("read", "step")
            ]
            least = joined((later.known, later.before, *needed))
            at = self.default.number
            assert later.clock.get(at, 0) <= least.get(at, 0), (
                f"a {later.kind} waits for a step without need"
            )

    def install(self, patch: pytest.MonkeyPatch) -> None:
        """Makes torch.cuda use this model; host memory stands for pinned memory and the GPU's."""
        true_empty, true_to = torch.empty, torch.Tensor.to

        def empty(*size: Any, pin_memory: bool = False, device: Any = None, **rest: Any) -> Any:
            return true_empty(*size, **rest)

        def to(tensor: torch.Tensor, *args: Any, **rest: Any) -> torch.Tensor:
            target = args[0] if args else None
            on_gpu = isinstance(target, str | torch.device) and torch.device(target).type == "cuda"
            return tensor if on_gpu else true_to(tensor, *args, **rest)

        patch.setattr(torch, "empty", empty)
        patch.setattr(torch.Tensor, "to", to)
        patch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: None)
        patch.setattr(torch.cuda, "Stream", lambda *args, **options: Stream(self))
        patch.setattr(torch.cuda, "Event", lambda **options: Event(self))
        patch.setattr(torch.cuda, "stream", self.stream)
        patch.setattr(torch.cuda, "set_stream", self.set_stream)
        patch.setattr(torch.cuda, "current_stream", lambda device=None: self.current)


def _shares_block(one: Operation, other: Operation, block_of: Any) -> bool:
    def blocks(places: Collection[Hashable]) -> set[Hashable]:
        return {block_of(place) for place in places}

    ours, theirs = blocks(one.writes), blocks(other.writes)
    return not (
        ours.isdisjoint(blocks(other.reads) | theirs)
        and theirs.isdisjoint(blocks(one.reads) | ours)
    )


class RecordingOrder(BlockOrder):
    """Launches an operation of the model for each context."""

    def __init__(self, num_blocks: int, model: StreamModel) -> None:
        super().__init__(num_blocks)
        self._model = model

    @contextmanager
    def _ordered(
        self, stream: Any, touched: Ints, written: Ints, *, is_step: bool = False
    ) -> Iterator[Any]:
        kind = "step" if is_step else "write" if len(written) else "read"
        with super()._ordered(stream, touched, written, is_step=is_step) as done:
            operation = self._model.launch(kind)
            yield done
            operation.done = dict(stream.clock)


def run_out_of_memory(patch: pytest.MonkeyPatch, at: int) -> None:
    """Makes the copy of KV cache of this number, counted from 0, fail as on a full GPU."""
    true = GpuKv._index
    numbers = itertools.count()

    def index(kv: GpuKv, *arguments: Any) -> tuple[Any, ...]:
        if next(numbers) == at:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 64.00 MiB")
        return true(kv, *arguments)

    patch.setattr(GpuKv, "_index", index)


def put_on_gpu(kv: PagedKv, order: RecordingOrder) -> None:
    """Makes a cache in host memory take the ways of one on a GPU."""
    kv.order = order
    kv._gpu = GpuKv(kv.layout, kv.tensors, order)
