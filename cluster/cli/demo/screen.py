"""Shows streams while they run: a table that is redrawn on a terminal, else plain lines."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Column, Table
from rich.text import Text

from .followed_stream import FollowedStream

_REDRAWS_PER_SECOND: Final = 4
_TEXT_WIDTH: Final = 34  # characters of a stream's text
_STATE_STYLES: Final = {"waiting": "dim", "running": "", "complete": "green", "lost": "bold red"}


class Screen:
    """Shows the streams of a run, and the events in it."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._started = time.monotonic()
        self._streams: Sequence[FollowedStream] = ()
        self._kinds: Sequence[str] = ()
        self._events: list[Text] = []  # of the table that is shown
        self._is_live = False

    @contextmanager
    def showing(
        self, title: str, streams: Sequence[FollowedStream], kinds: Sequence[str]
    ) -> Iterator[None]:
        """Shows the streams until the end of the block.

        `kinds`: of the processes that will be killed, each of which gets a column.
        """
        self._streams = streams
        self._kinds = kinds
        self._events = []
        self._is_live = self.console.is_terminal
        self.event(title, "bold")
        if not self._is_live:
            yield
            return
        live = Live(
            console=self.console,
            get_renderable=self._render,
            refresh_per_second=_REDRAWS_PER_SECOND,
            vertical_overflow="visible",
            redirect_stdout=False,
        )
        try:
            with live:
                yield
        finally:
            self._is_live = False

    def event(self, text: str, style: str = "") -> None:
        """Shows a line with the time since the start of the command."""
        line = Text(f"{time.monotonic() - self._started:5.1f} s  {text}", style)
        self._events.append(line)
        if not self._is_live:
            self.console.print(line)

    def line(self, text: str) -> None:
        """Prints a line about one stream, unless the table shows the stream anyway."""
        if not self.console.is_terminal:
            self.console.print(f"           {text}")

    def _render(self) -> RenderableType:
        gaps = [Column(f"{kind} ms", justify="right", width=13) for kind in self._kinds]
        table = Table(
            Column("stream", width=11),
            Column("tokens", justify="right", width=6),
            Column("text", width=_TEXT_WIDTH, no_wrap=True),
            *gaps,
            box=None,
            pad_edge=False,
            header_style="bold",
        )
        for stream in self._streams:
            table.add_row(
                Text(stream.request.name, _STATE_STYLES[stream.state]),
                str(stream.num_tokens),
                Text(_tail(stream.text)),
                *(_gap(stream, kind) for kind in self._kinds),
            )
        return Group(table, *self._events)


def milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:,.0f}"


def _tail(text: str) -> str:
    return " ".join(text.split())[-_TEXT_WIDTH:]


def _gap(stream: FollowedStream, kind: str) -> Text:
    """Returns the pause of a stream after the kill of a process; bold if its worker was killed."""
    pause = stream.pauses.get(kind)
    if pause is None:
        return Text("")
    if not pause.is_over:
        return Text("cut ..." if pause.is_cut else "...", "bold red" if pause.is_cut else "dim")
    text = milliseconds(pause.seconds)
    return Text(f"cut {text}", "bold red") if pause.is_cut else Text(text, "dim")
