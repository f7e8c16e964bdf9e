"""Checks that docstrings, comments and pages of the documentation are in plain English.

The rules are rates of idioms that made earlier texts hard to read, per 10,000 words, and words that
no docstring begins with. Each rule has a control that it must complain about.
"""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from typing import Final

import pytest

from tandem.tests.source import ROOT, Module, made_up, package_modules

IDIOMS: Final = {
    r"\bwhat(ever)?\b": 15.0,
    r"\b(that|those) of\b": 3.0,
    r", too\b": 1.0,
    r"\b(is|are) none\b": 1.0,
    r"\bso (many|long|much)\b": 2.0,
    r"\bwho(ever)?\b": 2.0,
}
"""Patterns, each with how often it may occur in 10,000 words."""

FORBIDDEN_STARTS: Final = re.compile(
    r"(Is|Has|Says|See|Whether|What|Returns what|Returns whether)\b"
)
MAX_SUMMARY_LINES: Final = 1
MIN_WORDS: Final = 10_000  # fewer words say nothing about a rate


def docstrings(modules: list[Module]) -> Iterator[tuple[str, str]]:
    """Yields the place and the text of each docstring."""
    for module in modules:
        if module.is_generated:
            continue
        for node in module.nodes:
            if isinstance(
                node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
            ) and (text := ast.get_docstring(node)):
                line = getattr(node, "lineno", 1)
                yield f"{module.name}:{line}", text


def comments(modules: list[Module]) -> Iterator[str]:
    """Yields the text of each comment."""
    for module in modules:
        if module.is_generated:
            continue
        for token in tokenize.generate_tokens(io.StringIO(module.source).readline):
            if token.type == tokenize.COMMENT:
                yield token.string.lstrip("# ")


def pages() -> Iterator[str]:
    """Yields the prose of README and of each page of the documentation, without blocks of code."""
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        yield re.sub(r"```.*?```|`[^`]*`", "", path.read_text(), flags=re.DOTALL)


def frequent_idioms(texts: list[str]) -> list[str]:
    """Complains about idioms that occur more often than IDIOMS permits."""
    num_words = sum(len(text.split()) for text in texts)
    complaints = []
    for pattern, limit in IDIOMS.items():
        num_found = sum(len(re.findall(pattern, text)) for text in texts)
        rate = 10_000 * num_found / max(num_words, MIN_WORDS)
        if rate > limit:
            complaints.append(f"{pattern} occurs {rate:.1f} times in 10,000 words")
    return complaints


def bad_starts(modules: list[Module]) -> list[str]:
    """Complains about docstrings that do not say directly what their subject does."""
    return [
        f"{place} begins {text.split(maxsplit=3)[:2]}"
        for place, text in docstrings(modules)
        if FORBIDDEN_STARTS.match(text)
    ]


def long_summaries(modules: list[Module]) -> list[str]:
    """Complains about docstrings whose first paragraph has several lines."""
    return [
        f"{place} has a summary of several lines"
        for place, text in docstrings(modules)
        if len(text.split("\n\n")[0].splitlines()) > MAX_SUMMARY_LINES
    ]


def test_docstrings_are_plain() -> None:
    assert frequent_idioms([text for _, text in docstrings(package_modules())]) == []


def test_comments_are_plain() -> None:
    assert frequent_idioms(list(comments(package_modules()))) == []


def test_pages_are_plain() -> None:
    assert frequent_idioms(list(pages())) == []


def test_docstrings_begin_well() -> None:
    assert bad_starts(package_modules()) == []


def test_summaries_fit_on_a_line() -> None:
    assert long_summaries(package_modules()) == []


@pytest.mark.parametrize(
    "idiom", ["what ", "that of ", "those of ", "it, too ", "is none ", "so long ", "whoever "]
)
def test_a_frequent_idiom_is_found(idiom: str) -> None:
    words = "a plain sentence of words " * (MIN_WORDS // 5)
    assert frequent_idioms([words]) == []
    assert len(frequent_idioms([words + idiom * 20])) == 1


@pytest.mark.parametrize("start", ["Is a block.", "Has a block.", "See Block.", "Returns what is."])
def test_a_bad_start_is_found(start: str) -> None:
    assert len(bad_starts(made_up(cluster__x=f'def f():\n    """{start}"""'))) == 1
    assert bad_starts(made_up(cluster__x='def f():\n    """Returns the block."""')) == []


def test_a_long_summary_is_found() -> None:
    source = 'def f():\n    """Returns the block,\n    or None.\n    """'
    assert len(long_summaries(made_up(cluster__x=source))) == 1
    source = 'def f():\n    """Returns the block.\n\n    Or\n    None.\n    """'
    assert long_summaries(made_up(cluster__x=source)) == []
