"""Tests the arithmetic that the console shows against that of `tandem plan cost`."""

import json
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from tandem.cluster import arithmetic
from tandem.cluster.arithmetic import MAX_OUTPUT_TOKENS, ServedArithmetic, make_cost
from tandem.proto.errors import InvalidArgument, Unavailable
from tandem.tests.bench.engine.shapes import HF_CONFIGS
from tandem.tests.tiny import make_tiny_model
from tandem.workers.model.config import Fields
from tandem.workers.model.costs.report import cost_report
from tandem.workers.model.costs.stages import list_stages
from tandem.workers.model.registry import load_model_config, parse_model_config


@pytest.mark.io
async def test_the_served_model_is_explained_as_by_plan_cost(tmp_path: Path) -> None:
    """Counts the model once, for all callers."""
    folder = make_tiny_model(tmp_path, "qwen3_moe")
    served = ServedArithmetic(folder, "float32")
    found = await served.explain(7, 5)
    config = load_model_config(folder)
    cost = make_cost(config, "float32")
    report = cost_report("", cost, prompt_tokens=7, output_tokens=5)
    assert found["cost"] == report.as_json()
    assert found["stages"] == [asdict(stage) for stage in list_stages(config, 7)]
    assert len(found["steps"]) == 5
    assert found["steps"][0]["flops"] == report.prefill.flops
    assert found["steps"][-1]["num_bytes"] == report.last_decode.num_bytes
    assert found["steps"][-1]["kv_bytes"] == report.kv_bytes
    (tmp_path / "config.json").unlink()
    assert (await served.explain(7, 1))["steps"] == found["steps"][:1]


@pytest.mark.parametrize("name", list(HF_CONFIGS))
def test_a_cost_survives_the_way_from_the_child_process(name: str) -> None:
    cost = make_cost(parse_model_config(Fields("config.json", dict(HF_CONFIGS[name]))), "bfloat16")
    sent = json.dumps(arithmetic._COST.dump_python(cost))
    assert arithmetic._COST.validate_python(json.loads(sent)) == cost


@pytest.mark.parametrize(
    ("counts", "field"),
    [((0, 1), "prompt_tokens"), ((1, 0), "output_tokens"), ((1, MAX_OUTPUT_TOKENS + 1), "output")],
)
async def test_numbers_out_of_bounds_are_refused_at_once(
    counts: tuple[int, int], field: str
) -> None:
    with pytest.raises(InvalidArgument) as refused:
        await ServedArithmetic(Path("absent"), "float32").explain(*counts)
    assert refused.value.field.startswith(field)


@pytest.mark.io
async def test_a_folder_that_cannot_be_read_fails_each_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    served = ServedArithmetic(Path("absent"), "float32")
    for _ in range(2):
        with pytest.raises(Unavailable, match="cannot be counted"):
            await served.explain(1, 1)
