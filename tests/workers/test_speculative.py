"""Workers that guess tokens, over real sockets: the tokens of plain decoding through both pools, by
ranks that share a model, when a stream moves to another worker, and as deltas whose indices are
right.
"""

import asyncio
import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from tandem.proto import inference_pb2
from tandem.tests.fleet import VOCAB, fake_rank, fleet, split_fleet
from tandem.tests.service import expected_tokens as model_tokens
from tandem.tests.token_request import token_request
from tandem.tests.waits import WAIT
from tandem.tests.workers.engine.fake import expected_tokens
from tandem.workers.engine import scheduler
from tandem.workers.engine.config import SpeculativeConfig
from tandem.workers.engine.ngram import Drafter
from tandem.workers.tp.rank import Rank

NUM_TOKENS = 24
CONFIG = SpeculativeConfig()


class Prophet(Drafter):
    """Drafts how known texts go on, every second time with an error."""

    texts: list[list[int]]

    def __init__(self, config: SpeculativeConfig) -> None:
        self._num_drafts = 0

    def draft(self, tokens: Sequence[int], room: int) -> tuple[int, ...]:
        text = next(
            (text for text in self.texts if text[: len(tokens)] == list(tokens)), list(tokens)
        )
        draft = text[len(tokens) :][: max(min(room, 4), 0)]
        self._num_drafts += 1
        if draft and self._num_drafts % 2:
            draft[-1] += 1
        return tuple(draft)

    def record(self, num_accepted: int) -> None:
        pass


@pytest.fixture
def prophet(monkeypatch: pytest.MonkeyPatch) -> type[Prophet]:
    monkeypatch.setattr(scheduler, "Drafter", Prophet)
    return Prophet


@pytest.mark.parametrize(
    "tp", [{"prefill": [1], "decode": [1]}, {"decode": [2]}, {"prefill": [2], "decode": [2]}]
)
async def test_through_both_pools_and_by_several_ranks(
    split_model: Path, tp: dict[str, list[int]], prophet: type[Prophet]
) -> None:
    prompts = [
        [(17 * i + 5 * n) % 400 + 3 for i in range(length)] for n, length in enumerate([1, 16, 130])
    ]
    expected = model_tokens(split_model, prompts, NUM_TOKENS)
    prophet.texts = [prompt + tokens for prompt, tokens in zip(prompts, expected, strict=True)]
    async with split_fleet(split_model, tp, speculative=CONFIG) as running:
        requests = [token_request(prompt, NUM_TOKENS, ignore_eos=True) for prompt in prompts]
        made = await asyncio.gather(*map(running.generate, requests))
        assert [tokens for tokens, _ in made] == expected
        last = (await running.statuses())[-1]
        assert NUM_TOKENS < last.num_accepted_tokens < last.num_draft_tokens


@pytest.mark.parametrize("tp", [{"prefill": [1], "decode": [1]}, {"prefill": [1], "decode": [2]}])
async def test_a_draft_model_beside_one_rank_and_beside_several(
    split_model: Path, tp: dict[str, list[int]]
) -> None:
    """It computes the prompt itself, whose KV cache comes from the prefill worker."""
    prompts = [
        [(17 * i + 5 * n) % 400 + 3 for i in range(length)] for n, length in enumerate([1, 16, 130])
    ]
    expected = model_tokens(split_model, prompts, NUM_TOKENS)
    config = SpeculativeConfig(model=str(split_model))
    async with split_fleet(
        split_model, tp, speculative=config, draft_model=str(split_model)
    ) as running:
        requests = [token_request(prompt, NUM_TOKENS, ignore_eos=True) for prompt in prompts]
        made = await asyncio.gather(*map(running.generate, requests))
        assert [tokens for tokens, _ in made] == expected
        last = (await running.statuses())[-1]
        assert NUM_TOKENS < last.num_accepted_tokens == last.num_draft_tokens


async def test_streams_of_a_draining_worker_go_on_elsewhere(prophet: type[Prophet]) -> None:
    """One decode worker suspends its streams while their drafts are verified."""
    rng = random.Random(0)
    prompts = [[rng.randrange(VOCAB) for _ in range(20)] for _ in range(8)]
    expected = [expected_tokens(prompt, 300, VOCAB) for prompt in prompts]
    prophet.texts = [prompt + tokens for prompt, tokens in zip(prompts, expected, strict=True)]

    def rank(role: str) -> Rank:
        return fake_rank(num_blocks=512, step_seconds=0.02)

    async with fleet(1, 2, rank=rank, speculative=CONFIG) as running:
        streams = [
            asyncio.create_task(running.generate(token_request(prompt, 300))) for prompt in prompts
        ]
        leaving = running.workers[1]
        async with asyncio.timeout(WAIT):
            while leaving._engine.requests.num_accepted_tokens < 20:
                await asyncio.sleep(0.001)
        assert await leaving.drain(WAIT) == 0
        made = await asyncio.gather(*streams)
        assert [tokens for tokens, _ in made] == expected
        assert max(timeline.attempts for _, timeline in made) == 2
        assert sum(status.num_recomputed_tokens for status in await running.statuses()) == 0


@pytest.mark.parametrize("tp", [1, 2])
async def test_streams_of_a_draining_worker_with_a_draft_model_go_on_elsewhere(
    split_model: Path, tp: int
) -> None:
    """The other worker's draft model computes what it knows nothing of, and guesses on."""
    prompts = [[(17 * i + 5 * n) % 400 + 3 for i in range(40 + n)] for n in range(6)]
    expected = model_tokens(split_model, prompts, 300)
    config = SpeculativeConfig(model=str(split_model))
    tps = {"prefill": [1], "decode": [tp, 1]}
    async with split_fleet(
        split_model, tps, speculative=config, draft_model=str(split_model), kv_cache_bytes=2**23
    ) as running:
        requests = [token_request(prompt, 300, ignore_eos=True) for prompt in prompts]
        streams = [asyncio.create_task(running.generate(request)) for request in requests]
        leaving, other = running.workers[1:]
        async with asyncio.timeout(WAIT):
            while leaving._engine.requests.num_accepted_tokens < 20:
                await asyncio.sleep(0.001)
        assert await leaving.drain(WAIT) == 0
        num_before = other._engine.requests.num_accepted_tokens
        made = await asyncio.gather(*streams)
        assert [tokens for tokens, _ in made] == expected
        assert max(timeline.attempts for _, timeline in made) == 2
        assert sum(status.num_recomputed_tokens for status in await running.statuses()) == 0
        assert other._engine.requests.num_accepted_tokens > num_before


async def test_choices_and_seeds(prophet: type[Prophet]) -> None:
    sampling = inference_pb2.SamplingParams(
        temperature=1, top_k=0, top_p=1, min_p=0, seed=7, typical_p=1, repetition_penalty=1
    )
    prompt = list(range(3, 40))
    expected = [expected_tokens(prompt, 60, VOCAB, seed) for seed in (7, 8, 9)]
    prophet.texts = [prompt + tokens for tokens in expected]
    async with fleet(1, 1, speculative=CONFIG) as running:
        request = token_request(prompt, 60, num_choices=3, sampling=sampling)
        choices, _ = await running.choices(request)
        assert choices == expected
        assert (await running.statuses())[1].num_accepted_tokens > 60
