"""Workers whose model computes NaN, for all requests or for one: who goes on, who is refused and
who is replaced.
"""

import asyncio
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tandem.proto.errors import InternalError
from tandem.tests.fleet import VOCAB, Fleet, fake_rank, fleet, innermost, split_fleet
from tandem.tests.tiny import make_tiny_model
from tandem.tests.token_request import token_request
from tandem.tests.waits import WAIT
from tandem.tests.workers.engine.fake import expected_tokens
from tandem.tests.workers.model.helpers import prompt
from tandem.workers.engine.plan import Samples, StepPlan
from tandem.workers.serve.watchdog import CANARY_ID
from tandem.workers.serve.worker import Worker

POISON = 307  # the token whose embedding is not finite; the model generates it nowhere
NUM_TOKENS = 40
PROMPTS = [prompt(20 + number, number) for number in range(4)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("llama"))


def embeddings(worker: Worker) -> torch.Tensor:
    """Returns the embeddings of a worker's model, [vocab_size, hidden]."""
    runner: Any = innermost(worker._rank.executor)
    weight: torch.Tensor = runner._model.embed_tokens.weight.data
    return weight


async def generate(running: Fleet, prompts: Sequence[Sequence[int]] = PROMPTS) -> list[list[int]]:
    """Returns the tokens of all prompts, which run at the same time."""
    requests = [
        token_request(ids, NUM_TOKENS, name=f"r{n}", ignore_eos=True)
        for n, ids in enumerate(prompts)
    ]
    return [tokens for tokens, _ in await asyncio.gather(*map(running.generate, requests))]


async def leaves(worker: Worker, running: Fleet) -> None:
    """Waits until a worker fails its health check; takes it out of the directory, as Ray does."""
    async with asyncio.timeout(WAIT):
        await worker.failed.wait()
    with pytest.raises(RuntimeError, match="has failed") as caught:
        worker.check_health()
    assert "not finite" in str(caught.value.__cause__)
    running.workers.remove(worker)
    running.registry.update(each.info() for each in running.workers)


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[list[int]]:
    async def without_faults() -> list[list[int]]:
        async with split_fleet(folder, {"decode": [1]}) as running:
            return await generate(running)

    return asyncio.run(without_faults())


@pytest.mark.parametrize("broken", [0, 1], ids=["prefill", "decode"])
async def test_a_worker_that_computes_nan_fails_its_health_check_and_no_request(
    folder: Path, expected: list[list[int]], broken: int
) -> None:
    """From the start, so that each request comes to it first or second."""
    tp = {"prefill": [1, 1], "decode": [1, 1]}
    async with split_fleet(folder, tp) as running:
        worker = running.workers[2 * broken]
        embeddings(worker)[:] = torch.nan
        made: list[list[int]] = []
        async with asyncio.timeout(WAIT):
            while not worker.failed.is_set():
                made += await generate(running)
        await leaves(worker, running)
        made += await generate(running)
        assert all(tokens == expected[n % len(PROMPTS)] for n, tokens in enumerate(made))
        await running.check_idle()
        await worker.stop()


async def test_streams_under_way_go_on_when_their_worker_breaks(
    folder: Path, expected: list[list[int]]
) -> None:
    async with split_fleet(folder, {"decode": [1, 1]}) as running:
        streams = asyncio.create_task(generate(running))
        async with asyncio.timeout(WAIT):
            while not all(worker._engine.requests.num_holding for worker in running.workers):
                await asyncio.sleep(0)
        worker = running.workers[0]
        embeddings(worker)[:] = torch.nan
        assert await streams == expected
        await leaves(worker, running)
        await running.check_idle()
        await worker.stop()


async def test_a_request_that_has_nan_anywhere_is_refused_and_its_workers_stay_healthy(
    folder: Path, expected: list[list[int]]
) -> None:
    """However often it is sent: the canary tells that each worker is sound."""
    async with split_fleet(folder, {"prefill": [1, 1], "decode": [1, 1]}) as running:
        for worker in running.workers:
            embeddings(worker)[POISON] = torch.nan
        beside = asyncio.create_task(generate(running))
        for _ in range(3):
            with pytest.raises(InternalError, match="not finite"):
                await running.generate(token_request([*prompt(30), POISON, *prompt(9)], 8))
        assert await beside == expected
        async with asyncio.timeout(WAIT):
            while any(worker._canary._is_running for worker in running.workers):
                await asyncio.sleep(0.01)
        for worker in running.workers:
            worker.check_health()
        assert await generate(running) == expected
        await running.check_idle()


class Garbage:
    """Has an executor sample tokens that the model does not have, but for the canary."""

    def __init__(self, executor: Any) -> None:
        self._launch = executor.launch
        executor.launch = self.launch

    def launch(self, plan: StepPlan, on_layers: Any = None) -> Any:
        collect = self._launch(plan, on_layers)
        is_canary = any(step.sequence_id == CANARY_ID for step in plan.sequences)

        def spoilt() -> Samples:
            samples: Samples = collect()
            if not is_canary:
                samples.tokens[:] = [VOCAB + 7] * len(samples.tokens)
            return samples

        return spoilt


async def test_tokens_that_the_model_does_not_have_reach_no_client() -> None:
    ranks = [fake_rank(), fake_rank()]
    Garbage(ranks[0].executor)
    async with fleet(0, 2, rank=lambda role: ranks.pop(0)) as running:
        causes: list[str] = []
        for number in itertools.count():  # a prompt of its own each: no prefix cache draws it
            ids = prompt(20, number)
            tokens, timeline = await running.generate(token_request(ids, 8, name=f"r{number}"))
            assert tokens == expected_tokens(ids, 8, VOCAB)
            causes += [each.cause for each in timeline.interruptions]
            if causes:
                break
        assert causes == ["not_finite"]
