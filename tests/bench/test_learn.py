"""Tests the figures of docs/learn.md: their arithmetic, and each command on a tiny model."""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from tandem.cluster.bench.metrics import RequestRecord
from tandem.cluster.bench.target import StreamCompletion
from tandem.cluster.bench.workload import BenchPrompt
from tandem.cluster.config import load_config
from tandem.tests.bench.engine.shapes import SHAPES, cost_of
from tandem.tests.bench.learn import batching, cost, kv_cache, plots, stalls, windows
from tandem.tests.bench.learn.__main__ import app
from tandem.tests.bench.learn.figure import LearnFigure, Panel, line_of, shown
from tandem.tests.bench.learn.local import open_engine, send_all, target_of
from tandem.tests.tiny import make_tiny_model

MAX_IMAGE_BYTES = 60_000
FLOAT = ["--dtype", "float32"]
COMMANDS = {
    "kv-cache": (["--tokens", "24", "--every", "5", *FLOAT], 2),
    "batching": (["--batches", "1,3", "--requests", "4", "--mean-tokens", "6", *FLOAT], 2),
    "prefix-cache": (["--prefixes", "0,64", "--repeat", "1", *FLOAT], 2),
    "precision": (["--tokens", "8", "--rounds", "1", "--characters", "200"], 4),
    "speculation": (["--tokens", "12", "--rounds", "1", *FLOAT], 8),
    "windows": (["--sizes", "32", "--contexts", "48,96", "--batch", "2", "--steps", "2"], 2),
    "cost": (["--price", "0.36", "--concurrencies", "1,2", "--output-len", "4", *FLOAT], 2),
}
"""Arguments of each command that needs no service, and the rows of its table."""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("tiny")
    return str(make_tiny_model(folder, hidden_size=256, head_dim=32, intermediate_size=256))


