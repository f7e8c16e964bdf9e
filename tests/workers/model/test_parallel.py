"""Models split over ranks against the whole model; here the ranks are threads."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from tandem.tests.tiny import DENSE, make_tiny_model
from tandem.tests.waits import WAIT
from tandem.tests.workers.model.helpers import Driver, check_close, load, mixed_steps, prompt
from tandem.tests.workers.model.test_generation import ALL_KINDS
from tandem.tests.workers.model.test_generation import generate as generate_all
from tandem.tests.workers.spans import read_now, span
from tandem.workers.engine.plan import PENDING_TOKEN, SamplingParams, StepPlan
from tandem.workers.model.checkpoint import Checkpoint
from tandem.workers.model.footprint import kv_bytes_per_token
from tandem.workers.model.loader import check_checkpoint, open_checkpoint
from tandem.workers.model.runner import ModelRunner
from tandem.workers.model.sampling.gumbel import sample

SAMPLED = SamplingParams(temperature=1.0, top_p=0.9, seed=5)


class ThreadGroup:
    """Ranks that are threads of one process and add up in the order of their ranks."""

    def __init__(
        self, rank: int, size: int, barrier: threading.Barrier, box: list[torch.Tensor]
    ) -> None:
        self.rank, self.size = rank, size
        self._barrier, self._box = barrier, box

    def all_gather(self, x: torch.Tensor) -> list[torch.Tensor]:
        self._box[self.rank] = x.clone()
        self._barrier.wait(WAIT)
        gathered = list(self._box)
        self._barrier.wait(WAIT)
        return gathered

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack(self.all_gather(x)).sum(0)

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        return self.all_gather(x)[0]


def load_rank(checkpoint: Checkpoint, group: ThreadGroup, dtype: str = "float32") -> ModelRunner:
    return ModelRunner.load(
        checkpoint,
        dtype=dtype,
        device="cpu",
        num_blocks=128,
        num_states=24,
        block_size=16,
        group=group,
    )


def on_ranks(
    folder: Path,
    size: int,
    work: Callable[[ModelRunner], Any],
    dtype: str = "float32",
    model_impl: str = "auto",
    quantization: str | None = None,
) -> list[Any]:
    """What `work` returns on each rank, whose model is loaded with these options."""
    checkpoint = open_checkpoint(folder, model_impl, quantization=quantization)
    barrier, box = threading.Barrier(size), [torch.empty(0)] * size

    def rank(number: int) -> Any:
        group = ThreadGroup(number, size, barrier, box)
        return work(load_rank(checkpoint, group, dtype))

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(rank, range(size)))


def generate(runner: ModelRunner) -> list[Any]:
    driver = Driver(runner)
    sampled = driver.generate(8, prompt(30, 1), 10, SAMPLED)
    return [mixed_steps(runner), driver.generate(9, prompt(70, 2), 12), sampled]


@pytest.mark.parametrize("kv_heads", [8, 4, 2, 1])
@pytest.mark.parametrize("family", DENSE)
def test_every_split_gives_the_tokens_of_the_whole(
    tmp_path: Path, family: str, kv_heads: int
) -> None:
    heads: dict[str, Any] = {"num_attention_heads": 8, "num_key_value_heads": kv_heads}
    folder = make_tiny_model(tmp_path, family, tie_word_embeddings=kv_heads % 4 == 0, **heads)
    expected = generate(load(folder))
    for size in (2, 4):
        assert on_ranks(folder, size, generate) == [expected] * size


@pytest.mark.parametrize(
    "overrides",
    [
        {"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 144},
        {
            "num_attention_heads": 6,
            "num_key_value_heads": 6,
            "hidden_size": 96,
            "intermediate_size": 100,
        },
        {
            "attention_bias": True,
            "mlp_bias": True,
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "hidden_size": 96,
        },
    ],
)
def test_three_ranks_with_uneven_parts_and_biases(
    tmp_path: Path, overrides: dict[str, Any]
) -> None:
    folder = make_tiny_model(tmp_path, **overrides)
    assert on_ranks(folder, 3, generate) == [generate(load(folder))] * 3


def test_every_rank_chooses_and_scores_as_the_whole(tmp_path: Path) -> None:
    """Without grammars, which the leading rank alone follows (test_split_workers.py has those)."""
    folder = make_tiny_model(tmp_path, num_attention_heads=8, num_key_value_heads=4)
    kinds = [kind for kind in ALL_KINDS if not kind.grammar]
    prompts = [prompt(7 + 9 * row, row) for row in range(len(kinds))]

    def work(runner: ModelRunner) -> list[Any]:
        return generate_all(Driver(runner), prompts, kinds, 16)

    whole = work(load(folder))
    for part in on_ranks(folder, 2, work):
        for (tokens, of_tokens, of_prompt), expected in zip(part, whole, strict=True):
            assert tokens == expected[0]
            for ours, theirs in ((of_tokens, expected[1]), (of_prompt, expected[2])):
                check_close(ours, theirs, 1e-3)


@pytest.mark.parametrize(
    "sampling", [SAMPLED, SamplingParams(temperature=1.0, seed=5, presence_penalty=1.0, logprobs=2)]
)
def test_ranks_whose_samples_differ_continue_with_those_of_rank_0(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sampling: SamplingParams
) -> None:
    """Where a step starts before the tokens of the last are on the host: as at near ties, which
    ranks may round either way, rank 1 samples other tokens.
    """
    folder = make_tiny_model(tmp_path, num_attention_heads=8, num_key_value_heads=4)
    monkeypatch.setattr(ModelRunner, "launches_ahead", property(lambda _: True))
    ranks = threading.local()

    def work(runner: ModelRunner) -> list[int]:
        ranks.number = runner.kv.rank
        driver = Driver(runner)
        collects = [
            runner.launch(
                StepPlan(sequences=(driver.step(1, prompt(20), 0, sampling),), dropped=())
            )
        ]
        for start in range(20, 30):
            step = driver.step(1, [PENDING_TOKEN], start)
            collects.append(runner.launch(StepPlan(sequences=(step,), dropped=())))
        return [collect().tokens[0] for collect in collects]

    def differing(logits: torch.Tensor, *rest: Any) -> torch.Tensor:
        tokens: torch.Tensor = (sample(logits, *rest) + ranks.number) % 512
        return tokens

    expected = on_ranks(folder, 2, work)[0]
    monkeypatch.setattr("tandem.workers.model.sampling.sampler.sample", differing)
    assert on_ranks(folder, 2, work) == [expected] * 2
    assert len(set(expected)) > 4


def test_query_heads_that_straddle_kv_heads(tmp_path: Path) -> None:
    folder = make_tiny_model(
        tmp_path, num_attention_heads=12, num_key_value_heads=4, hidden_size=96
    )
    expected = generate(load(folder))
    assert on_ranks(folder, 6, generate) == [expected] * 6


def test_a_rank_keeps_its_own_heads_of_the_cache(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path, num_attention_heads=8, num_key_value_heads=4)
    layers = 2

    def cache(runner: ModelRunner) -> torch.Tensor:
        """[layers, 2, tokens, heads, head_dim]"""
        driver = Driver(runner)
        driver.run(driver.step(1, prompt(37), 0))
        data = read_now(runner.kv, driver.tables[1], span(runner.kv, 0, 37))
        return torch.frombuffer(bytearray(data), dtype=torch.float32).view(layers, 2, 37, -1, 16)

    whole = cache(load(folder))
    for size, slots in (
        (2, [(0, 1), (2, 3)]),
        (4, [(0,), (1,), (2,), (3,)]),
        (8, [(n // 2,) for n in range(8)]),
    ):
        for part, heads in zip(on_ranks(folder, size, cache), slots, strict=True):
            torch.testing.assert_close(part, whole[:, :, :, list(heads)], atol=1e-4, rtol=0)


@pytest.mark.parametrize(("kv_heads", "size"), [(8, 2), (4, 4), (2, 4), (1, 8)])
def test_the_cache_of_a_rank_has_the_model_s_layout_and_its_own_size(
    tmp_path: Path, kv_heads: int, size: int
) -> None:
    folder = make_tiny_model(tmp_path, num_attention_heads=8, num_key_value_heads=kv_heads)
    layout = load(folder).kv.layout
    assert (layout.layers[0].num_heads, layout.layers[0].num_kv_heads) == (8, kv_heads)
    per_block = 16 * kv_bytes_per_token(check_checkpoint(folder), size, "float32")
    for rank, kv in enumerate(on_ranks(folder, size, lambda runner: runner.kv)):
        assert kv.layout == layout
        assert (kv.tp, kv.rank, kv.num_slots(0)) == (size, rank, max(1, kv_heads // size))
        assert kv.data.nbytes == 128 * per_block


def test_heads_that_cannot_be_split_are_refused(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path, num_attention_heads=8, num_key_value_heads=4)
    group = ThreadGroup(0, 3, threading.Barrier(1), [])
    with pytest.raises(ValueError, match=r"3 .*8 query heads"):
        load_rank(open_checkpoint(folder), group)
