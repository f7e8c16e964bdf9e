"""Opens connections that take what is not theirs, on a service that runs, and measures what a good
client notices.

    tandem serve smollm2-135m-instruct
    python -m tandem.tests.soak.connections --http http://127.0.0.1:8080 --grpc
    grpc://127.0.0.1:50051

A process of its own keeps 500 connections that send their first line a byte at a time, half of them
to each server, and opens and closes 20,000 others meanwhile, 1,000 a second. A good client asks
over both APIs, before and during that. Exits with 1 if its p99 TTFT at either has more than
doubled.
"""

import argparse
import asyncio
import os
import resource
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Final
from urllib.parse import urlsplit

from tandem.cluster.bench.options import ServerAddress
from tandem.cluster.bench.target import StreamCompletion, open_target
from tandem.cluster.bench.workload import BenchPrompt
from tandem.router.client.wire import API_KEY_VARIABLE
from tandem.tests.soak.samples import HEAD, line, quantile

MOST: Final = 2.0
_DRIP_SECONDS: Final = 1.0
_AT_ONCE: Final = 50  # connections under way of those that come and go
_SLOW_BYTES: Final = (
    b"GET /health HTTP/1.1\r\n" + b"X" * 10_000,
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0" * 10_000,
)


async def drip(place: tuple[str, int], data: bytes) -> None:
    """Keeps a slow connection; when the server ends it, another one."""
    while True:
        with suppress(OSError):
            _, writer = await asyncio.open_connection(*place)
            try:
                for byte in data:
                    writer.write(bytes([byte]))
                    await writer.drain()
                    await asyncio.sleep(_DRIP_SECONDS)
            finally:
                writer.close()
        await asyncio.sleep(_DRIP_SECONDS)


async def come_and_go(places: Sequence[tuple[str, int]], count: int, rate: int) -> int:
    """Opens and closes so many connections, `rate` a second; returns how many were refused."""
    num_refused = 0
    left = iter(range(count))
    began = time.perf_counter()

    async def one_after_the_other() -> None:
        nonlocal num_refused
        for number in left:
            await asyncio.sleep(began + number / rate - time.perf_counter())
            try:
                _, writer = await asyncio.open_connection(*places[number % len(places)])
                writer.close()
            except OSError:
                num_refused += 1

    await asyncio.gather(*(one_after_the_other() for _ in range(_AT_ONCE)))
    return num_refused


async def attack(
    places: Sequence[tuple[str, int]], num_slow: int, num_closed: int, rate: int
) -> None:
    """Runs the connections; says when the slow ones are there, and when the others are over. Ends
    with its stdin.
    """
    tasks = [
        asyncio.create_task(drip(places[number % 2], _SLOW_BYTES[number % 2]))
        for number in range(num_slow)
    ]
    await asyncio.sleep(2 * _DRIP_SECONDS)
    print("slow", flush=True)
    refused = await come_and_go(places, num_closed, rate)
    print(f"over {refused}", flush=True)
    await asyncio.to_thread(sys.stdin.read)
    for task in tasks:
        task.cancel()


async def first_token(ask: StreamCompletion) -> float:
    """Returns the TTFT of one request."""
    chunks: list[float] = []
    began = time.perf_counter()
    await ask(BenchPrompt(prompt="The capital of France is", max_tokens=4), chunks)
    return chunks[0] - began


async def measure(urls: Sequence[str], least: int, over: asyncio.Event) -> dict[str, list[float]]:
    """Returns TTFTs at each server, at least so many, until it is over."""
    found: dict[str, list[float]] = {url: [] for url in urls}

    async def ask_again_and_again(url: str) -> None:
        address = ServerAddress(url=url, api_key=os.environ.get(API_KEY_VARIABLE, ""))
        async with open_target(address, ignore_eos=True) as ask:
            await first_token(ask)
            while len(found[url]) < least or not over.is_set():
                found[url].append(await first_token(ask))

    await asyncio.gather(*map(ask_again_and_again, urls))
    return found


async def run(options: argparse.Namespace) -> bool:
    """Measures and prints; returns whether the bound holds."""
    urls = (options.http, options.grpc)
    over = asyncio.Event()
    asyncio.get_running_loop().call_later(options.seconds, over.set)
    before = await measure(urls, options.requests, over)
    over = asyncio.Event()
    counts = map(str, (options.slow, options.closed, options.rate))
    command = [
        sys.executable,
        "-m",
        "tandem.tests.soak.connections",
        "--http",
        urls[0],
        "--grpc",
        urls[1],
    ]
    pipe = asyncio.subprocess.PIPE
    attacker = await asyncio.create_subprocess_exec(
        *command, "--attack", *counts, stdin=pipe, stdout=pipe
    )
    assert attacker.stdin is not None
    assert attacker.stdout is not None
    await attacker.stdout.readline()
    began = time.perf_counter()
    measuring = asyncio.create_task(measure(urls, options.requests, over))
    said = (await attacker.stdout.readline()).decode()
    seconds = time.perf_counter() - began
    over.set()
    during = await measuring
    attacker.stdin.close()
    await attacker.wait()
    print(
        f"{options.slow} slow connections; {options.closed} opened and closed in {seconds:.1f} s,"
    )
    print(f"{said.split()[-1]} of them were not let in")
    print("TTFT, ms")
    print(HEAD)
    ratios = []
    for url in urls:
        print(line(f"{url} before", before[url]))
        print(line(f"{url} during", during[url]))
        ratios.append(quantile(during[url], 0.99) / quantile(before[url], 0.99))
    print(
        f"p99 during / p99 before: {ratios[0]:.2f} and {ratios[1]:.2f}, at most {MOST:g} is wanted"
    )
    return max(ratios) <= MOST


def main(arguments: Sequence[str]) -> int:
    """Runs the command; returns its exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m tandem.tests.soak.connections", description=__doc__
    )
    parser.add_argument("--http", default="http://127.0.0.1:8080")
    parser.add_argument("--grpc", default="grpc://127.0.0.1:50051")
    parser.add_argument(
        "--slow", type=int, default=500, help="connections that send a byte a second"
    )
    parser.add_argument(
        "--closed", type=int, default=20_000, help="connections that are opened and closed"
    )
    parser.add_argument("--rate", type=int, default=1_000, help="of those, opened a second")
    parser.add_argument(
        "--requests", type=int, default=200, help="of the good client, at least, to each server"
    )
    parser.add_argument(
        "--seconds", type=float, default=10.0, help="of the measurement before, at least"
    )
    parser.add_argument("--attack", nargs=3, type=int, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, hard), hard))
    if options.attack:
        places = [
            (str(parts.hostname), parts.port or 80)
            for parts in map(urlsplit, (options.http, options.grpc))
        ]
        # An attacker's computer takes no time from the service's; here it gets what that leaves.
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
        asyncio.run(attack(places, *options.attack))
        return 0
    return 0 if asyncio.run(run(options)) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
