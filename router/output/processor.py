"""Turns the generated tokens of one request into the messages of its answer.

Knows nothing of dispatch and of APIs.
"""

import itertools
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, aclosing, contextmanager, nullcontext
from dataclasses import replace

from ...proto import inference_pb2, worker_pb2
from ...proto.errors import InternalError, TandemError
from ..frontend.fair_threads import SCORING
from ..frontend.prepared import PreparedRequest
from ..frontend.tokenizer import Tokenizer
from ..request import TokenDelta
from ..resume.event_ids import ChoiceMark
from ..resume.tokens import ChoiceProgress, ProgressSigner
from .chat_parser import ChatParser
from .detokenizer import CompletionText
from .joined_answer import JoinedAnswer

_UNFINISHED = inference_pb2.FINISH_REASON_UNSPECIFIED
_STOP = inference_pb2.FINISH_REASON_STOP
_BROKEN = "the token stream of this request broke"


class OutputProcessor:
    """Makes the messages of all completions of a prepared request."""

    def __init__(self, request: PreparedRequest) -> None:
        self.ended: set[int] = (
            set()
        )  # choices ended by a stop string or a call; the source is to cancel them
        self.finish_reasons: list[
            inference_pb2.FinishReason
        ] = []  # of the choices that have ended here
        self._request = request
        self._choices = [
            _ChoiceOutput(request, number) for number in range(request.tokens.submit.num_choices)
        ]
        self._progress = (
            {} if request.is_held else request.progress
        )  # what the client has of each choice
        ended = {number for number, progress in self._progress.items() if progress.has_ended}
        self._open = {
            number: choice for number, choice in enumerate(self._choices) if number not in ended
        }
        # Of the prompt when it was computed first, if that was elsewhere; what is cached now is the
        # answer, too.
        self._cached_tokens = request.cached_tokens
        self._has_begun = False  # a message was yielded
        self._signers: dict[int, ProgressSigner] = {}  # by choice
        self._prompt_logprobs: list[
            inference_pb2.TokenLogprobs
        ] = []  # for the next message of choice 0
        submit = request.tokens.submit
        if submit.HasField("prompt_logprobs") and len(submit.token_ids) == 1:  # no scores will come
            self._prompt_logprobs = _prompt_logprobs(request.tokenizer, submit.token_ids, ())

    async def run(
        self,
        deltas: AsyncGenerator[TokenDelta, None],
        timeline: inference_pb2.Timeline,
        execution: AbstractContextManager[object] | None = None,
    ) -> AsyncGenerator[inference_pb2.GenerateResponse, None]:
        """Yields the messages of what a source generates, see GenerationService.run. Closes
        `deltas`. Stays in the context `execution` from its first step until the source has ended.

        Raises InternalError if the source breaks its contract: no index is missing or repeated,
        nothing follows the end.
        """
        request = self._request
        held: list[inference_pb2.GenerateResponse] = []  # the last message of each completion
        ranked = (
            JoinedAnswer()
        )  # all messages of a request whose completions are ranked when all have ended
        marks = (
            {} if request.is_held else request.marks
        )  # those of an answer that is held are whole
        with self._charged(timeline, execution or nullcontext()):
            async with aclosing(deltas):
                await self._restore()
                async for delta in split_at(deltas, marks) if marks else deltas:
                    if delta.choice not in self._open:
                        raise InternalError(_BROKEN)
                    if delta.prompt_logprobs:
                        await self._push_prompt(delta.prompt_logprobs)
                    message = self._open[delta.choice].push(delta)
                    if self._prompt_logprobs and delta.choice == 0:
                        message.prompt_logprobs.extend(self._prompt_logprobs)
                        self._prompt_logprobs = []
                    if message.finish_reason != _UNFINISHED:
                        del self._open[delta.choice]
                        self.finish_reasons.append(message.finish_reason)
                        if delta.finish_reason == _UNFINISHED:
                            self.ended.add(delta.choice)
                    if self._open and not request.is_held and not self._is_last(message):
                        yield self._signed(message, timeline)
                        continue
                    if request.is_held:
                        ranked.add(message)
                    else:
                        held.append(message)
                    if not self._open and delta.finish_reason == _UNFINISHED:
                        break  # by a stop string or a call: closing the source cancels the rest
        if self._open:
            raise InternalError(_BROKEN)
        for message in self._last(ranked.messages() if request.is_held else held, timeline):
            yield self._signed(message, timeline)

    @contextmanager
    def _charged(
        self, timeline: inference_pb2.Timeline, execution: AbstractContextManager[object]
    ) -> Iterator[None]:
        """Charges what the source has generated within `execution`, whichever way that ends."""
        try:
            with execution:
                yield
        except TandemError as error:
            if error.retry_after is not None and not self.num_generated:
                self._request.give_back()  # it was not the client that ended it
            raise
        finally:
            timeline.request_id = self._request.request_id  # the source writes its own
            self._request.quota.take_tokens(self.num_generated)

    @property
    def num_generated(self) -> int:
        """Returns the tokens that were generated here, until now."""
        return sum(self._num_generated_by_choice())

    @property
    def longest_choice(self) -> int:
        """Returns the most tokens that were generated here for one choice, until now."""
        return max(self._num_generated_by_choice())

    def _num_generated_by_choice(self) -> Iterator[int]:
        for number, choice in enumerate(self._choices):
            restored = self._progress.get(number)
            num_restored = 0 if restored is None else len(restored.ids)
            yield max(choice.num_tokens - num_restored, 0)

    def _is_last(self, message: inference_pb2.GenerateResponse) -> bool:
        """Returns whether the message is the client's last: the choices that go on are computed
        again, and the client has them whole.
        """
        if not self._request.marks or message.finish_reason == _UNFINISHED:
            return False
        whole = {number for number, mark in self._request.marks.items() if mark.has_ended}
        return message.choice not in whole and self._open.keys() <= whole

    def _is_known(self, message: inference_pb2.GenerateResponse) -> bool:
        """Returns whether the message ends a choice that is computed again, and the client has it
        whole.
        """
        mark = self._request.marks.get(message.choice)
        return mark is not None and mark.has_ended

    async def _restore(self) -> None:
        """Brings each choice to where the client has it already."""
        for number, progress in self._progress.items():
            await SCORING.run("", len(progress.ids), self._choices[number].restore, progress)

    def _last(
        self, held: Sequence[inference_pb2.GenerateResponse], timeline: inference_pb2.Timeline
    ) -> list[inference_pb2.GenerateResponse]:
        """Returns the messages after the end of all completions, the last with the usage."""
        request = self._request
        answers = list(held)
        if (
            request.is_held
        ):  # a message for each choice, so that the client has all of it or nothing
            if not request.tokens.has_beam_search:
                answers = self._best(answers)
            answers = [answer for answer in answers if answer.choice not in request.progress]
        # The usage comes with a message that the client does not have.
        answers.sort(key=lambda message: not self._is_known(message))
        usage = answers[-1].usage
        usage.prompt_tokens = len(request.tokens.submit.token_ids)
        usage.cached_tokens = self._num_cached(timeline)
        usage.reasoning_tokens = sum(choice.num_reasoning_tokens for choice in self._choices)
        usage.completion_tokens = timeline.completion_tokens = sum(
            choice.num_tokens for choice in self._choices
        )
        return answers

    def _signed(
        self, message: inference_pb2.GenerateResponse, timeline: inference_pb2.Timeline
    ) -> inference_pb2.GenerateResponse:
        """Adds the resume token, and to the first message what was cached of the prompt."""
        if not self._has_begun:
            self._has_begun = True
            self._cached_tokens = message.cached_tokens = self._num_cached(timeline)
        binding, number = self._request.resume, message.choice
        if binding is not None and not self._request.has_event_ids:
            signer = self._signers.get(number)
            if signer is None:
                emitted = self._progress[number].ids if number in self._progress else ()
                signer = self._signers[number] = ProgressSigner(binding, number, emitted)
            ids = message.token_ids[:]  # a list, which array reads three times as fast
            message.resume_token = signer.sign(
                ids, message.finish_reason != _UNFINISHED, self._num_cached(timeline)
            )
        return message

    def _num_cached(self, timeline: inference_pb2.Timeline) -> int:
        """Returns the tokens of the prompt that were cached when it was computed first."""
        return timeline.cached_tokens if self._cached_tokens is None else self._cached_tokens

    async def _push_prompt(self, scores: Sequence[worker_pb2.TokenScores]) -> None:
        """Takes the scores of the prompt after its first token."""
        arguments = (self._request.tokenizer, self._request.tokens.submit.token_ids, scores)
        self._prompt_logprobs = await SCORING.run("", len(scores), _prompt_logprobs, *arguments)

    def _best(
        self, messages: Sequence[inference_pb2.GenerateResponse]
    ) -> list[inference_pb2.GenerateResponse]:
        """Returns the completions of the highest mean log probability, renumbered from the best.

        `messages`: one of each completion. The best gets the prompt's log probabilities.
        """
        prompt_logprobs = messages[0].prompt_logprobs[:]
        del messages[0].prompt_logprobs[:]
        ranked = sorted(
            messages,
            key=lambda one: (-self._choices[one.choice].mean_logprob, one.choice),
        )
        answers = ranked[: self._request.num_answers]
        for number, answer in enumerate(answers):
            answer.choice = number
        answers[0].prompt_logprobs.extend(prompt_logprobs)
        return answers


