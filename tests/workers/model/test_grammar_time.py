"""Grammars whose masks take long hold nobody up, and change no token."""

import itertools
import os
import threading
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from tandem.proto.llguidance_calls import on_deep_stack
from tandem.tests.ambiguous import AMBIGUOUS
from tandem.tests.tiny import make_tiny_model
from tandem.tests.tiny_tokenizer import EOS_ID
from tandem.tests.workers.model.helpers import load, prompt
from tandem.workers.engine.config import Budgets, EngineConfig
from tandem.workers.engine.engine import Engine
from tandem.workers.engine.events import Event, Failed, NewTokens
from tandem.workers.engine.plan import (
    Constrained,
    Executor,
    OnLayers,
    Samples,
    SamplingParams,
    StepPlan,
)
from tandem.workers.engine.sequence import SequenceSpec, Task
from tandem.workers.model.runner import ModelRunner
from tandem.workers.model.sampling import grammar as grammar_module
from tandem.workers.model.sampling import grammar_cache
from tandem.workers.model.sampling.grammar import GrammarMatchers
from tandem.workers.model.sampling.grammar_cache import GrammarCache

A = 67  # the token of "a"
PLAIN, MANY, LENGTH = range(4), range(4, 68), 8
KINDS = [AMBIGUOUS[kind] for kind in ("pairs", "deep", "operators", "words of words")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("llama"))


@pytest.fixture(autouse=True)
def no_bound_of_a_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_module, "_MAX_SEQUENCE_SECONDS", float("inf"))


class Recording(Executor):
    """Keeps which sequences were in each step."""

    def __init__(self, runner: ModelRunner, tick: bool = False) -> None:
        """`tick`: by the clock of the masks each look at it takes an hour."""
        self.runner = runner
        self.steps: list[set[int]] = []
        if tick:
            hours = itertools.count(step=3600.0)
            runner._sampler._processors.matchers._clock = lambda: next(hours)

    def launch(self, plan: StepPlan, on_layers: OnLayers | None = None) -> Callable[[], Samples]:
        self.steps.append({step.sequence_id for step in plan.sequences})
        return self.runner.launch(plan, on_layers)

    def prepare_masks(self, sequences: Sequence[Constrained], seconds: float) -> Collection[int]:
        return self.runner.prepare_masks(sequences, seconds)


def make_engine(executor: Executor) -> Engine:
    return Engine(
        executor,
        EngineConfig(num_blocks=512, budgets=Budgets(max_sequences=len(PLAIN) + len(MANY))),
    )


def sequence(number: int, max_tokens: int, **fields: object) -> SequenceSpec:
    grammar = KINDS[number % len(KINDS)] if number in MANY else ""
    sampling = SamplingParams(
        temperature=0.9, seed=number, grammar=grammar, logit_bias=((EOS_ID, -100.0),)
    )
    values: dict[str, object] = {
        "tokens": tuple(prompt(9, number)),
        "sampling": sampling,
        "task": Task.COLOCATED,
    }
    return SequenceSpec(id=number, max_tokens=max_tokens, **(values | fields))  # type: ignore[arg-type]


def run(engine: Engine, specs: Sequence[SequenceSpec]) -> dict[int, list[int]]:
    """Returns the tokens of each sequence."""
    for spec in specs:
        engine.submit(spec)
    made: dict[int, list[int]] = {spec.id: [] for spec in specs}
    events: list[Event] = []
    while engine.has_work:
        events += engine.step()
    for event in events:
        assert not isinstance(event, Failed), event.reason
        if isinstance(event, NewTokens):
            made.setdefault(event.id, []).extend(event.token_ids)
    engine.check_integrity()
    return made


def test_sixty_four_ambiguous_grammars_keep_no_plain_stream_waiting(folder: Path) -> None:
    """Each mask takes an hour, so a step has time for one. Nobody without a grammar waits for a
    second one, all with a grammar get on by turns, and their tokens are those that each has alone.
    """
    executor = Recording(load(folder, num_blocks=512), tick=True)
    num_plain = LENGTH * len(MANY)
    made = run(
        make_engine(executor),
        [sequence(i, num_plain if i in PLAIN else LENGTH) for i in (*PLAIN, *MANY)],
    )
    begun = next(index for index, step in enumerate(executor.steps) if step.issuperset(PLAIN)) + 1
    before: dict[int, int] = dict.fromkeys(MANY, 0)
    at_once = max(executor.runner._sampler._processors.matchers._num_threads, 1)
    decodes = [step for step in executor.steps[begun:] if not step.isdisjoint(PLAIN)]
    for step in decodes:
        assert step.issuperset(PLAIN), "a plain stream waits for a mask"
        masked = step.intersection(MANY)
        assert len(masked) <= max(at_once, len(MANY) if step is decodes[0] else 0)
        for number in masked:
            before[number] += 1
        waiting = [
            count for number, count in before.items() if number in MANY and count < LENGTH - 1
        ]
        assert not waiting or max(before.values()) - min(waiting) <= 2, (
            "one with a grammar waits for ever"
        )
    alone = make_engine(load(folder, num_blocks=512))
    for number in (PLAIN[0], *MANY[:8]):
        expected = run(alone, [sequence(number, len(made[number]))])
        assert made[number] == expected[number]


