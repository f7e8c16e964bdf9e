"""Serves one rank other than 0, in a process of its own.

The rank executes rank 0's plans and transfers its part of the KV cache. Rank 0 controls it over one
stream, for as long as that stream lives. After that `ended` is set, and the owner of the process
ends it.
"""

import asyncio
import logging
from collections.abc import AsyncIterator
from functools import partial
from typing import Self

import grpc
import grpc.aio

from ...proto import worker_pb2, worker_pb2_grpc
from ...proto.channel import PeerServer
from ..engine.plan import FirstTokens
from ..host.malloc import keep_freed_memory
from ..host.threads import in_thread, settle
from ..kv_cache.store import KvStore
from ..model.device import enter_device
from ..transfer.endpoint import KvEndpoint
from ..transfer.frames import TransferError
from ..transfer.sender import KvSender
from ..transfer.shard_stream import FetchResult
from .adapters import LoadOnRank
from .kv_group import KvGroup
from .process_group import TpGroup, rank_loop
from .rank import Rank, RankConfig, enter_engine_thread, load_rank
from .rank_client import next_or_heartbeat, unless_silent
from .rank_disk import RankDisk

logger = logging.getLogger(__name__)

_FIRST_SECONDS = 30.0  # timeout of rank 0's first command
_NUM_HASHES = 65_536  # maximum in one message, in which each takes 18 bytes


