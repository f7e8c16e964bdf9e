"""Whole plans with everything a request can ask for, on a tiny model."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GenerationConfig

from tandem.tests.tiny import make_tiny_model
from tandem.tests.tiny_tokenizer import EOS_ID
from tandem.tests.watermarks import WATERMARK
from tandem.tests.workers.model.helpers import (
    GREEDY,
    Driver,
    check_close,
    check_same,
    load,
    prompt,
    reference,
    reference_logits,
)
from tandem.workers.engine.plan import (
    PENDING_TOKEN,
    SampledLogprobs,
    Samples,
    SamplingParams,
    SequenceStep,
    StepPlan,
)
from tandem.workers.kv_cache.tables import TableBlocks
from tandem.workers.model.runner import ModelRunner
from tandem.workers.model.sampling import logprobs

ALL_KINDS = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.7, top_p=0.9, seed=1, logprobs=3),
    SamplingParams(temperature=1.2, repetition_penalty=1.4, seed=2, prompt_logprobs=2),
    SamplingParams(temperature=0.0, frequency_penalty=1.0, presence_penalty=0.5, logprobs=0),
    SamplingParams(logit_bias=((65, 4.0), (70, -100.0)), typical_p=0.8, seed=3),
    SamplingParams(bad_words=((100,), (200, 201)), stop_ids=(EOS_ID,), min_length=60, seed=4),
    SamplingParams(
        temperature=1.0, grammar="start: /[a-z ]{1,40}/", seed=5, logprobs=5, prompt_logprobs=0
    ),
    SamplingParams(
        temperature=0.0,
        grammar='start: "a" "b"* "c"',
        repetition_penalty=0.8,
        logit_bias=((68, 9.0),),
    ),
    SamplingParams(watermark=WATERMARK, repetition_penalty=1.2, seed=6, logprobs=1),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("llama"))


def chunks(
    driver: Driver,
    sequence_id: int,
    token_ids: Sequence[int],
    sampling: SamplingParams,
    size: int,
    **last: Any,
) -> Iterator[SequenceStep]:
    """A prompt's steps of up to `size` tokens."""
    for start in range(0, len(token_ids), size):
        part, rest = token_ids[start : start + size], token_ids[start + size :]
        wanted = (
            {"next_prompt_token": rest[0] if rest else None}
            if sampling.prompt_logprobs is not None
            else {}
        )
        history = (
            {"history": tuple(token_ids), "num_prompt": len(token_ids)}
            if sampling.needs_history
            else {}
        )
        fields = wanted | (history if start == 0 else {}) | ({"num_samples": 0} if rest else last)
        yield driver.step(sequence_id, part, start, sampling, **fields)


def generate(
    driver: Driver, prompts: Sequence[Sequence[int]], kinds: Sequence[SamplingParams], count: int
) -> list[Any]:
    """Prompts one after the other in chunks of 16, beside the decodes of those before: of each
    sequence its tokens, their logprobs and those of its prompt.
    """
    made: list[tuple[list[int], list[SampledLogprobs], list[SampledLogprobs]]] = [
        ([], [], []) for _ in kinds
    ]
    waiting = [list(chunks(driver, row, prompts[row], kind, 16)) for row, kind in enumerate(kinds)]
    while any(waiting) or any(len(tokens) < count for tokens, _, _ in made):
        first = next((row for row, steps in enumerate(waiting) if steps), None)
        steps = [waiting[first].pop(0)] if first is not None else []
        for row, (tokens, _, _) in enumerate(made):
            if tokens and len(tokens) < count:
                steps.append(driver.step(row, tokens[-1:], len(prompts[row]) + len(tokens) - 1))
        samples = driver.sample(*steps)
        sampled = iter(samples.tokens)
        for step in steps:
            tokens, of_tokens, of_prompt = made[step.sequence_id]
            of_prompt += samples.prompt_logprobs.get(step.sequence_id, [])
            if step.num_samples:
                tokens.append(next(sampled))
                of_tokens += samples.logprobs.get(step.sequence_id, [])
    return made


def check_logprobs(
    ours: Sequence[SampledLogprobs], tokens: Sequence[int], logits: torch.Tensor, num_top: int
) -> None:
    """Against logits [num_tokens, vocab_size] of transformers."""
    expected = logits.log_softmax(-1)
    assert len(ours) == len(tokens) == len(expected)
    for said, token, row in zip(ours, tokens, expected, strict=True):
        assert said.logprob == pytest.approx(row[token].item(), abs=1e-3)
        assert (row > row[token] + 1e-3).sum() < said.rank <= (row > row[token] - 1e-3).sum() + 1
        assert [value for _, value in said.top] == pytest.approx(
            row.topk(num_top).values.tolist(), abs=1e-3
        )
        assert all(value == pytest.approx(row[token].item(), abs=1e-3) for token, value in said.top)


