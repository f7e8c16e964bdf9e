"""Completions under a grammar: they keep to it, go on after a move, and cannot take the engine
down.
"""

import json
import os
import random
import re
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jsonschema
import numpy as np
import pytest
import torch
from llguidance import LLMatcher, LLParserLimits
from tokenizers import Tokenizer

from tandem.proto import limits
from tandem.proto.llguidance_calls import on_deep_stack
from tandem.tests.ambiguous import AMBIGUOUS
from tandem.tests.bench.engine import grammar
from tandem.tests.schemas import random_schema
from tandem.tests.tiny import make_tiny_model
from tandem.tests.tiny_tokenizer import EOS_ID
from tandem.tests.waits import WAIT
from tandem.tests.workers.model.chains import CHAINS
from tandem.tests.workers.model.helpers import Driver, load, prompt
from tandem.workers.engine.plan import PENDING_TOKEN, SamplingParams, SequenceStep
from tandem.workers.model.sampling import grammar_cache
from tandem.workers.model.sampling.grammar import GrammarMatchers
from tandem.workers.model.sampling.grammar_cache import GrammarCache
from tandem.workers.model.sampling.sampler import Sampler


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def json_grammar(schema: dict[str, object]) -> str:
    return LLMatcher.grammar_from_json_schema(schema, overrides={"whitespace_flexible": False})


def complete(
    driver: Driver, prompts: list[list[int]], kinds: list[SamplingParams], most: int = 800
) -> list[list[int]]:
    """Decodes all at once, each until its end token."""
    made = [
        [token]
        for token in driver.run(
            *(driver.step(i, prompts[i], 0, kind) for i, kind in enumerate(kinds))
        )
    ]
    for _ in range(most):
        alive = [row for row, tokens in enumerate(made) if tokens[-1] != EOS_ID]
        if not alive:
            break
        steps = [
            driver.step(row, made[row][-1:], len(prompts[row]) + len(made[row]) - 1)
            for row in alive
        ]
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
    """Its tokens are replayed, wherever it was broken off; only what the model computes is done
    again.
    """
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
    kinds = [
        SamplingParams(temperature=1.0, seed=row, grammar=text) for row, text in enumerate(texts)
    ]
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


def test_min_length_and_bad_words_do_not_break_a_grammar(
    folder: Path, tokenizer: Tokenizer
) -> None:
    """If they leave no token, the sequence ends if the grammar allows that, and fails otherwise."""
    (b,) = tokenizer.encode("b").ids
    driver = Driver(load(folder))
    short = SamplingParams(
        temperature=0.0, grammar='start: "a"', stop_ids=(EOS_ID,), min_length=100
    )
    assert tokenizer.decode(driver.generate(1, prompt(8), 3, short)) == "a"
    dead = SamplingParams(temperature=0.0, grammar='start: "b"', bad_words=((b,),))
    free = SamplingParams(temperature=0.0, bad_words=((b,),))
    samples = driver.sample(driver.step(2, prompt(8), 0, dead), driver.step(3, prompt(8), 0, free))
    assert samples.failed.keys() == {2}
    assert samples.failed[2].startswith("grammar: bad_words")
    optional = SamplingParams(temperature=0.0, grammar='start: "b"?', bad_words=((b,),))
    assert driver.generate(4, prompt(8), 2, optional) == [EOS_ID, EOS_ID]


@pytest.mark.parametrize(
    "text", ["", "start: (", '{"grammars": []}', "start: nothing", "start: /((/"]
)
def test_a_grammar_that_is_none_is_refused_in_a_line(folder: Path, text: str) -> None:
    runner = load(folder)
    with pytest.raises(ValueError, match=r"^the grammar cannot be compiled: ") as caught:
        runner.load_grammar(text)
    assert re.fullmatch(".{34,260}", str(caught.value))
    runner.load_grammar('start: "fine"')


