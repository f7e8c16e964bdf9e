"""Parses the `traceparent` header (W3C Trace Context), which names the trace of a request."""

import re
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Final

TRACEPARENT: Final = "traceparent"

CURRENT_REQUEST: Final = ContextVar("request", default=("", ""))
"""The request id and trace id of the running task, for its log lines."""

_FORM: Final = re.compile(
    r"(?!ff)[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?", re.ASCII
)
_MAX_LENGTH: Final = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceContext:
    """Names the caller's span, which is the parent of the request's span."""

    trace_id: str  # 32 hex digits
    span_id: str  # 16 hex digits
    is_sampled: bool  # by the caller


def parse_traceparent(header: str | bytes | None) -> TraceContext | None:
    """Returns the caller's span; None without a header and, as W3C demands, for an invalid one."""
    text = header.decode("latin-1") if isinstance(header, bytes) else header
    found = _FORM.fullmatch(text.strip()) if text and len(text) <= _MAX_LENGTH else None
    if found is None:
        return None
    trace_id, span_id, flags, rest = found.groups()
    is_version_0 = text is not None and text.strip().startswith("00")
    if not int(trace_id, 16) or not int(span_id, 16) or (is_version_0 and rest):
        return None
    return TraceContext(trace_id=trace_id, span_id=span_id, is_sampled=bool(int(flags, 16) & 1))
