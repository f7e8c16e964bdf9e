"""A prompt whose beginning another worker has cached: it is fetched from there, and what cannot be
had is computed.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from tandem.proto import worker_pb2
from tandem.proto.hashing import hash_chain
from tandem.proto.metrics import RESTORED
from tandem.router.scheduling import registry
from tandem.router.scheduling.policy import Candidate
from tandem.router.scheduling.prefix_index import Prefix
from tandem.tests.fleet import VOCAB, Fleet, fake_rank, fleet, split_fleet, worker_stub
from tandem.tests.peers import peer_channel
from tandem.tests.service import expected_tokens as model_tokens
from tandem.tests.token_request import token_request
from tandem.tests.waits import WAIT
from tandem.tests.worker_config import worker_config
from tandem.tests.workers.engine.fake import expected_tokens
from tandem.tests.workers.raw_session import RawSession, ended, executor_of, idle, submit
from tandem.tests.workers.test_cache_reset import reset
from tandem.tests.workers.test_stats import Figures
from tandem.workers.engine.plan import FirstTokens
from tandem.workers.serve import load_reports, prefix_transfer
from tandem.workers.serve.worker import Worker
from tandem.workers.tp.rank import Rank
from tandem.workers.transfer.frames import Commit, TransferError
from tandem.workers.transfer.sender import FrameHook
from tandem.workers.transfer.shard_stream import ShardWriter

PROMPT = list(range(100))
MAX_TOKENS = 60
HELD = (
    len(PROMPT) + MAX_TOKENS - 1
)  # tokens with KV cache at the decode worker, of which 144 fill whole blocks
QUESTION = list(range(500, 530))


@dataclass
class Two:
    """A prefill worker and a decode worker, each with a session."""

    workers: list[Worker]
    sessions: list[RawSession]
    figures: Figures  # of the prefill worker

    async def turn(self, name: str, prompt: Sequence[int], **fields: Any) -> tuple[list[int], int]:
        """Has a prompt answered, which must be right; returns the answer, and how many tokens were
        not computed.
        """
        cached, kv = await self.prefill(name, prompt, **fields)
        salt = fields.get("cache_salt", b"")
        decode = submit(
            name, task=worker_pb2.TASK_DECODE, token_ids=prompt, max_tokens=MAX_TOKENS, kv=kv
        )
        decode.cache_salt = salt
        await self.sessions[1].send(decode)
        await self.sessions[1].until(lambda output: output.request_id == name and ended(output))
        while not self.sessions[0].tokens(name):
            await self.sessions[0].read()
        made = self.sessions[0].tokens(name) + self.sessions[1].tokens(name)
        assert made == expected_tokens(prompt, MAX_TOKENS, VOCAB)
        return made, cached

    async def prefill(
        self, name: str, prompt: Sequence[int], **fields: Any
    ) -> tuple[int, worker_pb2.KvHandle]:
        """Starts a prefill; returns how many of its tokens are not computed, and its handle."""
        asked = submit(
            name, task=worker_pb2.TASK_PREFILL, token_ids=prompt, max_tokens=MAX_TOKENS, **fields
        )
        await self.sessions[0].send(asked)
        return await self.admitted(name)

    async def admitted(self, name: str) -> tuple[int, worker_pb2.KvHandle]:
        """Waits until a prefill begins to compute; returns how many of its tokens it does not, and
        its handle.
        """
        (output,) = await self.sessions[0].until(
            lambda one: one.request_id == name and one.HasField("admitted")
        )
        return output.admitted.cached_tokens, output.admitted.kv

    def holder(self, num_tokens: int = HELD, **fields: Any) -> worker_pb2.PrefixHolder:
        """What a router says of the decode worker."""
        block_size = self.workers[1]._rank.block_size
        known = {
            "address": self.workers[1].address,
            "num_tokens": num_tokens // block_size * block_size,
        }
        return worker_pb2.PrefixHolder(**known | {"block_size": block_size} | fields)  # type: ignore[arg-type]

    async def converse(self, **fields: Any) -> list[int]:
        """Has the first prompt answered; returns that of the next turn."""
        answer, cached = await self.turn("first", PROMPT, **fields)
        assert cached == 0
        await asyncio.gather(*(idle(worker) for worker in self.workers))
        return PROMPT + answer + QUESTION


@asynccontextmanager
async def two(
    prefill: Rank, decode: Rank, *, hook: FrameHook | None = None, **config: Any
) -> AsyncIterator[Two]:
    """`hook` is of what the decode worker sends. On leaving, both must be idle and intact."""
    figures, settings = Figures(), worker_config(**config)
    workers = [
        await Worker.serve(prefill, settings, worker_id="p", role="prefill", metrics=figures),
        await Worker.serve(decode, settings, worker_id="d", role="decode", frame_hook=hook),
    ]
    async with AsyncExitStack() as stack:
        channels = [
            await stack.enter_async_context(peer_channel(worker.address)) for worker in workers
        ]
        try:
            yield Two(workers, [RawSession(channel) for channel in channels], figures)
            await asyncio.gather(
                *(idle(worker) for worker in workers if not worker.failed.is_set())
            )
        finally:
            await asyncio.gather(*(worker.stop() for worker in workers))


@pytest.mark.parametrize(
    ("block_sizes", "cached"), [((16, 16), 144), ((16, 32), 128), ((32, 16), 128)]
)
@pytest.mark.parametrize("ahead", [False, True])
async def test_a_returning_conversation_is_fetched(
    block_sizes: tuple[int, int], cached: int, ahead: bool
) -> None:
    ranks = [replace(fake_rank(block_size=size), launches_ahead=ahead) for size in block_sizes]
    async with two(*ranks) as both:
        prompt = await both.converse()
        before = executor_of(ranks[0]).num_tokens
        assert (await both.turn("next", prompt, prefix_holder=both.holder()))[1] == cached
        assert executor_of(ranks[0]).num_tokens - before == len(prompt) - cached
        own = len(PROMPT) // block_sizes[0] * block_sizes[0]
        assert both.figures.sums[RESTORED, ("remote",)] == cached - own
        status = await idle(both.workers[0])
        assert status.num_restored_tokens == cached - own


async def test_nothing_is_fetched_from_a_holder_that_is_reset_later() -> None:
    async with two(fake_rank(), fake_rank()) as both:
        prompt = await both.converse()
        assert await reset(both.workers[0]) == [""]
        assert (await both.turn("next", prompt, prefix_holder=both.holder()))[1] == 0


async def test_the_time_of_a_fetch_is_reported_apart_from_the_prefill(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fetch = prefix_transfer.PrefixImporter._fetch

    async def slow(*args: Any) -> int:
        await asyncio.sleep(0.25)
        return await fetch(*args)

    monkeypatch.setattr(prefix_transfer.PrefixImporter, "_fetch", slow)
    async with two(fake_rank(), fake_rank()) as both:
        prompt = await both.converse()
        asked = submit("next", task=worker_pb2.TASK_PREFILL, token_ids=prompt, max_tokens=1)
        asked.prefix_holder.CopyFrom(both.holder())
        sent = time.monotonic()
        await both.sessions[0].send(asked)
        await both.sessions[0].until(lambda output: output.request_id == "next" and ended(output))
        elapsed = time.monotonic() - sent
        admitted, tokens = both.sessions[0].outputs("next")
        assert admitted.admitted.restore_seconds >= 0.25
        parts = (
            admitted.admitted.queue_seconds,
            admitted.admitted.restore_seconds,
            tokens.tokens.prefill_seconds,
        )
        assert sum(parts) <= elapsed, "a part counts twice"
        assert min(parts) > 0


async def test_what_is_here_already_is_not_fetched() -> None:
    async with two(fake_rank(), fake_rank()) as both:
        prompt = await both.converse()
        assert (await both.turn("next", prompt, prefix_holder=both.holder()))[1] == 144
        assert (await both.turn("again", prompt, prefix_holder=both.holder()))[1] == len(
            prompt
        ) // 16 * 16
        assert both.figures.sums[RESTORED, ("remote",)] == 144 - 96


async def test_what_has_left_the_other_worker_is_computed() -> None:
    """Between the router's choice and the lease."""
    async with two(fake_rank(), fake_rank(num_blocks=12)) as both:
        prompt = await both.converse()
        await both.sessions[1].send(submit("other", token_ids=range(600, 780), max_tokens=5))
        await both.sessions[1].until(lambda output: output.request_id == "other" and ended(output))
        cached, _ = await both.prefill("next", prompt, prefix_holder=both.holder())
        assert cached == 96
        await both.sessions[0].send(worker_pb2.Cancel(request_id="next", attempt=1))


