"""Turns the generated tokens of one completion into its messages."""

import itertools
from collections.abc import Iterable, Sequence, Set
from hashlib import blake2b

from ...proto import inference_pb2, worker_pb2
from ...proto.errors import InternalError
from ...proto.limits import MAX_TOOL_CALLS
from ..frontend.prepared import PreparedRequest
from ..frontend.tokenizer import Tokenizer
from ..request import TokenDelta
from ..resume.tokens import ChoiceProgress
from ..stopping.rules import StopRules
from .chat_parser import ChatParser
from .detokenizer import Detokenizer
from .tool_parser import CALL_ID_BYTES, call_id

UNFINISHED = inference_pb2.FINISH_REASON_UNSPECIFIED
BROKEN = "the token stream of this request broke"
_STOP = inference_pb2.FINISH_REASON_STOP
_TIME = inference_pb2.FINISH_REASON_TIME


class ChoiceOutput:
    """Makes the messages of one completion."""

    def __init__(self, request: PreparedRequest, number: int) -> None:
        submit = request.tokens.submit
        self.num_tokens = 0
        self.num_received = 0  # tokens of the source, also those that do not count
        self.num_reasoning_tokens = 0  # tokens after which the reasoning goes on
        self._num_restored = 0  # tokens that were generated elsewhere
        self._request = request
        self._number = number
        self._sum_logprobs = 0.0
        self._parser: ChatParser | None = None
        if request.chat is not None:
            parser = ChatParser(
                request.chat, request.tokenizer, submit.token_ids, is_bound=bool(submit.grammar)
            )
            self._parser = None if parser.is_idle else parser
        self._text = CompletionText(
            request.tokenizer,
            submit.token_ids,
            request.stops,
            shown_ids=frozenset() if self._parser is None else self._parser.shown_ids,
        )
        self._repetition = request.stops.repetition()
        self._num_calls = 0
        is_single = request.chat is not None and request.chat.tool_choice.single_call
        self._most_calls = 1 if is_single else MAX_TOOL_CALLS

    @property
    def is_parsed(self) -> bool:
        """True if the answer may have reasoning or calls besides text."""
        return self._parser is not None

    @property
    def mean_logprob(self) -> float:
        """The mean log probability of all tokens; 0 without tokens."""
        return self._sum_logprobs / max(self.num_tokens, 1)

    @property
    def num_generated(self) -> int:
        """The number of tokens that were generated here."""
        return max(self.num_tokens - self._num_restored, 0)

    def restore(self, progress: ChoiceProgress) -> None:
        """Brings the completion to where its client has it, by the ids alone."""
        self._num_restored = len(progress.ids)
        self.push(TokenDelta(first_index=0, ids=progress.ids, finish_reason=UNFINISHED))

    def push(self, delta: TokenDelta) -> inference_pb2.GenerateResponse:
        """Returns the message of the next tokens.

        Raises InternalError if the tokens do not follow those before them.
        """
        if delta.first_index != self.num_received:
            raise InternalError(BROKEN)
        is_first = not self.num_received
        self.num_received += len(delta.ids)
        ids, texts, reason = self._detokenize(delta)
        message = inference_pb2.GenerateResponse(
            request_id=self._request.request_id,
            text="".join(texts),
            token_ids=ids,
            first_index=delta.first_index,
            finish_reason=reason,
            choice=self._number,
            score=delta.score,
            stop_string=self._stop_string(ids, reason),
            stop_token_id=self._stop_token_id(ids, reason),
            embedding=delta.embedding,
        )
        if self._parser is not None:
            self._parse(self._parser, message, texts)
        if delta.logprobs:
            self._add_logprobs(message, delta.logprobs)
        if is_first and self._request.echo:
            message.text = self._request.echo + message.text
        self.num_tokens += len(message.token_ids)
        return message

    def _stop_string(self, ids: Sequence[int], reason: "inference_pb2.FinishReason") -> str:
        if self._text.stop_string or reason != _STOP or not ids:
            return self._text.stop_string
        return self._request.stops.special.get(ids[-1], "")

    def _stop_token_id(
        self, ids: Sequence[int], reason: "inference_pb2.FinishReason"
    ) -> int | None:
        """Returns the token that ended the choice, if the client asked for it."""
        ended = reason == _STOP and not self._text.stop_string and bool(ids)
        return ids[-1] if ended and ids[-1] in self._request.stops.token_ids else None

    def _detokenize(
        self, delta: TokenDelta
    ) -> tuple[Sequence[int], list[str], "inference_pb2.FinishReason"]:
        """Returns the ids that count, their texts and the finish reason.

        If the texts are to be parsed, there is one for each id, and one more for the end.
        """
        ids = delta.ids
        reason = delta.finish_reason
        if self._request.is_empty:
            return (), [], reason if reason == _TIME else inference_pb2.FINISH_REASON_LENGTH
        shown = ids[:-1] if reason == _STOP else ids  # the stop token has no text
        if self._repetition is not None and (end := self._repetition.push(shown)) is not None:
            ids = shown = shown[:end]
            reason = inference_pb2.FINISH_REASON_REPETITION
        texts = []
        num_counted = 0
        for run in [shown] if self._parser is None else [(token,) for token in shown]:
            text, num_tokens, stopped = self._text.push(run)
            texts.append(text)
            num_counted += num_tokens
            if stopped:
                return ids[:num_counted], texts, _STOP
        if reason == UNFINISHED:
            return ids, texts, reason
        rest, stopped = self._text.finish()
        return ids, [*texts, rest], _STOP if stopped else reason

    def _parse(
        self, parser: ChatParser, message: inference_pb2.GenerateResponse, texts: Sequence[str]
    ) -> None:
        """Splits the texts into content, reasoning and tool calls; counts reasoning tokens.

        A choice ends with the last call that it may have. A message of a chat has no more calls
        than MAX_TOOL_CALLS, and the answer comes back as one.
        """
        parts = []
        num_calls = self._num_calls
        for number, text in enumerate(texts):
            parts.append(parser.push(text))
            self.num_reasoning_tokens += parser.is_reasoning and number < len(message.token_ids)
            num_calls += len(parts[-1].calls)
            if parts[-1].calls and num_calls >= self._most_calls:
                message.finish_reason = inference_pb2.FINISH_REASON_TOOL_CALLS
                if number + 1 < len(message.token_ids):  # what ended the rest does not count
                    del message.token_ids[number + 1 :]
                    message.ClearField("stop_string")
                    message.ClearField("stop_token_id")
                break
        else:
            if message.finish_reason != UNFINISHED:
                parts.append(parser.finish(is_cut=message.finish_reason != _STOP))
        message.text = "".join(part.text for part in parts)
        message.reasoning = "".join(part.reasoning for part in parts)
        calls = [call for part in parts for call in part.calls]
        message.tool_calls.extend(calls[: self._most_calls - self._num_calls])
        self._name_calls(message.tool_calls)
        self._num_calls += len(message.tool_calls)
        # An answer that was cut keeps its own reason: agents take it for incomplete.
        if self._num_calls and message.finish_reason == _STOP:
            message.finish_reason = inference_pb2.FINISH_REASON_TOOL_CALLS

    def _name_calls(self, calls: Iterable[inference_pb2.ToolCall]) -> None:
        """Gives the next calls of a resumable answer the ids that they get at every router.

        A client may have run a call before its stream broke.
        """
        if self._request.resume is None:
            return
        for index, call in enumerate(calls, self._num_calls):
            name = self._request.resume.answer + bytes((self._number, index))
            call.id = call_id(blake2b(name, digest_size=CALL_ID_BYTES).digest())

    def _add_logprobs(
        self, message: inference_pb2.GenerateResponse, logprobs: Sequence[worker_pb2.TokenScores]
    ) -> None:
        # Not strict: tokens after a stop string do not count.
        counted = list(zip(message.token_ids, logprobs, strict=False))
        self._sum_logprobs += sum(scores.logprob for _, scores in counted)
        if self._request.wants_logprobs:
            tokenizer = self._request.tokenizer
            message.logprobs.extend(
                _token_logprobs(tokenizer, token, scores) for token, scores in counted
            )


