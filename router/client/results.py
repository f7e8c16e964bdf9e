"""From the messages of the service to what a client gives its caller. Does no I/O."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from ...proto import inference_pb2
from ...proto.errors import InternalError
from .types import Choice, Completion, Delta, FinishReason, Logprob, ModelInfo, Timeline, TokenLogprobs, ToolCall, Usage
from .wire import Metadata

_TIMELINE_KEY: Final = "tandem-timeline-bin"
_FINISH_REASONS: Final[dict[int, FinishReason]] = {
    inference_pb2.FINISH_REASON_STOP: "stop",
    inference_pb2.FINISH_REASON_LENGTH: "length",
    inference_pb2.FINISH_REASON_TOOL_CALLS: "tool_calls",
}


@dataclass(slots=True)
class _Parts:
    """What has come of one choice."""

    texts: list[str] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    tool_calls: list[ToolCall] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    score: float = 0.0

    def add(self, delta: Delta) -> None:
        self.texts.append(delta.text)
        self.ids.extend(delta.token_ids)
        self.logprobs.extend(delta.logprobs)
        self.tool_calls.extend(delta.tool_calls)
        if delta.finish_reason is not None:
            self.finish_reason, self.score = delta.finish_reason, delta.score

    def choice(self) -> Choice:
        if self.finish_reason is None:
            raise InternalError("the service ended the stream without a finish reason")
        return Choice(
            text="".join(self.texts),
            token_ids=tuple(self.ids),
            finish_reason=self.finish_reason,
            logprobs=tuple(self.logprobs),
            tool_calls=tuple(self.tool_calls),
            score=self.score,
        )


class Collector:
    """Follows one stream: makes deltas of messages, and of all of them the completion."""

    def __init__(self) -> None:
        self.timeline: Timeline | None = None  # set by `ended`
        self._request_id = ""
        self._choices: dict[int, _Parts] = {}
        self._prompt_logprobs: tuple[TokenLogprobs, ...] = ()
        self._usage: Usage | None = None

    def delta(self, message: inference_pb2.GenerateResponse) -> Delta:
        self._request_id = message.request_id
        delta = to_delta(message)
        self._choices.setdefault(delta.choice, _Parts()).add(delta)
        self._prompt_logprobs += delta.prompt_logprobs
        self._usage = delta.usage
        return delta

    def ended(self, trailing: Metadata | None) -> None:
        """Takes the trailing metadata; call it however the stream ended."""
        for key, value in trailing or ():
            if key == _TIMELINE_KEY and isinstance(value, bytes):
                self.timeline = Timeline.FromString(value)

    def completion(self) -> Completion:
        """The whole. Raises InternalError if the stream ended without its last message."""
        if self._usage is None:
            raise InternalError("the service ended the stream without a finish reason")
        return Completion(
            request_id=self._request_id,
            choices=tuple(self._choices[index].choice() for index in sorted(self._choices)),
            usage=self._usage,
            timeline=self.timeline or Timeline(),
            prompt_logprobs=self._prompt_logprobs,
        )


def to_delta(message: inference_pb2.GenerateResponse) -> Delta:
    return Delta(
        text=message.text,
        token_ids=tuple(message.token_ids),
        first_index=message.first_index,
        finish_reason=_FINISH_REASONS.get(message.finish_reason),
        usage=_usage(message.usage) if message.HasField("usage") else None,
        choice=message.choice,
        logprobs=_logprobs(message.logprobs),
        prompt_logprobs=_logprobs(message.prompt_logprobs),
        tool_calls=tuple(ToolCall(id=call.id, name=call.name, arguments=call.arguments) for call in message.tool_calls),
        score=message.score,
    )


def model_infos(response: inference_pb2.ListModelsResponse) -> list[ModelInfo]:
    return [ModelInfo(id=model.id, context_tokens=model.context_tokens) for model in response.models]


def _logprobs(given: Iterable[inference_pb2.TokenLogprobs]) -> tuple[TokenLogprobs, ...]:
    return tuple(TokenLogprobs(token=_logprob(each.token), top=tuple(map(_logprob, each.top))) for each in given)


def _logprob(given: inference_pb2.Logprob) -> Logprob:
    logprob = given.logprob if given.HasField("logprob") else None
    return Logprob(token_id=given.token_id, token_bytes=given.text, logprob=logprob)


def _usage(usage: inference_pb2.Usage) -> Usage:
    return Usage(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        cached_tokens=usage.cached_tokens,
    )