def test_a_batch_of_everything_gives_each_what_it_gets_alone(folder: Path) -> None:
    prompts = [prompt(7 + 9 * row, row) for row in range(len(ALL_KINDS))]
    together = generate(Driver(load(folder, num_blocks=256)), prompts, ALL_KINDS, 24)
    for row, kind in enumerate(ALL_KINDS):
        ((tokens, of_tokens, of_prompt),) = generate(
            Driver(load(folder), seed=row), prompts[row : row + 1], [kind], 24
        )
        assert together[row][0] == tokens
        assert len(of_tokens) == (0 if kind.logprobs is None else 24)
        assert len(of_prompt) == (0 if kind.prompt_logprobs is None else len(prompts[row]) - 1)
        for mine, alone in ((together[row][1], of_tokens), (together[row][2], of_prompt)):
            check_close(mine, alone)
    assert len({tuple(tokens) for tokens, _, _ in together}) == len(ALL_KINDS)


def test_logprobs_are_those_of_transformers(folder: Path) -> None:
    kind = SamplingParams(temperature=1.5, logit_bias=((9, 3.0),), logprobs=7, seed=1)
    ((tokens, ours, _),) = generate(Driver(load(folder)), [prompt(30)], [kind], 12)
    logits = reference_logits(reference(folder), [*prompt(30), *tokens])[29:-1]
    check_logprobs(ours, tokens, logits, 7)


@pytest.mark.parametrize("rows_at_once", [64, 7])
def test_prompt_logprobs_in_any_chunks(
    folder: Path, monkeypatch: pytest.MonkeyPatch, rows_at_once: int
) -> None:
    monkeypatch.setattr(logprobs, "_ROWS_AT_ONCE", rows_at_once)
    ids, kind = prompt(300), SamplingParams(temperature=0.0, prompt_logprobs=4)
    said: dict[int, list[SampledLogprobs]] = {}
    for size in (1, 16, 512):
        driver = Driver(load(folder))
        neighbour = driver.step(7, prompt(40, 7), 0)
        said[size] = []
        for number, step in enumerate(chunks(driver, 1, ids, kind, size)):
            samples = driver.sample(*([neighbour, step] if number == 0 else [step]))
            said[size] += samples.prompt_logprobs.get(1, [])
            assert 7 not in samples.prompt_logprobs
        assert driver.sample(driver.step(1, samples.tokens[-1:], 300)).prompt_logprobs == {}
    check_logprobs(said[512], ids[1:], reference_logits(reference(folder), ids)[:-1], 4)
    for size in (1, 16):
        check_close(said[size], said[512])


