"""Tests the metrics, prompts and arrivals of a benchmark; pure."""

import itertools
import json
import math
import statistics
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.cluster.bench.metrics import (
    FailureCount,
    RequestFailed,
    RequestRecord,
    Summary,
    distribution,
    medians,
    meets,
    ratios,
    summarize,
)
from tandem.cluster.bench.options import (
    BenchOptions,
    LoadOptions,
    Workload,
    check_options,
    parse_address,
    parse_slo,
)
from tandem.cluster.bench.threads import ThreadTimes
from tandem.cluster.bench.workload import BenchPrompt, Prompts, arrival_offsets
from tandem.cluster.traces.read import TraceScale
from tandem.proto.errors import InvalidArgument


def record(
    *chunk_times: float, started: float = 0.0, tokens: int | None = None, prompt: int = 10
) -> RequestRecord:
    """A request that completed with its last chunk."""
    return RequestRecord(
        started=started,
        ended=chunk_times[-1],
        chunk_times=chunk_times,
        prompt_tokens=prompt,
        output_tokens=len(chunk_times) if tokens is None else tokens,
    )


def failed(kind: str, detail: str = "", started: float = 0.0, ended: float = 1.0) -> RequestRecord:
    failure = RequestFailed(kind, detail)
    return RequestRecord(
        started=started,
        ended=ended,
        chunk_times=[started + 0.1],
        prompt_tokens=0,
        output_tokens=0,
        failure=failure,
    )


def test_the_latencies_of_one_request() -> None:
    one = record(10.25, 10.5, 11.0, started=10.0, tokens=5)  # 5 tokens in 3 chunks
    assert (one.ttft, one.e2e, one.tpot, one.gaps) == (0.25, 1.0, 0.75 / 4, [0.25, 0.5])
    assert record(10.25, started=10.0).tpot is None


def test_the_figures_of_a_round() -> None:
    requests = [
        record(1.0, 2.0, 4.0),
        record(3.0, 5.0, started=2.0, prompt=30),
        failed("HTTP 500", ended=10.0),
    ]
    summary = summarize(requests, {})
    assert (summary.num_requests, summary.num_completed, summary.duration) == (3, 2, 10.0)
    assert (summary.prompt_tokens, summary.output_tokens) == (40, 5)
    figures = summary.figures
    assert figures["request_throughput"] == 0.2
    assert figures["output_throughput"] == 0.5
    assert figures["total_throughput"] == 4.5
    assert "goodput" not in figures
    assert figures["mean_ttft_ms"] == 1000
    assert figures["mean_tpot_ms"] == pytest.approx((1500 + 2000) / 2)
    assert figures["mean_itl_ms"] == pytest.approx((1000 + 2000 + 2000) / 3)
    assert figures["max_itl_ms"] == 2000
    assert figures["p50_e2e_ms"] == pytest.approx(3500)
    assert "p99.9_itl_ms" in figures
    assert "p99.9_ttft_ms" not in figures


def test_a_round_without_an_answer_has_no_latencies() -> None:
    summary = summarize(
        [failed("timeout", "a"), failed("HTTP 500"), failed("timeout", "b")], {"ttft": 1e9}
    )
    assert summary.failures == (
        FailureCount(kind="timeout", count=2, example="a"),
        FailureCount(kind="HTTP 500", count=1, example=""),
    )
    rates = {
        "request_throughput",
        "output_throughput",
        "total_throughput",
        "goodput",
        "slo_attainment",
    }
    assert summary.figures == dict.fromkeys([*rates, "late_ms", "late_sends"], 0)


def test_goodput_counts_what_meets_every_limit() -> None:
    requests = [
        record(0.1, 0.2, 0.3),  # good
        record(0.3, 0.4, 0.5),  # late first token
        record(0.1, 0.4, 0.7),  # slow tokens
        record(0.2),  # good: a single token has no TPOT
        failed("stream cut", ended=2.0),
    ]
    slo = {"ttft": 200.5, "tpot": 100.5}
    assert [meets(each, slo) for each in requests] == [True, False, False, True, False]
    figures = summarize(requests, slo).figures
    assert figures["goodput"] == 2 / 2.0
    assert figures["slo_attainment"] == 2 / 5
    assert not meets(requests[0], {"e2e": 299})
    assert meets(requests[0], {"e2e": 301})


