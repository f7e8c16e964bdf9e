"""Tests SLO classes: which one a request has, and when an answer keeps its limits."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.cluster.bench.metrics import RequestRecord, meets
from tandem.cluster.config import load_config
from tandem.proto import inference_pb2
from tandem.proto.errors import InvalidArgument
from tandem.router.slo import RequestSlo, SloClass, SloOutcome, find_slo, first_token_due

INTERACTIVE = SloClass(ttft_ms=500, tpot_ms=30)
BATCH = SloClass(e2e_ms=60_000)


@pytest.mark.parametrize(
    ("seconds", "outcome"),
    [
        ((0.5, 0.03, 99.0), "met"),
        ((0.6, 0.03, 99.0), "ttft"),
        ((0.6, 0.04, 99.0), "ttft"),
        ((0.1, 0.04, 99.0), "tpot"),
        ((0.5, 0.0, 0.5), "met"),  # one token has no TPOT
    ],
)
def test_an_answer_is_judged_by_every_limit(
    seconds: tuple[float, float, float], outcome: SloOutcome
) -> None:
    assert INTERACTIVE.judge(timeline(*seconds)) == outcome
    assert BATCH.judge(timeline(*seconds)) == ("e2e" if seconds[2] > 60 else "met")


def timeline(ttft: float, tpot: float, e2e: float) -> inference_pb2.Timeline:
    return inference_pb2.Timeline(ttft_seconds=ttft, tpot_seconds=tpot, end_to_end_seconds=e2e)


Limit = st.none() | st.integers(1, 2_000).map(float)


@given(Limit, Limit, Limit.filter(bool), st.lists(st.integers(1, 40), min_size=1, max_size=20))
def test_the_service_and_the_benchmark_judge_alike(
    ttft: float | None, tpot: float | None, e2e: float | None, gaps: list[int]
) -> None:
    """For an answer whose tokens come after these gaps, in parts of 1/16 s."""
    times = [sum(gaps[: number + 1]) / 16 for number in range(len(gaps))]
    record = RequestRecord(
        started=0.0, ended=times[-1], chunk_times=times, prompt_tokens=1, output_tokens=len(times)
    )
    judged = SloClass(ttft_ms=ttft, tpot_ms=tpot, e2e_ms=e2e).judge(
        timeline(record.ttft, record.tpot or 0.0, record.e2e)
    )
    limits = {"ttft": ttft, "tpot": tpot, "e2e": e2e}
    given_limits = {name: limit for name, limit in limits.items() if limit is not None}
    assert (judged == "met") == meets(record, given_limits)


def test_a_request_names_its_class() -> None:
    classes = {"interactive": INTERACTIVE, "batch": BATCH}
    assert find_slo(classes, "batch") == RequestSlo("batch", BATCH)
    for tier in ("", "auto", "default"):
        assert find_slo(classes, tier) is None
        assert find_slo(classes | {"default": BATCH}, tier) == RequestSlo("default", BATCH)
        assert find_slo(classes | {"default": BATCH}, tier, is_batch=True) is None
    assert find_slo(classes, "batch", is_batch=True) == RequestSlo("batch", BATCH)
    with pytest.raises(InvalidArgument) as caught:
        find_slo(classes, "flex")
    assert str(caught.value) == ("service_tier: must be one of auto, batch, default, interactive")
    assert find_slo(classes | {"flex": BATCH}, "flex") == RequestSlo("flex", BATCH)


def test_only_a_limit_on_ttft_makes_a_first_token_due() -> None:
    assert first_token_due(RequestSlo("interactive", INTERACTIVE), 10.0) == 10.5
    assert first_token_due(RequestSlo("batch", BATCH), 10.0) is None
    assert first_token_due(None, 10.0) is None


@pytest.mark.parametrize(
    ("classes", "words"),
    [
        ({"a": {}}, r"^slo\.a: needs ttft_ms, tpot_ms or e2e_ms"),
        ({"a": {"ttft_ms": 0}}, r"slo\.a\.ttft_ms: must be greater than 0"),
        ({"a": {"ttft": 1}}, r"slo\.a\.ttft: unknown key; did you mean ttft_ms\?"),
        ({"A b": {"ttft_ms": 1}}, r"slo\.A b.*must be 1 to 32 lowercase letters"),
    ],
)
def test_the_configuration_is_checked(classes: dict[str, object], words: str) -> None:
    with pytest.raises(InvalidArgument, match=words):
        load_config(None, {"model": "m", "slo": classes})
