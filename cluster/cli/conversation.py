"""What was said in a chat, and questions as people type them. Does no I/O."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

QUOTES: Final = '"""'


@dataclass(slots=True)
class Conversation:
    """The messages so far. The last is a user's while a question is without an answer, which another one replaces."""

    system: str = ""
    turns: list[tuple[str, str | None]] = field(default_factory=list)  # question, answer

    @property
    def messages(self) -> list[dict[str, str]]:
        """With `role` and `content`, as a chat wants them."""
        made = [{"role": "system", "content": self.system}] if self.system else []
        for question, answer in self.turns:
            made.append({"role": "user", "content": question})
            if answer is not None:
                made.append({"role": "assistant", "content": answer})
        return made

    def ask(self, question: str) -> None:
        if self.turns and self.turns[-1][1] is None:
            self.turns.pop()
        self.turns.append((question, None))

    def answer(self, text: str) -> None:
        """Answers the last question."""
        question, _ = self.turns.pop()
        self.turns.append((question, text))

    def undo(self) -> str | None:
        """Forgets the last question and its answer; returns the question, None if there was none."""
        return self.turns.pop()[0] if self.turns else None


def read_question(read_line: Callable[[str], str]) -> str:
    '''One question of one or more lines: a line that ends in a backslash goes on with the next, and a question that
    begins with """ goes to the next """. `read_line` gets a prompt and returns a line without its end; it raises
    EOFError when there are no more, and so does this, unless the question has begun.'''
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
