"""A picture of step time against batch and context, beside the floor."""

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from .report import DecodeFigure
from .shapes import BenchError


def check_plot(path: Path) -> None:
    """Raises BenchError if a picture could not be drawn into `path`."""
    if find_spec("matplotlib") is None:
        raise BenchError("--plot: matplotlib is not installed (pip install 'tandem-llm[bench]')")
    if path.suffix.lower() != ".png":
        raise BenchError(f"--plot: {path} must end in .png")
    if not path.absolute().parent.is_dir():
        raise BenchError(f"--plot: {path.parent} is no folder")


def plot(path: Path, title: str, by_batch: Sequence[DecodeFigure], by_context: Sequence[DecodeFigure]) -> None:
    """Writes a PNG of two panels. Both sequences are in ascending order and not empty."""
    from matplotlib.figure import Figure  # only --plot needs it, and it is an extra

    figure = Figure(figsize=(10, 4.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    batches = [each.batch for each in by_batch]
    contexts = [each.context for each in by_context]
    _panel(left, batches, by_batch, f"batch, at context {by_batch[0].context:,}")
    _panel(right, contexts, by_context, f"context, at batch {by_context[0].batch}")
    figure.suptitle(title)
    figure.savefig(path, dpi=120)


def _panel(axes: Any, x: list[int], figures: Sequence[DecodeFigure], label: str) -> None:
    axes.plot(x, [each.step_ms for each in figures], marker="o", label="step, median")
    axes.fill_between(x, [each.step_ms for each in figures], [each.p90_ms for each in figures], alpha=0.2, label="p90")
    axes.plot(x, [each.floor_ms for each in figures], linestyle="--", color="black", label="floor")
    axes.set_xscale("log", base=2)
    axes.set_xticks(x, [f"{value:,}" for value in x])
    axes.set_xlabel(label)
    axes.set_ylabel("milliseconds")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend()
