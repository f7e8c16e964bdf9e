"""Measures what 64 ambiguous grammars cost four streams without one, on a service that runs.

    tandem serve smollm2-135m-instruct
    python -m tandem.tests.soak.grammars --url grpc://127.0.0.1:50051

Prints the gaps between the tokens of the four: alone, beside 64 streams without a grammar, beside
64 with ambiguous ones, all different. Exits with 1 if their worst gap beside the grammars is more
than three times their worst gap beside
as many streams without any: 64 more rows alone make a step several times as long.
"""

import argparse
import asyncio
import itertools
import os
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any, Final

from tandem.proto.errors import TandemError
from tandem.router.client.client import AsyncClient
from tandem.router.client.wire import API_KEY_VARIABLE
from tandem.tests.ambiguous import AMBIGUOUS
from tandem.tests.soak.samples import HEAD, line

NUM_PLAIN: Final = 4
NUM_BESIDE: Final = 64
MOST: Final = 3.0
_KINDS: Final = ("pairs", "deep", "deeper", "operators")  # which the limits do not refuse at once
_SECONDS: Final = 600.0


def beside(kind: str) -> Iterator[dict[str, Any]]:
    """Yields the options of requests that run beside the measured ones, without end."""
    for number in itertools.count():
        options: dict[str, Any] = {"max_tokens": 400, "seed": number}
        if kind == "ambiguous":
            text = AMBIGUOUS[_KINDS[number % len(_KINDS)]]
            options["grammar"] = (
                f"{text}\nUNUSED: /never {number}/"  # so that none is compiled already
            )
        yield options | ({} if kind == "ambiguous" else {"ignore_eos": True})


async def run_beside(
    client: AsyncClient, requests: Iterator[dict[str, Any]], ended: dict[str, int]
) -> None:
    """Runs one request after the other until it is cancelled."""
    for options in requests:
        try:
            await client.generate("Once upon a time", timeout=_SECONDS, **options)
            outcome = "completed"
        except TandemError as error:
            outcome = error.message[:90]
        ended[outcome] = ended.get(outcome, 0) + 1


async def gaps(client: AsyncClient, number: int, num_tokens: int) -> list[float]:
    """Returns the seconds between the tokens of one stream."""
    found: list[float] = []
    last = 0.0
    options: dict[str, Any] = {
        "max_tokens": num_tokens,
        "ignore_eos": True,
        "seed": number,
        "timeout": _SECONDS,
    }
    async with client.stream(f"Story {number}: once upon a time", **options) as stream:
        async for delta in stream:
            now = time.perf_counter()
            if delta.token_ids and last:
                found.append(now - last)
            last = now if delta.token_ids else last
    return found


async def measure(
    client: AsyncClient, kind: str, num_tokens: int, ended: dict[str, int]
) -> list[float]:
    """Returns the gaps of the plain streams beside requests of a kind, or alone."""
    requests = beside(kind)
    others = [
        asyncio.create_task(run_beside(client, requests, ended))
        for _ in range(NUM_BESIDE if kind else 0)
    ]
    try:
        plain = await asyncio.gather(
            *(gaps(client, number, num_tokens) for number in range(NUM_PLAIN))
        )
    finally:
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
    return list(itertools.chain.from_iterable(plain))


async def run(url: str, num_tokens: int) -> bool:
    """Measures and prints; returns whether the bound holds."""
    ended: dict[str, int] = {}
    async with AsyncClient(url, api_key=os.environ.get(API_KEY_VARIABLE, "")) as client:
        await measure(client, "", 50, ended)
        alone = await measure(client, "", num_tokens, ended)
        free = await measure(client, "free", num_tokens, ended)
        ended.clear()
        ambiguous = await measure(client, "ambiguous", num_tokens, ended)
    print(f"gaps of {NUM_PLAIN} streams, ms")
    print(HEAD)
    for name, found in (
        ("alone", alone),
        ("beside 64 free ones", free),
        ("beside 64 ambiguous ones", ambiguous),
    ):
        print(line(name, found))
    ratio = max(ambiguous) / max(free)
    print(
        f"worst gap beside ambiguous grammars / worst gap alone: {max(ambiguous) / max(alone):.2f}"
    )
    print(
        f"worst gap beside ambiguous grammars / beside free ones: {ratio:.2f}, at most {MOST:g} is "
        "wanted"
    )
    for outcome, count in sorted(ended.items()):
        print(f"requests with grammars: {count} {outcome}")
    return ratio <= MOST


def main(arguments: Sequence[str]) -> int:
    """Runs the command; returns its exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m tandem.tests.soak.grammars", description=__doc__
    )
    parser.add_argument(
        "--url", default="grpc://127.0.0.1:50051", help="of the service's gRPC server"
    )
    parser.add_argument("--tokens", type=int, default=600, help="of each measured stream")
    options = parser.parse_args(arguments)
    return 0 if asyncio.run(run(options.url, options.tokens)) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
