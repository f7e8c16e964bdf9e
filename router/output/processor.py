"""The completions of one request while they come: from tokens to the messages of the answer.

Knows nothing of where tokens come from, nor of doors.
"""

import asyncio
from collections.abc import Sequence

from ...proto import inference_pb2, worker_pb2
from ...proto.errors import InternalError
from ..frontend.prepare import PreparedRequest
from ..frontend.tokenizer import Tokenizer
from ..frontend.tools import parser_for
from ..request import TokenDelta
from .detokenizer import CompletionText

_UNFINISHED = inference_pb2.FINISH_REASON_UNSPECIFIED
_STOP = inference_pb2.FINISH_REASON_STOP

_THREAD_FROM_TOKENS = 256
"""So many scores take a few milliseconds; more leave the event loop."""


class OutputProcessor:
    """All completions of an accepted request."""

    def __init__(self, accepted: PreparedRequest) -> None:
        self.ended: set[int] = set()  # those that a stop string ended; the source is to leave them
        self.num_open = accepted.tokens.num_choices  # those that have not ended
        self._accepted = accepted
        self._choices = [_ChoiceOutput(accepted, number) for number in range(self.num_open)]
        self._prompt_logprobs: list[inference_pb2.TokenLogprobs] = []
        tokens = accepted.tokens
        if tokens.prompt_logprobs is not None and len(tokens.prompt) == 1:  # there are no scores to come
            self._prompt_logprobs = _scored_prompt(accepted.tokenizer, tokens.prompt, ())

    @property
    def num_tokens(self) -> int:
        """Of all completions."""
        return sum(choice.num_tokens for choice in self._choices)

    async def push_prompt(self, scores: Sequence[worker_pb2.TokenScores]) -> None:
        """Takes the scores of the prompt after its first token; comes before the first `push` of choice 0."""
        arguments = (self._accepted.tokenizer, self._accepted.tokens.prompt, scores)
        if len(scores) < _THREAD_FROM_TOKENS:
            self._prompt_logprobs = _scored_prompt(*arguments)
        else:
            self._prompt_logprobs = await asyncio.to_thread(_scored_prompt, *arguments)

    def push(self, delta: TokenDelta) -> inference_pb2.GenerateResponse:
        """The message for what a source said of one completion. Raises InternalError where a source breaks its
        contract: no index is left out, none comes twice, nothing follows the end."""
        if not 0 <= delta.choice < len(self._choices):
            raise InternalError("the token stream of this request broke")
        choice = self._choices[delta.choice]
        response = choice.push(delta)
        if self._prompt_logprobs and delta.choice == 0:
            response.prompt_logprobs.extend(self._prompt_logprobs)
            self._prompt_logprobs = []
        if choice.is_over:
            self.num_open -= 1
            if delta.finish_reason == _UNFINISHED:
                self.ended.add(delta.choice)
        return response

    def best(self, messages: Sequence[inference_pb2.GenerateResponse]) -> list[inference_pb2.GenerateResponse]:
        """Of all `messages` those of the completions with the highest mean log probability of a token, each completion
        as one message, the best first and numbered so."""
        parts: dict[int, list[inference_pb2.GenerateResponse]] = {}
        for message in messages:
            parts.setdefault(message.choice, []).append(message)
        ranked = sorted(parts, key=lambda choice: (-self._choices[choice].mean_logprob, choice))
        answers = [_joined(parts[choice], number) for number, choice in enumerate(ranked[: self._accepted.num_answers])]
        answers[0].prompt_logprobs.extend(entry for message in messages for entry in message.prompt_logprobs)
        return answers


