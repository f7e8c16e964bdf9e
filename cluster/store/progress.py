"""Shows the progress of a few long steps on stderr: a bar on a terminal, else one plain line a step."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn


class Steps:
    """Shows each `step` inside its context; prints nothing unless `shown`."""

    def __init__(self, *, shown: bool) -> None:
        self._console = Console(stderr=True, quiet=not shown)
        # The length of a step is unknown: the bar pulses until it is done.
        columns = (SpinnerColumn(finished_text="✓"), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
        self._bars = Progress(*columns, console=self._console, disable=not (shown and self._console.is_terminal))

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._bars.stop()

    @contextmanager
    def step(self, text: str) -> Iterator[None]:
        """Shows `text` while the block runs and marks it done if the block does not raise."""
        if not self._console.is_terminal:
            self._console.print(text, soft_wrap=True, markup=False, highlight=False)
        task = self._bars.add_task(text, total=None)
        yield
        self._bars.update(task, total=1, completed=1)
