"""Several choices of one prompt, and beam searches, as a router asks a worker or a pair of workers
for them.
"""

import asyncio
import gc
import math
import threading
import weakref
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from tandem.proto import inference_pb2, worker_pb2
from tandem.proto.hashing import hash_tenant
from tandem.tests.fleet import VOCAB, fake_rank, fleet
from tandem.tests.token_request import token_request
from tandem.tests.waits import SLOW_STEP, WAIT
from tandem.tests.workers.engine.fake import (
    FakeExecutor,
    expected_choices,
    expected_logprobs,
    expected_tokens,
)
from tandem.tests.workers.raw_session import (
    GREEDY,
    RawSession,
    ended,
    executor_of,
    idle,
    submit,
    worker_of,
)
from tandem.workers.engine.plan import FirstTokens, OnLayers, Samples, StepPlan
from tandem.workers.serve.worker import Worker
from tandem.workers.tp.rank import Rank
from tandem.workers.transfer.sender import KvSender

PROMPT = range(20)


def seeded(seed: int) -> inference_pb2.SamplingParams:
    sampling = inference_pb2.SamplingParams(seed=seed)
    sampling.MergeFrom(GREEDY)
    return sampling


def is_failure(output: worker_pb2.Output) -> bool:
    return output.HasField("failure")


def has_tokens(output: worker_pb2.Output) -> bool:
    return bool(output.tokens.ids)


def has_tokens_of(request_id: str, output: worker_pb2.Output) -> bool:
    return output.request_id == request_id and has_tokens(output)


@asynccontextmanager
async def pair(
    prefill: Rank | None = None, decode: Rank | None = None, **config: Any
) -> AsyncIterator[tuple[Worker, RawSession, RawSession]]:
    """A prefill worker and sessions to it and to a decode worker."""
    async with (
        worker_of(prefill or fake_rank(), "prefill", **config) as (worker, first),
        worker_of(decode or fake_rank(), **config) as (_, second),
    ):
        yield worker, first, second


async def hand_over(prefill: RawSession, decode: RawSession, **fields: Any) -> None:
    """Submits to both, to the second as soon as the first has begun."""
    await prefill.send(submit(task=worker_pb2.TASK_PREFILL, **fields))
    (admitted,) = await prefill.until(lambda output: output.HasField("admitted"))
    await decode.send(submit(task=worker_pb2.TASK_DECODE, kv=admitted.admitted.kv, **fields))


# --- choices
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("overlap", [False, True])
async def test_choices_cost_one_prefill(overlap: bool) -> None:
    rank = replace(fake_rank(), launches_ahead=overlap)
    async with worker_of(rank) as (worker, session):
        await session.send(submit(num_choices=4, max_tokens=10, sampling=seeded(2**64 - 4)))
        await session.until(ended, count=4)
        expected = expected_choices(PROMPT, 4, 10, VOCAB, seed=2**64 - 4)
        assert [session.tokens(choice=choice) for choice in range(4)] == expected
        assert len({tuple(tokens) for tokens in expected}) == 4
        assert sum(output.HasField("admitted") for output in session.outputs()) == 1
        status = await idle(worker)
        assert status.info.load.step_seconds > 0
    if not overlap:  # which computes a token that turns out to be one too many
        assert executor_of(rank).num_tokens == len(PROMPT) + 4 * 9


async def test_choices_of_a_pair_cost_one_prefill_and_one_transfer() -> None:
    ranks = fake_rank(), fake_rank()
    async with pair(*ranks) as (_, prefill, decode):
        await hand_over(prefill, decode, num_choices=4, max_tokens=10, sampling=seeded(5))
        await decode.until(ended, count=4)
        await prefill.until(
            has_tokens, count=4 - len([o for o in prefill.outputs() if has_tokens(o)])
        )
        for choice, expected in enumerate(expected_choices(PROMPT, 4, 10, VOCAB, seed=5)):
            assert prefill.tokens(choice=choice) == expected[:1]
            assert decode.tokens(choice=choice) == expected[1:]
        assert sum(output.HasField("kv_received") for output in decode.outputs()) == 1
    assert executor_of(ranks[0]).num_tokens == len(PROMPT)
    assert executor_of(ranks[1]).num_tokens == 4 * 9


