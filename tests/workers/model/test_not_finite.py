"""Logits that are NaN or infinite fail the sequence that they are of, and no other, before its
blocks are published.
"""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from tandem.tests.tiny import make_tiny_model
from tandem.tests.workers.model.helpers import GREEDY, Driver, load, prompt
from tandem.workers.engine.block_pool import BlockState
from tandem.workers.engine.config import Budgets, EngineConfig
from tandem.workers.engine.engine import Engine
from tandem.workers.engine.events import Event, Failed, NewTokens
from tandem.workers.engine.plan import NOT_FINITE, Samples, SamplingParams
from tandem.workers.engine.sequence import SequenceSpec, Task
from tandem.workers.model.kernels.c import cpu
from tandem.workers.model.runner import ModelRunner
from tandem.workers.model.sampling.gumbel import sample

POISON = 307  # the token whose embedding is not finite; the tests' models generate it nowhere
VALUES = (float("nan"), -float("nan"), float("inf"))
KINDS = (
    GREEDY,
    SamplingParams(seed=1),
    SamplingParams(top_p=0.9, seed=2),
    SamplingParams(top_k=5, min_p=0.1, typical_p=0.9, seed=3),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("llama"))


@pytest.fixture
def poisoned(folder: Path) -> ModelRunner:
    runner = load(folder)
    runner._model.embed_tokens.weight.data[POISON] = float("nan")  # type: ignore[attr-defined]
    return runner


@pytest.mark.parametrize("with_kernels", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("params", KINDS)
def test_a_row_that_is_not_finite_has_no_token_and_no_neighbour_notices(
    monkeypatch: pytest.MonkeyPatch, params: SamplingParams, dtype: torch.dtype, with_kernels: bool
) -> None:
    if not with_kernels:
        monkeypatch.setattr(cpu, "usable", lambda tensor: False)
    logits = torch.randn(12, 5000, generator=torch.Generator().manual_seed(0)).to(dtype)
    expected = sample(logits, [params] * 12, range(12)).tolist()
    logits[1] = float("nan")
    logits[3] = -float("inf")
    for row, (value, at) in enumerate(
        [(value, at) for value in VALUES for at in (0, 4999)], start=5
    ):
        logits[row, at] = value
    bad = {1, 3, *range(5, 11)}
    assert sample(logits, [params] * 12, range(12)).tolist() == [
        -1 if row in bad else token for row, token in enumerate(expected)
    ]


def test_a_masked_token_is_no_failure() -> None:
    logits = torch.zeros(1, 100)
    logits[0, 1:] = -float("inf")
    assert sample(logits, [GREEDY], [0]).tolist() == [0]


@pytest.mark.parametrize(
    "params",
    [
        *KINDS,
        SamplingParams(logprobs=3, prompt_logprobs=2),
        SamplingParams(presence_penalty=1.0, logit_bias=((7, 1.0),)),
    ],
)
def test_a_step_names_the_sequences_that_failed(
    poisoned: ModelRunner, folder: Path, params: SamplingParams
) -> None:
    """In chunks with and without a sample, and of one token; the others have the tokens of a sound
    model.
    """

    def run(runner: ModelRunner) -> list[Samples]:
        driver, good, bad = Driver(runner), prompt(40, 1), [*prompt(20, 2), POISON, *prompt(19, 3)]
        first = driver.sample(
            driver.step(1, good, 0, params),
            driver.step(2, bad[:30], 0, params, num_samples=0, history=tuple(bad), num_prompt=40),
            driver.step(3, bad, 0, params, num_samples=3),
            driver.step(4, good[:20], 0, params, num_samples=0, history=tuple(good), num_prompt=40),
        )
        then = driver.sample(driver.step(1, first.tokens[:1], 40), driver.step(4, [POISON], 20))
        return [first, then]

    found, sound = run(poisoned), run(load(folder))
    assert [samples.failed for samples in sound] == [{}, {}]
    assert [samples.failed for samples in found] == [
        {2: NOT_FINITE, 3: NOT_FINITE},
        {4: NOT_FINITE},
    ]
    assert [samples.tokens[0] for samples in found] == [samples.tokens[0] for samples in sound]


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("at", [5, 40, 79, 80])
def test_an_engine_fails_the_sequence_alone_and_publishes_none_of_its_blocks(
    poisoned: ModelRunner, folder: Path, at: int, overlap: bool
) -> None:
    def run(
        runner: ModelRunner, prompts: Sequence[Sequence[int]]
    ) -> tuple[dict[int, list[int]], list[Failed], int]:
        budgets = Budgets(chunk_tokens=32, mixed_chunk_tokens=32)
        engine = Engine(
            runner,
            EngineConfig(num_blocks=128, tables=runner.kv.tables, overlap=overlap, budgets=budgets),
        )
        for number, tokens in enumerate(prompts):
            spec = SequenceSpec(
                id=number, tokens=tuple(tokens), max_tokens=8, task=Task.COLOCATED, sampling=GREEDY
            )
            engine.submit(spec)
        events: list[Event] = []
        while engine.has_work:
            events += engine.step()
        engine.check_integrity()
        made: dict[int, list[int]] = {}
        for event in events:
            if isinstance(event, NewTokens):
                made.setdefault(event.id, []).extend(event.token_ids)
        assert engine.blocks()[BlockState.OWNED] == 0
        return (
            made,
            [event for event in events if isinstance(event, Failed)],
            engine.blocks()[BlockState.CACHED],
        )

    sound = [prompt(50, 1), prompt(33, 2)]
    bad = [*prompt(at, 3), POISON, *prompt(80 - at, 4)]
    expected, _, num_cached = run(load(folder), sound)
    made, failed, cached = run(poisoned, [*sound, bad])
    assert (made, failed) == (expected, [Failed(id=2, reason=NOT_FINITE)])
    assert 0 <= cached - num_cached <= at // 16  # whole blocks before the token
