"""Writes the answers of OpenAI's Responses API: in full, or as events with sequence numbers."""

import json
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from typing_extensions import override

from ....proto import inference_pb2
from ....proto.errors import PromptTooLong, TandemError
from ..openai.answers import error_code, error_text, plain_error, stop_reason
from ..openai.writers import CUT, Answers, ItemWriter, TextKind, TokenIds
from .items import encode_reasoning
from .requests import ResponsesRequest
from .tool_bodies import HostedTool
from .tools import custom_input

_MAX_EVENTS_PER_TOKEN: Final = 16
_ENCODED_REASONING: Final = "reasoning.encrypted_content"
_ID_PREFIXES: Final = {"text": "msg", "reasoning": "rs"}
_PART_TYPES: Final = {"text": "output_text", "reasoning": "reasoning_text"}
_LOGPROBS: Final[dict[TextKind, dict[str, Any]]] = {"text": {"logprobs": []}, "reasoning": {}}
"""Further fields of a part and of its events, by kind."""


@dataclass(frozen=True, slots=True)
class _CallForm:
    """Describes the item of a call and its events."""

    item_type: str
    id_prefix: str
    field: str  # of the item: what the model writes
    event: str  # without .delta and .done


_FUNCTION_CALL: Final = _CallForm(
    "function_call", "fc", "arguments", "response.function_call_arguments"
)
_CUSTOM_CALL: Final = _CallForm(
    "custom_tool_call", "ctc", "input", "response.custom_tool_call_input"
)

KeepResponse = Callable[[dict[str, Any]], Awaitable[dict[str, Any]]]


