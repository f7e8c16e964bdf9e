"""Implements a tensor-parallel group: its collectives, each with a deadline, and the broadcast of
step plans.

Uses no global process group, so that two engines fit in one process.
"""

import hmac
import secrets
import struct
import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import KW_ONLY, dataclass, field, fields
from operator import attrgetter
from typing import Any, Final, Self

import msgpack
import torch
from torch import distributed

from ..engine.plan import (
    Constrained,
    DraftRequest,
    Executor,
    OnLayers,
    Samples,
    SamplingParams,
    SequenceStep,
    StepPlan,
)
from ..transfer.backend import join_store, listen_store, open_group

EMPTY_PLAN: Final = StepPlan(sequences=(), dropped=())
"""The heartbeat of an idle rank 0."""

_PLAN_FIELDS: Final = tuple(each.name for each in fields(StepPlan))
_PLAN: Final = attrgetter(*_PLAN_FIELDS)
_STEP_FIELDS: Final = tuple(each.name for each in fields(SequenceStep))
_SAMPLING_FIELDS: Final = tuple(each.name for each in fields(SamplingParams))
_VALUES: Final = {
    SequenceStep: attrgetter(*_STEP_FIELDS),
    SamplingParams: attrgetter(*_SAMPLING_FIELDS),
}
_LENGTH: Final = struct.Struct("<I")
_SECRET_BYTES: Final = 32
_PLAN_BYTES: Final = 4096  # sent at once; a decode step of a hundred sequences fits


@dataclass(eq=False, repr=False)
class TpGroup:
    """Implements `Group` of `model.parallel`, and broadcasts messages of rank 0.

    Tensors go over gloo in host memory and over NCCL between GPUs, messages over gloo. A call whose
    other ranks are lost or silent raises RuntimeError within the timeout; after that the group
    cannot be used any more. All calls but `abort` come from one thread.

    Whoever reaches the store can join: so all ranks show each other that they know the address,
    which has a secret, before any of them sends anything else.
    """

    store: Any  # rank 0's TCPStore or a connection to it
    secret: str
    _: KW_ONLY
    host: str
    rank: int
    size: int
    device: str
    timeout: float  # seconds, of every collective
    _messages: Any = field(
        init=False, default=None
    )  # backends of torch.distributed, opened by `connect`
    _tensors: Any = field(init=False, default=None)
    _buffer: torch.Tensor = field(
        init=False, default_factory=lambda: torch.zeros(_PLAN_BYTES, dtype=torch.uint8)
    )

    @classmethod
    def listen(
        cls, *, host: str, size: int, device: str, timeout: float, start_timeout: float
    ) -> Self:
        """Makes rank 0's group, whose `address` the others join."""
        store, secret = listen_store(host, size, start_timeout), secrets.token_hex(_SECRET_BYTES)
        return cls(store, secret, host=host, rank=0, size=size, device=device, timeout=timeout)

    @classmethod
    def join(
        cls,
        address: str,
        *,
        host: str,
        rank: int,
        size: int,
        device: str,
        timeout: float,
        start_timeout: float,
    ) -> Self:
        """Makes another rank's group. Raises RuntimeError if rank 0 cannot be reached in time."""
        place, _, secret = address.partition("/")
        store_host, _, port = place.rpartition(":")
        store = join_store(store_host, int(port), start_timeout)
        return cls(store, secret, host=host, rank=rank, size=size, device=device, timeout=timeout)

    @property
    def address(self) -> str:
        """HOST:PORT/SECRET of rank 0's store; for the group's ranks alone."""
        return f"{self.host}:{self.store.port}/{self.secret}"

    def connect(self) -> None:
        """Connects all ranks, waiting as long as a start may take; call it before the first
        collective.

        Raises RuntimeError if a rank does not come, or if somebody else comes in its place.
        """
        self.store.set(f"here/{self.rank}", "")
        self.store.wait([f"here/{rank}" for rank in range(self.size)])
        self._messages = self._open("gloo")
        self._check_ranks()
        self._tensors = self._messages if self.device == "cpu" else self._open("nccl")

    def _check_ranks(self) -> None:
        expected = [
            hmac.digest(self.secret.encode(), b"rank %d" % rank, "sha256")
            for rank in range(self.size)
        ]
        shown = [torch.zeros(len(expected[0]), dtype=torch.uint8) for _ in expected]
        own = torch.frombuffer(bytearray(expected[self.rank]), dtype=torch.uint8)
        self._messages.allgather([shown], [own]).wait()
        if not all(
            hmac.compare_digest(*pair)
            for pair in zip((x.numpy().tobytes() for x in shown), expected, strict=True)
        ):
            raise RuntimeError("a rank does not know the group's secret")

    def _open(self, backend: str) -> Any:
        store = distributed.PrefixStore(backend, self.store)  # type: ignore[attr-defined]
        return open_group(
            store,
            backend=backend,
            rank=self.rank,
            size=self.size,
            host=self.host,
            timeout=self.timeout,
        )

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the sum of the ranks' x, any shape; may overwrite x. On CPUs terms are added in
        float32, in the order of the ranks.
        """
        if self.device == "cpu" and self.size > 2:
            # Gloo's own sum begins at another rank in each part of a tensor: a row would depend on
            # the rows beside it.
            total, *others = (part.float() for part in self.all_gather(x))
            for part in others:
                total += part
            return total.to(x.dtype)
        x = x.contiguous()
        self._tensors.allreduce([x]).wait()
        return x

    def all_gather(self, x: torch.Tensor) -> list[torch.Tensor]:
        """Returns every rank's x, which all have one shape."""
        parts = [torch.empty_like(x) for _ in range(self.size)]
        self._tensors.allgather([parts], [x.contiguous()]).wait()
        return parts

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        """Overwrites x, any shape, contiguous, with rank 0's x and returns it."""
        self._tensors.broadcast(x, 0).wait()
        return x

    def abort(self) -> None:
        """Aborts the collectives between GPUs, in a daemon thread: NCCL's abort may block for as
        long as CUDA graphs refer to its communicator (pytorch#115388). Gloo's waits end by their
        deadlines.
        """
        if self._tensors is not self._messages:
            threading.Thread(target=self._tensors.abort, name="tandem-abort", daemon=True).start()

    def broadcast_message(self, message: bytes) -> None:
        """Sends a message from rank 0 to the `receive_message` of all others: one collective if
        short, else two.
        """
        head = _LENGTH.pack(len(message)) + message[: _PLAN_BYTES - _LENGTH.size]
        self._buffer[: len(head)] = torch.frombuffer(bytearray(head), dtype=torch.uint8)
        self._messages.broadcast(self._buffer, 0).wait()
        if rest := message[_PLAN_BYTES - _LENGTH.size :]:
            self._messages.broadcast(torch.frombuffer(bytearray(rest), dtype=torch.uint8), 0).wait()

    def receive_message(self) -> bytes:
        """Returns rank 0's next message."""
        self._messages.broadcast(self._buffer, 0).wait()
        data = self._buffer.numpy().tobytes()
        (length,) = _LENGTH.unpack_from(data)
        message = data[_LENGTH.size : _LENGTH.size + length]
        if len(message) < length:
            rest = torch.empty(length - len(message), dtype=torch.uint8)
            self._messages.broadcast(rest, 0).wait()
            message += rest.numpy().tobytes()
        return message


