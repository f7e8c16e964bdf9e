"""KV cache on its way in and out of a whole tensor-parallel group: one call here does it on every rank.

Rank 0 holds what concerns the group: the lease, the ack, the word that a transfer is whole. A group of one rank has no
links, and all of this is its KV endpoint.
"""

import asyncio
import secrets
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from ...proto import worker_pb2
from ..engine.plan import FirstTokens
from ..transfer.endpoint import KvEndpoint
from ..transfer.receiver import FetchRequest, FetchResult, FetchTarget
from .rank_client import RankClient, RankLost


class KvGroup:
    """Lives in rank 0's event loop. When a link is lost, the worker is; nothing here mends it."""

    def __init__(self, endpoint: KvEndpoint, links: Sequence[RankClient]) -> None:
        self._endpoint = endpoint
        self._links = links
        self._elsewhere: set[int] = set()  # sequences for which the other ranks move something
        self._stopping: set[asyncio.Task[None]] = set()

    @property
    def num_leases(self) -> int:
        return self._endpoint.sender.num_offers

    @property
    def num_transfers(self) -> int:
        """Streams out, streams in that are not quite closed, and transfers that are being stopped."""
        return self._endpoint.sender.num_streams + self._endpoint.receiver.num_closing + len(self._stopping)

    def offer(self, sequence_id: int, blocks: tuple[int, ...], num_tokens: int, prefix_hash: bytes) -> bytes:
        """Opens an export on every rank; returns the transfer id."""
        transfer_id = secrets.token_bytes(16)
        self._endpoint.sender.offer(sequence_id, transfer_id, blocks, num_tokens, prefix_hash)
        for link in self._links:
            self._elsewhere.add(sequence_id)
            link.export(
                worker_pb2.Export(
                    sequence_id=sequence_id,
                    transfer_id=transfer_id,
                    blocks=blocks,
                    num_tokens=num_tokens,
                    prefix_hash=prefix_hash,
                )
            )
        return transfer_id

    def progress(self, sequence_id: int, num_ready: int, num_ahead: int, num_layers: int) -> None:
        """The first num_ready tokens are computed, the first num_ahead in the first num_layers layers; on every rank,
        since each layer ends with a collective."""
        self._endpoint.sender.progress(sequence_id, num_ready, num_ahead, num_layers)
        if sequence_id in self._elsewhere:
            progress = worker_pb2.Progress(
                sequence_id=sequence_id, num_ready=num_ready, num_ahead=num_ahead, num_layers=num_layers
            )
            for link in self._links:
                link.progress(progress)

    def complete(self, sequence_id: int, opening: FirstTokens) -> None:
        """The prefill is done."""
        self._endpoint.sender.complete(sequence_id, opening)
        complete = worker_pb2.Complete(
            sequence_id=sequence_id,
            opening=worker_pb2.Opening(tokens=opening.tokens, logprobs=opening.logprobs),
        )
        for link in self._links:
            link.complete(complete)

    async def fetch(
        self,
        sequence_id: int,
        handle: worker_pb2.KvHandle,
        prefix_hash: bytes,
        target: "asyncio.Future[FetchTarget]",
    ) -> FetchResult:
        """Brings every rank's part; only then does the other side let go. Raises TransferError if any is missing.

        After a failure or a cancel, `stop` says when no rank writes any more."""
        others = []
        for link in self._links:
            self._elsewhere.add(sequence_id)
            others.append(link.fetch(worker_pb2.Fetch(sequence_id=sequence_id, kv=handle, prefix_hash=prefix_hash)))
        target.add_done_callback(partial(self._place, sequence_id))
        async with self._endpoint.receiver.fetch(FetchRequest.of_handle(handle, prefix_hash), target) as own:
            parts = await asyncio.gather(*others)
        ways = [own.transport, *(part.transport for part in parts)]
        return replace(
            own,
            num_bytes=own.num_bytes + sum(part.num_bytes for part in parts),
            active_seconds=max([own.active_seconds, *(part.active_seconds for part in parts)]),
            transport="+".join(sorted({way for used in ways for way in used.split("+")})),
        )

    def stop(self, sequence_id: int, fetching: "asyncio.Task[None] | None", then: Callable[[], None]) -> None:
        """Ends whatever moves for a sequence, `fetching` if that is its fetch. Calls `then` as soon as no rank reads or
        writes its blocks any more: a cancel alone proves nothing. Never, if a rank is lost."""
        self._endpoint.sender.withdraw(sequence_id)
        waits: list[asyncio.Future[None]] = []
        if fetching is not None and not fetching.done():
            fetching.cancel()
            waits.append(fetching)
        if sequence_id in self._elsewhere:
            self._elsewhere.discard(sequence_id)
            waits += [link.stop(sequence_id) for link in self._links]
        if not waits:
            then()
            return
        task = asyncio.create_task(_after(waits, then))
        self._stopping.add(task)
        task.add_done_callback(self._stopping.discard)

    async def close(self) -> None:
        """Ends all connections to other workers; the links have been closed."""
        await asyncio.gather(*self._stopping)
        await self._endpoint.close()

    def _place(self, sequence_id: int, target: "asyncio.Future[FetchTarget]") -> None:
        if not target.cancelled():
            place = target.result()
            for link in self._links:
                link.place(worker_pb2.Place(sequence_id=sequence_id, blocks=place.blocks, num_cached=place.num_cached))


async def _after(waits: list["asyncio.Future[None]"], then: Callable[[], None]) -> None:
    results = await asyncio.gather(*waits, return_exceptions=True)
    if not any(isinstance(result, RankLost) for result in results):
        then()
