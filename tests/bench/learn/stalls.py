"""Measures how long streams stand still while long prompts are computed, in three services.

In the first, a worker computes a whole prompt in one step, and all streams wait for it. In the
second, it computes a chunk beside each token of the streams (chunked prefill: Sarathi-Serve, arXiv
2403.02310). In the third, other workers compute the prompts (disaggregation: DistServe, arXiv
2401.09670).
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, replace
from itertools import repeat
from typing import Any, Final

import numpy as np

from tandem.cluster.bench.load import send_load
from tandem.cluster.bench.metrics import RequestRecord, summarize
from tandem.cluster.bench.options import LoadOptions, ServerAddress
from tandem.cluster.bench.target import StreamCompletion, open_target
from tandem.cluster.bench.workload import BenchPrompt
from tandem.tests.bench.learn.figure import LearnFigure, Panel, Series
from tandem.tests.bench.learn.local import checked, conditions, config_of, random_prompts
from tandem.tests.bench.learn.service import running_service

_SHORT: Final = 16  # tokens of the streams' prompts
_AFTER_LONG: Final = 32  # output tokens of a long prompt
_TIMEOUT: Final = 60.0
_ALONE_SHARE: Final = 0.4  # of the time, in which the streams are alone

OpenTarget = Callable[[Mapping[str, object]], AbstractAsyncContextManager[StreamCompletion]]
"""Starts a service with a configuration; yields the function that sends requests to it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StallLoad:
    """Describes the requests of both kinds, and for how long they are sent."""

    vocab_size: int
    num_streams: int
    stream_tokens: int  # output of a stream
    long_tokens: int  # of a long prompt
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Stalls:
    """Holds the gaps between tokens of the streams, in milliseconds, and other times."""

    alone_ms: float  # median gap without long prompts
    median_ms: float  # with long prompts
    p99_ms: float
    longest_ms: float
    tokens_per_s: float  # of the streams
    long_ttft_s: float  # mean
    num_long: int


def services(long_tokens: int) -> dict[str, dict[str, Any]]:
    """Returns the pools of the three services by name."""
    whole = {
        "chunk_tokens": long_tokens,
        # With few sequences a step takes a third of this number.
        "mixed_chunk_tokens": 3 * long_tokens,
        "mixed_step_factor": None,
    }
    return {
        "whole prompts": {"prefill": {"replicas": 0}, "decode": whole},
        "chunked prefill": {"prefill": {"replicas": 0}, "decode": {}},
        "separate prefill worker": {"prefill": {"replicas": 1}, "decode": {}},
    }


def measure(
    model: str,
    *,
    dtype: str,
    num_streams: int,
    long_tokens: int,
    seconds: float,
    open_service: OpenTarget | None = None,
) -> LearnFigure:
    """Starts the services in turn, and sends each the same requests for `seconds`."""
    load = StallLoad(
        vocab_size=config_of(model).vocab_size,
        num_streams=num_streams,
        stream_tokens=256,
        long_tokens=long_tokens,
        seconds=seconds,
    )
    common = {"model": model, "dtype": dtype, "prefix_caching": False}
    configs = {name: common | pools for name, pools in services(long_tokens).items()}
    found = asyncio.run(_measure(open_service or _serve, configs, load))
    return LearnFigure(
        name="stalls",
        title="Streams beside long prompts",
        notes=(
            conditions(model, dtype),
            f"{num_streams} streams; prompts of {long_tokens:,} tokens, one after another, "
            f"{(1 - _ALONE_SHARE) * seconds:g} s for each service.",
        ),
        heads=(
            "service",
            "median gap alone, ms",
            "median gap, ms",
            "p99 gap, ms",
            "longest gap, ms",
            "tokens/s of the streams",
            "mean TTFT of the long prompts, s",
            "long prompts",
        ),
        rows=tuple(
            (
                name,
                each.alone_ms,
                each.median_ms,
                each.p99_ms,
                each.longest_ms,
                each.tokens_per_s,
                each.long_ttft_s,
                each.num_long,
            )
            for name, each in found.items()
        ),
        panels=_panels(found),
    )


