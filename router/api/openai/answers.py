"""Writes OpenAI's answers as bytes: completions, chunks of a stream, errors."""

import json
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

from starlette.responses import JSONResponse
from typing_extensions import override

from ....proto import inference_pb2, limits
from ....proto.errors import ContextExceeded, InvalidArgument, PromptTooLong, TandemError
from ...frontend.fair_threads import WRITING
from .logprobs import TextLogprobs, chat_logprobs, prompt_logprobs
from .parsing import http_field
from .requests import AnyRequest, OpenAIRequest
from .writers import Answers, StreamWriter, TokenIds, streaming_form

_DONE: Final = b"data: [DONE]\n\n"
_UNFINISHED: Final = inference_pb2.FINISH_REASON_UNSPECIFIED

MAX_PROMPT_LOGPROBS: Final = 2**19
"""Bound on the log probabilities of all prompts in one response, which then has 40 MB.

Each alternative counts, and each choice that repeats them.
"""

_IDS_PER_LOGPROB: Final = 16
"""Number of token ids that are written in the time of one log probability."""

_CHARACTERS_PER_LOGPROB: Final = 1_024
"""Number of characters of a text that are written in the time of one log probability."""

_REASONS: Final[Mapping[int, str | None]] = {
    _UNFINISHED: None,
    inference_pb2.FINISH_REASON_STOP: "stop",
    inference_pb2.FINISH_REASON_LENGTH: "length",
    inference_pb2.FINISH_REASON_TOOL_CALLS: "tool_calls",
    # OpenAI's clients know no other values; the stop reason tells them apart.
    inference_pb2.FINISH_REASON_TIME: "length",
    inference_pb2.FINISH_REASON_REPETITION: "stop",
}

RULES: Final[Mapping[int, str]] = {
    inference_pb2.FINISH_REASON_TIME: "max_time_ms",
    inference_pb2.FINISH_REASON_REPETITION: "repetition_stop",
}
"""Stop reasons of rules that match no text and no token."""


