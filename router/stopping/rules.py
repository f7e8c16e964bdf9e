"""Holds the rules by which the router ends completions, or says what has ended them."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from ...proto import inference_pb2
from .pattern import StopPattern, compile_pattern
from .repetition import RepetitionStop
from .text import StopTexts


@dataclass(frozen=True, slots=True, kw_only=True)
class StopRules:
    """Holds the rules of one request; its completions share them."""

    strings: tuple[str, ...] = ()
    special: Mapping[int, str] = field(default_factory=dict)  # stop strings that have no text
    token_ids: frozenset[int] = frozenset()  # that the client asks for
    pattern: StopPattern | None = None  # of stop_regex
    ngram: int = 0  # tokens of an n-gram that ends a completion; 0: none does
    ngram_count: int = 0  # times in a row
    min_tokens: int = 0  # before which no rule applies

    def texts(self) -> StopTexts:
        """Returns the search of stop strings and stop_regex in one completion."""
        return StopTexts(self.strings, self.pattern)

    @property
    def token_cost(self) -> int:
        """The work for the text of a token; 1 without a pattern, each position of which adds 1."""
        return 1 if self.pattern is None else 1 + len(self.pattern.accepts)

    def repetition(self) -> RepetitionStop | None:
        """Returns the search of repetitions in one completion; None if there is no rule."""
        if not self.ngram:
            return None
        return RepetitionStop(self.ngram, self.ngram_count, self.min_tokens)


def stop_rules(stopping: inference_pb2.StoppingParams, special: Mapping[int, str]) -> StopRules:
    """Returns the rules of checked parameters; `special`: stop strings that are special tokens.

    Takes up to a quarter of a second for a stop_regex of 1,024 characters, if it has `(?i)` and
    wide ranges. Raises InvalidArgument if it is wrong.
    """
    return StopRules(
        strings=tuple(stopping.stop),
        special=special,
        token_ids=frozenset(stopping.stop_token_ids),
        pattern=compile_pattern(stopping.stop_regex) if stopping.stop_regex else None,
        ngram=stopping.repetition_stop_ngram,
        ngram_count=stopping.repetition_stop_count,
        min_tokens=stopping.min_tokens,
    )
