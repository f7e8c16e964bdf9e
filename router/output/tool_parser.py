"""Parses tool calls out of generated text while it arrives, in Hermes's and Llama 3's formats:

- Hermes (Qwen and others): any number of `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`
  among text.
- Llama 3: the whole answer is `{"name": ..., "parameters": {...}}`, several separated by `;`,
  perhaps after `<|python_tag|>`.
"""

import json
import re
import secrets
from abc import ABC, abstractmethod
from typing import Final

from ...proto import inference_pb2
from ..frontend.chat import active_tools, json_object
from ..frontend.chat_formats import CALL_MARKUP, PYTHON_TAG
from ..frontend.tokenizer import Tokenizer

_OPEN, _CLOSE = CALL_MARKUP
_BETWEEN: Final = ";,"  # what Llama models write between two calls
_SPACE: Final = " \t\r\n"
_QUOTES: Final = re.compile(r'\\.|"', re.DOTALL)  # a quote that is not escaped, or anything that is


class ToolParser(ABC):
    """Separates tool calls from a text that arrives in pieces; the result does not depend on how it
    is cut.
    """

    def __init__(self) -> None:
        self._held = ""  # text that may belong to a call
        self._space = ""  # white space of which it is not known yet whether text or a call follows
        self._is_empty = True  # no text outside of calls was returned
        self._called = False
        self._after_call = False

    @abstractmethod
    def push(self, text: str) -> tuple[str, list[inference_pb2.ToolCall]]:
        """Takes the next piece; returns the text outside of calls, and the calls that are complete
        now.

        Text that may belong to a call is held back, and returned unchanged if no valid call comes
        of it. White space before the first text and after the last is dropped next to a call.
        """

    def finish(self) -> tuple[str, list[inference_pb2.ToolCall]]:
        """Ends the text; returns what was held back."""
        held, self._held = self._held, ""
        return self._show(held) + ("" if self._after_call else self._space), []

    def _show(self, text: str) -> str:
        text = self._space + text
        if self._is_empty and self._called:
            text = text.lstrip()
        shown = text.rstrip()
        self._space = text[len(shown) :]
        if shown:
            self._is_empty = self._after_call = False
        return shown

    def _note_call(self) -> None:
        self._called = self._after_call = True
        if self._is_empty:
            self._space = ""


def parser_for(chat: inference_pb2.Chat, tokenizer: Tokenizer) -> ToolParser | None:
    """Returns the parser for the answer to a checked chat; None if its prompt has no tools."""
    if not active_tools(chat):
        return None
    return _LlamaParser() if tokenizer.call_format == "llama3_json" else _HermesParser()


class _HermesParser(ToolParser):
    """Parses calls between tags, among text. Holds the beginning of a tag, or a call from its
    opening tag on.
    """

    _from = 0  # where in what is held the search goes on
    _scanned = 0  # up to where it is known whether a string of the call is open
    _in_string = False
    _checked = 0  # how long the call was when it was parsed last

    def push(self, text: str) -> tuple[str, list[inference_pb2.ToolCall]]:
        self._held += text
        shown: list[str] = []
        calls: list[inference_pb2.ToolCall] = []
        while self._step(shown, calls):
            pass
        return "".join(shown), calls

    def finish(self) -> tuple[str, list[inference_pb2.ToolCall]]:
        call = (
            _call(self._held.removeprefix(_OPEN), default={})
            if self._held.startswith(_OPEN)
            else None
        )
        return (
            ("", [call]) if call else super().finish()
        )  # of a call the closing tag alone is missing

    def _step(self, shown: list[str], calls: list[inference_pb2.ToolCall]) -> bool:
        """Takes one text or call from what is held; False if the rest has to wait."""
        if not self._held.startswith(_OPEN):
            start = self._held.find(_OPEN)
            end = start if start >= 0 else len(self._held) - _overlap(self._held, _OPEN)
            shown.append(self._show(self._held[:end]))
            self._held, self._from, self._scanned = self._held[end:], len(_OPEN), len(_OPEN)
            self._in_string, self._checked = False, 0
            return start >= 0
        end = self._held.find(_CLOSE, self._from)
        if end < 0:
            self._from = max(len(_OPEN), len(self._held) - len(_CLOSE) + 1)
            return False
        if self._is_argument(end):
            self._from = end + len(_CLOSE)
            return True
        call = _call(self._held[len(_OPEN) : end], default={})
        end += len(_CLOSE)
        if call:
            self._note_call()
            calls.append(call)
        else:
            shown.append(self._show(self._held[:end]))
        self._held = self._held[end:]
        return True

    def _is_argument(self, end: int) -> bool:
        """Whether the closing tag at `end` is a part of an argument. A call of many such tags is
        parsed only whenever it has grown by an eighth, which is enough to let go of what is no
        JSON.
        """
        for found in _QUOTES.finditer(self._held, self._scanned, end):
            self._in_string ^= found[0] == '"'
        self._scanned = end
        if not self._in_string or 8 * end < 9 * self._checked:
            return self._in_string
        self._checked = end
        return _ends_in_string(self._held[len(_OPEN) : end])


