"""The session of one router: its outputs and its reports of the prefix cache."""

import asyncio
import itertools
import random
import time

import pytest

from tandem.proto import inference_pb2, worker_pb2
from tandem.tests.waits import WAIT
from tandem.workers.engine.events import NewTokens
from tandem.workers.engine.plan import SampledLogprobs
from tandem.workers.engine.sequence import FinishReason
from tandem.workers.serve import session as session_module
from tandem.workers.serve.cache_reports import CacheReports
from tandem.workers.serve.session import RouterSession


async def taken(session: RouterSession) -> worker_pb2.SessionResponse:
    """The next message."""
    async with asyncio.timeout(WAIT):
        message = await session.take()
    assert message is not None
    return message


async def queued(session: RouterSession) -> worker_pb2.SessionResponse | None:
    """The next message if there is one at once."""
    waiting = asyncio.ensure_future(session.take())
    await asyncio.sleep(0)
    return None if waiting.cancel() else waiting.result()


async def test_outputs_of_one_turn_leave_together_and_in_order() -> None:
    session = RouterSession()
    for index in range(5):
        session.put(("a", 1), index % 2, tokens=worker_pb2.Tokens(first_index=index))
    outputs = (await taken(session)).outputs
    assert [output.tokens.first_index for output in outputs] == list(range(5))
    assert [output.choice for output in outputs] == [0, 1, 0, 1, 0]
    waiting = asyncio.ensure_future(session.take())
    await asyncio.sleep(0)
    assert not waiting.done()
    session.put(("b", 2), kv_received=worker_pb2.KvReceived())
    message = await waiting
    assert message is not None
    assert not [*message.stored_blocks, *message.evicted_blocks]
    assert [(output.request_id, output.attempt) for output in message.outputs] == [("b", 2)]


async def test_a_closed_session_sends_queued_outputs_and_then_ends() -> None:
    session = RouterSession()
    session.put(("a", 1), failure=worker_pb2.Failure())
    session.close()
    async with asyncio.timeout(WAIT):
        assert len((await taken(session)).outputs) == 1
        assert await session.take() is None
        assert await session.take() is None


async def test_a_closed_session_reports_its_last_load() -> None:
    session = RouterSession()
    session.wake()
    session.close()
    await taken(session)
    assert session.reports_load
    async with asyncio.timeout(WAIT):
        assert await session.take() is None


async def test_close_wakes_a_waiting_take() -> None:
    session = RouterSession()
    waiting = asyncio.ensure_future(session.take())
    await asyncio.sleep(0)
    session.close()
    async with asyncio.timeout(WAIT):
        assert await waiting is None


# --- the prefix cache
# ----------------------------------------------------------------------------------------------


async def test_a_new_session_gets_the_whole_cache_and_then_the_changes() -> None:
    reports, session = CacheReports(), RouterSession()
    reports.change("memory", [b"a", b"b"], [])
    reports.change("disk", [b"b", b"d"], [])
    reports.add(session)
    reports.change("memory", [b"c"], [b"a"])
    cache = await taken(session)
    assert (sorted(cache.stored_blocks), list(cache.evicted_blocks)) == ([b"b", b"c", b"d"], [])
    reports.change("memory", [b"a"], [b"c"])
    session.wake()
    cache = await taken(session)
    assert (list(cache.stored_blocks), list(cache.evicted_blocks)) == ([b"a"], [b"c"])


async def test_a_new_session_does_not_wake_for_an_empty_cache() -> None:
    reports, session = CacheReports(), RouterSession()
    reports.add(session)
    assert await queued(session) is None
    assert reports.sessions == {session}


async def test_a_change_that_is_undone_before_it_was_sent_is_not_sent() -> None:
    session = RouterSession()
    session.change_cache([b"old"], [])
    session.wake()
    await taken(session)
    session.change_cache([b"new"], [b"old"])
    session.change_cache([b"old"], [b"new"])
    assert await queued(session) is None


async def test_a_large_cache_comes_in_pieces_and_each_block_once() -> None:
    session = RouterSession()
    hashes = [number.to_bytes(16, "big") for number in range(2 * 16_384 + 1)]
    session.change_cache(hashes, [])
    session.put(("a", 1), kv_received=worker_pb2.KvReceived())
    messages = [await taken(session) for _ in range(3)]
    assert [len(message.stored_blocks) for message in messages] == [16_384, 16_384, 1]
    assert [len(message.outputs) for message in messages] == [1, 0, 0]
    assert [digest for message in messages for digest in message.stored_blocks] == hashes
    assert await queued(session) is None


