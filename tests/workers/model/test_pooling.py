"""Embeddings against transformers' last_hidden_state: whole prompts and chunks, beside others, over
two ranks.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tandem.tests.tiny import make_tiny_model
from tandem.tests.workers.model.helpers import GREEDY, Driver, load, prompt, reference
from tandem.tests.workers.model.test_parallel import on_ranks
from tandem.workers.engine.plan import Pooling, SamplingParams
from tandem.workers.model.loader import open_checkpoint
from tandem.workers.model.runner import ModelRunner

KINDS: tuple[Pooling, ...] = ("last", "mean")
LENGTHS = (1, 2, 17, 70)


@torch.inference_mode()
def expected(folder: Path, kind: Pooling) -> list[torch.Tensor]:
    """[hidden] of each prompt."""
    model: Any = reference(folder)
    hidden = [
        model.base_model(torch.tensor([prompt(length)])).last_hidden_state[0] for length in LENGTHS
    ]
    return [each[-1] if kind == "last" else each.mean(0) for each in hidden]


def embed(runner: ModelRunner, kind: Pooling, size: int) -> list[torch.Tensor]:
    """All prompts side by side, in chunks of `size` tokens, beside one that asks for none."""
    driver, wanted = Driver(runner), SamplingParams(temperature=0.0, pooling=kind)
    driver.run(driver.step(99, [7, 8, 9], 0, GREEDY))
    found: dict[int, list[float]] = {}
    for start in range(0, max(LENGTHS), size):
        steps = []
        for number, length in enumerate(LENGTHS):
            if start < length:
                tokens, is_last = prompt(length)[start : start + size], start + size >= length
                steps.append(driver.step(number, tokens, start, wanted, num_samples=int(is_last)))
        found |= driver.sample(*steps).embeddings
    for number in range(len(LENGTHS)):
        driver.drop(number)
    return [torch.tensor(found[number]) for number in range(len(LENGTHS))]


@pytest.mark.parametrize(
    ("family", "model_impl"),
    [("llama", "auto"), ("gemma3", "auto"), ("cohere2", "auto"), ("qwen3", "transformers")],
)
def test_embeddings_are_those_of_transformers(tmp_path: Path, family: str, model_impl: str) -> None:
    folder = make_tiny_model(tmp_path / family, family=family)
    runner = load(folder, model_impl=model_impl)
    for kind in KINDS:
        reference_rows = expected(folder, kind)
        for size in (100, 13, 1):
            for ours, theirs in zip(embed(runner, kind, size), reference_rows, strict=True):
                torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("architecture", "model_impl"),
    [
        ("Qwen3ForCausalLM", "auto"),
        ("Qwen3ForCausalLM", "transformers"),
        ("Qwen3Model", "auto"),
    ],
)
@pytest.mark.parametrize("tied", [True, False])
def test_a_decoder_may_have_been_saved_without_its_head(
    tmp_path: Path, tied: bool, architecture: str, model_impl: str
) -> None:
    """As Qwen3-Embedding: names begin with layers, and config.json of 8B asks for a head.

    Other embedding models also name the decoder as their architecture.
    """
    folder = make_tiny_model(tmp_path / "model", "qwen3", tie_word_embeddings=tied)
    rows = expected(folder, "last")
    path = folder / "model.safetensors"
    stored = load_file(path)
    stored.pop("lm_head.weight", None)
    save_file({name.removeprefix("model."): each for name, each in stored.items()}, path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"architectures": [architecture]}))
    assert open_checkpoint(folder, model_impl).config.tie_word_embeddings
    for ours, theirs in zip(
        embed(load(folder, model_impl=model_impl), "last", 100), rows, strict=True
    ):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)


def test_ranks_agree_on_an_embedding(tiny_model: Path) -> None:
    for kind in KINDS:
        found = on_ranks(tiny_model, 2, lambda runner, kind=kind: embed(runner, kind, 13))  # type: ignore[misc]
        for rank in found:
            for ours, theirs in zip(rank, expected(tiny_model, kind), strict=True):
                torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)