class CompletionText:
    """Makes the text of one completion: detokenized, and cut before what stops it.

    That is a stop string or a match of stop_regex. The text of the first min_tokens tokens is shown
    at once; a match begins after it.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt: Sequence[int],
        stops: StopRules,
        shown_ids: Set[int] = frozenset(),
    ) -> None:
        """`shown_ids`: special tokens that have a text here."""
        self._detokenizer = Detokenizer(tokenizer, prompt, shown_ids)
        self._stops = stops.texts()
        self._num_unchecked = stops.min_tokens  # tokens to come in which nothing is searched

    @property
    def stop_string(self) -> str:
        """The stop string or the text matched by stop_regex that was found; "" if none was."""
        return self._stops.found

    def push(self, ids: Sequence[int]) -> tuple[str, int, bool]:
        """Returns the text of the next ids, how many count, and True if a match was found.

        The ids up to the end of a match count. After a match, push no more.
        """
        if self._stops.is_empty:
            return self._detokenizer.push(ids), len(ids), False
        texts = []
        unchecked = ids[: self._num_unchecked]
        if unchecked:
            self._num_unchecked -= len(unchecked)
            texts.append(self._detokenizer.push(unchecked))
        # One by one, to know which of them ends the stop string.
        for count, token in enumerate(ids[len(unchecked) :], start=len(unchecked) + 1):
            text, stopped = self._stops.push(self._detokenizer.push((token,)))
            texts.append(text)
            if stopped:
                return "".join(texts), count, True
        return "".join(texts), len(ids), False

    def finish(self) -> tuple[str, bool]:
        """Returns the text that was held back, and True if a match ends it."""
        text = self._detokenizer.flush()
        if self._num_unchecked:
            return text, False
        text, stopped = self._stops.push(text)
        return text + self._stops.flush(), stopped


def delivered(request: PreparedRequest) -> list[inference_pb2.GenerateResponse]:
    """Returns the messages that the client has, one for each token of each choice.

    Text and calls keep their order. Log probabilities have the bytes of their tokens only.
    """
    messages = []
    for number, progress in request.progress.items():
        choice = ChoiceOutput(request, number)
        for index, token in enumerate(progress.ids):
            message = choice.push(
                TokenDelta(first_index=index, ids=(token,), finish_reason=UNFINISHED)
            )
            if request.wants_logprobs:
                text = inference_pb2.Logprob(text=request.tokenizer.token_bytes(token))
                message.logprobs.append(inference_pb2.TokenLogprobs(token=text))
            messages.append(message)
    return messages


def prompt_logprobs(
    tokenizer: Tokenizer, prompt: Sequence[int], scores: Sequence[worker_pb2.TokenScores]
) -> list[inference_pb2.TokenLogprobs]:
    """Returns one entry for each token of the prompt; the first has no log probability."""
    first = inference_pb2.Logprob(token_id=prompt[0], text=tokenizer.token_bytes(prompt[0]))
    rest = [
        _token_logprobs(tokenizer, token, score)
        for token, score in zip(prompt[1:], scores, strict=True)
    ]
    return [inference_pb2.TokenLogprobs(token=first), *rest]


def _token_logprobs(
    tokenizer: Tokenizer, token: int, scores: worker_pb2.TokenScores
) -> inference_pb2.TokenLogprobs:
    def logprob(token_id: int, value: float, rank: int) -> inference_pb2.Logprob:
        return inference_pb2.Logprob(
            token_id=token_id, text=tokenizer.token_bytes(token_id), logprob=value, rank=rank
        )

    # Not strict: the ranks have no end.
    top = zip(scores.top_ids, scores.top_logprobs, itertools.count(1))
    own = logprob(token, scores.logprob, scores.rank)
    return inference_pb2.TokenLogprobs(token=own, top=[logprob(*each) for each in top])