async def measure_stalls(target: StreamCompletion, load: StallLoad) -> Stalls:
    """Sends the streams alone, then beside long prompts. Raises RuntimeError if one fails."""
    # The first requests of a service pay for threads and connections.
    await _streams(target, replace(load, stream_tokens=8), 0.1, seed="warm-up")
    alone = await _streams(target, load, _ALONE_SHARE * load.seconds, seed="alone")
    rest = (1 - _ALONE_SHARE) * load.seconds
    streams, long = await asyncio.gather(
        _streams(target, load, rest, seed="beside"), _long_prompts(target, load, rest)
    )
    # Afterwards the streams are alone again.
    end = max(record.ended for record in long)
    gaps = gaps_until(streams, end)
    begin = min(record.started for record in streams)
    num_tokens = sum(tokens_until(record, end) for record in streams)
    return Stalls(
        alone_ms=float(np.median(gaps_until(alone, np.inf))) * 1e3,
        median_ms=float(np.median(gaps)) * 1e3,
        p99_ms=float(np.percentile(gaps, 99)) * 1e3,
        longest_ms=max(gaps) * 1e3,
        tokens_per_s=num_tokens / (end - begin),
        long_ttft_s=summarize(long, {}).figures["mean_ttft_ms"] / 1e3,
        num_long=len(long),
    )


def gaps_until(records: Sequence[RequestRecord], end: float) -> list[float]:
    """Returns the seconds between tokens of a stream, of the gaps that began before `end`."""
    return [
        gap
        for record in records
        for begin, gap in zip(record.chunk_times, record.gaps, strict=False)
        if begin < end
    ]


def tokens_until(record: RequestRecord, end: float) -> float:
    """Returns the tokens of a request that had arrived at `end`; its chunks count alike."""
    arrived = sum(time <= end for time in record.chunk_times)
    return record.output_tokens * arrived / len(record.chunk_times)


async def _streams(
    target: StreamCompletion, load: StallLoad, seconds: float, seed: str
) -> list[RequestRecord]:
    prompts = _endless(load.vocab_size, _SHORT, load.stream_tokens, seed)
    sent = LoadOptions(
        concurrency=load.num_streams, num_prompts=None, seconds=seconds, timeout=_TIMEOUT
    )
    return checked(await send_load(target, prompts, sent))


async def _long_prompts(
    target: StreamCompletion, load: StallLoad, seconds: float
) -> list[RequestRecord]:
    prompts = _endless(load.vocab_size, load.long_tokens, _AFTER_LONG, "long")
    sent = LoadOptions(concurrency=1, num_prompts=None, seconds=seconds, timeout=_TIMEOUT)
    return checked(await send_load(target, prompts, sent))


def _endless(vocab_size: int, num_tokens: int, max_tokens: int, seed: str) -> Iterator[BenchPrompt]:
    for number, length in enumerate(repeat(max_tokens)):
        yield from random_prompts(vocab_size, num_tokens, [length], seed=f"{seed} {number}")


@asynccontextmanager
async def _serve(config: Mapping[str, object]) -> AsyncIterator[StreamCompletion]:
    with running_service(config) as url:
        async with open_target(ServerAddress(url=url), ignore_eos=True) as target:
            yield target


async def _measure(
    open_service: OpenTarget, configs: Mapping[str, Mapping[str, object]], load: StallLoad
) -> dict[str, Stalls]:
    found = {}
    for name, config in configs.items():
        async with open_service(config) as target:
            found[name] = await measure_stalls(target, load)
    return found


def _panels(found: Mapping[str, Stalls]) -> tuple[Panel, ...]:
    names = tuple(name.replace(" prefill", "\nprefill") for name in found)
    places = tuple(float(number) for number in range(len(names)))

    def bars(label: str, values: Sequence[float]) -> Series:
        return Series(label=label, x=places, y=tuple(values))

    gaps = (
        bars("median", [each.median_ms for each in found.values()]),
        bars("p99", [each.p99_ms for each in found.values()]),
        bars("longest", [each.longest_ms for each in found.values()]),
    )
    waits = (bars("TTFT", [each.long_ttft_s for each in found.values()]),)
    return (
        Panel(x_label="", y_label="gap between tokens, ms", names=names, series=gaps),
        Panel(x_label="", y_label="TTFT of the long prompts, s", names=names, series=waits),
    )
