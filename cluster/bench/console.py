"""Measures what pages of the console that poll cost a router: `python -m tandem.cluster.bench.console`.

The router and its worker, which computes nothing, are processes of their own, as in `bench.router`. Streams run
meanwhile, whose tokens the worker makes at a fixed rate, so that the router has the same to do in each round.
"""

import asyncio
import json
import tempfile
from statistics import median
from typing import Annotated, Any, Final

import aiohttp
import typer

from ...proto.identity import PeerIdentity
from ..tables import make_table, table_console
from .options import ServerAddress
from .router import ChildProcess, child_process, cpu_seconds
from .target import open_target
from .workload import BenchPrompt

_POLL_SECONDS: Final = 1.0
_STEP_MS: Final = 20.0
_MAX_TOKENS: Final = 4_000
_PROMPT: Final = "The quick brown fox jumps over the lazy dog."

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


@app.command()
def main(
    pages: Annotated[list[int], typer.Option(help="Pages that poll at the same time; may be given several times.")] = [  # noqa: B006
        1,
        10,
    ],
    streams: Annotated[int, typer.Option(help="Streams that run meanwhile.")] = 32,
    seconds: Annotated[float, typer.Option(help="Of each round.")] = 10.0,
    rounds: Annotated[int, typer.Option(help="With and without pages by turns; the medians count.")] = 5,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Measure the router's CPU time with pages that poll once a second, and without."""
    identity = PeerIdentity.generate()
    with (
        tempfile.TemporaryDirectory() as scratch,
        child_process(identity, "serve-worker", str(_STEP_MS)) as worker,
        child_process(identity, "serve-router", worker[1], scratch) as router,
    ):
        costs = asyncio.run(_measure(router, [0, *pages], streams, seconds, rounds))
    if as_json:
        typer.echo(json.dumps(costs, indent=2))
        return
    table = make_table("pages", numbers=("router CPU, % of a core", "of which polling, % of a core"), boxed=False)
    for cost in costs:
        table.add_row(str(cost["pages"]), f"{cost['percent']:.2f}", f"{cost['polling_percent']:.2f}")
    table_console().print(table)


async def _measure(
    router: ChildProcess, pages: list[int], streams: int, seconds: float, rounds: int
) -> list[dict[str, Any]]:
    """Returns the router's CPU time in percent of a core for each number of pages, the first of which is 0."""
    grpc_url, http_url = router[1].split()
    load = [asyncio.create_task(_stream(grpc_url)) for _ in range(streams)]
    found: dict[int, list[float]] = {number: [] for number in pages}
    try:
        async with aiohttp.ClientSession() as session:
            for _ in range(rounds):
                for number in pages:
                    polls = [asyncio.create_task(_poll(session, http_url)) for _ in range(number)]
                    await asyncio.sleep(_POLL_SECONDS)  # the first answers, which have everything
                    before = cpu_seconds(router[0])
                    await asyncio.sleep(seconds)
                    found[number].append(100 * (cpu_seconds(router[0]) - before) / seconds)
                    await _cancel(polls)
    finally:
        await _cancel(load)
    medians = {number: median(values) for number, values in found.items()}
    return [{"pages": each, "percent": value, "polling_percent": value - medians[0]} for each, value in medians.items()]


async def _cancel(tasks: list[asyncio.Task[None]]) -> None:
    """Raises what a task has failed with."""
    for task in tasks:
        task.cancel()
    for result in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(result, Exception):
            raise result


async def _stream(url: str) -> None:
    async with open_target(ServerAddress(url=url, model="null"), ignore_eos=True) as stream_completion:
        while True:
            await stream_completion(BenchPrompt(prompt=_PROMPT, max_tokens=_MAX_TOKENS), [])


async def _poll(session: aiohttp.ClientSession, url: str) -> None:
    """Polls as the page does."""
    cursor = ""
    while True:
        async with session.get(f"{url}/console/data", params={"cursor": cursor}) as answer:
            answer.raise_for_status()
            cursor = (await answer.json())["cursor"]
        await asyncio.sleep(_POLL_SECONDS)


if __name__ == "__main__":
    app()
