"""Tests that decoders which run through transformers' code lose as little to bfloat16 as in
transformers, and little to int8: the other tests of these decoders compute in float32.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tandem.tests.tiny_decoders import DECODERS, make_tiny_decoder
from tandem.tests.workers.model.helpers import (
    Driver,
    load,
    prompt,
    recorded_logits,
    reference,
    reference_logits,
)
from tandem.workers.model.config import CheckpointError, read_fields
from tandem.workers.model.generic.definition import build_on_meta

PROMPTS = [prompt(6, seed) for seed in range(6)]
"""Short ones: a rounding may give a token to another expert, which all later tokens notice."""


def logits_of(folder: Path, quantization: str | None = None) -> torch.Tensor:
    """Returns the logits in bfloat16 of all prefixes of the prompts, one token a step."""
    driver = Driver(
        load(folder, dtype="bfloat16", model_impl="transformers", quantization=quantization)
    )
    with pytest.MonkeyPatch.context() as patch, recorded_logits(patch) as logits:
        for number, ids in enumerate(PROMPTS, 1):
            for position, token in enumerate(ids):
                driver.run(driver.step(number, [token], position))
    return torch.cat(logits).float()


def logits_of_transformers(model: torch.nn.Module) -> torch.Tensor:
    """Returns the same logits of a model of transformers."""
    return torch.cat([reference_logits(model, ids).float() for ids in PROMPTS])


def error(expected: torch.Tensor, found: torch.Tensor) -> float:
    """Returns the median of the tokens' relative errors of the logits, less their mean."""
    first, second = (each - each.mean(-1, keepdim=True) for each in (expected, found))
    return float(((first - second).norm(dim=-1) / first.norm(dim=-1)).median())


@pytest.mark.parametrize("kind", sorted(DECODERS))
def test_rounded_weights_cost_no_more_than_in_transformers(tmp_path: Path, kind: str) -> None:
    folder = make_tiny_decoder(tmp_path, kind)
    exact = logits_of_transformers(reference(folder))
    model: Any = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, attn_implementation="eager"
    )
    model.eval()
    built = build_on_meta(read_fields(folder), torch.bfloat16).model
    kept = {name: tensor.dtype for name, tensor in built.state_dict().items()}
    expected = {name: tensor.dtype for name, tensor in model.state_dict().items()}
    assert kept == {name: dtype for name, dtype in expected.items() if name in kept}
    cost = error(exact, logits_of_transformers(model))
    assert error(exact, logits_of(folder)) <= 2 * cost
    try:
        rounded = logits_of(folder, "int8")
    except CheckpointError:  # experts are not rounded
        return
    assert error(exact, rounded) <= 5 * cost
