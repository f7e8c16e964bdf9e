"""Turns the generated tokens of one request into the messages of its answer.

Knows nothing of dispatch and of APIs.
"""

import asyncio
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import AbstractContextManager, aclosing, contextmanager, nullcontext
from functools import partial

from ...proto import inference_pb2, worker_pb2
from ...proto.errors import Cancelled, DeadlineExceeded, InternalError, TandemError
from ..frontend.fair_threads import SCORING
from ..frontend.prepared import PreparedRequest
from ..request import TokenDelta
from ..resume.tokens import ProgressSigner
from .choice import BROKEN, UNFINISHED, ChoiceOutput, prompt_logprobs
from .joined_answer import JoinedAnswer
from .split import split_at, token_by_token


class OutputProcessor:
    """Makes the messages of all completions of a prepared request."""

    def __init__(self, request: PreparedRequest, timeline: inference_pb2.Timeline) -> None:
        """`timeline`: the source fills it in; `run` adds the request id and the tokens."""
        self.cancelled: set[int] = set()  # choices that ended here; the source is to cancel them
        self._request = request
        self._timeline = timeline
        numbers = range(request.tokens.submit.num_choices)
        self._choices = [ChoiceOutput(request, number) for number in numbers]
        self._is_held = request.is_held
        self._reasons: dict[int, inference_pb2.FinishReason] = {}  # of the choices that ended
        # How much the client has of each choice. An answer that is held starts again.
        self._progress = {} if self._is_held else request.progress
        self._marks = {} if self._is_held else request.marks
        ended = {number for number, progress in self._progress.items() if progress.has_ended}
        self._open = set(numbers) - ended
        # Messages that wait for the end: all of an answer that is held, else the last ones.
        self._ranked = JoinedAnswer()
        self._last: list[inference_pb2.GenerateResponse] = []
        # Of the prompt when it was first computed; the answer itself may be cached now.
        self._cached_tokens = request.cached_tokens
        self._has_begun = False  # a message was yielded
        self._signers: dict[int, ProgressSigner] = {}  # by choice
        # For the next message of choice 0.
        self._prompt_logprobs: list[inference_pb2.TokenLogprobs] = []
        submit = request.tokens.submit
        if submit.HasField("prompt_logprobs") and len(submit.token_ids) == 1:  # no scores will come
            self._prompt_logprobs = prompt_logprobs(request.tokenizer, submit.token_ids, ())

    @property
    def num_generated(self) -> int:
        """The number of tokens that were generated here until now."""
        return sum(choice.num_generated for choice in self._choices)

    @property
    def longest_choice(self) -> int:
        """The largest number of tokens that were generated here for one choice until now."""
        return max(choice.num_generated for choice in self._choices)

    @property
    def finish_reasons(self) -> "list[inference_pb2.FinishReason]":
        """The finish reasons of the answered choices that have ended.

        Of an answer that is held, no choice has ended before all have: the client has none of it.
        """
        if not self._is_held:
            return list(self._reasons.values())
        if self._open:
            return []
        best = sorted(self._reasons, key=self._rank)[: self._request.num_returned]
        return [self._reasons[number] for number in best]

    async def run(
        self,
        deltas: AsyncGenerator[TokenDelta, None],
        execution: AbstractContextManager[object] | None = None,
    ) -> AsyncGenerator[inference_pb2.GenerateResponse, None]:
        """Yields the messages of the tokens of a source, in the form of GenerationService.run.

        Closes `deltas`. Stays in the context `execution` from its first step until the source has
        ended. Raises InternalError if the source breaks its contract: no index is missing or
        repeated, nothing follows the end.
        """
        with self._charged(execution or nullcontext()):
            async with aclosing(deltas):
                cost = self._request.stops.token_cost
                for number, progress in self._progress.items():
                    restore = self._choices[number].restore
                    await SCORING.run("", cost * len(progress.ids), restore, progress)
                source = split_at(deltas, self._marks) if self._marks else deltas
                if self._request.has_event_ids and self._choices[0].is_parsed:
                    # As `delivered` replays them: items of agents begin and end at the same tokens.
                    source = token_by_token(source, self._open)
                async for delta in source:
                    if delta.choice not in self._open:
                        raise InternalError(BROKEN)
                    if delta.prompt_logprobs:
                        await self._take_prompt(delta.prompt_logprobs)
                    push = self._choices[delta.choice].push
                    message = await SCORING.run("", cost * len(delta.ids), push, delta)
                    self._end_known(message)
                    self._note(delta, message)
                    if not self._waits_for_end(message):
                        yield self._signed(message)
                    elif not self._open and delta.finish_reason == UNFINISHED:
                        break  # by a stop string or a call: closing the source cancels the rest
        if self._open:
            raise InternalError(BROKEN)
        for message in self._messages_after_end():
            yield self._signed(message)

    @contextmanager
    def _charged(self, execution: AbstractContextManager[object]) -> Iterator[None]:
        """Charges the caller for the tokens of `execution`, even if it fails or is cancelled."""
        was_left = False
        try:
            with execution:
                yield
        except (asyncio.CancelledError, Cancelled, DeadlineExceeded):
            was_left = True  # its client or its deadline ended it
            raise
        except TandemError as error:
            if error.retry_after is not None and not self.num_generated:
                self._request.give_back()  # it was not the client that ended it
            raise
        finally:
            self._timeline.request_id = self._request.request_id  # the source writes its own
            self._request.quota.take_tokens(self._num_charged(was_left=was_left))

    def _num_charged(self, *, was_left: bool) -> int:
        """Returns the generated tokens that the caller pays for.

        A beam search computes the tokens of all its beams, and reports nothing before its end. A
        client that leaves it pays for all tokens that may have been computed.
        """
        if not self._request.tokens.has_beam_search:
            return self.num_generated
        submit = self._request.tokens.submit
        may_be_whole = was_left and self._timeline.attempts
        num_steps = submit.max_tokens if may_be_whole else self.longest_choice
        return submit.beam_search.width * num_steps

    async def _take_prompt(self, scores: Sequence[worker_pb2.TokenScores]) -> None:
        """Takes the scores of the prompt after its first token."""
        prompt = self._request.tokens.submit.token_ids
        make = partial(prompt_logprobs, self._request.tokenizer, prompt, scores)
        self._prompt_logprobs = await SCORING.run("", len(scores), make)

    def _note(self, delta: TokenDelta, message: inference_pb2.GenerateResponse) -> None:
        """Adds the prompt's log probabilities to a message; notes the end of its choice."""
        if self._prompt_logprobs and message.choice == 0:
            message.prompt_logprobs.extend(self._prompt_logprobs)
            self._prompt_logprobs = []
        if message.finish_reason != UNFINISHED:
            self._open.discard(message.choice)
            self._reasons[message.choice] = message.finish_reason
            if delta.finish_reason == UNFINISHED:
                self.cancelled.add(message.choice)

    def _end_known(self, message: inference_pb2.GenerateResponse) -> None:
        """Ends a recomputed choice at its earlier end if max_time_ms ended it there.

        Its tokens do not show that end, so it would continue.
        """
        mark = self._marks.get(message.choice)
        if mark is None or not mark.has_ended or message.finish_reason != UNFINISHED:
            return
        if self._choices[message.choice].num_tokens >= mark.num_tokens:
            message.finish_reason = inference_pb2.FINISH_REASON_TIME

    def _waits_for_end(self, message: inference_pb2.GenerateResponse) -> bool:
        """Keeps a message that waits for the end of all choices; returns True if it does."""
        if self._is_held:
            self._ranked.add(message)
            return True
        if self._open and not self._is_last(message):
            return False
        self._last.append(message)
        return True

    def _is_last(self, message: inference_pb2.GenerateResponse) -> bool:
        """Returns True if this message ends the last choice that the client lacks.

        Choices that the client has in full may still be open here, because they are computed again.
        """
        if not self._request.marks or message.finish_reason == UNFINISHED:
            return False
        whole = {number for number, mark in self._request.marks.items() if mark.has_ended}
        return message.choice not in whole and self._open <= whole

    def _is_known(self, message: inference_pb2.GenerateResponse) -> bool:
        """Returns True if the message ends a choice that the client has, computed again."""
        mark = self._request.marks.get(message.choice)
        return mark is not None and mark.has_ended

    def _messages_after_end(self) -> list[inference_pb2.GenerateResponse]:
        """Returns the messages after the end of all completions; the last has the usage."""
        request = self._request
        messages = self._last
        if self._is_held:  # the client has all of a choice or nothing of it
            messages = self._ranked.messages()
            if not request.tokens.has_beam_search:
                messages = self._best(messages)
            messages = [each for each in messages if each.choice not in request.progress]
        # The usage comes with a message that the client does not have.
        messages.sort(key=lambda message: not self._is_known(message))
        num_tokens = sum(choice.num_tokens for choice in self._choices)
        self._timeline.completion_tokens = num_tokens
        usage = messages[-1].usage
        usage.prompt_tokens = len(request.tokens.submit.token_ids)
        usage.completion_tokens = num_tokens
        usage.cached_tokens = self._num_cached()
        usage.cache_write_tokens = self._num_written()
        usage.reasoning_tokens = sum(choice.num_reasoning_tokens for choice in self._choices)
        usage.dropped_messages = request.dropped_messages
        return messages

    def _best(
        self, messages: list[inference_pb2.GenerateResponse]
    ) -> list[inference_pb2.GenerateResponse]:
        """Returns the completions of the highest mean log probability, renumbered from the best.

        `messages`: one of each completion. The best gets the prompt's log probabilities.
        """
        of_prompt = messages[0].prompt_logprobs[:]
        del messages[0].prompt_logprobs[:]
        ranked = sorted(messages, key=lambda message: self._rank(message.choice))
        best = ranked[: self._request.num_returned]
        for number, message in enumerate(best):
            message.choice = number
        best[0].prompt_logprobs.extend(of_prompt)
        return best

    def _rank(self, number: int) -> tuple[bool, float, int]:
        """Returns the sort key of a completion: one that the time has left empty comes last."""
        choice = self._choices[number]
        return not choice.num_tokens, -choice.mean_logprob, number

    def _signed(self, message: inference_pb2.GenerateResponse) -> inference_pb2.GenerateResponse:
        """Adds the resume token, and to the first message the cached tokens of the prompt."""
        if not self._has_begun:
            self._has_begun = True
            self._cached_tokens = message.cached_tokens = self._num_cached()
            message.cache_write_tokens = self._num_written()
        binding = self._request.resume
        number = message.choice
        if binding is None or self._request.has_event_ids:
            return message
        signer = self._signers.get(number)
        if signer is None:
            emitted = self._progress[number].ids if number in self._progress else ()
            signer = self._signers[number] = ProgressSigner(binding, number, emitted)
        ids = message.token_ids[:]  # a list, which array reads three times as fast
        has_ended = message.finish_reason != UNFINISHED
        message.resume_token = signer.sign(ids, has_ended, self._num_cached())
        return message

    def _num_written(self) -> int:
        """Returns the tokens of prefixes to retain that were not cached before.

        There are none without a token: max_time_ms ended the request before its prompt was
        computed.
        """
        if not any(choice.num_received for choice in self._choices):
            return 0
        return max(self._request.tokens.retained_tokens - self._num_cached(), 0)

    def _num_cached(self) -> int:
        """Returns the tokens of the prompt that were cached when it was first computed."""
        if self._cached_tokens is None:
            return self._timeline.cached_tokens
        return self._cached_tokens
