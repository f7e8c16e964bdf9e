"""Parses tool calls out of generated text while it arrives, in formats where a tag may be text:

- Hermes (Qwen and others): any number of `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`
  among text.
- Qwen3-Coder: the same, or `<tool_call><function=...>...</function></tool_call>`. The model often
  leaves out the opening tag.
- GLM: the same, or `<tool_call>name<arg_key>...</arg_key><arg_value>...</arg_value></tool_call>`.
- Llama 3: the whole answer is `{"name": ..., "parameters": {...}}`, perhaps after
  `<|python_tag|>`. Several calls are separated by `;`.
"""

import json
import re
import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, Final

from ...proto import inference_pb2
from ...proto.limits import MAX_TOOL_NAME_CHARACTERS
from ..frontend.chat import active_tools, json_object
from ..frontend.formats.calls import PYTHON_TAG
from ..frontend.formats.chat_format import CALL_MARKUP
from ..frontend.tokenizer import Tokenizer
from . import glm_calls
from .qwen_coder import begins_call, ends_call, find_bare_call, read_call

_ReadTagged = Callable[[str, Mapping[str, inference_pb2.Tool]], tuple[str, dict[str, Any]]]

_OPEN, _CLOSE = CALL_MARKUP
CALL_ID_BYTES: Final = 12
_BETWEEN: Final = ";,"  # Llama models write these between two calls
_SPACE: Final = " \t\r\n"
_JSON_MARKS: Final = re.compile(r'\\(?:.|\Z)|["{}]', re.DOTALL)  # an escaped character, or a mark


class ToolParser(ABC):
    """Separates tool calls from a text; the result does not depend on the pieces it arrives in."""

    def __init__(self) -> None:
        self._held = ""  # text that may belong to a call
        self._space = ""  # white space after which text or a call may follow
        self._is_empty = True  # no text outside of calls was returned
        self._called = False
        self._after_call = False

    @abstractmethod
    def push(self, text: str) -> tuple[str, list[inference_pb2.ToolCall]]:
        """Returns the text outside of calls and the calls that the next piece completes.

        Text that may belong to a call is held back, and returned unchanged if it makes no valid
        call. White space before the first text and after the last text is dropped next to a call.
        """

    def finish(self) -> tuple[str, list[inference_pb2.ToolCall]]:
        """Returns the text and the calls that were held back at the end."""
        text = self._show(self._held)
        self._held = ""
        return text + ("" if self._after_call else self._space), []

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
    match tokenizer.call_format:
        case "llama3_json":
            return _LlamaParser()
        case "qwen3_coder":
            return _QwenCoderParser(chat)
        case "glm45":
            return _GlmParser(chat)
    return _HermesParser()


