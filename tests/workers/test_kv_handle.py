"""A KV handle stays valid for other decode workers until a fetch is acknowledged."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

from tandem.proto import worker_pb2
from tandem.tests.fleet import VOCAB, fake_rank, worker_stub
from tandem.tests.peers import peer_channel
from tandem.tests.waits import WAIT
from tandem.tests.worker_config import worker_config
from tandem.tests.workers.engine.fake import expected_choices, expected_tokens
from tandem.tests.workers.raw_session import RawSession, ended, executor_of, idle, submit
from tandem.workers.serve.worker import Worker
from tandem.workers.tp.rank import Rank
from tandem.workers.transfer.sender import FrameHook

PROMPT = range(100)
CANCEL = worker_pb2.Cancel(request_id="a", attempt=1)


@dataclass
class Workers:
    """A prefill worker and two decode workers, each with a session."""

    workers: list[Worker]
    sessions: list[RawSession]

    async def prefill(self, **fields: Any) -> worker_pb2.KvHandle:
        """Starts a prefill; returns its handle."""
        await self.sessions[0].send(
            submit(task=worker_pb2.TASK_PREFILL, token_ids=PROMPT, **fields)
        )
        (output,) = await self.sessions[0].until(lambda output: output.HasField("admitted"))
        return output.admitted.kv

    async def fetch(self, decode: int, handle: worker_pb2.KvHandle, **fields: Any) -> None:
        """Gives a handle to a decode worker."""
        await self.sessions[decode].send(
            submit(task=worker_pb2.TASK_DECODE, token_ids=PROMPT, kv=handle, **fields)
        )

    async def check_tokens(self, decode: int) -> None:
        """Waits for the request's end on a decode worker; fails unless it has the tokens of an
        undisturbed run.
        """
        await self.sessions[decode].until(ended)
        made = (await self.sessions[0].first_tokens())[:1] + self.sessions[decode].tokens()
        assert made == expected_tokens(PROMPT, 5, VOCAB)
        await asyncio.gather(*(idle(worker) for worker in self.workers))

    async def num_leases(self) -> int:
        async with peer_channel(self.workers[0].address) as channel:
            status = await worker_stub(channel).GetStatus(worker_pb2.GetStatusRequest())
        return int(status.num_leases)


@asynccontextmanager
async def started(
    prefill: Rank, *decode: Rank, hook: FrameHook | None = None, **config: Any
) -> AsyncIterator[Workers]:
    settings = worker_config(**({"chunk_tokens": 16} | config))
    ranks = [("prefill", prefill), *(("decode", rank) for rank in decode)]
    workers = [
        await Worker.serve(
            rank,
            settings,
            worker_id=f"{role}-{n}",
            role=role,
            frame_hook=None if role == "decode" else hook,
        )
        for n, (role, rank) in enumerate(ranks)
    ]
    async with AsyncExitStack() as stack:
        channels = [
            await stack.enter_async_context(peer_channel(worker.address)) for worker in workers
        ]
        try:
            yield Workers(workers, [RawSession(channel) for channel in channels])
        finally:
            async with asyncio.timeout(WAIT):
                await asyncio.gather(*(worker.stop() for worker in workers))


async def test_a_cancelled_fetch_leaves_the_handle_to_another_worker() -> None:
    """Cancelled while the prefill runs, while the cache arrives."""
    async with started(fake_rank(step_seconds=0.02), fake_rank(), fake_rank()) as running:
        handle = await running.prefill()
        await running.fetch(1, handle)
        await running.sessions[1].until(lambda output: output.HasField("admitted"))
        assert not running.sessions[0].tokens(), "the prefill still runs"
        await running.sessions[1].send(CANCEL)
        await idle(running.workers[1])
        await running.fetch(2, handle)
        await running.check_tokens(2)
        assert executor_of(running.workers[0]._rank).num_tokens == len(PROMPT), (
            "nothing was computed twice"
        )


async def test_a_cancel_after_the_first_token_leaves_the_lease() -> None:
    """A decode worker that waits for blocks has pinned the cache and asked for nothing."""
    async with started(
        fake_rank(), fake_rank(num_blocks=8, step_seconds=0.01), fake_rank()
    ) as running:
        await running.sessions[1].send(submit("old", token_ids=PROMPT, max_tokens=20))
        await running.sessions[1].until(lambda output: output.HasField("admitted"))
        handle = await running.prefill()
        await running.fetch(1, handle)
        await running.sessions[0].first_tokens()
        await running.sessions[1].send(CANCEL)
        await running.sessions[1].until(ended)
        assert not running.sessions[1].outputs("a")
        assert await running.num_leases() == 1
        await running.fetch(2, handle)
        await running.check_tokens(2)


async def test_a_faulty_transfer_leaves_the_handle_to_another_worker() -> None:
    streams = 0

    async def corrupt_first(frames: AsyncIterator[bytes]) -> AsyncGenerator[bytes, None]:
        nonlocal streams
        streams += 1
        first = streams == 1
        async for frame in frames:
            yield frame[:-1] + bytes([frame[-1] ^ 1]) if first else frame

    ranks = fake_rank(step_seconds=0.02), fake_rank(), fake_rank()
    async with started(*ranks, hook=corrupt_first, transports=()) as running:
        handle = await running.prefill()
        await running.fetch(1, handle)
        assert (await running.sessions[1].failure()).kind == worker_pb2.FAILURE_KIND_TRANSFER
        assert await running.num_leases() == 1
        await running.fetch(2, handle)
        await running.check_tokens(2)
        assert executor_of(ranks[0]).num_tokens == len(PROMPT)


async def test_a_full_worker_refuses_at_once_and_another_takes_the_handle() -> None:
    """The refusal comes while the prefill still runs."""
    full = fake_rank(num_blocks=16, step_seconds=0.005)
    async with started(
        fake_rank(step_seconds=0.05),
        full,
        fake_rank(),
        max_sequences=1,
        max_waiting=1,
        chunk_tokens=16,
    ) as running:
        await running.sessions[1].send(submit("runs", max_tokens=200))
        await running.sessions[1].until(lambda output: output.HasField("admitted"))
        await running.sessions[1].send(submit("waits", max_tokens=200))
        handle = await running.prefill()
        await running.fetch(1, handle)
        assert (await running.sessions[1].failure()).kind == worker_pb2.FAILURE_KIND_FULL
        assert not running.sessions[0].tokens(), "the prefill still runs"
        await running.fetch(2, handle)
        for name in ("runs", "waits"):
            await running.sessions[1].send(worker_pb2.Cancel(request_id=name, attempt=1))
        await running.check_tokens(2)


async def test_a_worker_of_another_model_refuses_at_once_and_another_takes_the_handle() -> None:
    other = fake_rank(model="other")
    async with started(fake_rank(step_seconds=0.05), other, fake_rank()) as running:
        handle = await running.prefill()
        await running.fetch(1, handle)
        assert (await running.sessions[1].failure()).kind == worker_pb2.FAILURE_KIND_TRANSFER
        assert not running.sessions[0].tokens(), "the prefill still runs"
        await running.fetch(2, handle)
        await running.check_tokens(2)


async def test_an_acknowledged_handle_is_gone() -> None:
    async with started(fake_rank(), fake_rank(), fake_rank()) as running:
        handle = await running.prefill()
        await running.fetch(1, handle)
        await running.check_tokens(1)
        await running.fetch(2, handle)
        assert (await running.sessions[2].failure()).kind == worker_pb2.FAILURE_KIND_TRANSFER


async def test_a_cancelled_prefill_fails_the_fetch_and_frees_its_blocks() -> None:
    async with started(fake_rank(step_seconds=0.02), fake_rank()) as running:
        handle = await running.prefill()
        await running.fetch(1, handle)
        await running.sessions[0].send(CANCEL)
        assert (await running.sessions[1].failure()).kind == worker_pb2.FAILURE_KIND_TRANSFER
        await asyncio.gather(*(idle(worker) for worker in running.workers))


async def test_choices_are_handed_to_a_second_worker() -> None:
    slow = fake_rank(step_seconds=0.02)
    async with started(slow, fake_rank(), replace(fake_rank(), launches_ahead=True)) as running:
        handle = await running.prefill(num_choices=3)
        await running.fetch(1, handle, num_choices=3)
        await running.sessions[1].until(lambda output: output.HasField("admitted"))
        await running.sessions[1].send(CANCEL)
        await idle(running.workers[1])
        await running.fetch(2, handle, num_choices=3)
        await running.sessions[2].until(ended, count=3)
        for choice, expected in enumerate(expected_choices(PROMPT, 3, 5, VOCAB)):
            assert running.sessions[2].tokens(choice=choice) == expected[1:]