async def test_choices_that_end_with_their_first_token_leave_no_lease() -> None:
    first = [tokens[0] for tokens in expected_choices(PROMPT, 3, 1, VOCAB, seed=5)]
    async with pair() as (worker, prefill, decode):
        await prefill.send(
            submit(
                task=worker_pb2.TASK_PREFILL,
                num_choices=3,
                sampling=seeded(5),
                stop_token_ids=first,
            )
        )
        await prefill.until(ended, count=3)
        await idle(worker)
        await hand_over(
            prefill,
            decode,
            request_id="b",
            num_choices=3,
            sampling=seeded(5),
            stop_token_ids=first[:2],
        )
        await decode.until(ended, count=3)
        assert decode.tokens("b", 2) == expected_tokens(PROMPT, 5, VOCAB, 7)[1:]
        await prefill.until(has_tokens, count=3 - len(prefill.tokens("b")))
        assert prefill.tokens("b") == first


async def test_one_choice_is_cancelled_and_the_others_go_on() -> None:
    async with worker_of(fake_rank(step_seconds=0.002)) as (worker, session):
        await session.send(submit(num_choices=3, max_tokens=100))
        await session.until(has_tokens, count=9)
        await session.send(worker_pb2.Cancel(request_id="a", attempt=1, choice=1))
        await session.send(worker_pb2.Cancel(request_id="a", attempt=1, choice=1))
        await session.send(worker_pb2.Cancel(request_id="a", attempt=1, choice=3))
        await session.until(ended, count=2)
        expected = expected_choices(PROMPT, 3, 100, VOCAB)
        assert (session.tokens(choice=0), session.tokens(choice=2)) == (expected[0], expected[2])
        reported = session.tokens(choice=1)
        assert len(reported) < 100
        assert reported == expected[1][: len(reported)]
        await idle(worker)


@pytest.mark.parametrize("task", [worker_pb2.TASK_COLOCATED, worker_pb2.TASK_PREFILL])
async def test_a_request_ends_with_its_last_choice(task: int) -> None:
    async with worker_of(fake_rank(step_seconds=SLOW_STEP)) as (worker, session):
        await session.send(submit(task=task, num_choices=2, max_tokens=1000))
        await session.until(has_tokens, count=2)
        for choice in (0, 1):
            await session.send(worker_pb2.Cancel(request_id="a", attempt=1, choice=choice))
        await idle(worker)
        assert not any(map(is_failure, session.outputs()))


async def test_choices_cancelled_before_they_are_any_never_come() -> None:
    rank = fake_rank(step_seconds=0.05)
    async with worker_of(rank) as (_, session):
        await session.send(submit(num_choices=3, max_tokens=5))
        for choice in (0, 2):
            await session.send(worker_pb2.Cancel(request_id="a", attempt=1, choice=choice))
        await session.until(ended)
        assert session.tokens(choice=1) == expected_tokens(PROMPT, 5, VOCAB, 1)
        assert session.tokens() == session.tokens(choice=1)
    assert executor_of(rank).num_tokens <= len(PROMPT) + 3 * 4


async def test_a_preempted_choice_goes_on_alone_where_it_stood() -> None:
    async with worker_of(fake_rank(num_blocks=9), growth_tokens=16) as (_, session):
        await session.send(submit(num_choices=3, max_tokens=80, sampling=seeded(2**64 - 4)))
        (lost,) = await session.until(is_failure)
        assert lost.failure.kind == worker_pb2.FAILURE_KIND_PREEMPTED
        expected = expected_choices(PROMPT, 3, 80, VOCAB, seed=2**64 - 4)
        ends = [output for output in session.outputs() if ended(output)]
        while len(ends) + len([o for o in session.outputs() if is_failure(o)]) < 3:
            ends += await session.until(lambda output: ended(output) or is_failure(output))
            ends = [output for output in ends if ended(output)]
        assert ends
        for end in ends:
            assert session.tokens(choice=end.choice) == expected[end.choice]
        before = session.tokens(choice=lost.choice)
        assert 0 < len(before) < 80
        again = {
            "num_choices": 1,
            "first_choice": lost.choice,
            "first_index": len(before),
            "max_tokens": 80 - len(before),
        }
        await session.send(
            submit("b", token_ids=[*PROMPT, *before], sampling=seeded(2**64 - 4), **again)
        )
        await session.until(lambda output: ended(output) and output.request_id == "b")
        assert before + session.tokens("b", lost.choice) == expected[lost.choice]


