"""Rewrites the patterns of JSON schemas for llguidance.

JSON schemas have the patterns of ECMA-262. llguidance has the patterns of Rust, without
look-arounds and with another syntax of classes.
"""

import itertools
import re
from typing import Final

_SKIPPED: Final = r"\\.|\[(?:\\.|[^\]\\])*+(?:\]|\\?\Z)"  # escapes and classes, in linear time
_LOOKAROUND: Final = re.compile(rf"{_SKIPPED}|(?P<look>\(\?<?[=!])", re.DOTALL)
_PARTS: Final = re.compile(rf"{_SKIPPED}|(?P<special>[()|])", re.DOTALL)
_CLASS_OR_ESCAPE: Final = re.compile(
    r"\\.|\[(?P<negation>\^?)(?P<members>(?:\\.|[^\]\\])*+)(?P<end>\]|\\?\Z)", re.DOTALL
)
_MEMBER: Final = re.compile(
    r"\\(?:[pP]\{[^}]*\}|u\{[^}]*\}|u[0-9A-Fa-f]{4}|x[0-9A-Fa-f]{2}|.)|.", re.DOTALL
)
_SEVERAL: Final = re.compile(r"\\[dDwWsSpP]")  # begins a member that is no end of a range
_SPECIAL_IN_CLASS: Final = frozenset("[]^-&~")  # in Rust
_CLASS: Final = r"\[\^?(?:\\.|[^\]\\])+\]"
_ONE_CLASS: Final = re.compile(rf"({_CLASS})|\\([dDwWsS])")
_ONLY_CLASS: Final = re.compile(rf"\^?({_CLASS})([*+])\$")
_LITERAL: Final = re.compile(r"(?:[\w \-@#%&=!<>:;,'\"~`/]|\\[^\w\s])+")
_MAX_LITERAL: Final = 64
_MAX_LOOKAHEADS: Final = 16  # of one pattern
# Of a pattern with look-arounds, because each group in a group is searched again. A pattern of this
# size takes 10 ms.
_MAX_PATTERN: Final = 2_000
_MAX_GROUP_DEPTH: Final = 20
_DECIMAL_WIDTH: Final = re.compile(
    r"\(\?=\[\\d\.\]\{1,(\d{1,2})\}0\*\$\)\\d(?:\*|\{0,(\d+)\})\\\.\\d(?:\*|\{0,(\d+)\})0\*\$"
)
"""pydantic's pattern of decimals with a number of digits; its lookahead counts them."""


def without_lookarounds(pattern: str) -> list[str]:
    """Returns patterns that together match the same texts.

    Returns [] if the look-around is too general, or the pattern too long or nested too deeply.
    """
    if len(pattern) > _MAX_PATTERN or _group_depth(pattern) > _MAX_GROUP_DEPTH:
        return []
    return _without_lookaheads(_DECIMAL_WIDTH.sub(_decimal, pattern))


def with_rust_classes(pattern: str) -> str:
    """Returns the pattern with its classes of characters in the syntax of Rust.

    There `[` begins a class within a class, and `&&`, `--` and `~~` combine classes. A class that
    begins with `]` stays: it is rare in ECMAScript, and has Rust's meaning in Python.
    """
    return _CLASS_OR_ESCAPE.sub(_rust_class, pattern)


def _rust_class(match: re.Match[str]) -> str:
    if match["end"] != "]" or not match["members"]:  # an escape, or a class without an end
        return match[0]
    members: list[str] = _MEMBER.findall(match["members"])
    found: list[str] = []
    begin = 0
    while begin < len(members):
        part = members[begin : begin + 3]
        if len(part) < 3 or part[1] != "-":
            part = part[:1]
        begin += len(part)
        is_range = len(part) == 3 and not any(map(_SEVERAL.match, part))
        found += map(_rust_member, part)
        if is_range:
            found[-2] = "-"
    return f"[{match['negation']}{''.join(found)}]"


def _rust_member(member: str) -> str:
    return f"\\{member}" if member in _SPECIAL_IN_CLASS else member


def has_lookaround(pattern: str) -> bool:
    """Returns True if the pattern looks ahead or behind."""
    return any(match["look"] for match in _LOOKAROUND.finditer(pattern))


def _group_depth(pattern: str) -> int:
    """Returns the number of groups that the innermost character is in."""
    steps = ({"(": 1, ")": -1}.get(match["special"] or "", 0) for match in _PARTS.finditer(pattern))
    return max(itertools.accumulate(steps), default=0)


