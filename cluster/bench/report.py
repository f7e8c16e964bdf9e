"""Formats the results of a benchmark as tables and as a JSON object."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, Final

from rich.table import Table

from ..tables import make_table
from .metrics import LATE_SECONDS, LATENCIES, RATES, Summary, medians, ratios
from .options import BenchOptions, ServerAddress

STATISTICS: Final = ("mean", "p50", "p90", "p99", "p99.9", "max")
_UNITS: Final = {
    "request_throughput": "requests/s",
    "output_throughput": "output tokens/s",
    "total_throughput": "total tokens/s",
    "goodput": "good requests/s",
    "slo_attainment": "share of good requests",
}
_LATE: Final = {
    "late_ms": "latest send after its planned time, ms",
    "late_sends": f"sends more than {1000 * LATE_SECONDS:g} ms after their planned time",
}
"""Titles of the figures that tell whether the client has kept the planned times."""
_TITLES: Final = {
    "ttft": "TTFT",
    "tpot": "TPOT",
    "itl": "ITL",
    "e2e": "end to end",
    "refusal": "refusal",
}


def to_json(options: BenchOptions, measured: Sequence[Sequence[Summary]]) -> dict[str, Any]:
    """Returns the options, the rounds, the medians of the metrics, and the ratios to a peer.

    Paths and fractions are for `json.dumps(..., default=str)`.
    """
    middles = [medians(rounds) for rounds in measured]
    return {
        "workload": asdict(options.workload),
        "load": asdict(options.load),
        "slo_ms": dict(options.slo),
        "servers": [
            {
                "url": address.url,
                "model": address.model,
                "rounds": list(map(asdict, rounds)),
                "median": median,
            }
            for address, rounds, median in zip(options.addresses, measured, middles, strict=True)
        ],
        "ratios": ratios(middles[0], middles[1]) if len(middles) > 1 else None,
    }


def round_line(summary: Summary) -> str:
    """Returns the main metrics of one round in one line."""
    figures = summary.figures
    parts = [
        f"{summary.num_completed} of {summary.num_requests} requests in {summary.duration:.1f} s",
        f"{figures['output_throughput']:.1f} output tokens/s",
    ]
    parts += [
        f"mean {_TITLES[name]} {figures[key]:.1f} ms"
        for name in LATENCIES
        if (key := f"mean_{name}_ms") in figures
    ]
    return ", ".join(parts)


def report(options: BenchOptions, measured: Sequence[Sequence[Summary]]) -> list[Table | str]:
    """Returns tables and lines to print: rates, latencies, failures.

    Two servers share a table, with ratios.
    """
    shown: list[Table | str] = [
        _completed(*each) for each in zip(options.addresses, measured, strict=True)
    ]
    own, *peers = map(medians, measured)
    if peers:
        shown.append(_comparison(own, peers[0]))
    else:
        shown += [_rates(own, options.slo), _latencies(own)]
    failures = make_table("server", "round", "kind", "requests", "for example", title="Failures")
    for address, rounds in zip(options.addresses, measured, strict=True):
        for number, summary in enumerate(rounds, 1):
            for each in summary.failures:
                failures.add_row(address.url, str(number), each.kind, str(each.count), each.example)
    return [*shown, failures] if failures.rows else shown


def _completed(address: ServerAddress, rounds: Sequence[Summary]) -> str:
    completed = sum(each.num_completed for each in rounds)
    requests = sum(each.num_requests for each in rounds)
    times = f"{len(rounds)} round{'s' if len(rounds) > 1 else ''}"
    busy = ", ".join(f"{name} {count}" for name, count in rounds[-1].busy_threads.items())
    threads = f"; busy threads on this machine: {busy}" if busy else ""
    return f"{address.url}: {completed} of {requests} requests completed in {times}{threads}"


def _rates(figures: Mapping[str, float], slo: Mapping[str, float]) -> Table:
    table = make_table("", numbers=["value"], title="Rates")
    limits = {"goodput": f" ({', '.join(f'{key} <= {limit:g} ms' for key, limit in slo.items())})"}
    for name in RATES:
        if name in figures:
            table.add_row(_UNITS[name] + limits.get(name, ""), _number(figures[name]))
    if figures["late_ms"]:
        for name, title in _LATE.items():
            table.add_row(title, _number(figures[name]))
    return table


def _latencies(figures: Mapping[str, float]) -> Table:
    table = make_table("", numbers=STATISTICS, title="Latencies (ms)")
    for name in LATENCIES:
        if name != "refusal" or "mean_refusal_ms" in figures:
            table.add_row(
                _TITLES[name], *(_number(figures.get(f"{each}_{name}_ms")) for each in STATISTICS)
            )
    return table


def _comparison(own: Mapping[str, float], peers: Mapping[str, float]) -> Table:
    table = make_table("", numbers=["server", "peer", "ratio"], title="Medians of the rounds")
    names = {name: _UNITS[name] for name in RATES}
    if own["late_ms"] or peers["late_ms"]:
        names |= _LATE
    names |= {
        f"{each}_{name}_ms": f"{each} {_TITLES[name]} ms"
        for name in LATENCIES
        for each in STATISTICS
    }
    quotients = ratios(own, peers)
    for name, title in names.items():
        if name in own or name in peers:
            table.add_row(title, *(_number(each.get(name)) for each in (own, peers, quotients)))
    return table


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    if isinstance(value, int):
        return str(value)
    return f"{value:.3f}" if value < 10 else f"{value:.1f}"
