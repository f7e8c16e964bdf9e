"""Patterns of stop_regex: what is refused, and that a hostile one costs little."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.proto.errors import InvalidArgument
from tandem.router.stopping.pattern import MAX_POSITIONS, compile_pattern
from tandem.router.stopping.text import StopTexts


@pytest.mark.parametrize(
    ("pattern", "reason"),
    [
        ("a*", "matches the empty text"),
        ("(|a)", "matches the empty text"),
        ("a{0}", "matches the empty text"),
        ("^a", r"the anchor \^"),
        ("a$", r"the anchor \$"),
        (r"\bword", "an escape that is not supported"),
        (r"(a)\1", "an escape that is not supported"),
        ("(?=a)b", "a lookaround or a flag within"),
        ("a(?i)b", "a lookaround or a flag within"),
        ("(a", "a ( without its )"),
        ("a)", "a ) without its ("),
        ("[a", "a [ without its ]"),
        ("[b-a]", "a wrong class or escape"),
        *((each, "a class with [[, --, &&, ~~ or ||") for each in ("[[:alpha:]]", "x[a-z--b]")),
        ("*a", "a quantifier without anything before it"),
        ("a**", "two quantifiers in a row"),
        ("a{2}{3}", "two quantifiers in a row"),
        ("a{3,2}", "whose maximum is below the minimum"),
        ("a{257}", "more than 256 characters"),
        ("(a{16}){17}", "more than 256 characters"),
        ("a{99999999999}", "more than 256 characters"),
        ("(((((){200}){200}){200}){200})a", "more than 256 characters"),
        ("(" * 51 + "a" + ")" * 51, "more than 50 groups in groups"),
    ],
)
def test_a_pattern_is_refused_with_the_reason(pattern: str, reason: str) -> None:
    escaped = reason if "\\" in reason else re.escape(reason)
    with pytest.raises(InvalidArgument, match=escaped) as caught:
        compile_pattern(pattern)
    assert caught.value.field == "stopping.stop_regex"


@pytest.mark.parametrize(
    ("pattern", "text", "match"),
    [
        (r"\d{3}-\d{4}", "call 555-0199 now", "555-0199"),
        ("(?i)observation:", "x OBSERVATION: y", "OBSERVATION:"),
        ("a.b", "a\nb acb", "acb"),
        ("(?s)a.b", "a\nb acb", "a\nb"),
        (r"\.\s[A-Z]", "1.5 yes. No", ". N"),
        ("[]x]{2}", "a]x", "]x"),
        ("x{", "ax{", "x{"),
        ("ax{,}b{}", "axxb{}", "axxb{}"),
        ("a{1}{x}", "a{x}", "a{x}"),
        ("(?P<word>é+)!", "aéé!", "éé!"),
        (r"[\w.]+@", "me.you@", "me.you@"),
        ("🦊|🐺", "a🐺", "🐺"),
    ],
)
def test_a_pattern_means_what_it_means_in_python(pattern: str, text: str, match: str) -> None:
    search = StopTexts((), compile_pattern(pattern))
    shown, stopped = search.push(text)
    assert (stopped, search.found) == (True, match)
    found = re.search(pattern, text)
    assert found is not None
    assert shown == text[: found.start()]


@given(st.text("ab(){}[]*+?|.,0129\\^-:i", max_size=40))
def test_any_text_is_compiled_or_refused(pattern: str) -> None:
    try:
        automaton = compile_pattern(pattern)
    except InvalidArgument:
        return
    assert max(automaton.first, automaton.last) < 1 << MAX_POSITIONS
    assert re.compile(pattern)
