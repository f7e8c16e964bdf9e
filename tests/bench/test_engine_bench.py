import itertools
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from tandem.tests.bench.engine import __main__, identity, options, report, steps
from tandem.tests.bench.engine.compare import adapter_variants
from tandem.tests.bench.engine.options import parse
from tandem.tests.bench.engine.report import DecodeFigure
from tandem.tests.bench.engine.shapes import (
    HF_CONFIGS,
    SHAPES,
    cost_of,
    random_weight,
)
from tandem.tests.bench.engine.steps import (
    PARTS,
    WARMUP_STEPS,
    BenchRunner,
    blocks_for,
    states_for,
)
from tandem.tests.bench.engine.transformers_peer import TransformersPeer
from tandem.tests.tiny import make_tiny_model
from tandem.tests.workers.model.helpers import Driver
from tandem.workers.kv_cache.layout import KvLayout
from tandem.workers.model.config import Fields
from tandem.workers.model.costs.measure import Floors
from tandem.workers.model.kv.store import PagedKv
from tandem.workers.model.loader import build_model, load_weights, open_checkpoint
from tandem.workers.model.module import WeightSlice
from tandem.workers.model.registry import parse_model_config
from tandem.workers.model.runner import ModelRunner

CPU = torch.device("cpu")
TINY = SHAPES["tiny"]
ARGUMENTS = ["--shape", "tiny", "--random-weights", "--threads", "1", "--context", "40"]


