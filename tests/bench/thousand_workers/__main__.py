"""Runs the benchmark of 1,000 workers: `python -m tandem.tests.bench.thousand_workers`."""

import json
import multiprocessing
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from tandem.cluster.traces.read import TraceScale, parse_scale, read_trace
from tandem.tests.bench.thousand_workers.memory import send_memory
from tandem.tests.bench.thousand_workers.placement import PlacementFigures
from tandem.tests.bench.thousand_workers.placement import run as run_placement
from tandem.tests.bench.thousand_workers.sessions import measure_router
from tandem.tests.soak.directory import measure_directory
from tandem.workers.serve.load_reports import IDLE_SECONDS

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


class Part(StrEnum):
    """A part of the benchmark."""

    PLACEMENT = "placement"
    ROUTER = "router"
    DIRECTORY = "directory"
    MEMORY = "memory"


@app.command()
def main(
    workers: Annotated[int, typer.Option(min=4, help="Half of them are prefill workers.")] = 1_000,
    part: Annotated[
        list[Part], typer.Option(help="Parts to measure; may be given several times.")
    ] = list(Part),  # noqa: B006
    conversations: Annotated[
        int, typer.Option(help="Synthetic conversations of six turns to place, without a trace.")
    ] = 1_000,
    trace: Annotated[
        Path | None, typer.Option(help="A trace of requests to place, as for tandem bench.")
    ] = None,
    trace_requests: Annotated[int, typer.Option(help="First requests of the trace.")] = 6_000,
    length_scale: Annotated[str, typer.Option(help="Factor of the trace's lengths.")] = "1/8",
    speed: Annotated[float, typer.Option(help="Factor of the trace's rate of arrivals.")] = 300.0,
    changed_blocks: Annotated[
        int, typer.Option(help="Blocks that a worker stores, and evicts, each second.")
    ] = 32,
    routers: Annotated[int, typer.Option(help="Routers of the directory and of placement.")] = 4,
    seconds: Annotated[float, typer.Option(help="Time of each measurement of CPU time.")] = 20.0,
    virtual_minutes: Annotated[int, typer.Option(help="Virtual time of the memory's part.")] = 60,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Measure placement, the control traffic of a router and of the directory, and memory."""
    found: dict[str, Any] = {"workers": workers}
    if Part.PLACEMENT in part:
        scale = TraceScale(parse_scale(length_scale), speed)
        requests = read_trace(trace, scale)[:trace_requests] if trace else []
        place = partial(run_placement, workers, conversations, requests)
        found["bounded"] = _described(place())
        found["full_scan"] = _described(place(full_scan=True))
        for interval in (0.0, IDLE_SECONDS):
            figures = place(routers=routers, idle_report_seconds=interval)
            found[f"{routers}_routers_{interval:g}_s"] = _described(figures)
    if Part.ROUTER in part:
        found["router"] = measure_router(workers, changed_blocks, seconds)
    if Part.DIRECTORY in part:
        found["directory"] = measure_directory(workers, routers, seconds)
    if Part.MEMORY in part:
        found["memory"] = _memory(workers, virtual_minutes)
    if as_json:
        typer.echo(json.dumps(found, indent=1))
        return
    for name, value in found.items():
        if isinstance(value, dict):
            typer.echo(name)
            for each, figure in value.items():
                typer.echo(f"  {each:28}{figure:12.4g}")
        else:
            typer.echo(f"{name:30}{value:12.4g}")


def _described(figures: PlacementFigures) -> dict[str, float]:
    return {
        "requests": figures.simulated.num_requests,
        "place_p50_ms": figures.percentile(50),
        "place_p99_ms": figures.percentile(99),
        "cached_share": figures.simulated.hit_rate,
        "mean_ttft_ms": 1e3 * figures.simulated.mean_ttft,
        "p95_ttft_ms": 1e3 * figures.simulated.p95_ttft,
    }


def _memory(workers: int, minutes: int) -> dict[str, float]:
    """Returns the megabytes at each sixth of the time, measured in a new process."""
    found: dict[str, float] = {}
    spawn = multiprocessing.get_context("spawn")
    receiver, sender = spawn.Pipe(duplex=False)
    process = spawn.Process(target=send_memory, args=(sender, workers, 60 * minutes))
    process.start()
    sender.close()
    while True:
        try:
            second, directory, router = receiver.recv()
        except EOFError:
            break
        name = f"{second / 60:g}_min"
        found[f"{'router' if router else 'directory'}_mb_{name}"] = router or directory
    process.join()
    if process.exitcode:
        raise RuntimeError("the memory could not be measured")
    return found


if __name__ == "__main__":
    app()