class RankServer(worker_pb2_grpc.RankServicer):
    """Serves `tandem.v1.Rank`, and the KV endpoint of the rank once it is loaded.

    Use `start` to create one.
    """

    def __init__(self, config: RankConfig) -> None:
        self.address = ""
        self.ended = asyncio.Event()
        self._config = config
        self._events: asyncio.Queue[worker_pb2.RankControlResponse] = asyncio.Queue()
        self._is_led = False
        self._kv: KvGroup | None = None
        self._load_adapter: LoadOnRank | None = None
        self._rank_kv: KvStore | None = None
        self._disk: RankDisk | None = None
        self._writing: asyncio.Task[None] | None = None  # to the disk
        self._failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._server = PeerServer(config.identity)
        self._kv_server = PeerServer(config.identity)

    @classmethod
    async def start(cls, config: RankConfig) -> Self:
        """Binds config.host and config.port. Raises OSError if the port is taken."""
        keep_freed_memory()
        enter_device(config.device)  # this thread reads and writes KV cache
        server = cls(config)
        add_servicer = worker_pb2_grpc.add_RankServicer_to_server
        add_servicer(server, server._server)  # type: ignore[no-untyped-call]
        server.address = server._server.bind(config.host, config.port)
        await server._server.start()
        return server

    @property
    def num_transfers(self) -> int:
        """Returns the number of transfers and offers that rank 0 has not stopped yet."""
        return self._kv.num_transfers + self._kv.num_leases if self._kv else 0

    async def stop(self) -> None:
        """Ends everything; rank 0 then detects the loss."""
        await self._server.stop(0)
        await self._kv_server.stop(0)
        if self._kv:
            await self._kv.close()
        if self._disk:
            self._disk.files.close()
            self._disk = None
        self.ended.set()

    async def Control(
        self,
        request_iterator: AsyncIterator[worker_pb2.RankControlRequest],
        context: grpc.aio.ServicerContext[
            worker_pb2.RankControlRequest, worker_pb2.RankControlResponse
        ],
    ) -> None:
        """Serves rank 0, as the proto defines; a rank has one such stream in its life."""
        if self._is_led:
            await context.abort(grpc.StatusCode.ALREADY_EXISTS, "the rank has a leader")
        self._is_led = True
        requests = aiter(request_iterator)
        joined: asyncio.Future[worker_pb2.JoinGroup] = asyncio.get_running_loop().create_future()
        # Each task ends only when the rank must end, so the first end of one ends all.
        tasks = [
            asyncio.create_task(self._read(requests, joined)),
            asyncio.create_task(self._run(joined)),
            asyncio.create_task(self._write(context)),
        ]
        try:
            await asyncio.wait((*tasks, self._failure), return_when=asyncio.FIRST_COMPLETED)
        finally:
            self.ended.set()  # before the first await: rank 0 may cancel the call at any moment
            self._failure.cancel()
            for task in tasks:
                task.cancel()
            for result in await asyncio.gather(*tasks, self._failure, return_exceptions=True):
                if isinstance(result, Exception):
                    logger.error("rank of %s has failed", self._config.model, exc_info=result)

    async def _read(
        self,
        requests: AsyncIterator[worker_pb2.RankControlRequest],
        joined: "asyncio.Future[worker_pb2.JoinGroup]",
    ) -> None:
        """Executes commands until rank 0 ends the stream. Raises TimeoutError if it is silent."""
        while True:
            try:
                # No timeout before `_kv` exists: a side may not answer while it loads a model.
                message = anext(requests)
                silence = self._config.silence_seconds
                command = await (unless_silent(message, silence) if self._kv else message)
            except StopAsyncIteration:
                return
            if command.HasField("join_group"):
                joined.set_result(command.join_group)
            elif self._kv:
                self._execute(command, self._kv)

    async def _write(
        self,
        context: grpc.aio.ServicerContext[
            worker_pb2.RankControlRequest, worker_pb2.RankControlResponse
        ],
    ) -> None:
        while True:
            await context.write(
                await next_or_heartbeat(self._events, worker_pb2.RankControlResponse())
            )

    async def _run(self, joined: "asyncio.Future[worker_pb2.JoinGroup]") -> None:
        """Loads the model and executes rank 0's plans. Raises the exception that ends it early."""
        async with asyncio.timeout(_FIRST_SECONDS):
            join = await joined
        group, rank = await in_thread(partial(self._load, join), "tandem-load")
        kv_endpoint = KvEndpoint(
            KvSender(
                self._config.transfer_context(rank.kv),
                epoch=join.epoch,
                lease_seconds=None,
                stall_seconds=self._config.stall_seconds,
                on_release=lambda sequence_id: None,
            ),
            self._config.identity,
        )
        kv_endpoint.serve_on(self._kv_server)
        address = self._kv_server.bind(self._config.host, 0)
        await self._kv_server.start()
        self._load_adapter = rank.load_adapter
        self._rank_kv = rank.kv
        self._kv = KvGroup(kv_endpoint)
        self._events.put_nowait(worker_pb2.RankControlResponse(ready=address))
        await in_thread(partial(self._execute_plans, group, rank), "tandem-engine")

    def _load(self, join: worker_pb2.JoinGroup) -> tuple[TpGroup, Rank]:
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

    def _execute_plans(self, group: TpGroup, rank: Rank) -> None:
        enter_engine_thread(self._config)
        rank_loop(group, rank.executor)

    def _execute(self, command: worker_pb2.RankControlRequest, kv: KvGroup) -> None:
        sequence_id = command.sequence_id
        match command.WhichOneof("command"):
            case "offer_kv":
                offer = command.offer_kv
                kv.offer(
                    sequence_id,
                    offer.kv.transfer_id,
                    tuple(offer.blocks),
                    offer.kv.num_tokens,
                    offer.prefix_hash,
                )
            case "kv_progress":
                progress = command.kv_progress
                if progress.first_tokens:
                    first = FirstTokens(
                        tokens=tuple(progress.first_tokens), logprobs=tuple(progress.first_logprobs)
                    )
                    kv.complete(sequence_id, first)
                else:
                    kv.progress(
                        sequence_id, progress.num_ready, progress.num_ahead, progress.num_layers
                    )
            case "fetch_kv":
                fetch = kv.fetch(sequence_id, command.fetch_kv.kv, command.fetch_kv.prefix_hash)
                fetch.add_done_callback(partial(self._fetched, sequence_id))
            case "kv_target":
                kv.set_target(
                    sequence_id, tuple(command.kv_target.blocks), command.kv_target.num_cached
                )
            case "load_adapter" if self._load_adapter:
                load = in_thread(
                    partial(self._load_adapter, sequence_id, command.load_adapter), "tandem-adapter"
                )
                load.add_done_callback(partial(self._adapter_loaded, sequence_id))
            case "open_disk" if self._rank_kv:
                opening = partial(_open_disk, command.open_disk, self._rank_kv)
                in_thread(opening, "tandem-disk-open").add_done_callback(self._disk_opened)
            case "read_disk" if self._disk:
                wanted = command.read_disk
                reading = kv.load(sequence_id, self._disk.read(wanted.hashes, wanted.blocks))
                reading.add_done_callback(partial(self._disk_read, sequence_id, self._disk))
            case "write_disk" if self._disk:
                (digest,) = command.write_disk.hashes
                (block,) = command.write_disk.blocks
                self._writing = asyncio.create_task(self._disk.write(digest, block))
                self._writing.add_done_callback(partial(self._disk_written, self._disk))
            case "stop_kv":
                stopped = worker_pb2.RankControlResponse(sequence_id=sequence_id, stopped=True)
                kv.stop(sequence_id, lambda: self._events.put_nowait(stopped))

    def _adapter_loaded(self, number: int, load: "asyncio.Future[str]") -> None:
        if load.cancelled():
            return
        if error := load.exception():
            settle(self._failure, None, error)
        else:
            event = worker_pb2.RankControlResponse(sequence_id=number, adapter_error=load.result())
            self._events.put_nowait(event)

    def _disk_opened(self, opening: "asyncio.Future[RankDisk]") -> None:
        if opening.cancelled():
            return
        match opening.exception():
            case None:
                self._disk = opening.result()
                self._report_changes(self._disk)
                self._events.put_nowait(worker_pb2.RankControlResponse(disk_opened=""))
            case ValueError() as refused:
                self._events.put_nowait(worker_pb2.RankControlResponse(disk_opened=str(refused)))
            case error:
                settle(self._failure, None, error)

    def _disk_read(self, sequence_id: int, disk: RankDisk, reading: "asyncio.Task[int]") -> None:
        """Reports the number of filled blocks, unless rank 0 has stopped the read."""
        self._report_changes(disk)
        if reading.cancelled():
            return
        if error := reading.exception():
            settle(self._failure, None, error)
        else:
            self._events.put_nowait(
                worker_pb2.RankControlResponse(sequence_id=sequence_id, disk_read=reading.result())
            )

    def _disk_written(self, disk: RankDisk, writing: "asyncio.Task[None]") -> None:
        self._report_changes(disk)
        if writing.cancelled():
            return
        match writing.exception():
            case None:
                self._events.put_nowait(worker_pb2.RankControlResponse(disk_written=""))
            case OSError() as refused:
                self._events.put_nowait(
                    worker_pb2.RankControlResponse(disk_written=str(refused) or "refused")
                )
            case error:
                settle(self._failure, None, error)

    def _report_changes(self, disk: RankDisk) -> None:
        """Reports to rank 0 the blocks that the disk has stored and evicted since the last call."""
        stored, evicted = disk.files.take_changes()
        for first in range(0, max(len(stored), len(evicted)), _NUM_HASHES):
            part = slice(first, first + _NUM_HASHES)
            changes = worker_pb2.DiskChanges(stored=stored[part], evicted=evicted[part])
            self._events.put_nowait(worker_pb2.RankControlResponse(disk_changes=changes))

    def _fetched(self, sequence_id: int, task: "asyncio.Task[FetchResult]") -> None:
        """Reports a fetch to rank 0, unless rank 0 has stopped it."""
        if task.cancelled():
            return
        event = worker_pb2.RankControlResponse(sequence_id=sequence_id)
        match task.exception():
            case None:
                event.kv_received.CopyFrom(task.result()[1])
            case TransferError() as error:
                logger.warning("KV fetch failed: %s", error)
                event.fetch_failed = True
            case error:
                if not self._failure.done():
                    self._failure.set_exception(error)
                return
        self._events.put_nowait(event)


def _open_disk(command: worker_pb2.OpenDisk, kv: KvStore) -> RankDisk:
    return RankDisk.open(
        command.folder, command.role, kv, max_bytes=command.max_bytes, number=command.number
    )
