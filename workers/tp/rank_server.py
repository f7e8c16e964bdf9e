"""One rank other than 0, in a process of its own: computes what rank 0 plans, moves its part of the KV cache.

Rank 0 of the group leads it over one stream and for as long as that stream lives; `ended` is then set, and whoever owns
the process ends it.
"""

import asyncio
import logging
from collections.abc import AsyncIterator
from functools import partial
from typing import Self

import grpc
import grpc.aio

from ...proto import worker_pb2, worker_pb2_grpc
from ...proto.channel import bind, peer_server
from ..engine.plan import FirstTokens
from ..malloc import keep_freed_memory
from ..model.device import enter_device
from ..threads import in_thread
from ..transfer.connector import KvMover
from ..transfer.messages import parse_layout
from ..transfer.receiver import Target, Want
from ..transfer.wire import TransferError, TransferKey
from .process_group import TpGroup, rank_loop
from .rank import Rank, RankConfig, enter_engine_thread, load_rank
from .rank_client import SILENCE_SECONDS, Outbox

logger = logging.getLogger(__name__)

_FIRST_SECONDS = 30.0  # until rank 0 says its first word


class RankServer(worker_pb2_grpc.RankServicer):
    """Serves `tandem.v1.Rank`, and the KV endpoint of the rank once it is loaded. Make one with `start`."""

    def __init__(self, config: RankConfig) -> None:
        self.address = ""
        self.ended = asyncio.Event()
        self._config = config
        self._outbox: Outbox[worker_pb2.RankEvent] = Outbox()
        self._mover: KvMover | None = None
        self._targets: dict[int, asyncio.Future[Target]] = {}
        self._fetches: dict[int, asyncio.Task[None]] = {}
        self._broken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._server = peer_server()
        self._kv_server = peer_server()

    @classmethod
    async def start(cls, config: RankConfig) -> Self:
        """Binds config.host and config.port and waits for rank 0. Raises OSError for a port that is taken."""
        keep_freed_memory()
        enter_device(config.device)  # this thread reads and writes KV cache
        server = cls(config)
        worker_pb2_grpc.add_RankServicer_to_server(server, server._server)  # type: ignore[no-untyped-call]
        server.address = bind(server._server, config.host, config.port)
        await server._server.start()
        return server

    @property
    def num_moving(self) -> int:
        """Transfers in and exports that rank 0 has not stopped yet."""
        return len(self._fetches) + (self._mover.exporter.num_exports if self._mover else 0)

    async def stop(self) -> None:
        """Ends everything; rank 0 then knows it lost."""
        await self._server.stop(0)
        await self._kv_server.stop(0)
        for task in self._fetches.values():
            task.cancel()
        await asyncio.gather(*self._fetches.values(), return_exceptions=True)
        if self._mover:
            await self._mover.close()
        self.ended.set()

    async def Lead(
        self,
        request_iterator: AsyncIterator[worker_pb2.LeadRequest],
        context: grpc.aio.ServicerContext[worker_pb2.LeadRequest, worker_pb2.LeadResponse],
    ) -> None:
        """Rank 0's hold, see the proto. There is one in the life of a rank."""
        requests = aiter(request_iterator)
        joined: asyncio.Future[worker_pb2.Join] = asyncio.get_running_loop().create_future()
        # Each ends only when the rank's time is over, so the first that ends, ends all.
        tasks = [
            asyncio.create_task(self._listen(requests, joined)),
            asyncio.create_task(self._work(joined)),
            asyncio.create_task(self._speak(context)),
        ]
        try:
            await asyncio.wait((*tasks, self._broken), return_when=asyncio.FIRST_COMPLETED)
        finally:
            self.ended.set()  # before the first await: rank 0 may cancel the call at any moment
            self._broken.cancel()
            for task in tasks:
                task.cancel()
            for result in await asyncio.gather(*tasks, self._broken, return_exceptions=True):
                if isinstance(result, Exception):
                    logger.error("rank of %s has failed", self._config.model, exc_info=result)

    async def _listen(
        self, requests: AsyncIterator[worker_pb2.LeadRequest], joined: "asyncio.Future[worker_pb2.Join]"
    ) -> None:
        """Until rank 0 ends the stream. Raises TimeoutError if it falls silent."""
        while True:
            # While either side loads a model, it may be deaf.
            try:
                async with asyncio.timeout(SILENCE_SECONDS if self._mover else None):
                    request = await anext(requests)
            except StopAsyncIteration:
                return
            for command in request.commands:
                if command.HasField("join"):
                    joined.set_result(command.join)
                elif self._mover:
                    self._obey(command, self._mover)

    async def _speak(self, context: grpc.aio.ServicerContext[worker_pb2.LeadRequest, worker_pb2.LeadResponse]) -> None:
        while True:
            await context.write(worker_pb2.LeadResponse(events=await self._outbox.take()))

    async def _work(self, joined: "asyncio.Future[worker_pb2.Join]") -> None:
        """Loads the model and follows rank 0 to the end. Raises what stopped it before."""
        async with asyncio.timeout(_FIRST_SECONDS):
            join = await joined
        group, rank = await in_thread(partial(self._load, join), "tandem-load")
        mover = KvMover(
            rank.kv,
            epoch=join.epoch,
            lease_seconds=None,
            stall_seconds=self._config.stall_seconds,
            on_release=lambda sequence_id: None,
            means=self._config.means,
        )
        mover.serve_on(self._kv_server)
        endpoint = bind(self._kv_server, self._config.host, 0)
        await self._kv_server.start()
        self._mover = mover
        self._outbox.put(worker_pb2.RankEvent(ready=worker_pb2.Ready(endpoint=endpoint, num_blocks=rank.num_blocks)))
        await in_thread(partial(self._follow, group, rank), "tandem-engine")

    def _load(self, join: worker_pb2.Join) -> tuple[TpGroup, Rank]:
        group = TpGroup.join(
            join.store,
            host=self._config.host,
            rank=join.rank,
            size=join.size,
            device=self._config.device,
            timeout=join.timeout_seconds,
            start_timeout=self._config.start_seconds,
        )
        return group, load_rank(self._config, group)

    def _follow(self, group: TpGroup, rank: Rank) -> None:
        enter_engine_thread(self._config)
        rank_loop(group, rank.executor)

    def _obey(self, command: worker_pb2.RankCommand, mover: KvMover) -> None:
        match command.WhichOneof("command"):
            case "export":
                export = command.export
                mover.exporter.offer(
                    export.sequence_id,
                    export.transfer_id,
                    tuple(export.blocks),
                    export.num_tokens,
                    export.prefix_hash,
                )
            case "progress":
                progress = command.progress
                mover.exporter.progress(
                    progress.sequence_id, progress.num_ready, progress.num_ahead, progress.num_layers
                )
            case "complete":
                opening = command.complete.opening
                mover.exporter.complete(
                    command.complete.sequence_id,
                    FirstTokens(tokens=tuple(opening.tokens), logprobs=tuple(opening.logprobs)),
                )
            case "fetch":
                sequence_id = command.fetch.sequence_id
                target = self._targets[sequence_id] = asyncio.get_running_loop().create_future()
                fetch = self._fetches[sequence_id] = asyncio.create_task(self._fetch(command.fetch, mover, target))
                fetch.add_done_callback(self._check_task)
            case "place":
                place = command.place
                if place.sequence_id in self._targets:
                    self._targets.pop(place.sequence_id).set_result(
                        Target(blocks=tuple(place.blocks), num_cached=place.num_cached)
                    )
            case "stop":
                self._stop(command.stop.sequence_id, mover)

    async def _fetch(self, fetch: worker_pb2.Fetch, mover: KvMover, target: "asyncio.Future[Target]") -> None:
        handle = fetch.kv
        want = Want(
            key=TransferKey(transfer_id=handle.transfer_id, epoch=handle.epoch),
            num_tokens=handle.num_tokens,
            prefix_hash=fetch.prefix_hash,
        )
        try:
            async with mover.puller.fetch(handle.endpoints, parse_layout(handle.layout), want, target) as fetched:
                pass
        except TransferError as error:
            logger.warning("%s", error)
            event = worker_pb2.RankEvent(fetch_failed=worker_pb2.FetchFailed(sequence_id=fetch.sequence_id))
        else:
            event = worker_pb2.RankEvent(
                fetched=worker_pb2.Fetched(
                    sequence_id=fetch.sequence_id,
                    num_bytes=fetched.num_bytes,
                    active_seconds=fetched.active_seconds,
                    transport=fetched.transport,
                )
            )
        self._outbox.put(event)

    def _check_task(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) and not self._broken.done():
            self._broken.set_exception(error)

    def _stop(self, sequence_id: int, mover: KvMover) -> None:
        """Tells rank 0 when nothing touches the sequence's blocks any more."""
        mover.exporter.withdraw(sequence_id)
        self._targets.pop(sequence_id, None)
        stopped = worker_pb2.RankEvent(stopped=worker_pb2.Stopped(sequence_id=sequence_id))
        fetch = self._fetches.pop(sequence_id, None)
        if fetch is None or fetch.done():
            self._outbox.put(stopped)
        else:
            fetch.add_done_callback(lambda task: self._outbox.put(stopped))
            fetch.cancel()
