"""Shows predicted beside measured figures."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from tandem.tests.bench.learn.figure import Cell, LearnFigure, Panel, Series, line_of
from tandem.tests.bench.prediction.cases import FIGURES, Prediction

_ALLOWED: Final = {"p99_ttft_ms": 0.2, "p99_tpot_ms": 0.2}
_ALLOWED_OTHERS: Final = 0.1
_PLOTTED: Final = {"ttft": "mean TTFT, ms", "tpot": "mean TPOT, ms"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Holds the figures of a case: predicted, and measured in each round."""

    prediction: Prediction
    rounds: Sequence[Mapping[str, float]]

    def measured(self, name: str) -> float:
        """Returns the mean of the rounds."""
        return statistics.fmean(each[name] for each in self.rounds)

    def error(self, name: str) -> float:
        """Returns the relative error of the prediction; above 0: it is too large."""
        return self.prediction.figures[name] / self.measured(name) - 1

    def spread(self, name: str) -> float:
        """Returns the range of the rounds as a share of their mean."""
        values = [each[name] for each in self.rounds]
        return (max(values) - min(values)) / self.measured(name)


def allowed_error(name: str) -> float:
    """Returns the error up to which a prediction counts as right."""
    return _ALLOWED.get(name, _ALLOWED_OTHERS)


def table(found: Sequence[Comparison], source: str, plotted_trace: str) -> LearnFigure:
    """Returns the figures of all cases: measured, with the errors of the predictions."""
    right = [abs(each.error(name)) <= allowed_error(name) for each in found for name in FIGURES]
    return LearnFigure(
        name="prediction",
        title="Predicted and measured times",
        notes=(
            source,
            "Cells: measured, the error of the prediction, and the range of the rounds.",
            f"{sum(right)} of {len(right)} predictions are within 10 % (p99: 20 %).",
        ),
        heads=("workers", "trace", "of the knee", "requests/s", *FIGURES),
        rows=tuple(_row(each) for each in found),
        panels=_panels([each for each in found if each.prediction.case.trace == plotted_trace]),
    )


def _row(each: Comparison) -> tuple[Cell, ...]:
    case = each.prediction.case
    cells = (
        f"{each.measured(name):,.3g} ({each.error(name):+.0%}, {each.spread(name):.0%})"
        for name in FIGURES
    )
    return str(case.split), case.trace, f"{case.share:.0%}", case.rate, *cells


def _panels(found: Sequence[Comparison]) -> tuple[Panel, ...]:
    splits = list(dict.fromkeys(each.prediction.case.split for each in found))
    panels = []
    for figure, label in _PLOTTED.items():
        series: list[Series] = []
        for split in splits:
            own = [each for each in found if each.prediction.case.split == split]
            rates = [each.prediction.case.rate for each in own]
            name = f"mean_{figure}_ms"
            predicted = [each.prediction.figures[name] for each in own]
            measured = [each.measured(name) for each in own]
            series.append(line_of(f"{split}, predicted", rates, predicted))
            series.append(line_of(f"{split}, measured", rates, measured))
        panels.append(Panel(x_label="requests/s", y_label=label, series=tuple(series)))
    return tuple(panels)


def as_json(found: Sequence[Comparison]) -> list[dict[str, Any]]:
    """Returns all figures of all cases."""
    return [
        {
            "split": str(each.prediction.case.split),
            "trace": each.prediction.case.trace,
            "share": each.prediction.case.share,
            "rate": each.prediction.case.rate,
            "predicted": dict(each.prediction.figures),
            "measured": [dict(figures) for figures in each.rounds],
        }
        for each in found
    ]
