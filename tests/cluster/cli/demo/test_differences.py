"""Tests the comparison of two completions: equal ones, and each kind of difference."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.cluster.cli.demo.differences import count_differing_tokens, first_difference
from tandem.proto import inference_pb2
from tandem.router.client.types import Choice, Logprob, TokenLogprobs

TOKENS = st.lists(st.integers(0, 3), max_size=6).map(tuple)


def choice(ids: tuple[int, ...] = (1, 2, 3), **fields: Any) -> Choice:
    return Choice(**({"text": "abc", "token_ids": ids, "finish_reason": "stop"} | fields))


@given(st.lists(TOKENS, max_size=4))
def test_a_completion_equals_itself(found: list[tuple[int, ...]]) -> None:
    choices = list(map(choice, found))
    assert count_differing_tokens(choices, choices) == 0
    assert first_difference(choices, choices) == ""


@given(st.lists(st.tuples(TOKENS, TOKENS), max_size=4))
def test_each_position_counts_once(pairs: list[tuple[tuple[int, ...], tuple[int, ...]]]) -> None:
    found, expected = (
        ([choice(ids) for ids in side] for side in zip(*pairs, strict=True))
        if (pairs)
        else ([], [])
    )
    num_equal = sum(
        left == right for one, other in pairs for left, right in zip(one, other, strict=False)
    )
    longest = sum(max(len(one), len(other)) for one, other in pairs)
    assert count_differing_tokens(found, expected) == longest - num_equal
    assert bool(first_difference(found, expected)) == any(one != other for one, other in pairs)


def test_a_lost_stream_lacks_each_token() -> None:
    assert count_differing_tokens([], [choice(), choice((4,))]) == 4
    assert first_difference([], [choice()]) == "0 choices instead of 1"


def call(**fields: str) -> inference_pb2.ToolCall:
    return inference_pb2.ToolCall(**({"id": "a", "name": "plan", "arguments": "{}"} | fields))


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"text": "abd"}, "text"),
        ({"finish_reason": "length"}, "finish_reason"),
        ({"token_ids": (1, 2, 4)}, "token_ids"),
        ({"tool_calls": (call(arguments="[]"),)}, "tool_calls"),
        (
            {
                "logprobs": (
                    TokenLogprobs(token=Logprob(token_id=1, token_bytes=b"a", logprob=-1), top=()),
                )
            },
            "logprobs",
        ),
    ],
)
def test_each_field_is_compared(fields: dict[str, Any], name: str) -> None:
    expected = choice(tool_calls=(call(),))
    assert first_difference([replace(expected, **fields)], [expected]).startswith(
        f"{name} of choice 0: "
    )


def test_ids_of_tool_calls_may_differ() -> None:
    found, expected = choice(tool_calls=(call(),)), choice(tool_calls=(call(id="b"),))
    assert first_difference([found], [expected]) == ""