class _ChoiceOutput:
    """Makes the messages of one completion."""

    def __init__(self, request: PreparedRequest, number: int) -> None:
        submit = request.tokens.submit
        self.num_tokens = 0
        self.num_reasoning_tokens = 0  # after which a thought goes on
        self._request = request
        self._number = number
        self._num_received = 0  # tokens of the source
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
            request.stop,
            submit.min_tokens,
            shown_ids=frozenset() if self._parser is None else self._parser.shown_ids,
        )
        self._has_tool_calls = False
        self._calls_once = request.chat is not None and request.chat.tool_choice.single_call

    @property
    def mean_logprob(self) -> float:
        """Mean of all tokens; 0 without tokens."""
        return self._sum_logprobs / max(self.num_tokens, 1)

    def restore(self, progress: ChoiceProgress) -> inference_pb2.GenerateResponse:
        """Takes what the client has, and returns it; without log probabilities. What is held back
        of the text depends on the ids alone.
        """
        return self.push(TokenDelta(first_index=0, ids=progress.ids, finish_reason=_UNFINISHED))

    def push(self, delta: TokenDelta) -> inference_pb2.GenerateResponse:
        if delta.first_index != self._num_received:
            raise InternalError(_BROKEN)
        is_first = not self._num_received
        self._num_received += len(delta.ids)
        ids, texts, reason = self._detokenize(delta)
        response = inference_pb2.GenerateResponse(
            request_id=self._request.request_id,
            text="".join(texts),
            token_ids=ids,
            first_index=delta.first_index,
            finish_reason=reason,
            choice=self._number,
            score=delta.score,
            stop_string=self._stop_string(ids, reason),
        )
        if self._parser is not None:
            self._split(self._parser, response, texts)
        if delta.logprobs:
            self._add_logprobs(response, delta.logprobs)
        if delta.embedding:
            response.embedding.extend(delta.embedding)
        if is_first and self._request.echo:
            response.text = self._request.echo + response.text
        self.num_tokens += len(response.token_ids)
        return response

    def _stop_string(self, ids: Sequence[int], reason: "inference_pb2.FinishReason") -> str:
        if self._text.stop_string or reason != _STOP or not ids:
            return self._text.stop_string
        return self._request.stop_tokens.get(ids[-1], "")

    def _detokenize(
        self, delta: TokenDelta
    ) -> tuple[Sequence[int], list[str], "inference_pb2.FinishReason"]:
        """Returns the ids that count; the texts that they complete, of each if they are to be
        parsed, and what was held back at the end; and the finish reason.
        """
        ids, reason = delta.ids, delta.finish_reason
        if self._request.is_empty:
            return (), [], inference_pb2.FINISH_REASON_LENGTH
        shown = ids[:-1] if reason == _STOP else ids  # the stop token has no text
        texts, counted = [], 0
        for run in [shown] if self._parser is None else [(token,) for token in shown]:
            text, num_tokens, stopped = self._text.push(run)
            texts.append(text)
            counted += num_tokens
            if stopped:
                return ids[:counted], texts, _STOP
        if reason == _UNFINISHED:
            return ids, texts, reason
        rest, stopped = self._text.finish()
        return ids, [*texts, rest], _STOP if stopped else reason

    def _split(
        self, parser: ChatParser, response: inference_pb2.GenerateResponse, texts: Sequence[str]
    ) -> None:
        """Takes thoughts and calls out of the texts; counts the tokens of thoughts, however they
        come. Ends a choice with its first call, if it may have one only.
        """
        parts = []
        for number, text in enumerate(texts):
            parts.append(parser.push(text))
            self.num_reasoning_tokens += parser.is_thinking and number < len(response.token_ids)
            if self._calls_once and parts[-1].calls:
                response.finish_reason = inference_pb2.FINISH_REASON_TOOL_CALLS
                del response.token_ids[number + 1 :]
                break
        else:
            if response.finish_reason != _UNFINISHED:
                parts.append(parser.finish())
        response.text = "".join(part.text for part in parts)
        response.reasoning = "".join(part.reasoning for part in parts)
        calls = [call for part in parts for call in part.calls]
        response.tool_calls.extend(calls[:1] if self._calls_once else calls)
        self._has_tool_calls |= bool(response.tool_calls)
        if (
            self._has_tool_calls and response.finish_reason == _STOP
        ):  # agents take what was cut for incomplete
            response.finish_reason = inference_pb2.FINISH_REASON_TOOL_CALLS

    def _add_logprobs(
        self, response: inference_pb2.GenerateResponse, logprobs: Sequence[worker_pb2.TokenScores]
    ) -> None:
        counted = list(
            zip(response.token_ids, logprobs, strict=False)
        )  # up to the end of a stop string
        self._sum_logprobs += sum(scores.logprob for _, scores in counted)
        if self._request.wants_logprobs:
            tokenizer = self._request.tokenizer
            response.logprobs.extend(
                _token_logprobs(tokenizer, token, scores) for token, scores in counted
            )


