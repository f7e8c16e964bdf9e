"""Measures a router's CPU time for polling console pages: `python -m tandem.tests.bench.console`.

The router and a worker that computes nothing run in their own processes, as in `bench.router`.
Streams run meanwhile, so that the pages have data to show. The streams have few tokens, so the
router has little other work. It has one event loop and can use one core; the share of that core
that polling uses is its cost.
"""

import asyncio
import json
import tempfile
import time
from collections import Counter
from statistics import median
from typing import Annotated, Any, Final

import aiohttp
import typer

from tandem.cluster.bench.options import ServerAddress
from tandem.cluster.bench.target import open_target
from tandem.cluster.bench.workload import BenchPrompt
from tandem.cluster.tables import make_table, table_console
from tandem.proto.identity import PeerIdentity
from tandem.tests.bench.router import ChildProcess, cpu_seconds, router_process, worker_process

_POLL_SECONDS: Final = 1.0
_STEP_MS: Final = 250.0
_MAX_TOKENS: Final = 4_000
_PROMPT: Final = "The quick brown fox jumps over the lazy dog."

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


@app.command()
def main(
    pages: Annotated[
        list[int],
        typer.Option(help="Pages that poll at the same time; may be given several times."),
    ] = [1, 10],  # noqa: B006
    streams: Annotated[int, typer.Option(help="Streams that run meanwhile.")] = 32,
    seconds: Annotated[
        float, typer.Option(help="Seconds for each number of pages in a round.")
    ] = 4.0,
    rounds: Annotated[
        int, typer.Option(help="Rounds, each with and without pages; the medians count.")
    ] = 3,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Measure the router's CPU time with and without pages that poll once a second.

    Takes about a minute.
    """
    identity = PeerIdentity.generate()
    with (
        tempfile.TemporaryDirectory() as scratch,
        worker_process(identity, _STEP_MS) as worker,
        router_process(identity, worker, scratch) as router,
    ):
        costs = asyncio.run(_measure(router, [0, *pages], streams, seconds, rounds))
    if as_json:
        typer.echo(json.dumps(costs, indent=2))
        return
    numbers = ("router CPU, % of a core", "of which polling, % of a core", "CPU ms/poll")
    table = make_table("pages", numbers=numbers, boxed=False)
    for cost in costs:
        pages_text, *values = cost.values()
        table.add_row(str(pages_text), *(f"{value:.2f}" for value in values))
    table_console().print(table)


async def _measure(
    router: ChildProcess, pages: list[int], streams: int, seconds: float, rounds: int
) -> list[dict[str, Any]]:
    """Returns the router's CPU time in percent of a core for each number of pages.

    The first number of pages must be 0.
    """
    grpc_url, http_url = router[1].split()
    load = [asyncio.create_task(_stream(grpc_url)) for _ in range(streams)]
    found: dict[int, list[float]] = {number: [] for number in pages}
    num_polls: Counter[int] = Counter()
    try:
        async with aiohttp.ClientSession() as session:
            for _ in range(rounds):
                for number in pages:
                    answers: list[float] = []
                    polls = [
                        asyncio.create_task(_poll(session, http_url, answers))
                        for _ in range(number)
                    ]
                    await asyncio.sleep(_POLL_SECONDS)  # the first answers have all data
                    answers.clear()
                    before = cpu_seconds(router[0])
                    begin = time.monotonic()
                    await asyncio.sleep(seconds)
                    used = cpu_seconds(router[0]) - before
                    lasted = time.monotonic() - begin
                    found[number].append(100 * used / lasted)
                    num_polls[number] += len(answers)
                    await _cancel(polls)
    finally:
        await _cancel(load)
    costs = []
    for number, values in found.items():
        polling = median(value - without for value, without in zip(values, found[0], strict=True))
        # A busy machine answers less often than once a second.
        per_second = num_polls[number] / (rounds * seconds)
        costs.append(
            {
                "pages": number,
                "percent": median(values),
                "polling_percent": polling,
                "poll_ms": 10 * polling / per_second if per_second else 0.0,
            }
        )
    return costs


async def _cancel(tasks: list[asyncio.Task[None]]) -> None:
    """Cancels tasks and raises the error of a task that has failed."""
    for task in tasks:
        task.cancel()
    for result in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(result, Exception):
            raise result


async def _stream(url: str) -> None:
    async with open_target(
        ServerAddress(url=url, model="null"), ignore_eos=True
    ) as stream_completion:
        while True:
            await stream_completion(BenchPrompt(prompt=_PROMPT, max_tokens=_MAX_TOKENS), [])


async def _poll(session: aiohttp.ClientSession, url: str, answers: list[float]) -> None:
    """Polls in the same way as the page and appends the times of the answers."""
    cursor = ""
    while True:
        async with session.get(f"{url}/console/data", params={"cursor": cursor}) as answer:
            answer.raise_for_status()
            cursor = (await answer.json())["cursor"]
        answers.append(time.monotonic())
        await asyncio.sleep(_POLL_SECONDS)


if __name__ == "__main__":
    app()
