"""What a plan says of a rank's memory against what a loaded rank holds, and what it takes to load
one.
"""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from tandem.tests.tiny import FAMILIES, make_tiny_model
from tandem.tests.tiny_decoders import make_tiny_decoder
from tandem.tests.workers.model import helpers, load_alone
from tandem.workers.engine.block_pool import BlockState
from tandem.workers.engine.config import Budgets, EngineConfig
from tandem.workers.engine.engine import Engine
from tandem.workers.engine.events import NewTokens
from tandem.workers.engine.sequence import SequenceSpec, Task
from tandem.workers.model.footprint import (
    CacheBytes,
    kv_bytes_per_token,
    kv_layout,
    sequence_memory,
    state_tokens,
)
from tandem.workers.model.loader import (
    check_checkpoint,
    open_checkpoint,
    rank_weight_bytes,
    weight_bytes,
    weight_shapes,
)
from tandem.workers.model.module import Module, Parameter
from tandem.workers.model.registry import load_model_config

LARGE = {
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 12,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 16_384,
}


def tensors(part: object) -> Iterator[torch.Tensor]:
    """Yields every tensor that a part of the model holds, some maybe twice.

    Leaves out rotary tables, and OLMo 2's shares of heads, of a few bytes.
    """
    if isinstance(part, torch.Tensor):
        yield part
    elif isinstance(part, list):
        for each in part:
            yield from tensors(each)
    elif isinstance(part, Module | Parameter):
        yield from tensors([each for name, each in vars(part).items() if name != "_shares"])


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "overrides",
    [
        {"num_attention_heads": 8, "num_key_value_heads": 8},
        {
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "intermediate_size": 97,
            "tie_word_embeddings": True,
        },
        {
            "num_attention_heads": 12,
            "num_key_value_heads": 3,
            "hidden_size": 192,
        },  # straddling, on 2 ranks
        {
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
            "attention_bias": True,
            "mlp_bias": True,
        },
    ],
)
def test_the_plan_is_what_each_rank_holds(
    tmp_path: Path, family: str, overrides: dict[str, Any]
) -> None:
    """In float32, where no kernel packs weights into another form."""
    if family.startswith("lfm2") and "hidden_size" in overrides:
        overrides = overrides | {"hidden_size": 768}  # ranks split runs of 64 channels
    folder = make_tiny_model(tmp_path, family, **overrides)
    config = check_checkpoint(folder)
    checkpoint = open_checkpoint(folder)
    for tp in (1, 2, 4):
        most = 0
        for rank in range(tp):
            runner = load_alone.load_opened(checkpoint, "float32", rank, tp)
            held = {tensor.data_ptr(): tensor.nbytes for tensor in tensors(runner._model)}
            assert sum(held.values()) == rank_weight_bytes(config, "float32", tp, rank), (tp, rank)
            most = max(most, sum(held.values()))
            kv = runner.kv
            sizes = CacheBytes.of(kv_layout(config, "float32"), tp, block_size=kv.block_size)
            assert kv.memory.nbytes == kv.num_blocks * sizes.block
            if len(kv.tables) == 1:
                token_bytes = kv_bytes_per_token(config, tp, "float32")
                assert sizes.block == kv.block_size * token_bytes
        assert most == weight_bytes(config, tp, "float32")


def test_half_the_bytes_an_item_is_half_of_all(tmp_path: Path) -> None:
    config = check_checkpoint(make_tiny_model(tmp_path))
    assert 2 * weight_bytes(config, 2, "bfloat16") == weight_bytes(config, 2, "float32")
    assert 2 * kv_bytes_per_token(config, 4, "bfloat16") == kv_bytes_per_token(config, 4, "float32")


def test_heads_that_cannot_be_split_are_refused(tmp_path: Path) -> None:
    config = check_checkpoint(make_tiny_model(tmp_path))
    with pytest.raises(ValueError, match="tp: 3 does not divide the model's 4 query heads"):
        weight_bytes(config, 3, "float32")


