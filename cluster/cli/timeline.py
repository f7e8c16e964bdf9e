"""Formats the timelines of requests as a table."""

from collections.abc import Iterable
from typing import Final

from rich.table import Table

from ...proto import inference_pb2

TABLE_CHARACTERS: Final = 150  # where there is no terminal to fit into


def timeline_table(rows: Iterable[tuple[str, inference_pb2.Timeline]]) -> Table:
    """Returns a table with one line for each named request. Times are in ms; those from tokenize to decode add up to
    total.

    The KV columns are the bytes moved, the rate while they were moving, and how long the request waited for them; "by"
    is the transport."""
    table = Table(title="Where the time went (ms)", title_justify="left", header_style="bold")
    table.add_column("request", no_wrap=True)
    numbers = (
        "tokenize",
        "dispatch",
        "queue",
        "prefill",
        "KV wait",
        "decode",
        "total",
        "TTFT",
        "TPOT",
        "KV MB",
        "KV GB/s",
    )
    for name in (*numbers, "by", "prompt", "cached", "tokens"):
        table.add_column(name, justify="right", no_wrap=True)
    for name, timeline in rows:
        table.add_row(name, *_cells(timeline))
    return table


def total_of_parts(timeline: inference_pb2.Timeline) -> float:
    """Returns the sum of the timeline's parts in seconds."""
    return (
        timeline.tokenize_seconds
        + timeline.dispatch_seconds
        + timeline.queue_seconds
        + timeline.prefill_seconds
        + timeline.kv_transfer_seconds
        + timeline.decode_seconds
    )


def _cells(timeline: inference_pb2.Timeline) -> list[str]:
    times = (
        timeline.tokenize_seconds,
        timeline.dispatch_seconds,
        timeline.queue_seconds,
        timeline.prefill_seconds,
        timeline.kv_transfer_seconds,
        timeline.decode_seconds,
        timeline.end_to_end_seconds,
        timeline.ttft_seconds,
        timeline.tpot_seconds,
    )
    moved, active = timeline.kv_transfer_bytes, timeline.kv_transfer_active_seconds
    counts = (timeline.prompt_tokens, timeline.cached_tokens, timeline.completion_tokens)
    return [
        *(f"{1000 * seconds:.1f}" for seconds in times),
        f"{moved / 1e6:.2f}" if moved else "-",
        f"{moved / active / 1e9:.2f}" if moved and active else "-",
        timeline.kv_transport or "-",
        *map(str, counts),
    ]
