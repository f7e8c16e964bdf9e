"""Implements a tensor-parallel group: collectives with deadlines, and the broadcast of plans.

Uses no global process group, so that two engines fit in one process.
"""

import hmac
import secrets
import struct
import threading
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field, fields
from operator import attrgetter
from typing import Any, Final, Self

import msgpack
import torch
from torch import distributed

from ..engine.plan import (
    CpuShare,
    DelegatingExecutor,
    Executor,
    OnLayers,
    Samples,
    SamplingParams,
    SequenceStep,
    StatePlan,
    StepPlan,
    Watermark,
)
from ..kv_cache.tables import TableBlocks
from ..transfer.backend import join_store, listen_store, open_group

EMPTY_PLAN: Final = StepPlan(sequences=(), dropped=())
"""The heartbeat of an idle rank 0."""

_PLAN_FIELDS: Final = tuple(each.name for each in fields(StepPlan))
_PLAN: Final = attrgetter(*_PLAN_FIELDS)
_STEP_FIELDS: Final = tuple(each.name for each in fields(SequenceStep))
_SAMPLING_FIELDS: Final = tuple(each.name for each in fields(SamplingParams))
_WATERMARK_FIELDS: Final = tuple(each.name for each in fields(Watermark))
_VALUES: Final = {
    SequenceStep: attrgetter(*_STEP_FIELDS),
    SamplingParams: attrgetter(*_SAMPLING_FIELDS),
    Watermark: attrgetter(*_WATERMARK_FIELDS),
    TableBlocks: attrgetter("blocks", "first"),
    StatePlan: attrgetter("source", "targets"),
}
_LENGTH: Final = struct.Struct("<I")
_SECRET_BYTES: Final = 32
_PLAN_BYTES: Final = 4096  # sent by the first collective; enough to decode 100 sequences


