"""The exporter's side of a connection: shows what ways there are, and keeps the one that the puller chooses."""

import asyncio
import logging
import os
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator
from dataclasses import asdict
from functools import partial
from typing import Final

from ..kv_cache.store import SAMPLE_BYTES, KvStore
from .outlets import Outlet, open_outlet
from .shared import LeaseTable, host_id
from .transports import CONNECT_SECONDS, Means
from .wire import (
    FRAME_BYTES,
    PAIR_GONE,
    Choice,
    Hello,
    Message,
    Sample,
    TransferError,
    TransferKey,
    TransportError,
    Trial,
    Try,
    Welcome,
    checksum_of,
    decode,
    encode,
)

logger = logging.getLogger(__name__)

_TRIAL_SECONDS: Final = 2 * CONNECT_SECONDS  # until the puller has tried one way


class Acceptor:
    """The connections of this rank to those that pull from it, by their ids."""

    def __init__(self, kv: KvStore, *, epoch: int, means: Means, ledger: LeaseTable) -> None:
        self._kv = kv
        self._epoch = epoch
        self._means = means
        self._ledger = ledger
        self._sample = b""
        self._accepted: dict[bytes, _Accepted] = {}

    @property
    def num_connections(self) -> int:
        return len(self._accepted)

    def outlet(self, pair: bytes, transport: str) -> Outlet:
        """The way that a puller has chosen. Raises TransportError if it is gone."""
        accepted = self._accepted.get(pair)
        if accepted is None or transport not in accepted.outlets:
            raise TransportError(PAIR_GONE)
        return accepted.outlets[transport]

    def disconnect(self) -> None:
        """Ends all connections."""
        for accepted in self._accepted.values():
            accepted.end()

    async def serve(self, incoming: AsyncIterable[bytes]) -> AsyncGenerator[bytes, None]:
        """Answers one Connect stream for as long as it lives. Raises TransferError for whatever ends it but the
        puller."""
        frames = aiter(incoming)
        key, hello = read(await receive(frames, CONNECT_SECONDS))
        if not isinstance(hello, Hello) or key.transfer_id in self._accepted:
            raise TransferError("KV connect out of order")
        if hello.layout != asdict(self._kv.layout):
            raise TransferError("KV layouts differ")
        key = TransferKey(transfer_id=key.transfer_id, epoch=self._epoch)
        accepted = self._accepted[key.transfer_id] = _Accepted(key, self._means, self._ledger, self._make_sample())
        names = [name for name in self._means.usable() if self._reaches(name, hello)]
        listening = asyncio.create_task(accepted.listen(frames, names))
        listening.add_done_callback(accepted.check)
        try:
            yield encode(key, Welcome(transports=names, checksum=checksum_of(self._sample)))
            count = -(-SAMPLE_BYTES // FRAME_BYTES)
            for index in range(count):
                part = memoryview(self._sample)[index * FRAME_BYTES : (index + 1) * FRAME_BYTES]
                yield encode(key, Sample(index=index, count=count), part)
            while (frame := await accepted.outbox.get()) is not None:
                yield frame
            if accepted.error:
                raise accepted.error
        finally:
            del self._accepted[key.transfer_id]
            listening.cancel()
            accepted.close()

    def _reaches(self, name: str, hello: Hello) -> bool:
        here = name != "shared" or (self._ledger.describe() is not None and hello.host == host_id() != "")
        return here and name in hello.transports

    def _make_sample(self) -> bytes:
        """Noise, also in the memory's tail."""
        if not self._sample:
            self._sample = os.urandom(SAMPLE_BYTES)
            self._ledger.put_sample(self._sample)
        return self._sample


class _Accepted:
    """One connection."""

    def __init__(self, key: TransferKey, means: Means, ledger: LeaseTable, sample: bytes) -> None:
        self.outlets: dict[str, Outlet] = {}
        self.outbox: asyncio.Queue[bytes | None] = asyncio.Queue()  # bounded by what the pair takes; None is the end
        self.error: TransferError | None = None  # in which it has ended
        self._key = key
        self._means = means
        self._ledger = ledger
        self._sample = sample
        self._running: dict[str, asyncio.Task[None]] = {}
        self._chosen = ""

    async def listen(self, incoming: AsyncIterator[bytes], names: list[str]) -> None:
        """Does as the puller says until it says no more. Raises TransferError."""
        left = set(names)
        while (frame := await receive(incoming, None if self._chosen else _TRIAL_SECONDS)) is not None:
            _, message = read(frame, self._key)
            if isinstance(message, Try) and message.transport in left and not self._chosen:
                left.discard(message.transport)
                await self._try(message.transport)
            elif isinstance(message, Choice) and message.transport and not self._chosen:
                self._keep(message.transport)
            else:
                raise TransferError("KV connect out of order")

    def check(self, listening: "asyncio.Task[None]") -> None:
        """The puller says no more, or nothing that can be obeyed."""
        if not listening.cancelled():
            self._end_with(listening.exception())

    def end(self) -> None:
        self.outbox.put_nowait(None)

    def close(self) -> None:
        for name in list(self.outlets):
            self._close(name)

    async def _try(self, name: str) -> None:
        try:
            outlet = await open_outlet(name, self._means, self._ledger, self._sample, self._say)
        except (OSError, ValueError) as error:
            logger.warning("no KV transport %s: %s", name, error)
            self._say(Trial(transport=name, info={}))
            return
        self.outlets[name] = outlet
        self._say(Trial(transport=name, info=outlet.info()))
        running = self._running[name] = asyncio.create_task(outlet.run())
        running.add_done_callback(partial(self._lose, name))

    def _keep(self, chosen: str) -> None:
        self._chosen = chosen
        for name in list(self.outlets):
            if name != chosen:
                self._close(name)
        if chosen != "grpc" and chosen not in self.outlets:
            raise TransportError(PAIR_GONE)

    def _lose(self, name: str, running: "asyncio.Task[None]") -> None:
        """A way needs this side no more or has broken. Before the choice the puller sees for itself what is broken."""
        if not running.cancelled() and (error := running.exception()):
            self._close(name)
            if name == self._chosen:
                self._end_with(error)

    def _close(self, name: str) -> None:
        if outlet := self.outlets.pop(name, None):
            outlet.close()
            if running := self._running.pop(name, None):
                running.cancel()

    def _end_with(self, error: BaseException | None) -> None:
        if isinstance(error, TransferError):
            self.error = error
        elif error is not None:
            logger.error("a KV connection has failed", exc_info=error)
            self.error = TransferError("KV connection failed")
        self.end()

    def _say(self, message: Message) -> None:
        self.outbox.put_nowait(encode(self._key, message))


async def receive(incoming: AsyncIterator[bytes], timeout: float | None) -> bytes | None:
    """The puller's next frame; None if it has ended the stream. Raises TransferError if nothing comes."""
    try:
        async with asyncio.timeout(timeout):
            # With a default for the end, a cancel of `anext` would come out as RuntimeError.
            return await anext(incoming)
    except StopAsyncIteration:
        return None
    except TimeoutError as error:
        raise TransferError("KV puller fell silent") from error


def read(frame: bytes | None, expected: TransferKey | None = None) -> tuple[TransferKey, Message]:
    """Raises TransferError if there is no frame, it cannot be read or names another transfer."""
    if frame is None:
        raise TransferError("KV puller fell silent")
    key, message, _ = decode(frame)
    if expected is not None and key != expected:
        raise TransferError("KV frame of another transfer")
    return key, message
