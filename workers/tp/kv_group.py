"""Moves KV cache in and out of one rank and, on rank 0, of its whole tensor-parallel group.

Rank 0 decides what concerns the group: the lease, the ack, whether a transfer is complete. The
other ranks use the same class without clients and obey rank 0's commands.
"""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from ...proto import worker_pb2
from ...proto.channel import PeerChannel
from ..engine.plan import FirstTokens
from ..transfer.endpoint import KvEndpoint
from ..transfer.receiver import merge
from ..transfer.shard_stream import FetchResult, FetchTarget
from .rank_client import RankClient, RankLost


class KvGroup:
    """Starts and stops the KV transfers of sequences. Lives in one event loop. When a client is
    lost, the worker is; nothing here recovers from it.
    """

    def __init__(self, endpoint: KvEndpoint, clients: Sequence[RankClient] = ()) -> None:
        """`endpoint` transfers this rank's part; `clients` are the ranks that rank 0 commands."""
        self._endpoint = endpoint
        self._clients = clients
        self._commanded: set[int] = set()  # sequences that the clients offer or fetch
        self._targets: dict[int, asyncio.Future[FetchTarget]] = {}
        self._fetches: dict[int, asyncio.Task[FetchResult] | asyncio.Task[int]] = {}
        self._stopping: dict[int, asyncio.Task[bool]] = {}

    @property
    def num_leases(self) -> int:
        """Offers that have not been withdrawn, acknowledged or expired."""
        return self._endpoint.sender.num_offers

    @property
    def num_transfers(self) -> int:
        """Streams out, fetches, streams in that are being closed, and transfers that are being
        stopped.
        """
        num_fetches = sum(not task.done() for task in self._fetches.values())
        num_streams = self._endpoint.sender.num_streams + self._endpoint.receiver.num_closing
        return num_streams + num_fetches + len(self._stopping)

    def offer(
        self,
        sequence_id: int,
        transfer_id: bytes,
        blocks: tuple[int, ...],
        num_tokens: int,
        prefix_hash: bytes,
    ) -> None:
        """Offers a sequence's KV cache, computed or not, to other workers on every rank."""
        self._endpoint.sender.offer(sequence_id, transfer_id, blocks, num_tokens, prefix_hash)
        handle = worker_pb2.KvHandle(transfer_id=transfer_id, num_tokens=num_tokens)
        if self._clients:
            self._commanded.add(sequence_id)
        offer = worker_pb2.KvTransfer(kv=handle, prefix_hash=prefix_hash, blocks=blocks)
        self._command(sequence_id, offer_kv=offer)

    def progress(self, sequence_id: int, num_ready: int, num_ahead: int, num_layers: int) -> None:
        """Reports that an offer's first num_ready tokens are computed, and the first num_ahead in
        the first num_layers layers. This holds on every rank, since each layer ends with a
        collective.
        """
        self._endpoint.sender.progress(sequence_id, num_ready, num_ahead, num_layers)
        progress = worker_pb2.KvProgress(
            num_ready=num_ready, num_ahead=num_ahead, num_layers=num_layers
        )
        self._command(sequence_id, kv_progress=progress)

    def complete(self, sequence_id: int, first: FirstTokens) -> None:
        """Reports that an offer's prefill is finished."""
        self._endpoint.sender.complete(sequence_id, first)
        progress = worker_pb2.KvProgress(first_tokens=first.tokens, first_logprobs=first.logprobs)
        self._command(sequence_id, kv_progress=progress)

    def fetch(
        self, sequence_id: int, handle: worker_pb2.KvHandle, prefix_hash: bytes
    ) -> "asyncio.Task[FetchResult]":
        """Fetches every rank's part of a KV cache once `set_target` is called; only then rank 0
        acknowledges it.

        The task raises TransferError if a part could not be fetched. After a failure or a cancel,
        `stop` tells when no rank writes any more.
        """
        task = self._fetches[sequence_id] = asyncio.create_task(
            self._begin_fetch(sequence_id, handle, prefix_hash)
        )
        return task

    def load(self, sequence_id: int, loading: Coroutine[Any, Any, int]) -> "asyncio.Task[int]":
        """Runs what fills blocks of a sequence, from the disk or by `fetch_now`; `stop` tells when
        nothing writes any more.
        """
        task = self._fetches[sequence_id] = asyncio.create_task(loading)
        return task

    async def fetch_now(
        self, sequence_id: int, handle: worker_pb2.KvHandle, prefix_hash: bytes, target: FetchTarget
    ) -> None:
        """Fetches every rank's part of a KV cache to a target that is known, in what `load` runs.
        Raises TransferError if a part could not be fetched; until `stop` the other ranks may then
        go on.
        """
        fetching = self._begin_fetch(sequence_id, handle, prefix_hash)
        self.set_target(sequence_id, *target)
        await fetching

    def read_disk(
        self, sequence_id: int, blocks: worker_pb2.DiskBlocks
    ) -> "list[asyncio.Future[int]]":
        """Has the other ranks fill blocks of a sequence from their disks, in what `load` runs; each
        returns how many it has filled, from the first on. Until `stop` they may go on, if they are
        not waited for.
        """
        if self._clients:
            self._commanded.add(sequence_id)
        return [client.ask(sequence_id, read_disk=blocks) for client in self._clients]

    def channel(self, address: str) -> PeerChannel:
        """Returns the channel to another worker, see `PeerChannels.get`."""
        return self._endpoint.receiver.connections.channel(address)

    def set_target(self, sequence_id: int, blocks: tuple[int, ...], num_cached: int) -> None:
        """Sets the blocks for a fetch and the number of tokens that the prefix cache holds already."""
        if sequence_id in self._targets:
            self._targets.pop(sequence_id).set_result((blocks, num_cached))
            self._command(
                sequence_id, kv_target=worker_pb2.KvTransfer(blocks=blocks, num_cached=num_cached)
            )

    def stop(self, sequence_id: int, then: Callable[[], None]) -> None:
        """Ends all transfers of a sequence. Calls `then` as soon as no rank reads or writes its
        blocks any more, which a cancel alone does not ensure. Never calls it if a rank is lost.
        """
        self._endpoint.sender.withdraw(sequence_id)
        self._targets.pop(sequence_id, None)
        pending: list[asyncio.Future[Any]] = []
        if (stopping := self._stopping.get(sequence_id)) is not None:
            pending.append(stopping)
        fetch = self._fetches.pop(sequence_id, None)
        if fetch is not None and not fetch.done():
            fetch.cancel()
            pending.append(fetch)
        if sequence_id in self._commanded:
            self._commanded.discard(sequence_id)
            pending += [client.ask(sequence_id, stop_kv=True) for client in self._clients]
        if not pending:
            then()
            return
        task = self._stopping[sequence_id] = asyncio.create_task(_call_after(pending, then))
        task.add_done_callback(lambda task: self._stopped(sequence_id, task))

    def _stopped(self, sequence_id: int, task: asyncio.Task[bool]) -> None:
        if self._stopping.get(sequence_id) is task:
            del self._stopping[sequence_id]

    async def close(self) -> None:
        """Ends all transfers and connections to other workers; the clients have been closed."""
        for task in self._fetches.values():
            task.cancel()
        await asyncio.gather(
            *self._fetches.values(), *self._stopping.values(), return_exceptions=True
        )
        await self._endpoint.close()

    def _command(self, sequence_id: int, **command: Any) -> None:
        """Sends one command to the clients, unless they have no transfer of the sequence."""
        if sequence_id in self._commanded:
            for client in self._clients:
                client.send(worker_pb2.RankControlRequest(sequence_id=sequence_id, **command))

    def _begin_fetch(
        self, sequence_id: int, handle: worker_pb2.KvHandle, prefix_hash: bytes
    ) -> Coroutine[Any, Any, FetchResult]:
        """Has the other ranks fetch their parts; returns what fetches this one's and waits for all."""
        fetch = worker_pb2.KvTransfer(kv=handle, prefix_hash=prefix_hash)
        parts = [client.ask(sequence_id, fetch_kv=fetch) for client in self._clients]
        if self._clients:
            self._commanded.add(sequence_id)
        target = self._targets[sequence_id] = asyncio.get_running_loop().create_future()
        return self._fetch(handle, prefix_hash, target, parts)

    async def _fetch(
        self,
        handle: worker_pb2.KvHandle,
        prefix_hash: bytes,
        target: "asyncio.Future[FetchTarget]",
        parts: "Sequence[asyncio.Future[worker_pb2.KvReceived]]",
    ) -> FetchResult:
        async with self._endpoint.receiver.fetch(handle, prefix_hash, target) as (
            first_tokens,
            received,
        ):
            others = await asyncio.gather(*parts)
        return first_tokens, merge([received, *others])


async def _call_after(pending: Sequence[asyncio.Future[Any]], then: Callable[[], None]) -> bool:
    """Returns whether `then` was called."""
    results = await asyncio.gather(*pending, return_exceptions=True)
    if any(isinstance(result, RankLost) or result is False for result in results):
        return False
    then()
    return True
