"""Shows the progress of a few long steps on stderr: a bar on a terminal, else one plain line a step."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn


@contextmanager
def show_steps(*, shown: bool) -> Iterator[Callable[[str], AbstractContextManager[None]]]:
    """Yields a context manager that shows a text while its block runs, and marks it done if the block does not raise.
    Nothing is printed unless `shown`."""
    console = Console(stderr=True, quiet=not shown)
    # The length of a step is unknown: the bar pulses until it is done.
    columns = (SpinnerColumn(finished_text="✓"), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=not (shown and console.is_terminal)) as bars:

        @contextmanager
        def step(text: str) -> Iterator[None]:
            if not console.is_terminal:
                console.print(text, soft_wrap=True, markup=False, highlight=False)
            task = bars.add_task(text, total=None)
            yield
            bars.update(task, total=1, completed=1)

        yield step
