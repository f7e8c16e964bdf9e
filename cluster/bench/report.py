"""Formats the results of a benchmark as tables and as a JSON object."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, Final

from rich.table import Table

from .load import ServerRounds
from .metrics import LATENCIES, RATES, Summary, medians, ratios
from .options import BenchOptions

STATISTICS: Final = ("mean", "p50", "p90", "p99", "p99.9", "max")
_UNITS: Final = {
    "request_throughput": "requests/s",
    "output_throughput": "output tokens/s",
    "total_throughput": "total tokens/s",
    "goodput": "good requests/s",
    "slo_attainment": "share of good requests",
}
_TITLES: Final = {"ttft": "TTFT", "tpot": "TPOT", "itl": "ITL", "e2e": "end to end", "refusal": "refusal"}


def to_json(options: BenchOptions, servers: Sequence[ServerRounds]) -> dict[str, Any]:
    """Returns the options, each round, the median of each figure, and the ratios to the peer if there is one."""
    workload = asdict(options.workload) | {"file": str(options.workload.file) if options.workload.file else None}
    middles = [medians(server.rounds) for server in servers]
    found = [
        {
            "url": server.address.url,
            "model": server.address.model,
            "rounds": [asdict(each) for each in server.rounds],
            "median": median,
        }
        for server, median in zip(servers, middles, strict=True)
    ]
    return {
        "workload": workload,
        "load": asdict(options.load),
        "slo_ms": dict(options.slo),
        "servers": found,
        "ratios": ratios(middles[0], middles[1]) if len(middles) > 1 else None,
    }


def round_line(summary: Summary) -> str:
    """Returns the main figures of one round in one line."""
    figures = summary.figures
    parts = [f"{summary.num_completed} of {summary.num_requests} requests in {summary.duration:.1f} s"]
    parts.append(f"{figures['output_throughput']:.1f} output tokens/s")
    parts += [
        f"mean {_TITLES[name]} {figures[key]:.1f} ms" for name in LATENCIES if (key := f"mean_{name}_ms") in figures
    ]
    return ", ".join(parts)


def report(servers: Sequence[ServerRounds], slo: Mapping[str, float]) -> list[Table | str]:
    """Returns what to print: rates and latencies of one server, or of two beside each other with ratios; failures."""
    shown: list[Table | str] = [_completed(server) for server in servers]
    if len(servers) == 1:
        figures = medians(servers[0].rounds)
        shown += [_rate_table(figures, slo), _latency_table(figures)]
    else:
        shown.append(_comparison(servers[0], servers[1]))
    if any(each.failures for server in servers for each in server.rounds):
        shown.append(_failure_table(servers))
    return shown


def _rate_table(figures: Mapping[str, float], slo: Mapping[str, float]) -> Table:
    table = _table("Rates", "", "value")
    for name in RATES:
        if name in figures:
            limits = (
                f" ({', '.join(f'{key} <= {limit:g} ms' for key, limit in slo.items())})" if name == "goodput" else ""
            )
            table.add_row(f"{_UNITS[name]}{limits}", _number(figures[name]))
    if figures["late_ms"]:
        table.add_row("latest send after its planned time, ms", _number(figures["late_ms"]))
    return table


def _latency_table(figures: Mapping[str, float]) -> Table:
    table = _table("Latencies (ms)", "", *STATISTICS)
    for name in LATENCIES:
        if name == "refusal" and "mean_refusal_ms" not in figures:
            continue
        table.add_row(_TITLES[name], *(_number(figures.get(f"{each}_{name}_ms")) for each in STATISTICS))
    return table


def _comparison(ours: ServerRounds, peer: ServerRounds) -> Table:
    table = _table("Medians of the rounds", "", "server", "peer", "ratio")
    own, peers = medians(ours.rounds), medians(peer.rounds)
    quotients = ratios(own, peers)
    names = {name: _UNITS[name] for name in RATES}
    names |= {f"{each}_{name}_ms": f"{each} {_TITLES[name]} ms" for name in LATENCIES for each in STATISTICS}
    for name, title in names.items():
        if name in own or name in peers:
            table.add_row(title, *(_number(each.get(name)) for each in (own, peers, quotients)))
    return table


def _failure_table(servers: Sequence[ServerRounds]) -> Table:
    table = Table(title="Failures", title_justify="left", header_style="bold")
    for name in ("server", "round", "kind", "requests", "for example"):
        table.add_column(name)
    for server in servers:
        for number, summary in enumerate(server.rounds, 1):
            for each in summary.failures:
                table.add_row(server.address.url, str(number), each.kind, str(each.count), each.example)
    return table


def _completed(server: ServerRounds) -> str:
    completed = sum(each.num_completed for each in server.rounds)
    requests = sum(each.num_requests for each in server.rounds)
    rounds = f"{len(server.rounds)} round{'s' if len(server.rounds) > 1 else ''}"
    return f"{server.address.url}: {completed} of {requests} requests completed in {rounds}"


def _table(title: str, first: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", header_style="bold")
    table.add_column(first, no_wrap=True)
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.3f}" if value < 10 else f"{value:.1f}"
