"""OpenAI's answers as bytes: completions, chunks of a stream, errors."""

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from starlette.responses import JSONResponse

from ..proto import inference_pb2
from ..proto.errors import InvalidArgument, Overloaded, TandemError, Unavailable
from .http_logprobs import TextLogprobs, chat_logprobs, prompt_logprobs
from .http_parse import http_field
from .http_schema import Job

DONE = b"data: [DONE]\n\n"

_REASONS = {
    inference_pb2.FINISH_REASON_UNSPECIFIED: None,
    inference_pb2.FINISH_REASON_STOP: "stop",
    inference_pb2.FINISH_REASON_LENGTH: "length",
    inference_pb2.FINISH_REASON_TOOL_CALLS: "tool_calls",
}


class Replies:
    """Writes the answers to one job; `chunk` as its messages come, or `whole` when all have come."""

    def __init__(self, job: Job, request_id: str, model: str, prompt_tokens: int) -> None:
        """`prompt_tokens`: of all prompts of the job together."""
        self._job = job
        self._head: dict[str, Any] = {
            "id": f"{'chatcmpl' if job.chat else 'cmpl'}-{request_id}",
            "object": "chat.completion" if job.chat else "text_completion",
            "created": int(time.time()),
            "model": model,
        }
        # Everything up to the choice is the same in each chunk of the stream.
        head = self._head | ({"object": "chat.completion.chunk"} if job.chat else {})
        self._chunk_start = f"data: {json.dumps(head)[:-1]}, "
        self._prompt_tokens = prompt_tokens
        self._completion_tokens = 0
        self._choices: dict[int, _Choice] = {}
        self._prompt_logprobs: dict[int, Sequence[inference_pb2.TokenLogprobs]] = {}  # by prompt

    def chunk(self, prompt: int, message: inference_pb2.GenerateResponse) -> bytes:
        """The event, or for the first message of a choice of a chat two, of one message for prompt number `prompt`."""
        index, state, tokens = self._take(prompt, message)
        self._completion_tokens += len(message.token_ids)
        more = self._prompt_report(prompt) if message.prompt_logprobs and self._job.prompt_logprobs else {}
        choice: dict[str, Any] = {"index": index, "logprobs": None, "finish_reason": _REASONS[message.finish_reason]}
        if not self._job.chat:
            logprobs = state.logprobs.take(tokens) if tokens else None
            return self._event(choice | {"text": message.text, "logprobs": logprobs} | more, {})
        opening = b""
        if not state.opened:
            opening = self._event(choice | {"delta": {"role": "assistant", "content": ""}, "finish_reason": None}, {})
            state.opened = True
        calls = state.new_calls(message.tool_calls)
        delta: dict[str, Any] = {"tool_calls": calls} if calls else {}
        if message.text or not calls:
            delta["content"] = message.text
        choice |= {"delta": delta, "logprobs": chat_logprobs(tokens) if tokens else None}
        return opening + self._event(choice, more)

    def usage_chunk(self, usages: Sequence[inference_pb2.Usage]) -> bytes:
        """The event that follows the last choice if the caller wants the usage."""
        return f'{self._chunk_start}"choices": [], "usage": {json.dumps(_usage(usages))}}}\n\n'.encode()

    def whole(self, answers: Sequence[Sequence[inference_pb2.GenerateResponse]]) -> dict[str, Any]:
        """The body that is not streamed. `answers`: all messages of each prompt."""
        found: dict[int, list[inference_pb2.GenerateResponse]] = {}
        tokens: dict[int, list[inference_pb2.TokenLogprobs]] = {}
        for prompt, messages in enumerate(answers):
            for message in messages:
                index, _, entries = self._take(prompt, message)
                found.setdefault(index, []).append(message)
                tokens.setdefault(index, []).extend(entries)
        body = self._head | {
            "choices": [self._choice(index, found[index], tokens[index]) for index in sorted(found)],
            "usage": _usage([messages[-1].usage for messages in answers]),
        }
        return body | (self._prompt_report(0) if self._job.chat and self._job.prompt_logprobs else {})

    def _take(
        self, prompt: int, message: inference_pb2.GenerateResponse
    ) -> tuple[int, "_Choice", list[inference_pb2.TokenLogprobs]]:
        """The index of the message's choice, its state, and what there is to report of tokens."""
        index = prompt * self._job.num_choices + message.choice
        if message.prompt_logprobs:
            self._prompt_logprobs[prompt] = message.prompt_logprobs
        tokens = list(message.logprobs)
        if index not in self._choices:
            self._choices[index] = _Choice(one_call=not self._job.parallel_tool_calls)
            if self._job.requests[0].echo and self._job.requests[0].HasField("logprobs"):
                tokens = [*self._prompt_logprobs.get(prompt, ()), *tokens]
        return index, self._choices[index], tokens

    def _choice(
        self,
        index: int,
        messages: Sequence[inference_pb2.GenerateResponse],
        tokens: Sequence[inference_pb2.TokenLogprobs],
    ) -> dict[str, Any]:
        text, reason = "".join(message.text for message in messages), _REASONS[messages[-1].finish_reason]
        state = self._choices[index]
        if not self._job.chat:
            logprobs = state.logprobs.take(tokens) if tokens else None
            choice = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}
            more = self._prompt_report(index // self._job.num_choices) if self._job.prompt_logprobs else {}
            return choice | more
        said: dict[str, Any] = {"role": "assistant", "content": text}
        calls = state.new_calls([call for message in messages for call in message.tool_calls])
        if calls:
            said |= {"content": text or None, "tool_calls": [_without_index(call) for call in calls]}
        logprobs = chat_logprobs(tokens) if tokens else None
        return {"index": index, "message": said, "logprobs": logprobs, "finish_reason": reason}

    def _prompt_report(self, prompt: int) -> dict[str, Any]:
        return {"prompt_logprobs": prompt_logprobs(self._prompt_logprobs.get(prompt, ()))}

    def _event(self, choice: Mapping[str, Any], more: Mapping[str, Any]) -> bytes:
        tail = f", {json.dumps(more)[1:-1]}" if more else ""
        if self._job.continuous_usage:
            tail += f', "usage": {json.dumps(_counts(self._prompt_tokens, self._completion_tokens))}'
        return f'{self._chunk_start}"choices": [{json.dumps(choice)}]{tail}}}\n\n'.encode()


class _Choice:
    """How far the answer of one choice is."""

    def __init__(self, *, one_call: bool) -> None:
        self.opened = False  # the role was sent
        self.logprobs = TextLogprobs()
        self._one_call = one_call
        self._num_calls = 0

    def new_calls(self, calls: Sequence[inference_pb2.ToolCall]) -> list[dict[str, Any]]:
        """The calls that follow those before, as they are streamed."""
        if self._one_call:
            calls = calls[: 1 - self._num_calls]
        start, self._num_calls = self._num_calls, self._num_calls + len(calls)
        return [
            {
                "index": i,
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for i, call in enumerate(calls, start)
        ]


def error_event(error: TandemError, name: Callable[[str], str] = http_field) -> bytes:
    """The last event of a stream that broke; no [DONE] follows it."""
    return f"data: {json.dumps(error_body(error, name))}\n\n".encode()


def error_response(error: TandemError, name: Callable[[str], str] = http_field) -> JSONResponse:
    """The answer to a request that failed before its first token. `name`: what the body calls a field."""
    headers = {}
    if isinstance(error, Overloaded | Unavailable):
        headers["Retry-After"] = str(max(1, math.ceil(error.retry_after)))
    if error.http_status == 413:
        headers["Connection"] = "close"  # the rest of the body was not read
    return JSONResponse(error_body(error, name), error.http_status, headers)


def error_body(error: TandemError, name: Callable[[str], str] = http_field) -> dict[str, Any]:
    """The JSON form of an error; a field has the name that it has in the body."""
    message, param = error.message, None
    if isinstance(error, InvalidArgument) and error.field:
        param = name(error.field)
        message = f"{param}: {message.removeprefix(f'{error.field}: ')}"
    return plain_error(error.http_status, message, param, error.code.lower())


def plain_error(status: int, message: str, param: str | None, code: str) -> dict[str, Any]:
    kind = "server_error" if status >= 500 else "rate_limit_error" if status == 429 else "invalid_request_error"
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def _without_index(call: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in call.items() if name != "index"}


def _usage(usages: Sequence[inference_pb2.Usage]) -> dict[str, Any]:
    counts = _counts(sum(usage.prompt_tokens for usage in usages), sum(usage.completion_tokens for usage in usages))
    return counts | {"prompt_tokens_details": {"cached_tokens": sum(usage.cached_tokens for usage in usages)}}


def _counts(prompt: int, completion: int) -> dict[str, int]:
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
