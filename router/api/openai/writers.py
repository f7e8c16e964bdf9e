"""Defines the interface of the writers of answers, which every API implements."""

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from starlette.responses import JSONResponse
from typing_extensions import override

from ....proto import inference_pb2
from ....proto.errors import TandemError

TokenIds = Sequence[Sequence[int]]
"""The token ids of each prompt of a request."""

Answers = Sequence[Sequence[inference_pb2.GenerateResponse]]
"""By prompt, one message for each choice; the last has the usage."""

TextKind = Literal["reasoning", "text"]

CUT: Final = (inference_pb2.FINISH_REASON_LENGTH, inference_pb2.FINISH_REASON_TIME)
"""Finish reasons of an answer that is incomplete."""


class StreamWriter(ABC):
    """Writes the answer to one request in full, or as server-sent events."""

    @abstractmethod
    async def render_full(self, answers: Answers) -> bytes:
        """Returns the body of an answer that is not streamed."""

    @abstractmethod
    async def chunk(self, prompt: int, message: inference_pb2.GenerateResponse) -> bytes:
        """Returns the events of one message for prompt number `prompt`."""

    @abstractmethod
    def continue_after(self, delivered: Iterable[inference_pb2.GenerateResponse]) -> None:
        """Counts messages that the client of a single prompt has; `chunk` continues them."""

    def keep_alive(self, *, has_ids: bool) -> bytes:
        """Returns the keep-alive of a stream without events: a comment, which clients ignore.

        `has_ids`: the events of the stream have ids. Then the comment has no empty line: after an
        id, OpenAI's package takes an empty line for the end of an event without data, and fails.
        """
        return b": keep-alive\n" if has_ids else b": keep-alive\n\n"

    @abstractmethod
    def end(self, usages: Sequence[inference_pb2.Usage]) -> bytes:
        """Returns the events after the last message. `usages`: one for each prompt."""

    @abstractmethod
    def error_event(self, error: TandemError, name: Callable[[str], str]) -> bytes:
        """Returns the last events of a stream that failed, possibly before its first event.

        `name` maps a field of GenerateRequest to the name in the body.
        """


class ItemWriter(StreamWriter):
    """Streams one choice as items, one after the other: reasoning, texts and tool calls.

    Anthropic's Messages API (whose items are content blocks) and OpenAI's Responses API open an
    item, add to it and close it. They differ in the events, which subclasses define.
    """

    def __init__(self) -> None:
        self._has_started = False
        self._open: TextKind | None = None  # kind of the item that further text is added to

    @override
    async def chunk(self, prompt: int, message: inference_pb2.GenerateResponse) -> bytes:
        return b"".join(self._events(message))

    @override
    def continue_after(self, delivered: Iterable[inference_pb2.GenerateResponse]) -> None:
        for message in delivered:
            list(self._events(message))

    def _events(self, message: inference_pb2.GenerateResponse) -> Iterator[bytes]:
        if not self._has_started:
            self._has_started = True
            yield from self._start(message)
        if message.reasoning:
            yield from self._add_text("reasoning", message.reasoning)
        if message.text:
            yield from self._add_text("text", message.text)
        for call in message.tool_calls:
            yield from self._close_open_item()
            yield from self._add_call(call)
        if message.finish_reason != inference_pb2.FINISH_REASON_UNSPECIFIED:
            is_cut = message.finish_reason in CUT
            yield from self._close_open_item(is_cut=is_cut)
            yield from self._finish(message)

    def _add_text(self, kind: TextKind, text: str) -> Iterator[bytes]:
        if self._open != kind:
            yield from self._close_open_item()
            self._open = kind
            yield from self._open_item(kind)
        yield self._delta(kind, text)

    def _close_open_item(self, *, is_cut: bool = False) -> Iterator[bytes]:
        if self._open is not None:
            yield from self._close_item(self._open, is_cut=is_cut)
            self._open = None

    @abstractmethod
    def _start(self, message: inference_pb2.GenerateResponse) -> Iterator[bytes]:
        """Yields the events before the first item; `message` is the first one."""

    @abstractmethod
    def _open_item(self, kind: TextKind) -> Iterator[bytes]:
        """Yields the events that open an item without text."""

    @abstractmethod
    def _delta(self, kind: TextKind, text: str) -> bytes:
        """Returns the event that adds text to the open item."""

    @abstractmethod
    def _close_item(self, kind: TextKind, *, is_cut: bool) -> Iterator[bytes]:
        """Yields the events that close the open item; `is_cut`: max_tokens has ended it."""

    @abstractmethod
    def _add_call(self, call: inference_pb2.ToolCall) -> Iterator[bytes]:
        """Yields all events of the item of a tool call."""

    @abstractmethod
    def _finish(self, message: inference_pb2.GenerateResponse) -> Iterator[bytes]:
        """Yields the events after the last item; `message` is the last one."""


MakeWriter = Callable[[Any, str, TokenIds], StreamWriter]
ErrorResponse = Callable[[TandemError, Callable[[str], str]], JSONResponse]


@dataclass(frozen=True, slots=True)
class AnswerForm:
    """Makes the answers of one API, from a request, the model's name and the prompts."""

    render_full: Callable[[Any, str, TokenIds, Answers], Awaitable[bytes]]
    error_response: ErrorResponse
    make_writer: MakeWriter | None = None  # None: the API does not stream
    streamed_errors: tuple[type[TandemError], ...] = ()  # events even as the first of a stream


def streaming_form(
    make_writer: MakeWriter,
    error_response: ErrorResponse,
    streamed_errors: tuple[type[TandemError], ...] = (),
) -> AnswerForm:
    """Returns the form of an API whose writer makes streams and answers in full."""

    async def render_full(request: Any, model: str, prompts: TokenIds, answers: Answers) -> bytes:
        return await make_writer(request, model, prompts).render_full(answers)

    return AnswerForm(render_full, error_response, make_writer, streamed_errors)
