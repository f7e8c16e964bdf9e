"""Converts the messages of the service to the results of the clients. Does no I/O."""

from collections.abc import Iterable, Sequence
from typing import Final

from ...proto import inference_pb2
from ...proto.errors import InternalError
from .types import Choice, Completion, Delta, FinishReason, Logprob, Timeline, TokenLogprobs, Usage
from .wire import Metadata

_TIMELINE_KEY: Final = "tandem-timeline-bin"
_FINISH_REASONS: Final[dict[int, FinishReason]] = {
    inference_pb2.FINISH_REASON_STOP: "stop",
    inference_pb2.FINISH_REASON_LENGTH: "length",
    inference_pb2.FINISH_REASON_TOOL_CALLS: "tool_calls",
    inference_pb2.FINISH_REASON_TIME: "time",
    inference_pb2.FINISH_REASON_REPETITION: "repetition",
}


class Collector:
    """Converts the messages of one stream to deltas, and all of them to the completion."""

    def __init__(self) -> None:
        self.timeline: Timeline | None = None  # set by `ended`
        self._request_id = ""
        self._deltas: dict[int, list[Delta]] = {}  # by choice
        self._prompt_logprobs: tuple[TokenLogprobs, ...] = ()
        self._usage: Usage | None = None
        self._resume_tokens: dict[int, bytes] = {}  # the last of each choice
        self._num_repeated = 0  # prompt log probabilities that come again
        self.can_resume = True  # the service gives resume tokens, with which a router can continue

    @property
    def is_complete(self) -> bool:
        """Returns True after the last message."""
        return self._usage is not None

    def resumed(self, request: inference_pb2.GenerateRequest) -> inference_pb2.GenerateRequest:
        """Returns the request for the rest of the stream."""
        if not self._deltas:
            return request
        again = inference_pb2.GenerateRequest()
        again.CopyFrom(request)
        again.request_id = self._request_id
        for choice, token in self._resume_tokens.items():
            again.resume.add(
                resume_token=token,
                token_ids=[i for delta in self._deltas[choice] for i in delta.token_ids],
            )
        self._num_repeated = 0 if 0 in self._resume_tokens else len(self._prompt_logprobs)
        return again

    def delta(self, message: inference_pb2.GenerateResponse) -> Delta:
        """Adds the next message; returns its delta."""
        self._request_id = message.request_id
        delta = Delta(
            text=message.text,
            token_ids=tuple(message.token_ids),
            first_index=message.first_index,
            finish_reason=_FINISH_REASONS.get(message.finish_reason),
            usage=message.usage if message.HasField("usage") else None,
            choice=message.choice,
            logprobs=_logprobs(message.logprobs),
            prompt_logprobs=_logprobs(message.prompt_logprobs[self._num_repeated :]),
            tool_calls=tuple(message.tool_calls),
            score=message.score,
            reasoning=message.reasoning,
            stop_string=message.stop_string,
            stop_token_id=message.stop_token_id if message.HasField("stop_token_id") else None,
        )
        self._deltas.setdefault(delta.choice, []).append(delta)
        self._num_repeated -= min(self._num_repeated, len(message.prompt_logprobs))
        self._prompt_logprobs += delta.prompt_logprobs
        if message.resume_token:
            self._resume_tokens[delta.choice] = message.resume_token
        elif delta.token_ids or delta.text:
            self.can_resume = False
        self._usage = delta.usage
        return delta

    def ended(self, trailing: Metadata | None) -> None:
        """Reads the trailing metadata; must be called at the end of every stream."""
        for key, value in trailing or ():
            if key == _TIMELINE_KEY and isinstance(value, bytes):
                self.timeline = Timeline.FromString(value)

    def completion(self) -> Completion:
        """Returns the complete answer. Raises InternalError if the last message is missing."""
        if self._usage is None:
            raise InternalError("the service ended the stream without a finish reason")
        return Completion(
            request_id=self._request_id,
            choices=tuple(_choice(self._deltas[index]) for index in sorted(self._deltas)),
            usage=self._usage,
            timeline=self.timeline or Timeline(),
            prompt_logprobs=self._prompt_logprobs,
        )


def _choice(deltas: Sequence[Delta]) -> Choice:
    last = deltas[-1]
    if last.finish_reason is None:
        raise InternalError("the service ended the stream without a finish reason")
    return Choice(
        text="".join(delta.text for delta in deltas),
        token_ids=tuple(token for delta in deltas for token in delta.token_ids),
        finish_reason=last.finish_reason,
        logprobs=tuple(each for delta in deltas for each in delta.logprobs),
        tool_calls=tuple(call for delta in deltas for call in delta.tool_calls),
        score=last.score,
        reasoning="".join(delta.reasoning for delta in deltas),
        stop_string=last.stop_string,
        stop_token_id=last.stop_token_id,
    )


def _logprobs(given: Iterable[inference_pb2.TokenLogprobs]) -> tuple[TokenLogprobs, ...]:
    return tuple(
        TokenLogprobs(token=_logprob(each.token), top=tuple(map(_logprob, each.top)))
        for each in given
    )


def _logprob(given: inference_pb2.Logprob) -> Logprob:
    logprob = given.logprob if given.HasField("logprob") else None
    return Logprob(
        token_id=given.token_id, token_bytes=given.text, logprob=logprob, rank=given.rank
    )