def fork(
    driver: Driver, parent: int, child: int, num_tokens: int
) -> tuple[tuple[int, ...], list[tuple[int, int]]]:
    """Gives the child the parent's full blocks and a block of its own for the rest: its table, and
    what is to be copied.
    """
    size = driver.runner.kv.block_size
    table = driver.tables[parent][: num_tokens // size]
    copies = []
    if num_tokens % size:
        table = [*table, driver.free.pop()]
        copies = [(driver.tables[parent][num_tokens // size], table[-1])]
    driver.tables[child] = table
    return tuple(table), copies


@pytest.mark.parametrize("num_tokens", [37, 48])
@pytest.mark.parametrize(
    "kind", [ALL_KINDS[1], ALL_KINDS[2], ALL_KINDS[5], ALL_KINDS[6], ALL_KINDS[8]]
)
def test_choices_of_one_prefill_are_those_of_their_seeds(
    folder: Path, kind: SamplingParams, num_tokens: int
) -> None:
    """One prefill samples three tokens; then there are three sequences over shared blocks and
    copies.
    """
    kind, ids = replace(kind, prompt_logprobs=None), prompt(num_tokens)
    alone = [
        generate(Driver(load(folder)), [ids], [replace(kind, seed=kind.seed + number)], 12)[0]
        for number in range(3)
    ]
    driver = Driver(load(folder))
    samples = driver.sample(*chunks(driver, 5, ids, kind, 512, num_samples=3))
    tokens = [[token] for token in samples.tokens]
    said = [list(of_token) for of_token in zip(samples.logprobs.get(5, []), strict=True)] or [
        [],
        [],
        [],
    ]
    forks = {number: fork(driver, 5, 5 + number, num_tokens) for number in (1, 2)}
    steps, copies = [driver.step(5, tokens[0], num_tokens)], []
    for number, (table, pairs) in forks.items():
        step = driver.step(5 + number, tokens[number], num_tokens)
        history = (
            {"history": (*ids, *tokens[number]), "num_prompt": num_tokens}
            if kind.needs_history
            else {}
        )
        own = replace(kind, seed=kind.seed + number)
        new = table + tuple(block for each in step.new_blocks for block in each.blocks)
        steps.append(
            replace(step, new_blocks=(TableBlocks(new),), sampling=own, **history)  # type: ignore[arg-type]
        )
        copies += pairs
    samples = driver.sample(*steps, copies=tuple(copies))
    while True:
        for number in range(3):
            tokens[number].append(samples.tokens[number])
            said[number] += samples.logprobs.get(5 + number, [])
        if len(tokens[0]) == 12:
            break
        at = num_tokens + len(tokens[0]) - 1
        samples = driver.sample(
            *(driver.step(5 + number, tokens[number][-1:], at) for number in range(3))
        )
    assert tokens == [own for own, _, _ in alone]
    for mine, (_, theirs, _) in zip(said, alone, strict=True):
        check_close(mine, theirs)


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_a_sequence_that_is_made_known_anew_goes_on(folder: Path, kind: SamplingParams) -> None:
    """In other blocks, as a search does when it gives a hypothesis's place to another one."""
    kind, ids = replace(kind, prompt_logprobs=None), prompt(21)
    ((expected, _, _),) = generate(Driver(load(folder)), [ids], [kind], 12)
    driver = Driver(load(folder))
    driver.generate(
        1, prompt(35, 3), 4, SamplingParams(repetition_penalty=3.0, bad_words=((4,),), logprobs=2)
    )
    ((tokens, _, _),) = generate(Driver(driver.runner, seed=2), [ids], [kind], 5)  # as sequence 0
    other = driver.tables.pop(1)
    driver.tables[1] = [driver.free.pop() for _ in range(2)]
    known = (*ids, *tokens)
    source = Driver(driver.runner, seed=2)
    source.step(0, ids, 0)
    table = [source.tables[0], driver.tables[1]]
    step = SequenceStep(
        sequence_id=1,
        token_ids=(tokens[-1],),
        start=25,
        new_blocks=(TableBlocks(tuple(table[1])),),
        sampling=kind,
        num_samples=1,
        history=known,
        num_prompt=21,
    )
    copies = tuple(zip(table[0], table[1], strict=True))
    assert not set(table[0] + other) & set(table[1])
    tokens += driver.sample(step, copies=copies, dropped=(0,)).tokens
    while len(tokens) < 12:
        tokens += driver.run(driver.step(1, tokens[-1:], 20 + len(tokens)))
    assert tokens == expected


@pytest.mark.parametrize("kind", [kind for kind in ALL_KINDS if not kind.grammar])
def test_pending_tokens_count_for_penalties_and_bad_words(
    folder: Path, kind: SamplingParams
) -> None:
    """Each step is launched before the tokens of the last one are collected."""
    kind = replace(kind, prompt_logprobs=None, bad_words=(*kind.bad_words, (300, 301)))
    ((expected, said, _),) = generate(Driver(load(folder)), [prompt(20)], [kind], 10)
    runner = load(folder)
    driver = Driver(runner)

    def launch(*steps: SequenceStep) -> Callable[[], Samples]:
        return runner.launch(StepPlan(sequences=steps, dropped=()))

    collects = [launch(*chunks(driver, 0, prompt(20), kind, 64))]
    collects += [launch(driver.step(0, [PENDING_TOKEN], 20 + index)) for index in range(9)]
    samples = [collect() for collect in collects]
    assert [sample.tokens[0] for sample in samples] == expected
    check_same([one for sample in samples for one in sample.logprobs.get(0, [])], said)


@pytest.mark.parametrize(
    ("kind", "config"),
    [
        (
            SamplingParams(
                temperature=0.0,
                repetition_penalty=1.6,
                bad_words=((510,), (416, 19)),
                logit_bias=((99, 2.5),),
            ),
            {
                "repetition_penalty": 1.6,
                "bad_words_ids": [[510], [416, 19]],
                "sequence_bias": {(99,): 2.5},
            },
        ),
        (
            SamplingParams(
                temperature=0.0, logit_bias=((EOS_ID, 30.0),), stop_ids=(EOS_ID,), min_length=30
            ),
            {"sequence_bias": {(EOS_ID,): 30.0}, "min_new_tokens": 10},
        ),
    ],
)
def test_greedy_tokens_are_those_of_transformers(
    folder: Path, kind: SamplingParams, config: dict[str, Any]
) -> None:
    model, ids = reference(folder), prompt(20)
    settings = GenerationConfig(
        max_new_tokens=16, do_sample=False, eos_token_id=EOS_ID, pad_token_id=0, **config
    )  # type: ignore[no-untyped-call]
    row = torch.tensor([ids])
    out = model.generate(row, attention_mask=torch.ones_like(row), generation_config=settings)  # type: ignore[operator]
    expected = out[0, 20:].tolist()
    assert Driver(load(folder)).generate(1, ids, len(expected), kind) == expected
    assert expected != Driver(load(folder)).generate(1, ids, len(expected), GREEDY)


def test_without_features_nothing_is_kept(folder: Path) -> None:
    runner: ModelRunner = load(folder)
    driver = Driver(runner)
    for number, kind in enumerate(ALL_KINDS):
        driver.generate(number, prompt(12, number), 3, kind)
        driver.drop(number)
    driver.run(driver.step(50, prompt(12), 0, SamplingParams(seed=4)))
    sampler = runner._sampler
    assert sampler._special == set()
    assert list(sampler._params) == [50]
    processors = sampler._processors
    assert (processors._biases, processors._stops, processors._always) == ({}, {}, set())
    assert not processors.matchers._constraints
    for feature in (processors._penalties, processors._bad_words):
        assert not feature._allocated
