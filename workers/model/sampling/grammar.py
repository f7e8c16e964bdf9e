"""Constrains completions to grammars, which llguidance compiles and matches.

A sequence whose grammar cannot be compiled here, whose tokens violate it, or which takes more than the limits in one
step fails, and the batch continues. Those whose masks take long sit steps out, and the others wait for none of them.
"""

import json
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final
from weakref import WeakValueDictionary

import numpy as np
import torch
from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer

from ....proto.deep_stack import on_deep_stack
from ....proto.tokenizer_file import tokenizer_file
from ...engine.plan import Constrained, SequenceStep

_NUM_RECENT: Final = 32  # kept compiled, used or not
_MAX_MASK_THREADS: Final = 8
_CORES_PER_MASK_THREAD: Final = 4
_COMPILE_NICE: Final = 10
_MAX_SEQUENCE_SECONDS: Final = 60.0  # of masks of one sequence; with the slowest ones these are 4,000 tokens
_MAX_GUESS_SECONDS: Final = 0.005  # of a core, for the masks along one sequence's guesses: the batch waits for them
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


@dataclass(slots=True, eq=False, weakref_slot=True)
class CompiledGrammar:
    """Holds a matcher at the beginning of a completion, and what may begin it. Its copies share the lexer's states."""

    matcher: LLMatcher
    mask: torch.Tensor  # int32 [num_words], a bit for each token
    is_worn: bool = False  # the lexer may be full, for good


class GrammarCache:
    """Holds the compiled grammars of one model's sequences. Safe to use from any thread."""

    def __init__(self, folder: Path | None, vocab_size: int, end_ids: Sequence[int]) -> None:
        """`folder` is the model's, whose tokenizer.json is read when the first grammar is loaded."""
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
        if compiled is None or compiled.is_worn:
            compiled = on_deep_stack(partial(_compile, self._load_tokenizer(), grammar), nice=_COMPILE_NICE)
        with self._lock:
            faster = self._compiled.get(grammar)  # of another thread
            compiled = compiled if faster is None or faster.is_worn else faster
            self._compiled[grammar] = compiled
            return self._use(grammar, compiled)

    def find(self, grammar: str) -> CompiledGrammar:
        """Returns the compiled grammar of a sequence, worn or not; compiles it only if nobody holds it. Raises as
        `load`."""
        with self._lock:
            if compiled := self._compiled.get(grammar):
                return self._use(grammar, compiled)
        return self.load(grammar)

    def _use(self, grammar: str, compiled: CompiledGrammar) -> CompiledGrammar:
        self._recent[grammar] = compiled
        self._recent.move_to_end(grammar)
        if len(self._recent) > _NUM_RECENT:
            self._recent.popitem(last=False)
        return compiled

    def matcher(self, grammar: str) -> LLMatcher:
        """Returns a matcher at the beginning of a completion. Raises ValueError if the grammar cannot be compiled."""
        found = self.find(grammar)
        with self._lock:
            return found.matcher.deep_copy()

    def forget(self, grammar: str) -> None:
        """Makes the next `load` compile it anew: the lexer that all matchers of a grammar share may be full."""
        with self._lock:
            self._recent.pop(grammar, None)
            if compiled := self._compiled.get(grammar):
                compiled.is_worn = True

    def _load_tokenizer(self) -> LLTokenizer:
        """Reads the tokenizer at its first use. Raises ValueError if it does not support grammars."""
        if self._folder is None or not self.end_ids:
            raise ValueError("this model has no tokenizer or no end token, so grammars are not supported")
        with self._loading:
            if self._tokenizer is None:
                try:
                    fields = json.loads(tokenizer_file(self._folder).read_bytes())
                    text = json.dumps(_generated(fields, self._vocab_size))
                    self._tokenizer = LLTokenizer(text, n_vocab=self._vocab_size, eos_token=list(self.end_ids))
                except (OSError, ValueError, TypeError, KeyError):
                    raise ValueError("this model's tokenizer.json does not support grammars") from None
            return self._tokenizer


def _generated(fields: dict[str, Any], vocab_size: int) -> dict[str, Any]:
    """Returns a tokenizer.json without what matters to prompts alone: padding, truncation, and the added tokens
    beyond the embedding, which no model generates."""
    added = fields.get("added_tokens") or []
    beyond = {token["content"] for token in added if token["id"] >= vocab_size}
    fields = fields | {"padding": None, "truncation": None}
    if beyond:
        model, vocab = fields["model"], fields["model"]["vocab"]
        if isinstance(vocab, dict):
            model = model | {"vocab": {text: index for text, index in vocab.items() if text not in beyond}}
        fields["added_tokens"] = [token for token in added if token["content"] not in beyond]
        fields |= {"model": model, "post_processor": None}  # which may name one of them
    return fields


