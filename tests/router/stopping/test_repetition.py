"""Repetitions end a completion at the exact token, whatever pieces its tokens arrive in."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.router.stopping.repetition import RepetitionStop
from tandem.tests.examples import num_examples

IDS = st.lists(st.integers(1, 3), max_size=60)


def end_of(ids: list[int], ngram: int, count: int, min_tokens: int) -> int | None:
    """Returns the first length at which the last n-gram has occurred `count` times in a row."""
    size = ngram * count
    for end in range(max(size, min_tokens), len(ids) + 1):
        last = ids[end - size : end]
        if last == last[-ngram:] * count:
            return end
    return None


@given(
    ids=IDS,
    ngram=st.integers(1, 5),
    count=st.integers(2, 5),
    min_tokens=st.integers(0, 20),
    cuts=st.lists(st.integers(1, 7), min_size=1),
)
@settings(max_examples=num_examples(200))
def test_the_end_is_where_the_definition_says(
    ids: list[int], ngram: int, count: int, min_tokens: int, cuts: list[int]
) -> None:
    search = RepetitionStop(ngram, count, min_tokens)
    start = number = 0
    found = None
    while start < len(ids) and found is None:
        piece = ids[start : start + cuts[number % len(cuts)]]
        end = search.push(piece)
        found = None if end is None else start + end
        start += len(piece)
        number += 1
    assert found == end_of(ids, ngram, count, min_tokens)


@pytest.mark.parametrize(
    ("ids", "ngram", "count", "end"),
    [
        ([5, 5, 5, 5], 1, 4, 4),
        ([5, 5, 6, 5, 5], 1, 3, None),
        ([1, 2, 1, 2, 1, 2], 2, 3, 6),
        ([9, 1, 2, 1, 2, 1], 2, 2, 5),
        ([1, 2, 3, 1, 2, 4, 1, 2, 3], 3, 2, None),
    ],
)
def test_examples(ids: list[int], ngram: int, count: int, end: int | None) -> None:
    assert RepetitionStop(ngram, count).push(ids) == end