class _ChoiceOutput:
    """One completion."""

    def __init__(self, accepted: PreparedRequest, number: int) -> None:
        tokens = accepted.tokens
        self.num_tokens = 0
        self.is_over = False
        self._accepted = accepted
        self._number = number
        self._num_seen = 0  # of the source's tokens
        self._sum_logprobs = 0.0
        self._transcript = CompletionText(accepted.tokenizer, tokens.prompt, accepted.stop, tokens.min_tokens)
        self._parser = parser_for(accepted.chat, accepted.tokenizer) if accepted.chat else None
        self._has_called = False

    @property
    def mean_logprob(self) -> float:
        """Of a token; 0 without tokens."""
        return self._sum_logprobs / max(self.num_tokens, 1)

    def push(self, delta: TokenDelta) -> inference_pb2.GenerateResponse:
        if delta.first_index != self._num_seen or self.is_over:
            raise InternalError("the token stream of this request broke")
        is_first = not self._num_seen
        self._num_seen += len(delta.ids)
        ids, text, reason = self._read(delta)
        response = inference_pb2.GenerateResponse(
            request_id=self._accepted.request_id,
            text=text,
            token_ids=ids,
            first_index=delta.first_index,
            finish_reason=reason,
            choice=self._number,
            score=delta.score,
        )
        self.is_over = reason != _UNFINISHED
        if self._parser is not None:
            self._parse_calls(response)
        if delta.logprobs:
            self._add_logprobs(response, delta.logprobs)
        if is_first and self._accepted.echo:
            response.text = self._accepted.echo + response.text
        self.num_tokens += len(ids)
        return response

    def _read(self, delta: TokenDelta) -> tuple[Sequence[int], str, "inference_pb2.FinishReason"]:
        """The ids that count, the text that they complete, and whether that is the end."""
        ids, reason = delta.ids, delta.finish_reason
        if self._accepted.is_empty:
            return (), "", inference_pb2.FINISH_REASON_LENGTH
        piece = self._transcript.push(ids[:-1] if reason == _STOP else ids)  # the token that stops has no text
        if piece.stopped:
            return ids[: piece.num_tokens], piece.text, _STOP
        if reason == _UNFINISHED:
            return ids, piece.text, reason
        rest = self._transcript.finish()
        return ids, piece.text + rest.text, _STOP if rest.stopped else reason

    def _parse_calls(self, response: inference_pb2.GenerateResponse) -> None:
        assert self._parser is not None
        text, calls = self._parser.push(response.text)
        if self.is_over:
            last_text, last_calls = self._parser.finish()
            text, calls = text + last_text, calls + last_calls
        response.text = text
        response.tool_calls.extend(calls)
        self._has_called |= bool(calls)
        if self._has_called and self.is_over:
            response.finish_reason = inference_pb2.FINISH_REASON_TOOL_CALLS

    def _add_logprobs(
        self, response: inference_pb2.GenerateResponse, logprobs: Sequence[worker_pb2.TokenScores]
    ) -> None:
        counted = list(zip(response.token_ids, logprobs, strict=False))  # what follows a stop string does not count
        self._sum_logprobs += sum(scores.logprob for _, scores in counted)
        if self._accepted.wants_logprobs:
            tokenizer = self._accepted.tokenizer
            response.logprobs.extend(_scored(tokenizer, token, scores) for token, scores in counted)


def _joined(parts: Sequence[inference_pb2.GenerateResponse], number: int) -> inference_pb2.GenerateResponse:
    """All messages of one completion as one, but for the prompt's log probabilities."""
    return inference_pb2.GenerateResponse(
        request_id=parts[0].request_id,
        text="".join(part.text for part in parts),
        token_ids=[token for part in parts for token in part.token_ids],
        finish_reason=parts[-1].finish_reason,
        choice=number,
        logprobs=[entry for part in parts for entry in part.logprobs],
        tool_calls=[call for part in parts for call in part.tool_calls],
    )


def _scored_prompt(
    tokenizer: Tokenizer, prompt: Sequence[int], scores: Sequence[worker_pb2.TokenScores]
) -> list[inference_pb2.TokenLogprobs]:
    """One for each token of the prompt; the first has no log probability."""
    first = inference_pb2.Logprob(token_id=prompt[0], text=tokenizer.token_bytes(prompt[0]))
    rest = [_scored(tokenizer, token, score) for token, score in zip(prompt[1:], scores, strict=True)]
    return [inference_pb2.TokenLogprobs(token=first), *rest]


def _scored(tokenizer: Tokenizer, token: int, scores: worker_pb2.TokenScores) -> inference_pb2.TokenLogprobs:
    def logprob(token_id: int, value: float) -> inference_pb2.Logprob:
        return inference_pb2.Logprob(token_id=token_id, text=tokenizer.token_bytes(token_id), logprob=value)

    top = zip(scores.top_ids, scores.top_logprobs, strict=True)
    return inference_pb2.TokenLogprobs(token=logprob(token, scores.logprob), top=[logprob(*each) for each in top])
