"""Log probabilities of sampled tokens and of the prompt, through the engine."""

from collections.abc import Sequence

import pytest

from tandem.tests.workers.engine.drive import PROMPT, MakeWorker, cached_of, expected, run, spec
from tandem.tests.workers.engine.fake import expected_logprobs
from tandem.tests.workers.engine.harness import VOCAB_SIZE
from tandem.workers.engine.events import Event, NewTokens
from tandem.workers.engine.plan import SampledLogprobs, SamplingParams
from tandem.workers.engine.sequence import Task


def score(tokens: tuple[int, ...], token: int, top: int) -> SampledLogprobs:
    every = expected_logprobs(tokens, VOCAB_SIZE, VOCAB_SIZE)
    return SampledLogprobs(logprob=dict(every)[token], top=every[:top])


def tokens_in(events: Sequence[Event], number: int) -> list[NewTokens]:
    return [event for event in events if isinstance(event, NewTokens) and event.id == number]


@pytest.mark.parametrize("n", [1, 3])
def test_each_token_has_its_own(worker: MakeWorker, n: int) -> None:
    target = worker()
    target.submit(spec(1, num_choices=n, sampling=SamplingParams(logprobs=2)))
    target.submit(spec(9))
    events = run(target)
    for number in range(1, 1 + n):
        history = PROMPT
        for event in tokens_in(events, number):
            assert event.logprobs == (score(history, event.token_ids[0], 2),)
            history += event.token_ids
    assert all(not event.logprobs for event in tokens_in(events, 9))


def test_a_likeliest_token_is_what_the_zero_seed_draws() -> None:
    assert expected_logprobs(PROMPT, 1, VOCAB_SIZE)[0][0] == expected(PROMPT, 1)[0]


@pytest.mark.parametrize("chunk", [3, 4, 16])
@pytest.mark.parametrize("task", [Task.COLOCATED, Task.PREFILL])
@pytest.mark.parametrize("n", [1, 2])
def test_of_the_prompt_they_come_with_the_first_token_of_the_first_choice(
    worker: MakeWorker, chunk: int, task: Task, n: int
) -> None:
    target = worker(chunk_tokens=chunk)
    target.submit(spec(1))
    run(target)
    target.submit(spec(5, task=task, num_choices=n, sampling=SamplingParams(prompt_logprobs=3)))
    events = run(target)
    assert cached_of(events, 5) == 0, "what is not computed has no logits"
    want = tuple(score(PROMPT[:end], PROMPT[end], 3) for end in range(1, len(PROMPT)))
    reported = [
        event.prompt_logprobs for number in range(5, 5 + n) for event in tokens_in(events, number)
    ]
    assert reported == [want] + [()] * (len(reported) - 1)
    following = {
        step.start + len(step.token_ids): step.next_prompt_token
        for plan in target.executor.plans
        for step in plan.sequences
        if step.sequence_id == 5
    }
    assert following == {end: PROMPT[end] if end < len(PROMPT) else None for end in following}


def test_generated_tokens_that_are_computed_anew_are_no_prompt(worker: MakeWorker) -> None:
    target = worker()
    target.submit(spec(1, first_index=4, sampling=SamplingParams(prompt_logprobs=0)))
    first = tokens_in(run(target), 1)[0]
    assert first.prompt_logprobs == tuple(
        score(PROMPT[:end], PROMPT[end], 0) for end in range(1, 6)
    )


def test_an_import_computes_nothing_of_the_prompt_and_may_be_cached(worker: MakeWorker) -> None:
    target = worker()
    target.submit(spec(1, max_tokens=1))
    run(target)
    target.submit(spec(5, task=Task.DECODE, sampling=SamplingParams(prompt_logprobs=3)))
    assert cached_of(target.step(), 5) == 8