@given(st.lists(st.floats(0, 1e4), min_size=1, max_size=60))
def test_a_distribution_is_ordered_and_within_its_values(seconds: list[float]) -> None:
    found = distribution("itl", seconds)
    values = sorted(1000 * each for each in seconds)
    ordered = [found[f"{name}_itl_ms"] for name in ("p50", "p90", "p99", "p99.9", "max")]
    assert ordered == pytest.approx(sorted(ordered))
    assert found["max_itl_ms"] == values[-1]
    assert found["p50_itl_ms"] == pytest.approx(statistics.median(values))
    assert found["mean_itl_ms"] == pytest.approx(statistics.fmean(values))
    place = 0.99 * (len(values) - 1)
    low, high = values[math.floor(place)], values[math.ceil(place)]
    assert found["p99_itl_ms"] == pytest.approx(low + (high - low) * (place - math.floor(place)))


@given(st.lists(st.floats(0.001, 10), min_size=1, max_size=30))
def test_the_parts_of_a_request_add_up(steps: list[float]) -> None:
    one = record(*itertools.accumulate(steps, initial=5.0), started=4.0)
    assert one.ttft + sum(one.gaps) == pytest.approx(one.e2e)
    assert one.tpot == pytest.approx(statistics.fmean(one.gaps))  # with one token in each chunk


def summary_of(figures: dict[str, float]) -> Summary:
    return Summary(
        duration=1.0,
        num_requests=1,
        num_completed=1,
        prompt_tokens=1,
        output_tokens=1,
        failures=(),
        figures=figures,
    )


def test_medians_and_ratios() -> None:
    rounds = [
        summary_of({"a": 1.0, "b": 5.0}),
        summary_of({"a": 9.0}),
        summary_of({"a": 2.0, "b": 7.0}),
    ]
    assert medians(rounds) == {"a": 2.0, "b": 6.0}
    assert ratios({"a": 3.0, "b": 1.0, "c": 1.0}, {"a": 2.0, "b": 0.0}) == {"a": 1.5}


def test_poisson_arrivals_have_the_rate_and_the_spread() -> None:
    offsets = list(itertools.islice(arrival_offsets(50.0, seed=3), 20_000))
    gaps = [after - before for before, after in itertools.pairwise([0.0, *offsets])]
    assert statistics.fmean(gaps) == pytest.approx(1 / 50, rel=0.03)
    # Exponential: as great as the mean.
    assert statistics.pstdev(gaps) == pytest.approx(1 / 50, rel=0.03)
    assert min(gaps) > 0
    assert offsets[:100] == list(itertools.islice(arrival_offsets(50.0, seed=3), 100))
    assert offsets[:100] != list(itertools.islice(arrival_offsets(50.0, seed=4), 100))


def first(workload: Workload, round_number: int, count: int = 8) -> list[list[int]]:
    load = LoadOptions(concurrency=1, num_prompts=count)
    prompts = list(Prompts(workload).of_round(round_number, load))
    assert len(prompts) == count
    assert {each.max_tokens for each in prompts} == {workload.output_len}
    return [list(each.prompt) for each in prompts if not isinstance(each.prompt, str)]


def test_random_prompts_follow_from_seed_and_round() -> None:
    workload = Workload(input_len=50, output_len=7, vocab_size=300, seed=5)
    prompts = first(workload, 0)
    assert {len(each) for each in prompts} == {50}
    assert 250 < max(map(max, prompts)) < 300
    assert prompts == first(workload, 0)
    assert len({tuple(each) for number in range(3) for each in first(workload, number)}) == 24
    warmups = Prompts(workload).warmup()
    assert next(warmups).prompt not in prompts


def test_shared_prefixes_are_shared_by_all_rounds() -> None:
    workload = Workload(kind="shared-prefix", prefix_len=40, input_len=20, output_len=3)
    warmup = next(Prompts(workload).warmup()).prompt
    assert isinstance(warmup, list)
    prompts = [*first(workload, 0), *first(workload, 1), warmup]
    assert len({tuple(each[:40]) for each in prompts}) == 1
    assert len({tuple(each[40:]) for each in prompts}) == 17
    assert {len(each) for each in prompts} == {60}