def test_a_long_completion_that_moves_here_is_read_bit_by_bit(folder: Path) -> None:
    """What it takes to read 80 tokens is spread over steps, and the tokens are the same."""
    words = replace(sequence(4, 1).sampling, grammar="start: (/[a-z]{1,3}/ /[ ,.]/)+")
    whole = run(make_engine(load(folder, num_blocks=512)), [sequence(4, 90, sampling=words)])[4]
    assert len(whole) == 90
    executor = Recording(load(folder, num_blocks=512), tick=True)
    moved = sequence(4, 10, tokens=(*prompt(9, 4), *whole[:80]), first_index=80, sampling=words)
    made = run(make_engine(executor), [sequence(0, 120), moved])
    assert made[4] == whole[80:]
    first = next(index for index, step in enumerate(executor.steps) if 4 in step)
    assert first >= 79
    assert all(0 in step for step in executor.steps[:first])


def test_choices_under_a_grammar_sit_out_one_by_one(folder: Path) -> None:
    expected = run(make_engine(load(folder, num_blocks=512)), [sequence(4, LENGTH, num_choices=3)])
    executor = Recording(load(folder, num_blocks=512), tick=True)
    assert (
        run(make_engine(executor), [sequence(4, LENGTH, num_choices=3), sequence(0, 30)]).items()
        > expected.items()
    )


def test_cheap_masks_go_before_expensive_ones(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With ten expensive sequences, a cheap one that came last misses no step once each has had its
    first turn.
    """
    now, cheap = 0.0, 99
    matchers = GrammarMatchers(GrammarCache(folder, 512, (EOS_ID,)), 512, clock=lambda: now)
    matchers._num_threads = 1
    compute = matchers._compute

    def timed(constraints: Sequence[grammar_module._Constraint]) -> None:
        nonlocal now
        now += sum(0.001 if known is matchers._constraints[cheap] else 1.0 for known in constraints)
        compute(constraints)

    monkeypatch.setattr(matchers, "_compute", timed)
    tokens = {number: [5, 6] for number in (*range(10), cheap)}
    for step in range(50):
        for each in tokens.values():
            each.append(A)
        wanted = [
            Constrained(sequence_id=number, grammar=AMBIGUOUS["pairs"], tokens=each, num_prompt=2)
            for number, each in tokens.items()
        ]
        ready = matchers.prepare(wanted, 0.5)
        assert cheap in ready or step < 10
        assert len(ready) <= 3
        for number in set(tokens) - set(ready):
            tokens[number].pop()
    lengths = [len(tokens[number]) for number in range(10)]
    assert max(lengths) - min(lengths) <= 2


def test_a_sequence_whose_masks_take_too_long_in_all_is_ended_and_no_other(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the clock of the masks each takes an hour: five hours are too much."""
    monkeypatch.setattr(grammar_module, "_MAX_SEQUENCE_SECONDS", 5 * 3600.0)
    executor = Recording(load(folder, num_blocks=512), tick=True)
    engine = make_engine(executor)
    for spec in (sequence(0, 30), sequence(4, 30)):
        engine.submit(spec)
    events: list[Event] = []
    while engine.has_work:
        events += engine.step()
    (failed,) = (each for each in events if isinstance(each, Failed))
    reason = (
        "grammar: computing the allowed tokens of the sequence has taken more than 18000 seconds"
    )
    assert (failed.id, failed.reason) == (4, reason)
    made = [
        token
        for each in events
        if isinstance(each, NewTokens) and each.id == 0
        for token in each.token_ids
    ]
    assert made == run(make_engine(load(folder, num_blocks=512)), [sequence(0, 30)])[0]
    engine.check_integrity()


def test_a_grammar_that_wears_out_its_lexer_is_not_compiled_in_the_engine(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sequences that wait keep what was compiled for them; the next request compiles it anew."""
    grammars = GrammarCache(folder, 512, (EOS_ID,))
    text = AMBIGUOUS["pairs"]
    held = grammars.load(text)
    grammars.forget(text)
    threads: list[str] = []
    compile_it = grammar_cache._compile

    def noted(*arguments: object) -> grammar_cache.CompiledGrammar:
        threads.append(threading.current_thread().name)
        return compile_it(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(grammar_cache, "_compile", noted)
    assert grammars.find(text) is held
    grammars.matcher(text)
    assert not threads
    assert grammars.load(text) is not held
    assert threads == ["tandem-deep"]


def test_a_compilation_gives_way_to_the_engine() -> None:
    here = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    def own() -> int:
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    assert on_deep_stack(own) == here
    assert on_deep_stack(own, nice=5) == here + 5
    assert own() == here


@pytest.mark.parametrize("kind", AMBIGUOUS)
def test_no_ambiguous_grammar_takes_long_to_compile(folder: Path, kind: str) -> None:
    """llguidance's limits end it. Its processor's time is measured, since other tests may run."""
    grammars = GrammarCache(folder, 512, (EOS_ID,))
    tokenizer = grammars._load_tokenizer()
    began = time.thread_time()
    with suppress(ValueError):
        grammar_cache._compile(tokenizer, AMBIGUOUS[kind])
    assert time.thread_time() - began < 10