async def test_log_probabilities_go_up_with_their_tokens() -> None:
    async with worker_of(fake_rank(), chunk_tokens=8) as (_, session):
        await session.send(submit(num_choices=2, max_tokens=3, logprobs=2, prompt_logprobs=1))
        await session.until(ended, count=2)
        for choice in (0, 1):
            tokens, known = session.tokens(choice=choice), list(PROMPT)
            scores = [
                s for output in session.outputs(choice=choice) for s in output.tokens.logprobs
            ]
            for token, score in zip(tokens, scores, strict=True):
                ranked = expected_logprobs(known, VOCAB, VOCAB)
                assert list(zip(score.top_ids, score.top_logprobs, strict=True)) == list(ranked[:2])
                assert score.logprob == dict(ranked)[token]
                known.append(token)
        of_prompt = [s for output in session.outputs() for s in output.tokens.prompt_logprobs]
        for position, score in enumerate(of_prompt, start=1):
            assert (
                score.logprob
                == dict(expected_logprobs(PROMPT[:position], VOCAB, VOCAB))[PROMPT[position]]
            )
        assert len(of_prompt) == len(PROMPT) - 1


# --- beam search
# --------------------------------------------------------------------------------------------------

BEAMS: dict[str, Any] = {
    "num_choices": 3,
    "beam_search": {"width": 4, "length_penalty": 0.5},
    "max_tokens": 8,
}


def hypotheses(session: RawSession) -> list[tuple[list[int], float, int]]:
    """Tokens, score and finish reason of each choice, which come in one output."""
    found = [output for output in session.outputs() if has_tokens(output)]
    assert [output.choice for output in found] == [0, 1, 2]
    assert all(output.tokens.first_index == 0 for output in found)
    return [(list(o.tokens.ids), o.tokens.score, o.tokens.finish_reason) for o in found]


async def test_a_beam_search_of_a_pair_is_that_of_one_worker() -> None:
    async with worker_of(fake_rank()) as (_, session):
        await session.send(submit("without stops", **BEAMS))
        await session.until(ended, count=3)
        stops = session.tokens("without stops", 0)[4:5]
        session.messages.clear()
        await session.send(submit(**BEAMS, stop_token_ids=stops))
        await session.until(ended, count=3)
        whole = hypotheses(session)
    ranks = fake_rank(), fake_rank()
    async with pair(*ranks) as (_, prefill, decode):
        await hand_over(prefill, decode, **BEAMS, stop_token_ids=stops)
        await decode.until(ended, count=3)
        assert hypotheses(decode) == whole
        (opened,) = [
            output.tokens for output in prefill.outputs() if output.HasField("tokens")
        ] or [
            output.tokens
            for output in await prefill.until(lambda output: output.HasField("tokens"))
        ]
        assert not opened.ids
        assert opened.prefill_seconds > 0
    assert executor_of(ranks[0]).num_tokens == len(PROMPT)
    assert [score for _, score, _ in whole] == sorted(
        (score for _, score, _ in whole), reverse=True
    )
    for tokens, score, finish in whole:
        logprobs = [
            dict(expected_logprobs([*PROMPT, *tokens[:n]], VOCAB, VOCAB))[token]
            for n, token in enumerate(tokens)
        ]
        assert math.isclose(score, sum(logprobs) / len(tokens) ** 0.5, rel_tol=1e-5)
        stopped = tokens[-1] in stops
        assert finish == (
            inference_pb2.FINISH_REASON_STOP if stopped else inference_pb2.FINISH_REASON_LENGTH
        )
        assert stopped or len(tokens) == 8
    assert any(finish == inference_pb2.FINISH_REASON_STOP for _, _, finish in whole)


async def test_a_preempted_beam_search_ends_as_one() -> None:
    async with worker_of(fake_rank(num_blocks=16), growth_tokens=16) as (_, session):
        await session.send(submit("old", num_choices=3, max_tokens=100))
        await session.until(has_tokens)
        await session.send(submit("new", beam_search={"width": 3}, num_choices=2, max_tokens=60))
        (lost,) = await session.until(is_failure)
        assert (lost.request_id, lost.failure.kind) == ("new", worker_pb2.FAILURE_KIND_PREEMPTED)
        await session.until(ended)
        assert session.tokens("old", 0) == expected_tokens(PROMPT, 100, VOCAB)
        assert len(session.outputs("new")) == 2  # it was admitted, and failed


# --- first tokens
# --------------------------------------------------------------------------------------------------

