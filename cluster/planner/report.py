"""Reports a plan: a verdict, tables, JSON and a plot."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from google.protobuf.json_format import MessageToDict
from rich.table import Table

from ...proto.errors import InvalidArgument
from ..config import PoolRole
from ..tables import make_table
from .search import RateResult, SplitPlan, best_knee, other_kind
from .site import Split
from .workload import Objective

SATURATED: Final = "saturated"
_ROLES: Final[tuple[PoolRole, ...]] = ("prefill", "decode")
_COLUMNS: Final = ("attainment", "TTFT p50", "p99", "TPOT p50", "p99", "tokens/s")
_TIMES: Final = ("p50_ttft_ms", "p99_ttft_ms", "p50_tpot_ms", "p99_tpot_ms")
"""The figures of `_COLUMNS` between attainment and tokens/s, in their order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Autoscaling:
    """Holds the outcome of autoscaled pools whose maximum is the chosen workers."""

    outcome: RateResult
    mean_workers: Mapping[PoolRole, float]
    num_fixed: int  # the number of workers without autoscaling

    @property
    def saved_share(self) -> float:
        """Returns the share of the worker hours that autoscaling saves."""
        return 1 - sum(self.mean_workers.values()) / self.num_fixed


def verdict(
    plans: Sequence[SplitPlan], chosen: SplitPlan | None, rate: float, objective: Objective
) -> str:
    """Returns the answer in one sentence."""
    if chosen is None:
        best = best_knee(plans)
        if not best.knee:
            return f"no split meets {objective} at any rate; the objective is out of reach here"
        return (
            f"no split meets {objective} at {rate:.3g} requests/s; the best, {best.split}, meets "
            f"it up to {best.knee:.3g} requests/s"
        )
    text = f"{chosen.split}: meets {objective} up to {chosen.knee:.3g} requests/s"
    other = other_kind(plans, chosen)
    if other is None:
        return text
    if not other.knee or not chosen.knee:
        return f"{text}; {other.split} meets it at no rate"
    change = 1 - other.knee / chosen.knee
    reason = _reason(chosen if chosen.split.prefill else other)
    return f"{text}; {other.split} up to {other.knee:.3g}, {change:.0%} less{reason}"


def _reason(plan: SplitPlan) -> str:
    """Returns how busy each pool of a disaggregated service is, as text in parentheses.

    Empty if the service is saturated at the given rate.
    """
    if plan.at_rate is None or plan.at_rate.is_saturated:
        return ""
    result = plan.at_rate.result
    busy = {role: result.busy_share(role) for role in _ROLES}
    shares = " and ".join(f"its {role} pool {share:.0%}" for role, share in busy.items())
    return f" ({plan.split}: {shares} busy)"


def split_table(plans: Sequence[SplitPlan], rate: float) -> Table:
    """Returns a table with a line for each split."""
    numbers = ["devices", "bound", "knee", *_COLUMNS]
    table = make_table("workers", numbers=numbers, title=f"at {rate:.3g} requests/s; times in ms")
    for plan in plans:
        cells = [str(plan.split), str(plan.num_devices), f"{plan.bound:.3g}"]
        knee = "-" if plan.knee is None else f"{plan.knee:.3g}"
        cells += [knee, *_result_cells(plan.at_rate)]
        table.add_row(*cells)
    return table


def _result_cells(outcome: RateResult | None) -> list[str]:
    """Returns the cells of `_COLUMNS`; None is a rate above the bound."""
    if outcome is None or outcome.is_saturated:
        return [SATURATED, *("-" for _ in _COLUMNS[1:])]
    figures = outcome.result.summary().figures
    times = [f"{figures[name]:,.0f}" if name in figures else "-" for name in _TIMES]
    return [f"{outcome.attainment:.1%}", *times, f"{figures['output_throughput']:,.0f}"]


def use_lines(outcome: RateResult) -> list[str]:
    """Returns how busy the workers are, and where requests wait, as lines."""
    result = outcome.result
    roles = sorted({each.role for each in result.workers})
    busy = ", ".join(f"{role} {result.busy_share(role):.0%}" for role in roles)
    peak = ", ".join(f"{role} {result.peak_kv(role):.0%}" for role in roles)
    waits = result.wait_seconds()
    stages = ", ".join(f"{stage} {1e3 * seconds:,.0f} ms" for stage, seconds in waits.items())
    queues = ", ".join(
        f"{role} {seconds / max(len(result.requests), 1) * 1e3:,.0f} ms"
        for role, seconds in result.queue_seconds.items()
        if seconds
    )
    lines = [
        f"busy: {busy}, router {result.router_busy_share:.0%}; peak of the KV cache: {peak}",
        f"mean time of a request: {stages}",
    ]
    if queues:
        lines.append(f"mean wait in the router for a pool: {queues}")
    return lines


def fault_line(split: Split, outcome: RateResult, undisturbed: RateResult, num_faults: int) -> str:
    """Compares, in a line, the outcome of a split with `num_faults` deaths and without them."""
    if not num_faults:
        return f"faults: no worker of {split} has a role that dies"
    kills = "1 worker dies" if num_faults == 1 else f"{num_faults} workers die"
    return (
        f"faults: {kills} in {outcome.result.seconds:,.0f} s of {split}: {_short(outcome)}; "
        f"without faults {_short(undisturbed)}"
    )


