"""Defines the results of `LLM`, in the form of vLLM."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from ...router.client.types import (
    Choice,
    Completion,
    FinishReason,
    Timeline,
    TokenLogprobs,
    ToolCall,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankedLogprob:
    """Holds the log probability of a token that was generated, or could have been."""

    logprob: float
    rank: int  # 1 is the likeliest token of the vocabulary
    decoded_token: str


LogprobsByToken = dict[int, RankedLogprob]
"""A token and its alternatives, by token id."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionOutput:
    """Holds one completion of a prompt."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    # The stop string, the text matched by stop_regex, or the id of the requested stop token.
    stop_reason: str | int | None = None
    cumulative_logprob: float | None = None  # of all tokens, if log probabilities were asked for
    logprobs: list[LogprobsByToken] | None = None  # one for each of token_ids
    tool_calls: tuple[ToolCall, ...] = ()  # their text is not in `text`
    score: float = 0.0  # of a beam search
    reasoning: str = ""  # the model's reasoning before its answer in a chat; not in `text`

    @classmethod
    def from_choice(cls, index: int, choice: Choice, *, has_logprobs: bool) -> Self:
        known = [each.token.logprob or 0.0 for each in choice.logprobs]
        return cls(
            index=index,
            text=choice.text,
            token_ids=list(choice.token_ids),
            finish_reason=choice.finish_reason,
            stop_reason=choice.stop_reason,
            cumulative_logprob=sum(known) if has_logprobs else None,
            logprobs=list(map(_by_token, choice.logprobs)) if has_logprobs else None,
            tool_calls=choice.tool_calls,
            score=choice.score,
            reasoning=choice.reasoning,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOutput:
    """Holds the completions of one prompt.

    After `best_of` above `n` and after beam search, the best one comes first.
    """

    request_id: str
    prompt: str | None  # None if it was given as token ids
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    num_cached_tokens: int  # of the prompt, found in the prefix cache
    timeline: Timeline  # the time of each part
    # One for each token of the prompt; None for the first.
    prompt_logprobs: list[LogprobsByToken | None] | None = None
    finished: bool = True

    @classmethod
    def from_completion(
        cls,
        completion: Completion,
        prompt: str | None,
        prompt_token_ids: Sequence[int],
        *,
        has_logprobs: bool,
    ) -> Self:
        """Converts the completion of a client.

        `has_logprobs`: log probabilities of the completions were requested, which a completion
        without tokens does not show.
        """
        scores = completion.prompt_logprobs
        return cls(
            request_id=completion.request_id,
            prompt=prompt,
            prompt_token_ids=list(prompt_token_ids),
            outputs=[
                CompletionOutput.from_choice(index, choice, has_logprobs=has_logprobs)
                for index, choice in enumerate(completion.choices)
            ],
            num_cached_tokens=completion.usage.cached_tokens,
            timeline=completion.timeline,
            prompt_logprobs=[_by_token(each) or None for each in scores] if scores else None,
        )


def _by_token(scores: TokenLogprobs) -> LogprobsByToken:
    """Returns the scores of the token and then of its alternatives."""
    found: LogprobsByToken = {}
    for each in (scores.token, *scores.top):
        if each.logprob is not None:
            ranked = RankedLogprob(logprob=each.logprob, rank=each.rank, decoded_token=each.text)
            found.setdefault(each.token_id, ranked)
    return found
