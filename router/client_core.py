"""What the sync and the async client share: requests, results, errors. Does no I/O."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal, TypedDict

import grpc
from google.protobuf.message import Message

from ..proto import errors, inference_pb2, limits

GENERATE: Final = "/tandem.v1.Inference/Generate"
TOKENIZE: Final = "/tandem.v1.Inference/Tokenize"
LIST_MODELS: Final = "/tandem.v1.Inference/ListModels"
HEALTH: Final = "/grpc.health.v1.Health/Check"

CHANNEL_OPTIONS: Final = (
    ("grpc.max_send_message_length", limits.MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", limits.MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 20_000),  # a router whose machine is gone is noticed within half a minute
    ("grpc.keepalive_timeout_ms", 10_000),
)

_TIMELINE_KEY = "tandem-timeline-bin"
_PUSHBACK_KEY = "grpc-retry-pushback-ms"

Timeline = inference_pb2.Timeline
FinishReason = Literal["stop", "length"]
Metadata = Iterable[tuple[str, str | bytes]]


class Options(TypedDict, total=False):
    """How to generate; what is absent takes the service's default."""

    model: str  # absent: the only model served
    temperature: float  # 0 is greedy; absent: 1
    top_k: int  # 0 keeps all
    top_p: float
    min_p: float
    seed: int  # same seed, same tokens; absent: a random one
    max_tokens: int  # absent: to the end of the context
    stop: str | Sequence[str]  # the text ends before the first of these
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    truncate_prompt: bool  # keeps the end of a prompt that does not fit the context
    request_id: str  # names the request in logs and timelines


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Tokens of one request."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int  # prompt tokens whose KV cache was reused


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """A piece of a completion."""

    text: str  # whole characters; empty while they are incomplete
    token_ids: tuple[int, ...]
    first_index: int  # of token_ids[0] among the generated tokens
    finish_reason: FinishReason | None  # set in the last piece only
    usage: Usage | None  # set in the last piece only


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """A whole completion."""

    request_id: str
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    usage: Usage
    timeline: Timeline  # where the time went


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """A model that the service answers for."""

    id: str
    context_tokens: int  # the longest prompt plus completion


def text_prompt(prompt: str | Sequence[int]) -> inference_pb2.Prompt:
    """A prompt of text or token ids. Raises InvalidArgument if the ids are no 32-bit numbers."""
    try:
        if isinstance(prompt, str):
            return inference_pb2.Prompt(text=prompt)
        return inference_pb2.Prompt(token_ids=inference_pb2.TokenIds(ids=prompt))
    except (TypeError, ValueError) as error:  # UnicodeEncodeError, for a lone surrogate, is a ValueError
        raise errors.InvalidArgument("must be text or token ids from 0 to 2**32 - 1", "prompt") from error


def chat_prompt(messages: Sequence[Mapping[str, str]]) -> inference_pb2.Prompt:
    """A prompt of messages with `role` and `content`. Raises InvalidArgument."""
    try:
        chat = [inference_pb2.ChatMessage(role=each["role"], content=each["content"]) for each in messages]
    except (KeyError, TypeError, ValueError) as error:
        raise errors.InvalidArgument("each message must have a role and a content, both text", "messages") from error
    return inference_pb2.Prompt(chat=inference_pb2.Chat(messages=chat))


def build_request(prompt: inference_pb2.Prompt, options: Options) -> inference_pb2.GenerateRequest:
    """The message for these options. Raises InvalidArgument if a value does not fit its field at all."""
    stop = options.get("stop", ())
    try:
        return inference_pb2.GenerateRequest(
            model=options.get("model"),
            prompt=prompt,
            sampling=inference_pb2.SamplingParams(
                temperature=options.get("temperature"),
                top_k=options.get("top_k"),
                top_p=options.get("top_p"),
                min_p=options.get("min_p"),
                seed=options.get("seed"),
            ),
            stopping=inference_pb2.StoppingParams(
                max_tokens=options.get("max_tokens"),
                stop=(stop,) if isinstance(stop, str) else stop,
                stop_token_ids=options.get("stop_token_ids"),
                ignore_eos=options.get("ignore_eos"),
            ),
            truncate_prompt=options.get("truncate_prompt"),
            request_id=options.get("request_id"),
        )
    except (TypeError, ValueError) as error:
        raise errors.InvalidArgument(f"an option does not fit its field: {error}") from error