def test_models_that_cannot_follow_grammars_say_so(folder: Path, tmp_path: Path) -> None:
    for grammars in (
        GrammarCache(None, 512, (1,)),
        GrammarCache(folder, 512, ()),
        GrammarCache(tmp_path, 512, (1,)),
    ):
        with pytest.raises(ValueError, match=r"^this model"):
            grammars.load('start: "a"')
    for content in ("[]", "no json", "{}", '{"model": {"type": "BPE"}}'):
        (tmp_path / "tokenizer.json").write_text(content)
        with pytest.raises(ValueError, match=r"^this model"):
            GrammarCache(tmp_path, 512, (1,)).load('start: "a"')
    with pytest.raises(ValueError, match=r"^this model"):
        GrammarCache(folder, 100, (1,)).load('start: "a"')
    GrammarCache(folder, 9000, (1,)).load(
        'start: "a"'
    )  # a vocabulary padded beyond the tokenizer's


def test_a_sequence_whose_grammar_fails_ends_and_its_neighbour_goes_on(folder: Path) -> None:
    runner = load(folder)
    driver = Driver(runner)
    plain = SamplingParams(temperature=0.0)
    expected = driver.generate(9, prompt(14), 6, plain)
    kinds = {
        1: SamplingParams(temperature=0.0, grammar="start: ("),  # not checked before
        2: SamplingParams(temperature=0.0, grammar='start: "ab"'),
    }
    steps = [driver.step(key, prompt(8), 0, kind) for key, kind in kinds.items()]
    history = (*prompt(8), 5, 6, 7)  # which is no "ab"
    steps[1] = driver.step(3, history, 0, kinds[2], num_prompt=8)
    samples = driver.sample(*steps, driver.step(4, prompt(14), 0, plain))
    assert samples.failed.keys() == {1, 3}
    assert re.fullmatch("grammar: the grammar cannot be compiled: .{1,220}", samples.failed[1])
    assert re.fullmatch("grammar: the completion cannot continue: .{1,220}", samples.failed[3])
    tokens = samples.tokens[2:]
    while len(tokens) < 6:
        samples = driver.sample(driver.step(4, tokens[-1:], 13 + len(tokens)))
        assert samples.failed == {}
        tokens += samples.tokens
    assert tokens == expected