class ResponsesWriter(ItemWriter):
    """Writes the answer to one request: as events, or in full."""

    def __init__(
        self,
        request: ResponsesRequest,
        model: str,
        _prompts: TokenIds,
        keep: KeepResponse | None = None,
    ) -> None:
        """`keep` stores the finished response, and returns it with the fact."""
        super().__init__()
        self._keep = keep
        self._request_id = request.request_id
        self._tools = request.tools
        self._encodes_reasoning = _ENCODED_REASONING in (request.body.include or ())
        self._head = _head(request, model) | {"store": keep is not None}
        self._sequence_number = 0  # of the next event
        self._num_delivered_tokens = 0  # tokens that the client had before it resumed
        self._output: list[dict[str, Any]] = []  # items; the last one may be open
        self._has_ended = False  # the last events are numbered, but may not be sent

    @override
    def continue_after(self, delivered: Iterable[inference_pb2.GenerateResponse]) -> None:
        messages = list(delivered)
        super().continue_after(messages)
        self._num_delivered_tokens += sum(len(message.token_ids) for message in messages)
        # Above all numbers of the stream that broke, whose messages had other boundaries.
        self._sequence_number = _MAX_EVENTS_PER_TOKEN * (1 + self._num_delivered_tokens)

    @override
    async def chunk(self, prompt: int, message: inference_pb2.GenerateResponse) -> bytes:
        events = await super().chunk(prompt, message)
        if message.finish_reason == inference_pb2.FINISH_REASON_UNSPECIFIED:
            return events
        self._has_ended = True
        response = await self._finished(message)
        return events + self._event(f"response.{response['status']}", response=response)

    @override
    def keep_alive(self, *, has_ids: bool) -> bytes:
        """Returns the events that begin the response, or repeats that it is in progress.

        Codex CLI gives up a stream without events, and drops comments. A stream whose events have
        ids has comments: after a resumption, its numbers follow from the tokens alone.
        """
        if has_ids or self._has_ended:
            return super().keep_alive(has_ids=has_ids)
        if not self._has_started:
            self._has_started = True
            return b"".join(self._start(inference_pb2.GenerateResponse()))
        return self._event("response.in_progress", response=self._head | {"output": self._output})

    @override
    def end(self, usages: Sequence[inference_pb2.Usage]) -> bytes:
        return b""  # the response was the last event

    @override
    def error_event(self, error: TandemError, name: Callable[[str], str]) -> bytes:
        text, param = error_text(error, name)
        if isinstance(error, PromptTooLong):  # libraries look for these words in a stream
            text = f"The input exceeds the context window. {text}"
        code = error_code(error)
        message = inference_pb2.GenerateResponse()
        events = [] if self._has_started else list(self._start(message))
        # OpenAI documents the flat fields, but its packages raise only for the nested ones.
        nested = plain_error(error.http_status, text, param, code)
        events.append(self._event("error", code=code, message=text, param=param, **nested))
        response = self._head | {
            "status": "failed",
            "error": {"code": code, "message": text},
            "output": self._output,
            "store": False,
        }
        events.append(self._event("response.failed", response=response))
        return b"".join(events)

    @override
    async def render_full(self, answers: Answers) -> bytes:
        ((message,),) = answers
        list(self._events(message))  # collects the items
        return json.dumps(await self._finished(message)).encode()

    @override
    def _start(self, message: inference_pb2.GenerateResponse) -> Iterator[bytes]:
        yield self._event("response.created", response=self._head)
        yield self._event("response.in_progress", response=self._head)

    @override
    def _open_item(self, kind: TextKind) -> Iterator[bytes]:
        item: dict[str, Any]
        if kind == "reasoning":
            item = {"type": "reasoning", "summary": [], "content": []}
            part: dict[str, Any] = {"type": "reasoning_text", "text": ""}
        else:
            item = {"type": "message", "role": "assistant", "content": []}
            part = {"type": "output_text", "annotations": [], "logprobs": [], "text": ""}
        yield self._add_item(_ID_PREFIXES[kind], item)
        item["content"].append(part)
        yield self._item_event("response.content_part.added", content_index=0, part=part)

    @override
    def _delta(self, kind: TextKind, text: str) -> bytes:
        self._output[-1]["content"][0]["text"] += text
        name = f"response.{_PART_TYPES[kind]}.delta"
        return self._item_event(name, content_index=0, delta=text, **_LOGPROBS[kind])

    @override
    def _close_item(self, kind: TextKind, *, is_cut: bool) -> Iterator[bytes]:
        part = self._output[-1]["content"][0]
        name = f"response.{_PART_TYPES[kind]}.done"
        yield self._item_event(name, content_index=0, text=part["text"], **_LOGPROBS[kind])
        yield self._item_event("response.content_part.done", content_index=0, part=part)
        if kind == "reasoning" and self._encodes_reasoning:
            self._output[-1]["encrypted_content"] = encode_reasoning(part["text"])
        yield self._end_item("incomplete" if is_cut else "completed")

    @override
    def _add_call(self, call: inference_pb2.ToolCall) -> Iterator[bytes]:
        tool = self._tools.called(call.name)
        is_custom = tool is not None and tool.is_custom
        form = _CUSTOM_CALL if is_custom else _FUNCTION_CALL
        text = custom_input(call.arguments) if is_custom else call.arguments
        name = call.name if tool is None else tool.tool.name
        item = {"type": form.item_type, "call_id": call.id, "name": name, form.field: ""}
        if tool is not None and tool.namespace:
            item["namespace"] = tool.namespace
        yield self._add_item(form.id_prefix, item)
        yield self._item_event(f"{form.event}.delta", delta=text)
        named = {} if is_custom else {"name": name}
        yield self._item_event(f"{form.event}.done", **named, **{form.field: text})
        self._output[-1][form.field] = text
        yield self._end_item("completed")

    @override
    def _finish(self, message: inference_pb2.GenerateResponse) -> Iterator[bytes]:
        yield from ()  # `chunk` writes the last event, once the response is stored

    def _add_item(self, prefix: str, item: dict[str, Any]) -> bytes:
        item_id = f"{prefix}_{self._request_id}_{len(self._output)}"
        self._output.append({"id": item_id, "status": "in_progress"} | item)
        return self._output_event("response.output_item.added")

    def _end_item(self, status: str) -> bytes:
        self._output[-1]["status"] = status
        return self._output_event("response.output_item.done")

    def _output_event(self, name: str) -> bytes:
        index = len(self._output) - 1
        return self._event(name, output_index=index, item=self._output[-1])

    def _item_event(self, name: str, /, **fields: Any) -> bytes:
        index = len(self._output) - 1
        return self._event(name, item_id=self._output[-1]["id"], output_index=index, **fields)

    def _event(self, name: str, /, **fields: Any) -> bytes:
        numbered = {"type": name, "sequence_number": self._sequence_number} | fields
        self._sequence_number += 1
        return f"event: {name}\ndata: {json.dumps(numbered)}\n\n".encode()

    async def _finished(self, message: inference_pb2.GenerateResponse) -> dict[str, Any]:
        """Returns the finished response, stored if it is to be; `message` is the last one."""
        response = self._response(message)
        return response if self._keep is None else await self._keep(response)

    def _response(self, message: inference_pb2.GenerateResponse) -> dict[str, Any]:
        """Returns the finished response; `message` is the last one."""
        is_cut = message.finish_reason in CUT
        return self._head | {
            "status": "incomplete" if is_cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "output": self._output,
            "usage": _usage(message.usage),
            "stop_reason": stop_reason(message),
        }


def _head(request: ResponsesRequest, model: str) -> dict[str, Any]:
    """Returns the response before the first token."""
    body = request.body
    dumped = body.model_dump(
        by_alias=True, exclude_none=True, include={"tool_choice", "text", "metadata"}
    )
    tools = [
        tool.model_dump(by_alias=True, exclude_none=True)
        for tool in body.tools or ()
        if not isinstance(tool, HostedTool)
    ]
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
        "previous_response_id": body.previous_response_id,
        "reasoning": {"effort": effort, "summary": None},
        "text": {"format": {"type": "text"}} | dumped.get("text", {}),
        "tool_choice": dumped.get("tool_choice", "auto"),
        "tools": tools,
        "truncation": request.common.truncation or "disabled",
        "usage": None,
        "user": body.user,
        "metadata": dumped.get("metadata", {}),
    } | parameters


def _usage(usage: inference_pb2.Usage) -> dict[str, Any]:
    dropped = {"dropped_messages": usage.dropped_messages} if usage.dropped_messages else {}
    return dropped | {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {
            "cached_tokens": usage.cached_tokens,
            "cache_write_tokens": usage.cache_write_tokens,
        },
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
