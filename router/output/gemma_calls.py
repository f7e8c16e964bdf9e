"""Reads calls as Gemma 4 and FunctionGemma write them: `call:weather{city:<|"|>Rome<|"|>,days:3}`.

Names of arguments have no quotes, and may have any characters that do not end them. Strings are
between delimiters. Constants have the form of JSON or of Python: chat templates write None.
"""

import json
import re
from typing import Any, Final

from ..frontend.formats.chat_format import CALLED_NAME

_BEGIN: Final = re.compile(rf"\s*+call:({CALLED_NAME})(?=\{{)")
_SPACE: Final = re.compile(r"\s*+")
_WORD: Final = re.compile(r"[^\s{}\[\],:]++")
_CONSTANTS: Final = {
    "true": True,
    "True": True,
    "false": False,
    "False": False,
    "null": None,
    "None": None,
}
_JSON: Final = json.JSONDecoder()


def read_call(text: str, delimiter: str) -> tuple[str, object]:
    """Returns the name and the arguments of a call.

    Raises ValueError, and RecursionError for values that are nested too deeply.
    """
    begin = _BEGIN.match(text)
    if begin is None:
        raise ValueError
    reader = _Reader(text, begin.end(), delimiter)
    arguments = reader.read_value()
    if reader.next_mark():
        raise ValueError
    return begin[1], arguments


class _Reader:
    """Reads the values of a text from a position on. All methods raise ValueError."""

    def __init__(self, text: str, at: int, delimiter: str) -> None:
        self._text = text
        self._at = at
        self._delimiter = delimiter

    def next_mark(self) -> str:
        """Returns the next character that is no white space; "" at the end."""
        space = _SPACE.match(self._text, self._at)
        self._at = space.end() if space else self._at
        return self._text[self._at : self._at + 1]

    def read_value(self) -> object:
        """Returns the next value."""
        match self.next_mark():
            case "{":
                return self._read_object()
            case "[":
                return self._read_list()
        if self._text.startswith(self._delimiter, self._at):
            return self._read_string()
        word = _WORD.match(self._text, self._at)
        if word and word[0] in _CONSTANTS:
            self._at = word.end()
            return _CONSTANTS[word[0]]
        value, self._at = _JSON.raw_decode(self._text, self._at)
        return value

    def _read_object(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        while self._goes_on("}", is_first=not found):
            name = self._read_name()
            if self.next_mark() != ":":
                raise ValueError
            self._at += 1
            found[name] = self.read_value()
        return found

    def _read_list(self) -> list[Any]:
        found: list[Any] = []
        while self._goes_on("]", is_first=not found):
            found.append(self.read_value())
        return found

    def _goes_on(self, end: str, *, is_first: bool) -> bool:
        """Takes the mark before the next element or after the last; returns True before one."""
        mark = self.next_mark()
        self._at += 1
        if is_first:  # the bracket that opens; the end may follow at once
            if self.next_mark() != end:
                return True
            self._at += 1
            return False
        if mark not in (",", end):
            raise ValueError
        return mark == ","

    def _read_name(self) -> str:
        mark = self.next_mark()
        if self._text.startswith(self._delimiter, self._at):
            return self._read_string()
        if mark == '"':
            name, self._at = _JSON.raw_decode(self._text, self._at)
            return str(name)
        word = _WORD.match(self._text, self._at)
        if word is None:
            raise ValueError
        self._at = word.end()
        return word[0]

    def _read_string(self) -> str:
        begin = self._at + len(self._delimiter)
        end = self._text.index(self._delimiter, begin)
        self._at = end + len(self._delimiter)
        return self._text[begin:end]
