"""Sends bytes between two ranks over a process group of their own: gloo on hosts, NCCL on GPUs.

Messages arrive in order, and the receiver must know their lengths. All calls into torch run in a
thread of the group. A group that breaks stays broken. A call that fails, is cancelled or exceeds
the timeout breaks it, because the two ranks then disagree about which message comes next.

On a GPU the thread has a stream of its own. On the default stream, where the steps run, messages
would wait for steps and steps for messages.
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
from ..host.streams import DeviceData, device_checksum
from ..host.threads import settle
from .backend import Rendezvous, meet_peer, open_group
from .frames import TransferError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_SECRET_BYTES: Final = 16
_Future = asyncio.Future[Any]


@dataclass(eq=False, repr=False)
class P2pGroup:
    """Connects two ranks privately.

    One side calls `listen` and `accept`, the other side `join`. The group must be used and closed
    in the event loop that created it. Closing or breaking the group frees its thread and sockets:
    at once if no call is in progress, otherwise when that call has ended, at the latest after the
    timeout (gloo cannot be interrupted).
    """

    place: tuple[str, int]  # host and port at which the first side listens
    secret: str
    _: KW_ONLY
    host: str
    backend: str
    device: str  # of the tensors
    timeout: float  # seconds, of every call
    server: socket.socket | None = None  # the first side's listening socket
    _store: "Store | None" = field(init=False, default=None)  # outlives the group
    _group: Any = field(init=False, default=None)  # torch's own types know neither send nor recv
    _reason: str = field(init=False, default="")  # why it is broken
    _loop: asyncio.AbstractEventLoop = field(init=False, default_factory=asyncio.get_running_loop)
    _calls: queue.SimpleQueue[tuple[_Future, Callable[[], Any]] | None] = field(
        init=False, default_factory=queue.SimpleQueue
    )
    _pending: set[_Future] = field(init=False, default_factory=set)

    def __post_init__(self) -> None:
        self._thread = threading.Thread(target=self._work, name="kv-p2p", daemon=True)
        self._thread.start()
        # A thread that returns from torch after the interpreter's end kills the process by a
        # signal.
        atexit.register(self._leave)

    @classmethod
    def listen(
        cls, host: str, *, backend: str = "gloo", device: str = "cpu", timeout: float
    ) -> "P2pGroup":
        """Opens the first side. Raises OSError if this machine has no such interface.

        `timeout` is in seconds, for the wait for the other side and for every call.
        """
        server = listen(host, 0)
        place = (host, server.getsockname()[1])
        secret = secrets.token_hex(_SECRET_BYTES)
        return cls(
            place, secret, host=host, backend=backend, device=device, timeout=timeout, server=server
        )

    @property
    def address(self) -> str:
        """Returns the argument for the other side's `join`; it contains a secret."""
        return f"{self.place[0]}:{self.place[1]}/{self.secret}"

    async def accept(self) -> None:
        """Returns when the other side has joined and has shown that it knows the address.

        Raises TransferError, for example if torch lacks the backend.
        """
        await self._call(self._open)

    @classmethod
    async def join(
        cls, address: str, *, host: str, backend: str = "gloo", device: str = "cpu", timeout: float
    ) -> "P2pGroup":
        """Opens the other side, which binds `host`. Raises TransferError.

        The other arguments are as in `listen`.
        """
        place, _, secret = address.partition("/")
        peer, _, port = place.rpartition(":")
        if (
            not peer
            or not port.isdecimal()
            or int(port) > 65535
            or len(secret) != 2 * _SECRET_BYTES
        ):
            raise TransferError("KV process group with an impossible address")
        group = cls(
            (peer, int(port)), secret, host=host, backend=backend, device=device, timeout=timeout
        )
        await group._call(group._open)
        return group

    @property
    def rank(self) -> int:
        return 0 if self.server else 1

    @property
    def broken(self) -> bool:
        return bool(self._reason)

    async def send(self, data: bytearray | memoryview | DeviceData) -> None:
        """Sends the bytes, at least one; returns when they have left, not when they have arrived.

        The bytes must not change before this returns. If this fails, they must not change before
        the call in progress in the group's thread has ended. Raises TransferError.
        """
        await self._call(lambda: self._send(data))

    async def receive(self, num_bytes: int) -> memoryview:
        """Returns the other side's next message, of `num_bytes` > 0. Raises TransferError."""
        received: memoryview = await self._call(lambda: self._receive(num_bytes))
        return received

    async def receive_on_device(self, num_bytes: int) -> DeviceData:
        """Does the same as `receive`, but leaves the message on the device."""
        received: DeviceData = await self._call(lambda: self._receive_on_device(num_bytes))
        return received

    def close(self) -> None:
        """Closes the group; current and later calls raise TransferError. Idempotent."""
        self._break("KV process group closed")

    async def _call(self, operation: Callable[[], Any]) -> Any:
        """Runs the operation in the group's thread, after all earlier ones."""
        self._check()
        future: _Future = self._loop.create_future()
        self._pending.add(future)
        self._calls.put((future, operation))
        try:
            async with asyncio.timeout(self.timeout):
                return await future
        except TimeoutError as error:
            self._break("KV process group timed out")
            raise TransferError(self._reason) from error
        except (RuntimeError, OSError, ValueError) as error:
            self._break("KV process group broke")
            raise TransferError(self._reason) from error
        except BaseException:
            self._break("KV process group abandoned by a cancelled call")
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
            # `abort` takes long, and it frees the waiting thread only if another thread calls it.
            threading.Thread(target=self._group.abort, name="kv-p2p-abort", daemon=True).start()

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
            except Exception as error:  # `_call` raises it again
                failure = error
            with suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(settle, future, result, failure)
            del call, future, operation, result, failure
        # Freed in this thread, because that may take time.
        self._group = self._store = None
        if self.server:
            self.server.close()
        atexit.unregister(self._leave)

    def _open(self) -> None:
        if self.backend == "nccl":
            # The device is set by its index: torch.cuda.set_device("cuda") raises.
            index = torch.device(self.device).index
            torch.cuda.set_device(torch.cuda.current_device() if index is None else index)
            torch.cuda.set_stream(torch.cuda.Stream())  # type: ignore[no-untyped-call]
        halves = self.secret[:_SECRET_BYTES].encode(), self.secret[_SECRET_BYTES:].encode()
        self._store = meet_peer(self.place, self.server, self.backend, self.timeout, halves[0])
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
        # Any process may connect to the interface. So each side shows one half of the secret,
        # the joining side first.
        if self.rank == 0:
            self._expect(halves[0])
        self._send(bytearray(halves[1 - self.rank]))
        if self.rank == 1:
            self._expect(halves[1])

    def _expect(self, secret: bytes) -> None:
        if not hmac.compare_digest(bytes(self._receive(len(secret))), secret):
            raise RuntimeError("the other side does not know the secret")

    def _send(self, data: bytearray | memoryview | DeviceData) -> None:
        if isinstance(data, DeviceData):
            self._run("send", data.tensor)
        else:
            self._run("send", torch.frombuffer(data, dtype=torch.uint8).to(self.device))

    def _receive(self, num_bytes: int) -> memoryview:
        received = self._receive_tensor(num_bytes)
        array: npt.NDArray[np.uint8] = received.cpu().numpy()
        return array.data

    def _receive_on_device(self, num_bytes: int) -> DeviceData:
        received = self._receive_tensor(num_bytes)
        return DeviceData(received, checksum=int(device_checksum(received)))

    def _receive_tensor(self, num_bytes: int) -> torch.Tensor:
        received = torch.empty(num_bytes, dtype=torch.uint8, device=self.device)
        self._run("recv", received)
        return received

    def _run(self, name: str, tensor: torch.Tensor) -> None:
        if self._group is None:
            raise RuntimeError("not open")
        work = getattr(self._group, name)([tensor], 1 - self.rank, 0)
        if self.backend != "nccl":
            work.wait(timedelta(seconds=self.timeout))
            return
        # The stream waits for the message, and this thread for the stream. With a timeout `wait`
        # would poll each millisecond. After the timeout, `_break` ends the message.
        work.wait()
        done = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        done.record()
        done.synchronize()
