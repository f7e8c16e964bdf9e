"""Strategies of bytes: any, and valid ones with some places changed."""

from collections.abc import Sequence

from hypothesis import strategies as st

_TOKENS = (
    *(
        b'"',
        b"{",
        b"}",
        b"[",
        b"]",
        b":",
        b",",
        b"\\",
        b"\xff",
        b"\x00",
        b"null",
        b"-1",
        b"1e999",
        b"NaN",
        b"&a",
        b"*a",
    ),
    *(
        b"\xed\xa0\x80",
        b"\\ud800",
        b"9" * 40,
        b"[" * 2_000,
        b'{"a":' * 2_000,
        b"\xc1" * 9,
        b"\xdd\xff\xff\xff\xff",
    ),
)


@st.composite
def changed(draw: st.DrawFn, seeds: Sequence[bytes]) -> bytes:
    """A seed of which up to four spans are replaced by other bytes, by nothing, or by a part of a
    seed.
    """
    data = draw(st.sampled_from(seeds))
    for _ in range(draw(st.integers(1, 4))):
        begin = draw(st.integers(0, len(data)))
        end = draw(st.integers(begin, min(len(data), begin + 16)))
        part = draw(st.sampled_from(seeds))[begin:]
        other = st.binary(max_size=8) | st.sampled_from(_TOKENS) | st.just(part)
        data = data[:begin] + draw(other) + data[end:]
    return data


def inputs(seeds: Sequence[bytes]) -> st.SearchStrategy[bytes]:
    """Mostly changed seeds, and bytes of any kind."""
    return st.one_of(changed(seeds), changed(seeds), st.binary(max_size=200))