async def test_a_worker_that_is_gone_is_not_waited_for() -> None:
    async with two(fake_rank(), fake_rank()) as both:
        prompt = await both.converse()
        assert (await both.turn("next", prompt, prefix_holder=both.holder(address="127.0.0.1:1")))[
            1
        ] == 96


async def test_a_worker_of_another_model_is_not_fetched_from() -> None:
    async with two(fake_rank(), fake_rank(model="other")) as both:
        await both.sessions[1].send(submit("own", token_ids=PROMPT, max_tokens=MAX_TOKENS))
        await both.sessions[1].until(ended)
        prompt = PROMPT + both.sessions[1].tokens("own") + QUESTION
        assert (await both.prefill("next", prompt, prefix_holder=both.holder()))[0] == 0
        await both.sessions[0].send(worker_pb2.Cancel(request_id="next", attempt=1))


async def test_no_tenant_gets_what_another_has_cached() -> None:
    async with two(fake_rank(), fake_rank()) as both:
        prompt = await both.converse(cache_salt=b"one")
        holder = both.holder()
        assert (await both.turn("other", prompt, prefix_holder=holder, cache_salt=b"two"))[1] == 0
        assert (await both.turn("none", prompt, prefix_holder=holder))[1] == 0
        assert both.figures.sums[RESTORED, ("remote",)] == 0
        assert (await both.turn("same", prompt, prefix_holder=holder, cache_salt=b"one"))[1] == 144


