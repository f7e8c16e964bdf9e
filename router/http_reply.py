"""OpenAI's answers as bytes: completions, chunks of a stream, errors."""

import json
import math
import time
from collections.abc import Sequence
from typing import Any

from starlette.responses import JSONResponse

from ..proto import inference_pb2
from ..proto.errors import InvalidArgument, Overloaded, TandemError, Unavailable
from .http_schema import http_field

DONE = b"data: [DONE]\n\n"

_REASONS = {
    inference_pb2.FINISH_REASON_UNSPECIFIED: None,
    inference_pb2.FINISH_REASON_STOP: "stop",
    inference_pb2.FINISH_REASON_LENGTH: "length",
}


class Replies:
    """Writes the answers to one request."""

    def __init__(self, *, chat: bool, request_id: str, model: str) -> None:
        self._chat = chat
        self._head: dict[str, Any] = {
            "id": f"{'chatcmpl' if chat else 'cmpl'}-{request_id}",
            "object": "chat.completion" if chat else "text_completion",
            "created": int(time.time()),
            "model": model,
        }
        # Everything up to the choice is the same in each chunk of the stream.
        head = self._head | ({"object": "chat.completion.chunk"} if chat else {})
        self._chunk_start = f"data: {json.dumps(head)[:-1]}, "

    def chunk(self, index: int, message: inference_pb2.GenerateResponse) -> bytes:
        """The event, or for the first message of a chat two, of one message of choice `index`."""
        reason = _REASONS[message.finish_reason]
        if not self._chat:
            return self._event({"index": index, "text": message.text, "logprobs": None, "finish_reason": reason})
        opening = b""
        if message.first_index == 0:
            opening = self._delta(index, {"role": "assistant", "content": ""}, None)
        return opening + self._delta(index, {"content": message.text}, reason)

    def usage_chunk(self, usages: Sequence[inference_pb2.Usage]) -> bytes:
        """The event that follows the last choice if the caller wants the usage."""
        return f'{self._chunk_start}"choices": [], "usage": {json.dumps(_usage(usages))}}}\n\n'.encode()

    def whole(self, choices: Sequence[tuple[str, inference_pb2.GenerateResponse]]) -> dict[str, Any]:
        """The body that is not streamed. `choices`: the text and the last message of each."""
        return self._head | {
            "choices": [self._choice(i, text, last) for i, (text, last) in enumerate(choices)],
            "usage": _usage([last.usage for _, last in choices]),
        }

    def _choice(self, index: int, text: str, last: inference_pb2.GenerateResponse) -> dict[str, Any]:
        said: dict[str, Any] = {"message": {"role": "assistant", "content": text}} if self._chat else {"text": text}
        return {"index": index, **said, "logprobs": None, "finish_reason": _REASONS[last.finish_reason]}

    def _delta(self, index: int, delta: dict[str, str], reason: str | None) -> bytes:
        return self._event({"index": index, "delta": delta, "logprobs": None, "finish_reason": reason})

    def _event(self, choice: dict[str, Any]) -> bytes:
        return f'{self._chunk_start}"choices": [{json.dumps(choice)}]}}\n\n'.encode()


def error_event(error: TandemError) -> bytes:
    """The last event of a stream that broke; no [DONE] follows it."""
    return f"data: {json.dumps(error_body(error))}\n\n".encode()


def error_response(error: TandemError) -> JSONResponse:
    """The answer to a request that failed before its first token."""
    headers = {}
    if isinstance(error, Overloaded | Unavailable):
        headers["Retry-After"] = str(max(1, math.ceil(error.retry_after)))
    if error.http_status == 413:
        headers["Connection"] = "close"  # the rest of the body was not read
    return JSONResponse(error_body(error), error.http_status, headers)


def error_body(error: TandemError) -> dict[str, Any]:
    """The JSON form of an error; a field has the name that it has in the body."""
    message, param = error.message, None
    if isinstance(error, InvalidArgument) and error.field:
        param = http_field(error.field)
        message = f"{param}: {message.removeprefix(f'{error.field}: ')}"
    return plain_error(error.http_status, message, param, error.code.lower())


def plain_error(status: int, message: str, param: str | None, code: str) -> dict[str, Any]:
    kind = "server_error" if status >= 500 else "rate_limit_error" if status == 429 else "invalid_request_error"
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def _usage(usages: Sequence[inference_pb2.Usage]) -> dict[str, Any]:
    prompt = sum(usage.prompt_tokens for usage in usages)
    completion = sum(usage.completion_tokens for usage in usages)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(usage.cached_tokens for usage in usages)},
    }