class ResponseWriter(StreamWriter):
    """Writes the answer to a completion or a chat: as chunks, or in full.

    Log probabilities and token ids are written to JSON one by one. `json.dumps` of an object that
    holds all of them would hold the interpreter's lock for up to half a second.
    """

    def __init__(
        self,
        request: OpenAIRequest,
        model: str,
        prompts: TokenIds,
        reasoning_names: Sequence[str] = ("reasoning_content",),
    ) -> None:
        """`reasoning_names`: of the fields of a chat that have the reasoning."""
        self._request = request
        self._reasoning_names = reasoning_names
        options = request.body.stream_options
        self._includes_usage = options is not None and options.include_usage
        self._continuous_usage = options is not None and options.continuous_usage_stats
        self._head: dict[str, Any] = {
            "id": f"{'chatcmpl' if request.is_chat else 'cmpl'}-{request.request_id}",
            "object": "chat.completion" if request.is_chat else "text_completion",
            "created": int(time.time()),
            "model": model,
        }
        # The members before the choice are the same in each chunk, so they are written once.
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
        self._prompt_logprob_members: dict[int, str] = {}
        self._prompt_id_members: dict[int, str] = {}

    @override
    async def chunk(self, prompt: int, message: inference_pb2.GenerateResponse) -> bytes:
        num_logprobs = len(message.prompt_logprobs) + len(message.logprobs)
        if self._index(prompt, message) not in self._text_logprobs:
            num_logprobs += len(self._prompt_logprobs.get(prompt, ()))
            num_logprobs += len(message.text) // _CHARACTERS_PER_LOGPROB  # it may have an echo
        if self._request.has_token_ids and prompt not in self._prompt_id_members:
            num_logprobs += len(self._prompts[prompt]) // _IDS_PER_LOGPROB
        return await WRITING.run("", num_logprobs, self._chunk, prompt, message)

    @override
    def continue_after(self, delivered: Iterable[inference_pb2.GenerateResponse]) -> None:
        for message in delivered:
            self._chunk(0, message)

    @override
    def end(self, usages: Sequence[inference_pb2.Usage]) -> bytes:
        if not self._includes_usage:
            return _DONE
        usage = json.dumps(_usage(usages))
        return f'{self._chunk_start}"choices": [], "usage": {usage}}}\n\n'.encode() + _DONE

    @override
    def error_event(self, error: TandemError, name: Callable[[str], str]) -> bytes:
        return f"data: {json.dumps(error_body(error, name))}\n\n".encode()  # no [DONE] follows

    @override
    async def render_full(self, answers: Answers) -> bytes:
        messages = [message for each in answers for message in each]
        num_logprobs = sum(len(each.prompt_logprobs) + len(each.logprobs) for each in messages)
        num_logprobs += sum(len(each.text) for each in messages) // _CHARACTERS_PER_LOGPROB
        if self._request.has_token_ids:
            num_ids = self._prompt_tokens + sum(len(each.token_ids) for each in messages)
            num_logprobs += num_ids // _IDS_PER_LOGPROB
        return await WRITING.run("", num_logprobs, self._render_full, answers)

    def _chunk(self, prompt: int, message: inference_pb2.GenerateResponse) -> bytes:
        members = ""
        if message.prompt_logprobs:
            self._prompt_logprobs[prompt] = message.prompt_logprobs
            members = self._prompt_logprob_member(prompt)
        self._completion_tokens += len(message.token_ids)
        if not self._request.is_chat:
            return self._event(self._text_choice(prompt, message, members))
        index = self._index(prompt, message)
        event = self._chat_events(index, message, members)
        if index in self._started:
            return event
        self._started.add(index)
        delta = {"role": "assistant", "content": ""}
        begin = {"index": index, "finish_reason": None, "delta": delta, "logprobs": None}
        return self._event(json.dumps(begin), self._prompt_id_member(prompt)) + event

    def _chat_events(
        self, index: int, message: inference_pb2.GenerateResponse, members: str = ""
    ) -> bytes:
        """Returns the chunk of a message; one with calls has its finish reason in a second chunk.

        OpenAI's packages report the last call as done only in a chunk after its own.
        """
        if not message.tool_calls or message.finish_reason == _UNFINISHED:
            return self._event(self._chat_choice(index, message, is_delta=True), members)
        calls = inference_pb2.GenerateResponse()
        calls.CopyFrom(message)
        calls.finish_reason = _UNFINISHED
        end = inference_pb2.GenerateResponse(
            finish_reason=message.finish_reason, stop_string=message.stop_string
        )
        if message.HasField("stop_token_id"):
            end.stop_token_id = message.stop_token_id
        return self._chat_events(index, calls, members) + self._chat_events(index, end)

    def _render_full(self, answers: Answers) -> bytes:
        choices = []
        for prompt, messages in enumerate(answers):
            self._prompt_logprobs[prompt] = [
                entry for message in messages for entry in message.prompt_logprobs
            ]
            for message in messages:
                if self._request.is_chat:
                    choices.append(self._chat_choice(message.choice, message, is_delta=False))
                else:
                    members = self._prompt_logprob_member(prompt)
                    choices.append(self._text_choice(prompt, message, members))
        usage = json.dumps(_usage([messages[-1].usage for messages in answers]))
        members = ""
        if self._request.is_chat:
            members = self._prompt_logprob_member(0) + self._prompt_id_member(0)
        head = json.dumps(self._head)[:-1]
        return f'{head}, "choices": [{", ".join(choices)}], "usage": {usage}{members}}}'.encode()

    def _index(self, prompt: int, message: inference_pb2.GenerateResponse) -> int:
        return prompt * self._request.num_choices + message.choice

    def _text_choice(
        self, prompt: int, message: inference_pb2.GenerateResponse, members: str
    ) -> str:
        """Returns a choice of a completion as JSON; `members`: further members of the object."""
        index = self._index(prompt, message)
        members += self._id_member(message)
        if index not in self._text_logprobs:
            self._text_logprobs[index] = self._echoed(prompt, message.text).fork()
            members += self._prompt_id_member(prompt)
        self._text_logprobs[index].take(message.logprobs)
        choice = {"index": index} | self._finish(message) | {"text": message.text}
        return _with_logprobs(choice, self._text_logprobs[index].render(), members)

    def _chat_choice(
        self, index: int, message: inference_pb2.GenerateResponse, *, is_delta: bool
    ) -> str:
        """Returns a choice of a chat as JSON: in full, or as a delta to the previous messages."""
        calls = self._tool_calls(index, message.tool_calls, is_delta=is_delta)
        content: dict[str, Any] = {}
        if not is_delta:
            content = {"role": "assistant", "content": message.text or (None if calls else "")}
        if calls:
            content["tool_calls"] = calls
        if message.reasoning:
            content |= dict.fromkeys(self._reasoning_names, message.reasoning)
        is_empty = not content and message.finish_reason == _UNFINISHED
        if is_delta and (message.text or is_empty):
            content["content"] = message.text
        choice = {"index": index} | self._finish(message)
        choice["delta" if is_delta else "message"] = content
        return _with_logprobs(choice, chat_logprobs(message.logprobs), self._id_member(message))

    def _finish(self, message: inference_pb2.GenerateResponse) -> dict[str, Any]:
        """Returns OpenAI's finish reason and vLLM's stop reason.

        Choices that have not ended have no stop reason.
        """
        reason = _REASONS[message.finish_reason]
        if reason is None:
            return {"finish_reason": None}
        return {"finish_reason": reason, "stop_reason": stop_reason(message)}

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

    def _echoed(self, prompt: int, text: str) -> TextLogprobs:
        """Returns the log probabilities that the choices of a prompt begin with (cached).

        `text`: of one of the choices.
        """
        if prompt not in self._echoed_logprobs:
            self._echoed_logprobs[prompt] = TextLogprobs()
            if self._request.common.echo and self._request.common.HasField("logprobs"):
                tokens = self._prompt_logprobs.get(prompt, ())
                self._echoed_logprobs[prompt].take_prompt(tokens, text)
        return self._echoed_logprobs[prompt]

    def _prompt_logprob_member(self, prompt: int) -> str:
        """Returns the prompt's log probabilities as a JSON member (cached); "" if not requested."""
        if not self._request.has_prompt_logprobs:
            return ""
        if prompt not in self._prompt_logprob_members:
            found = prompt_logprobs(self._prompt_logprobs.get(prompt, ()))
            self._prompt_logprob_members[prompt] = f', "prompt_logprobs": {found}'
        return self._prompt_logprob_members[prompt]

    def _prompt_id_member(self, prompt: int) -> str:
        """Returns the prompt's token ids as a JSON member (cached); "" if not requested."""
        if not self._request.has_token_ids:
            return ""
        if prompt not in self._prompt_id_members:
            ids = _id_list(self._prompts[prompt])
            self._prompt_id_members[prompt] = f', "prompt_token_ids": {ids}'
        return self._prompt_id_members[prompt]

    def _id_member(self, message: inference_pb2.GenerateResponse) -> str:
        """Returns the generated token ids as a JSON member; "" if not requested."""
        if not self._request.has_token_ids:
            return ""
        return f', "token_ids": {_id_list(message.token_ids)}'

    def _event(self, choice: str, members: str = "") -> bytes:
        """Returns a chunk with one choice; `members`: further members of the chunk."""
        usage = ""
        if self._continuous_usage:
            counts = _counts(self._prompt_tokens, self._completion_tokens)
            usage = f', "usage": {json.dumps(counts)}'
        elif self._includes_usage:
            usage = ', "usage": null'  # as OpenAI documents
        return f'{self._chunk_start}"choices": [{choice}]{members}{usage}}}\n\n'.encode()


