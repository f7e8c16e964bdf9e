"""Tests the fits of a service's measured loads."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.cluster.bench.metrics import RequestRecord
from tandem.cluster.planner.service_load import (
    RouterLoad,
    host_time,
    router_profile,
    stream_seconds,
)
from tandem.tests.profiles import PROFILED

_REQUEST_SECONDS = 0.002
_TOKEN_SECONDS = 0.0001


def _load(requests: int, output_tokens: int, seconds: float, idle_share: float) -> RouterLoad:
    """Returns a load of equal requests on a router that takes the times above."""
    record = RequestRecord(
        started=0.0, ended=1.0, chunk_times=(1.0,), prompt_tokens=16, output_tokens=output_tokens
    )
    used = requests * (_REQUEST_SECONDS + output_tokens * _TOKEN_SECONDS) + seconds * idle_share
    return RouterLoad([record] * requests, seconds, used)


@given(
    idle_share=st.floats(0.0, 0.1),
    step_seconds=st.floats(0.005, 0.1),
)
def test_time_that_an_idle_router_uses_counts_for_no_token(
    idle_share: float, step_seconds: float
) -> None:
    """However slow the streams are, a token costs the same."""
    loads = [
        _load(0, 0, 10.0, idle_share),
        _load(200, 1, 10.0, idle_share),
        *(
            _load(streams * max(round(10 / (32 * step_seconds)), 1), 32, 10.0, idle_share)
            for streams in (1, 8)
        ),
    ]
    profile = router_profile(loads)
    assert profile.seconds_per_request == pytest.approx(_REQUEST_SECONDS, rel=1e-3)
    assert profile.seconds_per_token == pytest.approx(_TOKEN_SECONDS, rel=1e-3)


def test_the_time_that_steps_do_not_explain_is_the_host_s() -> None:
    host, host_each = 0.002, 0.0005

    def sent(streams: int) -> list[RequestRecord]:
        tpot = stream_seconds(PROFILED, streams) + host + streams * host_each
        times = [1.0 + n * tpot for n in range(32)]
        record = RequestRecord(
            started=0.0, ended=times[-1], chunk_times=times, prompt_tokens=16, output_tokens=32
        )
        return [record] * 3

    assert host_time(PROFILED, [sent(1), sent(8)]) == pytest.approx((host, host_each))
