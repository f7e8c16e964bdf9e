"""Sends the load of a benchmark, in closed or open loop, and measures the requests."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack
from dataclasses import replace
from time import perf_counter

from ...proto.errors import Unavailable
from .metrics import RequestFailed, RequestRecord, Summary, summarize
from .options import BenchOptions, LoadOptions, ServerAddress
from .target import StreamCompletion, open_target
from .threads import ThreadTimes
from .workload import BenchPrompt, Prompts

_WARMUP_CONCURRENCY = 8


async def run_bench(
    options: BenchOptions,
    report: Callable[[ServerAddress, int, Summary], None],
    announce: Callable[[str], object] = lambda _line: None,
) -> list[list[Summary]]:
    """Measures the servers in turn; returns the rounds of each.

    All servers get the same arrival times and prompts of the same lengths, but never the same
    random prompts: if two URLs belong to one service, its prefix cache would favour the second.
    Calls `announce` with a line about a trace, and `report` after each round. Raises
    InvalidArgument for an invalid file, and Unavailable if a server answers no warm-up request.
    """
    prompts = Prompts(options.workload)
    if prompts.description:
        announce(f"trace: {prompts.description}")
    addresses = options.addresses
    async with AsyncExitStack() as stack:
        targets = [
            await stack.enter_async_context(
                open_target(address, ignore_eos=options.workload.ignore_eos)
            )
            for address in addresses
        ]
        for address, target in zip(addresses, targets, strict=True):
            await _warm_up(address, target, prompts, options.load)
        rounds: list[list[Summary]] = [[] for _ in targets]
        for number in range(options.rounds):
            for turn, (address, target, summaries) in enumerate(
                zip(addresses, targets, rounds, strict=True)
            ):
                own = prompts.of_round(number * len(targets) + turn, options.load)
                times = prompts.arrivals(options.load, options.workload.seed + number)
                before = ThreadTimes.take()
                records = await send_load(target, own, options.load, times)
                busy = ThreadTimes.take().count_busy(before)
                summaries.append(replace(summarize(records, options.slo), busy_threads=busy))
                report(address, number, summaries[-1])
    return rounds


async def send_load(
    target: StreamCompletion,
    prompts: Iterator[BenchPrompt],
    load: LoadOptions,
    arrivals: Iterator[float] | None = None,
) -> list[RequestRecord]:
    """Sends one round, at least one request, and waits for every response.

    `arrivals`: the times of an open loop, in seconds after its start; None: a closed loop. Each
    request has at most `load.timeout` seconds.
    """
    if arrivals is not None:
        return await _open_loop(target, prompts, arrivals, load)
    return await _closed_loop(target, prompts, load)


async def _closed_loop(
    target: StreamCompletion, prompts: Iterator[BenchPrompt], load: LoadOptions
) -> list[RequestRecord]:
    """Keeps `load.concurrency` requests in progress: each caller sends one after another."""
    records: list[RequestRecord] = []
    end = perf_counter() + (load.seconds or float("inf"))

    async def call() -> None:
        for prompt in prompts:
            records.append(await _measure(target, prompt, load.timeout))
            if perf_counter() >= end:
                return

    async with asyncio.TaskGroup() as callers:
        for _ in range(load.concurrency or 1):
            callers.create_task(call())
    return records


async def _open_loop(
    target: StreamCompletion,
    prompts: Iterator[BenchPrompt],
    offsets: Iterator[float],
    load: LoadOptions,
) -> list[RequestRecord]:
    """Sends each request at its arrival time, whether or not the earlier ones have ended."""
    records: list[RequestRecord] = []
    begin = perf_counter()

    async def send(prompt: BenchPrompt, planned: float) -> None:
        record = await _measure(target, prompt, load.timeout)
        records.append(replace(record, late=max(0.0, record.started - planned)))

    async with asyncio.TaskGroup() as requests:
        for number, (offset, prompt) in enumerate(zip(offsets, prompts, strict=False)):
            if number and load.seconds is not None and offset > load.seconds:
                break
            await asyncio.sleep(max(0.0, begin + offset - perf_counter()))
            requests.create_task(send(prompt, begin + offset))
    return records


async def _measure(target: StreamCompletion, prompt: BenchPrompt, timeout: float) -> RequestRecord:
    chunk_times: list[float] = []
    counts = 0, 0
    failure: RequestFailed | None = None
    started = perf_counter()
    try:
        async with asyncio.timeout(timeout):
            counts = await target(prompt, chunk_times)
    except RequestFailed as error:
        failure = error
    except TimeoutError:
        failure = RequestFailed(
            "timeout", f"not complete after {timeout:g} s, {len(chunk_times)} chunks received"
        )
    return RequestRecord(
        started=started,
        ended=perf_counter(),
        chunk_times=chunk_times,
        prompt_tokens=counts[0],
        output_tokens=counts[1],
        failure=failure,
    )


async def _warm_up(
    address: ServerAddress, target: StreamCompletion, prompts: Prompts, load: LoadOptions
) -> None:
    if not load.warmup:
        return
    concurrency = min(load.warmup, load.concurrency or _WARMUP_CONCURRENCY)
    some = LoadOptions(concurrency=concurrency, timeout=load.timeout)
    warmups = (prompt for _, prompt in zip(range(load.warmup), prompts.warmup(), strict=False))
    failures = [record.failure for record in await _closed_loop(target, warmups, some)]
    if all(failures) and failures[0]:
        detail = f" ({failures[0].detail})" if failures[0].detail else ""
        raise Unavailable(f"{address.url} answers no warm-up request: {failures[0].kind}{detail}")
