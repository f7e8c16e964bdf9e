"""Serves one rank other than 0, in a process of its own.

The rank executes rank 0's plans and transfers its part of the KV cache. Rank 0 controls it over one
stream, for as long as that stream lives. After that `ended` is set, and the owner of the process
ends it.
"""

import asyncio
import logging
from collections.abc import AsyncIterator
from functools import partial
from typing import Any, Self

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
from ..transfer.frames import FetchResult, FetchTarget
from ..transfer.sender import KvSender
from .kv_group import KvGroup, place_of
from .process_group import TpGroup, rank_loop
from .rank import Rank, RankConfig, enter_engine_thread, load_rank
from .rank_client import EXPECTED_ERRORS, next_or_heartbeat, unless_silent
from .rank_disk import RankDisk

logger = logging.getLogger(__name__)

_FIRST_SECONDS = 30.0  # timeout of rank 0's first command
_NUM_HASHES = 65_536  # maximum in one message, in which each takes 18 bytes


class LaunchedPlans:
    """Counts the plans that a rank has launched, so that transfers do not overtake them.

    An engine that launches ahead frees a sequence's blocks while a step in flight still writes to
    them. On rank 0 that step is launched, so a transfer into the blocks comes after it on the
    device. Another rank may receive the command for the transfer before it launches the step. Steps
    that are not launched ahead have written all KV cache before rank 0 collects them, because each
    layer ends with a collective.
    """

    def __init__(self) -> None:
        self.are_awaited = False
        self._loop = asyncio.get_running_loop()
        self._count = 0
        self._changed = asyncio.Event()

    def add(self) -> None:
        """Counts a plan as launched; for the thread that launches."""
        if self.are_awaited:
            self._loop.call_soon_threadsafe(self._advance)

    async def reach(self, count: int) -> None:
        """Waits for the launch of `count` plans.

        The loop of plans has the deadline: the rank ends if a plan does not come.
        """
        while self.are_awaited and self._count < count:
            self._changed.clear()
            await self._changed.wait()

    def _advance(self) -> None:
        self._count += 1
        self._changed.set()


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
        self._rank: Rank | None = None
        self._disk: RankDisk | None = None
        self._plans = LaunchedPlans()
        self._calls: set[asyncio.Future[Any]] = set()  # calls without an answer yet
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
                await self._plans.reach(command.num_plans)
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
        self._rank = rank
        self._plans.are_awaited = rank.launches_ahead
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
        rank_loop(group, rank.executor, self._plans.add)

    def _execute(self, request: worker_pb2.RankControlRequest, kv: KvGroup) -> None:
        """Executes a command, and answers it later if it has a result."""
        call = self._start(request, kv)
        if call is not None:
            self._calls.add(call)
            name = request.WhichOneof("command") or ""
            call.add_done_callback(partial(self._answer, request.call_id, name))

    def _start(
        self, request: worker_pb2.RankControlRequest, kv: KvGroup
    ) -> "asyncio.Future[Any] | None":
        """Starts a command; returns the future of its result, None if it has no answer."""
        sequence_id = request.sequence_id
        match request.WhichOneof("command"):
            case "offer_kv":
                offer = request.offer_kv
                kv.offer(sequence_id, offer.kv, place_of(offer), offer.prefix_hash)
            case "kv_progress":
                _progress(sequence_id, request.kv_progress, kv)
            case "fetch_kv":
                return kv.fetch(sequence_id, request.fetch_kv.kv, request.fetch_kv.prefix_hash)
            case "kv_target":
                target = request.kv_target
                kv.set_target(sequence_id, FetchTarget(place_of(target), target.num_cached))
            case "stop_kv":
                stopped: asyncio.Future[None] = asyncio.get_running_loop().create_future()
                kv.stop(sequence_id, lambda: settle(stopped, None))
                return stopped
            case "load_adapter" if self._rank:
                load = request.load_adapter
                loading = partial(self._rank.load_adapter, load.number, load.adapter)
                return in_thread(loading, "tandem-adapter")
            case "open_disk" if self._rank:
                return asyncio.create_task(self._open_disk(request.open_disk, self._rank.kv))
            case "read_disk" if self._disk:
                read = request.read_disk
                return kv.load(sequence_id, self._disk.read(read.hashes, read.blocks))
            case "write_disk" if self._disk:
                (digest,) = request.write_disk.hashes
                (block,) = request.write_disk.blocks
                return asyncio.create_task(self._disk.write(digest, block))
            case "clear_disk" if self._disk:
                return asyncio.create_task(self._disk.clear())
        return None

    async def _open_disk(self, command: worker_pb2.OpenDisk, kv: KvStore) -> None:
        opening = partial(
            RankDisk.open,
            command.folder,
            command.role,
            kv,
            max_bytes=command.max_bytes,
            number=command.number,
        )
        self._disk = await in_thread(opening, "tandem-disk-open")

    def _answer(self, call_id: int, name: str, call: "asyncio.Future[Any]") -> None:
        """Answers a call; an error that the command does not expect ends the rank."""
        self._calls.discard(call)
        if self._disk:
            self._report_changes(self._disk)
        response = worker_pb2.RankControlResponse(call_id=call_id)
        error = None if call.cancelled() else call.exception()
        if call.cancelled():
            response.cancelled = True
        elif error is None:
            _set_result(response, call.result())
        elif isinstance(error, EXPECTED_ERRORS.get(name, ())):
            logger.warning("%s failed: %s", name, error)
            response.error = str(error)
        else:
            settle(self._failure, None, error)
            return
        self._events.put_nowait(response)

    def _report_changes(self, disk: RankDisk) -> None:
        """Reports to rank 0 the blocks that the disk has stored and evicted since the last call."""
        stored, evicted = disk.files.take_changes()
        for first in range(0, max(len(stored), len(evicted)), _NUM_HASHES):
            part = slice(first, first + _NUM_HASHES)
            changes = worker_pb2.DiskChanges(stored=stored[part], evicted=evicted[part])
            self._events.put_nowait(worker_pb2.RankControlResponse(disk_changes=changes))


def _progress(sequence_id: int, progress: worker_pb2.KvProgress, kv: KvGroup) -> None:
    if progress.first_tokens:
        first = FirstTokens(
            tokens=tuple(progress.first_tokens), logprobs=tuple(progress.first_logprobs)
        )
        kv.complete(sequence_id, first)
    else:
        kv.progress(sequence_id, progress.num_ready, progress.num_ahead, progress.num_layers)


def _set_result(
    response: worker_pb2.RankControlResponse, result: FetchResult | int | str | None
) -> None:
    match result:
        case None:
            response.done = True
        case int():
            response.num_blocks = result
        case str():
            response.reason = result
        case _, received:
            response.kv_received.CopyFrom(received)