def autoscaling_line(found: Autoscaling) -> str:
    """Returns the outcome of autoscaling, as a line."""
    mean = sorted(found.mean_workers.items())
    workers = ", ".join(f"{number:.2f} {role}" for role, number in mean)
    saved = round(found.saved_share, 2)
    change = "fewer" if saved >= 0 else "more"
    return (
        f"autoscaled: {_short(found.outcome)}; on average {workers} workers in "
        f"{found.outcome.result.seconds:,.0f} s, {abs(saved):.0%} {change} worker hours than "
        f"{found.num_fixed}"
    )


def _short(outcome: RateResult) -> str:
    """Returns the attainment and the p99 of TPOT, as text."""
    if outcome.is_saturated:
        return SATURATED
    figures = outcome.result.summary().figures
    tpot = figures.get("p99_tpot_ms")
    times = "" if tpot is None else f", TPOT p99 {tpot:,.0f} ms"
    return f"attainment {outcome.attainment:.1%}{times}"


def sensitivity_table(results: Mapping[str, RateResult]) -> Table:
    """Returns a table with a line for each change of the workload or the costs."""
    table = make_table("change", numbers=_COLUMNS, title="sensitivity")
    for name, outcome in results.items():
        table.add_row(name, *_result_cells(outcome))
    return table


def plan_json(
    plans: Sequence[SplitPlan],
    chosen: SplitPlan | None,
    sensitivity: Mapping[str, RateResult],
    *,
    source: str,
    sentence: str,
    autoscaling: Autoscaling | None = None,
) -> dict[str, Any]:
    """Returns the plan as a JSON object, with the timeline of each request of the chosen split."""
    requests = chosen.at_rate.result.requests if chosen and chosen.at_rate else ()
    return {
        "source": source,
        "verdict": sentence,
        "splits": [
            {
                "prefill": plan.split.prefill,
                "decode": plan.split.decode,
                "tp": plan.split.tp,
                "bound": plan.bound,
                "knee": plan.knee,
                "at_rate": _result_json(plan.at_rate),
            }
            for plan in plans
        ],
        "sensitivity": {name: _result_json(each) for name, each in sensitivity.items()},
        "autoscaled": None if autoscaling is None else _autoscaling_json(autoscaling),
        "requests": [
            {
                "start_seconds": each.record.started,
                "failure": each.record.failure and each.record.failure.kind,
                "timeline": MessageToDict(each.timeline, preserving_proto_field_name=True),
            }
            for each in requests
        ],
    }


def _autoscaling_json(found: Autoscaling) -> dict[str, Any]:
    return {
        **_result_json(found.outcome),
        "mean_workers": dict(found.mean_workers),
        "saved_share": found.saved_share,
        "sizes": dict(found.outcome.result.sizes),
    }


def _result_json(outcome: RateResult | None) -> dict[str, Any]:
    if outcome is None or outcome.is_saturated:
        return {"saturated": True}
    result = outcome.result
    roles = sorted({each.role for each in result.workers})
    return {
        "saturated": False,
        "rate": outcome.rate,
        "attainment": outcome.attainment,
        "figures": dict(result.summary().figures),
        "busy_share": {role: result.busy_share(role) for role in roles},
        "router_busy_share": result.router_busy_share,
        "peak_kv": {role: result.peak_kv(role) for role in roles},
        "mean_seconds": result.wait_seconds(),
        "queue_seconds": dict(result.queue_seconds),
    }


def check_plotting() -> None:
    """Raises InvalidArgument if `draw_rates` cannot draw, because matplotlib is not installed."""
    if find_spec("matplotlib") is None:
        raise InvalidArgument("needs matplotlib: pip install 'tandem-llm[bench]'", "--plot")


def draw_rates(
    curves: Mapping[str, Sequence[RateResult]], objective: Objective, path: Path
) -> None:
    """Draws TTFT, TPOT and attainment over the rate as a PNG; needs matplotlib.

    `curves`: by the name of each split. TTFT and TPOT of saturated rates are left out.
    """
    from matplotlib.figure import Figure  # an optional package

    figure = Figure(figsize=(12, 4), layout="constrained")
    axes = figure.subplots(1, 3)
    for axis, name in zip(axes, ("ttft", "tpot"), strict=False):
        axis.set_ylabel(f"{name.upper()} in ms")
        for split, results in curves.items():
            shown = [each for each in results if not each.is_saturated]
            figures = [each.result.summary().figures for each in shown]
            for quantile, style in (("p50", "-"), ("p99", "--")):
                axis.plot(
                    [each.rate for each in shown],
                    [each.get(f"{quantile}_{name}_ms", float("nan")) for each in figures],
                    style,
                    marker=".",
                    label=f"{split}, {quantile}",
                )
        if name in objective.limits:
            axis.axhline(objective.limits[name], color="gray", linewidth=0.8)
    axes[2].set_ylabel("attainment")
    for split, results in curves.items():
        axes[2].plot(
            [each.rate for each in results],
            [each.attainment for each in results],
            marker=".",
            label=split,
        )
    axes[2].axhline(objective.attainment, color="gray", linewidth=0.8)
    for axis in axes:
        axis.set_xlabel("requests/s")
        axis.set_ylim(bottom=0)
        axis.legend(fontsize="small")
    try:
        figure.savefig(path, format="png", dpi=110)
    except OSError as error:
        raise InvalidArgument(f"{path} cannot be written: {error.strerror}", "--plot") from None
