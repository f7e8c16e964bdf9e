"""Reads the questions of a chat from a terminal or a pipe.

A terminal has line editing and a persistent history.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Final

import platformdirs

from ..text_files import decoded

HISTORY_LINES: Final = 1_000
QUOTES: Final = '"""'


def read_question(read_line: Callable[[str], str]) -> str:
    '''Returns one question, which may have several lines.

    A line that ends in a backslash continues on the next line, and a question that begins with
    """ ends at the next """. `read_line` gets a prompt and returns a line without its end, or
    raises EOFError at the end of the input. Before the first line this function raises it again.
    '''
    line = read_line("> ")
    if line.lstrip().startswith(QUOTES):
        return _quoted(line.lstrip().removeprefix(QUOTES), read_line)
    lines = [line]
    with suppress(EOFError):
        while lines[-1].endswith("\\"):
            lines[-1] = lines[-1][:-1]
            lines.append(read_line(". "))
    return "\n".join(lines).strip()


def _quoted(line: str, read_line: Callable[[str], str]) -> str:
    lines = [line]
    with suppress(EOFError):
        while not lines[-1].rstrip().endswith(QUOTES):
            lines.append(read_line(". "))
        lines[-1] = lines[-1].rstrip().removesuffix(QUOTES)
    return "\n".join(lines).strip()


@contextmanager
def open_keyboard() -> Iterator[Callable[[str], str]]:
    """Yields a function that shows a prompt, on a terminal only, and returns the next line.

    The function raises EOFError at the end, KeyboardInterrupt for Ctrl-C and InvalidArgument for a
    line that is not UTF-8. The history is written at the end of the block.
    """
    if sys.stdin.isatty() and sys.stdout.isatty():
        with _history(platformdirs.user_state_path("tandem") / "chat_history"):
            yield lambda prompt: decoded(partial(input, prompt))
    else:
        yield _read_line


def _read_line(prompt: str) -> str:
    if sys.stdin.isatty():  # stdout is no terminal, so the prompt must not go there
        print(prompt, end="", file=sys.stderr, flush=True)
    return decoded(input)


@contextmanager
def _history(path: Path) -> Iterator[None]:
    """Keeps the lines that `input` reads in a file that only the user can read.

    If the file cannot be read or written, the history ends with the process.
    """
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
