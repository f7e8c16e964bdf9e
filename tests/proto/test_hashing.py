"""Tests the hashes of blocks, and that data in place of tokens is part of them."""

import hashlib

from hypothesis import assume, given
from hypothesis import strategies as st

from tandem.proto.hashing import ReplacedSpan, hash_chain, hash_prompt

BLOCK = 4
TOKENS = st.lists(st.integers(0, 2**32 - 1), min_size=2 * BLOCK, max_size=6 * BLOCK)


def digest(number: int) -> bytes:
    return hashlib.blake2b(bytes([number]), digest_size=16).digest()


@st.composite
def spans(draw: st.DrawFn, num_tokens: int) -> ReplacedSpan:
    first = draw(st.integers(0, num_tokens - 1))
    return ReplacedSpan(
        first, draw(st.integers(1, num_tokens - first)), digest(draw(st.integers(0, 2)))
    )


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
    span = data.draw(spans(len(tokens)))
    plain = hash_chain(tokens, BLOCK)
    found = hash_chain(tokens, BLOCK, b"", [span])
    assert found[: span.first // BLOCK] == plain[: span.first // BLOCK]
    assert set(found[span.first // BLOCK :]).isdisjoint(plain)
    assert hash_prompt(tokens, b"", [span]) != hash_prompt(tokens)


@given(st.data(), TOKENS)
def test_blocks_share_a_hash_only_with_the_same_data_in_the_same_places(
    data: st.DataObject, tokens: list[int]
) -> None:
    one, other = data.draw(spans(len(tokens))), data.draw(spans(len(tokens)))
    assume(one != other)
    # The data of each token: its span's digest and its place in the span.
    seen = [
        [
            (span.digest, index - span.first) if 0 <= index - span.first < span.num_tokens else None
            for index in range(len(tokens))
        ]
        for span in (one, other)
    ]
    chains = [hash_chain(tokens, BLOCK, b"", [span]) for span in (one, other)]
    for number, (mine, theirs) in enumerate(zip(*chains, strict=True), 1):
        is_same = seen[0][: number * BLOCK] == seen[1][: number * BLOCK]
        assert (mine == theirs) == is_same
