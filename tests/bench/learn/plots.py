"""Draws figures as small images that can be read on a light and on a dark page."""

from pathlib import Path
from typing import Any, Final

from tandem.tests.bench.learn.figure import LearnFigure, Panel, shown

_INCHES: Final = (4.4, 3.3)  # of one panel
_DPI: Final = 90
_COLOURS: Final = ("#0b62a4", "#d9580d", "#2a8540", "#8a3fa0", "#7a5230")
_BAR_WIDTH: Final = 0.8  # of the distance between two positions


def draw(figure: LearnFigure, path: Path) -> None:
    """Writes a PNG with one panel beside another; the white ground keeps it readable anywhere."""
    from matplotlib.figure import Figure  # an extra, and only images need it

    width, height = _INCHES
    page = Figure(figsize=(width * len(figure.panels), height), layout="constrained")
    page.set_facecolor("white")
    (axes,) = page.subplots(1, len(figure.panels), squeeze=False)
    for each, panel in zip(axes, figure.panels, strict=True):
        _draw_panel(each, panel)
    page.suptitle(figure.title, fontsize=11)
    path.parent.mkdir(parents=True, exist_ok=True)
    page.savefig(path, dpi=_DPI, pil_kwargs={"optimize": True})


def _draw_panel(axes: Any, panel: Panel) -> None:
    if panel.names:
        _draw_bars(axes, panel)
    else:
        _draw_lines(axes, panel)
    axes.set_xlabel(panel.x_label)
    axes.set_ylabel(panel.y_label)
    axes.grid(alpha=0.3)
    axes.set_axisbelow(True)
    if len(panel.series) > 1:
        axes.legend(fontsize=8)


def _draw_lines(axes: Any, panel: Panel) -> None:
    positions = sorted({x for series in panel.series for x in series.x})
    for series, colour in zip(panel.series, _COLOURS, strict=False):
        marker = "o" if len(positions) <= 16 else None
        axes.plot(series.x, series.y, color=colour, marker=marker, markersize=4, label=series.label)
    if panel.log_x:
        axes.set_xscale("log", base=2)
        axes.set_xticks(positions, [f"{x:,.0f}" for x in positions], fontsize=8)
        axes.minorticks_off()
    else:
        axes.set_xlim(left=0)
    if panel.log_y:
        axes.set_yscale("log")
    else:
        axes.set_ylim(bottom=0)


def _draw_bars(axes: Any, panel: Panel) -> None:
    width = _BAR_WIDTH / len(panel.series)
    for number, series in enumerate(panel.series):
        shift = (number - (len(panel.series) - 1) / 2) * width
        bars = axes.bar(
            [x + shift for x in series.x],
            series.y,
            width,
            color=_COLOURS[number % len(_COLOURS)],
            label=series.label,
        )
        axes.bar_label(bars, fmt=shown, fontsize=8)
    axes.set_xticks(range(len(panel.names)), panel.names, fontsize=8)
    axes.margins(y=0.15)
