"""Holds the turns of a chat, and parses questions of several lines. Does no I/O."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

QUOTES: Final = '"""'


@dataclass(slots=True)
class Conversation:
    """Holds the turns so far. A last question without an answer is replaced by the next question."""

    system: str = ""
    turns: list[tuple[str, str | None]] = field(default_factory=list)  # question, answer

    @property
    def messages(self) -> list[dict[str, str]]:
        """Returns the messages of a chat request, with `role` and `content`."""
        made = [{"role": "system", "content": self.system}] if self.system else []
        for question, answer in self.turns:
            made.append({"role": "user", "content": question})
            if answer is not None:
                made.append({"role": "assistant", "content": answer})
        return made

    def ask(self, question: str) -> None:
        """Appends a question."""
        if self.turns and self.turns[-1][1] is None:
            self.turns.pop()
        self.turns.append((question, None))

    def answer(self, text: str) -> None:
        """Sets the answer to the last question."""
        question, _ = self.turns.pop()
        self.turns.append((question, text))

    def undo(self) -> str | None:
        """Removes the last question and its answer; returns the question, None if there was none."""
        return self.turns.pop()[0] if self.turns else None


def read_question(read_line: Callable[[str], str]) -> str:
    '''Returns one question: a line that ends in a backslash continues on the next, and a question that begins with
    """ ends at the next """. `read_line` gets a prompt and returns a line without its end, or raises EOFError at the
    end of the input, which this raises too unless the question has begun.'''
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