def _decimal(match: re.Match[str]) -> str:
    """Returns pydantic's pattern of decimals without the lookahead.

    It has an alternative for each number of digits before the point.
    """
    most = int(match[1]) - 1
    before = match[2]
    after = match[3]
    if before is not None and after is not None:
        rest = min(int(after), max(most - int(before), 0))
        return rf"\d{{0,{before}}}\.\d{{0,{rest}}}0*$"
    shares = "|".join(rf"\d{{{count}}}\.\d{{0,{most - count}}}" for count in range(most + 1))
    return rf"(?:{shares})0*$" if before is after is None else match[0]


def _without_lookaheads(pattern: str) -> list[str]:
    """Returns patterns that together match the same texts as one that begins with lookaheads.

    Returns [] if a look-around is elsewhere or too general.
    """
    if not pattern.startswith("^"):
        return []
    rest = pattern[1:]
    others: list[str] = []
    while rest.startswith(("(?=", "(?!")):
        end = _closing(rest)
        body = rest[3:end]
        if end < 0 or has_lookaround(body):
            return []
        excluded = [f"^(?:{body})"] if rest[2] == "=" else _complement(body)
        if not excluded or len(others) > _MAX_LOOKAHEADS:
            return []
        others += excluded
        rest = rest[end + 1 :]
    if has_lookaround(rest) or len(_alternatives(rest)) > 1:
        return []
    return [f"^{rest}", *others]


def _closing(pattern: str) -> int:
    """Returns the position of the parenthesis that closes the first one; -1 without one."""
    depth = 0
    for match in _PARTS.finditer(pattern):
        depth += {"(": 1, ")": -1}.get(match["special"] or "", 0)
        if match["special"] == ")" and not depth:
            return match.start()
    return -1


def _alternatives(pattern: str) -> list[str]:
    depth = 0
    begin = 0
    found = []
    for match in _PARTS.finditer(pattern):
        depth += {"(": 1, ")": -1}.get(match["special"] or "", 0)
        if match["special"] == "|" and not depth:
            found.append(pattern[begin : match.start()])
            begin = match.end()
    return [*found, pattern[begin:]]


def _complement(body: str) -> list[str]:
    """Returns patterns of all texts without a match of `body` at the start; [] if too general."""
    end = "$" if body.endswith(")$") else ""
    length = len(body) - len(end) - 1
    if body.startswith("(") and _closing(body) == length:  # one group of alternatives
        group = body[:length].removeprefix("(").removeprefix("?:")
        if group.startswith("?"):
            return []
        return _complement("|".join(each + end for each in _alternatives(group)))
    patterns = [_complement_of_one(each) for each in _alternatives(body)]
    return patterns if all(patterns) else []


def _complement_of_one(body: str) -> str:
    if match := _ONLY_CLASS.fullmatch(body):
        other = _other_class(match[1])
        return other if match[2] == "*" else f"^$|{other}"
    if _ONE_CLASS.fullmatch(body):
        return f"^(?:$|{_other_class(body)})"
    if body == "$":
        return r"^(?s:.)"
    body = body.removeprefix("^")
    if body.startswith(".*"):
        return _without(_characters(body[2:]))
    characters = _characters(body.removesuffix("$"))
    if not characters or len(characters) > _MAX_LITERAL:
        return ""
    found = "(?s:.)" if body.endswith("$") else ""
    for number, character in enumerate(reversed(characters)):
        rest = f"|{_one(character)}(?:{found})" if found or number else ""
        found = f"$|{_none_of(character)}{rest}"
    return f"^(?:{found})"


def _without(characters: list[str]) -> str:
    """Returns the pattern of texts without one or two characters in a row; "" for more of them."""
    if len(characters) == 1:
        return f"^{_none_of(*characters)}*$"
    if len(characters) != 2:
        return ""
    first, second = characters
    if first == second:
        return f"^(?:{_none_of(first)}|{_one(first)}{_none_of(first)})*{_one(first)}?$"
    return f"^(?:{_none_of(first)}|{_one(first)}+{_none_of(first, second)})*{_one(first)}*$"


def _characters(body: str) -> list[str]:
    """Returns the characters of a literal pattern; [] for another pattern."""
    return re.findall(r"\\?(.)", body) if _LITERAL.fullmatch(body) else []


def _one(character: str) -> str:
    if character.isalnum() or character in " _<>":
        return character  # in llguidance `\<` and `\>` are the boundaries of a word
    return f"\\{character}"


def _none_of(*characters: str) -> str:
    return f"[^{''.join(map(_one, characters))}]"


def _other_class(one: str) -> str:
    if one.startswith("\\"):
        return "\\" + one[1].swapcase()
    return f"[{one[2:]}" if one.startswith("[^") else f"[^{one[1:]}"