class _HermesParser(ToolParser):
    """Parses calls between tags, among text.

    Holds the beginning of a tag, or a call from its opening tag on.
    """

    def __init__(self) -> None:
        super().__init__()
        self._added = 0  # characters of an opening tag that the model left out
        self._begin_call()

    def _begin_call(self) -> None:
        self._from = len(_OPEN)  # where in the held text the closing tag is searched
        self._scanner = _JsonScanner(len(_OPEN))
        self._checked = 0  # the length of the call when it was last parsed

    def push(self, text: str) -> tuple[str, list[inference_pb2.ToolCall]]:
        self._held += text
        shown: list[str] = []
        calls: list[inference_pb2.ToolCall] = []
        while self._step(shown, calls):
            pass
        return "".join(shown), calls

    def finish(self) -> tuple[str, list[inference_pb2.ToolCall]]:
        if self._held.startswith(_OPEN):
            call = self._read_unclosed(self._held.removeprefix(_OPEN))
            if call:  # only its closing tag is missing
                return "", [call]
        self._held = self._held[self._added :]
        return super().finish()

    def _step(self, shown: list[str], calls: list[inference_pb2.ToolCall]) -> bool:
        """Takes one text or call from the held text; returns False if the rest has to wait."""
        if not self._held.startswith(_OPEN):
            start, begins = self._find_call()
            shown.append(self._show(self._held[:start]))
            self._held = self._held[start:]
            self._begin_call()
            return begins
        end = self._held.find(_CLOSE, self._from)
        if end < 0:
            self._from = max(len(_OPEN), len(self._held) - len(_CLOSE) + 1)
            return False
        if self._is_argument(end):
            self._from = end + len(_CLOSE)
            return True
        call = self._read(self._held[len(_OPEN) : end])
        end += len(_CLOSE)
        if call:
            self._note_call()
            calls.append(call)
        else:
            shown.append(self._show(self._held[self._added : end]))
        self._held = self._held[end:]
        self._added = 0
        self._begin_call()
        return True

    def _find_call(self) -> tuple[int, bool]:
        """Returns where a call begins in the held text, or may begin, and True if it does."""
        start = self._held.find(_OPEN)
        if start >= 0:
            return start, True
        return len(self._held) - _overlap(self._held, _OPEN), False

    def _is_argument(self, end: int) -> bool:
        """Returns True if the closing tag at `end` is a part of an argument.

        Invalid JSON may seem to be within a string, so the call is parsed to be sure. A call with
        many such tags is parsed only when it has grown by an eighth.
        """
        is_complete = self._scanner.find_end(self._held, end) >= 0
        if is_complete or not self._scanner.in_string:
            return False
        if 8 * end < 9 * self._checked:
            return True
        self._checked = end
        return _ends_in_string(self._held[len(_OPEN) : end])

    def _read(self, text: str) -> inference_pb2.ToolCall | None:
        """Returns the call between the tags; None if it is not valid."""
        return _call(text)

    def _read_unclosed(self, text: str) -> inference_pb2.ToolCall | None:
        """Returns the call after the opening tag at the end of the answer."""
        return self._read(text)


class _TaggedParser(_HermesParser):
    """Parses calls whose arguments are texts between tags, in the types of the tools' schemas."""

    def __init__(self, chat: inference_pb2.Chat) -> None:
        super().__init__()
        self._tools = {tool.name: tool for tool in chat.tools}

    def _made(self, text: str, read: _ReadTagged) -> inference_pb2.ToolCall | None:
        """Returns the call that `read` finds; None if it is not valid."""
        try:
            return make_call(*read(text, self._tools))
        except (ValueError, RecursionError):
            return None


class _QwenCoderParser(_TaggedParser):
    """Parses calls with a function between the tags, or with JSON as in Hermes's format."""

    def _find_call(self) -> tuple[int, bool]:
        start, begins = super()._find_call()
        bare, is_whole = find_bare_call(self._held)
        if bare >= start:
            return start, begins
        if is_whole:
            self._held = self._held[:bare] + _OPEN + self._held[bare:]
            self._added = len(_OPEN)
        return bare, is_whole

    def _is_argument(self, end: int) -> bool:
        if begins_call(self._held, len(_OPEN)):
            return not ends_call(self._held, end)
        return super()._is_argument(end)

    def _read(self, text: str) -> inference_pb2.ToolCall | None:
        if not begins_call(text, 0):
            return super()._read(text)
        return self._made(text, read_call)


class _GlmParser(_TaggedParser):
    """Parses calls with arguments in tags between the tags, or with JSON as in Hermes's format."""

    def _is_argument(self, end: int) -> bool:
        if glm_calls.begins_call(self._held, len(_OPEN)):
            return not glm_calls.ends_call(self._held, len(_OPEN), end)
        return super()._is_argument(end)

    def _read(self, text: str) -> inference_pb2.ToolCall | None:
        if text.lstrip().startswith("{"):
            return super()._read(text)
        return self._made(text, glm_calls.read_call)

    def _read_unclosed(self, text: str) -> inference_pb2.ToolCall | None:
        return super()._read(text)  # in GLM's format, arguments may be missing


