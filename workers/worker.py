"""One worker: an engine, its KV cache, and the gRPC service through which routers and other workers reach them.

Runs in any process that has an event loop; needs no Ray. Knows nothing of text, of pools or of other workers' load.
"""

import asyncio
import itertools
import logging
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from functools import partial
from typing import Self

import grpc
import grpc.aio

from ..proto import worker_pb2, worker_pb2_grpc
from ..proto.channel import bind, peer_server
from ..proto.hashing import hash_prompt
from .engine.block_pool import BlockState
from .engine.config import Budgets, EngineConfig
from .engine.engine import DoesNotFit, Engine, QueueFull
from .engine.events import Admitted, Event, Joined, Preempted, Progress, Token
from .engine.sequence import SequenceSpec, Task
from .engine_thread import EngineThread
from .kv_group import KvGroup
from .leader import Leader
from .malloc import keep_freed_memory
from .rank import Rank, RankConfig, enter_engine_thread
from .session import InvalidSubmit, Job, RouterSession, layout_message, parse_submit, tokens_output
from .transfer.export import FrameHook
from .transfer.mover import KvMover
from .transfer.pull import Target, Want
from .transfer.wire import TransferError, TransferKey

logger = logging.getLogger(__name__)

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
        leader: Leader,
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
        self._mover = KvMover(
            rank.kv,
            epoch=self.epoch,
            lease_seconds=config.lease_seconds,
            stall_seconds=config.stall_seconds,
            on_release=self._released,
            means=config.means,
            frame_hook=frame_hook,
        )
        self._kv = KvGroup(self._mover, leader.links)
        self._jobs: dict[int, Job] = {}
        self._sessions: set[RouterSession] = set()
        self._ids = itertools.count(1)
        self._draining = False
        self._failure: BaseException | None = None
        self._idle = asyncio.Event()
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
        leader, rank = await Leader.start(config, ranks)
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
        leader: Leader | None = None,
    ) -> Self:
        """Serves a loaded rank. `frame_hook` stands between the exporter and gRPC; fault tests put theirs there."""
        leader = leader or Leader()
        worker = cls(rank, config, leader, worker_id=worker_id, role=role, frame_hook=frame_hook)
        worker_pb2_grpc.add_WorkerServicer_to_server(worker, worker._server)  # type: ignore[no-untyped-call]
        worker._mover.serve_on(worker._server)
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
        if self._jobs and grace > 0:  # the server goes on meanwhile: decode workers come for the KV cache
            self._idle.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(grace):
                    await self._idle.wait()
        for session in self._sessions:
            session.close()
        self._mover.disconnect()
        await self._server.stop(max(deadline - time.monotonic(), 0.0))
        for job in list(self._jobs.values()):
            self._end(job)
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
        )

    def info(self) -> worker_pb2.WorkerInfo:
        """How the directory knows this worker."""
        return worker_pb2.WorkerInfo(
            worker_id=self.worker_id,
            epoch=self.epoch,
            role=ROLES[self.role],
            address=self.address,
            layout=layout_message(self._rank.kv.layout),
            block_size=self._rank.block_size,
            context_tokens=self._context_tokens,
            load=self.load(),
            draining=self._draining,
            tp=self._rank.kv.tp,
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
        reader = asyncio.create_task(self._read(session, request_iterator))
        try:
            while (outputs := await session.take()) is not None:
                if outputs:
                    await context.write(worker_pb2.SessionResponse(outputs=outputs, load=self.load()))
        finally:
            reader.cancel()
            self._sessions.discard(session)
            for job in list(session.jobs.values()):
                self._end(job)
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
            num_transfers=self._kv.num_transfers + sum(job.pulling is not None for job in self._jobs.values()),
            num_jobs=len(self._jobs),
            balanced=balanced,
            peers=[worker_pb2.Peer(**asdict(peer)) for peer in self._mover.puller.peers],
        )

    # --- jobs -------------------------------------------------------------------------------------------------------

    async def _read(self, session: RouterSession, requests: AsyncIterator[worker_pb2.SessionRequest]) -> None:
        try:
            async for request in requests:
                if request.WhichOneof("command") == "submit":
                    self._submit(session, request.submit)
                elif job := session.jobs.get((request.cancel.request_id, request.cancel.attempt)):
                    self._end(job)
        finally:
            session.close()

    def _submit(self, session: RouterSession, submit: worker_pb2.Submit) -> None:
        key = (submit.request_id, submit.attempt)
        kind, text = worker_pb2.FAILURE_KIND_INVALID, "request_id: already in use"
        if self._draining or self._failure is not None:
            kind, text = worker_pb2.FAILURE_KIND_WORKER, "worker is going away"
        elif key not in session.jobs:
            try:
                spec = parse_submit(
                    submit,
                    next(self._ids),
                    vocab_size=self._rank.vocab_size,
                    context_tokens=self._context_tokens,
                    eos_ids=self._rank.eos_ids,
                )
            except InvalidSubmit as error:
                text = str(error)
            else:
                self._accept(Job(spec, session, key), submit)
                return
        session.put(key, failure=worker_pb2.Failure(kind=kind, message=text))

    def _accept(self, job: Job, submit: worker_pb2.Submit) -> None:
        self._jobs[job.spec.id] = job.session.jobs[job.key] = job
        if job.spec.task is Task.DECODE:
            job.target = asyncio.get_running_loop().create_future()
            job.pulling = asyncio.create_task(self._fetch(job, submit.kv))
            job.pulling.add_done_callback(self._check_task)
        self._thread.post(partial(self._enqueue, job.spec, time.monotonic()))

    def _enqueue(self, spec: SequenceSpec, submitted: float, engine: Engine) -> None:
        """In the engine's thread, once its step has ended: that wait is queueing, too."""
        try:
            engine.submit(spec, submitted)
        except QueueFull:
            failure = worker_pb2.Failure(kind=worker_pb2.FAILURE_KIND_FULL, message="queue full")
        except DoesNotFit as error:
            failure = worker_pb2.Failure(kind=worker_pb2.FAILURE_KIND_INVALID, message=str(error))
        else:
            return
        self._thread.tell(partial(self._refuse, spec.id, failure))

    def _refuse(self, sequence_id: int, failure: worker_pb2.Failure) -> None:
        if job := self._jobs.get(sequence_id):
            job.session.put(job.key, failure=failure)
            self._end(job)

    def _end(self, job: Job) -> None:
        """Forgets a job and frees what it holds, wherever it stands. First the transfers stop touching its blocks."""
        self._jobs.pop(job.spec.id, None)
        job.session.jobs.pop(job.key, None)
        self._kv.stop(job.spec.id, job.pulling, lambda: self._thread.post(lambda engine: engine.cancel(job.spec.id)))
        if not self._jobs:
            self._idle.set()

    def _released(self, sequence_id: int) -> None:
        """The lease of a finished prefill has ended."""
        if job := self._jobs.get(sequence_id):
            self._end(job)

    async def _fetch(self, job: Job, handle: worker_pb2.KvHandle) -> None:
        """Brings the KV cache of a DECODE job, then lets it join the batch."""
        assert job.target is not None
        want = Want(
            key=TransferKey(transfer_id=handle.transfer_id, epoch=handle.epoch),
            num_tokens=len(job.spec.tokens),
            prefix_hash=hash_prompt(job.spec.tokens, job.spec.salt),
        )
        try:
            job.fetched = await self._kv.fetch(job.spec.id, handle, want, job.target)
            if job.fetched.first_token >= self._rank.vocab_size:
                raise TransferError("KV commit with an impossible token")
        except TransferError as error:
            logger.warning("%s: %s", self.worker_id, error)
            job.pulling = None
            self._refuse(
                job.spec.id, worker_pb2.Failure(kind=worker_pb2.FAILURE_KIND_TRANSFER, message="KV transfer failed")
            )
            return
        job.pulling = None
        first_token = job.fetched.first_token
        self._thread.post(lambda engine: engine.commit_import(job.spec.id, first_token))

    def _check_task(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()):
            self._fail(error)

    # --- events -----------------------------------------------------------------------------------------------------

    def _deliver(self, events: list[Event]) -> None:
        """Routes one step's events; each session's share leaves as one message."""
        try:
            for event in events:
                if job := self._jobs.get(event.id):
                    self._route(job, event)
        except Exception as error:  # a defect: the events after it are lost, so nobody may go on waiting for them
            self._fail(error)

    def _route(self, job: Job, event: Event) -> None:
        match event:
            case Admitted():
                job.session.put(job.key, admitted=self._admitted(job, event))
            case Progress():
                self._kv.progress(job.spec.id, event.num_computed, event.num_ahead, event.num_layers)
            case Joined():
                assert job.fetched is not None
                joined = worker_pb2.Joined(
                    transfer_bytes=job.fetched.num_bytes,
                    transfer_active_seconds=job.fetched.active_seconds,
                    transport=job.fetched.transport,
                )
                job.session.put(job.key, joined=joined)
            case Token():
                job.session.put(job.key, tokens=tokens_output(event))
                if event.finish is not None:
                    self._end(job)
                elif job.spec.task is Task.PREFILL:
                    self._kv.complete(job.spec.id, event.token)
            case Preempted():
                failure = worker_pb2.Failure(kind=worker_pb2.FAILURE_KIND_PREEMPTED, message="preempted")
                self._refuse(job.spec.id, failure)

    def _admitted(self, job: Job, event: Admitted) -> worker_pb2.Admitted:
        message = worker_pb2.Admitted(queue_seconds=event.queue_seconds, cached_tokens=event.num_cached)
        if job.target is not None and not job.target.done():
            job.target.set_result(Target(blocks=event.blocks, num_cached=event.num_cached))
        if job.spec.task is Task.PREFILL:
            prefix_hash = hash_prompt(job.spec.tokens, job.spec.salt)
            num_tokens = len(job.spec.tokens)
            transfer_id = self._kv.offer(job.spec.id, event.blocks, num_tokens, prefix_hash)
            message.kv.CopyFrom(
                worker_pb2.KvHandle(
                    worker_id=self.worker_id,
                    epoch=self.epoch,
                    transfer_id=transfer_id,
                    num_tokens=num_tokens,
                    prefix_hash=prefix_hash,
                    layout=layout_message(self._rank.kv.layout),
                    endpoints=[self.address, *self._leader.endpoints],
                )
            )
        return message

    def _fail(self, error: BaseException) -> None:
        """The engine is gone: every request hears of it at once and may go elsewhere."""
        self._failure = self._failure or error
        self.failed.set()
        logger.error("the engine of %s has failed", self.worker_id, exc_info=error)
        for job in list(self._jobs.values()):
            self._refuse(
                job.spec.id, worker_pb2.Failure(kind=worker_pb2.FAILURE_KIND_WORKER, message="worker is going away")
            )
        for session in self._sessions:
            session.close()
