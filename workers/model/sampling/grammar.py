"""Constrains completions to grammars, which llguidance compiles and matches.

A sequence whose grammar cannot be compiled here, whose tokens violate it, or which takes more than the limits in one
step fails, and the batch continues.
"""

import json
import os
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final
from weakref import WeakValueDictionary

import numpy as np
import torch
from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer

from ....proto.deep_stack import on_deep_stack
from ...engine.plan import SequenceStep

_NUM_RECENT: Final = 32  # kept compiled, used or not
_MAX_MASK_THREADS: Final = 8
_CORES_PER_MASK_THREAD: Final = 4
_MAX_ERROR_CHARACTERS: Final = 200
# No step of any grammar that was tried takes more than 15 ms, with 49,152 tokens; llguidance's own limits allow 2 s. A
# choice of 1,024 texts, a schema with 300 optional properties, and 128 tools are within them.
_LIMITS: Final = LLParserLimits(
    max_items_in_row=1_500,
    step_max_items=2_000,
    initial_lexer_fuel=100_000,
    step_lexer_fuel=50_000,
    max_lexer_states=50_000,  # a state takes 1 to 2 kB
    verbose_errors=False,
)


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class CompiledGrammar:
    """Holds a matcher at the beginning of a completion. Its copies share the lexer's states."""

    matcher: LLMatcher


class GrammarCache:
    """Holds the compiled grammars of one model's sequences. Safe to use from any thread."""

    def __init__(self, folder: Path | None, vocab_size: int, end_ids: Sequence[int]) -> None:
        """`folder` holds tokenizer.json, which is read when the first grammar is loaded."""
        self._folder = folder
        self._vocab_size = vocab_size
        self.end_ids = tuple(end_ids)
        self._lock = threading.Lock()
        self._loading = threading.Lock()
        self._tokenizer: LLTokenizer | None = None
        self._compiled: WeakValueDictionary[str, CompiledGrammar] = WeakValueDictionary()
        self._recent: OrderedDict[str, CompiledGrammar] = OrderedDict()  # the last used

    def load(self, grammar: str) -> CompiledGrammar:
        """Compiles a grammar, JSON or Lark as llguidance reads them, unless it is compiled; keeps it while the result
        is held. Raises ValueError if it cannot be compiled. May take seconds, which do not block other threads."""
        with self._lock:
            compiled = self._compiled.get(grammar)
        if compiled is None:
            compiled = on_deep_stack(partial(_compile, self._load_tokenizer(), grammar))
        with self._lock:
            compiled = self._compiled.setdefault(grammar, compiled)  # another thread may have been faster
            self._recent[grammar] = compiled
            self._recent.move_to_end(grammar)
            if len(self._recent) > _NUM_RECENT:
                self._recent.popitem(last=False)
            return compiled

    def matcher(self, grammar: str) -> LLMatcher:
        """Returns a matcher at the beginning of a completion. Raises ValueError if the grammar cannot be compiled."""
        found = self.load(grammar)
        with self._lock:
            return found.matcher.deep_copy()

    def forget(self, grammar: str) -> None:
        """Makes the next `load` compile it anew: the lexer that all matchers of a grammar share may be full."""
        with self._lock:
            self._compiled.pop(grammar, None)
            self._recent.pop(grammar, None)

    def _load_tokenizer(self) -> LLTokenizer:
        """Reads the tokenizer at its first use. Raises ValueError if it does not support grammars."""
        if self._folder is None or not self.end_ids:
            raise ValueError("this model has no tokenizer or no end token, so grammars are not supported")
        with self._loading:
            if self._tokenizer is None:
                try:
                    fields = json.loads((self._folder / "tokenizer.json").read_bytes())
                    text = json.dumps(fields | {"padding": None, "truncation": None})
                    self._tokenizer = LLTokenizer(text, n_vocab=self._vocab_size, eos_token=list(self.end_ids))
                except (OSError, ValueError, TypeError):
                    raise ValueError("this model's tokenizer.json does not support grammars") from None
            return self._tokenizer


def _compile(tokenizer: LLTokenizer, grammar: str) -> CompiledGrammar:
    """Compiles a grammar, recursing over chains of rules. Raises ValueError if it is not valid or over the limits."""
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=_LIMITS)
    matcher.compute_bitmask()  # fills the lexer's cache for all copies, and may reach a limit
    if matcher.is_error():
        raise ValueError(f"the grammar cannot be compiled: {_brief(matcher.get_error())}")
    return CompiledGrammar(matcher)


