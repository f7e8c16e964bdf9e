"""Grammars that completions keep to, as llguidance compiles and follows them.

A sequence whose grammar cannot be compiled here, whose tokens break it, or which takes more than the limits in one
step, may draw nothing but an end token: it ends, and the batch goes on.
"""

import json
import os
import threading
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import numpy as np
import torch
from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer

from ..engine.plan import SequenceStep

_NUM_COMPILED: Final = 32  # kept, the last used
_MAX_MASK_THREADS: Final = 8
_CORES_PER_MASK_THREAD: Final = 4
_MAX_ERROR_CHARACTERS: Final = 200
_LIMITS: Final = LLParserLimits(max_lexer_states=50_000, verbose_errors=False)  # a state takes 1 to 2 kB


class Grammars:
    """The grammars that one model's sequences use. Safe to use from any thread."""

    def __init__(self, folder: Path | None, vocab_size: int, end_ids: Sequence[int]) -> None:
        """`folder` holds tokenizer.json, which is read when the first grammar comes."""
        self._folder = folder
        self._vocab_size = vocab_size
        self.end_ids = tuple(end_ids)
        self._lock = threading.Lock()
        self._loading = threading.Lock()
        self._tokenizer: LLTokenizer | None = None
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()

    def check(self, grammar: str) -> None:
        """Compiles a grammar, JSON or Lark as llguidance reads them. Raises ValueError if it cannot be followed. May
        take a second."""
        self.matcher(grammar)

    def matcher(self, grammar: str) -> LLMatcher:
        """A matcher at the beginning of a completion. Raises ValueError if the grammar cannot be followed."""
        with self._lock:
            if grammar in self._compiled:
                self._compiled.move_to_end(grammar)
                return self._compiled[grammar].deep_copy()
        made = LLMatcher(self._load(), grammar, log_level=0, limits=_LIMITS)
        made.compute_bitmask()  # fills the lexer's cache for all copies, and may reach a limit
        if made.is_error():
            raise ValueError(f"the grammar cannot be followed: {_brief(made.get_error())}")
        with self._lock:
            self._compiled[grammar] = made
            while len(self._compiled) > _NUM_COMPILED:
                self._compiled.popitem(last=False)
            return made.deep_copy()

    def _load(self) -> LLTokenizer:
        with self._loading:
            if self._tokenizer is None:
                self._tokenizer = self._read()
            return self._tokenizer

    def _read(self) -> LLTokenizer:
        if self._folder is None or not self.end_ids:
            raise ValueError("this model has no tokenizer or no end token, so it cannot follow a grammar")
        try:
            fields = json.loads((self._folder / "tokenizer.json").read_bytes())
            text = json.dumps(fields | {"padding": None, "truncation": None})
            return LLTokenizer(text, n_vocab=self._vocab_size, eos_token=list(self.end_ids))
        except (OSError, ValueError, TypeError):
            raise ValueError("this model's tokenizer.json does not serve for grammars") from None


class Matchers:
    """Follows the grammars of sequences. Used from one thread."""

    def __init__(self, grammars: Grammars, vocab_size: int) -> None:
        self._grammars = grammars
        self._num_words = -(-vocab_size // 32)
        ends = np.zeros(32 * self._num_words, bool)
        ends[list(grammars.end_ids)] = True
        self._ends = torch.from_numpy(np.packbits(ends, bitorder="little").view(np.int32))  # [num_words], bits
        self._matchers: dict[int, LLMatcher | None] = {}  # None where none can be made
        self._num_read: dict[int, int] = {}  # tokens of the sequence that are prompt or were given to its matcher
        # On few cores the model's threads are in the way of others: one wait for a core is longer than most masks.
        num_threads = min(_MAX_MASK_THREADS, len(os.sched_getaffinity(0)) // _CORES_PER_MASK_THREAD)
        self._num_threads = num_threads
        self._executor: LLExecutor | None = None

    def __contains__(self, sequence_id: int) -> bool:
        return sequence_id in self._matchers

    def admit(self, sequence_id: int, grammar: str, history: Sequence[int], num_prompt: int) -> None:
        """Makes a sequence known, or anew; it goes on after `history`. May take a second if nobody has checked the
        grammar before."""
        try:
            matcher = self._grammars.matcher(grammar)
            matcher.consume_tokens(list(history[num_prompt:]))
        except ValueError:
            matcher = None
        self._matchers[sequence_id] = matcher
        self._num_read[sequence_id] = len(history)

    def release(self, sequence_id: int) -> None:
        """Idempotent."""
        self._matchers.pop(sequence_id, None)
        self._num_read.pop(sequence_id, None)

    def masks(self, steps: Sequence[SequenceStep]) -> torch.Tensor:
        """Reads the tokens of such sequences' steps, none of them pending, and says what may follow: int32 [num_steps,
        num_words], a bit for each token.

        Takes 5 to 500 us a sequence, during which other threads run; a GPU meanwhile computes the logits."""
        masks = torch.zeros(len(steps), self._num_words, dtype=torch.int32)
        matchers: list[tuple[LLMatcher, int]] = []
        for row, step in enumerate(steps):
            matcher = self._matchers[step.sequence_id]
            if matcher is None:
                masks[row] = self._ends
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
        return masks


def _brief(error: str) -> str:
    """The first line of what llguidance says, without what it quotes after it."""
    return error.strip().partition("\n")[0].rstrip(" :")[:_MAX_ERROR_CHARACTERS]
