"""Transfers the KV cache of one rank and, on rank 0, of its whole tensor-parallel group.

Rank 0 decides for the group: the lease, the Ack, and whether a transfer is complete. The other
ranks use the same class without clients and obey rank 0's commands.
"""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol

from ...proto import worker_pb2
from ..engine.plan import FirstTokens
from ..kv_cache.tables import SequenceKv, TableBlocks
from ..transfer.frames import FetchResult, FetchTarget, merge
from .rank_client import RankClient, RankLost


class Offers(Protocol):
    """Offers the KV cache of one rank, as `KvSender` does."""

    @property
    def num_offers(self) -> int: ...

    @property
    def num_streams(self) -> int: ...

    def offer(
        self,
        sequence_id: int,
        transfer_id: bytes,
        place: SequenceKv,
        num_tokens: int,
        prefix_hash: bytes,
    ) -> None: ...

    def progress(
        self, sequence_id: int, num_ready: int, num_ahead: int = 0, num_layers: int = 0
    ) -> None: ...

    def complete(self, sequence_id: int, first_tokens: FirstTokens) -> None: ...

    def withdraw(self, sequence_id: int) -> None: ...


class Fetches(Protocol):
    """Fetches the KV cache of one rank, as `KvReceiver` does."""

    @property
    def num_closing(self) -> int: ...

    def fetch(
        self, handle: worker_pb2.KvHandle, prefix_hash: bytes, target: asyncio.Future[FetchTarget]
    ) -> AbstractAsyncContextManager[FetchResult]: ...


class Endpoint(Protocol):
    """Combines both sides of one rank's transfers, as `KvEndpoint` does."""

    @property
    def sender(self) -> Offers: ...

    @property
    def receiver(self) -> Fetches: ...

    def channel(self, address: str) -> Any:
        """Returns a channel for the stub of another worker."""
        ...

    async def close(self) -> None: ...


