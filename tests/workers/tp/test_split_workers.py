"""Tests workers with different numbers of ranks over real gRPC and gloo.

The tokens are right, and nothing is left over.
"""

import asyncio
import os
import re
import signal
import subprocess
import sys
import time
from asyncio.subprocess import Process
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer
from tokenizers import Tokenizer

from tandem.proto import inference_pb2, worker_pb2
from tandem.proto.errors import Unavailable
from tandem.tests.fleet import Fleet, split_fleet
from tandem.tests.peers import peer_channel
from tandem.tests.service import expected_tokens
from tandem.tests.token_request import token_request
from tandem.tests.waits import NEVER, START, WAIT
from tandem.tests.worker_config import worker_config
from tandem.tests.workers.raw_session import RawSession, ended, submit
from tandem.workers.serve.worker import Worker
from tandem.workers.tp.rank_client import RankLost, unless_silent
from tandem.workers.tp.rank_server import RankServer

NUM_TOKENS = 8
SILENCE_SECONDS = 0.8
AT_ONCE_SECONDS = 25.0  # on a busy machine; a collective would end the wait after 30


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return [
        [(17 * i + 5 * n) % 400 + 3 for i in range(length)]
        for n, length in enumerate([1, 15, 16, 17, 130, 200])
    ]


@pytest.fixture(scope="module")
def expected(split_model: Path, prompts: list[list[int]]) -> list[list[int]]:
    return expected_tokens(split_model, prompts, NUM_TOKENS)


async def generate(fleet: Fleet, prompt: Sequence[int], name: str = "") -> list[int]:
    tokens, timeline = await fleet.generate(
        token_request(prompt, NUM_TOKENS, name=name, ignore_eos=True)
    )
    assert timeline.attempts == 1
    return tokens


@pytest.mark.parametrize(
    ("prefill", "decode", "transports"),
    [
        (2, 1, ("shared",)),
        (1, 2, ("shared",)),
        (4, 2, ("shared",)),
        (2, 4, ("shared",)),
        (2, 2, ("shared",)),
        (0, 2, ("shared",)),
        (2, 1, ()),
        (1, 2, ()),
        (2, 4, ()),
        (2, 1, ("gloo",)),
        (1, 2, ("gloo",)),
        (2, 4, ("gloo",)),
        (2, 2, ("gloo", "shared")),
    ],
    ids=str,
)
async def test_any_two_degrees_give_the_tokens_of_the_whole_model(
    split_model: Path,
    prompts: list[list[int]],
    expected: list[list[int]],
    prefill: int,
    decode: int,
    transports: tuple[str, ...],
) -> None:
    transport = transports[0] if transports else "grpc"
    tp = {"prefill": [prefill] if prefill else [], "decode": [decode]}
    async with split_fleet(split_model, tp, transports=transports, chunk_tokens=64) as fleet:
        made = await asyncio.gather(
            *(generate(fleet, prompt, f"r{n}") for n, prompt in enumerate(prompts))
        )
        assert made == expected
        again = await asyncio.gather(
            *(generate(fleet, prompt, f"s{n}") for n, prompt in enumerate(prompts[3:]))
        )
        assert again == expected[3:]  # with warm prefix caches on both sides
        if prefill:
            (status,) = [status for status in await fleet.statuses() if status.transports]
            assert status.info.role == worker_pb2.ROLE_DECODE
            assert set(status.transports.values()) == {transport}
            assert fleet.workers[0].address in status.transports


@pytest.mark.parametrize("asked", ["choices", "beams"])
async def test_the_first_tokens_of_several_choices_come_through_every_rank(
    split_model: Path, prompts: list[list[int]], asked: str
) -> None:
    fields: dict[str, object] = {"num_choices": 3, "ignore_eos": True}
    if asked == "beams":
        fields["beam_search"] = inference_pb2.BeamSearch(width=4, length_penalty=1.0)
    else:
        fields["sampling"] = inference_pb2.SamplingParams(
            temperature=1, top_k=0, top_p=1, min_p=0, seed=7, typical_p=1, repetition_penalty=1
        )
    made = []
    for tp in ({"decode": [1]}, {"prefill": [2], "decode": [1]}, {"prefill": [1], "decode": [2]}):
        async with split_fleet(split_model, tp, chunk_tokens=64) as fleet:
            requests = [
                token_request(prompt, 12, name=f"{n}", **fields) for n, prompt in enumerate(prompts)
            ]
            answers = await asyncio.gather(*(fleet.choices(request) for request in requests))
            assert [timeline.attempts for _, timeline in answers] == [1] * len(prompts)
            made.append([tokens for tokens, _ in answers])
    assert made[0] == made[1] == made[2]
    assert all(len({tuple(tokens) for tokens in choices}) == 3 for choices in made[0])