BROKEN: list[tuple[dict[str, Any], FirstTokens]] = [
    ({"num_choices": 2}, FirstTokens(tokens=(1,))),
    ({"num_choices": 2}, FirstTokens(tokens=(1, 2, 3))),
    ({"num_choices": 2}, FirstTokens(tokens=(1, VOCAB))),
    ({"num_choices": 2}, FirstTokens(tokens=(1, 2), logprobs=(-1.0, -2.0))),
    ({"num_choices": 1}, FirstTokens(tokens=())),
    ({"num_choices": 1}, FirstTokens(tokens=(2**40,))),
    ({"beam_search": {"width": 2}}, FirstTokens(tokens=(1, 2))),
    ({"beam_search": {"width": 2}}, FirstTokens(tokens=(1,), logprobs=(-1.0,))),
    ({"beam_search": {"width": 2}}, FirstTokens(tokens=(1, VOCAB, 3), logprobs=(-1.0, -2.0, -3.0))),
    (
        {"beam_search": {"width": 2}},
        FirstTokens(tokens=(1, 2, 3), logprobs=(-1.0, float("nan"), -3.0)),
    ),
    ({"beam_search": {"width": 2}}, FirstTokens(tokens=(1, 2, 3), logprobs=(-1.0, -3.0))),
]


@pytest.mark.parametrize(("fields", "first_tokens"), BROKEN)
async def test_broken_first_tokens_are_a_failed_transfer(
    fields: dict[str, Any], first_tokens: FirstTokens, monkeypatch: pytest.MonkeyPatch
) -> None:
    complete = KvSender.complete
    monkeypatch.setattr(
        KvSender,
        "complete",
        lambda self, sequence_id, good: complete(self, sequence_id, first_tokens),
    )
    async with pair() as (_, prefill, decode):
        await hand_over(prefill, decode, **fields)
        (failed,) = await decode.until(is_failure)
        assert failed.failure.kind == worker_pb2.FAILURE_KIND_TRANSFER
        await prefill.send(worker_pb2.Cancel(request_id="a", attempt=1))
        await decode.send(submit("b"))  # the engine goes on
        await decode.until(ended)
        assert decode.tokens("b") == expected_tokens(PROMPT, 5, VOCAB)


# --- grammars
# --------------------------------------------------------------------------------------------------


async def test_a_bad_grammar_is_refused_and_the_worker_goes_on() -> None:
    def check(grammar: str, owner: bytes, tenant: bytes) -> None:
        if "bad" in grammar:
            raise ValueError("the grammar cannot be followed: line 1")

    async with worker_of(replace(fake_rank(), load_grammar=check)) as (_, session):
        await session.send(submit(grammar="bad"))
        failure = await session.failure()
        assert failure.kind == worker_pb2.FAILURE_KIND_INVALID
        assert failure.message == "grammar: the grammar cannot be followed: line 1"
        await session.send(submit("b", grammar="good", num_choices=2))
        await session.until(ended, count=2)
        assert not session.tokens("a")


async def test_a_grammar_is_compiled_for_the_tenant_of_its_request_and_used_for_no_other() -> None:
    compiled: list[tuple[str, bytes, bytes]] = []

    def load(grammar: str, owner: bytes, tenant: bytes) -> None:
        compiled.append((grammar, owner, tenant))

    async with worker_of(replace(fake_rank(), load_grammar=load)) as (_, session):
        for name in ("ada", "bob"):
            await session.send(
                submit(name, grammar="g", cache_salt=name.encode(), tenant=hash_tenant(name))
            )
            await session.until(partial(has_tokens_of, name))
        assert sorted(compiled) == [
            ("g", b"ada", hash_tenant("ada")),
            ("g", b"bob", hash_tenant("bob")),
        ]
        await session.send(submit("long", tenant=bytes(17)))
        assert (await session.failure()).message == "tenant: has 17 bytes; the maximum is 16"


async def test_a_grammar_is_held_as_long_as_its_request() -> None:
    class Held:
        pass

    held = Held()
    seen = weakref.ref(held)
    made = [held]
    del held
    async with worker_of(
        replace(fake_rank(step_seconds=0.005), load_grammar=lambda *_: made.pop())
    ) as (
        w,
        session,
    ):
        await session.send(submit(grammar="g", max_tokens=1000))
        await session.until(has_tokens)
        gc.collect()
        assert seen() is not None
        await session.send(worker_pb2.Cancel(request_id="a", attempt=1))
        await idle(w)
        gc.collect()
        assert seen() is None


