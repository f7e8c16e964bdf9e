"""Tests the comparison of predictions with a service: its loads, its figures and its table."""

import asyncio
import csv
from fractions import Fraction
from pathlib import Path
from time import perf_counter

import pytest

from tandem.cluster.bench.workload import BenchPrompt
from tandem.cluster.planner.site import Split
from tandem.cluster.planner.workload import Objective, PlannedWorkload
from tandem.cluster.traces.read import TracedRequest, TraceScale
from tandem.tests.bench.prediction.cases import (
    FIGURES,
    Case,
    LoadPlan,
    Prediction,
    predict,
    read_fitting,
)
from tandem.tests.bench.prediction.measured import send_case
from tandem.tests.bench.prediction.report import Comparison, as_json, table
from tandem.tests.profiles import make_profile

SPLIT = Split(0, 1)


def traced(time: float, length: int, output: int, blocks: tuple[int, ...] = ()) -> TracedRequest:
    return TracedRequest(
        time=time, input_length=length, output_length=output, block_hashes=blocks, block_tokens=64
    )


def case_of(*requests: TracedRequest, share: float = 0.5) -> Case:
    return Case(split=SPLIT, trace="some", share=share, workload=PlannedWorkload(requests))


def test_requests_that_do_not_fit_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    with path.open("w") as file:
        rows = csv.writer(file)
        rows.writerow(["TIMESTAMP", "ContextTokens", "GeneratedTokens"])
        rows.writerow(["2026-01-01 00:00:00", 800, 80])
        rows.writerow(["2026-01-01 00:00:01", 8000, 80])
    requests, num_dropped = read_fitting(path, TraceScale(Fraction(1, 8)), 120)
    assert [each.input_length for each in requests] == [100]
    assert num_dropped == 1


def test_each_share_of_the_knee_is_predicted() -> None:
    requests = [traced(0.3 * number, 64, 8) for number in range(1000)]
    plan = LoadPlan(
        objective=Objective(limits={"ttft": 1000.0}), shares=(0.3, 0.8), seconds=20.0, searched=60
    )
    knee, found = predict(make_profile(1), SPLIT, "some", requests, plan)
    assert knee > 0
    assert [each.case.rate for each in found] == pytest.approx([0.3 * knee, 0.8 * knee])
    for each in found:
        assert len(each.case.workload.requests) == pytest.approx(20 * each.case.rate, abs=1)
        assert each.figures.keys() == set(FIGURES)
        assert not each.is_saturated
    assert found[0].figures["mean_ttft_ms"] < found[1].figures["mean_ttft_ms"]


def test_an_objective_out_of_reach_is_refused() -> None:
    requests = [traced(0.3 * number, 64, 8) for number in range(20)]
    plan = LoadPlan(
        objective=Objective(limits={"ttft": 0.1}), shares=(0.5,), seconds=1.0, searched=20
    )
    with pytest.raises(ValueError, match="at no rate"):
        predict(make_profile(1), SPLIT, "some", requests, plan)


def test_the_load_has_the_lengths_the_times_and_the_shared_blocks_of_the_case() -> None:
    case = case_of(
        traced(0.0, 100, 3, (1, 2)), traced(0.05, 90, 2, (1, 3)), traced(0.1, 20, 1, (4,))
    )
    sent: list[BenchPrompt] = []
    times: list[float] = []

    async def complete(prompt: BenchPrompt, chunk_times: list[float]) -> tuple[int, int]:
        times.append(perf_counter())
        sent.append(prompt)
        chunk_times += [times[-1]] * prompt.max_tokens
        return len(prompt.prompt), prompt.max_tokens

    async def send() -> tuple[float, list[BenchPrompt]]:
        times.append(perf_counter())
        figures = await send_case(complete, case, 1, {"ttft": 1000.0})
        first = sent.copy()
        sent.clear()
        await send_case(complete, case, 2, {"ttft": 1000.0})
        return figures["slo_attainment"], first

    attainment, first = asyncio.run(send())
    assert attainment == 1.0
    assert [len(each.prompt) for each in first] == [100, 90, 20]
    assert [each.max_tokens for each in first] == [3, 2, 1]
    assert first[0].prompt[:64] == first[1].prompt[:64]
    assert first[0].prompt[64:] != first[1].prompt[64:]
    assert sent[0].prompt != first[0].prompt  # no round finds the prompts of another in a cache
    begin, *arrivals = times
    assert arrivals[2] - begin >= 0.1


def test_errors_and_spreads_are_relative_to_what_was_measured() -> None:
    case = case_of(traced(0.0, 10, 2), traced(1.0, 10, 2))
    figures = dict.fromkeys(FIGURES, 100.0)
    predicted = figures | {"mean_ttft_ms": 115.0, "p99_ttft_ms": 115.0}
    found = Comparison(
        prediction=Prediction(case=case, figures=predicted, is_saturated=False),
        rounds=(figures | {"mean_tpot_ms": 90.0}, figures | {"mean_tpot_ms": 110.0}),
    )
    assert found.error("mean_ttft_ms") == pytest.approx(0.15)
    assert found.spread("mean_tpot_ms") == pytest.approx(0.2)
    figure = table([found], "a source", "some")
    assert figure.notes[-1] == "10 of 11 predictions are within 10 % (p99: 20 %)."
    assert "100 (+15%, 0%)" in figure.rows[0]
    labels = [series.label for series in figure.panels[0].series]
    assert labels == ["together on 1, predicted", "together on 1, measured"]
    assert as_json([found])[0]["predicted"]["mean_ttft_ms"] == 115.0
