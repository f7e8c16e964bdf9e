"""Splits deltas whose tokens must not share a message."""

from collections.abc import AsyncGenerator, Collection, Mapping
from dataclasses import replace

from ..request import TokenDelta
from ..resume.tokens import ChoiceMark
from .choice import UNFINISHED


async def split_at(
    deltas: AsyncGenerator[TokenDelta, None], marks: Mapping[int, ChoiceMark]
) -> AsyncGenerator[TokenDelta, None]:
    """Yields the deltas; splits those that have tokens before and after the mark of their choice.

    So no message has both tokens that the client has and new ones.
    """
    async for delta in deltas:
        mark = marks.get(delta.choice)
        num_known = 0 if mark is None else mark.num_tokens - delta.first_index
        if mark is None or not 0 < num_known < len(delta.ids):
            yield delta
            continue
        yield _part(delta, 0, num_known)
        if mark.has_ended:  # by a rule of the router, after which tokens may come
            continue
        yield _part(delta, num_known, len(delta.ids))


async def token_by_token(
    deltas: AsyncGenerator[TokenDelta, None], open_choices: Collection[int]
) -> AsyncGenerator[TokenDelta, None]:
    """Yields the deltas with one token each, up to the end of each choice.

    A message has its text before its calls, so only a message of one token keeps their order.
    `open_choices` is a live collection of the choices that have not ended.
    """
    async for delta in deltas:
        for start in range(max(len(delta.ids), 1)):
            yield _part(delta, start, start + 1)
            if delta.choice not in open_choices:  # the token ended it; the others do not count
                break


def _part(delta: TokenDelta, start: int, end: int) -> TokenDelta:
    """Returns the delta of the tokens from `start` to `end`."""
    is_first, is_last = start == 0, end >= len(delta.ids)
    if is_first and is_last:
        return delta
    return replace(
        delta,
        first_index=delta.first_index + start,
        ids=delta.ids[start:end],
        logprobs=delta.logprobs[start:end],
        prompt_logprobs=delta.prompt_logprobs if is_first else (),
        embedding=delta.embedding if is_first else (),
        finish_reason=delta.finish_reason if is_last else UNFINISHED,
        score=delta.score if is_last else 0.0,
    )