@pytest.fixture(autouse=True)
def threads_as_before() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def known_floors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replaces the measurement of floors, which takes a second."""
    floors = Floors(read_bytes_per_s=2e10, copy_bytes_per_s=1e10, matmul_flops_per_s=1e11)
    monkeypatch.setattr(__main__, "measure_floors", lambda *_: floors)


def make_runner(
    *, shape: str = "tiny", num_blocks: int = 128, chunk: int = 32, batch: int = 1
) -> BenchRunner:
    config = SHAPES[shape]
    return BenchRunner(
        config,
        random_weight,
        dtype="float32",
        device=CPU,
        num_blocks=num_blocks,
        chunk=chunk,
        exact=False,
        num_states=states_for(config, batch),
    )


def outcome(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """Returns the exit status and the text on stderr."""
    try:
        status = __main__.main(arguments)
    except SystemExit as stop:
        status = int(stop.code or 0)
    return status, capsys.readouterr().err


def test_a_run_reports_every_figure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "figures.json"
    wanted = [
        "--batches",
        "4,1",
        "--prompts",
        "40,600",
        "--profile",
        "--transformers",
        "--json",
        str(file),
    ]
    assert __main__.main(ARGUMENTS + wanted) == 0
    figures: dict[str, Any] = json.loads(file.read_text())
    assert (figures["shape"], figures["dtype"], figures["device"], figures["threads"]) == (
        "tiny",
        "bfloat16",
        "cpu",
        1,
    )
    assert all(value > 1e6 for value in figures["floors"].values())
    assert [figure["batch"] for figure in figures["decode"]] == [1, 4, 32]  # --profile adds 32
    for figure in figures["decode"]:
        assert 0 < figure["step_ms"] <= figure["p90_ms"]
        assert figure["tokens_per_s"] == pytest.approx(1e3 * figure["batch"] / figure["step_ms"])
        assert figure["roofline_share"] == pytest.approx(figure["floor_ms"] / figure["step_ms"])
        assert figure["roofline_share"] == max(figure["bandwidth_share"], figure["matmul_share"])
        assert 0 < figure["roofline_share"] <= 1.5
        assert set(figure["split_ms"]) == set(PARTS)
        assert min(figure["split_ms"].values()) > 0
        assert 0 < figure["overhead_share"] < 1
        assert figure["transformers_ms"] > 0
    assert [figure["prompt"] for figure in figures["prefill"]] == [40, 600]
    for figure in figures["prefill"]:
        assert figure["tokens_per_s"] == pytest.approx(figure["prompt"] / figure["seconds"])
        assert 0 < figure["matmul_share"] <= 1.5
        assert figure["transformers_tokens_per_s"] > 0
    tables = capsys.readouterr().out
    assert all(
        word in tables for word in ("floors:", "roofline", "outside the model", "ahead by", *PARTS)
    )


@pytest.mark.usefixtures("known_floors")
@pytest.mark.parametrize(
    ("compared", "names"),
    [
        (["--compare", "fp8-kv-cache"], ["fp8-kv-cache"]),
        (["--compare", "fp8-weights"], ["fp8-weights"]),
        (["--compare", "model-impl"], ["model-impl"]),
        (["--compare", "adapter", "--lora-rank", "4"], ["unused", "adapter"]),
    ],
)
def test_what_is_compared_takes_turns(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, compared: list[str], names: list[str]
) -> None:
    file = tmp_path / "figures.json"
    arguments = [
        *ARGUMENTS,
        "--batches",
        "1,3",
        "--prompts",
        "20",
        "--steps",
        "20",
        "--json",
        str(file),
    ]
    assert __main__.main(arguments + compared) == 0
    figures = json.loads(file.read_text())
    for figure in figures["decode"] + figures["prefill"]:
        assert list(figure["compared"]) == names
        assert all(ratio > 0 for ratio in figure["compared"].values())
    said = capsys.readouterr()
    assert all(f"time: {name}" in said.out for name in names)
    assert "plain: tandem.workers.model.models.llama.LlamaForCausalLM\n" in said.err
    assert ("model-impl: transformers.models.llama.modeling_llama.LlamaModel\n" in said.err) == (
        "model-impl" in compared
    )


def test_an_adapter_is_compared_used_and_unused() -> None:
    runner = make_runner()
    seen = []
    for name, prepare in adapter_variants(TINY, runner, 4).items():
        table = prepare().runner.adapters
        seen.append((name, sorted(table._loaded), runner.adapter))
    assert seen == [("plain", [], 0), ("unused", [1], 0), ("adapter", [2], 2)]


def test_the_engine_gives_the_tokens_of_the_runner_alone() -> None:
    runner = make_runner()
    model = build_model(TINY, torch.float32)
    load_weights(model, random_weight, CPU)
    kv = PagedKv(
        KvLayout(layers=TINY.layers, dtype="float32", model=""),
        num_blocks=128,
        block_size=16,
        device=CPU,
    )
    alone = ModelRunner(TINY, model, kv)
    expected = Driver(alone).generate(0, runner.prompt(100, 0), 1)
    assert runner.prefill(100)[1] == expected[0]


def test_a_decode_takes_the_same_tokens_from_the_same_cache_only() -> None:
    runner = make_runner()
    run = runner.decode(3, 40, 20)
    tokens = list(itertools.chain.from_iterable(run.sampled))
    assert len(run.steps) == 20
    assert len(tokens) == 3 * (WARMUP_STEPS + 20)
    assert len(set(tokens)) > 10
    assert runner.decode(3, 40, 20).sampled == run.sampled  # the first run has left nothing behind
    for layer in range(len(TINY.layers)):
        for part in runner.runner.kv.layers[layer]:
            part.zero_()
    assert runner.decode(3, 40, 20).sampled != run.sampled


def test_each_part_of_a_step_is_between_its_own_marks(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = make_runner()
    ticks = itertools.count()
    # the differences are odd numbers
    squares = SimpleNamespace(perf_counter=lambda: float(next(ticks) ** 2))
    monkeypatch.setattr(steps, "time", squares)
    first = runner.decode(1, 16, 20).steps[0]
    parts = [first[part] for part in PARTS]
    assert [after - before for before, after in itertools.pairwise(parts)] == [2.0] * 4


def test_blocks_for_is_what_a_decode_takes() -> None:
    enough = blocks_for(3, 40, 20)
    make_runner(num_blocks=enough).decode(3, 40, 20)
    short = make_runner(num_blocks=enough - 3)
    with pytest.raises(RuntimeError, match="commit while waiting"):
        short.decode(3, 40, 20)


def test_blocks_for_is_enough_for_a_model_with_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    config = SHAPES["tiny"]
    windowed = tuple(replace(layer, window=24) for layer in config.layers[1:])
    monkeypatch.setitem(
        SHAPES, "tiny-window", replace(config, layers=(config.layers[0], *windowed))
    )
    tables = make_runner(shape="tiny-window").runner.kv.tables
    assert len(tables) == 2
    enough = blocks_for(3, 40, 20, tables)
    assert enough > blocks_for(3, 40, 20)
    run = make_runner(shape="tiny-window", num_blocks=enough).decode(3, 40, 20)
    assert len(run.sampled) == WARMUP_STEPS + 20


def test_a_model_with_states_decodes_what_its_states_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {
        "hidden_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "full_attn_idxs": [1],
        "vocab_size": 512,
    }
    fields = dict(HF_CONFIGS["lfm2-350m"]) | sizes
    monkeypatch.setitem(SHAPES, "tiny-hybrid", parse_model_config(Fields("tiny-hybrid", fields)))
    runner = make_runner(shape="tiny-hybrid", batch=3)
    states = runner.runner.kv.states
    assert states is not None
    states.slots.zero_()
    run = runner.decode(3, 40, 20)
    assert [len(tokens) for tokens in run.sampled] == [3] * (WARMUP_STEPS + 20)
    assert states.slots.any()
    config = SHAPES["tiny-hybrid"]
    one, two = (cost_of(config, "float32").decode(0, batch)[0] for batch in (1, 2))
    assert two - one == 2 * 2 * (2 * 64 * 4)  # two layers of 64 channels and 2 inputs, both ways


def test_costs_are_those_of_the_known_model() -> None:
    config = SHAPES["llama-3-8b"]
    # without the embedding's rows and the norms
    params = 8_030_261_248 - 128_256 * 4096 - 65 * 4096
    cost = cost_of(config, "bfloat16").decode(1000, 2)
    assert cost[0] == 2 * params + 2 * 1000 * 131_072
    assert cost[1] == 2 * (2 * params + 32 * 4 * 4096 * 1000)
    head = 128_256 * 4096
    assert cost_of(config, "bfloat16").prefill(3).flops == 6 * (
        params - head
    ) + 2 * head + 32 * 4 * 4096 * (1 + 2 + 3)
    narrow = replace(config, layers=tuple(replace(layer, window=2) for layer in config.layers))
    assert cost_of(narrow, "bfloat16").prefill(3).flops == 6 * (
        params - head
    ) + 2 * head + 32 * 4 * 4096 * (1 + 2 + 2)
    assert cost_of(narrow, "bfloat16").decode(1000, 1)[0] == 2 * params + 2 * 131_072


def test_only_chosen_experts_are_counted() -> None:
    config = SHAPES["qwen3-30b-a3b"]
    attention = 2048 * 128 * (32 + 4 + 4 + 32)
    expert = 3 * 2048 * 768
    dense = 48 * (attention + 128 * 2048) + 151_936 * 2048
    one, many = (cost_of(config, "bfloat16").decode(0, batch) for batch in (1, 10**4))
    assert one == (2 * (dense + 48 * 8 * expert), 2 * (dense + 48 * 8 * expert))
    assert many == (2 * (dense + 48 * 128 * expert), 10**4 * one[1])
    assert cost_of(config, "bfloat16").prefill(1).flops == one[1] + 48 * 4 * 32 * 128


def test_the_floor_is_the_slower_of_memory_and_products() -> None:
    floors = Floors(read_bytes_per_s=1e9, copy_bytes_per_s=2e9, matmul_flops_per_s=1e12)
    small, large = (
        cost_of(TINY, "float32").decode(64, 1),
        cost_of(TINY, "float32").decode(64, 10**6),
    )
    assert floors.seconds(small) == small[0] / 2e9
    slow = replace(floors, matmul_flops_per_s=1.0)
    assert slow.seconds(large) == large[1]


def test_a_shape_with_long_contexts_takes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(__main__, "_free_bytes", lambda _: 10**12)
    parsed = parse(
        ["--shape", "llama-3-8b", "--random-weights", "--context", "8192", "--batches", "32"]
    )
    assert __main__._check(parsed, SHAPES["llama-3-8b"]) == blocks_for(32, 8192, parsed.steps)


def test_random_weights_depend_on_the_name_alone() -> None:
    name, shape = "model.layers.0.mlp.up_proj.weight", (96, 64)

    def weight(name: str, *slices: slice) -> torch.Tensor:
        part = WeightSlice(name, shape, slices)
        target = torch.empty(part.local_shape, dtype=torch.bfloat16)
        random_weight(part, target)
        return target

    first = weight(name)
    weight("lm_head.weight")
    assert torch.equal(weight(name), first)
    assert torch.equal(weight(name, slice(3, 9)), first[3:9])
    assert not torch.equal(weight(name.replace("up", "gate")), first)


@pytest.mark.parametrize("shape", ["tiny", "qwen3-8b", "mistral-7b"])
def test_transformers_runs_the_same_model(shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    own = ("architectures", "model_type", "rms_norm_eps", "max_position_embeddings")
    fields = dict(HF_CONFIGS["tiny"]) | {name: HF_CONFIGS[shape][name] for name in own}
    monkeypatch.setitem(SHAPES, shape, parse_model_config(Fields(shape, fields)))
    runner = make_runner(shape=shape)
    config = AutoConfig.for_model(**fields)
    peer = TransformersPeer(config, random_weight, dtype=torch.float32, device=CPU)
    with torch.inference_mode():
        logits = peer._model(torch.tensor([runner.prompt(100, 0)])).logits
    assert int(logits[0, -1].argmax()) == runner.prefill(100)[1]
    assert peer.prefill_seconds(20) > 0


def test_of_a_model_with_states_transformers_generate_is_measured() -> None:
    """Its continuous batching refuses such models."""
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "vocab_size": 512,
    }
    config = AutoConfig.for_model(**(dict(HF_CONFIGS["qwen3.5-0.8b"]) | sizes))
    peer = TransformersPeer(config, random_weight, dtype=torch.float32, device=CPU)
    assert peer.prefill_seconds(20) > 0
    assert peer.decode_seconds(2, 20, 4) > 0


@pytest.mark.usefixtures("known_floors")
def test_a_checkpoint_is_measured_with_its_weights_or_without(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "some-model")
    arguments = [
        "--model",
        str(folder),
        "--batches",
        "1",
        "--prompts",
        "90",
        "--threads",
        "1",
        "--dtype",
        "float32",
    ]
    measured = __main__.measure(parse(arguments))
    runner = ModelRunner.load(
        open_checkpoint(folder), dtype="float32", device="cpu", num_blocks=16, block_size=16
    )
    expected = Driver(runner).generate(0, make_runner().prompt(90, 0), 1)
    assert measured.shape == "some-model"
    assert [figure.first_token for figure in measured.prefill] == expected
    (folder / "model.safetensors").unlink()
    assert __main__.main([*arguments, "--random-weights"]) == 0
    assert __main__.main(arguments) == 2


RANDOM = ["--random-weights", "--shape"]
REFUSED: list[tuple[list[str], str]] = [
    ([], "one of the arguments --shape --model is required"),
    (["--shape", "tiny"], "add --random-weights"),
    ([*RANDOM, "huge"], "invalid choice: 'huge'"),
    (["--model", "/no/such/folder"], "no such folder"),
    ([*RANDOM, "tiny", "--batches", "0"], "--batches: must be an integer from 1 to 1024, is '0'"),
    ([*RANDOM, "tiny", "--batches", "1,,2"], "--batches: must be an integer from 1 to 1024, is ''"),
    ([*RANDOM, "tiny", "--steps", "19"], "--steps: must be an integer from 20"),
    ([*RANDOM, "tiny", "--prompts", "many"], "--prompts: must be an integer"),
    ([*RANDOM, "tiny", "--dtype", "int4"], "invalid choice: 'int4'"),
    ([*RANDOM, "tiny", "--compare", "adapter"], "--compare adapter needs --lora-rank"),
    (
        [*RANDOM, "tiny", "--compare", "model-impl", "--model-impl", "transformers"],
        "--compare model-impl needs --model-impl auto or tandem",
    ),
    (
        [*RANDOM, "tiny", "--compare", "int8-kv-cache", "--kv-cache-dtype", "int8"],
        "--compare int8-kv-cache needs --kv-cache-dtype auto",
    ),
    ([*RANDOM, "tiny", "--device", "tpu"], "--device: must be cpu, cuda or cuda:N, is 'tpu'"),
    (
        [*RANDOM, "tiny", "--context", "8180"],
        "--context: 8180 tokens need 8220 positions, tiny has 8192",
    ),
    (
        [*RANDOM, "tiny", "--prompts", "8193"],
        "--prompts: 8193 tokens need 8193 positions, tiny has 8192",
    ),
    (
        [*RANDOM, "tiny", "--json", "/no/such/folder/x.json"],
        "--json: /no/such/folder is not a folder",
    ),
    ([*RANDOM, "tiny", "--plot", "x.jpg"], "--plot: x.jpg must end in .png"),
]


@pytest.mark.parametrize(("arguments", "said"), REFUSED)
def test_what_cannot_run_is_refused_in_one_line(
    arguments: list[str],
    said: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(options, "find_spec", lambda _: object())
    status, error = outcome(arguments, capsys)
    assert status == 2
    assert said in error
    assert error.startswith("bench: ")
    assert error.count("\n") == 1


def test_a_shape_that_does_not_fit_is_refused_before_it_is_made(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(__main__, "_free_bytes", lambda _: 12_000_000_000)
    monkeypatch.setattr(__main__, "measure_floors", lambda *_: pytest.fail("measured"))
    status, error = outcome([*RANDOM, "llama-3-8b", "--batches", "1"], capsys)
    assert status == 2
    assert error.startswith("bench: llama-3-8b in bfloat16 needs ")
    assert error.endswith("; cpu has 12.0 GB free\n")


def test_without_matplotlib_plot_says_what_to_install(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(options, "find_spec", lambda _: None)
    status, error = outcome([*ARGUMENTS, "--plot", "x.png"], capsys)
    assert (status, error) == (
        2,
        "bench: argument --plot: matplotlib is not installed (pip install 'tandem-llm[bench]')\n",
    )


def test_without_cuda_a_cuda_device_is_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    status, error = outcome([*ARGUMENTS, "--device", "cuda:1"], capsys)
    assert (status, error) == (
        2,
        "bench: argument --device: cuda:1: torch finds no CUDA device here\n",
    )


@pytest.mark.usefixtures("known_floors")
def test_the_plot_is_a_picture_of_the_sweeps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib", reason="the bench extra is not installed")
    monkeypatch.setattr(__main__, "SWEEP_BATCHES", (1, 2))
    monkeypatch.setattr(__main__, "SWEEP_CONTEXTS", (128, 256))
    plotted: list[list[DecodeFigure]] = []
    draw = report.plot

    def record(path: Path, title: str, *sweeps: Any) -> None:
        plotted.extend(list(sweep) for sweep in sweeps)
        draw(path, title, *sweeps)

    monkeypatch.setattr(__main__, "plot", record)
    file = tmp_path / "steps.png"
    assert (
        __main__.main([*ARGUMENTS, "--batches", "1", "--prompts", "20", "--plot", str(file)]) == 0
    )
    assert file.read_bytes().startswith(b"\x89PNG")
    assert [(figure.batch, figure.context) for figure in plotted[0]] == [(1, 40), (2, 40)]
    assert [(figure.batch, figure.context) for figure in plotted[1]] == [(8, 128), (8, 256)]


def test_the_cost_of_proofs_is_stated(capsys: pytest.CaptureFixture[str]) -> None:
    assert identity.main(["--repeat", "10"]) == 0
    assert capsys.readouterr().out.count("us a call") == 4