async def split_at(
    deltas: AsyncGenerator[TokenDelta, None], marks: Mapping[int, ChoiceMark]
) -> AsyncGenerator[TokenDelta, None]:
    """Yields the deltas, and two for one that has tokens before the mark of its choice and others
    after it: so no message has tokens that the client has and others."""
    async for delta in deltas:
        mark = marks.get(delta.choice)
        num_known = 0 if mark is None else mark.num_tokens - delta.first_index
        if mark is None or not 0 < num_known < len(delta.ids):
            yield delta
            continue
        yield replace(
            delta,
            ids=delta.ids[:num_known],
            logprobs=delta.logprobs[:num_known],
            finish_reason=_UNFINISHED,
            score=0.0,
        )
        if mark.has_ended:  # by a stop string, after which tokens may come
            continue
        yield replace(
            delta,
            first_index=delta.first_index + num_known,
            ids=delta.ids[num_known:],
            logprobs=delta.logprobs[num_known:],
            prompt_logprobs=(),
        )


def delivered(request: PreparedRequest) -> list[inference_pb2.GenerateResponse]:
    """Returns what the client has of each choice, in a message for each token, so that text and
    calls keep their order; of log probabilities only the tokens' bytes.
    """
    messages = []
    for number, progress in request.progress.items():
        choice = _ChoiceOutput(request, number)
        for index, token in enumerate(progress.ids):
            message = choice.push(
                TokenDelta(first_index=index, ids=(token,), finish_reason=_UNFINISHED)
            )
            if request.wants_logprobs:
                text = inference_pb2.Logprob(text=request.tokenizer.token_bytes(token))
                message.logprobs.append(inference_pb2.TokenLogprobs(token=text))
            messages.append(message)
    return messages


def _prompt_logprobs(
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

    top = zip(
        scores.top_ids, scores.top_logprobs, itertools.count(1)
    )  # not strict: the last has no end
    own = logprob(token, scores.logprob, scores.rank)
    return inference_pb2.TokenLogprobs(token=own, top=[logprob(*each) for each in top])
