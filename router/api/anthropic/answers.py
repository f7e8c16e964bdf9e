"""Writes Anthropic's answers: messages, the events of a stream, errors."""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, Final

from ....proto import inference_pb2
from ....proto.errors import TandemError
from ..openai.answers import TokenIds, error_response, error_text
from ..openai.requests import ParsedRequest
from ..openai.streaming import AnswerForm

_STOP_REASONS: Final = {
    inference_pb2.FINISH_REASON_STOP: "end_turn",
    inference_pb2.FINISH_REASON_LENGTH: "max_tokens",
    inference_pb2.FINISH_REASON_TOOL_CALLS: "tool_use",
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
_UNFINISHED: Final = inference_pb2.FINISH_REASON_UNSPECIFIED


class MessageWriter:
    """Writes the answer to one request: the events as its messages come, or the whole when all have
    come.
    """

    def __init__(self, request: ParsedRequest, model: str, prompts: TokenIds) -> None:
        self._head = {
            "id": f"msg_{request.request_id}",
            "type": "message",
            "role": "assistant",
            "model": model,
        }
        self._prompt_tokens = sum(map(len, prompts))
        self._has_started = False
        self._index = 0  # of the next content block, or of the open one
        self._open = ""  # type of the content block that goes on

    async def chunk(self, _prompt: int, message: inference_pb2.GenerateResponse) -> bytes:
        """See AnswerWriter."""
        return b"".join(self._events(message))

    def restore(self, delivered: Iterable[inference_pb2.GenerateResponse]) -> None:
        """See AnswerWriter."""
        for message in delivered:
            list(self._events(message))

    def end(self, _usages: Sequence[inference_pb2.Usage]) -> bytes:
        """See AnswerWriter."""
        return _event("message_stop")

    def error_event(self, error: TandemError, name: Callable[[str], str]) -> bytes:
        """See AnswerWriter."""
        return _event(**anthropic_error(error, name))

    async def whole(self, answers: Sequence[Sequence[inference_pb2.GenerateResponse]]) -> bytes:
        """See AnswerWriter."""
        ((message,),) = answers
        thought = {"type": "thinking", "thinking": message.reasoning, "signature": ""}
        content: list[dict[str, Any]] = [thought] if message.reasoning else []
        content += [{"type": "text", "text": message.text}] if message.text else []
        content += [_tool_use(call, json.loads(call.arguments)) for call in message.tool_calls]
        usage = {"usage": _usage(message.usage)}
        return json.dumps(self._head | {"content": content} | _stop(message) | usage).encode()

    def _events(self, message: inference_pb2.GenerateResponse) -> Iterator[bytes]:
        if not self._has_started:
            self._has_started = True
            usage = _counts(self._prompt_tokens, message.cached_tokens, 0)
            begun: dict[str, Any] = {
                "content": [],
                "stop_reason": None,
                "stop_sequence": None,
                "usage": usage,
            }
            yield _event("message_start", message=self._head | begun)
            yield _event("ping")
        if message.reasoning:
            begin = {"type": "thinking", "thinking": "", "signature": ""}
            yield from self._delta("thinking", begin, thinking=message.reasoning)
        if message.text:
            yield from self._delta("text", {"type": "text", "text": ""}, text=message.text)
        for call in message.tool_calls:
            yield from self._close()
            yield from self._delta("input_json", _tool_use(call, {}), partial_json=call.arguments)
            yield from self._close()
        if message.finish_reason != _UNFINISHED:
            yield from self._close()
            yield _event("message_delta", delta=_stop(message), usage=_usage(message.usage))

    def _delta(self, kind: str, begin: dict[str, Any], **delta: str) -> Iterator[bytes]:
        """Adds to the content block that is open, or to a new one if that is of another kind."""
        if self._open != kind:
            yield from self._close()
            self._open = kind
            yield _event("content_block_start", index=self._index, content_block=begin)
        yield _event(
            "content_block_delta", index=self._index, delta={"type": f"{kind}_delta"} | delta
        )

    def _close(self) -> Iterator[bytes]:
        if self._open:
            yield _event("content_block_stop", index=self._index)
            self._index += 1
            self._open = ""


def anthropic_error(error: TandemError, name: Callable[[str], str]) -> dict[str, Any]:
    """Returns Anthropic's form of an error; `name` as in `error_response`."""
    return anthropic_plain_error(error.http_status, error_text(error, name)[0])


def anthropic_plain_error(status: int, message: str) -> dict[str, Any]:
    """Returns Anthropic's form of an error of any status."""
    return {
        "type": "error",
        "error": {"type": _ERROR_TYPES.get(status, "api_error"), "message": message},
    }


def _event(type: str, **fields: Any) -> bytes:
    return f"event: {type}\ndata: {json.dumps({'type': type} | fields)}\n\n".encode()


def _tool_use(call: inference_pb2.ToolCall, given: dict[str, Any]) -> dict[str, Any]:
    return {"type": "tool_use", "id": call.id, "name": call.name, "input": given}


def _stop(message: inference_pb2.GenerateResponse) -> dict[str, Any]:
    reason = _STOP_REASONS[message.finish_reason]
    if reason == "end_turn" and message.stop_string:
        reason = "stop_sequence"
    return {"stop_reason": reason, "stop_sequence": message.stop_string or None}


def _usage(usage: inference_pb2.Usage) -> dict[str, int]:
    return _counts(usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens)


def _counts(prompt: int, cached: int, completion: int) -> dict[str, int]:
    """Returns Anthropic's form of the counts: the prompt's cached tokens are not among its input
    tokens.
    """
    return {
        "input_tokens": prompt - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": completion,
    }


ANTHROPIC_FORM: Final = AnswerForm(MessageWriter, partial(error_response, body=anthropic_error))
