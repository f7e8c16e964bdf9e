"""Completions under a grammar: they keep to it, go on after a move, and cannot take the engine down."""

import json
import random
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jsonschema
import pytest
import torch
from llguidance import LLMatcher, LLParserLimits
from tokenizers import Tokenizer

from tandem.tests.schemas import random_schema
from tandem.tests.tiny import EOS_ID, make_tiny_model
from tandem.tests.workers.model.helpers import Driver, load, prompt
from tandem.workers import bench_grammar
from tandem.workers.engine.plan import SamplingParams, SequenceStep
from tandem.workers.model import grammar as grammar_module
from tandem.workers.model.grammar import Grammars, Matchers


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def json_grammar(schema: dict[str, object]) -> str:
    return LLMatcher.grammar_from_json_schema(schema, overrides={"whitespace_flexible": False})


def complete(driver: Driver, prompts: list[list[int]], kinds: list[SamplingParams], most: int = 800) -> list[list[int]]:
    """Decodes all at once, each until its end token."""
    made = [[token] for token in driver.run(*(driver.step(i, prompts[i], 0, kind) for i, kind in enumerate(kinds)))]
    for _ in range(most):
        alive = [row for row, tokens in enumerate(made) if tokens[-1] != EOS_ID]
        if not alive:
            break
        steps = [driver.step(row, made[row][-1:], len(prompts[row]) + len(made[row]) - 1) for row in alive]
        for row, token in zip(alive, driver.run(*steps), strict=True):
            made[row].append(token)
    return made


def test_documents_of_random_schemas_validate(folder: Path, tokenizer: Tokenizer) -> None:
    schemas = [random_schema(seed) for seed in range(30)]
    kinds = [
        SamplingParams(temperature=row % 3 * 0.6, seed=row, grammar=json_grammar(schema))
        for row, schema in enumerate(schemas)
    ]
    prompts = [prompt(5 + row, row) for row in range(30)]
    made = complete(Driver(load(folder, num_blocks=2000)), prompts, kinds)
    documents = set()
    for schema, tokens in zip(schemas, made, strict=True):
        assert tokens[-1] == EOS_ID
        text = tokenizer.decode(tokens[:-1])
        jsonschema.validate(json.loads(text), schema)
        documents.add(text)
    assert len(documents) > 20


def test_a_completion_goes_on_elsewhere_as_if_unbroken(folder: Path) -> None:
    """Its tokens are replayed, wherever it was broken off; only what the model computes is done again."""
    kind = SamplingParams(temperature=0.9, seed=3, grammar=json_grammar(random_schema(7)))
    ids = prompt(12)
    (whole,) = complete(Driver(load(folder)), [ids], [kind])
    runner = load(folder)
    for cut in range(1, len(whole) - 1, 5):
        driver = Driver(runner, seed=cut)
        known = [*ids, *whole[:cut]]
        tokens = driver.run(driver.step(1, known, 0, kind, num_prompt=len(ids)))
        while tokens[-1] != EOS_ID:
            tokens += driver.run(driver.step(1, tokens[-1:], len(known) + len(tokens) - 1))
        assert whole[:cut] + tokens == whole
        driver.drop(1)


def test_a_regular_expression_and_a_lark_grammar(folder: Path, tokenizer: Tokenizer) -> None:
    texts = [
        LLMatcher.grammar_from_regex("(ja|nein), [0-9]{3}"),
        'start: "x" ("y" | "z"){2,5} /[0-4]/',
        "start: /.{3}é/",
    ]
    kinds = [SamplingParams(temperature=1.0, seed=row, grammar=text) for row, text in enumerate(texts)]
    made = complete(Driver(load(folder)), [prompt(9)] * 3, kinds, most=60)
    first, second, third = (tokenizer.decode(tokens[:-1]) for tokens in made)
    assert re.fullmatch("(ja|nein), [0-9]{3}", first)
    assert re.fullmatch("x[yz]{2,5}[0-4]", second)
    assert re.fullmatch(".{3}é", third)


def test_after_the_end_nothing_but_the_end(folder: Path) -> None:
    driver = Driver(load(folder))
    kind = SamplingParams(temperature=0.0, grammar='start: "ab"', logit_bias=((70, 100.0),))
    tokens = driver.generate(1, prompt(8), 8, kind)
    assert tokens[tokens.index(EOS_ID) :] == [EOS_ID] * (8 - tokens.index(EOS_ID))
    assert tokens.index(EOS_ID) <= 2


def test_min_length_and_bad_words_do_not_break_a_grammar(folder: Path, tokenizer: Tokenizer) -> None:
    """What they leave nothing of ends."""
    (b,) = tokenizer.encode("b").ids
    driver = Driver(load(folder))
    short = SamplingParams(temperature=0.0, grammar='start: "a"', stop_ids=(EOS_ID,), min_length=100)
    assert tokenizer.decode(driver.generate(1, prompt(8), 3, short)) == "a"
    dead = SamplingParams(temperature=0.0, grammar='start: "b"', bad_words=((b,),))
    assert driver.generate(2, prompt(8), 2, dead) == [EOS_ID, EOS_ID]


@pytest.mark.parametrize("text", ["", "start: (", '{"grammars": []}', "start: nothing", "start: /((/"])
def test_a_grammar_that_is_none_is_refused_in_a_line(folder: Path, text: str) -> None:
    runner = load(folder)
    with pytest.raises(ValueError, match=r"^the grammar cannot be followed: ") as caught:
        runner.check_grammar(text)
    assert re.fullmatch(".{34,260}", str(caught.value))
    runner.check_grammar('start: "fine"')