def stop_reason(message: inference_pb2.GenerateResponse) -> str | int | None:
    """Returns vLLM's stop reason of the last message of a choice.

    It is the stop string, the text that stop_regex matched, the id of the requested stop token, or
    the name of another rule; otherwise None.
    """
    if message.HasField("stop_token_id") and not message.stop_string:
        return message.stop_token_id
    return message.stop_string or RULES.get(message.finish_reason)


def check_prompt_logprobs(request: AnyRequest, prompt_tokens: int) -> None:
    """Raises InvalidArgument if the prompts' log probabilities exceed MAX_PROMPT_LOGPROBS."""
    if not request.common.HasField("prompt_logprobs"):
        return
    copies = 1 if request.is_chat else request.num_choices
    count = prompt_tokens * (1 + request.common.prompt_logprobs) * copies
    if count > MAX_PROMPT_LOGPROBS:
        raise InvalidArgument(
            f"asks for {count} log probabilities ({prompt_tokens} prompt tokens and their "
            f"alternatives, in {copies} choices); the maximum of one response is "
            f"{MAX_PROMPT_LOGPROBS}",
            "prompt_logprobs" if request.has_prompt_logprobs else "logprobs",
        )


def check_prompt_ids(request: AnyRequest, prompt_tokens: int) -> None:
    """Raises InvalidArgument if the prompts' token ids exceed MAX_ANSWER_SIZE."""
    copies = 1 if request.is_chat and not request.is_streamed else request.num_choices
    if request.has_token_ids and (count := prompt_tokens * copies) > limits.MAX_ANSWER_SIZE:
        raise InvalidArgument(
            f"asks for {count} ids ({prompt_tokens} prompt tokens in {copies} choices); "
            f"the maximum of one response is {limits.MAX_ANSWER_SIZE}",
            "return_token_ids",
        )


