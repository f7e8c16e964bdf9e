"""Holds the results of `LLM`, in the form of vLLM's."""

from collections.abc import Collection, Sequence
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
    rank: int  # in the order of the vocabulary; 1 is the likeliest
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
    stop_reason: str | int | None = (
        None  # the stop string, or the id of the stop token that was asked for
    )
    cumulative_logprob: float | None = None  # of all tokens, if log probabilities were asked for
    logprobs: list[LogprobsByToken] | None = None  # one for each of token_ids
    tool_calls: tuple[ToolCall, ...] = ()  # their text is not in `text`
    score: float = 0.0  # of a beam search
    reasoning: str = ""  # what the model thought before it spoke, in a chat; not in `text`

    @classmethod
    def from_choice(
        cls, index: int, choice: Choice, stop_ids: Collection[int], *, has_logprobs: bool
    ) -> Self:
        stopped = (
            choice.token_ids[-1] if choice.token_ids and choice.finish_reason != "length" else None
        )
        known = [each.token.logprob or 0.0 for each in choice.logprobs]
        return cls(
            index=index,
            text=choice.text,
            token_ids=list(choice.token_ids),
            finish_reason=choice.finish_reason,
            stop_reason=choice.stop_string or (stopped if stopped in stop_ids else None),
            cumulative_logprob=sum(known) if has_logprobs else None,
            logprobs=list(map(_by_token, choice.logprobs)) if has_logprobs else None,
            tool_calls=choice.tool_calls,
            score=choice.score,
            reasoning=choice.reasoning,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOutput:
    """Holds the completions of one prompt, after `best_of` and beam search the best first."""

    request_id: str
    prompt: str | None  # None if it was given as token ids
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    num_cached_tokens: int  # of the prompt, found in the prefix cache
    timeline: Timeline  # where the time went
    prompt_logprobs: list[LogprobsByToken | None] | None = (
        None  # one for each token of the prompt; the first has none
    )
    finished: bool = True

    @classmethod
    def from_completion(
        cls,
        completion: Completion,
        prompt: str | None,
        prompt_token_ids: Sequence[int],
        stop_ids: Collection[int] = (),
        *,
        has_logprobs: bool,
    ) -> Self:
        """`stop_ids`: tokens that were asked to end completions. `has_logprobs`: of the
        completions, which without tokens do not show whether they were asked for.
        """
        scores = completion.prompt_logprobs
        return cls(
            request_id=completion.request_id,
            prompt=prompt,
            prompt_token_ids=list(prompt_token_ids),
            outputs=[
                CompletionOutput.from_choice(index, choice, stop_ids, has_logprobs=has_logprobs)
                for index, choice in enumerate(completion.choices)
            ],
            num_cached_tokens=completion.usage.cached_tokens,
            timeline=completion.timeline,
            prompt_logprobs=[_by_token(each) or None for each in scores] if scores else None,
        )


def _by_token(scores: TokenLogprobs) -> LogprobsByToken:
    """Returns the token itself first, then its alternatives."""
    found: LogprobsByToken = {}
    for each in (scores.token, *scores.top):
        if each.logprob is not None:
            ranked = RankedLogprob(logprob=each.logprob, rank=each.rank, decoded_token=each.text)
            found.setdefault(each.token_id, ranked)
    return found
