"""Sequences that their executor fails: each ends as a failure and holds nothing, and the others go
on.
"""

import pytest

from tandem.tests.workers.engine.drive import (
    PROMPT,
    MakeWorker,
    expected,
    finish_of,
    run,
    spec,
    tokens_of,
)
from tandem.tests.workers.engine.fake import expected_choices
from tandem.tests.workers.engine.harness import VOCAB_SIZE, SeqEvent
from tandem.workers.engine.events import Admitted, Failed, Progress
from tandem.workers.engine.plan import SamplingParams
from tandem.workers.engine.sequence import BeamSearch, FinishReason, Task

BOUND = SamplingParams(temperature=0.5, grammar="g")


def failures(events: list[SeqEvent]) -> list[tuple[int, str]]:
    return [(event.id, event.reason) for event in events if isinstance(event, Failed)]


@pytest.mark.parametrize("num_steps", range(4))
@pytest.mark.parametrize("sampling", [BOUND, SamplingParams(temperature=0.5)])
def test_it_ends_without_another_token_and_its_neighbour_goes_on(
    worker: MakeWorker, num_steps: int, sampling: SamplingParams
) -> None:
    target = worker()
    target.submit(spec(1, max_tokens=9, sampling=sampling))
    target.submit(spec(2, PROMPT[::-1], max_tokens=9))
    events = [event for _ in range(num_steps) for event in target.step()]
    target.executor.failing[1] = "grammar: broken"
    events += run(target)
    assert failures(events) == [(1, "grammar: broken")]
    reported = tokens_of(events, 1)
    assert len(reported) < 9
    assert reported == expected(PROMPT, 9)[: len(reported)]
    assert finish_of(events, 1) == []
    assert tokens_of(events, 2) == expected(PROMPT[::-1], 9)
    assert finish_of(events, 2) == [FinishReason.LENGTH]
    target.check_idle()


def test_choices_that_are_none_yet_fail_together(worker: MakeWorker) -> None:
    target = worker(chunk_tokens=4)
    target.submit(spec(1, num_choices=3, sampling=BOUND))
    target.engine.cancel_choice(1, 1)
    target.executor.failing[1] = "why"
    events = run(target)
    assert failures(events) == [(1, "why"), (3, "why")]
    assert tokens_of(events, 1) == []
    target.check_idle()


@pytest.mark.parametrize("failing", [1, 2, 3])
def test_after_the_fork_each_choice_fails_alone(worker: MakeWorker, failing: int) -> None:
    target = worker()
    target.submit(spec(1, max_tokens=9, num_choices=3, sampling=BOUND))
    events: list[SeqEvent] = []
    while not tokens_of(events, 3):
        events += target.step()
    target.executor.failing[failing] = "why"
    events += run(target)
    assert failures(events) == [(failing, "why")]
    for number, tokens in enumerate(expected_choices(PROMPT, 3, 9, VOCAB_SIZE), start=1):
        reported = tokens_of(events, number)
        assert reported == (tokens[: len(reported)] if number == failing else tokens)
        assert (len(reported) < 9) == (number == failing)
    target.check_idle()


@pytest.mark.parametrize("failing", [5, 6, 7])
def test_a_search_ends_as_one_if_any_of_its_beams_fails(worker: MakeWorker, failing: int) -> None:
    target = worker()
    target.submit(spec(5, max_tokens=9, num_choices=3, beam=BeamSearch(num_best=2)))
    target.submit(spec(1, PROMPT[::-1], max_tokens=9))
    events: list[SeqEvent] = []
    while 7 not in target.sequences:
        events += target.step()
    target.executor.failing[failing] = "why"
    events += run(target)
    assert failures(events) == [(5, "why")]
    assert tokens_of(events, 5) == []
    assert tokens_of(events, 1) == expected(PROMPT[::-1], 9)
    target.check_idle()


def test_a_prefill_that_fails_leaves_no_lease(worker: MakeWorker) -> None:
    target = worker()
    target.submit(spec(1, task=Task.PREFILL, sampling=BOUND))
    target.executor.failing[1] = "why"
    events = run(target)
    assert [type(event) for event in events if not isinstance(event, Progress)] == [
        Admitted,
        Failed,
    ]
    target.check_idle()


def test_a_failure_of_a_sequence_that_is_gone_is_nothing(worker: MakeWorker) -> None:
    target = worker()
    target.submit(spec(1, max_tokens=9))
    target.step()
    target.executor.failing[1] = "why"
    target.step()
    target.engine.cancel(1)
    assert len(failures(run(target))) == 0
    target.check_idle()
