"""The benchmark's figures, as JSON and as tables."""

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from .floor import Floors
from .shapes import StepCost
from .steps import PARTS, DecodeRun


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeFigure:
    """One batch's decode. Shares are of what the device was measured to do at best, 1 being the floor itself."""

    batch: int
    context: int  # tokens that each sequence begins with
    step_ms: float  # median
    p90_ms: float
    tokens_per_s: float
    floor_ms: float
    roofline_share: float  # floor over step
    bandwidth_share: float  # weights and KV cache read once, over the larger of read and copy bandwidth
    matmul_share: float
    split_ms: dict[str, float] | None  # median of each of PARTS; None where only the host's time is known
    overhead_share: float | None  # of the step outside `model`, median
    raw_ms: float | None = None  # median of the same plans through the ModelRunner alone
    raw_same_tokens: bool | None = None
    transformers_ms: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillFigure:
    """A lone prompt, from its submission to its first token."""

    prompt: int  # tokens
    seconds: float  # median
    tokens_per_s: float
    matmul_share: float
    first_token: int
    transformers_tokens_per_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """One run."""

    shape: str
    dtype: str
    device: str
    threads: int
    torch: str
    date: str  # UTC
    floors: Floors
    decode: tuple[DecodeFigure, ...]
    prefill: tuple[PrefillFigure, ...]
    sweep_batch: tuple[DecodeFigure, ...] = ()  # what --plot draws
    sweep_context: tuple[DecodeFigure, ...] = ()
    transformers: str | None = None  # the method measured

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    def as_text(self) -> str:
        """Tables, and the line that says how they were made."""
        floors = self.floors
        parts = [
            f"{self.shape}, {self.dtype}, {self.device}, {self.threads} threads, torch {self.torch}, {self.date}",
            f"floors: read {floors.read_bytes_per_s / 1e9:,.1f} GB/s, copy {floors.copy_bytes_per_s / 1e9:,.1f} GB/s, "
            f"matmul {floors.matmul_flops_per_s / 1e12:,.3f} TFLOP/s",
        ]
        if self.transformers:
            parts.append(f"transformers: {self.transformers}")
        return "\n\n".join([*parts, *self._tables()])

    def _tables(self) -> Iterable[str]:
        if self.decode:
            yield _table("decode", _DECODE_COLUMNS, self.decode)
        if any(figure.split_ms for figure in self.decode):
            yield _table("milliseconds of a step", _SPLIT_COLUMNS, self.decode)
        if self.prefill:
            yield _table("prefill", _PREFILL_COLUMNS, self.prefill)


def decode_figure(run: DecodeRun, *, context: int, cost: StepCost, floors: Floors, has_split: bool) -> DecodeFigure:
    """Summarises a run whose steps cost `cost` at the least."""
    totals = [step.total for step in run.steps]
    step = statistics.median(totals)
    medians = {part: statistics.median(getattr(step, part) for step in run.steps) * 1e3 for part in PARTS}
    overhead = statistics.median(1 - step.model / step.total for step in run.steps)
    return DecodeFigure(
        batch=run.batch,
        context=context,
        step_ms=step * 1e3,
        p90_ms=statistics.quantiles(totals, n=10, method="inclusive")[-1] * 1e3,
        tokens_per_s=run.batch / step,
        floor_ms=floors.seconds(cost) * 1e3,
        roofline_share=floors.seconds(cost) / step,
        bandwidth_share=cost.num_bytes / floors.bytes_per_s / step,
        matmul_share=cost.flops / floors.matmul_flops_per_s / step,
        split_ms=medians if has_split else None,
        overhead_share=overhead if has_split else None,
    )


_Column = tuple[str, Callable[[Any], str | None]]


def _maybe(value: float | None, form: str) -> str | None:
    return None if value is None else format(value, form)


def _ratio(above: float | None, below: float) -> str | None:
    return None if above is None else f"{above / below:.2f}x"


_DECODE_COLUMNS: tuple[_Column, ...] = (
    ("batch", lambda f: str(f.batch)),
    ("context", lambda f: str(f.context)),
    ("ms/step", lambda f: f"{f.step_ms:.3f}"),
    ("p90", lambda f: f"{f.p90_ms:.3f}"),
    ("raw", lambda f: _maybe(f.raw_ms, ".3f")),
    ("tokens/s", lambda f: f"{f.tokens_per_s:,.0f}"),
    ("floor", lambda f: f"{f.floor_ms:.3f}"),
    ("roofline", lambda f: f"{f.roofline_share:.1%}"),
    ("bandwidth", lambda f: f"{f.bandwidth_share:.1%}"),
    ("matmul", lambda f: f"{f.matmul_share:.1%}"),
    ("transformers", lambda f: _maybe(f.transformers_ms, ".3f")),
    ("ahead by", lambda f: _ratio(f.transformers_ms, f.step_ms)),
)
_SPLIT_COLUMNS: tuple[_Column, ...] = (
    ("batch", lambda f: str(f.batch)),
    *((part, lambda f, part=part: f"{f.split_ms[part]:.3f}") for part in PARTS),
    ("outside the model", lambda f: f"{f.overhead_share:.1%}"),
)
_PREFILL_COLUMNS: tuple[_Column, ...] = (
    ("prompt", lambda f: str(f.prompt)),
    ("seconds", lambda f: f"{f.seconds:.3f}"),
    ("tokens/s", lambda f: f"{f.tokens_per_s:,.0f}"),
    ("matmul", lambda f: f"{f.matmul_share:.1%}"),
    ("transformers", lambda f: _maybe(f.transformers_tokens_per_s, ",.0f")),
    ("ahead by", lambda f: f.transformers_tokens_per_s and _ratio(f.tokens_per_s, f.transformers_tokens_per_s)),
)


def _table(title: str, columns: Sequence[_Column], figures: Sequence[object]) -> str:
    """Right-aligned text; a column that has nothing to say is left out."""
    cells = [[name, *(show(figure) for figure in figures)] for name, show in columns]
    shown = [[cell or "" for cell in column] for column in cells if any(column[1:])]
    widths = [max(len(cell) for cell in column) for column in shown]
    lines = [
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        for row in zip(*shown, strict=True)
    ]
    return "\n".join([title, *lines])
