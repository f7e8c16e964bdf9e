"""Measures static against continuous batching, by batch size.

All requests are there at the start, and their outputs differ in length. A static batch takes the
next requests when its last one has ended. With continuous batching (Orca, Yu et al., OSDI 2022), a
request takes the place of another as soon as that one has ended.
"""

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Final

from tandem.cluster.bench.metrics import RequestRecord, summarize
from tandem.cluster.bench.target import StreamCompletion
from tandem.cluster.bench.workload import BenchPrompt
from tandem.tests.bench.learn.figure import LearnFigure, Panel, Series, line_of
from tandem.tests.bench.learn.local import (
    conditions,
    config_of,
    open_engine,
    random_prompts,
    send_all,
    target_of,
)

_PROMPT_TOKENS: Final = 32
_SHORTEST: Final = 4
_LONGEST: Final = 4.0  # times the mean
_KV_CACHE_GB: Final = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchFigures:
    """Holds the figures of all requests with one kind of batches."""

    batch: int
    tokens_per_s: float
    wait: float  # mean seconds from the start until a request ends
    tpot_ms: float  # mean of the requests


def measure(
    model: str, *, dtype: str, batches: Sequence[int], num_requests: int, mean_tokens: int
) -> LearnFigure:
    """Sends `num_requests` requests in batches of each size, of both kinds."""
    lengths = output_lengths(num_requests, mean_tokens)
    vocab_size = config_of(model).vocab_size
    prompts = list(random_prompts(vocab_size, _PROMPT_TOKENS, lengths))
    found = asyncio.run(_measure(model, dtype, batches, prompts))
    return LearnFigure(
        name="batching",
        title="Static and continuous batching",
        notes=(
            conditions(model, dtype),
            f"{num_requests} requests at once: prompts of {_PROMPT_TOKENS} tokens, outputs of "
            f"{min(lengths)} to {max(lengths)} tokens, {fmean(lengths):.0f} on average.",
            "A static batch computes only its sequences that have not ended.",
        ),
        heads=(
            "batch",
            "static, tokens/s",
            "continuous, tokens/s",
            "ratio",
            "static, mean time to the end, s",
            "continuous, s",
            "continuous, TPOT, ms",
        ),
        rows=tuple(
            (
                static.batch,
                static.tokens_per_s,
                continuous.tokens_per_s,
                continuous.tokens_per_s / static.tokens_per_s,
                static.wait,
                continuous.wait,
                continuous.tpot_ms,
            )
            for static, continuous in found
        ),
        panels=(
            _panel("tokens/s", found, "tokens_per_s"),
            _panel("mean seconds until a request ends", found, "wait"),
        ),
    )


def output_lengths(num_requests: int, mean_tokens: int) -> list[int]:
    """Returns numbers of output tokens: many short ones, few long ones (exponential)."""
    drawn = random.Random(0)
    return [
        int(min(max(drawn.expovariate(1 / mean_tokens), _SHORTEST), _LONGEST * mean_tokens))
        for _ in range(num_requests)
    ]


async def send_static(
    target: StreamCompletion, prompts: Sequence[BenchPrompt], batch: int
) -> list[RequestRecord]:
    """Sends requests in groups of `batch`; a group starts when the one before has ended."""
    records: list[RequestRecord] = []
    for first in range(0, len(prompts), batch):
        records += await send_all(target, prompts[first : first + batch], batch)
    return records


def figures(batch: int, records: Sequence[RequestRecord]) -> BatchFigures:
    """Returns the figures of requests that all waited from the start of the first."""
    begin = min(record.started for record in records)
    summary = summarize(records, {})
    return BatchFigures(
        batch=batch,
        tokens_per_s=summary.figures["output_throughput"],
        wait=fmean(record.ended - begin for record in records),
        tpot_ms=summary.figures["mean_tpot_ms"],
    )


async def _measure(
    model: str, dtype: str, batches: Sequence[int], prompts: Sequence[BenchPrompt]
) -> list[tuple[BatchFigures, BatchFigures]]:
    found = []
    most = max(batches)
    async with open_engine(
        model, dtype=dtype, max_sequences=most, kv_cache_gb=_KV_CACHE_GB
    ) as engine:
        target = target_of(engine)
        await send_all(target, prompts[:2], 2)
        for batch in batches:
            continuous = figures(batch, await send_all(target, prompts, batch))
            # With one sequence, the two kinds are the same.
            static = continuous
            if batch > 1:
                static = figures(batch, await send_static(target, prompts, batch))
            found.append((static, continuous))
    return found


def _panel(y_label: str, found: Sequence[tuple[BatchFigures, BatchFigures]], name: str) -> Panel:
    def line(label: str, kind: int) -> Series:
        chosen = [pair[kind] for pair in found]
        values = [float(getattr(each, name)) for each in chosen]
        return line_of(label, [each.batch for each in chosen], values)

    return Panel(
        x_label="batch",
        y_label=y_label,
        log_x=True,
        series=(line("continuous", 1), line("static", 0)),
    )
