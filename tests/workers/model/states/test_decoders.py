"""Decoders with states through transformers' code: equality with transformers, and refusals."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.models.lfm2.modeling_lfm2 import Lfm2MLP, causal_conv1d_fn

from tandem.tests.tiny_decoders import make_tiny_decoder
from tandem.tests.workers.model.helpers import (
    Driver,
    load,
    prompt,
    recorded_logits,
    reference,
    reference_logits,
)
from tandem.tests.workers.model.test_generic import write_config
from tandem.workers.engine.plan import SequenceStep
from tandem.workers.model.config import CheckpointError, read_fields
from tandem.workers.model.generic import config as generic_config
from tandem.workers.model.generic import definition
from tandem.workers.model.loader import open_checkpoint
from tandem.workers.model.registry import parse_model_config

TOLERANCE = 1e-4


def logits_of(
    monkeypatch: pytest.MonkeyPatch, driver: Driver, *steps: SequenceStep
) -> torch.Tensor:
    """The logits of the steps, [num_sampled, vocab_size]."""
    with recorded_logits(monkeypatch) as logits:
        driver.run(*steps)
    return torch.cat(logits).float()


def difference(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """The largest difference of logits."""
    assert ours.shape == theirs.shape
    return float((ours - theirs).abs().max())


@pytest.mark.parametrize("kind", ["qwen3_5_text", "nemotron_h", "lfm2", "mamba", "zamba2"])
def test_a_sequence_continues_after_the_right_part_of_a_draft(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Each draft token has a state, from which the next step may continue."""
    folder = make_tiny_decoder(tmp_path, kind)
    expected = reference_logits(reference(folder), ids := prompt(40))
    driver = Driver(load(folder, model_impl="transformers"))
    for right in range(4):
        driver.run(driver.step(1, ids[:30], 0), driver.step(2, ids[:7], 0))
        draft = (*ids[31 : 31 + right], *prompt(3 - right, 7))
        step = driver.step(1, (ids[30], *draft), 30, num_samples=4, num_draft=3)
        found = logits_of(monkeypatch, driver, step)[: right + 1]
        assert difference(found, expected[30 : 31 + right]) <= TOLERANCE
        step = driver.step(1, ids[31 + right :], 31 + right)
        assert difference(logits_of(monkeypatch, driver, step), expected[-1:]) <= TOLERANCE
        driver.drop_all()


@pytest.mark.parametrize("kind", ["qwen3_5_text", "nemotron_h", "lfm2"])
def test_bfloat16_runs_through_the_same_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """The conv states are in bfloat16, the matrices in float32."""
    folder = make_tiny_decoder(tmp_path, kind)
    ids = prompt(60, 1)
    driver = Driver(load(folder, dtype="bfloat16", model_impl="transformers"))
    driver.run(driver.step(1, ids[:31], 0))
    driver.run(driver.step(1, ids[31:32], 31))
    logits = logits_of(monkeypatch, driver, driver.step(1, ids[32:], 32))
    store = driver.runner.kv.states
    assert store is not None
    for layer, geometry in enumerate(driver.runner.kv.layout.layers):
        for part in geometry.states:
            dtype = torch.float32 if part.name == "matrix" else torch.bfloat16
            assert store.memory(layer, part.name).dtype == dtype
    assert difference(logits, reference_logits(reference(folder), ids)[-1:]) <= 0.5


@pytest.mark.parametrize("kind", ["qwen3_5_text", "mamba2", "mamba", "lfm2"])
def test_a_sequence_that_reads_a_wrong_state_gives_other_logits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """A control of the tests above."""
    folder = make_tiny_decoder(tmp_path, kind)
    ids = prompt(60, 1)
    driver = Driver(load(folder, model_impl="transformers"))
    driver.run(driver.step(1, ids[:30], 0, num_samples=2, num_draft=1))
    driver.states[1][30] = driver.states[1].pop(29)  # which lacks one token
    logits = logits_of(monkeypatch, driver, driver.step(1, ids[30:31], 30))
    assert difference(logits, reference_logits(reference(folder), ids)[30:31]) > 100 * TOLERANCE


def test_the_parts_of_a_state_are_derived_from_the_config(tmp_path: Path) -> None:
    """Of Qwen3.5 with 9B parameters: 51.5 MB in all, of which the matrices have 50.3 MB."""
    sizes = {
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
    }
    write_config(tmp_path, "qwen3_5_text", **sizes)
    config = parse_model_config(read_fields(tmp_path), "transformers")
    layers = [layer for layer in config.layers if layer.states]
    assert (len(layers), len(config.layers)) == (24, 32)
    assert not any(layer.keeps_tokens for layer in layers)
    for layer in layers:
        key, value, matrix = layer.states
        assert (key.name, key.planes, key.row) == ("conv_key", 2 * 16, 3 * 128)
        assert (value.name, value.planes, value.row) == ("conv_value", 32, 3 * 128)
        assert (matrix.planes, matrix.row, matrix.dtype) == (32, 128 * 128, "float32")
        # Every rank holds the whole state, because transformers' plan splits no mixer.
        assert {part.num_kv_heads for part in layer.states} == {1}


@pytest.mark.parametrize(
    "kind", ["rwkv", "recurrent_gemma", "xlstm", "zaya", "minimax", "deepseek_v4", "zamba"]
)
def test_the_trace_refuses_other_ways_to_keep_a_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Also for types that no table lists, such as those of later releases of transformers."""
    monkeypatch.setattr(generic_config, "_REFUSED_TYPES", {})
    write_config(tmp_path, kind)
    problem = f"^config.json: model_type: '{kind}' keeps state in a way that is not supported$"
    with pytest.raises(CheckpointError, match=problem):
        parse_model_config(read_fields(tmp_path), "transformers")


def call_no_conv(self: Lfm2MLP, x: torch.Tensor) -> torch.Tensor:
    """Has the name of a mixer's function, but calls it never."""
    result: torch.Tensor = x if self.w1 else causal_conv1d_fn(x, x)
    return result


def keep_inputs(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Keeps a state in a cache without a mixer's function."""
    if not self.w1:
        self.cache.update_conv_state(x, 0)
    return x


@pytest.mark.parametrize("forward", [call_no_conv, keep_inputs])
def test_modules_whose_state_would_be_lost_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forward: Callable[..., torch.Tensor]
) -> None:
    folder = make_tiny_decoder(tmp_path, "lfm2")
    open_checkpoint(folder, "transformers")
    monkeypatch.setattr(Lfm2MLP, "forward", forward)
    with pytest.raises(CheckpointError, match="'lfm2' keeps state in a way that is not supported"):
        open_checkpoint(folder, "transformers")


def test_unknown_types_of_layers_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_tiny_decoder(tmp_path, "nemotron_h")
    monkeypatch.setattr(definition, "STATELESS", ("mlp",))
    with pytest.raises(CheckpointError, match="'nemotron_h' keeps state in a way"):
        open_checkpoint(folder, "transformers")
