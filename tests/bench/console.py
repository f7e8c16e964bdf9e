"""Measures what pages of the console that poll cost a router: `python -m
tandem.tests.bench.console`.

The router and its worker, which computes nothing, are processes of their own, as in `bench.router`.
Streams run meanwhile, so that there is something to tell, with so few tokens that the router has
hardly anything else to do. It has
one event loop, so it can take one core: what polling takes of that is its share of the router.
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
    ] = [  # noqa: B006
        1,
        10,
    ],
    streams: Annotated[int, typer.Option(help="Streams that run meanwhile.")] = 32,
    seconds: Annotated[float, typer.Option(help="Of each number of pages in a round.")] = 4.0,
    rounds: Annotated[
        int, typer.Option(help="With and without pages by turns; the medians count.")
    ] = 3,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Measure the router's CPU time with pages that poll once a second, and without: about a
    minute.
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
    """Returns the router's CPU time in percent of a core for each number of pages, the first of
    which is 0.
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
                    await asyncio.sleep(_POLL_SECONDS)  # the first answers, which have everything
                    answers.clear()
                    before, begin = cpu_seconds(router[0]), time.monotonic()
                    await asyncio.sleep(seconds)
                    used, lasted = cpu_seconds(router[0]) - before, time.monotonic() - begin
                    found[number].append(100 * used / lasted)
                    num_polls[number] += len(answers)
                    await _cancel(polls)
    finally:
        await _cancel(load)
    costs = []
    for number, values in found.items():
        polling = median(value - without for value, without in zip(values, found[0], strict=True))
        # A machine that does other things, too, answers less often than once a second.
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
    """Raises what a task has failed with."""
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
    """Polls as the page does; notes when it was answered."""
    cursor = ""
    while True:
        async with session.get(f"{url}/console/data", params={"cursor": cursor}) as answer:
            answer.raise_for_status()
            cursor = (await answer.json())["cursor"]
        answers.append(time.monotonic())
        await asyncio.sleep(_POLL_SECONDS)


if __name__ == "__main__":
    app()