class TpExecutor(Executor):
    """Executes plans on rank 0 after broadcasting each to the other ranks, which execute it, too.

    Only the plan travels, so a decode step costs some bytes per sequence. The other ranks follow no
    grammars; their samples of such sequences are not used, since the next plan has rank 0's token.
    """

    def __init__(self, group: TpGroup, executor: Executor) -> None:
        self._group = group
        self._executor = executor

    def launch(self, plan: StepPlan, on_layers: OnLayers | None = None) -> Callable[[], Samples]:
        """See `Executor.launch`. Raises RuntimeError if a rank is lost.

        A layer that is computed here is computed everywhere: it ends with a collective."""
        self._group.broadcast_message(encode_plan(plan))
        return self._executor.launch(plan, on_layers)

    def prepare_masks(self, sequences: Sequence[Constrained], seconds: float) -> Collection[int]:
        """See `Executor.prepare_masks`. The other ranks follow no grammars."""
        return self._executor.prepare_masks(sequences, seconds)

    def propose(self, requests: Sequence[DraftRequest]) -> dict[int, tuple[int, ...]]:
        """See `Executor.propose`. The draft model is whole on rank 0."""
        return self._executor.propose(requests)

    def expedite(self) -> None:
        """See `Executor.expedite`. The other ranks compute as nicely as before."""
        self._executor.expedite()

    def close(self) -> None:
        """Ends `rank_loop` on the other ranks. Raises RuntimeError if a rank is lost."""
        self._group.broadcast_message(b"")


def rank_loop(group: TpGroup, executor: Executor) -> None:
    """Executes rank 0's plans until its executor is closed. Raises RuntimeError if a rank is lost."""
    collect: Callable[[], Samples] | None = None
    while message := group.receive_message():
        launched = executor.launch(decode_plan(message))
        if collect is not None:
            collect()
        collect = launched


def encode_plan(plan: StepPlan) -> bytes:
    """Encodes a plan as msgpack: its parts as tuples of their fields' values."""
    data: bytes = msgpack.packb(
        _PLAN(plan),
        default=lambda part: _VALUES[type(part)](part),
    )
    return data


def decode_plan(data: bytes) -> StepPlan:
    """Decodes a plan of `encode_plan`. Raises RuntimeError for anything else."""
    try:
        plan = dict(zip(_PLAN_FIELDS, msgpack.unpackb(data, use_list=False), strict=True))
        return StepPlan(**plan | {"sequences": tuple(map(_decode_step, plan["sequences"]))})
    except (ValueError, TypeError) as error:
        raise RuntimeError("rank 0 has sent what is no plan") from error


def _decode_step(values: tuple[Any, ...]) -> SequenceStep:
    step = dict(zip(_STEP_FIELDS, values, strict=True))
    if step["sampling"] is not None:
        step["sampling"] = SamplingParams(
            **dict(zip(_SAMPLING_FIELDS, step["sampling"], strict=True))
        )
    return SequenceStep(**step)
