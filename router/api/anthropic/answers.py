"""Writes Anthropic's answers: messages, the events of a stream, errors."""

import json
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Final

from typing_extensions import override

from ....proto import inference_pb2
from ....proto.errors import ContextExceeded, PromptTooLong, TandemError
from ..openai.answers import RULES, error_response, error_text
from ..openai.requests import AnyRequest
from ..openai.writers import Answers, ItemWriter, TextKind, TokenIds, streaming_form

_STOP_REASONS: Final = {
    inference_pb2.FINISH_REASON_STOP: "end_turn",
    inference_pb2.FINISH_REASON_LENGTH: "max_tokens",
    inference_pb2.FINISH_REASON_TOOL_CALLS: "tool_use",
    # Anthropic's clients know no other values.
    inference_pb2.FINISH_REASON_TIME: "max_tokens",
    inference_pb2.FINISH_REASON_REPETITION: "stop_sequence",
}
_ERROR_TYPES: Final = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    415: "invalid_request_error",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


_SIGNATURE: Final = "tandem"
"""The signature of all thinking blocks.

Anthropic's service checks signatures, this one ignores them. Some clients send no thinking back
that has none.
"""

_PING: Final = b'event: ping\ndata: {"type": "ping"}\n\n'


class MessageWriter(ItemWriter):
    """Writes the answer to one request: as events, or in full."""

    def __init__(self, request: AnyRequest, model: str, prompts: TokenIds) -> None:
        super().__init__()
        self._head = {
            "id": f"msg_{request.request_id}",
            "type": "message",
            "role": "assistant",
            "model": model,
        }
        self._prompt_tokens = sum(map(len, prompts))
        self._index = 0  # of the open content block, or of the next one

    @override
    def keep_alive(self, *, has_ids: bool) -> bytes:
        return _PING

    @override
    def end(self, usages: Sequence[inference_pb2.Usage]) -> bytes:
        return _event("message_stop")

    @override
    def error_event(self, error: TandemError, name: Callable[[str], str]) -> bytes:
        return _event(**anthropic_error(error, name))

    @override
    async def render_full(self, answers: Answers) -> bytes:
        ((message,),) = answers
        content: list[dict[str, Any]] = []
        if message.reasoning:
            content.append(_thinking(message.reasoning, _SIGNATURE))
        if message.text:
            content.append(_text(message.text))
        content += [_tool_use(call, json.loads(call.arguments)) for call in message.tool_calls]
        rest = {"content": content, **_stop(message), "usage": _usage(message.usage)}
        return json.dumps(self._head | rest).encode()

    @override
    def _start(self, message: inference_pb2.GenerateResponse) -> Iterator[bytes]:
        begun: dict[str, Any] = {
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": _counts(
                self._prompt_tokens, message.cached_tokens, message.cache_write_tokens, 0
            ),
        }
        yield _event("message_start", message=self._head | begun)
        yield _PING

    @override
    def _open_item(self, kind: TextKind) -> Iterator[bytes]:
        yield self._block_start(_thinking("", "") if kind == "reasoning" else _text(""))

    @override
    def _delta(self, kind: TextKind, text: str) -> bytes:
        if kind == "reasoning":
            return self._block_delta({"type": "thinking_delta", "thinking": text})
        return self._block_delta({"type": "text_delta", "text": text})

    @override
    def _close_item(self, kind: TextKind, *, is_cut: bool) -> Iterator[bytes]:
        if kind == "reasoning":
            yield self._block_delta({"type": "signature_delta", "signature": _SIGNATURE})
        yield self._block_stop()

    @override
    def _add_call(self, call: inference_pb2.ToolCall) -> Iterator[bytes]:
        yield self._block_start(_tool_use(call, {}))
        yield self._block_delta({"type": "input_json_delta", "partial_json": call.arguments})
        yield self._block_stop()

    @override
    def _finish(self, message: inference_pb2.GenerateResponse) -> Iterator[bytes]:
        yield _event("message_delta", delta=_stop(message), usage=_usage(message.usage))

    def _block_start(self, block: dict[str, Any]) -> bytes:
        return _event("content_block_start", index=self._index, content_block=block)

    def _block_delta(self, delta: dict[str, str]) -> bytes:
        return _event("content_block_delta", index=self._index, delta=delta)

    def _block_stop(self) -> bytes:
        event = _event("content_block_stop", index=self._index)
        self._index += 1
        return event


def anthropic_error(error: TandemError, name: Callable[[str], str]) -> dict[str, Any]:
    """Returns Anthropic's error body; `name` as in `error_response`."""
    message, param = error_text(error, name)
    if isinstance(error, ContextExceeded):  # clients look for these words and numbers
        most = error.context - error.num_generated
        message = f"prompt is too long: {error.num_prompt} tokens > {most} maximum; shorten {param}"
    elif isinstance(error, PromptTooLong):
        message = f"prompt is too long: {message}"
    return anthropic_plain_error(error.http_status, message)


def anthropic_plain_error(status: int, message: str) -> dict[str, Any]:
    """Returns Anthropic's error body for an HTTP status and a message."""
    return {
        "type": "error",
        "error": {"type": _ERROR_TYPES.get(status, "api_error"), "message": message},
    }


def _event(type: str, **fields: Any) -> bytes:
    return f"event: {type}\ndata: {json.dumps({'type': type} | fields)}\n\n".encode()


def _text(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def _thinking(text: str, signature: str) -> dict[str, Any]:
    return {"type": "thinking", "thinking": text, "signature": signature}


def _tool_use(call: inference_pb2.ToolCall, given: dict[str, Any]) -> dict[str, Any]:
    return {"type": "tool_use", "id": call.id, "name": call.name, "input": given}


def _stop(message: inference_pb2.GenerateResponse) -> dict[str, Any]:
    reason = _STOP_REASONS[message.finish_reason]
    if reason == "end_turn" and message.stop_string:
        reason = "stop_sequence"
    sequence = message.stop_string or RULES.get(message.finish_reason)
    return {"stop_reason": reason, "stop_sequence": sequence}


def _usage(usage: inference_pb2.Usage) -> dict[str, Any]:
    counts: dict[str, Any] = _counts(
        usage.prompt_tokens,
        usage.cached_tokens,
        usage.cache_write_tokens,
        usage.completion_tokens,
    )
    if usage.reasoning_tokens:
        counts["output_tokens_details"] = {"thinking_tokens": usage.reasoning_tokens}
    if usage.dropped_messages:
        counts["dropped_messages"] = usage.dropped_messages
    return counts


def _counts(prompt: int, cached: int, written: int, completion: int) -> dict[str, int]:
    """Returns Anthropic's usage object, whose three counts of input add up to the prompt."""
    return {
        "input_tokens": prompt - cached - written,
        "cache_creation_input_tokens": written,
        "cache_read_input_tokens": cached,
        "output_tokens": completion,
    }


ANTHROPIC_FORM: Final = streaming_form(MessageWriter, partial(error_response, body=anthropic_error))
