"""Measures the cost of a million tokens, from the price of the machine per hour."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from tandem.cluster.bench.metrics import summarize
from tandem.tests.bench.learn.figure import LearnFigure, Panel, line_of
from tandem.tests.bench.learn.local import (
    conditions,
    config_of,
    open_engine,
    random_prompts,
    send_all,
    target_of,
)

_KV_CACHE_GB: Final = 0.5
_REQUESTS: Final = 2  # for each caller
_WARMUP: Final = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Throughput:
    """Holds the speed at one concurrency."""

    concurrency: int
    output_per_s: float
    total_per_s: float  # with the prompt tokens
    tpot_ms: float


def cost_per_million(price_per_hour: float, tokens_per_s: float) -> float:
    """Returns the cost of a million tokens, in the currency of the price.

    Raises ValueError for a rate of 0.
    """
    if tokens_per_s <= 0:
        raise ValueError("a machine that makes no tokens has no cost of a token")
    return price_per_hour / 3600 / tokens_per_s * 1e6


def measure(
    model: str,
    *,
    dtype: str,
    price_per_hour: float,
    concurrencies: Sequence[int],
    input_len: int,
    output_len: int,
) -> LearnFigure:
    """Measures the speed at each concurrency, and divides the price by it."""
    found = asyncio.run(_measure(model, dtype, concurrencies, input_len, output_len))
    costs = [cost_per_million(price_per_hour, each.output_per_s) for each in found]
    return LearnFigure(
        name="cost",
        title="Cost of a million tokens",
        notes=(
            conditions(model, dtype),
            f"The machine costs {price_per_hour:g} an hour, and is always busy.",
            f"Prompts of {input_len} tokens, outputs of {output_len}; the engine in one process, "
            "without API servers.",
        ),
        heads=(
            "concurrency",
            "output tokens/s",
            "TPOT, ms",
            "cost of a million output tokens",
            "cost of a million tokens of both kinds",
        ),
        rows=tuple(
            (
                each.concurrency,
                each.output_per_s,
                each.tpot_ms,
                cost,
                cost_per_million(price_per_hour, each.total_per_s),
            )
            for each, cost in zip(found, costs, strict=True)
        ),
        panels=(
            Panel(
                x_label="concurrency",
                y_label="cost of a million output tokens",
                log_x=True,
                series=(line_of("cost", [each.concurrency for each in found], costs),),
            ),
            Panel(
                x_label="time of a token of one request, ms",
                y_label="cost of a million output tokens",
                series=(line_of("cost", [each.tpot_ms for each in found], costs),),
            ),
        ),
    )


async def _measure(
    model: str, dtype: str, concurrencies: Sequence[int], input_len: int, output_len: int
) -> list[Throughput]:
    found = []
    vocab_size = config_of(model).vocab_size
    most = max(concurrencies)
    async with open_engine(
        model, dtype=dtype, max_sequences=most, kv_cache_gb=_KV_CACHE_GB
    ) as engine:
        target = target_of(engine)
        for concurrency in (*[_WARMUP], *concurrencies):
            lengths = [output_len] * (_REQUESTS * concurrency)
            prompts = list(random_prompts(vocab_size, input_len, lengths, seed=concurrency))
            rates = summarize(await send_all(target, prompts, concurrency), {}).figures
            found.append(
                Throughput(
                    concurrency=concurrency,
                    output_per_s=rates["output_throughput"],
                    total_per_s=rates["total_throughput"],
                    tpot_ms=rates["mean_tpot_ms"],
                )
            )
    return found[1:]