def test_models_that_cannot_follow_grammars_say_so(folder: Path, tmp_path: Path) -> None:
    for grammars in (Grammars(None, 512, (1,)), Grammars(folder, 512, ()), Grammars(tmp_path, 512, (1,))):
        with pytest.raises(ValueError, match=r"^this model"):
            grammars.check('start: "a"')
    for content in ("[]", "no json", "{}", '{"model": {"type": "BPE"}}'):
        (tmp_path / "tokenizer.json").write_text(content)
        with pytest.raises(ValueError, match=r"^this model"):
            Grammars(tmp_path, 512, (1,)).check('start: "a"')
    with pytest.raises(ValueError, match=r"^this model"):
        Grammars(folder, 100, (1,)).check('start: "a"')
    Grammars(folder, 9000, (1,)).check('start: "a"')  # a vocabulary padded beyond the tokenizer's


def test_a_sequence_whose_grammar_fails_ends_and_its_neighbour_goes_on(folder: Path) -> None:
    runner = load(folder)
    driver = Driver(runner)
    plain = SamplingParams(temperature=0.0)
    expected = driver.generate(9, prompt(14), 6, plain)
    kinds = {
        1: SamplingParams(temperature=0.0, grammar="start: ("),  # nobody has checked it
        2: SamplingParams(temperature=0.0, grammar='start: "ab"'),
    }
    steps = [driver.step(key, prompt(8), 0, kind) for key, kind in kinds.items()]
    history = (*prompt(8), 5, 6, 7)  # which is no "ab"
    steps[1] = driver.step(3, history, 0, kinds[2], num_prompt=8)
    first, second, third = driver.run(*steps, driver.step(4, prompt(14), 0, plain))
    assert (first, second) == (EOS_ID, EOS_ID)
    tokens = [third]
    while len(tokens) < 6:
        drawn = driver.run(driver.step(4, tokens[-1:], 13 + len(tokens)), driver.step(1, [EOS_ID], 7 + len(tokens)))
        tokens.append(drawn[0])
        assert drawn[1] == EOS_ID
    assert tokens == expected


def test_a_limit_reached_midway_ends_the_sequence(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This one's parse grows with every token; the bias is for another "x"."""
    text = 'start: "ab" deep\ndeep: "x" | deep deep | deep deep deep'
    kind = SamplingParams(temperature=0.0, grammar=text, logit_bias=((89, 100.0),))
    (free,) = complete(Driver(load(folder)), [prompt(8)], [kind], most=30)
    assert free[2:] == [89] * 29
    monkeypatch.setattr(grammar_module, "_LIMITS", LLParserLimits(step_max_items=20, verbose_errors=False))
    runner = load(folder)
    runner.check_grammar(text)
    (limited,) = complete(Driver(runner), [prompt(8)], [kind], most=30)
    assert 4 < len(limited) < 10
    assert limited == [*free[: len(limited) - 1], EOS_ID]


def test_checks_from_many_threads_while_grammars_are_in_use(folder: Path) -> None:
    grammars = Grammars(folder, 512, (EOS_ID,))
    barrier = threading.Barrier(8)

    def work(number: int) -> list[bytes]:
        barrier.wait(30)
        masks = []
        for turn in range(40):
            matcher = grammars.matcher(f'start: "{"ab" * (turn % 20 + 1)}"')
            matcher.consume_tokens([67] * (number % 2))
            masks.append(matcher.compute_bitmask())
        return masks

    with ThreadPoolExecutor(8) as pool:
        masks = list(pool.map(work, range(8)))
    assert masks[0] == masks[2] == masks[4] == masks[6]
    assert masks[1] == masks[3] == masks[5] == masks[7]
    assert len(grammars._compiled) == 20


def test_the_cache_keeps_the_last_used(folder: Path) -> None:
    grammars = Grammars(folder, 512, (EOS_ID,))
    texts = [f'start: "{number}"' for number in range(40)]
    for text in texts:
        grammars.check(text)
        grammars.check(texts[0])
    assert set(grammars._compiled) == {texts[0], *texts[9:]}


@pytest.mark.parametrize("num_threads", [1, 2])
def test_masks_computed_in_threads_are_the_same(folder: Path, num_threads: int) -> None:
    grammars = Grammars(folder, 512, (EOS_ID,))
    matchers = Matchers(grammars, 512)
    matchers._num_threads = num_threads
    texts = [json_grammar(random_schema(seed)) for seed in range(12)]
    steps = []
    for number, text in enumerate(texts):
        matchers.admit(number, text, (5, 6), 2)
        steps.append(
            SequenceStep(sequence_id=number, token_ids=(6,), start=1, new_blocks=(), sampling=None, num_samples=1)
        )
    random.Random(0).shuffle(steps)
    masks = matchers.masks(steps)
    for step, mask in zip(steps, masks, strict=True):
        expected = bytearray(grammars.matcher(texts[step.sequence_id]).compute_bitmask())
        assert torch.equal(mask, torch.frombuffer(expected, dtype=torch.int32)[:16])


def test_the_benchmark_runs(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--batch", "2", "--steps", "3", "--dtype", "float32", "--model"]
    assert bench_grammar.main([*arguments, str(folder)]) == 0
    assert re.search(r"ratio +[0-9.]+\n", capsys.readouterr().out)
    assert bench_grammar.main([*arguments, str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith("bench_grammar: ")
