"""A tensor-parallel group: collectives between its ranks, each with a deadline, and how all come to the same step.

No global process group: two engines fit in one process.
"""

import struct
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, Final, Self

import msgpack
import torch
from torch import distributed

from ..engine.plan import Executor, OnLayers, Samples, SamplingParams, SequenceStep, StepPlan
from ..transfer.backend import join_store, listen_store, open_group

NOTHING: Final = StepPlan(sequences=(), dropped=())
"""A plan that only says that rank 0 is there."""

_LENGTH: Final = struct.Struct("<I")
_PLAN_BYTES: Final = 4096  # sent at once; a decode step of a hundred sequences fits


class TpGroup:
    """Implements `Group` of `model.parallel`, and carries messages from rank 0 to all.

    Tensors go over gloo in host memory and over NCCL between GPUs, messages over gloo. A call whose other ranks are
    lost or silent raises RuntimeError, within the timeout; after that the group is of no use any more. Used from one
    thread."""

    def __init__(self, store: Any, *, host: str, rank: int, size: int, device: str, timeout: float) -> None:
        """`store` is rank 0's TCPStore or a connection to it; `timeout` is in seconds, of every collective."""
        self.rank = rank
        self.size = size
        self._store = store
        self._host = host
        self._device = device
        self._timeout = timeout
        self._buffer = torch.zeros(_PLAN_BYTES, dtype=torch.uint8)

    @classmethod
    def listen(cls, *, host: str, size: int, device: str, timeout: float, start_timeout: float) -> Self:
        """Rank 0, of which the others have to know `address`."""
        store = listen_store(host, size, start_timeout)
        return cls(store, host=host, rank=0, size=size, device=device, timeout=timeout)

    @classmethod
    def join(
        cls, address: str, *, host: str, rank: int, size: int, device: str, timeout: float, start_timeout: float
    ) -> Self:
        """Another rank. Raises RuntimeError if rank 0 cannot be reached in time."""
        store_host, _, port = address.rpartition(":")
        store = join_store(store_host, int(port), start_timeout)
        return cls(store, host=host, rank=rank, size=size, device=device, timeout=timeout)

    @property
    def address(self) -> str:
        """HOST:PORT where the ranks meet."""
        return f"{self._host}:{self._store.port}"

    def meet(self) -> None:
        """Waits for all ranks, as long as a start may take; call it before the first collective.

        Raises RuntimeError if they do not come."""
        self._store.set(f"here/{self.rank}", "")
        self._store.wait([f"here/{rank}" for rank in range(self.size)])
        self._messages = self._open("gloo")
        self._tensors = self._messages if self._device == "cpu" else self._open("nccl")

    def _open(self, backend: str) -> Any:
        store = distributed.PrefixStore(backend, self._store)  # type: ignore[attr-defined]
        return open_group(
            store, backend=backend, rank=self.rank, size=self.size, host=self._host, timeout=self._timeout
        )

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sums x over the ranks, in place."""
        x = x.contiguous()
        self._tensors.allreduce([x]).wait()
        return x

    def all_gather(self, x: torch.Tensor) -> list[torch.Tensor]:
        """Every rank's x, which all have one shape."""
        parts = [torch.empty_like(x) for _ in range(self.size)]
        self._tensors.allgather([parts], [x.contiguous()]).wait()
        return parts

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        """Replaces x by rank 0's, in place; of one shape on every rank."""
        x = x.contiguous()
        self._tensors.broadcast(x, 0).wait()
        return x

    def tell(self, message: bytes) -> None:
        """From rank 0 to all others, who are to `hear` it. One collective if it is short, else two."""
        head = _LENGTH.pack(len(message)) + message[: _PLAN_BYTES - _LENGTH.size]
        self._buffer[: len(head)] = torch.frombuffer(bytearray(head), dtype=torch.uint8)
        self._broadcast(self._buffer)
        if rest := message[_PLAN_BYTES - _LENGTH.size :]:
            self._broadcast(torch.frombuffer(bytearray(rest), dtype=torch.uint8))

    def hear(self) -> bytes:
        """What rank 0 tells."""
        self._broadcast(self._buffer)
        data = self._buffer.numpy().tobytes()
        (length,) = _LENGTH.unpack_from(data)
        message = data[_LENGTH.size : _LENGTH.size + length]
        if len(message) < length:
            rest = torch.empty(length - len(message), dtype=torch.uint8)
            self._broadcast(rest)
            message += rest.numpy().tobytes()
        return message

    def _broadcast(self, data: torch.Tensor) -> None:
        self._messages.broadcast(data, 0).wait()


class TpExecutor(Executor):
    """Rank 0's executor: the other ranks hear each plan, then all carry it out.

    Only what a plan says travels, so a decode step costs some bytes a sequence. Every rank samples for itself; but what
    others draw under a grammar, which they do not follow, nobody reads: the next plan has rank 0's token."""

    def __init__(self, group: TpGroup, executor: Executor) -> None:
        self._group = group
        self._executor = executor

    def launch(self, plan: StepPlan, on_layers: OnLayers | None = None) -> Callable[[], Samples]:
        """See `Executor.launch`. Raises RuntimeError if a rank is lost.

        A layer that has ended here has ended everywhere: its last part is a collective."""
        self._group.tell(encode_plan(plan))
        return self._executor.launch(plan, on_layers)

    def end(self) -> None:
        """No more plans: the other ranks leave `follow`. Raises RuntimeError if a rank is lost."""
        self._group.tell(b"")


def rank_loop(group: TpGroup, executor: Executor) -> None:
    """Carries out what rank 0 says, until it ends. Raises RuntimeError if a rank is lost."""
    collect: Callable[[], Samples] | None = None
    while message := group.hear():
        launched = executor.launch(decode_plan(message))
        if collect is not None:
            collect()
        collect = launched


def encode_plan(plan: StepPlan) -> bytes:
    """A plan as msgpack."""
    steps = [
        (
            step.sequence_id,
            step.token_ids,
            step.start,
            step.new_blocks,
            step.num_samples,
            *((asdict(step.sampling), step.history, step.num_prompt) if step.sampling else (None, (), 0)),
            step.next_prompt_token,
        )
        for step in plan.sequences
    ]
    data: bytes = msgpack.packb((steps, plan.dropped, plan.copies))
    return data


def decode_plan(data: bytes) -> StepPlan:
    """The inverse of `encode_plan`."""
    steps, dropped, copies = msgpack.unpackb(data, use_list=False)
    return StepPlan(sequences=tuple(_decode_step(*step) for step in steps), dropped=dropped, copies=copies)


def _decode_step(
    sequence_id: int,
    token_ids: tuple[int, ...],
    start: int,
    new_blocks: tuple[int, ...],
    num_samples: int,
    sampling: dict[str, Any] | None,
    history: tuple[int, ...],
    num_prompt: int,
    next_prompt_token: int | None,
) -> SequenceStep:
    return SequenceStep(
        sequence_id=sequence_id,
        token_ids=token_ids,
        start=start,
        new_blocks=new_blocks,
        num_samples=num_samples,
        sampling=None if sampling is None else SamplingParams(**sampling),
        history=history,
        num_prompt=num_prompt,
        next_prompt_token=next_prompt_token,
    )
