"""One worker: an engine, its KV cache, and the gRPC service through which routers and other workers reach them.

Runs in any process that has an event loop; needs no Ray. Knows nothing of text, of pools or of other workers' load.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Self

import grpc
import grpc.aio

from ..proto import worker_pb2, worker_pb2_grpc
from ..proto.channel import bind, peer_server
from .engine.block_pool import BlockState
from .engine.config import Budgets, EngineConfig
from .engine.engine import Engine
from .engine.events import CacheChanged, Event
from .engine_thread import EngineThread
from .malloc import keep_freed_memory
from .request_manager import RequestManager
from .session import RouterSession
from .submit import WorkerLimits
from .tp.coordinator import TpCoordinator
from .tp.kv_group import KvGroup
from .tp.rank import Rank, RankConfig, enter_engine_thread
from .transfer.endpoint import KvEndpoint
from .transfer.sender import FrameHook

logger = logging.getLogger(__name__)

_LEAVING = "worker is going away"
_COMMAND_SECONDS = 30.0  # the engine answers between two steps; no step takes as long

ROLES = {"prefill": worker_pb2.ROLE_PREFILL, "decode": worker_pb2.ROLE_DECODE}


@dataclass(frozen=True, kw_only=True)
class WorkerConfig(Budgets, RankConfig):
    """One worker: its ranks and its budgets."""

    lease_seconds: float = 30.0  # how long KV cache that nobody has come for is kept


class Worker(worker_pb2_grpc.WorkerServicer):
    """Serves `tandem.v1.Worker` and the KV endpoint on one port. Make one with `start`, end it with `stop`."""

    def __init__(
        self,
        rank: Rank,
        config: WorkerConfig,
        leader: TpCoordinator,
        *,
        worker_id: str,
        role: str,
        frame_hook: FrameHook | None,
    ) -> None:
        self.worker_id = worker_id
        self.role = role
        self.epoch = leader.epoch  # fences what an earlier worker of this id has said
        self.address = ""
        self.failed = asyncio.Event()  # then nothing but `stop` is left
        self._leader = leader
        self._rank = rank
        self._config = config
        self._engine = Engine(
            rank.executor,
            EngineConfig(
                num_blocks=rank.num_blocks,
                block_size=rank.block_size,
                overlap=rank.launches_ahead,
                **{field.name: getattr(config, field.name) for field in fields(Budgets)},
            ),
        )
        self._context_tokens = min(rank.context_tokens, self._engine.config.capacity_tokens)
        self._thread = EngineThread(self._engine, deliver=self._deliver, failed=self._fail)
        self._endpoint = KvEndpoint(
            config.transfer_context(rank.kv),
            epoch=self.epoch,
            lease_seconds=config.lease_seconds,
            stall_seconds=config.stall_seconds,
            on_release=lambda sequence_id: self._jobs.released(sequence_id),
            frame_hook=frame_hook,
        )
        self._kv = KvGroup(self._endpoint, leader.links)
        self._jobs = RequestManager(
            self._thread,
            self._kv,
            WorkerLimits(
                vocab_size=rank.vocab_size,
                context_tokens=self._context_tokens,
                max_sequences=config.max_sequences,
                eos_ids=rank.eos_ids,
            ),
            load_grammar=rank.load_grammar,
            handle=self._handle,
            failed=self._fail,
        )
        self._sessions: set[RouterSession] = set()
        self._draining = False
        self._failure: BaseException | None = None
        self._server = peer_server()

    @classmethod
    async def start(
        cls, config: WorkerConfig, *, worker_id: str, role: str = "decode", ranks: Sequence[str] = ()
    ) -> Self:
        """Loads the model, binds the port and serves, as the only worker of this process. `ranks` are the addresses of
        the `RankServer`s of ranks 1, 2, ... of the group, which read the same config.

        Raises what `Leader.start` raises, such as CheckpointError for a bad model folder, and OSError for a port that
        is taken."""
        keep_freed_memory()
        leader, rank = await TpCoordinator.start(config, ranks)
        try:
            worker = await cls.serve(rank, config, worker_id=worker_id, role=role, leader=leader)
        except BaseException:
            await leader.close()
            raise
        worker._thread.post(lambda engine: enter_engine_thread(config))
        return worker

    @classmethod
    async def serve(
        cls,
        rank: Rank,
        config: WorkerConfig,
        *,
        worker_id: str,
        role: str,
        frame_hook: FrameHook | None = None,
        leader: TpCoordinator | None = None,
    ) -> Self:
        """Serves a loaded rank. `frame_hook` stands between the sender and gRPC; fault tests put theirs there."""
        leader = leader or TpCoordinator()
        worker = cls(rank, config, leader, worker_id=worker_id, role=role, frame_hook=frame_hook)
        worker_pb2_grpc.add_WorkerServicer_to_server(worker, worker._server)  # type: ignore[no-untyped-call]
        worker._endpoint.serve_on(worker._server)
        worker.address = bind(worker._server, config.host, config.port)
        await worker._server.start()
        worker._thread.start()
        leader.lost.add_done_callback(lambda lost: worker._fail(lost.result()))
        leader.keep(worker._thread.post)
        return worker

    async def stop(self, grace: float = 0.0) -> None:
        """Refuses new requests, gives running ones up to `grace` seconds, then ends everything. Raises TimeoutError if
        the engine's step does not end."""
        self._draining = True
        deadline = time.monotonic() + grace
        if grace > 0:  # the server goes on meanwhile: decode workers come for the KV cache
            await self._jobs.idle(grace)
        for session in self._sessions:
            session.close()
        self._endpoint.disconnect()
        await self._server.stop(max(deadline - time.monotonic(), 0.0))
        self._jobs.end_all()
        try:
            await self._thread.stop(_COMMAND_SECONDS)
            await self._leader.end()
        finally:
            await self._leader.close()
            await self._kv.close()

    def check_health(self) -> None:
        """Raises RuntimeError if the engine has failed."""
        if self._failure is not None:
            raise RuntimeError(f"the engine of {self.worker_id} has failed") from self._failure

    def load(self) -> worker_pb2.Load:
        """A snapshot for placement; counters of the engine's thread, each read once. The engine may move blocks between
        two reads, so the free ones are what the others leave."""
        scheduler, blocks = self._engine.scheduler, self._engine.blocks()
        held = sum(count for state, count in blocks.items() if state is not BlockState.FREE)
        return worker_pb2.Load(
            num_waiting=scheduler.num_waiting,
            num_running=scheduler.num_holding,
            waiting_tokens=scheduler.waiting_tokens,
            free_blocks=max(self._rank.num_blocks - held, 0),
            cached_blocks=blocks[BlockState.CACHED],
            owned_blocks=blocks[BlockState.OWNED],
            leased_blocks=blocks[BlockState.LEASED],
            reserved_blocks=blocks[BlockState.RESERVED],
            total_blocks=self._rank.num_blocks,
            step_seconds=self._engine.step_seconds,
        )

    def info(self) -> worker_pb2.WorkerInfo:
        """How the directory knows this worker."""
        return worker_pb2.WorkerInfo(
            worker_id=self.worker_id,
            epoch=self.epoch,
            role=ROLES[self.role],
            address=self.address,
            kv_bytes_per_token=self._rank.kv.layout.bytes_per_token,
            block_size=self._rank.block_size,
            context_tokens=self._context_tokens,
            load=self.load(),
            draining=self._draining,
            tp=self._rank.kv.tp,
            max_sequences=self._config.max_sequences,
            mixed_chunk_tokens=self._config.mixed_chunk_tokens,
        )

    # --- the gRPC service -------------------------------------------------------------------------------------------

    async def Session(
        self,
        request_iterator: AsyncIterator[worker_pb2.SessionRequest],
        context: grpc.aio.ServicerContext[worker_pb2.SessionRequest, worker_pb2.SessionResponse],
    ) -> None:
        """Commands down, one message per engine step up. However the stream ends, its jobs end with it."""
        session = RouterSession()
        self._sessions.add(session)
        self._thread.post(partial(self._introduce, session))
        reader = asyncio.create_task(self._read(session, request_iterator))
        try:
            while (message := await session.take()) is not None:
                message.load.CopyFrom(self.load())
                await context.write(message)
        finally:
            reader.cancel()
            self._sessions.discard(session)
            for job in list(session.jobs.values()):
                self._jobs.end(job)
            (error,) = await asyncio.gather(reader, return_exceptions=True)
            if isinstance(error, Exception):
                logger.error("a session of %s broke", self.worker_id, exc_info=error)

    async def GetStatus(
        self,
        request: worker_pb2.GetStatusRequest,
        context: grpc.aio.ServicerContext[worker_pb2.GetStatusRequest, worker_pb2.GetStatusResponse],
    ) -> worker_pb2.GetStatusResponse:
        """Counts everything that could leak, and audits the books."""
        try:
            await self._thread.call(Engine.check_integrity, _COMMAND_SECONDS)
            balanced = True
        except RuntimeError:
            logger.exception("the books of %s do not balance or cannot be read", self.worker_id)
            balanced = False
        return worker_pb2.GetStatusResponse(
            info=self.info(),
            num_sessions=len(self._sessions),
            num_leases=self._kv.num_leases,
            num_transfers=self._kv.num_transfers + self._jobs.num_pulling,
            num_jobs=len(self._jobs),
            balanced=balanced,
            transports=self._endpoint.receiver.connections.transports,
        )

    # --- sessions ---------------------------------------------------------------------------------------------------

    async def _read(self, session: RouterSession, requests: AsyncIterator[worker_pb2.SessionRequest]) -> None:
        try:
            async for request in requests:
                if request.WhichOneof("command") == "cancel":
                    self._jobs.cancel(session, request.cancel)
                elif self._draining or self._failure is not None:
                    key = (request.submit.request_id, request.submit.attempt)
                    session.put(key, failure=worker_pb2.Failure(kind=worker_pb2.FAILURE_KIND_WORKER, message=_LEAVING))
                elif request.HasField("submit"):
                    self._jobs.submit(session, request.submit)
        finally:
            session.close()

    def _introduce(self, session: RouterSession, engine: Engine) -> None:
        """In the engine's thread, whose later changes of the cache come to the event loop after this."""
        self._thread.tell(partial(session.follow_cache, engine.cached_hashes()))

    def _deliver(self, events: list[Event]) -> None:
        """Routes one step's events; each session's share leaves as one message."""
        try:
            for event in events:
                if isinstance(event, CacheChanged):
                    for session in self._sessions:
                        session.change_cache(event.stored, event.evicted)
            self._jobs.deliver(events)
        except Exception as error:  # a defect: the events after it are lost, so nobody may go on waiting for them
            self._fail(error)

    def _handle(self) -> worker_pb2.KvHandle:
        """Of KV cache that is here."""
        return worker_pb2.KvHandle(
            epoch=self.epoch,
            layout=self._rank.kv.layout.digest,
            endpoints=[self.address, *self._leader.endpoints],
        )

    def _fail(self, error: BaseException) -> None:
        """The engine is gone: every request hears of it at once and may go elsewhere."""
        self._failure = self._failure or error
        self.failed.set()
        logger.error("the engine of %s has failed", self.worker_id, exc_info=error)
        self._jobs.fail_all(worker_pb2.FAILURE_KIND_WORKER, _LEAVING)
        for session in self._sessions:
            session.close()