@pytest.fixture(scope="module")
def large_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """169 million weights, 338 MB in bfloat16."""
    folder = make_tiny_model(tmp_path_factory.mktemp("large"))
    config = folder / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | LARGE))
    shapes = weight_shapes(load_model_config(folder))
    weights = {name: torch.ones(shape, dtype=torch.bfloat16) for name, shape in shapes.items()}
    save_file(weights, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize(("dtype", "tp"), [("float32", 2), ("bfloat16", 4)])
def test_loading_a_rank_takes_little_more_than_its_part(
    large_model: Path, tmp_path: Path, dtype: str, tp: int
) -> None:
    """All of the process's memory is counted, also pages of the file, which the kernel could
    drop.
    """
    tiny, rank = make_tiny_model(tmp_path), tp - 1
    command = [
        sys.executable,
        load_alone.__file__,
        str(tiny),
        str(large_model),
        dtype,
        str(rank),
        str(tp),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert (
        1
        <= int(done.stdout) / rank_weight_bytes(check_checkpoint(large_model), dtype, tp, rank)
        <= 1.2
    )


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt_oss"])
def test_a_running_sequence_holds_the_planned_blocks(tmp_path: Path, family: str) -> None:
    runner = helpers.load(make_tiny_model(tmp_path, family))
    config = EngineConfig(num_blocks=128, tables=runner.kv.tables, budgets=Budgets(chunk_tokens=32))
    engine = Engine(runner, config)
    engine.submit(
        SequenceSpec(
            id=1,
            task=Task.COLOCATED,
            tokens=tuple(helpers.prompt(200)),
            max_tokens=60,
            sampling=helpers.GREEDY,
        )
    )
    num_tokens = 0
    for _ in range(50):
        made = [each for each in engine.step() if isinstance(each, NewTokens)]
        if made and made[-1].first_index:  # the step had one token
            # The last token is not computed yet.
            num_tokens = 200 + made[-1].first_index + len(made[-1].token_ids) - 1
            planned = sequence_memory(runner.kv.layout, 1, block_size=16, num_tokens=num_tokens)
            assert engine.blocks()[BlockState.OWNED] == sum(planned.num_blocks), num_tokens
    assert num_tokens > 220


@pytest.mark.parametrize("kind", ["qwen3_5_text", "mamba2"])
def test_a_running_sequence_holds_the_planned_states(tmp_path: Path, kind: str) -> None:
    """Its resume points are cached, and do not count as held."""
    runner = helpers.load(make_tiny_decoder(tmp_path, kind), num_states=24)
    config = EngineConfig(
        num_blocks=128,
        num_states=24,
        state_tokens=state_tokens(runner.kv.layout, 1),
        tables=runner.kv.tables,
        budgets=Budgets(chunk_tokens=32),
    )
    engine = Engine(runner, config)
    engine.submit(
        SequenceSpec(
            id=1,
            task=Task.COLOCATED,
            tokens=tuple(helpers.prompt(100)),
            max_tokens=20,
            sampling=helpers.GREEDY,
        )
    )
    num_tokens = 0
    for _ in range(15):
        made = [each for each in engine.step() if isinstance(each, NewTokens)]
        if made and made[-1].first_index:  # the step had one token
            num_tokens = 100 + made[-1].first_index + len(made[-1].token_ids) - 1
            planned = sequence_memory(runner.kv.layout, 1, block_size=16, num_tokens=num_tokens)
            states, blocks = engine.states(), engine.blocks()
            held = states[BlockState.OWNED] + states[BlockState.RESERVED]
            assert held == planned.num_states, num_tokens
            assert blocks[BlockState.OWNED] == sum(planned.num_blocks), num_tokens
            kv = runner.kv
            assert kv.states is not None
            assert planned.held_bytes == (
                blocks[BlockState.OWNED] * kv.block_bytes + held * kv.states.slot_bytes
            )
    assert num_tokens > 105


@given(
    size=st.builds(CacheBytes, block=st.integers(1, 10_000), state=st.integers(0, 100_000)),
    num_bytes=st.integers(0, 10_000_000),
    state_slots=st.none() | st.integers(1, 100),
    max_sequences=st.integers(1, 64),
    least=st.sampled_from([2, 3]),
    host_bytes=st.integers(0, 10_000_000),
)
def test_states_and_blocks_share_a_cache(
    size: CacheBytes,
    num_bytes: int,
    state_slots: int | None,
    max_sequences: int,
    least: int,
    host_bytes: int,
) -> None:
    split = partial(
        size.split, num_bytes, state_slots=state_slots, max_sequences=max_sequences, least=least
    )
    expected = 0
    if size.state and state_slots is not None:
        expected = state_slots
    elif size.state:
        expected = max(least, min(num_bytes // 2 // size.state, 4 * max_sequences))
    problem = ""
    if size.state and expected < least:
        problem = f"state_slots: {expected} holds no sequence, which takes {least}; raise it"
    elif size.state and num_bytes < expected * size.state + size.block:
        problem = "kv_cache_gb: "
    if problem:
        with pytest.raises(ValueError, match=f"^{problem}"):
            split()
        return
    counts = split()
    assert counts.num_states == expected
    of_states = counts.num_states * size.state
    assert of_states + counts.num_blocks * size.block <= num_bytes
    # No further block would fit.
    assert of_states + (counts.num_blocks + 1) * size.block > num_bytes
    if not size.state:
        return
    host = size.split_host(host_bytes, counts)
    host_states = host.num_states * size.state
    assert host_states + host.num_blocks * size.block <= host_bytes
    # The states have their share of the bytes, less than one state below it.
    share = host_bytes * of_states / (of_states + counts.num_blocks * size.block)
    assert share - size.state - 1 <= host_states <= share + 1


def test_states_without_a_block_are_refused_with_the_sum() -> None:
    size = CacheBytes(block=1 << 20, state=50 << 20)
    problem = (
        "kv_cache_gb: 0.98 GiB are below 1.95 GiB, the size of 40 states and a block; raise it or "
        "lower state_slots"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(problem)}$"):
        size.split(1000 << 20, state_slots=40, max_sequences=64, least=2)
