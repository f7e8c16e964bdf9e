"""OpenAI's answers as bytes: completions, chunks of a stream, errors."""

import asyncio
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from starlette.responses import JSONResponse

from ....proto import inference_pb2
from ....proto.errors import InvalidArgument, Overloaded, TandemError, Unavailable
from .logprobs import TextLogprobs, chat_logprobs, prompt_logprobs
from .parsing import http_field
from .requests import ParsedBody

DONE = b"data: [DONE]\n\n"

_THREAD_FROM_SCORES: Final = 64
"""Tokens whose log probabilities are reported: so many take about a millisecond, more leave the event loop."""

MAX_PROMPT_SCORES: Final = 2**19
"""Log probabilities of prompts in one answer, alternatives and choices counted: about 40 MB of JSON."""

_REASONS = {
    inference_pb2.FINISH_REASON_UNSPECIFIED: None,
    inference_pb2.FINISH_REASON_STOP: "stop",
    inference_pb2.FINISH_REASON_LENGTH: "length",
    inference_pb2.FINISH_REASON_TOOL_CALLS: "tool_calls",
}


class ResponseWriter:
    """Writes the answers to one job; `chunk` as its messages come, or `whole` when all have come."""

    def __init__(self, job: ParsedBody, request_id: str, model: str, prompt_tokens: int) -> None:
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
        self._choices: dict[int, _ChoiceWriter] = {}
        self._echoes = job.common.echo and job.common.HasField("logprobs")
        # By prompt, and shared by its choices:
        self._prompt_logprobs: dict[int, Sequence[inference_pb2.TokenLogprobs]] = {}
        self._echoes_of: dict[int, TextLogprobs] = {}
        self._reports: dict[int, str] = {}

    async def chunk(self, prompt: int, message: inference_pb2.GenerateResponse) -> bytes:
        """The event, or for the first message of a choice of a chat two, of one message for prompt number `prompt`."""
        num_scores = len(message.prompt_logprobs) + len(message.logprobs)
        if self._index(prompt, message) not in self._choices:
            num_scores += len(self._prompt_logprobs.get(prompt, ()))
        if num_scores < _THREAD_FROM_SCORES:
            return self._chunk(prompt, message)
        return await asyncio.to_thread(self._chunk, prompt, message)

    def usage_chunk(self, usages: Sequence[inference_pb2.Usage]) -> bytes:
        """The event that follows the last choice if the caller wants the usage."""
        return f'{self._chunk_start}"choices": [], "usage": {json.dumps(_usage(usages))}}}\n\n'.encode()

    async def whole(self, answers: Sequence[Sequence[inference_pb2.GenerateResponse]]) -> bytes:
        """The body that is not streamed. `answers`: all messages of each prompt."""
        messages = [message for each in answers for message in each]
        if sum(len(each.prompt_logprobs) + len(each.logprobs) for each in messages) < _THREAD_FROM_SCORES:
            return self._whole(answers)
        return await asyncio.to_thread(self._whole, answers)

    def _chunk(self, prompt: int, message: inference_pb2.GenerateResponse) -> bytes:
        index, state = self._take(prompt, message)
        self._completion_tokens += len(message.token_ids)
        report = self._prompt_report(prompt) if message.prompt_logprobs and self._job.prompt_logprobs else ""
        choice: dict[str, Any] = {"index": index, "finish_reason": _REASONS[message.finish_reason]}
        if not self._job.chat:
            return self._event(choice | {"text": message.text}, state.logprobs.render(), report, "")
        opening = b""
        if not state.opened:
            opening = self._event(choice | {"delta": {"role": "assistant", "content": ""}, "finish_reason": None})
            state.opened = True
        calls = state.new_calls(message.tool_calls)
        delta: dict[str, Any] = {"tool_calls": calls} if calls else {}
        if message.text or not calls:
            delta["content"] = message.text
        return opening + self._event(choice | {"delta": delta}, chat_logprobs(message.logprobs), "", report)

    def _whole(self, answers: Sequence[Sequence[inference_pb2.GenerateResponse]]) -> bytes:
        found: dict[int, list[inference_pb2.GenerateResponse]] = {}
        for prompt, messages in enumerate(answers):
            for message in messages:
                index, _ = self._take(prompt, message)
                found.setdefault(index, []).append(message)
        choices = ", ".join(self._choice(index, found[index]) for index in sorted(found))
        usage = json.dumps(_usage([messages[-1].usage for messages in answers]))
        report = self._prompt_report(0) if self._job.chat else ""
        return f'{json.dumps(self._head)[:-1]}, "choices": [{choices}], "usage": {usage}{report}}}'.encode()

    def _index(self, prompt: int, message: inference_pb2.GenerateResponse) -> int:
        return prompt * self._job.num_choices + message.choice

    def _take(self, prompt: int, message: inference_pb2.GenerateResponse) -> tuple[int, "_ChoiceWriter"]:
        """The index of the message's choice and its state, which has noted what there is to report of tokens."""
        index = self._index(prompt, message)
        if message.prompt_logprobs:
            self._prompt_logprobs[prompt] = message.prompt_logprobs
        if index not in self._choices:
            logprobs = self._echoed(prompt).fork() if self._echoes else TextLogprobs()
            self._choices[index] = _ChoiceWriter(logprobs, one_call=not self._job.parallel_tool_calls)
        state = self._choices[index]
        if message.logprobs and not self._job.chat:
            state.logprobs.take(message.logprobs)
        return index, state

    def _choice(self, index: int, messages: Sequence[inference_pb2.GenerateResponse]) -> str:
        text, reason = "".join(message.text for message in messages), _REASONS[messages[-1].finish_reason]
        state = self._choices[index]
        choice: dict[str, Any] = {"index": index, "finish_reason": reason}
        if not self._job.chat:
            report = self._prompt_report(index // self._job.num_choices)
            return _with_logprobs(choice | {"text": text}, state.logprobs.render(), report)
        said: dict[str, Any] = {"role": "assistant", "content": text}
        calls = state.new_calls([call for message in messages for call in message.tool_calls])
        if calls:
            said |= {"content": text or None, "tool_calls": [_without_index(call) for call in calls]}
        logprobs = chat_logprobs([entry for message in messages for entry in message.logprobs])
        return _with_logprobs(choice | {"message": said}, logprobs)

    def _echoed(self, prompt: int) -> TextLogprobs:
        """The prompt's log probabilities in the form of the choices that repeat it; made once."""
        if prompt not in self._echoes_of:
            self._echoes_of[prompt] = TextLogprobs()
            self._echoes_of[prompt].take(self._prompt_logprobs.get(prompt, ()))
        return self._echoes_of[prompt]

    def _prompt_report(self, prompt: int) -> str:
        """The prompt's log probabilities as a member of a JSON object, if they were asked for; made once."""
        if not self._job.prompt_logprobs:
            return ""
        if prompt not in self._reports:
            self._reports[prompt] = f', "prompt_logprobs": {prompt_logprobs(self._prompt_logprobs.get(prompt, ()))}'
        return self._reports[prompt]

    def _event(
        self, choice: Mapping[str, Any], logprobs: str = "null", in_choice: str = "", beside_choice: str = ""
    ) -> bytes:
        usage = ""
        if self._job.continuous_usage:
            usage = f', "usage": {json.dumps(_counts(self._prompt_tokens, self._completion_tokens))}'
        shown = _with_logprobs(choice, logprobs, in_choice)
        return f'{self._chunk_start}"choices": [{shown}]{beside_choice}{usage}}}\n\n'.encode()


class _ChoiceWriter:
    """How far the answer of one choice is."""

    def __init__(self, logprobs: TextLogprobs, *, one_call: bool) -> None:
        self.opened = False  # the role was sent
        self.logprobs = logprobs
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


def check_prompt_scores(job: ParsedBody, prompt_tokens: int) -> None:
    """Raises InvalidArgument if the answer would tell too much of so many tokens of prompts."""
    if not job.common.HasField("prompt_logprobs"):
        return
    copies = 1 if job.chat else job.num_choices
    count = prompt_tokens * (1 + job.common.prompt_logprobs) * copies
    if count > MAX_PROMPT_SCORES:
        raise InvalidArgument(
            f"asks for {count} log probabilities ({prompt_tokens} prompt tokens and their alternatives, in {copies} "
            f"choices); at most {MAX_PROMPT_SCORES} are told in one answer",
            "prompt_logprobs" if job.prompt_logprobs else "logprobs",
        )


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


def _with_logprobs(choice: Mapping[str, Any], logprobs: str, more: str = "") -> str:
    """The choice as JSON, with members that are JSON already."""
    return f'{json.dumps(choice)[:-1]}, "logprobs": {logprobs}{more}}}'


def _without_index(call: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in call.items() if name != "index"}


def _usage(usages: Sequence[inference_pb2.Usage]) -> dict[str, Any]:
    counts = _counts(sum(usage.prompt_tokens for usage in usages), sum(usage.completion_tokens for usage in usages))
    return counts | {"prompt_tokens_details": {"cached_tokens": sum(usage.cached_tokens for usage in usages)}}


def _counts(prompt: int, completion: int) -> dict[str, int]:
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
