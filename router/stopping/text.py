"""Cuts a text that arrives in pieces before what is to stop it: stop strings and stop_regex."""

from collections.abc import Sequence
from functools import lru_cache
from typing import Final, Protocol

from .pattern import StopPattern

MAX_HELD: Final = 1_024
"""Characters of a match of stop_regex that are held back; of a longer one the begin is shown."""


class StopSearch(Protocol):
    """Searches one kind of stop in a text, character by character."""

    num_held: int
    """The characters at the end of the text that may belong to a match."""

    def step(self, character: str) -> int:
        """Takes the next character; returns the length of the match that it ends, 0 without one.

        The length is at most `num_held` before plus 1. After a match, step no more.
        """
        ...


class StopTexts:
    """Cuts a text before the match that is complete first.

    Of several matches that end at the same character the longest counts. The result does not depend
    on how the text is cut into pieces.
    """

    def __init__(self, stops: Sequence[str], pattern: StopPattern | None = None) -> None:
        """`stops`: texts of at least one character each."""
        self.found = ""  # the text that has matched
        self._searches: list[StopSearch] = []
        if stops:
            self._searches.append(StopStrings(stops))
        if pattern is not None:
            self._searches.append(PatternSearch(pattern))
        self._held = ""  # the end of the text that may belong to a match

    @property
    def is_empty(self) -> bool:
        """True if nothing is searched."""
        return not self._searches

    def push(self, text: str) -> tuple[str, bool]:
        """Returns the text that can be shown, and True if a match was found.

        After a match, push no more.
        """
        if not self._searches:
            return text, False
        known = len(self._held)
        text = self._held + text
        for end in range(known, len(text)):
            length = max([search.step(text[end]) for search in self._searches])
            if length:
                begin = end + 1 - length
                self._held = ""
                self.found = text[begin : end + 1]
                return text[:begin], True
        cut = len(text) - max(search.num_held for search in self._searches)
        self._held = text[cut:]
        return text[:cut], False

    def flush(self) -> str:
        """Returns the text that was held back at the end."""
        held = self._held
        self._held = ""
        return held


class StopStrings:
    """Searches stop strings, by the automaton of Knuth, Morris and Pratt for each of them."""

    def __init__(self, stops: Sequence[str]) -> None:
        self.num_held = 0
        self._stops = sorted(stops, key=len, reverse=True)
        self._fallbacks = [_fallbacks(stop) for stop in self._stops]
        # Of each stop string, the number of characters with which the text ends.
        self._matched = [0] * len(stops)

    def step(self, character: str) -> int:
        """Takes the next character, see StopSearch; of two stop strings the longer counts."""
        for i, stop in enumerate(self._stops):
            if self._step(i, character):
                return len(stop)
        self.num_held = max(self._matched)
        return 0

    def _step(self, i: int, character: str) -> bool:
        """Returns True if stop string `i` ends with this character."""
        stop = self._stops[i]
        matched = self._matched[i]
        while matched and stop[matched] != character:
            matched = self._fallbacks[i][matched - 1]
        self._matched[i] = matched = matched + (stop[matched] == character)
        return matched == len(stop)


class PatternSearch:
    """Searches a pattern: the match that ends first, and of those that end there the longest.

    Follows all possible begins of a match at once: groups of positions of the automaton, each with
    the place where its match began, the earliest first. A position belongs to one group, because a
    later begin cannot do there what an earlier one cannot. So a character costs at most as many
    steps as the pattern has positions. At most MAX_HELD characters of a match are counted: text
    further back has been shown.
    """

    def __init__(self, pattern: StopPattern) -> None:
        self.num_held = 0
        self._pattern = pattern
        self._place = 0  # of the next character
        self._groups: list[tuple[int, int]] = []  # begin of the match, positions

    def step(self, character: str) -> int:
        """Takes the next character, see StopSearch."""
        pattern = self._pattern
        known = pattern.known
        left = pattern.positions_of(character)  # positions that no earlier begin has reached
        groups = []
        for begin, positions in self._groups:  # up to 256: a call for each takes twice as long
            after = known.get(positions)
            if after is None:
                after = pattern.after(positions)
            if reached := after & left:
                groups.append((begin, reached))
                left ^= reached
        if reached := pattern.first & left:
            groups.append((self._place, reached))
        self._place += 1
        self._groups = groups
        for begin, positions in groups:
            if positions & pattern.last:
                return min(self._place - begin, MAX_HELD)
        self.num_held = min(self._place - groups[0][0], MAX_HELD) if groups else 0
        return 0


@lru_cache(maxsize=64)  # the same for all completions of a body; there may be hundreds
def _fallbacks(pattern: str) -> tuple[int, ...]:
    """Returns for each prefix of the pattern the length of its longest border.

    A border is a proper prefix that is also a suffix.
    """
    fallbacks = [0] * len(pattern)
    length = 0
    for i in range(1, len(pattern)):
        while length and pattern[i] != pattern[length]:
            length = fallbacks[length - 1]
        length += pattern[i] == pattern[length]
        fallbacks[i] = length
    return tuple(fallbacks)
