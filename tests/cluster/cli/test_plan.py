"""`tandem plan memory`: its figures for known shapes, what it refuses, and what it imports."""

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tandem.cluster.cli.main import app
from tandem.cluster.cli.plan import rank_memory
from tandem.cluster.store.store import get_model
from tandem.proto.errors import InvalidArgument
from tandem.tests.bench.engine.shapes import SHAPES
from tandem.tests.tiny import make_tiny_model
from tandem.tests.tiny_quantized import FORMATS, make_quantized_model
from tandem.workers.kv_cache.layout import KvLayout, LayerGeometry
from tandem.workers.kv_cache.memory import plan_memory
from tandem.workers.model.footprint import sequence_memory
from tandem.workers.model.kernels.c import cpu
from tandem.workers.model.loader import check_checkpoint

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
    assert plan.kv_cache(plan.weights + rest, block_size=16, context_tokens=33) == (rest, 9 * 16, 3)
    assert plan.kv_cache(plan.weights - 1, block_size=16, context_tokens=33) == (-1, 0, 0)


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
        (["--dtype", "int8"], "--dtype: must be one of float32, bfloat16, float16"),
        (["--kv-cache-dtype", "int4"], "--kv-cache-dtype: must be one of auto, int8, fp8"),
        (["--gpu-memory-gb", "nan"], "--gpu-memory-gb: must be from 0.001 to 4096"),
        (
            ["--gpu-memory-utilization", "1.1"],
            "--gpu-memory-utilization: must be from 0.01 to 1",
        ),
        (["--num-gpus", "2"], "--num-gpus: must be from 0.01 to 1"),
        (["--block-size", "0"], "--block-size: must be from 1 to 1024"),
        (["--context-tokens", "1"], "--context-tokens: must be from 2 to 1048576"),
        (
            ["--device", "cuda", "--quantization", "int8"],
            "quantization: int8 has kernels on cpu only; on cuda use fp8 or int4, or serve a "
            "checkpoint with quantized weights",
        ),
        (
            ["--device", "cuda", "--quantization", "int4", "--numerics", "exact"],
            "quantization: int4 on cuda needs numerics: fast; its sums depend on the batch",
        ),
        (["--numerics", "good"], "--numerics: must be one of exact, fast"),
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
