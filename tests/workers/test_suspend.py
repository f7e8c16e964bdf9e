"""Running sequences that are suspended on one worker and continue on another, over real sockets:
the tokens, log probabilities and ends of an undisturbed run, and nothing left behind.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from llguidance import LLMatcher

from tandem.proto import inference_pb2, worker_pb2
from tandem.tests.fleet import VOCAB, fake_rank, split_fleet
from tandem.tests.peers import peer_channel
from tandem.tests.tiny import make_tiny_model
from tandem.tests.waits import NEVER, WAIT
from tandem.tests.watermarks import MESSAGE as WATERMARK
from tandem.tests.workers.engine.fake import expected_choices, expected_tokens
from tandem.tests.workers.raw_session import RawSession, ended, executor_of, idle, submit, worker_of
from tandem.tests.workers.test_kv_handle import Workers, started
from tandem.workers.model.kernels.c import cpu
from tandem.workers.serve.worker import Worker

PROMPT = [(7 * n) % 400 + 3 for n in range(37)]
SUSPEND = worker_pb2.Suspend(request_id="a", attempt=1)
CANCEL = worker_pb2.Cancel(request_id="a", attempt=1)
SAMPLED = inference_pb2.SamplingParams(
    temperature=1,
    top_p=1,
    seed=11,
    typical_p=1,
    repetition_penalty=1.2,
    presence_penalty=0.5,
    frequency_penalty=0.3,
)


def is_suspended(output: worker_pb2.Output) -> bool:
    return output.HasField("suspended")


def has_tokens(output: worker_pb2.Output) -> bool:
    return bool(output.tokens.ids)


@dataclass
class Choice:
    """What a client has got of one choice."""

    tokens: list[int]
    logprobs: list[float]
    finish: int


def choice_of(sessions: Sequence[tuple[RawSession, str]], number: int) -> Choice:
    """Puts a choice together from the sessions that it went through, under a request id each."""
    outputs = [
        output
        for session, name in sessions
        for output in session.outputs(name, number)
        if has_tokens(output)
    ]
    made = Choice([], [], 0)
    for output in outputs:
        assert output.tokens.first_index == len(made.tokens), "an index is missing or repeated"
        made.tokens += output.tokens.ids
        made.logprobs += [scores.logprob for scores in output.tokens.logprobs]
        made.finish = output.tokens.finish_reason
    return made


async def go_on(
    session: RawSession,
    name: str,
    made: Choice,
    choice: int,
    kv: worker_pb2.KvHandle,
    **fields: Any,
) -> None:
    """Continues a choice on another worker, as a router has to."""
    num_made, prompt, max_tokens = (
        len(made.tokens),
        fields.pop("token_ids"),
        fields.pop("max_tokens"),
    )
    assert kv.num_tokens == len(prompt) + num_made - 1
    changed = {
        "token_ids": [*prompt, *made.tokens[:-1]],
        "first_index": num_made - 1,
        "max_tokens": max_tokens - num_made + 1,
        "num_choices": 1,
        "first_choice": choice,
    }
    await session.send(submit(name, task=worker_pb2.TASK_DECODE, kv=kv, **fields | changed))


async def move(
    sessions: Sequence[RawSession], num_tokens: int, *, num_choices: int = 1, **fields: Any
) -> list[Choice]:
    """Runs a request, which after `num_tokens` tokens of each choice goes on on a second worker."""
    source, target = sessions
    outputs: list[worker_pb2.Output] = []
    while not outputs or any(
        map(ended, outputs)
    ):  # again, if the worker made all tokens before it read the command
        await source.send(CANCEL)
        source.messages.clear()
        await source.send(submit(num_choices=num_choices, **fields))
        while min(len(source.tokens(choice=choice)) for choice in range(num_choices)) < num_tokens:
            await source.until(has_tokens)
        if any(map(ended, source.outputs())):
            continue  # a late reader: nothing comes of a choice that has ended
        await source.send(SUSPEND)
        outputs = await source.until(
            lambda output: is_suspended(output) or ended(output), count=num_choices
        )
    for output in outputs:
        made = choice_of([(source, "a")], output.choice)
        assert num_tokens <= len(made.tokens) < fields["max_tokens"]
        await go_on(
            target, f"moved {output.choice}", made, output.choice, output.suspended.kv, **fields
        )
    await target.until(
        lambda output: ended(output) or output.HasField("failure"), count=num_choices
    )
    # A session to a worker with one choice does not name it.
    return [
        choice_of([(source, "a"), (target, f"moved {number}")], number)
        for number in range(num_choices)
    ]


# --- real models
# --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny", hidden_size=256, head_dim=32)


@asynccontextmanager
async def real_workers(
    folder: Path, *sizes: int, **config: Any
) -> AsyncIterator[tuple[list[Worker], list[RawSession]]]:
    """Decode workers of so many ranks each, all of which must be idle in the end."""
    async with split_fleet(folder, {"decode": sizes}, **config) as fleet, AsyncExitStack() as stack:
        channels = [
            await stack.enter_async_context(peer_channel(worker.address))
            for worker in fleet.workers
        ]
        yield fleet.workers, [RawSession(channel) for channel in channels]
        await asyncio.gather(*map(idle, fleet.workers))
        assert [rank.num_transfers for rank in fleet.ranks] == [0] * len(fleet.ranks)


REGEX = "(red|green|blue)( [0-9]{3}){12}"
REQUESTS: dict[str, dict[str, Any]] = {
    "greedy": {"ignore_eos": True},
    "sampled": {"sampling": SAMPLED, "ignore_eos": True},
    "stop tokens after a while": {
        "sampling": SAMPLED,
        "min_tokens": 40,
        "stop_token_ids": range(64),
    },
    "log probabilities": {
        "sampling": SAMPLED,
        "logprobs": 3,
        "prompt_logprobs": 1,
        "ignore_eos": True,
    },
    "bad words": {
        "sampling": SAMPLED,
        "bad_words": [{"ids": [n]} for n in range(3, 60)],
        "ignore_eos": True,
    },
    "grammar": {"sampling": SAMPLED, "grammar": LLMatcher.grammar_from_regex(REGEX)},
    "choices with a watermark": {
        "sampling": SAMPLED,
        "watermark": WATERMARK,
        "num_choices": 3,
        "logprobs": 0,
        "ignore_eos": True,
    },
    "choices under a grammar": {
        "sampling": SAMPLED,
        "grammar": LLMatcher.grammar_from_regex(REGEX),
        "num_choices": 2,
    },
}


@pytest.mark.skipif(
    not cpu.can_multiply(torch.zeros(32, 32, dtype=torch.bfloat16)),
    reason="no product of our own with AMX",
)
@pytest.mark.parametrize(
    ("prefix_caching", "kv_cache_dtype"),
    [(False, "auto"), *((True, each) for each in ("auto", "int8", "fp8", "int4"))],
)
async def test_a_moved_request_ends_as_it_would_have(
    folder: Path, prefix_caching: bool, kv_cache_dtype: str
) -> None:
    config = {
        "dtype": "bfloat16",
        "prefix_caching": prefix_caching,
        "kv_cache_dtype": kv_cache_dtype,
    }
    names = list(REQUESTS)
    counts = [1, 2, 16, 23]
    if kv_cache_dtype != "auto":  # only the bytes that move are others
        names = ["greedy", "log probabilities", "choices under a grammar"]
        counts = [1, 23]
    async with real_workers(folder, 1, 1, **config) as (_, sessions):
        for name in names:
            fields = REQUESTS[name]
            request: dict[str, Any] = {
                "token_ids": PROMPT,
                "max_tokens": 80,
                "cache_salt": b"salt",
            } | fields
            num_choices = fields.get("num_choices", 1)
            await sessions[1].send(submit(**request))
            await sessions[1].until(ended, count=num_choices)
            whole = [choice_of([(sessions[1], "a")], number) for number in range(num_choices)]
            for num_tokens in counts:
                for session in sessions:
                    session.messages.clear()
                moved = await move(sessions, num_tokens, **request)
                assert moved == whole, f"{name}, after {num_tokens} tokens"
                await sessions[0].send(CANCEL)


@pytest.mark.parametrize("sizes", [(2, 1), (1, 2), (2, 2)])
async def test_a_group_suspends_and_continues_on_all_its_ranks(
    folder: Path, sizes: tuple[int, int]
) -> None:
    request: dict[str, Any] = {
        "token_ids": PROMPT,
        "max_tokens": 60,
        "ignore_eos": True,
        "num_choices": 2,
    }
    request["sampling"] = SAMPLED
    async with real_workers(folder, *sizes) as (workers, sessions):
        await sessions[1].send(submit(**request))
        await sessions[1].until(ended, count=2)
        whole = [choice_of([(sessions[1], "a")], number) for number in range(2)]
        for num_tokens in (1, 20):
            for session in sessions:
                session.messages.clear()
            assert await move(sessions, num_tokens, **request) == whole
            await idle(workers[0])  # the acknowledged leases end the request without a cancel


# --- a fake model
# --------------------------------------------------------------------------------------------------


@asynccontextmanager
async def two_workers(step_seconds: float = 0.002, **config: Any) -> AsyncIterator[Workers]:
    ranks = fake_rank(step_seconds=step_seconds), fake_rank()
    async with started(replace(ranks[0], launches_ahead=True), ranks[1], **config) as running:
        yield running
        await asyncio.gather(*map(idle, running.workers))


async def suspend(session: RawSession, **fields: Any) -> worker_pb2.KvHandle:
    """Runs a request and suspends it; returns its handle."""
    await session.send(submit(max_tokens=1000, **fields))
    await session.until(has_tokens)
    await session.send(SUSPEND)
    (output,) = await session.until(is_suspended)
    return output.suspended.kv


async def test_nothing_is_computed_twice_and_a_request_moves_again_and_again() -> None:
    async with two_workers() as running:
        made, fields = Choice([], [], 0), {"token_ids": PROMPT, "max_tokens": 400}
        route: list[tuple[RawSession, str]] = []
        kv = worker_pb2.KvHandle()
        for hop in range(6):
            session, name = running.sessions[hop % 2], f"hop {hop}"
            route.append((session, name))
            await (
                go_on(session, name, made, 0, kv, **fields)
                if hop
                else session.send(submit(name, **fields))
            )
            while not session.tokens(name):
                await session.until(has_tokens)
            if hop < 5:
                await session.send(worker_pb2.Suspend(request_id=name, attempt=1))
                (output,) = await session.until(is_suspended)
                kv, made = output.suspended.kv, choice_of(route, 0)
        await running.sessions[1].until(ended)
        assert choice_of(route, 0).tokens == expected_tokens(PROMPT, 400, VOCAB)
        num_computed = sum(executor_of(worker._rank).num_tokens for worker in running.workers)
        assert num_computed == len(PROMPT) + 399


async def test_a_choice_that_was_fetched_ends_and_the_others_go_on() -> None:
    """One is fetched, one cancelled, one waits; the first two are freed at once."""
    fields: dict[str, Any] = {"token_ids": PROMPT, "max_tokens": 300}
    async with two_workers() as running:
        source, target = running.sessions
        await source.send(submit(num_choices=4, **fields))
        await source.until(has_tokens, count=8)
        await source.send(SUSPEND)
        outputs = {output.choice: output for output in await source.until(is_suspended, count=4)}
        assert await running.num_leases() == 4
        expected = expected_choices(PROMPT, 4, 300, VOCAB)
        for choice, num_leases in ((2, 3), (0, 2)):
            made = choice_of([(source, "a")], choice)
            await go_on(
                target, f"moved {choice}", made, choice, outputs[choice].suspended.kv, **fields
            )
            await target.until(ended)
            assert (
                choice_of([(source, "a"), (target, f"moved {choice}")], choice).tokens
                == expected[choice]
            )
            assert await running.num_leases() == num_leases
        await source.send(worker_pb2.Cancel(request_id="a", attempt=1, choice=3))
        async with asyncio.timeout(WAIT):
            while await running.num_leases() != 1:
                await asyncio.sleep(0.005)
        assert running.workers[0].load().leased_blocks > 0
        await source.send(CANCEL)


@pytest.mark.parametrize("end", ["cancel", "session", "lease"])
async def test_a_suspended_request_is_freed(end: str) -> None:
    """Cancelled, or its session breaks, or its lease expires."""
    async with two_workers(lease_seconds=0.05 if end == "lease" else NEVER) as running:
        source, target = running.sessions
        handle = await suspend(source)
        if end == "cancel":
            await source.send(CANCEL)
        elif end == "session":
            await source.half_close()
        await idle(running.workers[0])
        await target.send(
            submit(
                "late", task=worker_pb2.TASK_DECODE, token_ids=[1] * handle.num_tokens, kv=handle
            )
        )
        assert (await target.failure()).kind == worker_pb2.FAILURE_KIND_TRANSFER


async def test_a_lost_fetch_leaves_a_suspended_sequence_to_another_worker() -> None:
    async with two_workers() as running:
        source, target = running.sessions
        handle = await suspend(source, token_ids=PROMPT)
        made = choice_of([(source, "a")], 0)
        await target.send(
            submit(
                "wrong", task=worker_pb2.TASK_DECODE, token_ids=[1] * handle.num_tokens, kv=handle
            )
        )
        assert (await target.failure()).kind == worker_pb2.FAILURE_KIND_TRANSFER
        await go_on(target, "right", made, 0, handle, token_ids=PROMPT, max_tokens=200)
        await target.until(ended)
        assert choice_of([(source, "a"), (target, "right")], 0).tokens == expected_tokens(
            PROMPT, 200, VOCAB
        )


# --- what is not suspended
# -----------------------------------------------------------------------------------------


async def test_what_is_unknown_has_ended_or_is_suspended_is_ignored() -> None:
    async with worker_of(fake_rank()) as (_, session):
        await session.send(worker_pb2.Suspend(request_id="never", attempt=1))
        await session.send(submit(max_tokens=5))
        await session.until(ended)
        await session.send(SUSPEND)
        await session.send(submit("b", max_tokens=1000))
        await session.until(has_tokens)
        for attempt in (2, 1, 1):
            await session.send(worker_pb2.Suspend(request_id="b", attempt=attempt))
        await session.until(is_suspended)
        await session.send(submit("c"))
        await session.until(lambda output: ended(output) and output.request_id == "c")
        assert sum(map(is_suspended, session.outputs("b"))) == 1
        assert not any(
            output.HasField("failure") for name in "abc" for output in session.outputs(name)
        )
        await session.send(worker_pb2.Cancel(request_id="b", attempt=1))


async def test_what_has_not_begun_is_refused() -> None:
    """In the queue, or while its grammar is read."""
    going_on = asyncio.Event()
    loop = asyncio.get_running_loop()

    def load(*_: object) -> None:
        asyncio.run_coroutine_threadsafe(going_on.wait(), loop).result(WAIT)

    rank = replace(fake_rank(step_seconds=0.01), load_grammar=load)
    async with worker_of(rank, max_sequences=1) as (_, session):
        await session.send(submit("runs", max_tokens=1000))
        await session.until(has_tokens)
        unbegun: dict[str, dict[str, Any]] = {
            "queued": {},
            "queued choices": {"num_choices": 1, "first_choice": 2},
            "queued prefill": {"task": worker_pb2.TASK_PREFILL},
            "queued beams": {"beam_search": {"width": 1}},
            "grammar": {"grammar": "g"},
        }
        for name, fields in unbegun.items():
            await session.send(submit(name, **fields))
            await session.send(worker_pb2.Suspend(request_id=name, attempt=1))
        failed = await session.until(lambda output: output.HasField("failure"), count=5)
        assert {output.failure.kind for output in failed} == {worker_pb2.FAILURE_KIND_GONE}
        assert len({output.request_id for output in failed}) == 5
        going_on.set()
        await session.send(worker_pb2.Cancel(request_id="runs", attempt=1))


async def test_a_request_that_waits_for_its_kv_cache_is_refused_and_another_may_fetch_it() -> None:
    async with two_workers(step_seconds=0.02) as running:
        handle = await running.prefill()
        await running.fetch(1, handle)
        await running.sessions[1].until(lambda output: output.HasField("admitted"))
        await running.sessions[1].send(SUSPEND)
        assert (await running.sessions[1].failure()).kind == worker_pb2.FAILURE_KIND_GONE
        await running.fetch(1, handle)
        await running.check_tokens(1)


async def test_prefills_and_beam_searches_go_on() -> None:
    async with worker_of(fake_rank(step_seconds=0.01), chunk_tokens=16) as (_, session):
        beams: dict[str, Any] = {
            "beam_search": {"width": 3, "length_penalty": 1},
            "num_choices": 2,
            "max_tokens": 20,
        }
        await session.send(submit("beams", **beams))
        await session.send(submit("prefill", task=worker_pb2.TASK_PREFILL, token_ids=range(60)))
        await session.until(lambda output: output.HasField("admitted"), count=2)
        for name in ("beams", "prefill"):
            await session.send(worker_pb2.Suspend(request_id=name, attempt=1))
        await session.until(ended, count=2)
        assert session.tokens("prefill") == expected_tokens(range(60), 1, VOCAB)
        assert not any(
            is_suspended(output)
            for name in ("beams", "prefill")
            for output in session.outputs(name)
        )
        await session.send(worker_pb2.Cancel(request_id="prefill", attempt=1))


async def test_a_prompt_that_is_being_computed_is_suspended_with_its_first_tokens() -> None:
    async with two_workers(step_seconds=0.02) as running:
        source, target = running.sessions
        fields: dict[str, Any] = {"token_ids": range(100), "max_tokens": 50}
        await source.send(submit(num_choices=3, **fields))
        await source.until(lambda output: output.HasField("admitted"))
        await source.send(SUSPEND)
        for output in await source.until(is_suspended, count=3):
            made = choice_of([(source, "a")], output.choice)
            assert len(made.tokens) == 1
            await go_on(
                target, f"moved {output.choice}", made, output.choice, output.suspended.kv, **fields
            )
        await target.until(ended, count=3)
        moved = [
            choice_of([(source, "a"), (target, f"moved {number}")], number).tokens
            for number in range(3)
        ]
        assert moved == expected_choices(range(100), 3, 50, VOCAB)