async def test_however_changes_and_messages_alternate_the_router_knows_the_cache(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(session_module, "_MAX_HASHES", 3)
    chance = random.Random(1)
    session, cached, known = RouterSession(), set[bytes](), set[bytes]()
    names = [bytes([number]) for number in range(12)]
    for turn in itertools.count():
        stored = chance.sample(
            [name for name in names if name not in cached],
            chance.randrange(len(names) - len(cached) + 1),
        )
        evicted = chance.sample(sorted(cached), chance.randrange(len(cached) + 1))
        cached = cached - set(evicted) | set(stored)
        session.change_cache(stored, evicted)
        if session.is_stale(session.load_version):
            session.wake()
        while chance.random() < 0.5 or turn == 1000:
            message = await queued(session)
            if message is None:
                break
            cache = message
            assert 0 < len(cache.stored_blocks) + len(cache.evicted_blocks) <= 3
            assert known.isdisjoint(cache.stored_blocks)
            assert known.issuperset(cache.evicted_blocks)
            known = known.union(cache.stored_blocks).difference(cache.evicted_blocks)
        if turn == 1000:
            break
    assert known == cached


# --- messages
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("finish", "expected"),
    [
        (None, inference_pb2.FINISH_REASON_UNSPECIFIED),
        (FinishReason.STOP, inference_pb2.FINISH_REASON_STOP),
        (FinishReason.LENGTH, inference_pb2.FINISH_REASON_LENGTH),
    ],
)
async def test_a_token_becomes_a_message(finish: FinishReason | None, expected: int) -> None:
    session = RouterSession()
    session.put_tokens(
        ("a", 1),
        2,
        NewTokens(id=1, first_index=3, token_ids=(42,), finish=finish, prefill_seconds=0.5),
    )
    (output,) = (await taken(session)).outputs
    message = output.tokens
    assert (output.request_id, output.attempt, output.choice) == ("a", 1, 2)
    assert (message.first_index, list(message.ids), message.prefill_seconds) == (3, [42], 0.5)
    assert message.finish_reason == expected


async def test_tokens_of_one_event_are_one_message() -> None:
    scored = (
        SampledLogprobs(logprob=-0.5, top=((7, -0.25), (8, -0.5))),
        SampledLogprobs(logprob=-1.0, top=()),
    )
    event = NewTokens(
        id=1,
        first_index=0,
        token_ids=(8, 9),
        finish=FinishReason.STOP,
        prefill_seconds=0.5,
        logprobs=scored,
        prompt_logprobs=(SampledLogprobs(logprob=-2.0, top=((1, -1.5),)),),
        score=-0.75,
    )
    session = RouterSession()
    session.put_tokens(("a", 1), 0, event)
    (output,) = (await taken(session)).outputs
    assert output.tokens == worker_pb2.Tokens(
        first_index=0,
        ids=[8, 9],
        finish_reason=inference_pb2.FINISH_REASON_STOP,
        prefill_seconds=0.5,
        logprobs=[
            worker_pb2.TokenScores(logprob=-0.5, top_ids=[7, 8], top_logprobs=[-0.25, -0.5]),
            worker_pb2.TokenScores(logprob=-1.0),
        ],
        prompt_logprobs=[worker_pb2.TokenScores(logprob=-2.0, top_ids=[1], top_logprobs=[-1.5])],
        score=-0.75,
    )


def scored_token(count: int, index: int = 0) -> NewTokens:
    scores = tuple(
        SampledLogprobs(logprob=-float(number), top=((number, -0.5),)) for number in range(count)
    )
    return NewTokens(
        id=1,
        first_index=index,
        token_ids=(7,),
        finish=None,
        prefill_seconds=0.1,
        prompt_logprobs=scores,
    )


async def test_a_long_prompts_scores_hold_up_their_own_request_and_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(session_module, "_MAX_LOGPROBS", 10)
    session = RouterSession()
    session.put_tokens(("long", 1), 0, scored_token(95))
    session.put_tokens(("long", 1), 1, scored_token(3))
    session.put(("long", 1), failure=worker_pb2.Failure(message="after all"))
    turns = 0
    while ("long", 1) in session._unfinished:
        session.put_tokens(("other", 1), 0, scored_token(10, turns))
        (output,) = (await taken(session)).outputs
        assert (output.request_id, output.tokens.first_index) == ("other", turns), (
            "it waits for nobody"
        )
        turns += 1
        await asyncio.sleep(0)
    assert turns >= 9
    outputs = (await taken(session)).outputs
    assert [output.choice for output in outputs] == [0, 1, 0]
    assert [score.logprob for score in outputs[0].tokens.prompt_logprobs] == [
        -float(number) for number in range(95)
    ]
    assert list(outputs[0].tokens.ids) == [7]
    assert len(outputs[1].tokens.prompt_logprobs) == 3
    assert outputs[2].failure.message == "after all"


async def test_a_closed_session_sends_unfinished_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_module, "_MAX_LOGPROBS", 10)
    session = RouterSession()
    session.put_tokens(("a", 1), 0, scored_token(95))
    session.close()
    (output,) = (await taken(session)).outputs
    assert len(output.tokens.prompt_logprobs) == 95
    assert await session.take() is None


async def test_no_turn_of_the_loop_is_long_for_a_long_prompt() -> None:
    """As a part of all of them, in its processor's time: neither depends on the machine and on what
    else runs.
    """
    top = tuple((number, -0.5) for number in range(20))
    scores = tuple(SampledLogprobs(logprob=-1.0, top=top) for _ in range(32_768))
    token = NewTokens(
        id=1,
        first_index=0,
        token_ids=(7,),
        finish=None,
        prefill_seconds=0.1,
        prompt_logprobs=scores,
    )
    session, times = RouterSession(), [time.thread_time()]
    session.put_tokens(("a", 1), 0, token)
    while session._unfinished:
        await asyncio.sleep(0)
        times.append(time.thread_time())
    turns = [later - earlier for earlier, later in itertools.pairwise(times)]
    assert max(turns) < sum(turns) / 3
    (output,) = (await taken(session)).outputs
    assert len(output.tokens.prompt_logprobs) == 32_768