def _compile(tokenizer: LLTokenizer, grammar: str) -> CompiledGrammar:
    """Compiles a grammar, recursing over chains of rules. Raises ValueError if it is not valid or over the limits."""
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=_LIMITS)
    mask = matcher.compute_bitmask()  # fills the lexer's cache for all copies, and may reach a limit
    if matcher.is_error():
        raise ValueError(f"the grammar cannot be compiled: {_brief(matcher.get_error())}")
    return CompiledGrammar(matcher, torch.frombuffer(bytearray(mask), dtype=torch.int32))


@dataclass(slots=True, eq=False)
class _Constraint:
    """Holds how far one sequence under a grammar is."""

    grammar: str
    num_read: int  # of its tokens that are prompt or were given to its matcher
    matcher: LLMatcher | None = None  # at the beginning of a completion none is needed
    mask: torch.Tensor | None = None  # what may follow the tokens that were read, int32 [num_words]
    seconds: float = 0.0  # that its masks have taken
    turn: float = 0.0  # who has the least is next; grows by the same seconds
    failure: str = ""  # why it cannot continue

    def is_ready(self, num_tokens: int) -> bool:
        """Whether what may follow its first num_tokens is known."""
        return bool(self.failure) or (self.num_read >= num_tokens and self.mask is not None)

    def charge(self, seconds: float) -> None:
        """Counts the time that its masks take, and ends it when that is too much."""
        self.seconds += seconds
        self.turn += seconds
        if self.seconds > _MAX_SEQUENCE_SECONDS and not self.failure:
            self.fail(f"it has taken more than {_MAX_SEQUENCE_SECONDS:g} seconds to find what may follow its tokens")

    def fail(self, reason: str) -> None:
        """Ends it with its next sample."""
        self.failure = f"grammar: {reason}"
        self.matcher = self.mask = None


