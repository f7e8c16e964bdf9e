"""Compiles the regular expressions of stop_regex to automata that need linear time.

A pattern becomes the position automaton of Glushkov ("The abstract theory of automata", 1961): its
states are the positions of the pattern's characters, and it has no empty transitions. So no pattern
can make a search slow, as patterns of a backtracking engine can. A set of positions is an int whose
bit i stands for position i.

Supports literals, escapes, `.`, classes, groups, `|`, `*`, `+`, `?` and counts such as `{2,5}`.
Python's `re` judges single characters only: `\\d`, `[^a-z]` and the flags `(?i)` and `(?s)` mean
what they mean there. Refuses anchors, word boundaries, lookarounds and backreferences.
"""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import lru_cache, reduce
from typing import Final, TypeVar

from ...proto.errors import InvalidArgument

_K = TypeVar("_K")

FIELD: Final = "stopping.stop_regex"

MAX_POSITIONS: Final = 256
"""Positions of a pattern after its counts are written out: `a{3}` has three."""

_MAX_DEPTH: Final = 50  # of groups in groups
_MAX_ATOMS: Final = 4_096  # parsed, copies included: an empty group has no position
_MAX_CACHED: Final = 1_024  # characters, and sets of positions, whose successors are remembered

_FLAGS: Final = re.compile(r"\(\?([is]+)\)")
_COUNTS: Final = re.compile(r"\{(\d*)(,?)(\d*)\}")
# An escape that stands for one character or one class.
_ESCAPE: Final = re.compile(
    r"\\(?:[dDsSwWnrtfva]|x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|[^a-zA-Z0-9])",
    re.DOTALL,
)
_CLASS: Final = re.compile(r"\[\^?\]?(?:\\.|[^\]\\])*\]", re.DOTALL)
# In classes, `re` warns of these: they may become sets in sets, or operations on sets.
_SET_OPERATION: Final = re.compile(r"^\[\[|--|&&|~~|\|\|")


@dataclass(frozen=True, slots=True)
class _Part:
    """Describes a part of a pattern: where its matches begin and end."""

    first: int = 0  # positions of first characters
    last: int = 0  # positions of last characters
    is_nullable: bool = True  # it matches the empty text


@dataclass(slots=True)
class StopPattern:
    """Holds the automaton of one pattern. Matches are never empty."""

    first: int  # positions with which a match may begin
    last: int  # positions with which a match may end
    successors: list[int]  # by position, the positions that may come next
    accepts: list[Callable[[str], object]]  # by position, the test of a character
    known: dict[int, int] = field(default_factory=dict)  # some results of `after`
    _by_character: dict[str, int] = field(default_factory=dict)

    def positions_of(self, character: str) -> int:
        """Returns the positions that accept a character."""
        found = self._by_character.get(character)
        if found is None:
            bits = (1 << i for i, accepts in enumerate(self.accepts) if accepts(character))
            found = sum(bits)
            _remember(self._by_character, character, found)
        return found

    def after(self, positions: int) -> int:
        """Returns the positions that may follow any of `positions`."""
        found = self.known.get(positions)
        if found is None:
            found = reduce(int.__or__, (self.successors[i] for i in _bits(positions)), 0)
            _remember(self.known, positions, found)
        return found


@lru_cache(maxsize=64)  # the same for all completions of a body; there may be hundreds
def compile_pattern(pattern: str) -> StopPattern:
    """Returns the automaton of a pattern. Raises InvalidArgument with the reason and the place."""
    builder = _Builder(pattern)
    whole = builder.parse()
    if whole.is_nullable:
        raise _refused("matches the empty text, so it would stop at once; make a part of it needed")
    return StopPattern(whole.first, whole.last, builder.successors, builder.accepts)


