"""Makes the tables that commands print, the console for them, and progress bars."""

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Final

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column, Table

_CHARACTERS: Final = 4096  # in a line if there is no terminal: nothing is folded


def make_table(
    *texts: str | Column, numbers: Iterable[str] = (), title: str | None = None, boxed: bool = True
) -> Table:
    """Returns a table without rows, with columns for `texts`, then right-justified for `numbers`.

    A narrow terminal may fold the columns of numbers in a table without a box.
    """
    columns = [Column(name, justify="right", no_wrap=boxed) for name in numbers]
    table = Table(
        *texts, *columns, title=title, title_justify="left", header_style="bold", pad_edge=boxed
    )
    if not boxed:
        table.box = None
    return table


def table_console(*, stderr: bool = False) -> Console:
    """Returns a console, which prints texts as they are: an address in brackets is no markup.

    It folds no line if there is no terminal.
    """
    is_terminal = (sys.stderr if stderr else sys.stdout).isatty()
    return Console(
        stderr=stderr,
        markup=False,
        emoji=False,
        highlight=False,
        width=None if is_terminal else _CHARACTERS,
    )


@contextmanager
def progress_bar(
    noun: str, total: int | None = None, *, shown: bool = True
) -> Iterator[Callable[..., None]]:
    """Shows a progress bar on stderr, on a terminal or in a notebook, until the end of the block.

    `noun` names the units that are counted. Yields the bar's `update`, which takes `advance`,
    `completed` and `total`.
    """
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    disabled = not (shown and (console.is_terminal or console.is_jupyter))
    with Progress(*columns, console=console, transient=True, disable=disabled) as bar:
        yield partial(bar.update, bar.add_task(noun, total=total))
