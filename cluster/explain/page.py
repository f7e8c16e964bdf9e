"""Writes an explanation as one HTML page that loads nothing: no script, no other file."""

from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Final

from ...workers.model.costs.report import WorkReport
from ..text_files import write_text
from .cost import summary
from .record import Explanation, Step, TokenCandidate
from .text import percent, prefill_text, shape, total_lines
from .units import amount, milliseconds

_POLICY: Final = "default-src 'none'; style-src 'unsafe-inline'"
_STYLE: Final = Path(__file__).with_name("page.css")
_WIDTH: Final = 1000  # of a chart, in its own units
_HEIGHT: Final = 160
_BAR: Final = 150  # the width of a candidate's bar at 100 %


def write_page(found: Explanation, path: Path) -> None:
    """Writes the page to a file. Raises InvalidArgument if the file cannot be written."""
    write_text(path, render_page(found), "--html")


def render_page(found: Explanation) -> str:
    """Returns the page."""
    parts = (
        _section("Model and KV cache", *map(_paragraph, summary(found.cost))),
        _section(f"Prompt: {len(found.prompt_tokens)} tokens", _prompt(found)),
        _section("Shapes", _stages(found)),
        _section("Work", _work(found), _paragraph(prefill_text(found))),
        _section("Time of each step", *_times(found)),
        _section("Tokens", *map(_step, range(len(found.steps)), found.steps)),
        _section(
            "Output",
            f'<p class="token" id="output">{_text(found.text)}</p>',
            _paragraph(f"Stopped: {found.stopped_because}."),
        ),
        _section("Totals", *map(_paragraph, total_lines(found))),
        _section("Timeline of the engine", _timeline(found)),
    )
    return "\n".join(
        (
            '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{escape(found.prompt[:80])}: explained</title>",
            f"<style>\n{_STYLE.read_text(encoding='utf-8')}</style>\n</head>\n<body>",
            f"<h1>{escape(found.prompt)}</h1>",
            f'<p class="muted">{escape(found.model)}, {escape(found.engine)}; '
            f"{escape(_parameters(found))}</p>",
            *parts,
            "</body>\n</html>\n",
        )
    )


def _section(title: str, *parts: str) -> str:
    return f"<section>\n<h2>{escape(title)}</h2>\n" + "\n".join(parts) + "\n</section>"


def _paragraph(text: str) -> str:
    return f"<p>{escape(text)}</p>"


def _text(text: str) -> str:
    """Returns the text of a token with its line ends made visible."""
    return escape(text.replace("\n", "\u21b5"))


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]], num_texts: int = 1) -> str:
    """Returns a table; after the first `num_texts` columns there are numbers."""

    def cells(tag: str, row: Sequence[str]) -> str:
        return "".join(
            f"<{tag}>{escape(cell)}</{tag}>"
            if number < num_texts
            else f'<{tag} class="number">{escape(cell)}</{tag}>'
            for number, cell in enumerate(row)
        )

    body = "\n".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
    return f"<table>\n<tr>{cells('th', heads)}</tr>\n{body}\n</table>"


def _parameters(found: Explanation) -> str:
    return ", ".join(f"{name} {value}" for name, value in found.parameters.items())


def _prompt(found: Explanation) -> str:
    tokens = "".join(
        f'<span class="token">{_text(each.text)} <small>{each.token_id}</small></span>'
        for each in found.prompt_tokens
    )
    return f'<div class="tokens" id="prompt">{tokens}</div>'


def _stages(found: Explanation) -> str:
    rows = [
        (stage.name, stage.axes, shape(stage.prefill), shape(stage.decode))
        for stage in found.stages
    ]
    return _table(("stage", "axes", "prefill", "first decode step"), rows, num_texts=2)


