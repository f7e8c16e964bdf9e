"""Sends bytes between two ranks over a process group of their own: gloo for host memory, NCCL for
GPU memory.

Messages arrive in order, and the receiver must know their lengths. All calls into torch run in a
thread of the pair. A
pair is either whole or broken for good: a call that fails, is cancelled or is not done within the
timeout breaks it, because then it is not known which message comes next.
"""

import asyncio
import atexit
import hmac
import queue
import secrets
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt
import torch

from ...proto.addresses import listen
from ..host.threads import settle
from .backend import Rendezvous, meet_peer, open_group
from .frames import TransferError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_SECRET_BYTES: Final = 16
_Future = asyncio.Future[Any]


@dataclass(eq=False, repr=False)
class P2pGroup:
    """Connects two ranks privately. Made by `listen` and `accept` on one side, `join` on the other;
    used and closed in the event loop that made it. Closing it, or breaking it, frees its thread and
    sockets: at once if it is idle, else when the call in progress has ended, after the timeout at
        the latest (gloo cannot be interrupted).
    """

    place: tuple[str, int]  # where the first side listens
    secret: str
    _: KW_ONLY
    host: str
    backend: str
    device: str  # of the tensors
    timeout: float  # seconds, of every call
    server: socket.socket | None = None  # of the first side
    _store: "Store | None" = field(init=False, default=None)  # outlives the group
    _group: Any = field(init=False, default=None)  # torch's own types know neither send nor recv
    _reason: str = field(init=False, default="")  # why it is broken
    _loop: asyncio.AbstractEventLoop = field(init=False, default_factory=asyncio.get_running_loop)
    _calls: queue.SimpleQueue[tuple[_Future, Callable[[], Any]] | None] = field(
        init=False, default_factory=queue.SimpleQueue
    )
    _pending: set[_Future] = field(init=False, default_factory=set)

    def __post_init__(self) -> None:
        self._thread = threading.Thread(target=self._work, name="kv-pair", daemon=True)
        self._thread.start()
        # A thread that comes out of torch when the interpreter has gone ends the process with a
        # signal.
        atexit.register(self._leave)

    @classmethod
    def listen(
        cls, host: str, *, backend: str = "gloo", device: str = "cpu", timeout: float
    ) -> "P2pGroup":
        """Opens the first side. `timeout` is in seconds, of the wait for the other side and of
        every call.

        Raises OSError if there is no such interface.
        """
        server = listen(host, 0)
        place, secret = (host, server.getsockname()[1]), secrets.token_hex(_SECRET_BYTES)
        return cls(
            place, secret, host=host, backend=backend, device=device, timeout=timeout, server=server
        )

    @property
    def address(self) -> str:
        """What the other side's `join` needs; it holds a secret."""
        return f"{self.place[0]}:{self.place[1]}/{self.secret}"

    async def accept(self) -> None:
        """Returns when the other side has joined and has shown that it knows the address. Raises
        TransferError, also if torch lacks the backend.
        """
        await self._call(self._open)

    @classmethod
    async def join(
        cls, address: str, *, host: str, backend: str = "gloo", device: str = "cpu", timeout: float
    ) -> "P2pGroup":
        """Opens the other side, which binds `host`; the rest is as in `listen`. Raises
        TransferError.
        """
        place, _, secret = address.partition("/")
        peer, _, port = place.rpartition(":")
        if (
            not peer
            or not port.isdecimal()
            or int(port) > 65535
            or len(secret) != 2 * _SECRET_BYTES
        ):
            raise TransferError("KV pair with an impossible address")
        pair = cls(
            (peer, int(port)), secret, host=host, backend=backend, device=device, timeout=timeout
        )
        await pair._call(pair._open)
        return pair

    @property
    def rank(self) -> int:
        return 0 if self.server else 1

    @property
    def broken(self) -> bool:
        return bool(self._reason)

    async def send(self, data: bytearray | memoryview) -> None:
        """Returns when the bytes, at least one, have left, not when they have arrived; until then,
        or until the call in progress has ended if this one fails, they must not change. Raises
        TransferError.
        """
        await self._call(lambda: self._send(data))

    async def receive(self, num_bytes: int) -> memoryview:
        """Returns the other side's next message, which has this length, not 0. Raises
        TransferError.
        """
        received: memoryview = await self._call(lambda: self._receive(num_bytes))
        return received

    def close(self) -> None:
        """Ends the pair: calls under way and later ones raise TransferError. Idempotent."""
        self._break("KV pair closed")

    async def _call(self, operation: Callable[[], Any]) -> Any:
        """Runs it in the thread, after those before it."""
        self._check()
        future: _Future = self._loop.create_future()
        self._pending.add(future)
        self._calls.put((future, operation))
        try:
            async with asyncio.timeout(self.timeout):
                return await future
        except TimeoutError as error:
            self._break("KV pair fell silent")
            raise TransferError(self._reason) from error
        except (RuntimeError, OSError, ValueError) as error:
            self._break("KV pair broke")
            raise TransferError(self._reason) from error
        except BaseException:
            self._break("KV pair given up")
            raise
        finally:
            self._pending.discard(future)

    def _check(self) -> None:
        if self._reason:
            raise TransferError(self._reason)

    def _break(self, reason: str) -> None:
        if self._reason:
            return
        self._reason = reason
        self._calls.put(None)
        if self.server:
            with suppress(OSError):  # ends the wait for the other side
                self.server.shutdown(socket.SHUT_RDWR)
        for future in self._pending:
            if not future.done():
                future.set_exception(TransferError(reason))
        if self._group and self.backend == "nccl":
            # Takes long, and only from another thread does it free the one that waits.
            threading.Thread(target=self._group.abort, name="kv-pair-abort", daemon=True).start()

    def _leave(self) -> None:
        self._calls.put(None)
        self._thread.join(self.timeout)

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            future, operation = call
            if self._reason:
                continue
            result: Any = None
            failure: Exception | None = None
            try:
                result = operation()
            except Exception as error:  # raised again where the call is awaited
                failure = error
            with suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(settle, future, result, failure)
            del call, future, operation, result, failure
        # Frees what they hold here, where it may take time.
        self._group = self._store = None
        if self.server:
            self.server.close()
        atexit.unregister(self._leave)

    def _open(self) -> None:
        if self.backend == "nccl":
            # The thread's device, by its index: torch.cuda.set_device("cuda") raises.
            index = torch.device(self.device).index
            torch.cuda.set_device(torch.cuda.current_device() if index is None else index)
        self._store = meet_peer(self.place, self.server, self.backend, self.timeout)
        try:
            self._group = open_group(
                self._store,
                backend=self.backend,
                rank=self.rank,
                size=2,
                host=self.host,
                timeout=self.timeout,
                outlives_peers=True,
            )
        finally:
            if isinstance(self._store, Rendezvous):
                self._store.close()
        # Any process may connect to the interface: each side shows one half of the secret, the
        # joining one first.
        halves = self.secret[:_SECRET_BYTES].encode(), self.secret[_SECRET_BYTES:].encode()
        if self.rank == 0:
            self._expect(halves[0])
        self._send(bytearray(halves[1 - self.rank]))
        if self.rank == 1:
            self._expect(halves[1])

    def _expect(self, secret: bytes) -> None:
        if not hmac.compare_digest(bytes(self._receive(len(secret))), secret):
            raise RuntimeError("the other side does not know the secret")

    def _send(self, data: bytearray | memoryview) -> None:
        self._run("send", torch.frombuffer(data, dtype=torch.uint8).to(self.device))

    def _receive(self, num_bytes: int) -> memoryview:
        received = torch.empty(num_bytes, dtype=torch.uint8, device=self.device)
        self._run("recv", received)
        array: npt.NDArray[np.uint8] = received.cpu().numpy()
        return array.data

    def _run(self, name: str, tensor: torch.Tensor) -> None:
        if self._group is None:
            raise RuntimeError("not open")
        # Without a limit of its own a call of NCCL would only make the stream wait.
        getattr(self._group, name)([tensor], 1 - self.rank, 0).wait(timedelta(seconds=self.timeout))
