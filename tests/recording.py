"""Records a command in a terminal of its own as an animated SVG, which browsers play in an <img>.

    python -m tandem.tests.recording docs/demo-kill.svg --since "processes are killed now" \
        -- tandem demo --kill

Shows in real time what the command has written, from the first screen that has the text of
`--since`, and then its last screen for a while. `--cast FILE` also writes all of the output in the
format of asciinema (asciicast v2). The program that renders such files (agg) makes GIFs of several
megabytes; a text of each changed line is a tenth of that.
"""

import argparse
import codecs
import fcntl
import html
import json
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from rich.cells import cell_len
from rich.console import Console
from rich.style import Style
from rich.terminal_theme import MONOKAI
from rich.text import Text

WIDTH: Final = 116  # columns
HEIGHT: Final = 36
_BURST_SECONDS: Final = 0.03  # writes that follow each other faster are one screen
_LAST_SECONDS: Final = 8.0  # how long the last screen stays
_FONT: Final = "ui-monospace, SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono', monospace"
_FONT_SIZE: Final = 13
_COLUMN: Final = 7.8  # pixels
_ROW: Final = 17
_MARGIN: Final = 12
_BACKGROUND: Final = "#16181d"
_FOREGROUND: Final = "#d7dae0"
_CONSOLE: Final = Console()
_SEQUENCE: Final = re.compile(r"\x1b\[(\??[\d;]*)([A-Za-z])|\r|\n|[^\x1b\r\n]+")


class Terminal:
    """Keeps the lines of a terminal, for commands that rewrite whole lines, as rich does."""

    def __init__(self) -> None:
        self.lines = [""]  # with their escape sequences for colours
        self._row = 0

    def write(self, text: str) -> None:
        """Carries out the output. Raises ValueError for a sequence that rich does not write."""
        end = 0
        for found in _SEQUENCE.finditer(text):
            if found.start() != end:
                break
            end = found.end()
            self._take(found)
        if end != len(text):
            raise ValueError(f"an unknown sequence: {text[end : end + 20]!r}")

    def screen(self) -> tuple[str, ...]:
        """Returns the lines that the terminal shows."""
        return tuple(self.lines[-HEIGHT:])

    def _take(self, found: re.Match[str]) -> None:
        parameter, command = found[1], found[2]
        if found[0] == "\n":
            self._row += 1
            if self._row == len(self.lines):
                self.lines.append("")
        elif found[0] == "\r" or (command in ("h", "l") and parameter == "?25"):
            pass  # each line is erased before it is written again; the cursor is not shown
        elif command is None or command == "m":
            self.lines[self._row] += found[0]
        elif command == "A":
            self._row = max(self._row - int(parameter or 1), 0)
        elif command == "K" and parameter == "2":
            self.lines[self._row] = ""
        else:
            raise ValueError(f"an unknown sequence: {found[0]!r}")


@dataclass(frozen=True)
class Shown:
    """Describes a line of the screen that is shown from `start` to `end`, in seconds."""

    row: int
    text: str
    start: float
    end: float


@dataclass
class Recording:
    """Holds the output of a command: pieces, each with the seconds since its start."""

    pieces: list[tuple[float, str]] = field(default_factory=list)
    code: int = 0

    def cast(self) -> str:
        """Returns the recording as asciicast v2."""
        lines: list[object] = [{"version": 2, "width": WIDTH, "height": HEIGHT}]
        lines += [[round(at, 3), "o", text] for at, text in self.pieces]
        return "".join(f"{json.dumps(line)}\n" for line in lines)

    def screens(self, since: str) -> list[tuple[float, tuple[str, ...]]]:
        """Returns each screen from the first one with the text `since`, with its seconds."""
        terminal = Terminal()
        found: list[tuple[float, tuple[str, ...]]] = []
        burst = ""
        for number, (at, text) in enumerate(self.pieces):
            burst += text
            if number + 1 < len(self.pieces) and self.pieces[number + 1][0] - at < _BURST_SECONDS:
                continue
            terminal.write(burst)
            burst = ""
            screen = terminal.screen()
            is_new = screen != found[-1][1] if found else any(since in line for line in screen)
            if is_new:
                found.append((at, screen))
        if not found:
            raise ValueError(f"no screen has the text {since!r}")
        return [(at - found[0][0], screen) for at, screen in found]


def record(command: Sequence[str]) -> Recording:
    """Runs a command in a terminal until it ends."""
    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", HEIGHT, WIDTH, 0, 0))
    environment = os.environ | {"TERM": "xterm-256color", "COLUMNS": str(WIDTH)}
    recording = Recording()
    started = time.monotonic()
    process = subprocess.Popen(
        command, stdin=follower, stdout=follower, stderr=follower, env=environment
    )
    os.close(follower)
    decode = codecs.getincrementaldecoder("utf-8")().decode
    while True:
        try:
            data = os.read(leader, 65_536)
        except OSError:  # the last process has closed the terminal
            break
        recording.pieces.append((time.monotonic() - started, decode(data)))
    os.close(leader)
    recording.code = process.wait()
    return recording