async def test_a_prefix_that_arrives_damaged_is_computed() -> None:
    async def flip(frames: AsyncIterator[bytes]) -> AsyncGenerator[bytes, None]:
        async for frame in frames:
            yield frame[:-1] + bytes([frame[-1] ^ 1])

    async with two(fake_rank(), fake_rank(), hook=flip, transports=()) as both:
        prompt = await both.converse()
        assert (await both.turn("next", prompt, prefix_holder=both.holder()))[1] == 96
        assert both.figures.sums[RESTORED, ("remote",)] == 0


class Hanging:
    """Sends the first frame of every stream, and no other."""

    def __init__(self) -> None:
        self.begun = asyncio.Event()

    async def __call__(self, frames: AsyncIterator[bytes]) -> AsyncGenerator[bytes, None]:
        async for frame in frames:
            yield frame
            self.begun.set()
            await asyncio.Event().wait()


async def test_a_fetch_that_hangs_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_transfer, "PREFIX_FETCH_SECONDS", 0.3)
    async with two(fake_rank(), fake_rank(), hook=Hanging().__call__) as both:
        prompt = await both.converse()
        assert (await both.turn("next", prompt, prefix_holder=both.holder()))[1] == 96


async def test_a_lease_that_nobody_gives_back_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_transfer, "_LEASE_SECONDS", 2.0)
    async with two(fake_rank(), fake_rank()) as both:
        prompt = await both.converse()
        async with peer_channel(both.workers[1].address) as channel:
            call = worker_stub(channel).LeasePrefix()
            await call.write(worker_pb2.LeasePrefixRequest(hashes=hash_chain(prompt, 16)))
            response = await call.read()
            assert isinstance(response, worker_pb2.LeasePrefixResponse)
            assert response.kv.num_tokens == 144
            await idle(both.workers[1])


