"""Measures a decode step and its KV cache with and without sliding windows, by context.

Each layer of the model gets a window, as in Mistral 7B (arXiv 2310.06825). The KV cache holds
noise, so that a step can begin at any context: this measures memory and time, not quality. A model
must be trained with its window.
"""

import gc
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import torch

from tandem.cluster.store.store import resolve_model
from tandem.tests.bench.engine.shapes import cost_of
from tandem.tests.bench.engine.steps import BLOCK_SIZE, BenchRunner, blocks_for
from tandem.tests.bench.learn.figure import LearnFigure, Panel, line_of
from tandem.tests.bench.learn.local import conditions
from tandem.workers.kv_cache.tables import plan_tables
from tandem.workers.model.checkpoint import Checkpoint
from tandem.workers.model.config import ModelConfig
from tandem.workers.model.footprint import kv_layout
from tandem.workers.model.loader import checkpoint_reader, open_checkpoint

_CHUNK: Final = 512
_CPU: Final = torch.device("cpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowStep:
    """Holds the figures of one window at one context."""

    window: int | None  # tokens; None: all
    context: int
    step_ms: float  # median
    megabytes: float  # of the KV cache of one sequence


def measure(
    model: str,
    *,
    dtype: str,
    windows: Sequence[int],
    contexts: Sequence[int],
    batch: int,
    steps: int,
) -> LearnFigure:
    """Times decode steps without window and with each window, at each context."""
    checkpoint = open_checkpoint(resolve_model(model))
    found: list[WindowStep] = []
    for window in (None, *windows):
        found += _measure(checkpoint, dtype, window, contexts, batch, steps)
        gc.collect()
    columns = [[each for each in found if each.window == window] for window in (None, *windows)]
    names = ["all tokens", *(f"window {window:,}" for window in windows)]
    heads = [f"{name}, {unit}" for name in names for unit in ("ms", "MB")]
    return LearnFigure(
        name="windows",
        title="Sliding windows",
        notes=(
            conditions(model, dtype),
            f"A decode step of {batch} sequences, median of {steps}; KV cache of one sequence.",
        ),
        heads=("context", *heads),
        rows=tuple(
            (
                row[0].context,
                *(number for each in row for number in (each.step_ms, each.megabytes)),
            )
            for row in zip(*columns, strict=True)
        ),
        panels=tuple(
            Panel(
                x_label="tokens of each sequence",
                y_label=label,
                series=tuple(
                    line_of(
                        name,
                        [each.context for each in column],
                        [float(getattr(each, field)) for each in column],
                    )
                    for name, column in zip(names, columns, strict=True)
                ),
            )
            for label, field in (
                ("milliseconds of a step", "step_ms"),
                ("MB of KV cache of a sequence", "megabytes"),
            )
        ),
    )


def with_window(config: ModelConfig, window: int | None) -> ModelConfig:
    """Returns the config with this window in each layer."""
    return replace(config, layers=tuple(replace(layer, window=window) for layer in config.layers))


def _measure(
    checkpoint: Checkpoint,
    dtype: str,
    window: int | None,
    contexts: Sequence[int],
    batch: int,
    steps: int,
) -> list[WindowStep]:
    config = with_window(checkpoint.config, window)
    tables = plan_tables(kv_layout(config, dtype, "auto"), BLOCK_SIZE)
    cost = cost_of(config, dtype)
    runner = BenchRunner(
        config,
        checkpoint_reader(checkpoint),
        dtype=dtype,
        device=_CPU,
        num_blocks=max(blocks_for(batch, context, steps, tables) for context in contexts),
        chunk=_CHUNK,
        exact=False,
    )
    found = []
    for context in contexts:
        times = [sum(step.values()) for step in runner.decode(batch, context, steps).steps]
        found.append(
            WindowStep(
                window=window,
                context=context,
                step_ms=1e3 * statistics.median(times),
                megabytes=cost.kv_bytes(context) / 1e6,
            )
        )
    return found
