"""Decoders with states through transformers' code: equality with transformers, and refusals."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.models.lfm2.modeling_lfm2 import Lfm2MLP, causal_conv1d_fn

from tandem.tests.tiny_decoders import STATEFUL, make_tiny_decoder
from tandem.tests.workers.model.helpers import prompt, reference, reference_logits
from tandem.tests.workers.model.states.harness import StateDriver, open_states
from tandem.tests.workers.model.test_generic import write_config
from tandem.workers.model.config import CheckpointError, read_fields
from tandem.workers.model.generic import config as generic_config
from tandem.workers.model.generic import definition
from tandem.workers.model.loader import open_checkpoint
from tandem.workers.model.registry import parse_model_config

TOLERANCE = 1e-4


@pytest.fixture
def with_states(monkeypatch: pytest.MonkeyPatch) -> None:
    open_states(monkeypatch)


@pytest.mark.usefixtures("with_states")
@pytest.mark.parametrize("kind", sorted(STATEFUL))
def test_chunks_beside_single_tokens_give_what_transformers_gives(
    tmp_path: Path, kind: str
) -> None:
    """Two sequences in five steps, longer than a window and than a chunk of transformers' scans.

    The second one then goes back to a state from the middle of a step, as after a refused draft.
    """
    folder = make_tiny_decoder(tmp_path, kind)
    driver = StateDriver(folder)
    ids = {1: prompt(90, 1), 2: prompt(77, 2)}
    found: dict[int, list[torch.Tensor]] = {1: [], 2: []}
    begins = {1: 0, 2: 0}
    for counts in ((40, 7), (1, 33), (2, 1), (46, 1), (1, 35)):
        ends = {number: begins[number] + count for number, count in zip(ids, counts, strict=True)}
        parts = [(number, ids[number][begins[number] : ends[number]]) for number in ids]
        for (number, _), logits in zip(parts, driver.run(*parts, saved_before_end=5), strict=True):
            found[number].append(logits)
        begins = ends
    assert begins == {number: len(each) for number, each in ids.items()}
    model = reference(folder)
    expected = {number: reference_logits(model, each) for number, each in ids.items()}
    for number in ids:
        assert difference(torch.cat(found[number]), expected[number]) <= TOLERANCE
    driver.go_back(2)
    (again,) = driver.run((2, ids[2][-5:]))
    assert difference(again, expected[2][-5:]) <= TOLERANCE


def difference(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """The largest difference of logits."""
    assert ours.shape == theirs.shape
    return float((ours - theirs).abs().max())


@pytest.mark.usefixtures("with_states")
@pytest.mark.parametrize("kind", ["qwen3_5_text", "nemotron_h", "lfm2"])
def test_bfloat16_runs_through_the_same_code(tmp_path: Path, kind: str) -> None:
    """The conv states are in bfloat16, the matrices in float32."""
    folder = make_tiny_decoder(tmp_path, kind)
    ids = prompt(60, 1)
    driver = StateDriver(folder, "bfloat16")
    logits = torch.cat([driver.run((1, part))[0] for part in (ids[:31], ids[31:32], ids[32:])])
    dtypes = {name: memory.dtype for (_, name), memory in driver.slots_memory.parts.items()}
    for name, dtype in dtypes.items():
        assert dtype == (torch.float32 if name == "matrix" else torch.bfloat16)
    assert difference(logits.float(), reference_logits(reference(folder), ids)) <= 0.5


@pytest.mark.usefixtures("with_states")
@pytest.mark.parametrize("kind", ["qwen3_5_text", "mamba2", "mamba", "lfm2"])
def test_a_sequence_that_reads_a_wrong_state_gives_other_logits(tmp_path: Path, kind: str) -> None:
    """A control of the tests above."""
    folder = make_tiny_decoder(tmp_path, kind)
    ids = prompt(60, 1)
    driver = StateDriver(folder)
    driver.run((1, ids[:30]), saved_before_end=1)
    driver.slots[1] = driver.saved[1][1]  # which lacks one token
    (logits,) = driver.run((1, ids[30:]))
    expected = reference_logits(reference(folder), ids)[30:]
    assert difference(logits, expected) > 100 * TOLERANCE


@pytest.mark.usefixtures("with_states")
def test_the_parts_of_a_state_are_derived_from_the_config(tmp_path: Path) -> None:
    """Of Qwen3.5 with 9B parameters: 51.5 MB in all, of which the matrices have 50.3 MB."""
    sizes = {
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
    }
    write_config(tmp_path, "qwen3_5_text", **sizes)
    config = parse_model_config(read_fields(tmp_path))
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


@pytest.mark.usefixtures("with_states")
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


@pytest.mark.usefixtures("with_states")
@pytest.mark.parametrize("forward", [call_no_conv, keep_inputs])
def test_modules_whose_state_would_be_lost_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forward: Callable[..., torch.Tensor]
) -> None:
    folder = make_tiny_decoder(tmp_path, "lfm2")
    open_checkpoint(folder)
    monkeypatch.setattr(Lfm2MLP, "forward", forward)
    with pytest.raises(CheckpointError, match="'lfm2' keeps state in a way that is not supported"):
        open_checkpoint(folder)


@pytest.mark.usefixtures("with_states")
def test_unknown_types_of_layers_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_tiny_decoder(tmp_path, "nemotron_h")
    monkeypatch.setattr(definition, "STATELESS", ("mlp",))
    with pytest.raises(CheckpointError, match="'nemotron_h' keeps state in a way"):
        open_checkpoint(folder)


@pytest.mark.parametrize("kind", sorted(STATEFUL))
def test_the_service_refuses_states_as_long_as_its_engine_has_none(
    tmp_path: Path, kind: str
) -> None:
    folder = make_tiny_decoder(tmp_path, kind)
    with pytest.raises(CheckpointError, match="keeps state beside KV cache"):
        open_checkpoint(folder)
