"""Beam search in the engine: the hypotheses of the model, on blocks that beams share."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.tests.examples import num_examples
from tandem.tests.workers.engine.drive import (
    PROMPT,
    MakeWorker,
    fill,
    first_tokens,
    make_worker,
    run,
    spec,
    tokens_of,
)
from tandem.tests.workers.engine.harness import SeqEvent, Worker
from tandem.tests.workers.engine.pair import best_hypotheses
from tandem.workers.engine.block_pool import BlockState
from tandem.workers.engine.events import (
    Admitted,
    Event,
    Failed,
    NewTokens,
    Preempted,
    PrefillFinished,
    Progress,
)
from tandem.workers.engine.plan import FirstTokens, SamplingParams
from tandem.workers.engine.sequence import BeamSearch, FinishReason, Task

BEAM = BeamSearch(num_best=2)


def found(events: Sequence[Event], first: int, count: int) -> list[tuple[tuple[int, ...], float]]:
    """Hypotheses and scores, after a look at indices and ends."""
    hypotheses = []
    for number in range(first, first + count):
        (event,) = (
            event for event in events if isinstance(event, NewTokens) and event.id == number
        )
        assert event.first_index == 0
        assert event.finish is not None
        hypotheses.append((event.token_ids, event.score))
    return hypotheses


@settings(max_examples=num_examples(80), database=None)
@given(
    st.integers(1, 9),
    st.integers(1, 12),
    st.integers(1, 5),
    st.integers(1, 5),
    st.frozensets(st.integers(0, 15), max_size=2),
    st.builds(
        BeamSearch,
        num_best=st.integers(1, 5),
        length_penalty=st.sampled_from([1.0, 0.0, -1.0, 2.0]),
        early_stopping=st.booleans(),
    ),
    st.booleans(),
    st.booleans(),
)
def test_hypotheses_are_those_of_a_search_without_an_engine(
    length: int,
    max_tokens: int,
    width: int,
    block_size: int,
    stop_ids: frozenset[int],
    beam: BeamSearch,
    overlap: bool,
    late: bool,
) -> None:
    beam = replace(beam, num_best=min(beam.num_best, width))
    prompt = tuple(range(1, length + 1))
    target = make_worker(num_blocks=120, block_size=block_size, overlap=overlap, late=late)
    options: dict[str, Any] = {
        "max_tokens": max_tokens,
        "num_choices": width,
        "beam": beam,
    }
    target.submit(spec(1, prompt, stop_ids=tuple(stop_ids), **options))
    target.submit(spec(9, (5, 6), max_tokens=9))
    events = run(target)
    assert found(events, 1, beam.num_best) == best_hypotheses(
        prompt, max_tokens, width, beam, stop_ids
    )
    assert {e.id for e in events if isinstance(e, NewTokens)} == {9, *range(1, 1 + beam.num_best)}
    target.check_idle()


def test_all_best_hypotheses_are_reported_at_the_end_and_nothing_before(worker: MakeWorker) -> None:
    beam = BeamSearch(num_best=3)
    target = worker()
    target.submit(spec(1, max_tokens=6, num_choices=4, beam=beam))
    events = [event for event in run(target) if not isinstance(event, Progress)]
    assert found(events, 1, 3) == best_hypotheses(PROMPT, 6, 4, beam, frozenset())
    assert [type(event) for event in events] == [Admitted] + [NewTokens] * 3
    assert {event.finish for event in events if isinstance(event, NewTokens)} == {
        FinishReason.LENGTH
    }
    target.check_idle()


def test_a_hypothesis_keeps_its_stop_token(worker: MakeWorker) -> None:
    beam = BeamSearch(num_best=1, length_penalty=-1.0)
    ((free, _),) = best_hypotheses(PROMPT, 3, 3, beam, frozenset())
    want = best_hypotheses(PROMPT, 9, 3, beam, frozenset({free[0]}))
    assert len(want[0][0]) < 9
    target = worker()
    target.submit(spec(1, max_tokens=9, num_choices=3, beam=beam, stop_ids=(free[0],)))
    events = run(target)
    assert found(events, 1, 1) == want
    assert [e.finish for e in events if isinstance(e, NewTokens) and e.finish] == [
        FinishReason.STOP
    ]
    assert want[0][0][-1] == free[0]


def test_steps_ask_for_candidates_only_and_beams_share_the_prompt(worker: MakeWorker) -> None:
    target = worker(growth_tokens=0)
    target.submit(
        spec(
            1,
            max_tokens=8,
            num_choices=3,
            beam=BEAM,
            stop_ids=(0, 1),
            sampling=SamplingParams(seed=9),
        )
    )
    run(target)
    plans = [plan for plan in target.executor.plans if plan.sequences]
    reported = [step.sampling for plan in plans for step in plan.sequences if step.sampling]
    assert {(sampling.temperature, sampling.logprobs) for sampling in reported} == {(0.0, 5)}
    assert [len(plan.sequences) for plan in plans] == [1] + [3] * (len(plans) - 1), (
        "all beams or none"
    )
    assert all(step.num_samples == 1 for plan in plans for step in plan.sequences)
    assert target.executor.num_tokens == 10 + 3 * (len(plans) - 1)
    shared = {
        step.new_blocks[0].blocks[:2] for plan in plans for step in plan.sequences if step.sampling
    }
    assert len(shared) == 1


def opened(worker: Worker, **options: Any) -> FirstTokens:
    worker.submit(spec(1, task=Task.PREFILL, **options))
    events = run(worker)
    assert [type(e) for e in events if not isinstance(e, Progress)] == [
        Admitted,
        PrefillFinished,
    ], "no token"
    assert worker.engine.blocks()[BlockState.LEASED] == 3
    worker.engine.cancel(1)
    worker.check_idle()
    (event,) = (e for e in events if isinstance(e, PrefillFinished))
    return event.first_tokens


@pytest.mark.parametrize("max_tokens", [1, 2, 7])
def test_prefill_and_decode_apart_give_the_same_hypotheses(
    worker: MakeWorker, max_tokens: int
) -> None:
    options: dict[str, Any] = {"max_tokens": max_tokens, "num_choices": 3, "beam": BEAM}
    start = opened(worker(), **options)
    assert len(start.tokens) == len(start.logprobs) == 4
    target = worker()
    target.submit(spec(5, task=Task.DECODE, **options))
    admitted = next(event for event in target.step() if isinstance(event, Admitted))
    fill(target, admitted, PROMPT)
    target.engine.commit_import(5, start)
    events = run(target)
    assert found(events, 5, 2) == best_hypotheses(PROMPT, max_tokens, 3, BEAM, frozenset())
    target.check_idle()


@pytest.mark.parametrize(
    "wrong", [FirstTokens(tokens=(1, 2), logprobs=(-1.0, -2.0)), FirstTokens(tokens=(1, 2, 3))]
)
def test_first_tokens_without_candidates_are_refused(
    worker: MakeWorker, wrong: FirstTokens
) -> None:
    target = worker()
    target.submit(spec(5, task=Task.DECODE, num_choices=3, beam=BEAM))
    target.step()
    with pytest.raises(ValueError, match="first_tokens: "):
        target.engine.commit_import(5, wrong)


def test_a_search_is_preempted_as_one_and_reported_once(worker: MakeWorker) -> None:
    target = worker(num_blocks=11, block_size=2, growth_tokens=0, prefix_caching=False)
    target.submit(spec(1, PROMPT[:4], max_tokens=14))
    target.step()
    target.submit(spec(5, PROMPT[4:8], max_tokens=6, num_choices=3, beam=BEAM))
    events: list[SeqEvent] = []
    while not (gone := [event.id for event in events if isinstance(event, Preempted)]):
        events += target.step()
    assert gone == [5]
    assert list(target.sequences) == [1], "no beam is left"
    assert len(tokens_of(run(target), 1)) > 0
    target.check_idle()


@pytest.mark.parametrize("is_committed", [True, False])
def test_a_search_waits_for_an_import_and_is_not_preempted_for_it(
    worker: MakeWorker, is_committed: bool
) -> None:
    """Two searches would preempt each other forever, each while the other is imported."""
    target = worker(num_blocks=11, block_size=2, growth_tokens=0, prefix_caching=False)
    target.submit(spec(5, PROMPT[:4], max_tokens=6, num_choices=2, beam=BEAM))
    target.step()
    target.submit(spec(9, PROMPT, task=Task.DECODE))
    events = run(target)
    assert [type(event) for event in events] == [Admitted], "nothing happens but the admission"
    assert 5 in target.sequences
    if is_committed:
        (admitted,) = events
        assert isinstance(admitted, Admitted)
        target.engine.commit_import(9, first_tokens(fill(target, admitted, PROMPT)))
    else:
        target.engine.cancel(9)
    events = run(target)
    assert [e.id for e in events if isinstance(e, Preempted)] == ([9] if is_committed else [])
    assert found(events, 5, 2) == best_hypotheses(PROMPT[:4], 6, 2, BEAM, frozenset())
    target.check_idle()


@pytest.mark.parametrize("number", [5, 6, 7])
@pytest.mark.parametrize("steps", range(6))
def test_a_search_ends_with_any_of_its_ids(worker: MakeWorker, number: int, steps: int) -> None:
    target = worker(chunk_tokens=4)
    target.submit(spec(5, max_tokens=20, num_choices=3, beam=BEAM))
    for _ in range(steps):
        target.step()
    forked = 6 in target.sequences
    target.engine.cancel(number)
    if not forked:
        target.engine.cancel(5)
    target.check_idle()
    assert run(target) == []


def test_a_cancelled_hypothesis_is_not_reported(worker: MakeWorker) -> None:
    target = worker()
    target.submit(spec(5, max_tokens=6, num_choices=3, beam=BEAM))
    target.step()
    target.engine.cancel_choice(5, 0)
    events = run(target)
    assert {event.id for event in events if isinstance(event, NewTokens)} == {6}
    assert found(events, 6, 1) == best_hypotheses(PROMPT, 6, 3, BEAM, frozenset())[1:]
    target.submit(spec(15, max_tokens=6, num_choices=3, beam=BEAM))
    target.step()
    for choice in (1, 0):
        target.engine.cancel_choice(15, choice)
    target.check_idle()


def test_a_search_fits_where_all_beams_can_end(worker: MakeWorker) -> None:
    least = 2 + 3 * 2  # two full blocks of the prompt, and of each beam a copy and the last block
    options: dict[str, Any] = {"max_tokens": 4, "num_choices": 3, "beam": BEAM}
    with pytest.raises(ValueError, match="exceed the capacity"):
        worker(num_blocks=least - 1).engine.submit(spec(1, **options))
    target = worker(num_blocks=least)
    target.submit(spec(1, **options))
    assert found(run(target), 1, 2) == best_hypotheses(PROMPT, 4, 3, BEAM, frozenset())


def test_late_stop_tokens_end_no_hypothesis_before_their_time(worker: MakeWorker) -> None:
    stop = best_hypotheses(PROMPT, 3, 3, BEAM, frozenset())[0][0][0]
    sampling = SamplingParams(stop_ids=(stop,), min_length=len(PROMPT) + 3)
    target = worker()
    target.submit(
        spec(1, max_tokens=8, num_choices=3, beam=BEAM, stop_ids=(stop,), sampling=sampling)
    )
    for tokens, _ in found(run(target), 1, 2):
        assert stop not in tokens[:3]


def test_hypotheses_that_do_not_exist_are_failures(worker: MakeWorker) -> None:
    """14 of 16 tokens are excluded, and there is no step after the first."""
    stops = tuple(range(14))
    sampling = SamplingParams(stop_ids=stops, min_length=len(PROMPT) + 3)
    target = worker()
    beam = BeamSearch(num_best=4)
    target.submit(
        spec(1, max_tokens=1, num_choices=5, beam=beam, stop_ids=stops, sampling=sampling)
    )
    target.engine.cancel_choice(1, 2)
    events = run(target)
    assert sorted(tokens_of(events, 1) + tokens_of(events, 2)) == [14, 15]
    failed = [event for event in events if isinstance(event, Failed)]
    assert [(event.id, event.reason) for event in failed] == [
        (4, "beam_search: only 2 hypotheses exist")
    ]
    target.check_idle()


@pytest.mark.parametrize("first", [5, 6, 7])
def test_a_hypothesis_can_be_cancelled_whichever_beams_are_left(
    worker: MakeWorker, first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beams run out as they would if a model had one candidate token alone: here those of all
    sequences but one.
    """
    target = worker(overlap=False)
    target.submit(spec(5, max_tokens=9, num_choices=3, beam=BeamSearch(num_best=3)))
    target.step()
    target.step()
    (search,) = target.engine.requests.searches.values()
    place = [member.spec.id for member in search.members].index(first)
    advance = search.beams.advance

    def starved(candidates: Sequence[Sequence[tuple[int, float]]]) -> Any:
        return advance([row if index == place else [] for index, row in enumerate(candidates)])[:1]

    with monkeypatch.context() as patch:
        patch.setattr(search.beams, "advance", starved)
        patch.setattr(search.beams, "_max_running", 1)
        target.step()
    assert list(target.sequences) == [first]
    target.engine.cancel_choice(5, 1)
    assert search.choices == [0, 2]
    target.engine.cancel_choice(5, 2)
    target.engine.cancel_choice(5, 0)
    target.check_idle()
    assert run(target) == []
