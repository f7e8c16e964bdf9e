"""Tests the hashes of blocks, and that data in place of tokens is part of them."""

import hashlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.proto.hashing import (
    ReplacedSpan,
    hash_chain,
    hash_context,
    hash_prompt,
)

BLOCK = 4
TOKENS = st.lists(st.integers(0, 2**32 - 1), min_size=2 * BLOCK, max_size=6 * BLOCK)


def digest(number: int) -> bytes:
    return hashlib.blake2b(bytes([number]), digest_size=16).digest()


@st.composite
def spans(draw: st.DrawFn, num_tokens: int) -> list[ReplacedSpan]:
    """Draws one to three spans, which may be adjacent and have the same data."""
    found: list[ReplacedSpan] = []
    begin = 0
    for _ in range(draw(st.integers(1, 3))):
        if begin == num_tokens:
            break
        first = draw(st.integers(begin, num_tokens - 1))
        size = draw(st.integers(1, num_tokens - first))
        found.append(ReplacedSpan(first, size, digest(draw(st.integers(0, 1)))))
        begin = first + size
    return found


def test_hashes_of_tokens_alone_stay_as_they_are() -> None:
    """Caches on disk and resume tokens of earlier versions name blocks by them."""
    assert [each.hex() for each in hash_chain(range(8), 4)] == [
        "adad08620d66a81a7b4e85de9e67b973",
        "6682dc643dc8a79a4461c96cb0e362a6",
    ]
    assert hash_prompt(range(5), b"salt").hex() == "e5f095aab51038ba126fabe1af6879c2"


@given(st.data(), TOKENS)
def test_a_span_changes_the_hashes_from_its_first_block_on(
    data: st.DataObject, tokens: list[int]
) -> None:
    replaced = data.draw(spans(len(tokens)))
    plain = hash_chain(tokens, BLOCK)
    found = hash_chain(tokens, BLOCK, b"", replaced)
    num_same = replaced[0].first // BLOCK
    assert found[:num_same] == plain[:num_same]
    assert set(found[num_same:]).isdisjoint(plain)
    assert hash_prompt(tokens, b"", replaced) != hash_prompt(tokens)


@given(st.data(), TOKENS)
def test_blocks_share_a_hash_only_with_the_same_data_in_the_same_places(
    data: st.DataObject, tokens: list[int]
) -> None:
    one, other = data.draw(spans(len(tokens))), data.draw(spans(len(tokens)))
    # By token: its span's digest and its place in the span.
    seen = [
        {
            span.first + place: (span.digest, place)
            for span in each
            for place in range(span.num_tokens)
        }
        for each in (one, other)
    ]
    chains = [hash_chain(tokens, BLOCK, b"", each) for each in (one, other)]
    for number, (mine, theirs) in enumerate(zip(*chains, strict=True), 1):
        covered = range(number * BLOCK)
        is_same = [*map(seen[0].get, covered)] == [*map(seen[1].get, covered)]
        assert (mine == theirs) == is_same


def test_one_image_of_eight_tokens_is_not_one_of_four_twice() -> None:
    halves = [ReplacedSpan(0, 4, digest(1)), ReplacedSpan(4, 4, digest(1))]
    chains = [
        hash_chain(range(8), BLOCK, b"", each) for each in ([ReplacedSpan(0, 8, digest(1))], halves)
    ]
    assert chains[0][0] == chains[1][0]
    assert chains[0][1] != chains[1][1]


@pytest.mark.parametrize(
    ("num_words", "expected"),
    [(1, "6224939a79f5f593"), (2, "db9bc2577fcc2a3f")],
)
def test_contexts_are_hashed_by_siphash(num_words: int, expected: str) -> None:
    """The vectors of its authors: the bytes 0, 1, 2, ... under the key 0, 1, 2, ..., 15."""
    words = [
        int.from_bytes(bytes(range(8 * n, 8 * n + 8)), "little", signed=True)
        for n in range(num_words)
    ]
    rows = [np.array([word, 5], np.int64) for word in words]
    hashes = hash_context(bytes(range(16)), rows)
    assert hashes[0].tobytes().hex() == expected
    assert hashes[0] != hashes[1]
