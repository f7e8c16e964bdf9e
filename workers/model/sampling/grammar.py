"""Constrains completions to grammars with llguidance's matchers.

A sequence fails alone, while the batch continues, if its grammar cannot be compiled here, its
tokens violate the grammar, or a step exceeds the limits. Sequences with slow masks skip steps, and
the others do not wait for them.
"""

import os
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from queue import Full
from typing import Final

import numpy as np
import torch
from llguidance import LLExecutor, LLMatcher

from ...engine.plan import Constrained, SequenceStep
from .grammar_cache import CompiledGrammar, GrammarCache, brief

_MAX_MASK_THREADS: Final = 8
_CORES_PER_MASK_THREAD: Final = 4
_MAX_SEQUENCE_SECONDS: Final = 60.0  # for the masks of one sequence; 4,000 tokens of the slowest
# Of a core, for the masks of one sequence's draft, because the batch waits for them.
_MAX_GUESS_SECONDS: Final = 0.005


@dataclass(slots=True, eq=False)
class _Constraint:
    """Tracks how far a sequence with a grammar has been matched."""

    grammar: str
    owner: bytes
    num_prompt: int
    num_read: int  # tokens of the prompt, or that the matcher has consumed
    compiled: CompiledGrammar | None = None  # the source of `matcher` or `mask`
    generation: int = 0  # generation of `compiled` from which `matcher` was copied
    matcher: LLMatcher | None = None  # not needed at the beginning of a completion
    mask: torch.Tensor | None = None  # tokens that may follow the read tokens, int32 [num_words]
    seconds: float = 0.0  # time of its masks
    turn: float = 0.0  # the sequence with the least is next; grows by the same seconds
    failure: str = ""  # why the sequence cannot continue

    def is_ready(self, num_tokens: int) -> bool:
        """Returns True if the mask after the first `num_tokens` tokens is known."""
        return bool(self.failure) or (self.num_read >= num_tokens and self.mask is not None)

    def must_wait(self) -> bool:
        """Returns True if its grammar is being compiled again.

        After that, resets the sequence so that it reads its tokens again.
        """
        if self.compiled is None:
            return False
        if self.compiled.renewing is not None:
            return True
        if self.matcher is not None and self.generation != self.compiled.generation:
            self.matcher = None
            self.mask = None
            self.num_read = self.num_prompt
        return False

    def charge(self, seconds: float) -> None:
        """Adds the time of its masks; fails the sequence if that exceeds the limit."""
        self.seconds += seconds
        self.turn += seconds
        if self.seconds > _MAX_SEQUENCE_SECONDS and not self.failure:
            self.fail(
                "computing the allowed tokens of the sequence has taken more than "
                f"{_MAX_SEQUENCE_SECONDS:g} seconds"
            )

    def fail(self, reason: str) -> None:
        """Makes the sequence fail with its next sample."""
        self.failure = f"grammar: {reason}"
        self.matcher = None
        self.mask = None
        self.compiled = None


