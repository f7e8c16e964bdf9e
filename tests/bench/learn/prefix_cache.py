"""Measures the time to the first token of prompts with an equal beginning.

The first prompt computes the beginning; a later one reuses its KV cache (PagedAttention's blocks by
hash, as in vLLM and RadixAttention, arXiv 2312.07104).
"""

from collections.abc import Sequence
from statistics import median
from typing import Final

from tandem.cluster.local.llm import LLM
from tandem.router.client.types import Options
from tandem.tests.bench.learn.figure import LearnFigure, Panel, line_of
from tandem.tests.bench.learn.local import (
    GREEDY,
    conditions,
    config_of,
    random_prompts,
    stream_once,
)

_OWN: Final = 32  # tokens of each prompt after the equal beginning


def measure(model: str, *, dtype: str, prefixes: Sequence[int], repeat: int) -> LearnFigure:
    """Sends `repeat` pairs of prompts for each length of their equal beginning."""
    vocab_size = config_of(model).vocab_size
    rows = []
    with LLM(model, dtype=dtype, kv_cache_gb=1.0, enable_prefix_caching=True) as llm:
        _first_token(llm, _ids(vocab_size, max(prefixes), "warm-up"))
        for length in prefixes:
            pairs = [_pair(llm, vocab_size, length, number) for number in range(repeat)]
            first = median(pair[0] for pair in pairs)
            later = median(pair[1] for pair in pairs)
            rows.append((length, pairs[0][2], 1e3 * first, 1e3 * later, first / later))
    lengths = [row[0] for row in rows]
    return LearnFigure(
        name="prefix-cache",
        title="Prompts with an equal beginning",
        notes=(
            conditions(model, dtype),
            f"Each prompt ends with {_OWN} tokens of its own; medians of {repeat} pairs.",
        ),
        heads=(
            "equal tokens",
            "tokens from the cache",
            "TTFT of the first prompt, ms",
            "TTFT of the next, ms",
            "ratio",
        ),
        rows=tuple(rows),
        panels=(
            Panel(
                x_label="tokens of the equal beginning",
                y_label="TTFT, ms",
                series=(
                    line_of("first prompt", lengths, [row[2] for row in rows]),
                    line_of("next prompt", lengths, [row[3] for row in rows]),
                ),
            ),
        ),
    )


def _pair(llm: LLM, vocab_size: int, length: int, number: int) -> tuple[float, float, int]:
    """Returns both times in seconds, and the tokens that the second prompt reused."""
    shared = _ids(vocab_size, length, f"{length} {number}") if length else []
    first, _ = _first_token(llm, [*shared, *_ids(vocab_size, _OWN, f"first {length} {number}")])
    next_, cached = _first_token(llm, [*shared, *_ids(vocab_size, _OWN, f"next {length} {number}")])
    return first, next_, cached


def _first_token(llm: LLM, ids: Sequence[int]) -> tuple[float, int]:
    completion, arrivals = stream_once(llm, ids, Options(**GREEDY, max_tokens=1))
    return arrivals[0], completion.usage.cached_tokens


def _ids(vocab_size: int, num_tokens: int, seed: str) -> list[int]:
    (prompt,) = random_prompts(vocab_size, num_tokens, [1], seed)
    return [int(each) for each in prompt.prompt]
