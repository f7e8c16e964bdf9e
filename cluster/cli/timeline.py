"""Formats the timelines of requests as a table."""

from collections.abc import Iterable
from typing import Final

from rich.table import Table

from ...proto import inference_pb2
from ..tables import make_table

_PARTS: Final = {
    "tokenize": "tokenize_seconds",
    "dispatch": "dispatch_seconds",
    "queue": "queue_seconds",
    "prefill": "prefill_seconds",
    "KV wait": "kv_transfer_seconds",
    "decode": "decode_seconds",
}
_TIMES: Final = _PARTS | {"total": "end_to_end_seconds", "TTFT": "ttft_seconds", "TPOT": "tpot_seconds"}


def timeline_table(rows: Iterable[tuple[str, inference_pb2.Timeline]]) -> Table:
    """Returns a table with one line for each named request. Times are in ms; those from tokenize to decode add up to
    total.

    The KV columns are the bytes moved, the rate while they were moving, and how long the request waited for them; "by"
    is the transport."""
    numbers = (*_TIMES, "KV MB", "KV GB/s", "by", "prompt", "cached", "tokens")
    table = make_table("request", numbers=numbers, title="Where the time went (ms)")
    for name, timeline in rows:
        moved, active = timeline.kv_transfer_bytes, timeline.kv_transfer_active_seconds
        table.add_row(
            name,
            *(f"{1000 * getattr(timeline, field):.1f}" for field in _TIMES.values()),
            f"{moved / 1e6:.2f}" if moved else "-",
            f"{moved / active / 1e9:.2f}" if moved and active else "-",
            timeline.kv_transport or "-",
            *map(str, (timeline.prompt_tokens, timeline.cached_tokens, timeline.completion_tokens)),
        )
    return table


def total_of_parts(timeline: inference_pb2.Timeline) -> float:
    """Returns the sum of the timeline's parts in seconds."""
    return float(sum(getattr(timeline, field) for field in _PARTS.values()))
