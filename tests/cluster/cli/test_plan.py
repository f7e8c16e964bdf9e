"""`tandem plan memory`: its figures for known shapes, what it refuses, and what it imports."""

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import Qwen3_5TextConfig
from typer.testing import CliRunner

from tandem.cluster.cli.main import app
from tandem.cluster.cli.memory import GIB, Budget, describe_fit, rank_memory
from tandem.cluster.store.store import get_model
from tandem.proto.errors import InvalidArgument
from tandem.tests.bench.engine.shapes import SHAPES
from tandem.tests.peers import IDENTITY
from tandem.tests.tiny import make_tiny_model
from tandem.tests.tiny_decoders import make_tiny_decoder
from tandem.tests.tiny_quantized import FORMATS, make_quantized_model
from tandem.workers.kv_cache.layout import KvLayout, LayerGeometry
from tandem.workers.kv_cache.memory import plan_memory
from tandem.workers.model.config import Fields, ModelConfig
from tandem.workers.model.footprint import sequence_memory
from tandem.workers.model.kernels.c import cpu
from tandem.workers.model.loader import check_checkpoint
from tandem.workers.model.registry import parse_model_config
from tandem.workers.tp.rank import RankConfig, load_rank

PAGE = Path(__file__).parents[3] / "docs" / "operations" / "pools.md"
LLAMA = SHAPES["llama-3-8b"]  # 32 query heads, 8 KV heads, 32 layers, heads of 128


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(
        tmp_path_factory.mktemp("tiny"), num_attention_heads=4, num_key_value_heads=2
    )


def plan(*args: str) -> list[list[str]]:
    """The cells of the table's rows, then the lines below it as rows of one."""
    result = CliRunner().invoke(app, ["plan", "memory", *args])
    assert result.exception is None, result.output
    lines = result.output.splitlines()[1:]
    table = [
        [cell.strip() for cell in line.strip("│").split("│")]
        for line in lines
        if line.startswith("│")
    ]
    return table + [[line] for line in lines if line[0] not in "┏┃┡│└"]