def test_a_limit_reached_midway_is_a_failure_and_no_end(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This one's parse grows with every token; the bias is for another "x"."""
    text = 'start: "ab" deep\ndeep: "x" | deep deep | deep deep deep'
    kind = SamplingParams(temperature=0.0, grammar=text, logit_bias=((89, 100.0),))
    (free,) = complete(Driver(load(folder)), [prompt(8)], [kind], most=30)
    assert free[2:] == [89] * 29
    monkeypatch.setattr(
        grammar_cache, "PARSER_LIMITS", LLParserLimits(step_max_items=20, verbose_errors=False)
    )
    driver = Driver(load(folder))
    grammars = driver.runner._grammars
    held = driver.runner.load_grammar(text)
    limited: list[int] = []
    samples = driver.sample(driver.step(0, prompt(8), 0, kind))
    while not samples.failed:
        limited += samples.tokens
        samples = driver.sample(driver.step(0, limited[-1:], 7 + len(limited)))
    assert 3 < len(limited) < 10
    assert limited == free[: len(limited)]
    assert samples.failed.keys() == {0}
    assert grammars.load(text) is not held  # whose lexer may be full, for good


CHAIN = """
import sys, threading
from pathlib import Path
from tandem.proto import limits
from tandem.tests.workers.model.chains import CHAINS, longest
from tandem.workers.model.sampling.grammar_cache import GrammarCache

threading.stack_size(2**19)  # less than any thread has that steps an engine or computes masks
grammars = GrammarCache(Path(sys.argv[1]), 512, (1,))  # EOS_ID

def use(kind):
    text = longest(CHAINS[kind], limits.MAX_GRAMMAR_CHARACTERS)
    matcher = grammars.load(text).matcher.deep_copy()
    length = 0
    while not matcher.is_stopped() and length < 100:
        mask = matcher.compute_bitmask()
        allowed = (token for token in range(512) if mask[token // 8] >> token % 8 & 1)
        matcher.consume_token(next(allowed))
        length += 1
    matcher.deep_copy().rollback(length)
    del matcher
    grammars.forget(text)
    print(kind, len(text), length, flush=True)

for kind in CHAINS:
    thread = threading.Thread(target=use, args=(kind,))
    thread.start()
    thread.join()
"""


def test_the_longest_chains_overflow_no_stack(folder: Path) -> None:
    command = [sys.executable, "-c", CHAIN, str(folder)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    told = [line.rsplit(maxsplit=2) for line in done.stdout.splitlines()]
    assert [kind for kind, _, _ in told] == list(CHAINS)
    assert all(
        int(size) > 0.99 * limits.MAX_GRAMMAR_CHARACTERS and int(length) >= 1
        for _, size, length in told
    )


LATE_ERROR = """
import sys, time
from pathlib import Path
from tandem.tests.workers.model.chains import CHAINS
from tandem.workers.model.sampling.grammar_cache import GrammarCache

grammars = GrammarCache(Path(sys.argv[1]), 512, (1,))  # EOS_ID
grammars.load('start: "the tokenizer is read now"')
began = time.monotonic()
try:
    grammars.load(CHAINS["terminals"](1500).replace('"b"', "NOTHING"))
except ValueError:
    print(time.monotonic() - began)
"""


def test_an_error_at_the_end_of_a_long_chain_costs_little(folder: Path) -> None:
    """Ten seconds with a backtrace for each link, and the square of that for longer chains."""
    command = [sys.executable, "-c", LATE_ERROR, str(folder)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "RUST_BACKTRACE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment)
    assert float(done.stdout) < 2, done.stderr


def test_later_threads_have_the_stack_that_they_had() -> None:
    before = threading.stack_size()
    assert on_deep_stack(lambda: 3) == 3
    with pytest.raises(ZeroDivisionError):
        on_deep_stack(lambda: 1 // 0)
    assert threading.stack_size() == before


@pytest.mark.parametrize("kind", AMBIGUOUS)
def test_no_ambiguous_grammar_takes_long_for_a_step(folder: Path, kind: str) -> None:
    """Two seconds, with llguidance's own limits. Its processor's time is measured, since other
    tests may run.
    """
    try:
        matcher = GrammarCache(folder, 512, (EOS_ID,)).matcher(AMBIGUOUS[kind])
    except ValueError:
        return  # refused before any step
    chance, longest_step = random.Random(kind), 0.0
    for _ in range(150):
        began = time.thread_time()
        mask = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        good = [
            int(token)
            for token in np.flatnonzero(np.unpackbits(mask, bitorder="little"))
            if token != EOS_ID
        ]
        matcher.consume_token(chance.choice(good or [EOS_ID]))
        longest_step = max(longest_step, time.thread_time() - began)
        if matcher.is_stopped():
            break
    assert longest_step < 0.4  # far from both: what is right takes 0.05


def test_what_people_ask_for_is_within_the_limits(folder: Path) -> None:
    text: dict[str, object] = {"type": "string"}
    deep: dict[str, object] = {"type": "integer"}
    for _ in range(8):
        deep = {
            "type": "object",
            "properties": {"a": deep, "b": {"type": "array", "items": deep}},
            "required": ["a"],
        }
    tools = [
        {
            "properties": {
                "name": {"const": f"tool {n}"},
                "arguments": {"properties": {"x": text}},
            },
            "required": ["name"],
        }
        for n in range(128)
    ]
    pattern = r"^[^@\s]+@[^@\s]+\.[^@\s]{2,}$"
    schemas: list[dict[str, object]] = [
        *(random_schema(seed) for seed in range(200)),
        deep,
        {"type": "array", "items": {"anyOf": tools}},
        {"enum": [f"value {n}" for n in range(1000)]},
        {"type": "object", "properties": {f"p{n}": text for n in range(300)}},
        {"type": "string", "minLength": 500, "maxLength": 100_000},
        {"type": "array", "items": {"type": "string", "pattern": pattern}, "minItems": 20},
        *(text | {"format": name} for name in ("date-time", "email", "uuid", "uri", "ipv6")),
    ]
    texts = [json_grammar(schema) for schema in schemas]
    texts += [
        "start: "
        + " | ".join(
            json.dumps(f"choice {n * 7919 % 1024}") for n in range(limits.MAX_CONSTRAINT_CHOICES)
        )
    ]
    texts += [
        LLMatcher.grammar_from_regex(regex)
        for regex in (r"[\s\S]{0,2000}", r"\w+( \w+){0,50}", r"(.{1,80}\n){20}")
    ]
    grammars = GrammarCache(folder, 512, (EOS_ID,))
    for number, each in enumerate(texts):
        matcher, chance = grammars.matcher(each), random.Random(number)
        for _ in range(150):
            mask = np.frombuffer(matcher.compute_bitmask(), np.uint8)
            good = np.flatnonzero(np.unpackbits(mask, bitorder="little")).tolist()
            assert matcher.consume_token(
                chance.choice([token for token in good if token != EOS_ID] or good)
            )
            assert not matcher.is_error(), (each[:200], matcher.get_error()[:200])
            if matcher.is_stopped():
                break


def test_a_rank_that_does_not_lead_follows_no_grammar(folder: Path) -> None:
    """Rank 0's tokens come with the next plan, and never as pending."""
    grammar = json_grammar(random_schema(7))
    led, leading = load(folder), load(folder)
    led._sampler = Sampler(512, (EOS_ID,), None, torch.device("cpu"))
    kind = SamplingParams(temperature=0.9, seed=3, grammar=grammar, presence_penalty=0.5)
    drivers = [Driver(runner) for runner in (leading, led)]
    made, _ = [driver.run(driver.step(1, prompt(8), 0, kind)) for driver in drivers]
    for _ in range(20):
        samples = [driver.sample(driver.step(1, made[-1:], 7 + len(made))) for driver in drivers]
        assert samples[1].failed == {}
        made += samples[0].tokens
    assert led._grammars._tokenizer is None
    for driver in drivers:
        with pytest.raises(KeyError):
            driver.run(driver.step(1, [PENDING_TOKEN], 8 + len(made)))


def test_checks_from_many_threads_while_grammars_are_in_use(folder: Path) -> None:
    grammars = GrammarCache(folder, 512, (EOS_ID,))
    barrier = threading.Barrier(8)

    def work(number: int) -> list[bytes]:
        barrier.wait(WAIT)
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
    assert len(grammars._recent) == len(grammars._compiled) == 20


def test_the_last_used_stay_compiled_and_those_that_somebody_holds(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    grammars = GrammarCache(folder, 512, (EOS_ID,))
    texts = [f'start: "{number}"' for number in range(40)]
    held = grammars.load(texts[1])
    for text in texts:
        grammars.load(text)
        grammars.load(texts[0])
    assert {text for _, text in grammars._compiled} == {*texts[:2], *texts[9:]}
    monkeypatch.setattr(grammar_cache, "_compile", lambda *_: pytest.fail("compiled again"))
    matchers = GrammarMatchers(grammars, 512)
    for number in (39, 0, 1):
        matchers.admit(number, texts[number], (5, 6, 7), 2)
        assert number in matchers
    del held
    kept = {text for _, text in grammars._compiled}
    assert kept == {*texts[:2], *texts[10:]}, "the 32 last used are others now"


@pytest.mark.parametrize("num_threads", [1, 2])
def test_masks_computed_in_threads_are_the_same(folder: Path, num_threads: int) -> None:
    grammars = GrammarCache(folder, 512, (EOS_ID,))
    matchers = GrammarMatchers(grammars, 512)
    matchers._num_threads = num_threads
    texts = [json_grammar(random_schema(seed)) for seed in range(12)]
    steps = []
    expected = {}
    for number, text in enumerate(texts):
        matcher = grammars.matcher(text)
        first = np.flatnonzero(
            np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
        )[0]
        matcher.consume_token(int(first))
        expected[number] = torch.frombuffer(
            bytearray(matcher.compute_bitmask()), dtype=torch.int32
        )[:16]
        matchers.admit(number, text, (5, 6, int(first)), 2)
        steps.append(
            SequenceStep(
                sequence_id=number,
                token_ids=(int(first),),
                start=2,
                new_blocks=(),
                sampling=None,
                num_samples=1,
            )
        )
    random.Random(0).shuffle(steps)
    masks = matchers.masks(steps)
    for step, mask in zip(steps, masks, strict=True):
        assert torch.equal(mask, expected[step.sequence_id])


def test_the_benchmark_runs(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--batch", "2", "--steps", "3", "--dtype", "float32", "--model"]
    assert grammar.main([*arguments, str(folder)]) == 0
    assert re.search(r"ratio +[0-9.]+\n", capsys.readouterr().out)
    assert grammar.main([*arguments, str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith("bench_grammar: ")
