"""Presents the benchmark's results as tables and as a plot."""

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tandem.tests.bench.engine.steps import PARTS
from tandem.workers.model.costs.measure import Floors


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeFigure:
    """Holds the results of one batch's decode.

    Shares are relative to the measured limits of the device; 1 is the floor itself.
    """

    batch: int
    context: int  # tokens that each sequence begins with
    step_ms: float  # median
    p90_ms: float
    tokens_per_s: float
    floor_ms: float
    roofline_share: float  # floor over step
    # Weights and KV cache read once, divided by the larger of read and copy bandwidth.
    bandwidth_share: float
    matmul_share: float
    # The median of each of PARTS; None if only the host's time is known.
    split_ms: dict[str, float] | None
    overhead_share: float | None  # the step's share outside `model`, median
    # By variant: its step time divided by the first variant's, measured in turns.
    compared: dict[str, float] = field(default_factory=dict)
    transformers_ms: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillFigure:
    """Holds the results of a single prompt's prefill, from its submission to its first token."""

    prompt: int  # tokens
    seconds: float  # median
    tokens_per_s: float
    matmul_share: float
    first_token: int
    compared: dict[str, float] = field(default_factory=dict)  # like DecodeFigure.compared
    transformers_tokens_per_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Holds the results of one run."""

    shape: str
    dtype: str
    device: str
    threads: int
    torch: str
    date: str  # UTC
    floors: Floors
    decode: tuple[DecodeFigure, ...]
    prefill: tuple[PrefillFigure, ...]
    sweep_batch: tuple[DecodeFigure, ...] = ()  # for --plot
    sweep_context: tuple[DecodeFigure, ...] = ()

    def as_text(self) -> str:
        """Returns the tables below a line that describes the run."""
        floors = self.floors
        parts = [
            f"{self.shape}, {self.dtype}, {self.device}, {self.threads} threads, torch "
            f"{self.torch}, {self.date}",
            f"floors: read {floors.read_bytes_per_s / 1e9:,.1f} GB/s, copy "
            f"{floors.copy_bytes_per_s / 1e9:,.1f} GB/s, "
            f"matmul {floors.matmul_flops_per_s / 1e12:,.3f} TFLOP/s",
        ]
        return "\n\n".join([*parts, *self._tables()])

    def _tables(self) -> Iterable[str]:
        if self.decode:
            yield _table("decode", [*_DECODE_COLUMNS, *_compared(self.decode)], self.decode)
        if any(figure.split_ms for figure in self.decode):
            yield _table("milliseconds of a step", _SPLIT_COLUMNS, self.decode)
        if self.prefill:
            yield _table("prefill", [*_PREFILL_COLUMNS, *_compared(self.prefill)], self.prefill)


def print_progress(text: str) -> None:
    """Prints at once, because a large model takes minutes and the run may be interrupted."""
    print(f"bench: {text}", file=sys.stderr, flush=True)


def plot(
    path: Path, title: str, by_batch: Sequence[DecodeFigure], by_context: Sequence[DecodeFigure]
) -> None:
    """Writes a PNG of two panels; both sequences must be ascending and not empty."""
    from matplotlib.figure import Figure  # only --plot needs it, and it is an extra

    figure = Figure(figsize=(10, 4.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    _panel(
        left,
        [each.batch for each in by_batch],
        by_batch,
        f"batch, at context {by_batch[0].context:,}",
    )
    _panel(
        right,
        [each.context for each in by_context],
        by_context,
        f"context, at batch {by_context[0].batch}",
    )
    figure.suptitle(title)
    figure.savefig(path, dpi=120)


def _panel(axes: Any, x: list[int], figures: Sequence[DecodeFigure], label: str) -> None:
    axes.plot(x, [each.step_ms for each in figures], marker="o", label="step, median")
    axes.fill_between(
        x,
        [each.step_ms for each in figures],
        [each.p90_ms for each in figures],
        alpha=0.2,
        label="p90",
    )
    axes.plot(x, [each.floor_ms for each in figures], linestyle="--", color="black", label="floor")
    axes.set_xscale("log", base=2)
    axes.set_xticks(x, [f"{value:,}" for value in x])
    axes.set(xlabel=label, ylabel="milliseconds")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend()


_Column = tuple[str, Callable[[Any], str | None]]


def _formatted(name: str, form: str) -> Callable[[Any], str | None]:
    """Returns a function that formats a field of a figure, or returns None if the field is None."""
    return lambda figure: None if (value := getattr(figure, name)) is None else format(value, form)


_DECODE_COLUMNS: tuple[_Column, ...] = (
    ("batch", _formatted("batch", "")),
    ("context", _formatted("context", "")),
    ("ms/step", _formatted("step_ms", ".3f")),
    ("p90", _formatted("p90_ms", ".3f")),
    ("tokens/s", _formatted("tokens_per_s", ",.0f")),
    ("floor", _formatted("floor_ms", ".3f")),
    ("roofline", _formatted("roofline_share", ".1%")),
    ("bandwidth", _formatted("bandwidth_share", ".1%")),
    ("matmul", _formatted("matmul_share", ".1%")),
    ("transformers", _formatted("transformers_ms", ".3f")),
    ("ahead by", lambda f: f.transformers_ms and f"{f.transformers_ms / f.step_ms:.2f}x"),
)
_SPLIT_COLUMNS: tuple[_Column, ...] = (
    ("batch", _formatted("batch", "")),
    *((part, lambda f, part=part: f"{f.split_ms[part]:.3f}") for part in PARTS),
    ("outside the model", _formatted("overhead_share", ".1%")),
)
_PREFILL_COLUMNS: tuple[_Column, ...] = (
    ("prompt", _formatted("prompt", "")),
    ("seconds", _formatted("seconds", ".3f")),
    ("tokens/s", _formatted("tokens_per_s", ",.0f")),
    ("matmul", _formatted("matmul_share", ".1%")),
    ("transformers", _formatted("transformers_tokens_per_s", ",.0f")),
    (
        "ahead by",
        lambda f: (
            f.transformers_tokens_per_s and f"{f.tokens_per_s / f.transformers_tokens_per_s:.2f}x"
        ),
    ),
)


def _compared(figures: Sequence[DecodeFigure | PrefillFigure]) -> Iterable[_Column]:
    """Returns a column for each variant."""
    for name in figures[0].compared:
        yield f"time: {name}", _ratio_of(name)


def _ratio_of(name: str) -> Callable[[Any], str]:
    return lambda figure: f"{figure.compared[name]:.3f}"


def _table(title: str, columns: Sequence[_Column], figures: Sequence[object]) -> str:
    """Returns right-aligned text; an empty column is left out."""
    cells = [[name, *(show(figure) for figure in figures)] for name, show in columns]
    shown = [[cell or "" for cell in column] for column in cells if any(column[1:])]
    widths = [max(len(cell) for cell in column) for column in shown]
    lines = [
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        for row in zip(*shown, strict=True)
    ]
    return "\n".join([title, *lines])