def test_prompts_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "one", "max_tokens": 5}\n\n{"prompt": [1, 2]}\n')
    prompts = Prompts(Workload(kind="file", file=path, output_len=9))
    lines = [BenchPrompt(prompt="one", max_tokens=5), BenchPrompt(prompt=[1, 2], max_tokens=9)]
    once = LoadOptions(concurrency=1, num_prompts=None)
    assert list(prompts.of_round(0, once)) == lines
    thrice = LoadOptions(concurrency=1, num_prompts=3)
    assert list(prompts.of_round(1, thrice)) == [*lines, lines[0]]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("hello", "Invalid JSON"),
        ("[1]", "must be an object"),
        ('{"prompt": ""}', "prompt: .*at least 1 item"),
        ('{"prompt": [1, -1]}', "prompt: .*1: must be greater than or equal to 0"),
        ('{"prompt": [true]}', "prompt: .*0: must be a valid integer"),
        ('{"prompt": "a", "max_tokens": 0}', "max_tokens: must be greater than 0"),
        ('{"prompt": "a", "max_tokens": 2.5}', "max_tokens: must be a valid integer"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str, words: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(json.dumps({"prompt": "good"}) + "\n" + line + "\n")
    with pytest.raises(InvalidArgument, match=rf"prompts\.jsonl:2: .*{words}"):
        Prompts(Workload(kind="file", file=path))


def test_addresses() -> None:
    assert parse_address("http://h:80/v1/", "--url", "m").url == "http://h:80"
    assert parse_address("http://h:80=a=b", "--peer", "m").model == "a=b"
    assert parse_address("grpc://h:80", "--url", "m").model == "m"
    for bad in ("h:80", "ftp://h:80", "grpc://h", "http://", "http://h:99999", "http://h:x"):
        with pytest.raises(InvalidArgument, match="--url"):
            parse_address(bad, "--url")


def test_slos() -> None:
    assert parse_slo("ttft=200,tpot=50.5") == {"ttft": 200.0, "tpot": 50.5}
    assert parse_slo("ttft=1.5s,tpot=50ms") == {"ttft": 1500.0, "tpot": 50.0}
    assert parse_slo("") == {}
    for bad in ("ttft", "ttft=x", "ttft=-1", "tttf=1", "ttft=nan", "ttft=inf"):
        with pytest.raises(InvalidArgument, match="--slo"):
            parse_slo(bad)


def test_a_thread_is_busy_from_a_quarter_of_a_core_on() -> None:
    names = {1: "server", 2: "server", 3: "idle"}
    before = ThreadTimes(10.0, {(1, 1): 5.0, (1, 2): 0.0, (3, 3): 70.0}, names)
    # (2, 9) is new.
    after = ThreadTimes(14.0, {(1, 1): 6.0, (1, 2): 4.0, (2, 9): 1.1, (3, 3): 70.9}, names)
    assert after.count_busy(before) == {"server": 3}


TRACED: dict[str, Any] = {"kind": "trace", "trace": Path("x")}
ONE_CALLER = {"concurrency": 1}


@pytest.mark.parametrize(
    ("workload", "load", "words"),
    [
        (TRACED, {"rate": 1.0}, "--trace: has its own times; give neither"),
        (TRACED, ONE_CALLER, "--trace: has its own times; give neither"),
        (TRACED | {"trace_scale": TraceScale(speed=0.0)}, {}, "--speed: must be from 1e-06"),
        (TRACED | {"kind": "random"}, {}, "--workload trace and --trace must be given together"),
        ({"kind": "trace"}, ONE_CALLER, "--workload trace and --trace must be given together"),
        (
            {"trace_scale": TraceScale(speed=2.0)},
            ONE_CALLER,
            "--length-scale, --speed and --spread-arrivals need",
        ),
    ],
)
def test_the_options_of_a_trace_are_checked(
    workload: dict[str, Any], load: dict[str, Any], words: str
) -> None:
    asked = BenchOptions(addresses=[], workload=Workload(**workload), load=LoadOptions(**load))
    with pytest.raises(InvalidArgument) as caught:
        check_options(asked)
    assert words in str(caught.value)


def test_a_trace_needs_no_other_load() -> None:
    load = LoadOptions(num_prompts=None)
    asked = BenchOptions(addresses=[], workload=Workload(**TRACED), load=load)
    assert check_options(asked) is asked
