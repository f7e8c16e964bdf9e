"""Tests which traces are taken from a caller."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.router.telemetry.trace import TraceContext, parse_traceparent

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.mark.parametrize(
    ("header", "is_sampled"),
    [
        (f"00-{TRACE}-{SPAN}-01", True),
        (f" 00-{TRACE}-{SPAN}-00 ", False),
        (f"00-{TRACE}-{SPAN}-03".encode(), True),
        (f"cc-{TRACE}-{SPAN}-01-what-comes-later", True),  # of a later version
    ],
)
def test_the_trace_of_the_caller_is_taken(header: str | bytes, is_sampled: bool) -> None:
    assert parse_traceparent(header) == TraceContext(
        trace_id=TRACE, span_id=SPAN, is_sampled=is_sampled
    )


@pytest.mark.parametrize(
    "header",
    [
        *(
            None,
            "",
            "00",
            f"00-{TRACE}-{SPAN}",
            f"00-{TRACE}-{SPAN}-1",
            f"00-{TRACE}-{SPAN}-01-more",
        ),
        *(f"ff-{TRACE}-{SPAN}-01", f"00-{'0' * 32}-{SPAN}-01", f"00-{TRACE}-{'0' * 16}-01"),
        *(f"00-{TRACE.upper()}-{SPAN}-01", f"00-{TRACE[1:]}-{SPAN}-01", f"00_{TRACE}_{SPAN}_01"),
        f"01-{TRACE}-{SPAN}-01-{'x' * 1000}",
    ],
)
def test_a_wrong_header_is_as_none(header: str | None) -> None:
    assert parse_traceparent(header) is None


@given(st.one_of(st.text(), st.binary()))
def test_any_header_is_taken_or_not(header: str | bytes) -> None:
    parse_traceparent(header)
