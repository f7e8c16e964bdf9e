"""A token's logits are the same bits however the tokens before it were computed, and whatever is
computed beside it: so a sequence that is replayed on another worker continues as it would have.
"""

import functools
import itertools
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from tandem.tests.tiny import DENSE, make_tiny_model
from tandem.tests.workers.model.engine_runs import (
    DRAFTS,
    PROMPT,
    Answer,
    RecordedEngine,
    few_tokens,
    move,
    resumed_turns,
    rows_that_differ,
    run_turn,
)
from tandem.tests.workers.model.engine_runs import (
    NUM_TOKENS as ANSWER_TOKENS,
)
from tandem.tests.workers.model.helpers import Driver, load, prompt, recorded_logits
from tandem.workers.model.kernels.c import cpu
from tandem.workers.model.loader import open_checkpoint
from tandem.workers.model.runner import ModelRunner

NUM_TOKENS = 150  # more than two tiles of keys

pytestmark = pytest.mark.skipif(
    not cpu.can_multiply(torch.zeros(32, 32, dtype=torch.bfloat16)),
    reason="no product of our own with AMX",
)


def cut(num_tokens: int, sizes: random.Random) -> list[int]:
    """Cuts a sequence into chunks and single tokens; returns where they end."""
    ends = [0]
    while ends[-1] < num_tokens:
        ends.append(min(ends[-1] + sizes.choice((1, 1, 1, 2, 5, 16, 33, 64, 65)), num_tokens))
    return ends


def logits_by_position(
    runner: ModelRunner, ends: list[int], num_mates: int, monkeypatch: pytest.MonkeyPatch
) -> dict[int, torch.Tensor]:
    """Computes one sequence in the chunks that `ends` tells, each beside steps of other sequences,
    before or after it; returns the logits [vocab_size] after each chunk, by position.
    """
    driver, tokens, found = Driver(runner), prompt(NUM_TOKENS), {}
    mates = [prompt(200, 1 + mate) for mate in range(num_mates)]
    with recorded_logits(monkeypatch) as logits:
        for index, (start, end) in enumerate(itertools.pairwise(ends)):
            steps = [
                driver.step(1 + mate, each[at : at + size], at)
                for mate, each in enumerate(mates)
                for size in (1 if mate % 2 else 3,)
                for at in (index * size,)
                if at + size <= len(each)
            ]
            steps.insert(index % (len(steps) + 1), driver.step(0, tokens[start:end], start))
            driver.run(*steps)
            found[end] = logits[-1][[step.sequence_id for step in steps].index(0)].clone()
    driver.run(dropped=[0, *range(1, 1 + num_mates)])
    return found


