"""Reads lines from a terminal, with editing and a persistent history, or from a pipe."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

import platformdirs

HISTORY_LINES: Final = 1_000


@contextmanager
def open_keyboard() -> Iterator[Callable[[str], str]]:
    """Yields a function that shows a prompt, on a terminal only, and returns the next line; it raises EOFError at the
    end and KeyboardInterrupt for Ctrl-C. The history is written when the block ends."""
    if sys.stdin.isatty() and sys.stdout.isatty():
        with _history(platformdirs.user_state_path("tandem") / "chat_history"):
            yield input
    else:
        yield _read_line


def _read_line(prompt: str) -> str:
    if sys.stdin.isatty():  # stdout is not a terminal: the prompt must not go there
        print(prompt, end="", file=sys.stderr, flush=True)
    return input()


@contextmanager
def _history(path: Path) -> Iterator[None]:
    """Keeps the lines that `input` reads in a file that only the user can read. If it cannot be read or written, the
    history ends with the process."""
    import readline  # changes `input` and the terminal: only where a user types

    readline.set_history_length(HISTORY_LINES)
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch(mode=0o600)
        readline.read_history_file(path)
    try:
        yield
    finally:
        with suppress(OSError):
            readline.write_history_file(path)