def tokenize_request(prompt: str | Sequence[Mapping[str, str]], model: str) -> inference_pb2.TokenizeRequest:
    """The message for a text or for messages. Raises InvalidArgument."""
    kind = text_prompt(prompt) if isinstance(prompt, str) else chat_prompt(prompt)
    return inference_pb2.TokenizeRequest(model=model, prompt=kind)


def serialize(message: Message) -> bytes:
    return message.SerializeToString()


class Collector:
    """Follows one stream: makes deltas of messages, and of all of them the completion."""

    def __init__(self) -> None:
        self.timeline: Timeline | None = None  # set by `ended`
        self._request_id = ""
        self._texts: list[str] = []
        self._ids: list[int] = []
        self._last: Delta | None = None

    def delta(self, message: inference_pb2.GenerateResponse) -> Delta:
        self._request_id = message.request_id
        delta = Delta(
            text=message.text,
            token_ids=tuple(message.token_ids),
            first_index=message.first_index,
            finish_reason=_finish_reason(message.finish_reason),
            usage=_usage(message.usage) if message.HasField("usage") else None,
        )
        self._texts.append(delta.text)
        self._ids.extend(delta.token_ids)
        self._last = delta
        return delta

    def ended(self, trailing: Metadata | None) -> None:
        """Takes the trailing metadata; call it however the stream ended."""
        for key, value in trailing or ():
            if key == _TIMELINE_KEY and isinstance(value, bytes):
                self.timeline = Timeline.FromString(value)

    def completion(self) -> Completion:
        """The whole. Raises InternalError if the stream ended without its last message."""
        last = self._last
        if last is None or last.finish_reason is None or last.usage is None:
            raise errors.InternalError("the service ended the stream without a finish reason")
        return Completion(
            request_id=self._request_id,
            text="".join(self._texts),
            token_ids=tuple(self._ids),
            finish_reason=last.finish_reason,
            usage=last.usage,
            timeline=self.timeline or Timeline(),
        )


def model_infos(response: inference_pb2.ListModelsResponse) -> list[ModelInfo]:
    return [ModelInfo(id=model.id, context_tokens=model.context_tokens) for model in response.models]


def to_error(code: grpc.StatusCode, details: str, trailing: Metadata | None) -> errors.TandemError:
    """The error that the service raised, from what arrived of it."""
    pushback = dict(trailing or ()).get(_PUSHBACK_KEY)
    retry_after = float(pushback) / 1_000 if isinstance(pushback, str) and pushback.isdecimal() else None
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
        return errors.TooLarge(details) if retry_after is None else errors.Overloaded(details, retry_after)
    if code is grpc.StatusCode.UNAVAILABLE:  # without pushback the router itself could not be reached
        return errors.Unavailable(details, 1.0 if retry_after is None else retry_after)
    if code is grpc.StatusCode.INVALID_ARGUMENT:
        return _invalid(details)
    return _BY_CODE.get(code, errors.InternalError)(details)


_BY_CODE: Final[dict[grpc.StatusCode, type[errors.TandemError]]] = {
    grpc.StatusCode.NOT_FOUND: errors.NotFound,
    grpc.StatusCode.DEADLINE_EXCEEDED: errors.DeadlineExceeded,
    grpc.StatusCode.CANCELLED: errors.Cancelled,
    grpc.StatusCode.UNAUTHENTICATED: errors.Unauthenticated,
    grpc.StatusCode.PERMISSION_DENIED: errors.PermissionDenied,
}


def _invalid(details: str) -> errors.InvalidArgument:
    field, colon, message = details.partition(": ")
    named = bool(colon) and " " not in field
    return errors.InvalidArgument(message, field) if named else errors.InvalidArgument(details)


def _finish_reason(reason: "inference_pb2.FinishReason") -> FinishReason | None:
    if reason == inference_pb2.FINISH_REASON_STOP:
        return "stop"
    return "length" if reason == inference_pb2.FINISH_REASON_LENGTH else None


def _usage(usage: inference_pb2.Usage) -> Usage:
    return Usage(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        cached_tokens=usage.cached_tokens,
    )
