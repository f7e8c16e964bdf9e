"""Measures the bytes, the speed and the perplexity of a model in four precisions."""

from collections.abc import Sequence
from dataclasses import dataclass
from pydoc_data.topics import topics
from statistics import median
from typing import Final

from tandem.cluster.arithmetic import make_cost
from tandem.cluster.local.llm import LLM
from tandem.router.client.types import Options
from tandem.tests.bench.learn.figure import LearnFigure, Panel, line_of
from tandem.tests.bench.learn.local import (
    GREEDY,
    conditions,
    config_of,
    stream_once,
    stream_rate,
)

_PROMPT: Final = "Once upon a time, in a village between two rivers,"
_KV_CACHE_GB: Final = 0.5
_VARIANTS: Final = (
    ("float32", "float32", None),
    ("bfloat16", "bfloat16", None),
    ("int8", "bfloat16", "int8"),
    ("int4", "bfloat16", "int4"),
)
"""Name, dtype of activations and of weights that are not rounded, and how the others are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """Holds the figures of a model in one precision."""

    name: str
    megabytes: float  # of the weights
    tokens_per_s: float  # of one stream, with its prompt
    perplexity: float


def measure(model: str, *, num_tokens: int, rounds: int, num_characters: int) -> LearnFigure:
    """Loads the model in each precision, decodes a stream `rounds` times, and scores a text."""
    text = "\n".join(topics.values())[:num_characters]
    found = [
        _measure(model, name, dtype, quantization, text, num_tokens, rounds)
        for name, dtype, quantization in _VARIANTS
    ]
    base = found[1]  # bfloat16
    places = range(len(found))
    names = tuple(each.name for each in found)

    def panel(label: str, values: Sequence[float]) -> Panel:
        return Panel(
            x_label="", y_label=label, names=names, series=(line_of(label, places, values),)
        )

    return LearnFigure(
        name="precision",
        title="Precision of the weights",
        notes=(
            conditions(model, "bfloat16 beside rounded weights"),
            f"One stream of {num_tokens} tokens after a short prompt, median of {rounds} rounds.",
            f"Perplexity of the first {len(text):,} characters of Python's reference.",
        ),
        heads=("weights", "MB", "tokens/s", "of bfloat16", "perplexity", "of bfloat16"),
        rows=tuple(
            (
                each.name,
                each.megabytes,
                each.tokens_per_s,
                each.tokens_per_s / base.tokens_per_s,
                f"{each.perplexity:.3f}",
                f"{each.perplexity / base.perplexity - 1:+.1%}",
            )
            for each in found
        ),
        panels=(
            panel("weights, MB", [each.megabytes for each in found]),
            panel("tokens/s", [each.tokens_per_s for each in found]),
            panel("perplexity", [each.perplexity for each in found]),
        ),
    )


def _measure(
    model: str,
    name: str,
    dtype: str,
    quantization: str | None,
    text: str,
    num_tokens: int,
    rounds: int,
) -> Precision:
    with LLM(
        model,
        dtype=dtype,
        quantization=quantization,
        kv_cache_gb=_KV_CACHE_GB,
        enable_prefix_caching=False,
    ) as llm:
        options = Options(**GREEDY, max_tokens=num_tokens)
        # The first round is a warm-up.
        rates = [stream_rate(stream_once(llm, _PROMPT, options)[1]) for _ in range(rounds + 1)]
        (perplexity,) = llm.perplexity(text, progress=False)
    cost = make_cost(config_of(model), dtype, quantization=quantization)
    return Precision(
        name=name,
        megabytes=cost.sizes.weight_bytes / 1e6,
        tokens_per_s=median(rates[1:]),
        perplexity=perplexity,
    )