async def test_routers_learn_of_the_begin_and_the_end_of_a_lease(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also of a worker that does nothing else."""
    monkeypatch.setattr(load_reports, "IDLE_SECONDS", 0.0)

    async def until_leased(num_blocks: int) -> None:
        while (await session.read()).load.leased_blocks != num_blocks:  # type: ignore[union-attr]
            pass

    async with two(fake_rank(), fake_rank()) as both:
        prompt, session = await both.converse(), both.sessions[1]
        async with peer_channel(both.workers[1].address) as channel:
            await asyncio.sleep(3 * load_reports.LOAD_SECONDS)  # nothing else is to be reported
            call = worker_stub(channel).LeasePrefix()
            await call.write(worker_pb2.LeasePrefixRequest(hashes=hash_chain(prompt, 16)))
            await until_leased(144 // 16)
            await asyncio.sleep(3 * load_reports.LOAD_SECONDS)
            call.cancel()
            await until_leased(0)


@pytest.mark.parametrize("end", ["cancel", "half close", "stop"])
async def test_whatever_ends_a_fetch_leaves_nothing(end: str) -> None:
    """The request is cancelled, its router goes, or the worker that holds the prefix."""
    hanging = Hanging()
    async with two(fake_rank(), fake_rank(), hook=hanging.__call__) as both:
        prompt = await both.converse()
        asked = submit(
            "next",
            task=worker_pb2.TASK_PREFILL,
            token_ids=prompt,
            max_tokens=5,
            prefix_holder=both.holder(),
        )
        await both.sessions[0].send(asked)
        async with asyncio.timeout(WAIT):
            await hanging.begun.wait()
        if end == "cancel":
            await both.sessions[0].send(worker_pb2.Cancel(request_id="next", attempt=1))
        elif end == "half close":
            await both.sessions[0].half_close()
        else:
            await both.workers[1].stop()
            both.workers[1].failed.set()
            assert (await both.admitted("next"))[0] == 96
            await both.sessions[0].send(worker_pb2.Cancel(request_id="next", attempt=1))


@pytest.mark.parametrize(
    ("fields", "message"),
    [({"num_tokens": 112}, "at most 100 tokens"), ({"block_size": 0}, "must have a block_size")],
)
async def test_an_impossible_holder_is_refused(fields: dict[str, int], message: str) -> None:
    async with two(fake_rank(), fake_rank()) as both:
        holder = both.holder(**{"num_tokens": 96} | fields)
        await both.sessions[0].send(
            submit(task=worker_pb2.TASK_PREFILL, token_ids=PROMPT, prefix_holder=holder)
        )
        failure = await both.sessions[0].failure()
        assert failure.kind == worker_pb2.FAILURE_KIND_INVALID
        assert failure.message.startswith("prefix_holder: ")
        assert message in failure.message


@pytest.fixture
def any_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Routers have prefixes fetched, however fast they take workers to be."""

    def most(num_tokens: int, prefill: Candidate, others: Sequence[Candidate]) -> Candidate | None:
        return max(others, key=lambda other: other.matched_tokens, default=None)

    monkeypatch.setattr(registry, "choose_holder", most)


async def known(running: Fleet, prompt: Sequence[int], num_tokens: int) -> None:
    """Waits until the router has heard that the decode worker has so much of a prompt."""
    prefix, decode = Prefix(prompt), running.workers[-1].worker_id
    async with asyncio.timeout(WAIT):
        while running.registry._prefixes.match(prefix).num_tokens(decode) < num_tokens:
            await asyncio.sleep(0.005)


async def test_the_answers_of_a_conversation_are_not_computed_again(any_speed: None) -> None:
    """From the second turn on all but the question is cached, but for what fills no block."""
    async with fleet(1, 1) as running:
        prompt = list(PROMPT)
        for turn in range(4):
            answer, timeline = await running.generate(token_request(prompt, MAX_TOKENS))
            assert answer == expected_tokens(prompt, MAX_TOKENS, VOCAB)
            assert timeline.cached_tokens == (len(prompt) - len(QUESTION) - 1) // 16 * 16 * (
                turn > 0
            )
            prompt += answer
            await known(running, prompt, (len(prompt) - 1) // 16 * 16)
            prompt += QUESTION


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize(("prefill", "decode"), [(2, 1), (1, 2), (2, 2)])
async def test_groups_of_ranks_fetch_their_parts(
    split_model: Path,
    any_speed: None,
    monkeypatch: pytest.MonkeyPatch,
    prefill: int,
    decode: int,
    fails: bool,
) -> None:
    """The tokens are those of transformers, also if the last rank's part of the prefix does not
    arrive.
    """
    finish = ShardWriter.finish

    def lose(writer: ShardWriter, commit: Commit) -> FirstTokens:
        if fails and commit.num_tokens == 144 and writer._kv.rank == prefill - 1:
            raise TransferError("lost")
        return finish(writer, commit)

    monkeypatch.setattr(ShardWriter, "finish", lose)
    async with split_fleet(
        split_model, {"prefill": [prefill], "decode": [decode]}, transports=("shared",)
    ) as running:
        prompt = [(17 * i) % 400 + 3 for i in range(len(PROMPT))]
        answer, _ = await running.generate(token_request(prompt, MAX_TOKENS, ignore_eos=True))
        prompt += answer
        await known(running, prompt, 144)
        prompt += [7, 8, 9]
        answer, timeline = await running.generate(token_request(prompt, 10, ignore_eos=True))
        assert answer == model_tokens(split_model, [prompt], 10)[0]
        assert timeline.cached_tokens == (96 if fails else 144)
