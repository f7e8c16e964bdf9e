"""Text that arrives in pieces is cut as the whole text would be, by stop strings and stop_regex."""

import re
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.router.stopping.pattern import MAX_POSITIONS, compile_pattern
from tandem.router.stopping.text import MAX_HELD, PatternSearch, StopTexts, _fallbacks
from tandem.tests.examples import num_examples

CUTS = st.lists(st.integers(1, 5), min_size=1, max_size=10)
LETTERS = st.text("ab\n", max_size=30)
STOPS = st.lists(st.text("ab", min_size=1, max_size=6), max_size=4)
ATOMS = st.sampled_from(["a", "b", "ab", ".", "[ab]", "[^a]", r"\s", r"\n", "aab", r"\x61"])


def grown(parts: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    """Makes larger patterns of smaller ones."""
    quantifiers = ["*", "+", "?", "{2}", "{1,3}", "{0,2}", "{2,}", "{,2}", "*?", "+?", "{1,2}?"]
    return (
        st.lists(parts, min_size=1, max_size=3).map("".join)
        | st.lists(parts, min_size=2, max_size=3).map(lambda each: f"({'|'.join(each)})")
        | st.tuples(parts, st.sampled_from(quantifiers)).map(lambda each: f"(?:{each[0]}){each[1]}")
    )


PATTERNS = st.recursive(ATOMS, grown, max_leaves=6).filter(
    lambda pattern: re.fullmatch(pattern, "") is None
)


def cut_naively(text: str, stops: Sequence[str], pattern: str = "") -> tuple[str, str]:
    """Returns the text before the match that ends first, and the match: of several the longest."""
    for end in range(1, len(text) + 1):
        for begin in range(end):
            match = text[begin:end]
            if match in stops or (pattern and re.fullmatch(pattern, match)):
                return text[:begin], match
    return text, ""


def check_cut(search: StopTexts, text: str, cuts: Sequence[int], expected: str) -> None:
    """Pushes the text in pieces; fails if the text that is shown is not the expected one."""
    shown = ""
    stopped = False
    start = number = 0
    while start < len(text) and not stopped:
        end = start + cuts[number % len(cuts)]
        piece, stopped = search.push(text[start:end])
        shown += piece
        assert expected.startswith(shown)  # nothing is shown that a match takes back
        start = end
        number += 1
    assert shown + search.flush() == expected
    assert stopped == bool(search.found)


@given(LETTERS, STOPS, CUTS)
@settings(max_examples=num_examples(300))
def test_stop_strings_cut_as_in_the_whole_text(
    text: str, stops: list[str], cuts: list[int]
) -> None:
    expected, match = cut_naively(text, stops)
    search = StopTexts(stops)
    check_cut(search, text, cuts, expected)
    assert search.found == match


@given(LETTERS, STOPS, PATTERNS, CUTS)
@settings(max_examples=num_examples(200))
def test_a_pattern_cuts_as_in_the_whole_text(
    text: str, stops: list[str], pattern: str, cuts: list[int]
) -> None:
    """Python's `re`, asked about each part of the text, is the reference."""
    expected, match = cut_naively(text, stops, pattern)
    search = StopTexts(stops, compile_pattern(pattern))
    check_cut(search, text, cuts, expected)
    assert search.found == match


@given(st.integers(0, 20), CUTS)
def test_of_a_long_match_the_begin_is_shown(extra: int, cuts: list[int]) -> None:
    length = MAX_HELD - 10 + extra
    text = "x" + "a" * (length - 1) + "b"
    search = StopTexts((), compile_pattern("a+b"))
    check_cut(search, text, [50 * cut for cut in cuts], text[: max(1, len(text) - MAX_HELD)])
    assert len(search.found) == min(length, MAX_HELD)


def test_held_text_is_the_least_possible() -> None:
    search = StopTexts(["\n\nUser:"], compile_pattern(r"Step \d+:"))
    assert search.push("Hello\n") == ("Hello", False)
    assert search.push("\nUs") == ("", False)
    assert search.push("a St") == ("\n\nUsa ", False)
    assert search.push("ep 1") == ("", False)
    assert search.push("2.") == ("Step 12.", False)
    assert search.push("Step 34: x") == ("", True)
    assert search.found == "Step 34:"


def test_text_without_rules_is_not_held() -> None:
    assert StopTexts([]).push("abc") == ("abc", False)


@pytest.mark.parametrize("pattern", ["(a+)+b", "a*a*a*b", "(a|a)*b", "(a?){64}b", ".{100}b"])
def test_a_character_costs_at_most_a_step_for_each_position(pattern: str) -> None:
    """A backtracking engine would need 2 ** 2,000 steps for the first pattern."""
    search = PatternSearch(compile_pattern(pattern))
    for _ in range(2_000):
        assert search.step("a") == 0
        begins, positions = zip(*search._groups, strict=True)
        assert list(begins) == sorted(begins)
        assert sum(each.bit_count() for each in positions) <= MAX_POSITIONS
    assert search.step("b") > 0


def test_stop_strings_are_prepared_once_for_all_completions_of_a_body() -> None:
    """They take 2 ms of the event loop, and a body may ask for 256 completions.

    That would stop all streams for half a second.
    """
    stops = [f"{number}{'ab' * 500}" for number in range(16)]
    before = _fallbacks.cache_info().misses
    for _ in range(256):
        assert StopTexts(stops).push("x") == ("x", False)
    assert _fallbacks.cache_info().misses == before + 16