class _LlamaParser(ToolParser):
    """Parses an answer that is JSON objects only. Holds the text from the end of the last call on."""

    def __init__(self) -> None:
        super().__init__()
        self._is_text = False  # no call follows any more
        self._start = -1  # where in what is held an object begins, -1 if none does
        self._at = 0  # up to where it was scanned
        self._depth, self._in_string, self._escaped = 0, False, False

    def push(self, text: str) -> tuple[str, list[inference_pb2.ToolCall]]:
        calls: list[inference_pb2.ToolCall] = []
        if not self._is_text:
            self._held += text
            while self._step(calls):
                pass
            text, self._held = (self._held, "") if self._is_text else ("", self._held)
        return self._show(text), calls

    def finish(self) -> tuple[str, list[inference_pb2.ToolCall]]:
        if self._called and not self._held.strip(_SPACE + _BETWEEN):
            self._held = ""
        return super().finish()

    def _step(self, calls: list[inference_pb2.ToolCall]) -> bool:
        """Takes one call from what is held; False if the rest has to wait or is text."""
        if self._start < 0 and not self._find_start():
            return False
        end = self._find_end()
        if end < 0:
            return False
        call = _call(self._held[self._start : end], default=None)
        if call is None:
            self._is_text = True
            return False
        calls.append(call)
        self._note_call()
        self._held, self._start, self._at = self._held[end:], -1, 0
        return True

    def _find_start(self) -> bool:
        rest = self._held.lstrip(_SPACE + _BETWEEN if self._called else _SPACE)
        rest = rest.removeprefix(PYTHON_TAG).lstrip(_SPACE)
        if rest.startswith("{"):
            self._start = self._at = len(self._held) - len(rest)
            return True
        self._is_text = not PYTHON_TAG.startswith(rest)  # the empty rest is a prefix, too
        return False

    def _find_end(self) -> int:
        """Returns where the object ends; -1 if it does not yet."""
        for at in range(self._at, len(self._held)):
            char = self._held[at]
            if self._in_string:
                self._in_string = self._escaped or char != '"'
                self._escaped = char == "\\" and not self._escaped
            elif char == '"':
                self._in_string = True
            elif char in "{}":
                self._depth += 1 if char == "{" else -1
                if not self._depth:
                    return at + 1
        self._at = len(self._held)
        return -1


def _call(text: str, default: object) -> inference_pb2.ToolCall | None:
    """Returns the call that the JSON object `text` describes, None if it describes none; `default`
    takes the place of missing arguments.
    """
    found = json_object(text) or {}
    return make_call(found.get("name"), found.get("arguments", found.get("parameters", default)))


def make_call(name: object, arguments: object) -> inference_pb2.ToolCall | None:
    """Returns the call of a tool with arguments as JSON has them; None if they cannot be those of a
    call.
    """
    if isinstance(arguments, str):  # some models encode the arguments twice
        arguments = json_object(arguments)
    if not isinstance(name, str) or not name or not isinstance(arguments, dict):
        return None
    text = json.dumps(arguments, ensure_ascii=False)
    if json_object(text) is None:  # a number or a character that is none
        return None
    return inference_pb2.ToolCall(id=f"call_{secrets.token_hex(12)}", name=name, arguments=text)


def _ends_in_string(text: str) -> bool:
    try:
        json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        return str(error).startswith("Unterminated string")
    return False


def _overlap(text: str, tag: str) -> int:
    """Returns the length of the longest end of `text` with which `tag` begins."""
    return next(
        (n for n in range(min(len(text), len(tag) - 1), 0, -1) if text.endswith(tag[:n])), 0
    )