def run(tiny: str, name: str, out: Path) -> dict[str, Any]:
    """Returns the JSON that a command prints."""
    arguments, _ = COMMANDS[name]
    result = CliRunner().invoke(
        app, [name, "--model", tiny, "--out", str(out), "--json", *arguments]
    )
    assert result.exit_code == 0, result.exception
    found: dict[str, Any] = json.loads(result.stdout)
    return found


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_prints_its_table_and_draws_its_plot(
    tiny: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[LearnFigure] = []
    monkeypatch.setattr(
        "tandem.tests.bench.learn.__main__.draw", lambda figure, path: drawn.append(figure)
    )
    monkeypatch.setattr("tandem.tests.bench.learn.__main__.find_spec", lambda name: object())
    found = run(tiny, name, tmp_path)
    assert found["name"] == name
    assert len(found["rows"]) == COMMANDS[name][1]
    assert all(len(row) == len(found["heads"]) for row in found["rows"])
    assert all(series["y"] for series in found["panels"][0]["series"])
    assert [figure.name for figure in drawn] == [name]
    if check := CHECKS.get(name):
        check(found)


def check_kv_cache(found: dict[str, Any]) -> None:
    assert "6 of 6 are the same tokens" in found["notes"][-1]


def check_prefix_cache(found: dict[str, Any]) -> None:
    assert [row[1] for row in found["rows"]] == [0, 64]


def check_precision(found: dict[str, Any]) -> None:
    sizes = [row[1] for row in found["rows"]]
    assert sizes == sorted(sizes, reverse=True)


def check_speculation(found: dict[str, Any]) -> None:
    assert found["notes"][-1] == "Every draft gave the tokens of plain decoding."


def check_cost(found: dict[str, Any]) -> None:
    for _, rate, _, price, _ in found["rows"]:
        assert price * rate == pytest.approx(100)


CHECKS = {
    "kv-cache": check_kv_cache,
    "prefix-cache": check_prefix_cache,
    "precision": check_precision,
    "speculation": check_speculation,
    "cost": check_cost,
}


def test_stalls_are_measured_on_each_service(tiny: str) -> None:
    pools = []

    @asynccontextmanager
    async def open_service(config: Mapping[str, object]) -> AsyncIterator[StreamCompletion]:
        pools.append(config)
        async with open_engine(tiny, dtype="float32", max_sequences=4, kv_cache_gb=0.01) as engine:
            yield target_of(engine)

    found = stalls.measure(
        tiny,
        dtype="float32",
        num_streams=2,
        long_tokens=100,
        seconds=0.2,
        open_service=open_service,
    )
    assert [row[0] for row in found.rows] == list(stalls.services(100))
    for _, _, middle, p99, longest, rate, ttft, num_long in found.rows:
        assert 0 < float(middle or 0) <= float(p99 or 0) <= float(longest or 0)
        assert float(rate or 0) > 0
        assert float(ttft or 0) > 0
        assert int(num_long or 0) >= 1
    assert len({json.dumps(each) for each in pools}) == 3


@pytest.mark.parametrize("name", stalls.services(100))
def test_the_services_have_valid_configurations(name: str, tmp_path: Path) -> None:
    file = tmp_path / "service.yaml"
    file.write_text(yaml.safe_dump({"model": "m", **stalls.services(100)[name]}))
    config = load_config(file)
    assert config.prefill.replicas == (1 if "separate" in name else 0)
    assert (config.decode.mixed_step_factor is None) == (name == "whole prompts")


def test_a_gap_counts_if_it_begins_before_the_end() -> None:
    record = RequestRecord(
        started=0, ended=4, chunk_times=[1, 2, 4], prompt_tokens=1, output_tokens=6
    )
    assert stalls.gaps_until([record], 2) == [1]
    assert stalls.gaps_until([record], 2.5) == [1, 2]
    assert stalls.tokens_until(record, 2.5) == 4


def test_a_million_tokens_cost_their_share_of_the_hour() -> None:
    # 100 tokens/s take 10,000 s for a million: 10,000 / 3,600 hours at 0.36 each.
    assert cost.cost_per_million(0.36, 100) == pytest.approx(1)
    with pytest.raises(ValueError, match="no tokens"):
        cost.cost_per_million(0.36, 0)


class FakeServer:
    """Answers each request after as many turns of the event loop as it has tokens."""

    def __init__(self) -> None:
        self.log: list[str] = []

    async def __call__(self, prompt: BenchPrompt, chunk_times: list[float]) -> tuple[int, int]:
        self.log.append(f"begin {prompt.prompt}")
        for number in range(prompt.max_tokens):
            await asyncio.sleep(0)
            chunk_times.append(float(number))
        self.log.append(f"end {prompt.prompt}")
        return 1, prompt.max_tokens


def test_a_static_batch_waits_for_its_longest_request() -> None:
    lengths = {"a": 50, "b": 3, "c": 3, "d": 3}
    prompts = [
        BenchPrompt(prompt=name, max_tokens=num_tokens) for name, num_tokens in lengths.items()
    ]
    static, continuous = FakeServer(), FakeServer()
    asyncio.run(batching.send_static(static, prompts, 2))
    asyncio.run(send_all(continuous, prompts, 2))
    assert static.log.index("end a") < static.log.index("begin c")
    assert continuous.log.index("begin d") < continuous.log.index("end a")


def test_waits_count_from_the_first_request() -> None:
    records = [
        RequestRecord(started=0, ended=2, chunk_times=[1, 2], prompt_tokens=1, output_tokens=2),
        RequestRecord(started=2, ended=4, chunk_times=[3, 4], prompt_tokens=1, output_tokens=2),
    ]
    found = batching.figures(1, records)
    assert found.wait == 3
    assert found.tokens_per_s == 1
    assert found.tpot_ms == 1000


def test_output_lengths_repeat_and_differ() -> None:
    lengths = batching.output_lengths(100, 40)
    assert lengths == batching.output_lengths(100, 40)
    assert min(lengths) >= 4
    assert max(lengths) <= 160
    assert sum(lengths) / 100 == pytest.approx(40, rel=0.3)


def test_times_between_the_measured_tokens_are_interpolated() -> None:
    places = kv_cache.sample_places(8, 3)
    assert places == [0, 3, 6, 7]
    assert kv_cache.interpolate(places, [1, 4, 7, 9], 8) == [1, 2, 3, 4, 5, 6, 7, 9]
    assert kv_cache.mean_gap([1, 2, 4, 8], 4, 2) == 3
    assert kv_cache.mean_gap([1, 2, 4, 8], 1, 2) == 1


def test_products_without_cache_grow_with_the_output() -> None:
    tiny_cost = cost_of(SHAPES["tiny"], "bfloat16")
    ratios = [kv_cache.ratio_of_products(tiny_cost, 16, length) for length in (1, 10, 100)]
    assert ratios[0] == 1
    assert ratios[0] < ratios[1] < ratios[2]


def test_every_layer_gets_the_window() -> None:
    config = windows.with_window(SHAPES["tiny"], 32)
    assert {layer.window for layer in config.layers} == {32}
    assert cost_of(config, "bfloat16").kv_bytes(64) == cost_of(config, "bfloat16").kv_bytes(32)


def test_a_figure_is_a_table_in_markdown() -> None:
    figure = LearnFigure(
        name="x", title="X", notes=("Two.",), heads=("a", "b"), rows=((1, 0.5),), panels=()
    )
    assert figure.as_text() == "X\n\n- Two.\n\n| a | b |\n| --- | --- |\n| 1 | 0.500 |"
    shorts = [shown(value) for value in (None, "t", 1234, 1234.5, 99.97, 12.345)]
    assert shorts == ["", "t", "1,234", "1,234", "100", "12.3"]


def test_a_plot_is_a_small_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the bench extra is not installed")
    places = [float(number) for number in range(1, 201)]
    lines = (line_of("one", places, places), line_of("two", places, places[::-1]))
    bars = (line_of("three", [0, 1], [2000, 1]),)
    panels = (
        Panel(x_label="x", y_label="y", series=lines, log_y=True),
        Panel(x_label="", y_label="y", series=bars, names=("left", "right")),
        Panel(x_label="x", y_label="y", series=(line_of("four", [1, 2], [3, 4]),), log_x=True),
    )
    figure = LearnFigure(name="x", title="X", notes=(), heads=(), rows=(), panels=panels)
    plots.draw(figure, tmp_path / "new" / "x.png")
    image = (tmp_path / "new" / "x.png").read_bytes()
    assert image.startswith(b"\x89PNG")
    assert len(image) < MAX_IMAGE_BYTES