class GrammarMatchers:
    """Holds a matcher for each sequence under a grammar. Used from one thread."""

    def __init__(
        self, grammars: GrammarCache | None, vocab_size: int, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        """Without `grammars` no sequence is constrained. `clock` returns seconds."""
        self._grammars = grammars
        self._clock = clock
        self._num_words = -(-vocab_size // 32)
        ends = np.zeros(32 * self._num_words, bool)
        ends[list(grammars.end_ids if grammars else ())] = True
        self._ends = torch.from_numpy(np.packbits(ends, bitorder="little").view(np.int32))  # [num_words], bits
        self._constraints: dict[int, _Constraint] = {}
        self._failures: dict[int, str] = {}
        self._turn = 0.0  # the highest that was served
        # On few cores more threads compete with the model's: one wait for a core is longer than most masks take.
        self._num_threads = min(_MAX_MASK_THREADS, len(os.sched_getaffinity(0)) // _CORES_PER_MASK_THREAD)
        self._executor: LLExecutor | None = None

    def __contains__(self, sequence_id: int) -> bool:
        return sequence_id in self._constraints

    def admit(self, sequence_id: int, grammar: str, history: Sequence[int], num_prompt: int) -> None:
        """Adds a sequence, or replaces it; its tokens so far are `history`. Whatever `prepare` has done for it is
        kept."""
        if self._grammars is None:
            return
        known = self._constraints.get(sequence_id)
        if known is None or known.grammar != grammar or not known.is_ready(len(history)):
            known = self._constraints[sequence_id] = _Constraint(grammar, num_prompt, turn=self._turn)
            if len(history) > num_prompt:
                self._read(known, history)

    def release(self, sequence_id: int) -> None:
        """Removes a sequence, if it is there."""
        self._constraints.pop(sequence_id, None)

    def prepare(self, sequences: Sequence[Constrained], seconds: float) -> Collection[int]:
        """See `Executor.prepare_masks`. One mask takes 5 to 500 us, or what the limits allow, with the GIL released.

        Who has had the least time so far comes first: a sequence whose masks take long does not delay those whose masks
        do not. A new one begins where the others are, so none waits for ever."""
        ready, waiting = [], []
        for each in sequences:
            known = self._constraints.get(each.sequence_id)
            if known is None:
                known = _Constraint(each.grammar, each.num_prompt, turn=self._turn)
                self._constraints[each.sequence_id] = known
            if known.is_ready(len(each.tokens)):
                ready.append(each.sequence_id)
            else:
                waiting.append((known, each))
        waiting.sort(key=lambda pair: pair[0].turn)
        began = now = self._clock()
        size = max(self._num_threads, 1)
        for group in (waiting[first : first + size] for first in range(0, len(waiting), size)):
            if now > began + seconds:
                break
            self._turn = max(self._turn, group[-1][0].turn)
            for known, each in group:
                self._read(known, each.tokens, began + seconds)
            self._compute([known for known, each in group if known.num_read == len(each.tokens)])
            before, now = now, self._clock()
            for known, _ in group:
                known.charge((now - before) / len(group))
            ready += [each.sequence_id for known, each in group if known.is_ready(len(each.tokens))]
        return ready

    def masks(self, steps: Sequence[SequenceStep]) -> torch.Tensor:
        """Returns what may follow the tokens of the steps of sequences under grammars, none of them pending, which
        `SequenceStep.each_sample` has split: int32 [num_steps, num_words], a bit for each token; for failed sequences
        only the end tokens. Computes what has not been prepared."""
        constraints = {step.sequence_id: self._constraints[step.sequence_id] for step in steps}
        for step in steps:
            known = constraints[step.sequence_id]
            if not step.num_draft and (unread := step.token_ids[max(known.num_read - step.start, 0) :]):
                self._consume(known, unread)
        self._compute([known for known in constraints.values() if known.mask is None])
        drafts = {step.sequence_id: step.draft for step in steps}  # the last step of each has all of its draft
        found = {number: self._along(number, known, drafts[number]) for number, known in constraints.items()}
        for number, known in constraints.items():
            if known.failure:
                self._failures[number] = known.failure
        return torch.stack([found[step.sequence_id][step.num_draft] for step in steps])

    def _along(self, sequence_id: int, known: _Constraint, draft: Sequence[int]) -> list[torch.Tensor]:
        """Returns what may follow the tokens that were read, and what may follow each token of a draft, by a copy of
        the matcher, so that there is nothing to take back. After a guess that the grammar does not allow, which is
        therefore wrong, the masks do not matter. Masks that take too long fail the step, but not the sequence."""
        masks = [self._ends if known.mask is None else known.mask]
        matcher = known.matcher.deep_copy() if draft and known.matcher is not None else None
        began = time.thread_time()
        for guess in draft:
            if matcher is not None and not int(masks[-1][guess // 32]) >> guess % 32 & 1:
                matcher = None
            if matcher is None:
                masks.append(self._ends)
                continue
            matcher.consume_token(guess)
            masks.append(torch.zeros(self._num_words, dtype=torch.int32))
            matcher.unsafe_compute_mask_ptr(masks[-1].data_ptr(), 4 * self._num_words)
            is_late = time.thread_time() - began > _MAX_GUESS_SECONDS
            if is_late or matcher.is_error() or matcher.is_stopped():  # after its end it fails, but not each time
                self._failures[sequence_id] = "grammar: what may follow guessed tokens is not known"
                matcher = None
        known.turn += time.thread_time() - began
        return masks

    def take_failures(self) -> dict[int, str]:
        """Returns by sequence why those failed whose masks were computed since the last call."""
        failures, self._failures = self._failures, {}
        return failures

    def _read(self, known: _Constraint, tokens: Sequence[int], deadline: float = float("inf")) -> None:
        """Gives the matcher the tokens of a sequence that it has not read yet, until the deadline but one at least: the
        worst take 8 ms each."""
        while known.num_read < len(tokens) and not known.failure:
            self._consume(known, (tokens[known.num_read],))
            if self._clock() > deadline:
                return

    def _consume(self, known: _Constraint, tokens: Sequence[int]) -> None:
        known.mask = None
        if known.matcher is None and not known.failure and self._grammars is not None:
            try:
                known.matcher = self._grammars.matcher(known.grammar)
            except ValueError as error:
                known.fail(str(error))
        if known.matcher is not None:
            known.matcher.consume_tokens(list(tokens))
        known.num_read += len(tokens)

    def _compute(self, constraints: Sequence[_Constraint]) -> None:
        """Computes the masks of what may follow the tokens that were read."""
        todo: list[tuple[_Constraint, LLMatcher]] = []
        for known in constraints:
            if known.matcher is not None:
                todo.append((known, known.matcher))
            elif not known.failure and self._grammars is not None:
                try:
                    known.mask = self._grammars.find(known.grammar).mask[: self._num_words]
                except ValueError as error:
                    known.fail(str(error))
        masks = torch.zeros(len(todo), self._num_words, dtype=torch.int32)
        num_bytes = 4 * self._num_words
        if self._num_threads > 1 and len(todo) > 1:
            self._executor = self._executor or LLExecutor(self._num_threads)
            matchers = [(matcher, row) for row, (_, matcher) in enumerate(todo)]
            self._executor.unsafe_compute_mask_ptr(matchers, masks.data_ptr(), num_bytes, len(todo))
        else:
            for row, (_, matcher) in enumerate(todo):
                matcher.unsafe_compute_mask_ptr(masks.data_ptr() + row * num_bytes, num_bytes)
        for mask, (known, matcher) in zip(masks, todo, strict=True):
            known.mask = mask
            if matcher.is_error():
                self._fail(known, matcher)

    def _fail(self, known: _Constraint, matcher: LLMatcher) -> None:
        known.fail(f"the completion cannot continue: {_brief(matcher.get_error())}")
        if self._grammars is not None:
            self._grammars.forget(known.grammar)


def _brief(error: str) -> str:
    """Returns the first line of llguidance's message, without what it quotes after it."""
    return error.strip().partition("\n")[0].rstrip(" :")[:_MAX_ERROR_CHARACTERS]