def shown_lines(screens: Sequence[tuple[float, tuple[str, ...]]]) -> Iterator[Shown]:
    """Yields each line of the screens once for each time that it is shown without a change."""
    end = screens[-1][0] + _LAST_SECONDS
    begun: dict[int, tuple[str, float]] = {}
    for at, screen in [*screens, (end, ())]:
        for row in range(HEIGHT):
            text = screen[row] if row < len(screen) else ""
            before, start = begun.get(row, ("", 0.0))
            if text != before:
                if before:
                    yield Shown(row, before, start, at)
                begun[row] = (text, at)


def svg(screens: Sequence[tuple[float, tuple[str, ...]]], title: str) -> str:
    """Returns an animation of the screens, which begins again after the last one."""
    total = screens[-1][0] + _LAST_SECONDS
    num_rows = max(len(screen) for _, screen in screens)
    width = round(WIDTH * _COLUMN + 2 * _MARGIN)
    height = num_rows * _ROW + 2 * _MARGIN
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'font-family="{_FONT}" font-size="{_FONT_SIZE}" fill="{_FOREGROUND}">',
        f"<title>{html.escape(title)}</title>",
        f'<rect width="{width}" height="{height}" rx="8" fill="{_BACKGROUND}">',
        # Everything else is timed from this, which repeats.
        f'<animate id="a" attributeName="x" values="0;0" dur="{total:.2f}s" begin="0;a.end"/>',
        "</rect>",
    ]
    parts += [_animated(line, total) for line in shown_lines(screens)]
    return "\n".join([*parts, "</svg>\n"])


def _animated(line: Shown, total: float) -> str:
    """Returns a line that is visible during its time; without animation, one of the last screen."""
    y = _MARGIN + _ROW * line.row + _FONT_SIZE
    is_last = line.end >= total
    to, begin, seconds = "visible", line.start, line.end - line.start
    if is_last:
        to, begin, seconds = "hidden", 0.0, line.start
    hidden = "" if is_last else ' visibility="hidden"'
    timing = f'begin="a.begin+{begin:.2f}s" dur="{seconds:.2f}s"'
    change = f'<set attributeName="visibility" to="{to}" {timing}/>' if seconds else ""
    return f'<text y="{y}" xml:space="preserve"{hidden}>{_spans(line.text)}{change}</text>'


def _spans(line: str) -> str:
    """Returns the parts of a line, each with its colour and at its column."""
    text = Text.from_ansi(line)
    edges = sorted({edge for span in text.spans for edge in (span.start, span.end)})
    parts = []
    column = 0
    for part in text.divide(edges):
        style = part.get_style_at_offset(_CONSOLE, 0) if part else Style()
        if part.plain.strip():
            shown = part.plain.lstrip(" ")
            x = _MARGIN + _COLUMN * (column + cell_len(part.plain) - cell_len(shown))
            width = _COLUMN * cell_len(shown)
            parts.append(
                f'<tspan x="{x:.1f}" textLength="{width:.1f}"{_attributes(style)}>'
                f"{html.escape(shown)}</tspan>"
            )
        column += cell_len(part.plain)
    return "".join(parts)


def _attributes(style: Style) -> str:
    found = ""
    if style.color is not None and not style.color.is_default:
        red, green, blue = style.color.get_truecolor(MONOKAI)
        found += f' fill="#{red:02x}{green:02x}{blue:02x}"'
    if style.bold:
        found += ' font-weight="bold"'
    if style.dim:
        found += ' opacity="0.6"'
    return found


def main(arguments: Sequence[str]) -> int:
    """Records the command; returns its exit code."""
    parser = argparse.ArgumentParser(prog="python -m tandem.tests.recording")
    parser.add_argument("svg", type=Path, help="the file to write")
    parser.add_argument("--since", default="", help="a text of the first screen to show")
    parser.add_argument("--cast", type=Path, help="a file for all of the output")
    parser.add_argument("command", nargs="+", help="after --")
    options = parser.parse_args(arguments)
    recording = record(options.command)
    if options.cast is not None:
        options.cast.write_text(recording.cast())
    title = " ".join([Path(options.command[0]).name, *options.command[1:]])
    options.svg.write_text(svg(recording.screens(options.since), title))
    print(f"{options.svg}: {options.svg.stat().st_size / 1e3:.0f} kB, exit code {recording.code}")
    return recording.code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
