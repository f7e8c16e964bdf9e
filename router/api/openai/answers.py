"""Writes OpenAI's responses as bytes: completions, chunks of a stream, errors."""

import json
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

from starlette.responses import JSONResponse

from ....proto import inference_pb2, limits
from ....proto.errors import InvalidArgument, TandemError
from ...frontend.fair_threads import WRITING
from .logprobs import TextLogprobs, chat_logprobs, prompt_logprobs
from .parsing import http_field
from .requests import OpenAIRequest, ParsedRequest

TokenIds = Sequence[Sequence[int]]
"""Of each prompt of a request."""

_DONE: Final = b"data: [DONE]\n\n"

MAX_PROMPT_LOGPROBS: Final = 2**19
"""Of all prompts, with alternatives and for each choice, in one response: about 40 MB of JSON."""

_LOGPROB_IDS: Final = 16
"""So many token ids are written in the time of a log probability."""

_REASONS = {
    number: name.removeprefix("FINISH_REASON_").lower() if number else None
    for name, number in inference_pb2.FinishReason.items()
}


class ResponseWriter:
    """Writes the response to one request: `chunk` as its messages come, or `whole` when all have
    come.
    """

    def __init__(self, request: OpenAIRequest, model: str, prompts: TokenIds) -> None:
        self._request = request
        options = request.body.stream_options
        self._includes_usage = options is not None and options.include_usage
        self._continuous_usage = options is not None and options.continuous_usage_stats
        self._stop_ids = frozenset(request.common.stopping.stop_token_ids)
        self._head: dict[str, Any] = {
            "id": f"{'chatcmpl' if request.is_chat else 'cmpl'}-{request.request_id}",
            "object": "chat.completion" if request.is_chat else "text_completion",
            "created": int(time.time()),
            "model": model,
        }
        # Everything up to the choice is the same in each chunk of the stream.
        head = self._head | ({"object": "chat.completion.chunk"} if request.is_chat else {})
        self._chunk_start = f"data: {json.dumps(head)[:-1]}, "
        self._prompts = prompts
        self._prompt_tokens = sum(map(len, prompts))
        self._completion_tokens = 0
        self._started: set[int] = set()  # choices of a streamed chat whose role was sent
        self._num_tool_calls: Counter[int] = Counter()  # by choice
        self._text_logprobs: dict[int, TextLogprobs] = {}  # by choice
        # By prompt, and shared by its choices:
        self._prompt_logprobs: dict[int, Sequence[inference_pb2.TokenLogprobs]] = {}
        self._echoed_logprobs: dict[int, TextLogprobs] = {}
        self._prompt_reports: dict[int, str] = {}
        self._prompt_ids: dict[int, str] = {}

    async def chunk(self, prompt: int, message: inference_pb2.GenerateResponse) -> bytes:
        """Returns the event, or for the first message of a choice of a chat two, of one message for
        prompt number `prompt`.
        """
        num_logprobs = len(message.prompt_logprobs) + len(message.logprobs)
        if self._index(prompt, message) not in self._text_logprobs:
            num_logprobs += len(self._prompt_logprobs.get(prompt, ()))
        if self._request.has_token_ids and prompt not in self._prompt_ids:
            num_logprobs += len(self._prompts[prompt]) // _LOGPROB_IDS
        return await WRITING.run("", num_logprobs, self._chunk, prompt, message)

    def restore(self, delivered: Iterable[inference_pb2.GenerateResponse]) -> None:
        """Takes what the client of a single prompt has already: the chunks that follow count on
        from there.
        """
        for message in delivered:
            self._chunk(0, message)

    def end(self, usages: Sequence[inference_pb2.Usage]) -> bytes:
        """Returns the events after the last choice. `usages`: of each prompt."""
        if not self._includes_usage:
            return _DONE
        return (
            f'{self._chunk_start}"choices": [], "usage": {json.dumps(_usage(usages))}}}\n\n'.encode()
            + _DONE
        )

    def error_event(self, error: TandemError, name: Callable[[str], str]) -> bytes:
        """Returns the last event of a stream that broke; no [DONE] follows it."""
        return f"data: {json.dumps(error_body(error, name))}\n\n".encode()

    async def whole(self, answers: Sequence[Sequence[inference_pb2.GenerateResponse]]) -> bytes:
        """Returns the body that is not streamed. `answers`: by prompt, the joined messages."""
        messages = [message for each in answers for message in each]
        num_logprobs = sum(len(each.prompt_logprobs) + len(each.logprobs) for each in messages)
        if self._request.has_token_ids:
            num_logprobs += (
                self._prompt_tokens + sum(len(each.token_ids) for each in messages)
            ) // _LOGPROB_IDS
        return await WRITING.run("", num_logprobs, self._whole, answers)

    def _chunk(self, prompt: int, message: inference_pb2.GenerateResponse) -> bytes:
        if message.prompt_logprobs:
            self._prompt_logprobs[prompt] = message.prompt_logprobs
        self._completion_tokens += len(message.token_ids)
        report = self._prompt_report(prompt) if message.prompt_logprobs else ""
        if not self._request.is_chat:
            return self._event(self._text_choice(prompt, message, report))
        index, first = self._index(prompt, message), b""
        if index not in self._started:
            self._started.add(index)
            delta = {"role": "assistant", "content": ""}
            shown = _with_logprobs({"index": index, "finish_reason": None, "delta": delta}, "null")
            first = self._event(shown, self._prompt_id_report(prompt))
        return first + self._event(self._chat_choice(index, message, is_delta=True), report)

    def _whole(self, answers: Sequence[Sequence[inference_pb2.GenerateResponse]]) -> bytes:
        choices = []
        for prompt, messages in enumerate(answers):
            self._prompt_logprobs[prompt] = [
                entry for message in messages for entry in message.prompt_logprobs
            ]
            report = self._prompt_report(prompt)
            for message in messages:
                if self._request.is_chat:
                    choices.append(self._chat_choice(message.choice, message, is_delta=False))
                else:
                    choices.append(self._text_choice(prompt, message, report))
        usage = json.dumps(_usage([messages[-1].usage for messages in answers]))
        report = self._prompt_report(0) + self._prompt_id_report(0) if self._request.is_chat else ""
        head = json.dumps(self._head)[:-1]
        return f'{head}, "choices": [{", ".join(choices)}], "usage": {usage}{report}}}'.encode()

    def _index(self, prompt: int, message: inference_pb2.GenerateResponse) -> int:
        return prompt * self._request.num_choices + message.choice

    def _text_choice(
        self, prompt: int, message: inference_pb2.GenerateResponse, report: str
    ) -> str:
        """Returns a choice of a completion as JSON; `report` is that of the prompt."""
        index, ids = self._index(prompt, message), self._id_report(message)
        if index not in self._text_logprobs:
            self._text_logprobs[index] = self._echoed(prompt).fork()
            ids += self._prompt_id_report(prompt)
        self._text_logprobs[index].take(message.logprobs)
        choice = {"index": index} | self._finish(message) | {"text": message.text}
        return _with_logprobs(choice, self._text_logprobs[index].render(), report + ids)

    def _chat_choice(
        self, index: int, message: inference_pb2.GenerateResponse, *, is_delta: bool
    ) -> str:
        """Returns a choice of a chat as JSON, whole or as a delta to the messages before."""
        calls = self._tool_calls(index, message.tool_calls, is_delta=is_delta)
        content: dict[str, Any] = {"tool_calls": calls} if calls else {}
        if message.reasoning:
            content["reasoning_content"] = message.reasoning
        if not is_delta:
            content = {
                "role": "assistant",
                "content": message.text or (None if calls else ""),
            } | content
        elif message.text or not content:
            content["content"] = message.text
        shown = (
            {"index": index} | self._finish(message) | {"delta" if is_delta else "message": content}
        )
        return _with_logprobs(shown, chat_logprobs(message.logprobs), self._id_report(message))

    def _finish(self, message: inference_pb2.GenerateResponse) -> dict[str, Any]:
        """Returns why a choice has ended: OpenAI's reason, and as in vLLM the stop string or the id
        of the stop token that was asked for, null for any other end.
        """
        reason = _REASONS[message.finish_reason]
        if reason is None:
            return {"finish_reason": None}
        stop: str | int | None = message.stop_string or None
        if (
            stop is None
            and reason != "length"
            and message.token_ids
            and message.token_ids[-1] in self._stop_ids
        ):
            stop = message.token_ids[-1]
        return {"finish_reason": reason, "stop_reason": stop}

    def _tool_calls(
        self, index: int, calls: Sequence[inference_pb2.ToolCall], *, is_delta: bool
    ) -> list[dict[str, Any]]:
        start = self._num_tool_calls[index]
        self._num_tool_calls[index] += len(calls)
        return [
            ({"index": i} if is_delta else {})
            | {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for i, call in enumerate(calls, start)
        ]

    def _echoed(self, prompt: int) -> TextLogprobs:
        """Returns the log probabilities with which the choices of a prompt begin; made once for a
        prompt.
        """
        if prompt not in self._echoed_logprobs:
            self._echoed_logprobs[prompt] = TextLogprobs()
            if self._request.common.echo and self._request.common.HasField("logprobs"):
                self._echoed_logprobs[prompt].take(self._prompt_logprobs.get(prompt, ()))
        return self._echoed_logprobs[prompt]

    def _prompt_report(self, prompt: int) -> str:
        """Returns the prompt's log probabilities as a member of a JSON object, if they were asked
        for; made once.
        """
        if not self._request.has_prompt_logprobs:
            return ""
        if prompt not in self._prompt_reports:
            found = prompt_logprobs(self._prompt_logprobs.get(prompt, ()))
            self._prompt_reports[prompt] = f', "prompt_logprobs": {found}'
        return self._prompt_reports[prompt]

    def _prompt_id_report(self, prompt: int) -> str:
        """Returns the prompt's token ids as a member of a JSON object, if they were asked for;
        written once.
        """
        if not self._request.has_token_ids:
            return ""
        if prompt not in self._prompt_ids:
            self._prompt_ids[prompt] = f', "prompt_token_ids": {_id_list(self._prompts[prompt])}'
        return self._prompt_ids[prompt]

    def _id_report(self, message: inference_pb2.GenerateResponse) -> str:
        """Returns the ids of generated tokens, too, with that of the stop token."""
        return (
            f', "token_ids": {_id_list(message.token_ids)}' if self._request.has_token_ids else ""
        )

    def _event(self, choice: str, report: str = "") -> bytes:
        usage = ', "usage": null' if self._includes_usage else ""  # as OpenAI documents
        if self._continuous_usage:
            usage = (
                f', "usage": {json.dumps(_counts(self._prompt_tokens, self._completion_tokens))}'
            )
        return f'{self._chunk_start}"choices": [{choice}]{report}{usage}}}\n\n'.encode()


def check_prompt_logprobs(request: ParsedRequest, prompt_tokens: int) -> None:
    """Raises InvalidArgument if the response would have too many log probabilities of so many
    prompt tokens.
    """
    if not request.common.HasField("prompt_logprobs"):
        return
    copies = 1 if request.is_chat else request.num_choices
    count = prompt_tokens * (1 + request.common.prompt_logprobs) * copies
    if count > MAX_PROMPT_LOGPROBS:
        raise InvalidArgument(
            f"asks for {count} log probabilities ({prompt_tokens} prompt tokens and their "
            f"alternatives, in {copies} "
            f"choices); at most {MAX_PROMPT_LOGPROBS} are reported in one response",
            "prompt_logprobs" if request.has_prompt_logprobs else "logprobs",
        )


def check_prompt_ids(request: ParsedRequest, prompt_tokens: int) -> None:
    """Raises InvalidArgument if the response would have too many ids of so many prompt tokens."""
    copies = 1 if request.is_chat and not request.is_streamed else request.num_choices
    if request.has_token_ids and (count := prompt_tokens * copies) > limits.MAX_ANSWER_SIZE:
        raise InvalidArgument(
            f"asks for {count} ids ({prompt_tokens} prompt tokens in {copies} choices); at most "
            f"{limits.MAX_ANSWER_SIZE} are reported in one response",
            "return_token_ids",
        )


def error_response(
    error: TandemError,
    name: Callable[[str], str] = http_field,
    body: Callable[[TandemError, Callable[[str], str]], dict[str, Any]] | None = None,
) -> JSONResponse:
    """Returns the response to a request that failed before its first token. `name` maps a field of
    GenerateRequest to the body's name; `body` writes the form of another API than OpenAI's.
    """
    headers = {}
    if error.retry_after is not None:
        headers["Retry-After"] = str(max(1, math.ceil(error.retry_after)))
    if error.http_status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    if error.http_status == 415:
        headers["Accept-Encoding"] = "gzip"
    if error.http_status == 413:
        headers["Connection"] = "close"  # the rest of the body was not read
    return JSONResponse((body or error_body)(error, name), error.http_status, headers)


def error_text(error: TandemError, name: Callable[[str], str]) -> tuple[str, str | None]:
    """Returns the message, and the field that it is about; `name` as in `error_response`."""
    if not isinstance(error, InvalidArgument) or not error.field:
        return error.message, None
    param = name(error.field)
    return f"{param}: {error.message.removeprefix(f'{error.field}: ')}", param


def error_body(error: TandemError, name: Callable[[str], str] = http_field) -> dict[str, Any]:
    """Returns OpenAI's form of an error; `name` as in `error_response`."""
    message, param = error_text(error, name)
    return plain_error(error.http_status, message, param, error.code.lower())


def plain_error(status: int, message: str, param: str | None, code: str) -> dict[str, Any]:
    """Returns OpenAI's error body."""
    kind = (
        "server_error"
        if status >= 500
        else "rate_limit_error"
        if status == 429
        else "invalid_request_error"
    )
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def _with_logprobs(choice: Mapping[str, Any], logprobs: str, more: str = "") -> str:
    """Returns the choice as JSON; `logprobs` and `more` are JSON already."""
    return f'{json.dumps(choice)[:-1]}, "logprobs": {logprobs}{more}}}'


def _id_list(ids: Sequence[int]) -> str:
    """Returns the ids as JSON, one by one: json.dumps would hold the interpreter's lock for all of
    them.
    """
    return f"[{', '.join(str(each) for each in ids)}]"


def _usage(usages: Sequence[inference_pb2.Usage]) -> dict[str, Any]:
    counts = _counts(
        sum(usage.prompt_tokens for usage in usages),
        sum(usage.completion_tokens for usage in usages),
    )
    details: dict[str, Any] = {
        "prompt_tokens_details": {"cached_tokens": sum(each.cached_tokens for each in usages)}
    }
    if reasoning_tokens := sum(each.reasoning_tokens for each in usages):
        details["completion_tokens_details"] = {"reasoning_tokens": reasoning_tokens}
    return counts | details


def _counts(prompt: int, completion: int) -> dict[str, int]:
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
    }
