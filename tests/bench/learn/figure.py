"""Holds a measured figure: a table, and the panels of its plot."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

Cell = str | int | float | None
"""A value of a table; None is an empty cell."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """Holds the points of one line, or the heights of one group of bars."""

    label: str
    x: tuple[float, ...]
    y: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """Describes one pair of axes; both begin at 0 unless they are logarithmic."""

    x_label: str
    y_label: str
    series: tuple[Series, ...]
    log_x: bool = False
    log_y: bool = False
    names: tuple[str, ...] = ()  # of the positions on the x axis; draws bars in place of lines


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnFigure:
    """Holds the results of one command."""

    name: str  # of the command and of its image
    title: str
    notes: tuple[str, ...]  # what was measured, and how
    heads: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    panels: tuple[Panel, ...]

    def as_text(self) -> str:
        """Returns title, notes and table in Markdown."""
        lines = [_line(self.heads), _line(["---"] * len(self.heads))]
        lines += [_line(map(shown, row)) for row in self.rows]
        return "\n".join([f"{self.title}\n", *(f"- {note}" for note in self.notes), "", *lines])

    def as_json(self) -> str:
        """Returns everything as one JSON object."""
        return json.dumps(asdict(self), indent=2, ensure_ascii=False)


def shown(value: Cell) -> str:
    """Returns a cell as text; a number that is not whole has three digits."""
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    if isinstance(value, int) or abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:#.3g}".removesuffix(".")


def line_of(label: str, x: Sequence[float], y: Sequence[float]) -> Series:
    """Returns a series of points. Raises ValueError unless each x has a y."""
    if len(x) != len(y):
        raise ValueError(f"{label}: {len(x)} values of x and {len(y)} of y")
    return Series(label=label, x=tuple(x), y=tuple(y))


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"