class _LlamaParser(ToolParser):
    """Parses an answer of JSON objects only; holds the text from the end of the last call on."""

    def __init__(self) -> None:
        super().__init__()
        self._is_text = False  # no call follows any more
        self._start = -1  # where in the held text an object begins; -1: nowhere
        self._scanner = _JsonScanner(0)

    def push(self, text: str) -> tuple[str, list[inference_pb2.ToolCall]]:
        calls: list[inference_pb2.ToolCall] = []
        if not self._is_text:
            self._held += text
            while self._step(calls):
                pass
            if not self._is_text:
                return self._show(""), calls
            text = self._held
            self._held = ""
        return self._show(text), calls

    def finish(self) -> tuple[str, list[inference_pb2.ToolCall]]:
        if self._called and not self._held.strip(_SPACE + _BETWEEN):
            self._held = ""
        return super().finish()

    def _step(self, calls: list[inference_pb2.ToolCall]) -> bool:
        """Takes one call from the held text; returns False if the rest has to wait or is text."""
        if self._start < 0 and not self._find_start():
            return False
        end = self._scanner.find_end(self._held, len(self._held))
        if end < 0:
            return False
        call = _call(self._held[self._start : end], needs_arguments=True)
        if call is None:
            self._is_text = True
            return False
        calls.append(call)
        self._note_call()
        self._held = self._held[end:]
        self._start = -1
        return True

    def _find_start(self) -> bool:
        rest = self._held.lstrip(_SPACE + _BETWEEN if self._called else _SPACE)
        rest = rest.removeprefix(PYTHON_TAG).lstrip(_SPACE)
        if rest.startswith("{"):
            self._start = len(self._held) - len(rest)
            self._scanner = _JsonScanner(self._start)
            return True
        self._is_text = not PYTHON_TAG.startswith(rest)  # the empty rest is a prefix of it
        return False


class _JsonScanner:
    """Finds the end of a JSON object in a text that grows; reads each character once."""

    def __init__(self, begin: int) -> None:
        self.in_string = False  # at the position that was reached
        self._at = begin  # the position
        self._depth = 0

    def find_end(self, text: str, until: int) -> int:
        """Scans on in `text[:until]`; returns the end of the object, -1 if it goes on.

        After the end, scan no more.
        """
        for mark in _JSON_MARKS.finditer(text, self._at, until):
            if mark[0] == "\\":  # the escaped character is still to come
                self._at = mark.start()
                return -1
            if mark[0] == '"':
                self.in_string = not self.in_string
            elif mark[0] in "{}" and not self.in_string:
                self._depth += 1 if mark[0] == "{" else -1
                if not self._depth:
                    return mark.end()
        self._at = until
        return -1


def _call(text: str, *, needs_arguments: bool = False) -> inference_pb2.ToolCall | None:
    """Returns the call that a JSON object describes; None if the text is not valid.

    `needs_arguments`: an object without a member for arguments is not a call.
    """
    found = json_object(text) or {}
    if needs_arguments and not found.keys() & {"arguments", "parameters"}:
        return None
    return make_call(found.get("name"), found.get("arguments", found.get("parameters")))


def make_call(name: object, arguments: object) -> inference_pb2.ToolCall | None:
    """Returns a call with JSON arguments; None if the name or the arguments are not valid.

    For a call without arguments some models write null or nothing instead of an empty object.
    """
    if arguments is None or (isinstance(arguments, str) and not arguments.strip()):
        arguments = {}
    elif isinstance(arguments, str):  # some models encode the arguments twice
        arguments = json_object(arguments)
    if not isinstance(name, str) or not isinstance(arguments, dict):
        return None
    if not 1 <= len(name) <= MAX_TOOL_NAME_CHARACTERS:  # the call could not come back
        return None
    text = json.dumps(arguments, ensure_ascii=False)
    if json_object(text) is None:  # it has NaN, an infinity or a lone surrogate
        return None
    random = secrets.token_bytes(CALL_ID_BYTES)
    return inference_pb2.ToolCall(id=call_id(random), name=name, arguments=text)


def call_id(number: bytes) -> str:
    """Returns the id of a call for CALL_ID_BYTES that no other call has."""
    return f"call_{number.hex()}"


def _ends_in_string(text: str) -> bool:
    try:
        json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        return str(error).startswith("Unterminated string")
    return False


def _overlap(text: str, tag: str) -> int:
    """Returns the length of the longest end of `text` with which `tag` begins."""
    lengths = range(min(len(text), len(tag) - 1), 0, -1)
    return next((length for length in lengths if text.endswith(tag[:length])), 0)