class _Builder:
    """Parses a pattern by recursive descent and collects its positions."""

    def __init__(self, pattern: str) -> None:
        self.successors: list[int] = []
        self.accepts: list[Callable[[str], object]] = []
        self._text = pattern
        self._at = 0
        self._depth = 0
        self._num_atoms = 0
        self._flags = re.NOFLAG

    def parse(self) -> _Part:
        """Returns the whole pattern."""
        if flags := _FLAGS.match(self._text):
            self._at = flags.end()
            for letter in flags[1]:
                self._flags |= re.IGNORECASE if letter == "i" else re.DOTALL
        part = self._alternatives()
        if self._at < len(self._text):
            raise self._wrong("has a ) without its (")
        return part

    def _alternatives(self) -> _Part:
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise _refused(f"has more than {_MAX_DEPTH} groups in groups; use fewer")
        part = self._sequence()
        while self._take("|"):
            other = self._sequence()
            part = _Part(
                part.first | other.first,
                part.last | other.last,
                part.is_nullable or other.is_nullable,
            )
        self._depth -= 1
        return part

    def _sequence(self) -> _Part:
        part = _Part()
        while self._at < len(self._text) and self._text[self._at] not in "|)":
            part = self._joined(part, self._repeated())
        return part

    def _repeated(self) -> _Part:
        """Returns an atom with its quantifiers."""
        begin = self._at
        part = self._atom()
        counts = self._counts()
        if counts is None:
            return part
        least, most = counts
        after = self._at
        if self._counts() is not None:
            raise self._wrong("has two quantifiers in a row; put the first in a group")
        parts = [part]
        for _ in range(max(least, most or 1) - 1):  # parses the atom again: each copy has positions
            self._at = begin
            parts.append(self._atom())
        self._at = after
        if most is None:
            self._loop(parts[-1])
        if most == 0:
            return _Part()
        whole = _Part()
        for number, each in enumerate(parts):
            optional = number >= least
            whole = self._joined(whole, _Part(each.first, each.last, each.is_nullable or optional))
        return whole

    def _counts(self) -> tuple[int, int | None] | None:
        """Takes a quantifier; returns its bounds, None as the second for no upper bound."""
        for mark, bounds in (("*", (0, None)), ("+", (1, None)), ("?", (0, 1))):
            if self._take(mark):
                self._take("?")  # a lazy one has the same matches
                return bounds
        found = _COUNTS.match(self._text, self._at)
        if found is None or not (found[1] or found[2] or found[3]):
            return None  # as in Python, a brace without counts is a literal
        self._at = found.end()
        self._take("?")
        if max(len(found[1]), len(found[3])) > len(str(MAX_POSITIONS)):
            raise self._too_large()
        least = int(found[1] or 0)
        most = (int(found[3]) if found[3] else None) if found[2] else least
        if most is not None and most < least:
            raise self._wrong("has counts whose maximum is below the minimum")
        if max(least, most or 0) > MAX_POSITIONS:
            raise self._too_large()
        return least, most

    def _atom(self) -> _Part:
        self._num_atoms += 1
        if self._num_atoms > _MAX_ATOMS:
            raise self._too_large()
        character = self._text[self._at]
        if character == "(":
            return self._group()
        if character in "*+?":
            raise self._wrong("has a quantifier without anything before it")
        if character in "^$":
            raise self._wrong(f"has the anchor {character}, which is not supported; leave it out")
        if character == "[":
            return self._position(self._class())
        if character == "\\":
            return self._position(
                self._matched(
                    _ESCAPE,
                    "has an escape that is not supported: no \\b, \\A, \\Z and no backreferences",
                )
            )
        self._at += 1
        return self._position("." if character == "." else re.escape(character))

    def _group(self) -> _Part:
        start = self._at
        self._at += 1
        if self._take("?:"):
            pass
        elif self._take("?P<"):
            self._matched(re.compile(r"[A-Za-z_]\w*>"), "has a group with a bad name")
        elif self._text.startswith("?", self._at):
            raise self._wrong(
                "has a lookaround or a flag within; write (?:...), and (?i) or (?s) at the start"
            )
        part = self._alternatives()
        if not self._take(")"):
            self._at = start
            raise self._wrong("has a ( without its )")
        return part

    def _class(self) -> str:
        source = self._matched(_CLASS, "has a [ without its ]")
        if _SET_OPERATION.search(source):
            raise self._wrong(
                "has a class with [[, --, &&, ~~ or ||, which may get another meaning in Python; "
                "write a \\ before the second character"
            )
        return source

    def _position(self, source: str) -> _Part:
        """Adds a position that accepts the characters of `source`, a pattern of one character."""
        if len(self.accepts) == MAX_POSITIONS:
            raise self._too_large()
        self.accepts.append(_character_test(source, self._flags))
        self.successors.append(0)
        bit = 1 << (len(self.accepts) - 1)
        return _Part(bit, bit, False)

    def _joined(self, left: _Part, right: _Part) -> _Part:
        """Returns `left` and then `right`."""
        for position in _bits(left.last):
            self.successors[position] |= right.first
        return _Part(
            left.first | (right.first if left.is_nullable else 0),
            right.last | (left.last if right.is_nullable else 0),
            left.is_nullable and right.is_nullable,
        )

    def _loop(self, part: _Part) -> None:
        """Lets a part follow itself."""
        for position in _bits(part.last):
            self.successors[position] |= part.first

    def _take(self, mark: str) -> bool:
        found = self._text.startswith(mark, self._at)
        self._at += len(mark) if found else 0
        return found

    def _matched(self, form: re.Pattern[str], complaint: str) -> str:
        """Takes a text of this form. Raises InvalidArgument with the complaint otherwise."""
        found = form.match(self._text, self._at)
        if found is None:
            raise self._wrong(complaint)
        self._at = found.end()
        return found[0]

    def _wrong(self, reason: str) -> InvalidArgument:
        return _refused(f"{reason} (at character {self._at})")

    def _too_large(self) -> InvalidArgument:
        return _refused(
            f"stands for more than {MAX_POSITIONS} characters after its counts are written out; "
            "use smaller counts, or * and +"
        )


@lru_cache(maxsize=1_024)
def _character_test(source: str, flags: re.RegexFlag) -> Callable[[str], object]:
    """Returns the test of a pattern of one character. Raises InvalidArgument if it is wrong."""
    try:
        return re.compile(source, flags).fullmatch
    except (re.error, OverflowError, ValueError) as error:
        raise _refused(f"has a wrong class or escape: {error}") from None


def _refused(reason: str) -> InvalidArgument:
    return InvalidArgument(reason, FIELD)


def _bits(positions: int) -> Iterable[int]:
    while positions:
        lowest = positions & -positions
        yield lowest.bit_length() - 1
        positions ^= lowest


def _remember(cache: dict[_K, int], key: _K, found: int) -> None:
    if len(cache) >= _MAX_CACHED:
        cache.clear()
    cache[key] = found