def error_response(
    error: TandemError,
    name: Callable[[str], str] = http_field,
    body: Callable[[TandemError, Callable[[str], str]], dict[str, Any]] | None = None,
) -> JSONResponse:
    """Returns the response to a request that failed before its first token.

    `name` maps a field of GenerateRequest to the name in the body. `body` makes the error body of
    an API other than OpenAI's.
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
    """Returns the message and the name of the wrong field; `name` as in `error_response`."""
    if not isinstance(error, InvalidArgument) or not error.field:
        return error.message, None
    param = name(error.field)
    if isinstance(error, ContextExceeded):  # clients look for the first words
        return (
            f"This model's maximum context length is {error.context} tokens. However, the request "
            f"needs {error.num_prompt} tokens for {param}{error.generated}; {error.remedy}"
        ), param
    return f"{param}: {error.message.removeprefix(f'{error.field}: ')}", param


def error_code(error: TandemError) -> str:
    """Returns OpenAI's code of an error, or else the name of its gRPC status."""
    if isinstance(error, PromptTooLong):
        return "context_length_exceeded"
    return error.code.lower()


def error_body(error: TandemError, name: Callable[[str], str] = http_field) -> dict[str, Any]:
    """Returns OpenAI's error body; `name` as in `error_response`."""
    message, param = error_text(error, name)
    return plain_error(error.http_status, message, param, error_code(error))


def plain_error(status: int, message: str, param: str | None, code: str) -> dict[str, Any]:
    """Returns OpenAI's error body for an HTTP status and a message."""
    kind = "invalid_request_error"
    if status >= 500:
        kind = "server_error"
    elif status == 429:
        kind = "rate_limit_error"
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def _with_logprobs(choice: Mapping[str, Any], logprobs: str, members: str) -> str:
    """Returns the choice as JSON; `logprobs`: a JSON value; `members`: further JSON members."""
    return f'{json.dumps(choice)[:-1]}, "logprobs": {logprobs}{members}}}'


def _id_list(ids: Sequence[int]) -> str:
    return f"[{', '.join(str(each) for each in ids)}]"


def _usage(usages: Sequence[inference_pb2.Usage]) -> dict[str, Any]:
    counts = _counts(
        sum(usage.prompt_tokens for usage in usages),
        sum(usage.completion_tokens for usage in usages),
    )
    details: dict[str, Any] = {
        "prompt_tokens_details": {"cached_tokens": sum(each.cached_tokens for each in usages)}
    }
    if written := sum(each.cache_write_tokens for each in usages):
        details["prompt_tokens_details"]["cache_write_tokens"] = written
    if reasoning_tokens := sum(each.reasoning_tokens for each in usages):
        details["completion_tokens_details"] = {"reasoning_tokens": reasoning_tokens}
    if dropped := sum(each.dropped_messages for each in usages):
        details["dropped_messages"] = dropped
    return counts | details


def _counts(prompt: int, completion: int) -> dict[str, int]:
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
    }


OPENAI_FORM: Final = streaming_form(ResponseWriter, error_response)