@pytest.mark.parametrize("family", [*DENSE, "gemma3", "qwen3_moe"])
@pytest.mark.parametrize(("num_mates", "head_dim"), [(0, 32), (3, 32), (20, 32), (3, 44)])
def test_logits_depend_on_the_tokens_alone(
    family: str, num_mates: int, head_dim: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: dict[str, Any] = {"hidden_size": 256} | (
        {} if family == "qwen2" else {"head_dim": head_dim}
    )
    if family == "mistral":
        sizes["sliding_window"] = 70
    runner = load(make_tiny_model(tmp_path, family, **sizes), dtype="bfloat16")
    decoded = logits_by_position(runner, list(range(NUM_TOKENS + 1)), 0, monkeypatch)
    for seed in range(4):
        mixed = logits_by_position(
            runner, cut(NUM_TOKENS, random.Random(seed)), num_mates, monkeypatch
        )
        for end, logits in mixed.items():
            assert torch.equal(logits, decoded[end]), (seed, end)


def test_another_order_of_accumulation_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The negative control: attention by plain torch, which adds in another order for chunks."""
    runner = load(make_tiny_model(tmp_path, hidden_size=256, head_dim=32), dtype="bfloat16")
    decoded = logits_by_position(runner, list(range(NUM_TOKENS + 1)), 0, monkeypatch)
    monkeypatch.setattr(cpu, "can_attend", lambda *_: False)
    plain = load(tmp_path, dtype="bfloat16")
    whole = logits_by_position(plain, [0, NUM_TOKENS], 0, monkeypatch)
    assert not torch.equal(whole[NUM_TOKENS], decoded[NUM_TOKENS])
    assert torch.allclose(whole[NUM_TOKENS].float(), decoded[NUM_TOKENS].float(), atol=0.5)


# Prompts of Gemma 3 that are longer than four windows of 24 tokens, in blocks of 8 and 4 tokens,
# and of Qwen3.5, in blocks of 8.
# Few tokens are sampled, so that n-grams repeat and drafts are accepted.
SAMPLING = few_tokens(*range(3, 9))
TURNS = (
    "end of the prompt",
    "replay after a loss",
    "regular",
    "divergence",
    "newest of the answer",
)


@pytest.fixture(scope="module", params=["gemma3", "qwen3_5"])
def sparse_folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with windows, and one with states."""
    folder = tmp_path_factory.mktemp(request.param)
    return make_tiny_model(folder, request.param, hidden_size=256, head_dim=32)


@pytest.fixture(scope="module")
def sparse(sparse_folder: Path) -> ModelRunner:
    return load_sparse(sparse_folder)


def load_sparse(folder: Path) -> ModelRunner:
    """Loads a model whose resume points are multiples of 8 tokens."""
    has_states = any(layer.states for layer in open_checkpoint(folder).config.layers)
    block_size = 8 if has_states else 4
    runner = load(folder, dtype="bfloat16", block_size=block_size, num_blocks=400, num_states=64)
    tables = [(None, 8)] if has_states else [(None, 8), (24, 4)]
    assert [(each.window, each.block_size) for each in runner.kv.tables] == tables
    return runner


@functools.cache
def alone(runner: ModelRunner, tokens: tuple[int, ...]) -> Answer:
    """The answer to a prompt that is computed in one chunk without a cache, once."""
    engine = RecordedEngine(runner, chunk_tokens=256, prefix_caching=False)
    return engine.ask(1, tokens, ANSWER_TOKENS, sampling=SAMPLING)


@pytest.mark.parametrize("name", TURNS)
@pytest.mark.parametrize("overlap", [False, True])
def test_a_resume_point_gives_the_logits_of_the_whole_prompt(
    sparse: ModelRunner, name: str, overlap: bool
) -> None:
    answer = alone(sparse, PROMPT).tokens
    turn = resumed_turns(answer, alignment=8, spacing=48)[name]
    expected = alone(sparse, turn.last)
    for num_mates, drafts in ((0, None), (3, None), (3, DRAFTS)):
        engine = RecordedEngine(sparse, overlap=overlap, speculative=drafts)
        found = run_turn(engine, turn, num_mates, sampling=SAMPLING)
        assert (found.num_cached, found.tokens) == (turn.num_cached, expected.tokens)
        assert rows_that_differ(found, expected) == []
        if drafts:
            requests = engine.engine.requests
            assert 0 < requests.num_accepted_tokens < requests.num_draft_tokens


@pytest.mark.parametrize("drafts", [None, DRAFTS])
@pytest.mark.parametrize("overlap", [False, True])
def test_a_suspended_sequence_continues_with_the_same_logits(
    sparse_folder: Path, sparse: ModelRunner, overlap: bool, drafts: object
) -> None:
    """From one worker to another and back, where its prompt is cached."""
    expected = alone(sparse, PROMPT)
    runners = sparse, load_sparse(sparse_folder)
    engines = [
        RecordedEngine(runner, overlap=overlap, speculative=drafts, chunk_tokens=chunk_tokens)
        for runner, chunk_tokens in zip(runners, (64, 40), strict=True)
    ]
    source, target = engines
    source.submit(1, PROMPT, ANSWER_TOKENS, sampling=SAMPLING)
    for number in (2, 3):
        source.submit(number, prompt(50, number), 90, sampling=SAMPLING)
        target.submit(number, prompt(60, number), 90, sampling=SAMPLING)
    tokens: list[int] = []
    for _ in range(2):
        num_known = len(tokens)
        while len(source.answers[1].tokens) < 8:
            source.step()
            target.step()
        assert source.engine.suspend(1)
        while 1 not in source.suspended:
            source.step()
        tokens += source.answers[1].tokens
        assert len(tokens) - num_known < 20
        move(source, target, 1, ANSWER_TOKENS - len(tokens))
        source, target = target, source
    tokens += source.run()[1].tokens
    assert source.answers[1].num_cached >= 104, "the first worker still has the prompt's blocks"
    assert tokens == expected.tokens
    for engine in engines:
        assert rows_that_differ(engine.run()[1], expected) == []
