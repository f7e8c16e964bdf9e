"""Measures what following the directory costs: `python -m tandem.tests.soak.directory --workers
300`.

Starts a local Ray with a directory, in which many workers register that do not exist: each sends a
heartbeat a second, with another load. This process is one of several routers that follow it; it
does nothing else.
"""

import asyncio
import json
import os
import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import ray
import typer

from tandem.cluster.serve.directory import CALL_SECONDS, close_directory, open_directory
from tandem.tests.soak.directory_members import SERVICE, Heartbeats, RouterMember

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    workers: Annotated[int, typer.Option(min=1, help="Workers that send heartbeats.")] = 300,
    routers: Annotated[int, typer.Option(min=1, help="Routers that follow the directory.")] = 2,
    seconds: Annotated[float, typer.Option(min=1, help="To measure, after all are listed.")] = 10.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Measure the share of a core that a router and the directory need for the list of workers."""
    figures = measure_directory(workers, routers, seconds)
    if as_json:
        typer.echo(json.dumps(figures))
        return
    for name, value in figures.items():
        typer.echo(f"{name.replace('_', ' '):32}{value:10.4g}")


def measure_directory(num_workers: int, num_routers: int, seconds: float) -> dict[str, float]:
    """Returns the shares of a core of a router and of the directory, and the polls of a router."""
    with _local_ray():
        return asyncio.run(_measure(num_workers, num_routers, seconds))


@contextmanager
def _local_ray() -> Iterator[None]:
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")
    ray.init(include_dashboard=False, log_to_driver=False, num_cpus=2, configure_logging=False)
    try:
        open_directory(SERVICE)
        yield
    finally:
        close_directory(SERVICE)
        ray.shutdown()


async def _measure(num_workers: int, num_routers: int, seconds: float) -> dict[str, float]:
    numbers = range(1, num_routers)
    actors: list[Any] = [ray.remote(num_cpus=0)(Heartbeats).remote(num_workers)]
    actors += [ray.remote(num_cpus=0)(RouterMember).remote(number) for number in numbers]
    for each in actors:
        each.run.remote()
    router = RouterMember(0)
    following = asyncio.create_task(router.run())
    async with asyncio.timeout(num_workers * CALL_SECONDS), router.changed:
        await router.changed.wait_for(lambda: len(router.registry.workers()) == num_workers)
    before = await _directory_figures()
    began, thread, process = time.monotonic(), time.thread_time(), time.process_time()
    counted = router.counts.copy()
    await asyncio.sleep(seconds)
    took = time.monotonic() - began
    counts = router.counts - counted
    figures = {
        "event_loop_share": (time.thread_time() - thread) / took,
        "router_process_share": (time.process_time() - process) / took,
        "directory_process_share": (await _directory_figures() - before) / took,
        "polls_per_second": counts["polls"] / took,
    }
    following.cancel()
    for each in actors:
        ray.kill(each)
    return figures


async def _directory_figures() -> float:
    """Returns the CPU seconds of the directory's process."""
    used: float = await open_directory(SERVICE).__ray_call__.remote(_cpu_seconds)
    return used


def _cpu_seconds(_actor: Any) -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


if __name__ == "__main__":
    app()