def test_llama_3_8b() -> None:
    """By hand: 8.03 billion weights; 32 layers x 8 KV heads x 128 x keys and values x 2 bytes are
    128 KiB a token.
    """
    whole = rank_memory(LLAMA, 1, "bfloat16")
    assert (whole.weights, whole.kv_per_token, whole.num_copies) == (
        2 * 8_030_261_248,
        128 * 1024,
        1,
    )
    eighth = rank_memory(LLAMA, 8, "bfloat16")
    norms = 65 * 4096
    assert eighth.weights == 2 * ((8_030_261_248 - norms) // 8 + norms)
    assert (eighth.kv_per_token, eighth.num_copies) == (16 * 1024, 1)


@pytest.mark.parametrize(("tp", "kv_per_token", "copies"), [(16, 16 * 1024, 2), (32, 16 * 1024, 4)])
def test_more_ranks_than_kv_heads_copy_the_cache(tp: int, kv_per_token: int, copies: int) -> None:
    plan = rank_memory(LLAMA, tp, "bfloat16")
    assert (plan.kv_per_token, plan.num_copies) == (kv_per_token, copies)


@pytest.mark.parametrize("cache_dtype", ["int8", "fp8"])
def test_a_quantized_cache_has_a_scale_for_each_head(cache_dtype: str) -> None:
    """By hand: 32 layers x 8 KV heads x keys and values x (128 + 2) bytes."""
    assert rank_memory(LLAMA, 1, "bfloat16", cache_dtype).kv_per_token == 32 * 8 * 2 * 130


def test_a_draft_model_is_whole_on_rank_0() -> None:
    """Its weights and its KV cache come on top of a rank's, not of each rank's."""
    whole = rank_memory(LLAMA, 1, "bfloat16", "int8")
    drafting = rank_memory(LLAMA, 4, "bfloat16", "int8", draft=LLAMA)
    alone = rank_memory(LLAMA, 4, "bfloat16", "int8")
    assert drafting.weights == alone.weights + whole.weights
    assert drafting.kv_per_token == alone.kv_per_token + 128 * 1024  # not in int8
    assert drafting.kv_on_all_ranks == whole.kv_on_all_ranks + 128 * 1024
    assert drafting.num_copies == 1


def test_the_draft_model_is_counted_where_memory_is_shown(model: Path) -> None:
    args = [str(model), "--dtype", "float32", "--gpu-memory-gb", "0.002", "--utilization", "0.8"]
    ((tp, weights, *_, tokens, _),) = plan(*args, "--tp", "1", "--draft-model", str(model))
    # 1,717,986 bytes less twice 509,184 of weights are 42 blocks of 16 tokens of twice 512 bytes.
    assert (tp, weights, tokens) == ("1", "1.0 MiB", "672")


def test_only_whole_blocks_and_whole_sequences_count() -> None:
    plan = rank_memory(LLAMA, 1, "bfloat16")
    rest = 10 * 16 * plan.kv_per_token - 1  # one byte less than ten blocks
    for num_bytes, expected in ((rest, (9, 9 * 16, 3)), (-1, (0, 0, 0))):
        budget = Budget(num_bytes=plan.weights + num_bytes, block_size=16, context_tokens=33)
        fit = plan.fit(budget)
        assert fit.num_bytes == num_bytes
        assert (fit.counts.num_blocks, fit.num_tokens, fit.num_sequences) == expected


@pytest.fixture(scope="module")
def qwen3_5_9b() -> ModelConfig:
    """The shape of Qwen3.5-9B: every fourth layer has attention, the others a gated delta net."""
    config = Qwen3_5TextConfig(
        vocab_size=248_320,
        hidden_size=4096,
        intermediate_size=12_288,
        num_hidden_layers=32,
        num_attention_heads=16,
        num_key_value_heads=4,
        head_dim=256,
        linear_num_key_heads=16,
        linear_num_value_heads=32,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        linear_conv_kernel_dim=4,
    )
    named = {"architectures": ["Qwen3_5ForCausalLM"], "dtype": "bfloat16"}
    return parse_model_config(Fields("config.json", config.to_dict() | named))


def test_qwen3_5_9b_takes_a_quarter_of_what_full_layers_would_take(
    qwen3_5_9b: ModelConfig,
) -> None:
    """By hand: 8 layers of 4 KV heads of 256 keep 32 KiB of a token. 24 layers keep a float32
    matrix of 128 x 128 for each of 32 value heads, and three inputs of 8,192 channels in bfloat16.
    """
    plan = rank_memory(qwen3_5_9b, 1, "bfloat16")
    state = 24 * (32 * 128 * 128 * 4 + 3 * 8192 * 2)
    assert (plan.kv_per_token, plan.state_bytes) == (32 * 1024, state)
    sequence = plan.sequence(16, 32_768)
    assert (sequence.num_blocks, sequence.num_states) == ((2048,), 2)
    assert sequence.held_bytes == 32_768 * 32 * 1024 + 2 * state
    assert sequence.moved_bytes == 32_768 * 32 * 1024 + state
    if_all_were_full = 32_768 * plan.kv_per_token * 4
    assert sequence.held_bytes <= 0.28 * if_all_were_full


def test_what_4_gib_hold_of_qwen3_5_9b(qwen3_5_9b: ModelConfig) -> None:
    plan = rank_memory(qwen3_5_9b, 1, "bfloat16")
    budget = Budget(num_bytes=4 * GIB, has_weights=False, block_size=16, context_tokens=32_768)
    fit = plan.fit(budget)
    assert (fit.counts.num_states, fit.state_sequences) == (41, 20)
    num_blocks = (4 * GIB - 41 * plan.state_bytes) // (16 * plan.kv_per_token)
    assert (fit.counts.num_blocks, fit.block_sequences) == (num_blocks, num_blocks // 2048)
    assert (fit.num_sequences, fit.num_tokens) == (2, 2 * 32_768)
    assert describe_fit(plan, budget) == (
        f"4.00 GiB of KV cache are 41 states, for 20 sequences or 13 of a prefill worker, and "
        f"{num_blocks:,} blocks, for 2 sequences of 32,768 tokens"
    )
    short = plan.fit(replace(budget, context_tokens=1024))
    assert short.num_sequences == 20 < short.block_sequences
    few = plan.fit(replace(budget, state_slots=6))
    assert (few.counts.num_states, few.state_sequences) == (6, 3)
    assert plan.fit(replace(budget, max_sequences=2)).counts.num_states == 4 * 2
    assert "below" in plan.fit(replace(budget, state_slots=100)).problem


@pytest.mark.parametrize("kind", ["qwen3_5_text", "mamba2", "falcon_h1", "lfm2"])
@pytest.mark.parametrize("slots", [None, 7])
def test_the_states_that_are_shown_are_those_of_a_rank(
    tmp_path: Path, kind: str, slots: int | None
) -> None:
    folder = make_tiny_decoder(tmp_path, kind)
    gigabytes = 0.002
    args = [str(folder), "--tp", "1", "--kv-cache-gb", str(gigabytes), "--context-tokens", "100"]
    if slots is not None:
        args += ["--state-slots", str(slots)]
    (*_, shown_state, _, _, sequences), (of_sequence,), (of_cache,) = plan(*args)
    found = re.fullmatch(
        r"tp 1: 2\.0 MiB of KV cache are (\d+) states, for (\d+) sequences or \d+ of a prefill "
        r"worker, and ([\d,]+) blocks, for (\d+) sequences of 100 tokens",
        of_cache,
    )
    assert found
    num_states, state_sequences, num_blocks, block_sequences = (
        int(each.replace(",", "")) for each in found.groups()
    )
    rank = load_rank(
        RankConfig(
            model=str(folder),
            identity=IDENTITY,
            kv_cache_bytes=int(gigabytes * GIB),
            state_slots=slots,
        )
    )
    assert (rank.num_states, rank.num_blocks) == (num_states, num_blocks)
    assert num_states == (slots or num_states)
    kv: Any = rank.kv
    assert f"{kv.states.slot_bytes:,} B" == shown_state
    assert int(sequences) == min(state_sequences, block_sequences)
    assert state_sequences == num_states // 2
    assert kv.memory.nbytes + kv.states.slots.nbytes <= int(gigabytes * GIB)
    held = 7 * kv.block_bytes + 2 * kv.states.slot_bytes
    assert f"7 blocks of 16 tokens and 2 states, {held / 2**20:,.1f} MiB; moves " in of_sequence


def test_states_that_leave_no_block_are_named(tmp_path: Path) -> None:
    folder = make_tiny_decoder(tmp_path, "lfm2")
    args = [str(folder), "--kv-cache-gb", "0.001", "--state-slots", "4000"]
    (*_, tokens, sequences), (line,) = plan(*args)
    assert (tokens, sequences) == ("0", "0")
    assert re.fullmatch(
        r"tp 1: kv_cache_gb: .* are below .*, the size of 4000 states and a block; raise it or "
        r"lower state_slots",
        line,
    )


def test_a_model_without_attention_has_no_kv_cache_of_tokens(tmp_path: Path) -> None:
    folder = make_tiny_decoder(tmp_path, "mamba2")
    ((tp, _, *kv, copies, _),) = plan(str(folder))
    assert (tp, kv, copies) == ("1", ["0 B", "0 B"], "-")


def test_a_gpu_runs_no_model_that_keeps_states(tmp_path: Path) -> None:
    folder = make_tiny_decoder(tmp_path, "lfm2")
    result = CliRunner().invoke(app, ["plan", "memory", str(folder), "--device", "cuda"])
    assert isinstance(result.exception, InvalidArgument)
    assert result.exception.message == (
        "--device: cuda: models that keep states run on cpu only; Lfm2ForCausalLM keeps states"
    )


def windowed(num_full: int, num_windowed: int, window: int, kv_heads: int, dim: int) -> KvLayout:
    full = LayerGeometry(num_heads=8 * kv_heads, num_kv_heads=kv_heads, head_dim=dim)
    layers = (full,) * num_full + (replace(full, window=window),) * num_windowed
    return KvLayout(layers=layers, dtype="bfloat16", model="m")


@pytest.mark.parametrize(
    ("layout", "blocks", "most"),
    [
        pytest.param(windowed(5, 29, 1024, 4, 256), (342, 66), 0.19, id="Gemma 3 4B"),
        pytest.param(windowed(12, 12, 128, 8, 64), (2048, 9), 0.52, id="gpt-oss-20b"),
    ],
)
def test_a_long_sequence_of_a_model_with_windows(
    layout: KvLayout, blocks: tuple[int, ...], most: float
) -> None:
    found = sequence_memory(layout, 1, block_size=16, num_tokens=32_768)
    assert found.num_blocks == blocks
    before = 32_768 * layout.bytes_per_token
    assert found.unwindowed_bytes == before
    assert found.held_bytes <= most * before
    assert found.moved_bytes <= most * before
    memory = plan_memory(layout, num_blocks=sum(blocks), block_size=16, tp=1, rank=0)
    assert found.held_bytes == memory.num_bytes


def test_a_sequence_of_a_model_with_windows_is_described(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path, "gemma2")
    *_, (line,) = plan(str(folder), "--tp", "1", "--context-tokens", "640")
    assert re.fullmatch(
        r"tp 1: a sequence of 640 tokens holds \d+ blocks of \d+ tokens and \d+ blocks of \d+ "
        r"tokens \(window \d+\), 0\.\d MiB; moves 0\.\d MiB; without windows \d\.\d MiB",
        line,
    )


def test_without_tp_every_usual_one_that_divides_is_shown(model: Path) -> None:
    rows = plan(str(model), "--dtype", "float32")
    assert [(row[0], row[2:]) for row in rows] == [
        ("1", ["512 B", "512 B", "1"]),
        ("2", ["256 B", "512 B", "1"]),
        ("4", ["256 B", "1,024 B", "2"]),
    ]


def test_what_fits_is_shown_for_a_memory(model: Path) -> None:
    args = [str(model), "--dtype", "float32", "--gpu-memory-gb", "0.002", "--utilization", "0.5"]
    (tp, weights, *_, rest, tokens, sequences), (line,) = plan(
        *args, "--tp", "1", "--context-tokens", "100"
    )
    assert line == (
        "tp 1: a sequence of 100 tokens holds 7 blocks of 16 tokens, 0.1 MiB; moves 0.0 MiB"
    )
    # 1,073,741 bytes less 509,184 of weights are 68 blocks of 16 tokens of 512 bytes; a sequence of
    # 100 tokens takes 7.
    assert (tp, weights, rest, tokens, sequences) == ("1", "0.5 MiB", "0.5 MiB", "1,088", "9")


def test_for_a_gpu_quantized_weights_count_as_converted(tmp_path: Path) -> None:
    config = check_checkpoint(make_quantized_model(tmp_path, FORMATS["FP8 groups"])[0])
    plain = check_checkpoint(tmp_path / "plain")
    on_gpu, of_plain = (
        rank_memory(each, 1, "bfloat16", device="cuda").weights for each in (config, plain)
    )
    assert on_gpu == of_plain
    if cpu.can_multiply_fp8(64, 64):
        assert rank_memory(config, 1, "bfloat16").weights < on_gpu


@pytest.mark.parametrize("form", ["FP8 channels", "W4A16 32"])
def test_with_exact_numerics_a_gpu_converts_all_weights(tmp_path: Path, form: str) -> None:
    """But for those of the draft model, which needs no exact numerics."""
    folder, plain = make_quantized_model(tmp_path, FORMATS[form])
    args = ["--device", "cuda", "--tp", "1", "--gpu-memory-gb", "1"]
    exact, fast, of_plain = (
        plan(str(path), *args, "--numerics", numerics)
        for path, numerics in ((folder, "exact"), (folder, "fast"), (plain, "fast"))
    )
    assert exact == of_plain != fast
    config = check_checkpoint(folder)
    alone, drafting = (
        rank_memory(config, 1, "bfloat16", draft=draft, device="cuda", numerics="exact").weights
        for draft in (None, config)
    )
    assert drafting - alone == rank_memory(config, 1, "bfloat16", device="cuda").weights


def test_weights_that_do_not_fit_are_named(model: Path) -> None:
    args = [str(model), "--dtype", "float32", "--gpu-memory-gb", "0.001", "--utilization", "0.3"]
    *rows, (line,) = plan(*args, "--tp", "1", "--tp", "4")
    assert [(row[0], row[5] == "-", row[6] == "0") for row in rows] == [
        ("1", True, True),
        ("4", False, False),
    ]
    assert line == "tp 1: the weights alone, 0.5 MiB, do not fit 0.3 MiB"


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--tp", "3"], "--tp: 3 does not divide the model's 4 query heads"),
        (["--tp", "0"], "--tp: 0 is less than 1"),
        (["--dtype", "int8"], "--dtype: must be one of float32, bfloat16, float16, got 'int8'"),
        (
            ["--kv-cache-dtype", "int3"],
            "--kv-cache-dtype: must be one of auto, int8, fp8, int4, got 'int3'",
        ),
        (
            ["--device", "cuda", "--kv-cache-dtype", "int4"],
            "--kv-cache-dtype: int4 has kernels on cpu only, those of GPUs read a byte for each "
            "number; use int8, fp8 or auto",
        ),
        (["--gpu-memory-gb", "nan"], "--gpu-memory-gb: must be from 0.001 to 4096, got nan"),
        (
            ["--gpu-memory-utilization", "1.1"],
            "--gpu-memory-utilization: must be from 0.01 to 1, got 1.1",
        ),
        (["--num-gpus", "2"], "--num-gpus: must be from 0.01 to 1, got 2.0"),
        (["--block-size", "0"], "--block-size: must be from 1 to 1024, got 0"),
        (["--context-tokens", "1"], "--context-tokens: must be from 2 to 1048576, got 1"),
        (
            ["--device", "cuda", "--quantization", "int8"],
            "quantization: int8 has kernels on cpu only; on cuda use fp8 or int4, or serve a "
            "checkpoint with quantized weights",
        ),
        (
            ["--device", "cuda", "--quantization", "int4", "--numerics", "exact"],
            "quantization: int4 on cuda needs numerics: fast; its sums depend on the batch",
        ),
        (["--kv-cache-gb", "0"], "--kv-cache-gb: must be from 0.001 to 4096, got 0.0"),
        (
            ["--kv-cache-gb", "1", "--gpu-memory-gb", "1"],
            "--kv-cache-gb: cannot be set together with --gpu-memory-gb",
        ),
        (["--state-slots", "1"], "--state-slots: must be from 2 to 1048576, got 1"),
        (["--max-sequences", "0"], "--max-sequences: must be from 1 to 65536, got 0"),
        (["--numerics", "good"], "--numerics: must be one of exact, fast, got 'good'"),
        (["--device", "tpu"], "device: must be 'cpu' or 'cuda', got 'tpu'"),
        (["--draft-model", "/none"], "--draft-model: there is no folder /none"),
    ],
)
def test_bad_options_are_named(model: Path, args: list[str], message: str) -> None:
    result = CliRunner().invoke(app, ["plan", "memory", str(model), *args])
    assert isinstance(result.exception, InvalidArgument)
    assert result.exception.message == message


def test_the_page_shows_what_the_command_prints() -> None:
    section = PAGE.read_text().partition("\n## Choosing tp for each pool\n")[2]
    command, *shown = section.split("```")[1].strip().splitlines()
    assert command.startswith("$ tandem plan memory ")
    get_model(command.split()[4])  # first, so that the command tells nothing of fetching it
    said = CliRunner().invoke(app, command.split()[2:]).output.splitlines()
    assert [line.rstrip() for line in said] == shown


@pytest.mark.parametrize(
    ("arguments", "loaded"), [(["plan", "memory", "MODEL"], {"torch"}), (["--help"], set())]
)
def test_it_loads_no_more_than_it_needs(
    model: Path, arguments: list[str], loaded: set[str]
) -> None:
    arguments = [str(model) if each == "MODEL" else each for each in arguments]
    code = (
        "import sys; from tandem.cluster.cli.main import app; "
        f"app({arguments!r}, standalone_mode=False); "
        "sys.exit(' '.join({'ray', 'torch', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert set(done.stderr.split()) == loaded
