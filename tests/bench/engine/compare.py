"""Compares the times of steps and prompts between variants that take turns within one run."""

import itertools
import statistics
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Final

from tandem.tests.bench.engine.adapters import random_adapter
from tandem.tests.bench.engine.report import DecodeFigure, PrefillFigure, Report, print_progress
from tandem.tests.bench.engine.steps import BenchRunner
from tandem.workers.model.config import ModelConfig

_ROUNDS: Final = 5

Variants = Mapping[str, Callable[[], BenchRunner]]
"""By name: a function that returns the runner for a turn."""


def adapter_variants(config: ModelConfig, runner: BenchRunner, rank: int) -> Variants:
    """Returns variants of a runner: without, with an unused and with a used adapter."""
    adapters = runner.runner.adapters
    folder = random_adapter(config, rank)
    numbers = itertools.count(1)
    loaded = 0

    def prepare(*, is_loaded: bool, is_used: bool) -> BenchRunner:
        nonlocal loaded
        adapters.unload(loaded)
        if is_loaded:
            loaded = next(numbers)
            adapters.load(loaded, folder)
        runner.adapter = loaded if is_used else 0
        return runner

    return {
        "plain": lambda: prepare(is_loaded=False, is_used=False),
        "unused": lambda: prepare(is_loaded=True, is_used=False),
        "adapter": lambda: prepare(is_loaded=True, is_used=True),
    }


def compare(report: Report, variants: Variants, num_steps: int) -> Report:
    """Adds to a report the time of each variant, divided by the time of the first variant."""
    for name, prepare in variants.items():
        code = prepare().code
        print_progress(f"{name}: {code.__module__}.{code.__qualname__}")

    decode = tuple(
        replace(
            each,
            compared=_ratios(variants, partial(_decode_seconds, figure=each, num_steps=num_steps)),
        )
        for each in report.decode
    )
    prefill = tuple(
        replace(each, compared=_ratios(variants, partial(_prefill_seconds, figure=each)))
        for each in report.prefill
    )
    return replace(report, decode=decode, prefill=prefill)


def _decode_seconds(runner: BenchRunner, figure: DecodeFigure, num_steps: int) -> float:
    steps = runner.decode(figure.batch, figure.context, num_steps).steps
    return statistics.median(sum(step.values()) for step in steps)


def _prefill_seconds(runner: BenchRunner, figure: PrefillFigure) -> float:
    return runner.prefill(figure.prompt)[0]


def _ratios(variants: Variants, seconds: Callable[[BenchRunner], float]) -> dict[str, float]:
    """Returns median ratios to the first variant over rounds; all variants run in each round."""
    first, *others = variants
    rounds = [
        {name: seconds(prepare()) for name, prepare in variants.items()} for _ in range(_ROUNDS)
    ]
    return {name: statistics.median(each[name] / each[first] for each in rounds) for name in others}