@dataclass(eq=False, repr=False)
class TpGroup:
    """Implements `Group` of `model.parallel`, and broadcasts messages of rank 0.

    Tensors go over gloo in host memory and over NCCL between GPUs, messages over gloo. A call
    raises RuntimeError within the timeout if another rank is lost or silent; after that the group
    cannot be used any more. All calls but `abort` come from one thread.

    Any process that reaches the store can join. So all ranks show each other that they know the
    address, which has a secret, before any of them sends anything else.
    """

    store: Any  # rank 0's TCPStore or a connection to it
    secret: str
    _: KW_ONLY
    host: str
    rank: int
    size: int
    device: str
    timeout: float  # seconds, of every collective
    # Backends of torch.distributed, opened by `connect`.
    _messages: Any = field(init=False, default=None)
    _tensors: Any = field(init=False, default=None)
    _buffer: torch.Tensor = field(
        init=False, default_factory=lambda: torch.zeros(_PLAN_BYTES, dtype=torch.uint8)
    )

    @classmethod
    def listen(
        cls, *, host: str, size: int, device: str, timeout: float, start_timeout: float
    ) -> Self:
        """Creates rank 0's group, whose `address` the others join."""
        store = listen_store(host, size, start_timeout)
        secret = secrets.token_hex(_SECRET_BYTES)
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
        """Creates another rank's group. Raises RuntimeError if rank 0 cannot be reached in time."""
        place, _, secret = address.partition("/")
        store_host, _, port = place.rpartition(":")
        store = join_store(store_host, int(port), start_timeout)
        return cls(store, secret, host=host, rank=rank, size=size, device=device, timeout=timeout)

    @property
    def address(self) -> str:
        """Returns HOST:PORT/SECRET of rank 0's store; only the group's ranks may know it."""
        return f"{self.host}:{self.store.port}/{self.secret}"

    def connect(self) -> None:
        """Connects all ranks; waits up to the start timeout. Call it before the first collective.

        Raises RuntimeError if a rank does not come, or if another process comes in its place.
        """
        self.meet("here")
        self._messages = self._open("gloo")
        self._check_ranks()
        self._tensors = self._messages if self.device == "cpu" else self._open("nccl")

    def meet(self, stage: str) -> None:
        """Waits up to the start timeout until all ranks have reached a stage of the start.

        Raises RuntimeError if a rank does not come.
        """
        self.store.set(f"{stage}/{self.rank}", "")
        self.store.wait([f"{stage}/{rank}" for rank in range(self.size)])

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
        """Returns the sum of the ranks' x, of any shape; may overwrite x.

        On CPUs terms are added in float32, in the order of the ranks.
        """
        if self.device == "cpu" and self.size > 2:
            # Gloo's own sum begins at another rank in each part of a tensor, so a row's result
            # would depend on the rows beside it.
            total, *others = (part.float() for part in self.all_gather(x))
            for part in others:
                total += part
            return total.to(x.dtype)
        x = x.contiguous()
        self._tensors.allreduce([x]).wait()
        return x

    def all_gather(self, x: torch.Tensor) -> list[torch.Tensor]:
        """Returns every rank's x; all must have the same shape."""
        parts = [torch.empty_like(x) for _ in range(self.size)]
        self._tensors.allgather([parts], [x.contiguous()]).wait()
        return parts

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        """Overwrites x, contiguous and of any shape, with rank 0's x and returns it."""
        self._tensors.broadcast(x, 0).wait()
        return x

    def abort(self) -> None:
        """Aborts the collectives between GPUs; gloo's waits end by their deadlines.

        Uses a daemon thread, because NCCL's abort may block for as long as CUDA graphs refer to its
        communicator (pytorch#115388).
        """
        if self._tensors is not self._messages:
            threading.Thread(target=self._tensors.abort, name="tandem-abort", daemon=True).start()

    def broadcast_message(self, message: bytes) -> None:
        """Sends a message from rank 0 to the `receive_message` of all other ranks.

        A short message takes one collective, a long one two.
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


class TpExecutor(DelegatingExecutor):
    """Broadcasts each plan to the other ranks, then executes it on rank 0.

    Only the plan is sent, so a decode step costs some bytes per sequence. All other calls go to
    rank 0 alone, which holds the grammars and the whole draft model. The other ranks' samples of
    sequences with a grammar are not used, because the next plan has rank 0's token. `expedite`
    does not change the niceness of the other ranks.
    """

    def __init__(self, group: TpGroup, executor: Executor) -> None:
        super().__init__(executor)
        self._group = group
        self.num_plans = 0  # broadcast so far; any thread may read it

    def launch(self, plan: StepPlan, on_layers: OnLayers | None = None) -> Callable[[], Samples]:
        """Launches a plan on all ranks, see `Executor.launch`.

        Raises RuntimeError if a rank is lost. A layer that is computed here is computed on every
        rank, because it ends with a collective.
        """
        self.num_plans += 1
        self._group.broadcast_message(encode_plan(plan))
        return self._executor.launch(plan, on_layers)

    def close(self) -> None:
        """Ends `rank_loop` on the other ranks. Raises RuntimeError if a rank is lost."""
        self._group.broadcast_message(b"")


def rank_loop(
    group: TpGroup, executor: Executor, on_launch: Callable[[], None] = lambda: None
) -> None:
    """Executes rank 0's plans until rank 0 closes its executor.

    Calls `on_launch` after the launch of each. Raises RuntimeError if a rank is lost.
    """
    collect: Callable[[], Samples] | None = None
    while message := group.receive_message():
        launched = executor.launch(decode_plan(message))
        on_launch()
        if collect is not None:
            collect()
        collect = launched


def encode_plan(plan: StepPlan) -> bytes:
    """Encodes a plan as msgpack; its parts become tuples of their fields' values."""
    data: bytes = msgpack.packb(
        _PLAN(plan),
        default=lambda part: _VALUES[type(part)](part),
    )
    return data


def decode_plan(data: bytes) -> StepPlan:
    """Decodes a plan of `encode_plan`. Raises RuntimeError for anything else."""
    try:
        plan = dict(zip(_PLAN_FIELDS, msgpack.unpackb(data, use_list=False), strict=True))
        plan["sequences"] = tuple(map(_decode_step, plan["sequences"]))
        if plan["share"] is not None:
            plan["share"] = CpuShare(*plan["share"])
        return StepPlan(**plan)
    except (ValueError, TypeError) as error:
        raise RuntimeError("rank 0 has sent an unreadable plan") from error


def _decode_step(values: tuple[Any, ...]) -> SequenceStep:
    step = dict(zip(_STEP_FIELDS, values, strict=True))
    if step["state"] is not None:
        step["state"] = StatePlan(*step["state"])
    step["new_blocks"] = tuple(TableBlocks(*table) for table in step["new_blocks"])
    if step["sampling"] is not None:
        sampling = dict(zip(_SAMPLING_FIELDS, step["sampling"], strict=True))
        if sampling["watermark"] is not None:
            sampling["watermark"] = Watermark(
                **dict(zip(_WATERMARK_FIELDS, sampling["watermark"], strict=True))
            )
        step["sampling"] = SamplingParams(**sampling)
    return SequenceStep(**step)
