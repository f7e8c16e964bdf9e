"""Tests the floor of a service against costs that are added up by hand."""

import pytest

from tandem.cluster.arithmetic import make_cost
from tandem.tests.bench.engine.shapes import SHAPES
from tandem.tests.bench.service_floor import Load, main, tokens_per_s
from tandem.workers.model.costs.roofline import Roofline

COST = make_cost(SHAPES["tiny"], "bfloat16")
LOAD = Load(concurrency=4, num_input=10, num_output=3)
AT_ONCE = 1e30  # bytes or products per second: takes no time


def test_a_wave_reads_the_weights_for_its_prompts_and_for_each_later_token() -> None:
    steps = [COST.prefill(10), COST.decode(11, 4), COST.decode(12, 4)]
    read = sum(step.num_bytes for step in steps)
    rate = tokens_per_s(COST, LOAD, Roofline(bytes_per_s=1e9, flops_per_s=AT_ONCE))
    assert rate == pytest.approx(4 * 3 / (read / 1e9))


def test_a_wave_multiplies_each_prompt_and_its_steps() -> None:
    products = 4 * COST.prefill(10).flops + COST.decode(11, 4).flops + COST.decode(12, 4).flops
    rate = tokens_per_s(COST, LOAD, Roofline(bytes_per_s=AT_ONCE, flops_per_s=1e9))
    assert rate == pytest.approx(4 * 3 / (products / 1e9))


def test_measured_figures_are_printed_as_shares(capsys: pytest.CaptureFixture[str]) -> None:
    rates = ["--bandwidth", "10", "--matmul-rate", "0.1"]
    arguments = ["--shape", "tiny", *rates, "--concurrency", "1", "8", "--measured", "100"]
    assert main(arguments) == 0
    _, _, first, second = (line.split() for line in capsys.readouterr().out.splitlines())
    assert float(first[3]) == pytest.approx(100 / float(first[1]), abs=0.01)
    assert len(second) == 2
