"""Fetches KV cache from other workers into this rank's own blocks.

The receiver writes its own memory, so a late write into reused blocks cannot happen. It fails
closed: until the context of `fetch` is entered, no received data may be used. After the context was
cancelled or has raised, nothing is written any more. A rank pulls from every rank that holds a part
of its KV heads, over one stream for each shard.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Final

from ...proto import worker_pb2
from ...proto.channel import PeerChannel
from ..kv_cache.reshard import Piece, plan_layout
from .connections import ReceiverConnections
from .connector import TransferContext
from .frames import FetchResult, FetchTarget, TransferError, merge
from .shard_stream import ShardStream

# Describes a stream to rank 0 that only pins the cache and, at the end, acknowledges it.
_PIN: Final = Piece(source_rank=0, source_slots=range(0), target_slots=range(0))


class KvReceiver:
    """Fetches this rank's part of KV caches from other workers.

    The caller owns the channels.
    """

    def __init__(
        self,
        context: TransferContext,
        *,
        stall_seconds: float,
        channel: Callable[[str], PeerChannel],
    ) -> None:
        self.connections = ReceiverConnections(context, channel)
        self._context = context
        self._stall_seconds = stall_seconds
        self._closing: set[asyncio.Task[None]] = set()
        # By the source's degree of tensor parallelism.
        self._pieces: dict[int, tuple[Piece, ...]] = {}

    @property
    def num_closing(self) -> int:
        """Returns the number of finished fetches' streams that the sender has not ended yet."""
        return len(self._closing)

    @asynccontextmanager
    async def fetch(
        self, handle: worker_pb2.KvHandle, prefix_hash: bytes, target: asyncio.Future[FetchTarget]
    ) -> AsyncGenerator[FetchResult, None]:
        """Opens streams to ranks of the source group, and pulls when `target` is known.

        The open streams pin the cache. `prefix_hash` is the hash of the tokens that this worker was
        given.

        Inside the context all data has arrived and is verified, and the streams are still open. At
        a clean end of the context, rank 0 acknowledges the cache for its whole group; if the Ack is
        lost, the source's lease expires. After an exception in the context nothing is acknowledged
        and the streams break off: the cache can be fetched again. Raises TransferError on entry for
        every fault; the target's blocks then have undefined content.
        """
        streams: list[ShardStream] = []
        try:
            for piece in self._plan(handle):
                streams.append(
                    ShardStream(piece, handle, prefix_hash, self._context, self.connections)
                )
            yield await self._pull(streams, target)
        except BaseException:
            for stream in streams:
                stream.call.cancel()
            raise
        leading = next(
            (
                stream
                for stream in streams
                if stream.piece.source_rank == self._context.kv.rank == 0
            ),
            None,
        )
        for stream in streams:
            closing = asyncio.create_task(
                stream.close(self._stall_seconds, acknowledge=stream is leading)
            )
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)

    def _plan(self, handle: worker_pb2.KvHandle) -> tuple[Piece, ...]:
        """Returns the shards that this rank pulls; rank 0 has at least one stream to rank 0.

        Raises TransferError if the source's layout cannot be split into them.
        """
        kv = self._context.kv
        source_tp = len(handle.endpoints)
        if handle.layout != kv.layout.digest:
            raise TransferError("KV layouts differ")
        if source_tp not in self._pieces:
            try:
                pieces = plan_layout(kv.layout, source_tp, kv.tp, kv.rank)
            except ValueError as error:
                raise TransferError("KV layouts differ") from error
            if kv.rank == 0 and all(piece.source_rank for piece in pieces):
                pieces += (_PIN,)
            self._pieces[source_tp] = pieces
        return self._pieces[source_tp]

    async def _pull(
        self, streams: Sequence[ShardStream], target: asyncio.Future[FetchTarget]
    ) -> FetchResult:
        tasks: list[asyncio.Task[FetchResult]] = []
        loop = asyncio.get_running_loop()

        def extend() -> None:
            if not stall.expired():
                stall.reschedule(loop.time() + self._stall_seconds)

        async def pull(stream: ShardStream) -> FetchResult:
            try:
                return await stream.pull(target, stall, extend)
            except BaseException:
                for task in tasks:
                    if task is not asyncio.current_task():
                        task.cancel()
                raise

        try:
            # All streams share one deadline, which a frame on any of them extends: a stream that
            # only pins the cache is silent for long.
            async with asyncio.timeout(None) as stall:
                tasks += [asyncio.create_task(pull(stream)) for stream in streams]
                # Only gather cancels every task before `cancel` returns; wait_for, wait and
                # TaskGroup do not. From then on the blocks may have another owner. With
                # return_exceptions it loses no cancel that comes together with a failure.
                results = await asyncio.gather(*tasks, return_exceptions=True)
        except TimeoutError as error:
            raise TransferError("KV cache made no progress") from error
        return _merge(results)


def _merge(results: Sequence[FetchResult | BaseException]) -> FetchResult:
    """Returns the merged results of the streams of one fetch.

    Raises the failure of a stream, and TransferError if the streams bring different caches.
    """
    if failures := [result for result in results if isinstance(result, BaseException)]:
        # A stream that fails cancels the others, so its own exception comes before CancelledError.
        raise next((failure for failure in failures if isinstance(failure, Exception)), failures[0])
    parts = [result for result in results if not isinstance(result, BaseException)]
    if len({first_tokens for first_tokens, _ in parts}) > 1:
        raise TransferError("KV cache of another prompt")
    return parts[0][0], merge([received for _, received in parts])
