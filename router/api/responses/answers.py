"""Writes the answers of OpenAI's Responses API: whole, or as events with sequence numbers."""

import json
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final

from ....proto import inference_pb2
from ....proto.errors import TandemError
from ..openai.answers import TokenIds, error_response, error_text
from ..openai.streaming import AnswerForm
from .requests import ResponsesRequest

_UNFINISHED: Final = inference_pb2.FINISH_REASON_UNSPECIFIED
_MAX_EVENTS_PER_TOKEN: Final = 16
_TEXTS: Final = {"message": "output_text", "reasoning": "reasoning_text"}
_PREFIXES: Final = {"message": "msg", "reasoning": "rs"}
_TEXT_ITEMS: Final[dict[str, tuple[dict[str, Any], dict[str, Any]]]] = {
    "message": (
        {"type": "message", "role": "assistant"},
        {"type": "output_text", "annotations": [], "logprobs": []},
    ),
    "reasoning": ({"type": "reasoning", "summary": []}, {"type": "reasoning_text"}),
}
"""Of each type of item that has text: the item and its part, without the text."""


class ResponsesWriter:
    """Writes the answer to one request: the events as its messages come, or the whole when all have
    come.
    """

    def __init__(self, request: ResponsesRequest, model: str, _prompts: TokenIds) -> None:
        self._request_id = request.request_id
        self._head = _head(request, model)
        self._has_started = False
        self._sequence_number = 0  # of the next event
        self._num_restored = 0  # tokens that the client had before
        self._output: list[dict[str, Any]] = []  # items; the last may go on
        self._open = ""  # the type of the text item that does

    async def chunk(self, _prompt: int, message: inference_pb2.GenerateResponse) -> bytes:
        """See AnswerWriter."""
        return b"".join(self._events(message))

    def restore(self, delivered: Iterable[inference_pb2.GenerateResponse]) -> None:
        """See AnswerWriter. Sequence numbers go on above those of the stream that broke."""
        for message in delivered:
            list(self._events(message))
            self._num_restored += len(message.token_ids)
        self._sequence_number = _MAX_EVENTS_PER_TOKEN * (1 + self._num_restored)

    def end(self, _usages: Sequence[inference_pb2.Usage]) -> bytes:
        """See AnswerWriter."""
        return b""  # the response was the last event

    def error_event(self, error: TandemError, name: Callable[[str], str]) -> bytes:
        """See AnswerWriter."""
        text, param = error_text(error, name)
        return self._event("error", code=error.code.lower(), message=text, param=param)

    async def whole(self, answers: Sequence[Sequence[inference_pb2.GenerateResponse]]) -> bytes:
        """See AnswerWriter."""
        ((message,),) = answers
        list(self._events(message))
        return json.dumps(self._response(message)).encode()

    def _events(self, message: inference_pb2.GenerateResponse) -> Iterator[bytes]:
        if not self._has_started:
            self._has_started = True
            for name in ("response.created", "response.in_progress"):
                yield self._event(name, response=self._head)
        if message.reasoning:
            yield from self._text("reasoning", message.reasoning)
        if message.text:
            yield from self._text("message", message.text)
        for call in message.tool_calls:
            yield from self._call(call)
        if message.finish_reason != _UNFINISHED:
            is_cut = message.finish_reason == inference_pb2.FINISH_REASON_LENGTH
            yield from self._close("incomplete" if is_cut else "completed")
            response = self._response(message)
            yield self._event(f"response.{response['status']}", response=response)

    def _text(self, kind: str, text: str) -> Iterator[bytes]:
        """Adds to the item that is open, or to a new one if that is of another kind."""
        if self._open != kind:
            yield from self._close("completed")
            self._open = kind
            item, part = _TEXT_ITEMS[kind]
            yield self._add_item(_PREFIXES[kind], item | {"content": []})
            self._output[-1]["content"].append(part | {"text": ""})
            yield self._item_event(
                "response.content_part.added", content_index=0, part=part | {"text": ""}
            )
        self._output[-1]["content"][0]["text"] += text
        logprobs: dict[str, Any] = {"logprobs": []} if kind == "message" else {}
        yield self._item_event(
            f"response.{_TEXTS[kind]}.delta", content_index=0, delta=text, **logprobs
        )

    def _call(self, call: inference_pb2.ToolCall) -> Iterator[bytes]:
        yield from self._close("completed")
        yield self._add_item(
            "fc", {"type": "function_call", "call_id": call.id, "name": call.name, "arguments": ""}
        )
        yield self._item_event("response.function_call_arguments.delta", delta=call.arguments)
        yield self._item_event(
            "response.function_call_arguments.done", name=call.name, arguments=call.arguments
        )
        self._output[-1]["arguments"] = call.arguments
        yield self._end_item("completed")

    def _close(self, status: str) -> Iterator[bytes]:
        """Ends the text that goes on, if one does."""
        if self._open:
            part = self._output[-1]["content"][0]
            logprobs: dict[str, Any] = {"logprobs": []} if self._open == "message" else {}
            name = f"response.{_TEXTS[self._open]}.done"
            yield self._item_event(name, content_index=0, text=part["text"], **logprobs)
            yield self._item_event("response.content_part.done", content_index=0, part=part)
            yield self._end_item(status)
            self._open = ""

    def _add_item(self, prefix: str, item: dict[str, Any]) -> bytes:
        item_id = f"{prefix}_{self._request_id}_{len(self._output)}"
        self._output.append({"id": item_id, "status": "in_progress"} | item)
        return self._event(
            "response.output_item.added", output_index=len(self._output) - 1, item=self._output[-1]
        )

    def _end_item(self, status: str) -> bytes:
        self._output[-1]["status"] = status
        return self._event(
            "response.output_item.done", output_index=len(self._output) - 1, item=self._output[-1]
        )

    def _item_event(self, name: str, /, **fields: Any) -> bytes:
        return self._event(
            name, item_id=self._output[-1]["id"], output_index=len(self._output) - 1, **fields
        )

    def _event(self, name: str, /, **fields: Any) -> bytes:
        numbered = {"type": name, "sequence_number": self._sequence_number} | fields
        self._sequence_number += 1
        return f"event: {name}\ndata: {json.dumps(numbered)}\n\n".encode()

    def _response(self, message: inference_pb2.GenerateResponse) -> dict[str, Any]:
        """Returns the response; `message` is the last."""
        is_cut = message.finish_reason == inference_pb2.FINISH_REASON_LENGTH
        return self._head | {
            "status": "incomplete" if is_cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "output": self._output,
            "usage": _usage(message.usage),
        }


def _head(request: ResponsesRequest, model: str) -> dict[str, Any]:
    """Returns the response as it is before anything is generated."""
    body = request.body
    dumped = body.model_dump(
        by_alias=True, exclude_none=True, include={"tools", "tool_choice", "text", "metadata"}
    )
    parameters = {
        name: getattr(body, name) for name in ("temperature", "top_p", "max_output_tokens")
    }
    effort = body.reasoning.effort if body.reasoning else None
    return {
        "id": f"resp_{request.request_id}",
        "object": "response",
        "created_at": int(time.time()),
        "status": "in_progress",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "model": model,
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": None,
        "reasoning": {"effort": effort, "summary": None},
        "store": False,
        "text": {"format": {"type": "text"}} | dumped.get("text", {}),
        "tool_choice": dumped.get("tool_choice", "auto"),
        "tools": dumped.get("tools", []),
        "truncation": "disabled",
        "usage": None,
        "user": body.user,
        "metadata": dumped.get("metadata", {}),
    } | parameters


def _usage(usage: inference_pb2.Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


RESPONSES_FORM: Final = AnswerForm(ResponsesWriter, error_response)
