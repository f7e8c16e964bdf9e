"""Grammars with many ways to read the same text, whose masks take llguidance long."""

from typing import Final

from llguidance import LLMatcher

AMBIGUOUS: Final = {
    "words of words": 'start: e\ne: e e e | e e | /[a-z ]/ | ""',
    "pairs": "start: e\ne: e e | /[a-z]/",
    "deep": 'start: "ab" deep\ndeep: "x" | deep deep | deep deep deep',
    "deeper": 'start: "ab" deep\ndeep: "x" | "xx" | deep deep | deep deep deep deep',
    "operators": "start: e\ne: e OP e | /[a-z]/\nOP: /[a-z]/",
    "options": "start: " + "/[a-z]/? " * 1500,
    "repeated": "start: (((/[a-z]/){0,30}){0,30}){0,30}",
    "counted": LLMatcher.grammar_from_regex("(a{1000}){1000}"),
    "remembered": LLMatcher.grammar_from_regex("(.*a.{40}b)|(.*b.{50}c)|(.*[^a].{60}d)"),
    "lexemes": "start: ("
    + "|".join(f"/[a-z]*{chr(97 + i % 26)}[a-z]{{{i // 26}}}/" for i in range(200))
    + ")+",
}
