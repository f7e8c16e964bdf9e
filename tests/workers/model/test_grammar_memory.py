"""The memory of compiled grammars is bounded, shared fairly and never shared across owners, and
changes no token.
"""

import gc
from contextlib import suppress
from pathlib import Path
from queue import Full

import pytest

from tandem.tests.tiny import make_tiny_model
from tandem.tests.tiny_tokenizer import EOS_ID
from tandem.tests.workers.model.helpers import load, prompt
from tandem.workers.engine.config import Budgets, EngineConfig
from tandem.workers.engine.engine import Engine
from tandem.workers.engine.events import Event, Failed, NewTokens
from tandem.workers.engine.plan import SamplingParams
from tandem.workers.engine.sequence import SequenceSpec, Task
from tandem.workers.model.runner import ModelRunner
from tandem.workers.model.sampling import grammar_cache
from tandem.workers.model.sampling.grammar_cache import GrammarCache

SMALL = 'start: "a"'
SMALL_BYTES = grammar_cache._BASE_BYTES + grammar_cache._CHARACTER_BYTES * len(SMALL)
GROWING = [f"start: A+\nA: /[a-z ,.]*[aeiou][a-z ,.]{{{window}}}[0-9]/" for window in range(6, 12)]
"""Their lexers get new states with almost every token."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("llama"))


@pytest.fixture
def grammars(folder: Path) -> GrammarCache:
    return GrammarCache(folder, 512, (EOS_ID,))


def test_a_tenant_gets_half_of_what_the_others_leave(
    grammars: GrammarCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_cache, "_MAX_COMPILED_BYTES", 16 * SMALL_BYTES)
    texts = [f'start: "{letter}"' for letter in "abcdefghijklmnop"]
    held = {b"ada": [grammars.load(text, b"ada", b"ada") for text in texts[:8]]}
    with pytest.raises(Full, match="the memory for grammars is in use"):
        grammars.load(texts[8], b"ada", b"ada")
    for tenant, share in ((b"bob", 4), (b"eve", 2)):
        held[tenant] = [grammars.load(text, tenant, tenant) for text in texts[:share]]
        with pytest.raises(Full):
            grammars.load(texts[8], tenant, tenant)
    assert grammars.load(texts[0], b"ada", b"ada") is held[b"ada"][0], (
        "what is compiled takes no more"
    )
    held[b"ada"].clear()
    grammars.load(texts[8], b"eve", b"eve")


def test_unused_grammars_give_way(grammars: GrammarCache, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_cache, "_MAX_COMPILED_BYTES", 8 * SMALL_BYTES)
    for letter in "abcdefghijklmnop":
        grammars.load(f'start: "{letter}"', b"ada", b"ada")
    assert len(grammars._compiled) == 4


def test_a_grammar_over_the_bound_is_refused_before_it_is_compiled(
    grammars: GrammarCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_cache, "_MAX_COMPILED_BYTES", 4 * SMALL_BYTES)
    held = [grammars.load(SMALL), grammars.load('start: "b"')]
    monkeypatch.setattr(grammar_cache, "_compile", lambda *_: pytest.fail("was compiled"))
    with pytest.raises(Full):
        grammars.load('start: "c"')
    assert set(grammars._held) == set(held)


def test_a_grammar_that_cannot_be_compiled_leaves_no_reservation(grammars: GrammarCache) -> None:
    with suppress(ValueError):
        grammars.load("start: (")
    gc.collect()
    assert not grammars._held


def test_owners_share_nothing(grammars: GrammarCache) -> None:
    ada, bob = (grammars.load(SMALL, owner, owner) for owner in (b"ada", b"bob"))
    assert ada is not bob
    assert grammars.find(SMALL, b"ada") is ada
    grammars.forget(SMALL, b"ada")
    assert ada.is_exhausted
    assert not bob.is_exhausted


def test_a_tokenizer_that_cannot_be_read_is_no_fault_of_the_grammar(
    grammars: GrammarCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreadable(path: Path) -> bytes:
        raise PermissionError(path)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_bytes", unreadable)
        with pytest.raises(OSError, match=r"^tokenizer.json cannot be read$"):
            grammars.load(SMALL)
    grammars.load(SMALL)


def run(runner: ModelRunner) -> dict[int, list[int]]:
    """Returns the tokens of a sequence under each grammar; two sequences share one."""
    texts = [*GROWING, GROWING[0]]
    engine = Engine(runner, EngineConfig(num_blocks=512, budgets=Budgets(max_sequences=len(texts))))
    held = [runner.load_grammar(text) for text in texts]
    for number, text in enumerate(texts):
        sampling = SamplingParams(
            temperature=0.9, seed=number, grammar=text, logit_bias=((EOS_ID, -100.0),)
        )
        spec = SequenceSpec(
            id=number,
            tokens=tuple(prompt(9, number)),
            max_tokens=60,
            sampling=sampling,
            task=Task.COLOCATED,
        )
        engine.submit(spec)
    made: dict[int, list[int]] = {number: [] for number in range(len(texts))}
    events: list[Event] = []
    while engine.has_work:
        events += engine.step()
    for event in events:
        assert not isinstance(event, Failed), event
        if isinstance(event, NewTokens):
            made[event.id] += event.token_ids
    engine.check_integrity()
    del held
    return made


def test_states_beyond_the_bound_are_given_up_and_no_token_changes(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = run(load(folder, num_blocks=512))
    most = 40 * grammar_cache._MASK_BYTES
    monkeypatch.setattr(grammar_cache, "_MAX_STATE_BYTES", most)
    monkeypatch.setattr(grammar_cache, "_LEAST_RENEWED_BYTES", grammar_cache._MASK_BYTES)
    runner = load(folder, num_blocks=512)
    renewed: list[str] = []
    compile_it = grammar_cache._compile

    def noted(tokenizer: object, text: str) -> grammar_cache.CompiledGrammar:
        renewed.append(text)
        return compile_it(tokenizer, text)  # type: ignore[arg-type]

    monkeypatch.setattr(grammar_cache, "_compile", noted)
    assert run(runner) == expected
    assert len(renewed) > 2 * len(GROWING), "each was compiled, and several were compiled again"
    assert set(renewed) == set(GROWING)


def test_cached_grammars_have_few_states(
    grammars: GrammarCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_cache, "_MAX_RECENT_STATE_BYTES", 10_000)
    for letter in "abcdef":
        grammars.load(f'start: "{letter}"').state_bytes = 4_000.0
    assert len(grammars._recent) == 3
