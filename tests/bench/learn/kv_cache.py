"""Measures the time of an output with KV cache, and by computing every token from the start.

With KV cache one request generates all tokens. Without it, a token needs a prefill of all tokens
before it. Every `every`th of these prefills runs; the time of the others is interpolated, since it
grows smoothly with their length.
"""

from collections.abc import Sequence
from typing import Final

import numpy as np

from tandem.cluster.arithmetic import make_cost
from tandem.cluster.local.llm import LLM
from tandem.router.client.types import Options
from tandem.tests.bench.learn.figure import LearnFigure, Panel, line_of
from tandem.tests.bench.learn.local import GREEDY, conditions, config_of, stream_once
from tandem.workers.model.costs.inference import InferenceCost, total

_PROMPT: Final = "Once upon a time, in a village between two rivers,"
_SHOWN: Final = (10, 50, 100, 200, 500, 1000, 2000, 4000)
"""Output lengths in the table, beside the longest."""


def measure(model: str, *, dtype: str, num_tokens: int, every: int) -> LearnFigure:
    """Generates `num_tokens` tokens, and computes every `every`th again without KV cache."""
    with LLM(model, dtype=dtype, kv_cache_gb=0.5, enable_prefix_caching=False) as llm:
        stream_once(llm, _PROMPT, Options(**GREEDY, max_tokens=8))
        completion, arrivals = stream_once(llm, _PROMPT, Options(**GREEDY, max_tokens=num_tokens))
        scored, _ = stream_once(llm, _PROMPT, Options(max_tokens=1, prompt_logprobs=0))
        prompt = [each.token.token_id for each in scored.prompt_logprobs]
        ids = list(completion.token_ids)
        places = sample_places(num_tokens, every)
        seconds = []
        num_equal = 0
        for place in places:
            again, times = stream_once(
                llm, [*prompt, *ids[:place]], Options(**GREEDY, max_tokens=1)
            )
            seconds.append(times[-1])
            num_equal += again.token_ids == (ids[place],)
    single = interpolate(places, seconds, num_tokens)  # seconds of each token without KV cache
    summed = np.cumsum(single)
    cost = make_cost(config_of(model), dtype)
    lengths = [each for each in _SHOWN if each < num_tokens] + [num_tokens]
    note = (
        f"Without KV cache, {len(places)} of {num_tokens:,} tokens were computed again, and the "
        f"time of the others is interpolated; {num_equal} of {len(places)} are the same tokens."
    )
    return LearnFigure(
        name="kv-cache",
        title="An output with and without KV cache",
        notes=(conditions(model, dtype), f"A prompt of {len(prompt)} tokens, alone.", note),
        heads=(
            "output tokens",
            "with KV cache, s",
            "without, s",
            "ratio",
            "ratio of products",
            "last token with, ms",
            "without, ms",
        ),
        rows=tuple(
            (
                length,
                arrivals[length - 1],
                float(summed[length - 1]),
                float(summed[length - 1]) / arrivals[length - 1],
                ratio_of_products(cost, len(prompt), length),
                1e3 * mean_gap(arrivals, length, every),
                1e3 * float(single[length - 1]),
            )
            for length in lengths
        ),
        panels=_panels(places, seconds, arrivals, [float(each) for each in summed], every),
    )


def sample_places(num_tokens: int, every: int) -> list[int]:
    """Returns every `every`th place of an output, and its last one."""
    return sorted({*range(0, num_tokens, every), num_tokens - 1})


def interpolate(places: Sequence[int], seconds: Sequence[float], num_tokens: int) -> list[float]:
    """Returns the time of each token; between two places it changes linearly."""
    found: list[float] = np.interp(range(num_tokens), places, seconds).tolist()
    return found


def ratio_of_products(cost: InferenceCost, num_prompt: int, num_output: int) -> float:
    """Returns the FLOPs without KV cache divided by those with it."""
    cached = [cost.prefill(num_prompt), *cost.decodes(num_prompt, num_output)]
    return total(cost.without_cache(num_prompt, num_output)).flops / total(cached).flops


def mean_gap(arrivals: Sequence[float], length: int, every: int) -> float:
    """Returns the mean time of the last `every` decode steps of an output of `length` tokens."""
    first = max(length - 1 - every, 0)
    steps = length - 1 - first
    return (arrivals[length - 1] - arrivals[first]) / steps if steps else arrivals[0]


def _panels(
    places: Sequence[int],
    seconds: Sequence[float],
    arrivals: Sequence[float],
    summed: Sequence[float],
    every: int,
) -> tuple[Panel, ...]:
    lengths = [place + 1 for place in places]
    later = lengths[1:]
    totals = Panel(
        x_label="output tokens",
        y_label="seconds until the last one",
        log_y=True,
        series=(
            line_of("without KV cache", lengths, [summed[place] for place in places]),
            line_of("with KV cache", lengths, [arrivals[place] for place in places]),
        ),
    )
    single = Panel(
        x_label="number of the token",
        y_label="milliseconds of the token",
        log_y=True,
        series=(
            line_of("without KV cache", lengths, [1e3 * each for each in seconds]),
            line_of("with", later, [1e3 * mean_gap(arrivals, each, every) for each in later]),
        ),
    )
    return totals, single
