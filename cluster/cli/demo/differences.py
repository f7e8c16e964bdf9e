"""Compares the completions of two runs of the same requests. Does no I/O."""

from collections.abc import Sequence
from itertools import takewhile, zip_longest
from typing import Any, Final

from ....router.client.types import Choice

_FIELDS: Final = ("token_ids", "text", "finish_reason", "logprobs", "tool_calls")
_SHOWN: Final = 40  # characters of a text


def count_differing_tokens(found: Sequence[Choice], expected: Sequence[Choice]) -> int:
    """Returns the number of token positions at which two completions differ.

    A position that only one of them has counts as different.
    """
    return sum(
        left != right
        for one, other in zip_longest(map(_ids, found), map(_ids, expected), fillvalue=())
        for left, right in zip_longest(one, other)
    )


def first_difference(found: Sequence[Choice], expected: Sequence[Choice]) -> str:
    """Returns a line about the first difference of two completions; empty if they are equal.

    Compares token ids, texts, finish reasons, log probabilities, and the names and arguments of
    tool calls; each call has a random id.
    """
    if len(found) != len(expected):
        return f"{len(found)} choices instead of {len(expected)}"
    for index, (one, other) in enumerate(zip(found, expected, strict=True)):
        for name in _FIELDS:
            left, right = _field(one, name), _field(other, name)
            if left == right:
                continue
            if isinstance(left, str):
                return (
                    f"{name} of choice {index}: {left[-_SHOWN:]!r} instead of {right[-_SHOWN:]!r}"
                )
            # One of them may be the beginning of the other.
            pairs = zip(left, right, strict=False)
            num_equal = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
            return (
                f"{name} of choice {index}: {len(left)} instead of {len(right)}, equal up to "
                f"{num_equal}"
            )
    return ""


def _ids(choice: Choice) -> tuple[int, ...]:
    return choice.token_ids


def _field(choice: Choice, name: str) -> Any:
    """Returns a field of a choice in a form that is the same in two runs."""
    if name == "tool_calls":
        return [(call.name, call.arguments) for call in choice.tool_calls]
    return getattr(choice, name)