class GrammarMatchers:
    """Holds a matcher for each sequence under a grammar. Used from one thread."""

    def __init__(self, grammars: GrammarCache | None, vocab_size: int) -> None:
        """Without `grammars` no sequence is constrained."""
        self._grammars = grammars
        self._num_words = -(-vocab_size // 32)
        ends = np.zeros(32 * self._num_words, bool)
        ends[list(grammars.end_ids if grammars else ())] = True
        self._ends = torch.from_numpy(np.packbits(ends, bitorder="little").view(np.int32))  # [num_words], bits
        self._matchers: dict[int, LLMatcher | str] = {}  # or why there is none
        self._texts: dict[int, str] = {}
        self._num_read: dict[int, int] = {}  # tokens of the sequence that are prompt or were given to its matcher
        self._failures: dict[int, str] = {}
        # On few cores more threads compete with the model's: one wait for a core is longer than most masks take.
        self._num_threads = min(_MAX_MASK_THREADS, len(os.sched_getaffinity(0)) // _CORES_PER_MASK_THREAD)
        self._executor: LLExecutor | None = None

    def __contains__(self, sequence_id: int) -> bool:
        return sequence_id in self._matchers

    def admit(self, sequence_id: int, grammar: str, history: Sequence[int], num_prompt: int) -> None:
        """Adds a sequence, or replaces it; its tokens so far are `history`. May take seconds if the grammar is not
        compiled."""
        if self._grammars is None:
            return
        try:
            matcher = self._grammars.matcher(grammar)
        except ValueError as error:
            self._matchers[sequence_id] = f"grammar: {error}"
        else:
            matcher.consume_tokens(list(history[num_prompt:]))
            self._matchers[sequence_id] = matcher
        self._texts[sequence_id] = grammar
        self._num_read[sequence_id] = len(history)

    def release(self, sequence_id: int) -> None:
        """Removes a sequence, if it is there."""
        self._matchers.pop(sequence_id, None)
        self._texts.pop(sequence_id, None)
        self._num_read.pop(sequence_id, None)

    def masks(self, steps: Sequence[SequenceStep]) -> torch.Tensor:
        """Consumes the tokens of the steps of sequences under grammars, none of them pending, and returns what may
        follow: int32 [num_steps, num_words], a bit for each token; for failed sequences only the end tokens.

        Takes 5 to 500 us a sequence, or what the limits allow, with the GIL released; a GPU meanwhile computes the
        logits."""
        masks = torch.zeros(len(steps), self._num_words, dtype=torch.int32)
        matchers: list[tuple[LLMatcher, int]] = []
        for row, step in enumerate(steps):
            matcher = self._matchers[step.sequence_id]
            if isinstance(matcher, str):
                masks[row] = self._ends
                self._failures[step.sequence_id] = matcher
                continue
            num_read = self._num_read[step.sequence_id]
            matcher.consume_tokens(list(step.token_ids[max(num_read - step.start, 0) :]))
            self._num_read[step.sequence_id] = max(num_read, step.start + len(step.token_ids))
            matchers.append((matcher, row))
        num_bytes = 4 * self._num_words
        if self._num_threads > 1 and len(matchers) > 1:
            self._executor = self._executor or LLExecutor(self._num_threads)
            self._executor.unsafe_compute_mask_ptr(matchers, masks.data_ptr(), num_bytes, len(steps))
        else:
            for matcher, row in matchers:
                matcher.unsafe_compute_mask_ptr(masks.data_ptr() + row * num_bytes, num_bytes)
        for matcher, row in matchers:
            if matcher.is_error():
                masks[row] = self._ends
                self._fail(steps[row].sequence_id, matcher)
        return masks

    def take_failures(self) -> dict[int, str]:
        """Returns by sequence why those failed whose masks were computed since the last call."""
        failures, self._failures = self._failures, {}
        return failures

    def _fail(self, sequence_id: int, matcher: LLMatcher) -> None:
        reason = f"grammar: the completion cannot continue: {_brief(matcher.get_error())}"
        self._matchers[sequence_id] = self._failures[sequence_id] = reason
        if self._grammars is not None:
            self._grammars.forget(self._texts[sequence_id])


def _brief(error: str) -> str:
    """Returns the first line of llguidance's message, without what it quotes after it."""
    return error.strip().partition("\n")[0].rstrip(" :")[:_MAX_ERROR_CHARACTERS]