class GivingUp(FakeExecutor):
    """Fails every sequence with a grammar at its fourth sample."""

    def __init__(self) -> None:
        super().__init__(256, 16, vocab_size=VOCAB)
        self._num_samples: dict[int, int] = {}

    def launch(self, plan: StepPlan, on_layers: OnLayers | None = None) -> Callable[[], Samples]:
        for step in plan.sequences:
            if step.sampling is not None and step.sampling.grammar:
                self._num_samples.setdefault(step.sequence_id, 0)
            if step.sequence_id in self._num_samples and step.num_samples:
                self._num_samples[step.sequence_id] += 1
        failed = {
            number: "grammar: no way on"
            for number, count in self._num_samples.items()
            if count >= 4
        }
        collect = super().launch(plan, on_layers)
        return lambda: replace(collect(), failed=failed)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("num_choices", [1, 3])
async def test_a_grammar_that_fails_midway_fails_its_request_and_no_other(
    overlap: bool, num_choices: int
) -> None:
    rank = replace(
        fake_rank(), executor=(executor := GivingUp()), kv=executor.kv, launches_ahead=overlap
    )
    async with worker_of(rank) as (worker, session):
        await session.send(submit("b", max_tokens=50))
        await session.send(submit(grammar="g", num_choices=num_choices, max_tokens=50))
        failure = await session.failure()
        assert (failure.kind, failure.message) == (
            worker_pb2.FAILURE_KIND_INVALID,
            "grammar: no way on",
        )
        if not any(map(ended, session.outputs("b"))):
            await session.until(ended)
        assert session.tokens("b") == expected_tokens(PROMPT, 50, VOCAB)
        for choice, tokens in enumerate(expected_choices(PROMPT, num_choices, 3, VOCAB)):
            assert session.tokens("a", choice) == tokens
        assert not any(ended(output) for output in session.outputs("a"))
        assert sum(map(is_failure, session.outputs("a"))) == 1
        await idle(worker)


async def test_a_grammar_is_compiled_once_for_all_that_wait_for_it() -> None:
    compiled: list[str] = []
    go_on = threading.Event()

    def load(grammar: str, owner: bytes, tenant: bytes) -> None:
        compiled.append(grammar)
        assert go_on.wait(WAIT)
        if grammar == "bad":
            raise ValueError("line 1")

    async with worker_of(replace(fake_rank(), load_grammar=load)) as (_, session):
        for number in range(6):
            await session.send(submit(str(number), grammar=("good", "bad")[number % 2]))
        await session.send(
            worker_pb2.Cancel(request_id="0", attempt=1)
        )  # the others still wait for it
        await session.send(submit("plain"))
        await session.until(ended)
        go_on.set()
        failed = await session.until(is_failure, count=3)
        await session.until(
            ended, count=2 - sum(ended(output) for n in "24" for output in session.outputs(n))
        )
        assert {output.request_id for output in failed} == {"1", "3", "5"}
        assert sorted(compiled) == ["bad", "good"]


async def test_a_cancel_while_the_grammar_is_read_ends_the_request() -> None:
    begun, go_on = threading.Event(), threading.Event()

    def check(grammar: str, owner: bytes, tenant: bytes) -> None:
        begun.set()
        if not go_on.wait(WAIT):
            raise TimeoutError

    rank = replace(fake_rank(), load_grammar=check)
    async with worker_of(rank) as (worker, session):
        await session.send(submit(grammar="long"))
        assert await asyncio.to_thread(begun.wait, WAIT)
        await session.send(submit("b"))  # others do not wait for it
        await session.until(ended)
        await session.send(worker_pb2.Cancel(request_id="a", attempt=1))
        await idle(worker)
        go_on.set()
        await session.send(submit("c", grammar="long"))
        await session.until(ended)
        assert not session.outputs("a")


async def test_a_grammar_that_is_never_compiled_is_given_up_and_the_worker_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tandem.workers.serve.request_manager._PREPARE_SECONDS", 0.2)
    go_on = threading.Event()
    async with worker_of(replace(fake_rank(), load_grammar=lambda *_: go_on.wait(WAIT))) as (
        _,
        session,
    ):
        try:
            await session.send(submit(grammar="endless"))
            failure = await session.failure()
            assert failure.kind == worker_pb2.FAILURE_KIND_UNABLE
            assert failure.message == "grammar: is not compiled after 0.2 seconds"
            await session.send(submit("plain"))
            await session.until(ended)
        finally:
            go_on.set()


# --- through a dispatcher
# ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefill", [0, 1])
async def test_choices_through_a_dispatcher(prefill: int) -> None:
    async with fleet(prefill, 1) as running:
        tokens, timeline = await running.choices(token_request(PROMPT, 12, num_choices=4))
        assert tokens == expected_choices(PROMPT, 4, 12, VOCAB)
        assert (timeline.attempts, timeline.completion_tokens) == (1, 48)
