"""Measures speculative decoding with n-grams, by the number of drafted tokens.

The texts are those of `python -m tandem.tests.bench.engine.speculative`: an edit of code, whose
output is mostly in the prompt, and free text.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Final

from tokenizers import Tokenizer

from tandem.cluster.store.store import resolve_model
from tandem.tests.bench.engine.speculative import TEXTS, TimedEngine
from tandem.tests.bench.engine.steps import BLOCK_SIZE
from tandem.tests.bench.learn.figure import LearnFigure, Panel, line_of
from tandem.tests.bench.learn.local import conditions
from tandem.workers.engine.config import SpeculativeConfig
from tandem.workers.host.malloc import keep_freed_memory
from tandem.workers.model.loader import open_checkpoint
from tandem.workers.model.runner import ModelRunner

_DRAFTS: Final = (0, 2, 4, 8)
"""Drafted tokens of a step; 0: plain decoding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """Holds the figures of one text with one number of drafted tokens."""

    text: str
    drafted: int  # tokens of a step at most
    tokens_per_s: float
    accepted: float | None  # the share of the drafted tokens
    is_same: bool  # the tokens are those of plain decoding


def measure(model: str, *, dtype: str, num_tokens: int, rounds: int) -> LearnFigure:
    """Generates both texts in turns with each number of drafted tokens."""
    folder = resolve_model(model)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    prompts = {name: tokenizer.encode(text).ids for name, (text, _) in TEXTS.items()}
    longest = max(map(len, prompts.values())) + num_tokens + BLOCK_SIZE
    num_blocks = -(-longest // BLOCK_SIZE)
    runner = _load(folder, dtype, num_blocks)
    found = [
        speed
        for name, ids in prompts.items()
        for speed in _measure(runner, num_blocks, name, ids, num_tokens, rounds)
    ]
    plain = {each.text: each.tokens_per_s for each in found if not each.drafted}
    return LearnFigure(
        name="speculation",
        title="Speculative decoding with n-grams",
        notes=(
            conditions(model, dtype),
            f"One stream of {num_tokens} tokens, in turns, medians of {rounds} rounds.",
            "Every draft gave the tokens of plain decoding."
            if all(each.is_same for each in found)
            else "SOME DRAFTS GAVE OTHER TOKENS.",
        ),
        heads=("text", "drafted tokens of a step", "tokens/s", "ratio", "accepted"),
        rows=tuple(
            (
                each.text,
                each.drafted,
                each.tokens_per_s,
                each.tokens_per_s / plain[each.text],
                None if each.accepted is None else f"{each.accepted:.0%}",
            )
            for each in found
        ),
        panels=(
            _panel("tokens/s", found, lambda each: each.tokens_per_s),
            _panel("accepted share of the drafts", found, lambda each: each.accepted),
        ),
    )


def _load(folder: Path, dtype: str, num_blocks: int) -> ModelRunner:
    keep_freed_memory()
    runner = ModelRunner.load(
        open_checkpoint(folder),
        dtype=dtype,
        device="cpu",
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE,
    )
    runner.warmup()
    return runner


def _measure(
    runner: ModelRunner, num_blocks: int, name: str, ids: list[int], num_tokens: int, rounds: int
) -> list[Speed]:
    sampling = TEXTS[name][1]
    engines = {
        drafted: TimedEngine(
            runner,
            num_blocks,
            SpeculativeConfig(method="ngram", num_speculative_tokens=drafted) if drafted else None,
            overlap=runner.launches_ahead,
        )
        for drafted in _DRAFTS
    }
    # The first round is a warm-up.
    for _ in range(1 + rounds):
        for engine in engines.values():
            engine.generate(ids, sampling, num_tokens)
    found = []
    for drafted, engine in engines.items():
        num_drafted, num_accepted = engine.take_counts()
        found.append(
            Speed(
                text=name,
                drafted=drafted,
                tokens_per_s=median(engine.rates[1:]),
                accepted=num_accepted / num_drafted if num_drafted else None,
                is_same=engine.tokens == engines[0].tokens,
            )
        )
    return found


def _panel(label: str, found: list[Speed], value: Callable[[Speed], float | None]) -> Panel:
    series = []
    for name in TEXTS:
        points = [
            (each.drafted, number)
            for each in found
            if each.text == name and (number := value(each)) is not None
        ]
        series.append(line_of(name, [x for x, _ in points], [y for _, y in points]))
    return Panel(x_label="drafted tokens of a step", y_label=label, series=tuple(series))
