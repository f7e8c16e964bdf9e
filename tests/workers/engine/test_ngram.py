"""What is guessed to follow is what followed the longest n-gram when it came last, and little is
guessed in vain.
"""

import random
from collections.abc import Sequence
from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from tandem.workers.engine.config import SpeculativeConfig
from tandem.workers.engine.ngram import Drafter, NgramIndex

CONFIG = SpeculativeConfig(prompt_lookup_min=2, prompt_lookup_max=3)
TEXTS = st.lists(st.lists(st.integers(0, 3), max_size=12), min_size=1, max_size=8)


def search(tokens: Sequence[int], shortest: int, longest: int) -> int | None:
    """Looks at every place, the last first, for every length, the longest first."""
    for length in range(min(longest, len(tokens) - 1), shortest - 1, -1):
        for end in range(len(tokens) - 1, length - 1, -1):
            if tokens[end - length : end] == tokens[len(tokens) - length :]:
                return end
    return None


@given(texts=TEXTS, shortest=st.integers(1, 4), more=st.integers(0, 3))
def test_the_index_finds_what_a_search_of_all_places_finds(
    texts: list[list[int]], shortest: int, more: int
) -> None:
    """However many tokens come between two calls."""
    index = NgramIndex(shortest, shortest + more)
    for tokens in accumulate(texts):
        assert index.find(tokens) == search(tokens, shortest, shortest + more)


def test_a_long_prompt_is_read_piece_by_piece() -> None:
    rng = random.Random(0)
    tokens = rng.choices(range(50), k=5000)
    index = NgramIndex(2, 4)
    assert [index.find(tokens) for _ in range(9)] == [None] * 9
    for _ in range(20):
        assert index.find(tokens) == search(tokens, 2, 4)
        tokens.append(rng.randrange(50))


@given(tokens=st.lists(st.integers(0, 2), max_size=40), room=st.integers(-1, 9))
def test_a_draft_continues_from_where_the_n_gram_came_last(tokens: list[int], room: int) -> None:
    draft = Drafter(CONFIG).draft(tokens, room)
    at = search(tokens, 2, 3)
    assert (len(draft) > 0) == (at is not None and room > 0)
    assert len(draft) <= max(room, 0)
    known = list(tokens)
    for number, token in enumerate(draft):
        assert at is not None
        assert (
            token == known[at + number]
        )  # of the draft itself, where the text repeats itself at once
        known.append(token)


def test_drafts_grow_while_they_are_right() -> None:
    drafter, tokens, lengths = Drafter(CONFIG), [1, 2, 3] * 3, []
    for _ in range(12):
        draft = drafter.draft(tokens, 64)
        lengths.append(len(draft))
        drafter.record(len(draft))
        tokens += [*draft, 1 + (len(tokens) + len(draft)) % 3]
    assert lengths == sorted(lengths)
    assert (lengths[0], lengths[-1]) == (3, CONFIG.num_speculative_tokens)


def test_drafts_become_rare_while_they_are_wrong_and_come_back() -> None:
    drafter, tokens, drafted = Drafter(CONFIG), [1, 1, 1], []
    for _ in range(400):
        if draft := drafter.draft(tokens, 64):
            drafted.append(len(draft))
            drafter.record(0)
        tokens.append(1)
    assert 10 < len(drafted) < 60, "of 400"
    assert drafted[-1] == 1
    for _ in range(200):
        draft = drafter.draft(tokens, 64)
        drafter.record(len(draft)) if draft else None
        tokens += [*draft, 1]
    assert len(drafter.draft(tokens, 64)) == CONFIG.num_speculative_tokens


def test_the_shortest_n_gram_is_no_longer_than_the_longest() -> None:
    with pytest.raises(
        ValidationError, match="prompt_lookup_min: must be at most prompt_lookup_max, 2, got 3"
    ):
        SpeculativeConfig(prompt_lookup_min=3, prompt_lookup_max=2)