async def test_rank_0_alone_reads_and_follows_grammars(
    split_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    grammar = LLMatcher.grammar_from_regex("(red|green|blue)( [0-9]{3}){5}")
    sampling = inference_pb2.SamplingParams(
        temperature=1,
        top_k=0,
        top_p=1,
        min_p=0,
        seed=7,
        typical_p=1,
        repetition_penalty=1,
        presence_penalty=0.7,
    )
    reads: list[str] = []

    def counted(text: str, **options: Any) -> LLTokenizer:
        reads.append(text)
        return LLTokenizer(text, **options)

    monkeypatch.setattr("tandem.workers.model.sampling.grammar_cache.LLTokenizer", counted)
    made = []
    for tp in ({"decode": [1]}, {"decode": [2]}, {"prefill": [2], "decode": [2]}):
        reads.clear()
        async with split_fleet(split_model, tp) as fleet:
            request = token_request(
                range(3, 40), 60, grammar=grammar, sampling=sampling, num_choices=2
            )
            choices, timeline = await fleet.choices(request)
            made.append(choices)
            assert timeline.attempts == 1
            assert len(reads) == len(fleet.workers)
    assert made[0] == made[1] == made[2]
    tokenizer = Tokenizer.from_file(str(split_model / "tokenizer.json"))
    for tokens in made[0]:
        assert re.fullmatch("(red|green|blue)( [0-9]{3}){5}", tokenizer.decode(tokens[:-1]))


async def test_requests_that_are_given_up_leave_no_rank_at_work(
    split_model: Path, prompts: list[list[int]]
) -> None:
    async with split_fleet(split_model, {"prefill": [2], "decode": [4]}, chunk_tokens=32) as fleet:
        for seconds in [n * 0.004 for n in range(20)]:
            with suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await asyncio.gather(*(generate(fleet, prompt) for prompt in prompts))
        await fleet.check_idle()
        for rank in fleet.ranks:
            assert rank.num_transfers == 0
        for worker in fleet.workers:
            assert all(not client._calls for client in worker._coordinator.clients)


@pytest.mark.parametrize("prefill", [1, 2])
async def test_a_handle_that_one_rank_could_not_fetch_serves_another_group(
    split_model: Path, prompts: list[list[int]], expected: list[list[int]], prefill: int
) -> None:
    """Rank 0 must not acknowledge a KV cache if another rank lacks its part."""
    async with (
        split_fleet(split_model, {"prefill": [prefill], "decode": [2, 1]}) as fleet,
        AsyncExitStack() as stack,
    ):
        channels = [
            await stack.enter_async_context(peer_channel(worker.address))
            for worker in fleet.workers
        ]
        source, first, second = (RawSession(channel) for channel in channels)
        fields: dict[str, Any] = {
            "token_ids": prompts[5],
            "max_tokens": NUM_TOKENS,
            "ignore_eos": True,
        }
        await source.send(submit(task=worker_pb2.TASK_PREFILL, **fields))
        (admitted,) = await source.until(lambda output: output.HasField("admitted"))
        for rank in fleet.ranks[prefill - 1 : prefill]:  # rank 1 of the first decode worker
            assert rank._kv is not None
            endpoint: Any = rank._kv._endpoint
            endpoint._channels._channels[admitted.admitted.kv.endpoints[-1]] = peer_channel(
                "127.0.0.1:1"
            )
        await first.send(submit(task=worker_pb2.TASK_DECODE, kv=admitted.admitted.kv, **fields))
        assert (await first.failure()).kind == worker_pb2.FAILURE_KIND_TRANSFER
        await second.send(submit(task=worker_pb2.TASK_DECODE, kv=admitted.admitted.kv, **fields))
        await second.until(ended)
        assert await source.first_tokens() + second.tokens() == expected[5]


async def test_a_lost_rank_takes_its_worker_down_at_once_and_no_other(
    split_model: Path, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    tp = {"prefill": [], "decode": [2, 1]}
    async with split_fleet(split_model, tp, silence_seconds=NEVER) as fleet:
        split, whole = fleet.workers
        await generate(fleet, prompts[0])
        async with asyncio.timeout(WAIT):
            await fleet.ranks[0].stop()
        async with asyncio.timeout(AT_ONCE_SECONDS):
            await split.failed.wait()
        with pytest.raises(RuntimeError, match="failed"):
            split.check_health()
        fleet.workers.remove(split)
        fleet.registry.update([whole.info()])
        assert await generate(fleet, prompts[4]) == expected[4]


RANK = """
import asyncio, sys
from tandem.tests.peers import IDENTITY
from tandem.workers.tp.rank import RankConfig
from tandem.workers.tp.rank_server import RankServer

async def main():
    limits = {"kv_cache_bytes": 2**22, "silence_seconds": float(sys.argv[2])}
    config = RankConfig(model=sys.argv[1], identity=IDENTITY, dtype="float32", **limits)
    server = await RankServer.start(config)
    print(server.address, flush=True)
    await server.ended.wait()

asyncio.run(main())
"""


@asynccontextmanager
async def split_over_two_processes(
    split_model: Path, silence_seconds: float
) -> AsyncIterator[tuple[Worker, Process]]:
    """Starts an idle worker of two ranks, and the process of the second rank.

    The worker is idle, so that no collective can notice the loss of the rank.
    """
    command = [sys.executable, "-c", RANK, str(split_model), str(silence_seconds)]
    rank = await asyncio.create_subprocess_exec(
        *command, stdout=subprocess.PIPE, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    try:
        assert rank.stdout is not None
        async with asyncio.timeout(START):
            address = (await rank.stdout.readline()).decode().strip()
        settings = worker_config(
            str(split_model), dtype="float32", kv_cache_bytes=2**22, silence_seconds=silence_seconds
        )
        worker = await Worker.start(settings, worker_id="split", ranks=[address])
        try:
            yield worker, rank
        finally:
            async with asyncio.timeout(WAIT):
                await worker.stop()
    finally:
        with suppress(ProcessLookupError):
            rank.kill()
        async with asyncio.timeout(WAIT):
            await rank.wait()


@pytest.mark.parametrize(
    ("how", "silence_seconds"), [(signal.SIGKILL, NEVER), (signal.SIGSTOP, 5.0)]
)
async def test_a_killed_or_silent_rank_is_noticed_at_once(
    split_model: Path, how: signal.Signals, silence_seconds: float
) -> None:
    async with split_over_two_processes(split_model, silence_seconds) as (worker, rank):
        assert not worker.failed.is_set()
        rank.send_signal(how)
        async with asyncio.timeout(AT_ONCE_SECONDS):
            await worker.failed.wait()


async def test_a_rank_that_is_paused_for_less_than_the_silence_stays(split_model: Path) -> None:
    async with split_over_two_processes(split_model, NEVER) as (worker, rank):
        rank.send_signal(signal.SIGSTOP)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1.5):
                await worker.failed.wait()
        rank.send_signal(signal.SIGCONT)
        async with peer_channel(worker.address) as channel:
            session = RawSession(channel)
            await session.send(submit())
            await session.until(ended)
        assert not worker.failed.is_set()


async def test_a_rank_ends_with_its_rank_0(split_model: Path) -> None:
    settings = worker_config(
        str(split_model), dtype="float32", kv_cache_bytes=2**22, silence_seconds=NEVER
    )
    rank = await RankServer.start(settings.rank)
    worker = await Worker.start(settings, worker_id="split", ranks=[rank.address])
    assert not rank.ended.is_set()
    await worker.stop()
    async with asyncio.timeout(WAIT):
        await rank.ended.wait()
    await rank.stop()


async def test_a_rank_that_cannot_load_ends_the_start(split_model: Path) -> None:
    # Afterwards rank 0's thread waits for the other rank's store until the start's timeout.
    settings = worker_config(
        str(split_model), dtype="float32", kv_cache_bytes=2**22, start_seconds=15.0
    )
    rank = await RankServer.start(replace(settings.rank, kv_cache_bytes=1))
    with pytest.raises(RankLost):
        await Worker.start(settings, worker_id="split", ranks=[rank.address])
    await rank.stop()


async def test_without_any_worker_left_requests_are_refused(
    split_model: Path, prompts: list[list[int]]
) -> None:
    async with split_fleet(split_model, {"decode": [2]}, park_seconds=0.1) as fleet:
        await fleet.ranks[0].stop()
        async with asyncio.timeout(WAIT):
            await fleet.workers[0].failed.wait()
        with pytest.raises(Unavailable):
            await generate(fleet, prompts[0])
        fleet.workers.clear()


async def test_a_pause_of_this_process_is_no_silence_of_its_peer() -> None:
    async def late() -> str:
        await asyncio.sleep(0.05)
        return "answer"

    async def hold_up() -> None:
        time.sleep(2 * SILENCE_SECONDS)  # noqa: ASYNC251  the loop is what is held up

    answer, _ = await asyncio.gather(unless_silent(late(), SILENCE_SECONDS), hold_up())
    assert answer == "answer"
    with pytest.raises(TimeoutError):
        await unless_silent(asyncio.Event().wait(), SILENCE_SECONDS)
