"""Reads the trace that a request belongs to: the header `traceparent` of W3C Trace Context."""

import re
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Final

TRACEPARENT: Final = "traceparent"

CURRENT_REQUEST: Final = ContextVar("request", default=("", ""))
"""The id and the trace id of the request that the running task is about, for its lines of log."""

_FORM: Final = re.compile(
    r"(?!ff)[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?", re.ASCII
)
_MAX_LENGTH: Final = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceContext:
    """Names a span of the caller, of which a request's span is a child."""

    trace_id: str  # 32 hex digits
    span_id: str  # 16 hex digits
    is_sampled: bool  # by the caller


def parse_traceparent(header: str | bytes | None) -> TraceContext | None:
    """Returns what a header says; None without one, and, as W3C asks, for one that is wrong."""
    text = header.decode("latin-1") if isinstance(header, bytes) else header
    found = _FORM.fullmatch(text.strip()) if text and len(text) <= _MAX_LENGTH else None
    if found is None:
        return None
    trace_id, span_id, flags, rest = found.groups()
    is_version_0 = text is not None and text.strip().startswith("00")
    if not int(trace_id, 16) or not int(span_id, 16) or (is_version_0 and rest):
        return None
    return TraceContext(trace_id=trace_id, span_id=span_id, is_sampled=bool(int(flags, 16) & 1))