class GrammarMatchers:
    """Holds a matcher for each sequence with a grammar. Used from one thread."""

    def __init__(
        self,
        grammars: GrammarCache | None,
        vocab_size: int,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Constrains no sequence if `grammars` is None. `clock` returns seconds."""
        self._grammars = grammars
        self._clock = clock
        self._num_words = -(-vocab_size // 32)
        ends = np.zeros(32 * self._num_words, bool)
        ends[list(grammars.end_ids if grammars else ())] = True
        # Mask of the end tokens: bits in int32 [num_words].
        self._ends = torch.from_numpy(np.packbits(ends, bitorder="little").view(np.int32))
        self._constraints: dict[int, _Constraint] = {}
        self._failures: dict[int, str] = {}
        self._turn = 0.0  # the highest turn that was served
        # On few cores more threads compete with the model's threads: one wait for a core takes
        # longer than most masks.
        self._num_threads = min(
            _MAX_MASK_THREADS, len(os.sched_getaffinity(0)) // _CORES_PER_MASK_THREAD
        )
        self._executor: LLExecutor | None = None

    def __contains__(self, sequence_id: int) -> bool:
        return sequence_id in self._constraints

    def admit(
        self,
        sequence_id: int,
        grammar: str,
        history: Sequence[int],
        num_prompt: int,
        owner: bytes = b"",
    ) -> None:
        """Adds a sequence with the tokens `history`, or replaces it.

        Keeps the work that `prepare` has already done for it.
        """
        if self._grammars is None:
            return
        known = self._constraints.get(sequence_id)
        if known is None or known.grammar != grammar or not known.is_ready(len(history)):
            known = _Constraint(grammar, owner, num_prompt, num_read=num_prompt, turn=self._turn)
            self._constraints[sequence_id] = known
            if len(history) > num_prompt:
                self._read(known, history)

    def release(self, sequence_id: int) -> None:
        """Removes a sequence, if it is there."""
        self._constraints.pop(sequence_id, None)

    def prepare(self, sequences: Sequence[Constrained], seconds: float) -> Collection[int]:
        """Implements `Executor.prepare_masks`.

        One mask takes 5 to 500 us, or up to the limits, with the GIL released. The sequence that
        has used the least time comes first, so slow masks do not delay fast ones. A new sequence
        starts at the turn of the others, so no sequence waits forever.
        """
        ready: list[int] = []
        waiting: list[tuple[_Constraint, Constrained]] = []
        renewing: list[_Constraint] = []
        for each in sequences:
            known = self._constraints.get(each.sequence_id)
            if known is None:
                known = _Constraint(
                    each.grammar,
                    each.owner,
                    each.num_prompt,
                    num_read=each.num_prompt,
                    turn=self._turn,
                )
                self._constraints[each.sequence_id] = known
            if known.is_ready(len(each.tokens)):
                ready.append(each.sequence_id)
            elif known.must_wait():
                renewing.append(known)
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
            before = now
            now = self._clock()
            for known, _ in group:
                known.charge((now - before) / len(group))
            ready += [each.sequence_id for known, each in group if known.is_ready(len(each.tokens))]
        if renewing and not ready:
            _wait_for(renewing[0], seconds)
        return ready

    def masks(self, steps: Sequence[SequenceStep]) -> torch.Tensor:
        """Returns the masks of allowed tokens: int32 [num_steps, num_words], one bit per token.

        The steps come from `SequenceStep.each_sample`; all sequences have grammars and no pending
        tokens. The mask of a failed sequence has only the end tokens. Masks that were not prepared
        are computed now.
        """
        constraints = {step.sequence_id: self._constraints[step.sequence_id] for step in steps}
        for step in steps:
            known = constraints[step.sequence_id]
            if not step.num_draft and (
                unread := step.token_ids[max(known.num_read - step.start, 0) :]
            ):
                self._consume(known, unread)
        self._compute([known for known in constraints.values() if known.mask is None])
        # The last step of each sequence has its whole draft.
        drafts = {step.sequence_id: step.draft for step in steps}
        found = {
            number: self._along(number, known, drafts[number])
            for number, known in constraints.items()
        }
        for number, known in constraints.items():
            if known.failure:
                self._failures[number] = known.failure
        return torch.stack([found[step.sequence_id][step.num_draft] for step in steps])

    def _along(
        self, sequence_id: int, known: _Constraint, draft: Sequence[int]
    ) -> list[torch.Tensor]:
        """Returns the mask after the read tokens and the mask after each draft token.

        A copy of the matcher consumes the draft, so nothing must be rolled back. The masks after a
        draft token that the grammar does not allow do not matter, because that token is wrong.
        Masks that take too long fail the step, but not the sequence.
        """
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
            # A matcher that has stopped fails later, but not always.
            if is_late or matcher.is_error() or matcher.is_stopped():
                self._failures[sequence_id] = (
                    "grammar: the allowed tokens after a draft token are not known"
                )
                matcher = None
        known.turn += time.thread_time() - began
        if draft:
            self._charge_states([known], [time.thread_time() - began])
        return masks

    def fail_unfinished(self, sequence_ids: Sequence[int], masks: torch.Tensor) -> None:
        """Fails the sequences whose grammars do not allow the end.

        Bans have left them no other token. Their `masks` are int32 [num_sequences, num_words].
        """
        may_end = (masks & self._ends).any(-1).tolist()
        for sequence_id, is_allowed in zip(sequence_ids, may_end, strict=True):
            if not is_allowed:
                self._failures.setdefault(
                    sequence_id,
                    "grammar: bad_words or min_tokens exclude every token that the grammar allows",
                )

    def take_failures(self) -> dict[int, str]:
        """Returns and clears the reasons of failures since the last call, by sequence."""
        failures = self._failures
        self._failures = {}
        return failures

    def _read(
        self, known: _Constraint, tokens: Sequence[int], deadline: float = float("inf")
    ) -> None:
        """Passes unread tokens to the matcher until the deadline, but at least one.

        The slowest tokens take 8 ms each.
        """
        while known.num_read < len(tokens) and not known.failure:
            self._consume(known, (tokens[known.num_read],))
            if self._clock() > deadline:
                return

    def _consume(self, known: _Constraint, tokens: Sequence[int]) -> None:
        known.mask = None
        if known.matcher is None and not known.failure and self._grammars is not None:
            try:
                known.compiled = self._grammars.find(known.grammar, known.owner)
                known.matcher, known.generation = self._grammars.copy(known.compiled)
            except (ValueError, OSError, Full) as error:
                known.fail(str(error))
        if known.matcher is not None:
            known.matcher.consume_tokens(list(tokens))
        known.num_read += len(tokens)

    def _compute(self, constraints: Sequence[_Constraint]) -> None:
        """Computes the masks of the tokens that may follow the read tokens."""
        todo: list[tuple[_Constraint, LLMatcher]] = []
        for known in constraints:
            if known.matcher is not None:
                todo.append((known, known.matcher))
            elif not known.failure and self._grammars is not None:
                try:
                    known.compiled = self._grammars.find(known.grammar, known.owner)
                    known.mask = known.compiled.mask[: self._num_words]
                except (ValueError, OSError, Full) as error:
                    known.fail(str(error))
        masks = torch.zeros(len(todo), self._num_words, dtype=torch.int32)
        num_bytes = 4 * self._num_words
        seconds: list[float] = []  # of a core, per mask
        if self._num_threads > 1 and len(todo) > 1:
            self._executor = self._executor or LLExecutor(self._num_threads)
            matchers = [(matcher, row) for row, (_, matcher) in enumerate(todo)]
            began = time.perf_counter()
            self._executor.unsafe_compute_mask_ptr(matchers, masks.data_ptr(), num_bytes, len(todo))
            num_turns = -(-len(todo) // self._num_threads)
            seconds = [(time.perf_counter() - began) / num_turns] * len(todo)
        else:
            for row, (_, matcher) in enumerate(todo):
                began = time.thread_time()
                matcher.unsafe_compute_mask_ptr(masks.data_ptr() + row * num_bytes, num_bytes)
                seconds.append(time.thread_time() - began)
        self._charge_states([known for known, _ in todo], seconds)
        for mask, (known, matcher) in zip(masks, todo, strict=True):
            known.mask = mask
            if matcher.is_error():
                self._fail(known, matcher)

    def _charge_states(self, constraints: Sequence[_Constraint], seconds: Sequence[float]) -> None:
        """Charges the memory that masks may have added to the lexers of their grammars."""
        if self._grammars is None:
            return
        for known, each in zip(constraints, seconds, strict=True):
            if known.compiled is not None:
                self._grammars.charge(known.grammar, known.compiled, each)

    def _fail(self, known: _Constraint, matcher: LLMatcher) -> None:
        known.fail(f"the completion cannot continue: {brief(matcher.get_error())}")
        if self._grammars is not None:
            self._grammars.forget(known.grammar, known.owner)


def _wait_for(known: _Constraint, seconds: float) -> None:
    """Waits at most `seconds` until a sequence's grammar is compiled again.

    Nothing else can be prepared meanwhile.
    """
    renewing = None if known.compiled is None else known.compiled.renewing
    if renewing is not None:
        renewing.wait(seconds)
