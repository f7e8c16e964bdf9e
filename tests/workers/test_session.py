"""One router's outputs on their way up, and what a worker makes of a submit."""

import asyncio

import pytest

from tandem.proto import inference_pb2, worker_pb2
from tandem.workers.engine.events import Token
from tandem.workers.engine.plan import KvLayout, SamplingParams
from tandem.workers.engine.sequence import FinishReason, Task
from tandem.workers.session import RouterSession, layout_message, parse_layout, parse_submit, tokens_output


async def test_outputs_of_one_turn_leave_together_and_in_order() -> None:
    session = RouterSession()
    for index in range(5):
        session.put(("a", 1), tokens=worker_pb2.Tokens(first_index=index))
    taken = await session.take()
    assert taken is not None
    assert [output.tokens.first_index for output in taken] == list(range(5))
    waiting = asyncio.ensure_future(session.take())
    await asyncio.sleep(0)
    assert not waiting.done()
    session.put(("b", 2), joined=worker_pb2.Joined())
    (output,) = await waiting or []
    assert (output.request_id, output.attempt) == ("b", 2)


async def test_a_closed_session_gives_what_is_queued_and_then_ends() -> None:
    session = RouterSession()
    session.put(("a", 1), failure=worker_pb2.Failure())
    session.close()
    async with asyncio.timeout(5):
        assert len(await session.take() or []) == 1
        assert await session.take() is None
        assert await session.take() is None


async def test_close_wakes_who_waits() -> None:
    session = RouterSession()
    waiting = asyncio.ensure_future(session.take())
    await asyncio.sleep(0)
    session.close()
    async with asyncio.timeout(5):
        assert await waiting is None


def test_a_submit_as_the_engine_takes_it() -> None:
    submit = worker_pb2.Submit(
        task=worker_pb2.TASK_PREFILL,
        token_ids=[1, 2, 3],
        first_index=2,
        max_tokens=7,
        sampling=inference_pb2.SamplingParams(temperature=0.5, top_k=-1, top_p=0.75, min_p=0.25, seed=2**64 - 1),
        stop_token_ids=[5],
        cache_salt=b"salt",
    )
    spec = parse_submit(submit, 9, vocab_size=10, context_tokens=10, eos_ids=frozenset({0}))
    assert (spec.id, spec.task, spec.tokens, spec.first_index, spec.max_tokens) == (9, Task.PREFILL, (1, 2, 3), 2, 7)
    assert spec.sampling == SamplingParams(temperature=0.5, top_k=0, top_p=0.75, min_p=0.25, seed=2**64 - 1)
    assert (spec.stop_ids, spec.salt) == (frozenset({0, 5}), b"salt")
    submit.ignore_eos = True
    submit.sampling.top_k = 999
    spec = parse_submit(submit, 9, vocab_size=10, context_tokens=10, eos_ids=frozenset({0}))
    assert (spec.stop_ids, spec.sampling.top_k) == (frozenset({5}), 10)


@pytest.mark.parametrize(
    ("finish", "expected"),
    [
        (None, inference_pb2.FINISH_REASON_UNSPECIFIED),
        (FinishReason.STOP, inference_pb2.FINISH_REASON_STOP),
        (FinishReason.LENGTH, inference_pb2.FINISH_REASON_LENGTH),
    ],
)
def test_a_token_as_it_goes_up(finish: FinishReason | None, expected: int) -> None:
    message = tokens_output(Token(id=1, index=3, token=42, finish=finish, prefill_seconds=0.5))
    assert (message.first_index, list(message.ids), message.prefill_seconds) == (3, [42], 0.5)
    assert message.finish_reason == expected


def test_a_layout_comes_back_as_it_went() -> None:
    layout = KvLayout(num_layers=3, num_heads=4, num_kv_heads=2, head_dim=4, dtype="float32", model="fake")
    assert parse_layout(layout_message(layout)) == layout