class KvGroup:
    """Starts and stops the KV transfers of sequences. Lives in one event loop.

    If a client is lost, the worker is lost; nothing here recovers from it.
    """

    def __init__(self, endpoint: Endpoint, clients: Sequence[RankClient] = ()) -> None:
        """Uses `endpoint` for this rank's part; `clients` are the ranks that rank 0 commands."""
        self._endpoint = endpoint
        self._clients = clients
        self._commanded: set[int] = set()  # sequences with a transfer on the clients
        self._targets: dict[int, asyncio.Future[FetchTarget]] = {}
        self._fetches: dict[int, asyncio.Task[FetchResult] | asyncio.Task[int]] = {}
        self._stopping: dict[int, asyncio.Task[bool]] = {}

    @property
    def num_leases(self) -> int:
        """Returns the number of offers that were not yet withdrawn, acknowledged or expired."""
        return self._endpoint.sender.num_offers

    @property
    def num_transfers(self) -> int:
        """Returns the number of transfers in progress.

        These are streams to receivers, fetches, streams from senders that are being closed, and
        transfers that are being stopped.
        """
        num_fetches = sum(not task.done() for task in self._fetches.values())
        num_streams = self._endpoint.sender.num_streams + self._endpoint.receiver.num_closing
        return num_streams + num_fetches + len(self._stopping)

    def offer(
        self,
        sequence_id: int,
        handle: worker_pb2.KvHandle,
        place: SequenceKv,
        prefix_hash: bytes,
    ) -> None:
        """Offers a sequence's KV cache, computed or not, to other workers on every rank."""
        self._endpoint.sender.offer(
            sequence_id, handle.transfer_id, place, handle.num_tokens, prefix_hash
        )
        if self._clients:
            self._commanded.add(sequence_id)
        offer = worker_pb2.KvTransfer(
            kv=handle, prefix_hash=prefix_hash, tables=_tables(place), state=place.state
        )
        self._command(sequence_id, offer_kv=offer)

    def progress(
        self, sequence_id: int, num_ready: int, num_ahead: int = 0, num_layers: int = 0
    ) -> None:
        """Reports which tokens of an offer are computed, on every rank.

        These are the first num_ready tokens in all layers, and the first num_ahead in the first
        num_layers layers. Rank 0's counts hold for every rank, because each layer ends with a
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
        """Fetches every rank's part of a KV cache after `set_target`; rank 0 then acknowledges it.

        The task raises TransferError if a part could not be fetched. After a failure or a cancel,
        call `stop` to learn when no rank writes any more.
        """
        task = self._fetches[sequence_id] = asyncio.create_task(
            self._begin_fetch(sequence_id, handle, prefix_hash)
        )
        return task

    def load(self, sequence_id: int, loading: Coroutine[Any, Any, int]) -> "asyncio.Task[int]":
        """Runs a load into a sequence's blocks, from disk or by `fetch_now`.

        Call `stop` to learn when nothing writes any more.
        """
        task = self._fetches[sequence_id] = asyncio.create_task(loading)
        return task

    async def fetch_now(
        self, sequence_id: int, handle: worker_pb2.KvHandle, prefix_hash: bytes, target: FetchTarget
    ) -> None:
        """Fetches every rank's part of a KV cache to a known target; must run inside `load`.

        Raises TransferError if a part could not be fetched. The other ranks may then continue until
        `stop`.
        """
        fetching = self._begin_fetch(sequence_id, handle, prefix_hash)
        self.set_target(sequence_id, target)
        await fetching

    def read_disk(
        self, sequence_id: int, blocks: worker_pb2.DiskBlocks
    ) -> "list[asyncio.Future[int]]":
        """Fills a sequence's blocks from the other ranks' disks; must run inside `load`.

        Each future returns the number of blocks that its rank has filled, counted from the first
        block. If the futures are not awaited, the ranks may continue until `stop`.
        """
        if self._clients:
            self._commanded.add(sequence_id)
        return [client.ask(sequence_id, read_disk=blocks) for client in self._clients]

    def channel(self, address: str) -> Any:
        """Returns the channel to another worker, as `PeerChannels.get` does."""
        return self._endpoint.channel(address)

    def set_target(self, sequence_id: int, target: FetchTarget) -> None:
        """Sets the target of a fetch."""
        if sequence_id in self._targets:
            self._targets.pop(sequence_id).set_result(target)
            command = worker_pb2.KvTransfer(
                tables=_tables(target.place),
                state=target.place.state,
                num_cached=target.num_cached,
            )
            self._command(sequence_id, kv_target=command)

    def stop(self, sequence_id: int, then: Callable[[], None]) -> None:
        """Ends all transfers of a sequence; then calls `then`.

        It calls `then` as soon as no rank reads or writes the sequence's blocks any more; a cancel
        alone does not ensure that. It never calls `then` if a rank is lost.
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
        """Ends all transfers and connections to other workers. Close the clients first."""
        for task in self._fetches.values():
            task.cancel()
        await asyncio.gather(
            *self._fetches.values(), *self._stopping.values(), return_exceptions=True
        )
        await self._endpoint.close()

    def _command(self, sequence_id: int, **command: Any) -> None:
        """Sends one command to the clients if they have a transfer of the sequence."""
        if sequence_id in self._commanded:
            for client in self._clients:
                client.send(worker_pb2.RankControlRequest(sequence_id=sequence_id, **command))

    def _begin_fetch(
        self, sequence_id: int, handle: worker_pb2.KvHandle, prefix_hash: bytes
    ) -> Coroutine[Any, Any, FetchResult]:
        """Starts the other ranks' fetches; returns the coroutine that fetches all parts."""
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


def place_of(command: worker_pb2.KvTransfer) -> SequenceKv:
    """Returns the blocks and the state of an offer or a target from rank 0."""
    return SequenceKv(
        tables=tuple(TableBlocks(tuple(table.blocks), table.first) for table in command.tables),
        state=command.state if command.HasField("state") else None,
    )


def _tables(place: SequenceKv) -> list[worker_pb2.BlockTable]:
    return [worker_pb2.BlockTable(first=table.first, blocks=table.blocks) for table in place.tables]


async def _call_after(pending: Sequence[asyncio.Future[Any]], then: Callable[[], None]) -> bool:
    """Calls `then` after all of `pending`, unless a rank is lost; returns whether it was called."""
    results = await asyncio.gather(*pending, return_exceptions=True)
    if any(isinstance(result, RankLost) or result is False for result in results):
        return False
    then()
    return True