def _work(found: Explanation) -> str:
    cost = found.cost
    rows: tuple[tuple[str, WorkReport], ...] = (
        ("prefill", cost.prefill),
        ("first decode step", cost.first_decode),
        ("last decode step", cost.last_decode),
        (f"{cost.output_tokens} tokens with KV cache", cost.with_cache),
        (f"{cost.output_tokens} tokens without KV cache", cost.without_cache),
    )
    return _table(
        ("step", "products", "bytes moved", "FLOP/B"),
        [
            (
                name,
                amount(work.flops, "FLOP"),
                amount(work.num_bytes, "B"),
                f"{work.flops_per_byte:,.1f}",
            )
            for name, work in rows
        ],
    )


def _times(found: Explanation) -> tuple[str, ...]:
    """Returns a chart of the decode steps next to their floors, and its key."""
    steps = found.steps[1:]
    if not steps:
        return (_paragraph("One token: there is no decode step."),)
    again = found.recomputation
    most = max(max(step.seconds, step.floor_seconds) for step in steps)
    width = _WIDTH / len(steps)
    bars = []
    for number, step in enumerate(steps):
        left = number * width
        title = (
            f"token {number + 1} {step.text!r}: {milliseconds(step.seconds)}, floor "
            f"{milliseconds(step.floor_seconds)}"
        )
        if again is not None:
            title += f", without KV cache {milliseconds(again.seconds[number + 1])}"
        bars.append(
            f"<g><title>{escape(title)}</title>"
            f"{_bar('drawn', left, 0.45 * width, step.seconds / most)}"
            f"{_bar('floor', left + 0.47 * width, 0.45 * width, step.floor_seconds / most)}</g>"
        )
    chart = (
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT + 16}" role="img" '
        'aria-label="Time of each decode step and its floor">'
        f'{"".join(bars)}<text x="0" y="{_HEIGHT + 13}">{milliseconds(most)} is the full height'
        "</text></svg>"
    )
    key = (
        '<p><span class="key of-drawn"><span>measured</span></span> '
        '<span class="key of-floor"><span>floor: the longer of bytes and products</span></span></p>'
    )
    return chart, key


def _bar(kind: str, left: float, width: float, share: float) -> str:
    height = _HEIGHT * share
    return (
        f'<rect class="{kind}" x="{left:.2f}" y="{_HEIGHT - height:.2f}" width="{width:.2f}" '
        f'height="{height:.2f}"/>'
    )


def _step(number: int, step: Step) -> str:
    name = "prefill" if number == 0 else f"decode at {step.context} tokens"
    rows = "\n".join(_candidate(each, each.token_id == step.token_id) for each in step.candidates)
    return (
        f'<details{" open" if number < 3 else ""}><summary><span class="token">'
        f"{_text(step.text)} <small>{step.token_id}</small></span> "
        f'<span class="muted">{name}: {milliseconds(step.seconds)}, floor '
        f"{milliseconds(step.floor_seconds)} by {step.bound}; rank {step.rank}, "
        f"{percent(step.probability)}, drawn with {percent(step.drawn_probability)}; KV cache "
        f"{amount(step.kv_bytes, 'B')}</span></summary>\n{rows}\n</details>"
    )


def _candidate(each: TokenCandidate, is_chosen: bool) -> str:
    drawn = each.drawn_probability or 0.0
    return (
        f'<div class="candidate{" chosen" if is_chosen else ""}"><code>{_text(each.text)}</code>'
        f'<span class="number">{percent(each.probability)}</span>'
        f'<span class="number">{percent(each.drawn_probability)}</span>'
        f'<svg viewBox="0 0 {_BAR} 14" aria-hidden="true">'
        f'<rect class="model" y="1" width="{_BAR * each.probability:.2f}" height="5"/>'
        f'<rect class="drawn" y="8" width="{_BAR * drawn:.2f}" height="5"/></svg></div>'
    )


def _timeline(found: Explanation) -> str:
    rows = [(name, _value(name, value)) for name, value in found.timeline.items()]
    return _table(("part", "value"), rows)


def _value(name: str, value: object) -> str:
    if name.endswith("_seconds") and isinstance(value, float):
        return milliseconds(value)
    return str(value)
