"""Tests calls in the form of Python."""

import json
import warnings
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.router.output.python_calls import read_calls

NUMBERS = st.integers() | st.floats(allow_nan=False, allow_infinity=False)
VALUES: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | NUMBERS | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)
NAMES = st.from_regex(r"[a-z][a-z_.-]{0,8}", fullmatch=True)
CALLS = st.lists(
    st.tuples(NAMES, st.dictionaries(NAMES, VALUES, max_size=3)), min_size=1, max_size=3
)


@given(CALLS, st.sampled_from([repr, partial(json.dumps, ensure_ascii=False)]))
def test_calls_are_read_as_they_were_written(
    calls: list[tuple[str, dict[str, Any]]], write: Any
) -> None:
    def written(name: str, arguments: dict[str, Any]) -> str:
        return f"{name}({', '.join(f'{each}={write(arguments[each])}' for each in arguments)})"

    texts = [written(*each) for each in calls]
    assert read_calls(f" [{', '.join(texts)}]\n") == calls
    assert read_calls(texts[0]) == calls[:1]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[f(from='a', class=1,)]", [("f", {"from": "a", "class": 1})]),
        (r"f(x='\d, \'\n')", [("f", {"x": "\\d, '\n"})]),
        ("f(x=(1, -2.5), y='a' 'b')", [("f", {"x": [1, -2.5], "y": "ab"})]),
        ("[ns.f(x='),]'),\ng()]", [("ns.f", {"x": "),]"}), ("g", {})]),
        ("[]", []),
    ],
)
def test_forms_of_calls(text: str, expected: list[tuple[str, dict[str, Any]]]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert read_calls(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        *("f", "[f]", "f(", "f()]", "[f()", "f() g()", "[f()] so", "f(1)", "f(x)", "f('x=1')"),
        *("f(x=)", "f(x=1, x=2)", "f(x=y)", "f(x=g())", "f(x=b'a')", "f(x=1j)", "f(x=...)"),
        *("f(x={1})", "f(x={1: 2})", "f(x={**y})", "f(x=[*y])", "f(**x)", "f(x='a)", "f(x=f'{y}')"),
        *("f(x=-'a')", "f(x=1 + 1)", "f g()", "f(x=" + "-" * 100_000 + "1)", f"f(x={'9' * 5_000})"),
        "f(x=" + "[" * 500 + "]" * 500 + ")",
        "f(x='" + "\\'" * 100_000,
    ],
)
def test_other_texts_are_no_calls(text: str) -> None:
    with pytest.raises((ValueError, RecursionError)):
        read_calls(text)
