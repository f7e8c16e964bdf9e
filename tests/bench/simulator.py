"""Measures the simulator: `python -m tandem.tests.bench.simulator --trace FILE`.

Serves a trace through exact engines, through many coarse workers, and through 16 workers of either
kind, which should agree. Prints the processor time that each takes.
"""

import json
import time
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from tandem.cluster.sim.cost import ServiceCosts, StepCosts
from tandem.cluster.sim.service import SimulatedPool, SimulatedService
from tandem.cluster.sim.simulate import simulate
from tandem.cluster.tables import make_table, table_console
from tandem.cluster.traces.read import TracedRequest, read_trace
from tandem.workers.engine.config import Budgets

_STEP: Final = StepCosts(
    fixed=0.025,
    each_sequence=0.001,
    each_context_token=3e-7,
    each_prompt_token=1e-4,
    each_prompt_context=5e-9,
)
COSTS: Final = ServiceCosts(
    prefill=_STEP,
    decode=_STEP,
    router_seconds_per_request=0.001,
    router_seconds_per_token=2e-5,
    transfer_seconds=0.005,
    transfer_bytes_per_second=5e9,
)
"""Round figures of a small accelerator. They are not measured: the time of a run matters here."""

_FIGURES: Final = ("mean_ttft_ms", "p99_ttft_ms", "mean_tpot_ms", "p99_tpot_ms")

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


@app.command()
def main(
    trace: Annotated[Path, typer.Option(help="A trace: Mooncake's JSON lines or Azure's CSV.")],
    seconds: Annotated[float, typer.Option(help="The part of the trace to serve.")] = 3600.0,
    exact: Annotated[int, typer.Option(help="Exact workers of each pool; 0: no such run.")] = 4,
    coarse: Annotated[int, typer.Option(help="Coarse workers of each pool.")] = 500,
    compared: Annotated[
        int, typer.Option(help="Workers of each pool in a run of either kind.")
    ] = 8,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Measure how long simulations of a trace take."""
    requests = [each for each in read_trace(trace) if each.time < seconds]
    runs = [(exact, True), (coarse, False), (compared, True), (compared, False)]
    found = [_measure(requests, number, is_exact) for number, is_exact in runs if number]
    if as_json:
        typer.echo(json.dumps(found, indent=2))
        return
    numbers = ("seconds", "CPU s", "requests", "tokens", "failed", *_FIGURES)
    table = make_table("simulation", numbers=numbers, boxed=False)
    for run in found:
        table.add_row(
            f"{run['workers']} + {run['workers']} {run['fidelity']}",
            *(f"{run[name]:,.1f}" for name in ("wall_seconds", "cpu_seconds")),
            *(f"{run[name]:,}" for name in ("requests", "tokens", "failed")),
            *(f"{run[name]:,.1f}" for name in _FIGURES),
        )
    table_console().print(table)


def _measure(requests: list[TracedRequest], workers: int, is_exact: bool) -> dict[str, Any]:
    pool = SimulatedPool(workers=workers, num_blocks=8192, budgets=Budgets(max_sequences=64))
    service = SimulatedService(
        prefill=pool,
        decode=pool,
        token_bytes=131_072,
        context_tokens=32_768,
        exact=is_exact,
    )
    wall, cpu = time.perf_counter(), time.process_time()
    result = simulate(service, requests, COSTS)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    summary = result.summary()
    return {
        "workers": workers,
        "fidelity": "exact" if is_exact else "coarse",
        "wall_seconds": wall,
        "cpu_seconds": cpu,
        "requests": summary.num_requests,
        "tokens": summary.output_tokens,
        "failed": summary.num_requests - summary.num_completed,
        **{name: summary.figures[name] for name in _FIGURES},
    }


if __name__ == "__main__":
    app()
