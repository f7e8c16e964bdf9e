"""Constrains completions to grammars, which llguidance compiles and matches.

A sequence whose grammar cannot be compiled here, whose tokens violate it, or which takes more than
the limits in one step fails, and the batch continues. Those whose masks take long sit steps out,
and the others wait for none of them.

The memory of compiled grammars is bounded. What a grammar takes once it is compiled is reserved
before: a tenant gets half of what the others leave. Lexer states are added while masks are
    computed. llguidance does not tell how many bytes
these take, but it takes time to add them: the time of masks is charged as bytes, at the highest
rate that was measured. When these are too many in all, the grammar with the most is compiled again,
without its states; its sequences read their tokens again.

One file because a matcher charges the states that it adds to the grammar, which all its copies
share.
"""

import json
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from queue import Full
from typing import Any, Final
from weakref import WeakSet, WeakValueDictionary

import numpy as np
import torch
from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer

from ....proto.deep_stack import on_deep_stack
from ....proto.tokenizer_file import tokenizer_file
from ...engine.plan import Constrained, SequenceStep

_NUM_RECENT: Final = 32  # kept compiled, used or not
_MAX_COMPILED_BYTES: Final = 256 * 2**20  # of all grammars, without the states that their use adds
_BASE_BYTES: Final = (
    640 * 2**10
)  # the most that a short grammar took: 630 KiB, a regex over all letters
_CHARACTER_BYTES: Final = 300  # for each character: the most was 272, of thousands of short rules
_MAX_STATE_BYTES: Final = 256 * 2**20  # of the states of all grammars
_MAX_RECENT_STATE_BYTES: Final = 64 * 2**20  # of those that are kept, used or not
_LEAST_RENEWED_BYTES: Final = (
    2**20
)  # of the states of a grammar that is compiled again to get rid of them
_BYTES_PER_SECOND: Final = 80e6  # that masks add; grammars of 3 to 200 lexemes added 9 to 80 MB/s
_MASK_BYTES: Final = 1_024  # that any mask is charged,
_WARM_SECONDS: Final = 50e-6  # also one which takes no longer than this and so adds hardly a state
_MAX_MASK_THREADS: Final = 8
_CORES_PER_MASK_THREAD: Final = 4
_COMPILE_NICE: Final = 10
_MAX_SEQUENCE_SECONDS: Final = (
    60.0  # of masks of one sequence; with the slowest ones these are 4,000 tokens
)
_MAX_GUESS_SECONDS: Final = (
    0.005  # of a core, for the masks along one sequence's guesses: the batch waits for them
)
_MAX_ERROR_CHARACTERS: Final = 200
# No step of any grammar that was tried takes more than 15 ms, with 49,152 tokens; llguidance's own
# limits allow 2 s. A choice of 1,024 texts, a schema with 300 optional properties, and 128 tools
# are within them.
_LIMITS: Final = LLParserLimits(
    max_items_in_row=1_500,
    step_max_items=2_000,
    initial_lexer_fuel=100_000,
    step_lexer_fuel=50_000,
    max_lexer_states=50_000,  # a state takes 0.3 to 7 kB, the more, the more lexemes are possible
    verbose_errors=False,
)


GrammarKey = tuple[bytes, str]
"""The owner of a compiled grammar and its text: no tenant notices by the time what another one has
compiled.
"""


@dataclass(slots=True, eq=False, weakref_slot=True)
class CompiledGrammar:
    """Holds a matcher at the beginning of a completion, and what may begin it. Its copies share the
    lexer's states.
    """

    matcher: LLMatcher
    mask: torch.Tensor  # int32 [num_words], a bit for each token
    is_exhausted: bool = False  # the lexer may be full, for good
    tenant: bytes = b""
    num_bytes: int = 0  # that were reserved for it
    state_bytes: float = 0.0  # that the use of its lexer may have added
    generation: int = (
        0  # how often it was compiled again; matchers of earlier ones are to be given up
    )
    renewing: threading.Event | None = None  # set as soon as it is compiled again


@dataclass(slots=True, eq=False, weakref_slot=True)
class _Reservation:
    """Holds the memory of a grammar that is being compiled."""

    tenant: bytes
    num_bytes: int


class GrammarCache:
    """Holds the compiled grammars of one model's sequences. Safe to use from any thread."""

    def __init__(self, folder: Path | None, vocab_size: int, end_ids: Sequence[int]) -> None:
        """`folder` is the model's, whose tokenizer.json is read when the first grammar is loaded."""
        self._folder = folder
        self._vocab_size = vocab_size
        self.end_ids = tuple(end_ids)
        self._lock = threading.RLock()
        self._loading = threading.Lock()
        self._tokenizer: LLTokenizer | None = None
        self._compiled: WeakValueDictionary[GrammarKey, CompiledGrammar] = WeakValueDictionary()
        self._recent: OrderedDict[GrammarKey, CompiledGrammar] = OrderedDict()  # the last used
        # All that are in memory, also those that are worn and those that are being compiled.
        self._held: WeakSet[CompiledGrammar | _Reservation] = WeakSet()
        self._state_room = float(
            _MAX_STATE_BYTES
        )  # may be charged until the states of all are counted again

    def load(self, grammar: str, owner: bytes = b"", tenant: bytes = b"") -> CompiledGrammar:
        """Compiles a grammar, JSON or Lark as llguidance reads them, unless it is compiled for the
        owner; keeps it while the result is held. May take seconds, which do not block other
        threads.

        Raises ValueError if it cannot be compiled, OSError if the tokenizer cannot be read,
        queue.Full if the tenant has all the memory that it may have now.
        """
        key = owner, grammar
        with self._lock:
            compiled = self._compiled.get(key)
        if compiled is None or compiled.is_exhausted:
            # The largest, whose text is mostly escapes, take less than that, and fit alone.
            num_bytes = min(_BASE_BYTES + _CHARACTER_BYTES * len(grammar), _MAX_COMPILED_BYTES // 4)
            reserved = self._reserve(tenant, num_bytes)
            tokenizer = self._load_tokenizer()
            compiled = on_deep_stack(partial(_compile, tokenizer, grammar), nice=_COMPILE_NICE)
            compiled.tenant, compiled.num_bytes = tenant, reserved.num_bytes
        with self._lock:
            faster = self._compiled.get(key)  # of another thread
            compiled = compiled if faster is None or faster.is_exhausted else faster
            self._compiled[key] = compiled
            self._held.add(compiled)
            return self._use(key, compiled)

    def find(self, grammar: str, owner: bytes = b"") -> CompiledGrammar:
        """Returns the compiled grammar of a sequence, worn or not; compiles it only if nobody holds
        it. Raises as `load`.
        """
        with self._lock:
            if compiled := self._compiled.get((owner, grammar)):
                return self._use((owner, grammar), compiled)
        return self.load(grammar, owner)

    def _reserve(self, tenant: bytes, num_bytes: int) -> _Reservation:
        """Reserves memory for a grammar of a tenant as long as the result is held. For that it
        gives up grammars that nobody uses. Raises queue.Full if the tenant then has more than half
        of what the other tenants leave.
        """
        with self._lock:
            while not self._has_room(tenant, num_bytes):
                if not self._recent:
                    raise Full("the memory for grammars is in use")
                self._recent.popitem(last=False)
            reserved = _Reservation(tenant, num_bytes)
            self._held.add(reserved)
            return reserved

    def _has_room(self, tenant: bytes, num_bytes: int) -> bool:
        own = sum([each.num_bytes for each in self._held if each.tenant == tenant])
        others = sum([each.num_bytes for each in self._held]) - own
        return own + num_bytes <= (_MAX_COMPILED_BYTES - others) // 2

    def _use(self, key: GrammarKey, compiled: CompiledGrammar) -> CompiledGrammar:
        self._recent[key] = compiled
        self._recent.move_to_end(key)
        while len(self._recent) > _NUM_RECENT or (
            len(self._recent) > 1
            and sum([each.state_bytes for each in self._recent.values()]) > _MAX_RECENT_STATE_BYTES
        ):
            self._recent.popitem(last=False)
        return compiled

    def matcher(self, grammar: str, owner: bytes = b"") -> LLMatcher:
        """Returns a matcher at the beginning of a completion. Raises as `load`."""
        return self.copy(self.find(grammar, owner))[0]

    def copy(self, compiled: CompiledGrammar) -> tuple[LLMatcher, int]:
        """Returns a matcher at the beginning of a completion, and the generation that it is of."""
        with self._lock:
            return compiled.matcher.deep_copy(), compiled.generation

    def forget(self, grammar: str, owner: bytes = b"") -> None:
        """Makes the next `load` compile it anew: the lexer that all matchers of a grammar share may
        be full.
        """
        key = owner, grammar
        with self._lock:
            self._recent.pop(key, None)
            if compiled := self._compiled.get(key):
                compiled.is_exhausted = True

    def charge(self, grammar: str, compiled: CompiledGrammar, seconds: float) -> None:
        """Counts a mask that took a core so many seconds, by a grammar of this text. If the states
        of all grammars take too much memory, has the one with the most compiled again, beside the
        caller.
        """
        num_bytes = _MASK_BYTES + max(seconds - _WARM_SECONDS, 0.0) * _BYTES_PER_SECOND
        compiled.state_bytes += num_bytes
        self._state_room -= num_bytes
        if self._state_room > 0:
            return
        with self._lock:
            room = _MAX_STATE_BYTES - self._count_states()
            self._state_room = max(room, _LEAST_RENEWED_BYTES)
            if room > 0:
                return
            self._recent.clear()  # what nobody uses is gone with it
            used = [(each, text) for (_, text), each in self._compiled.items()]
            used.append((compiled, grammar))  # which may be worn
            largest, text = max(
                [pair for pair in used if pair[0].renewing is None],
                key=lambda pair: pair[0].state_bytes,
                default=(None, ""),
            )
            if largest is None or largest.state_bytes < _LEAST_RENEWED_BYTES:
                return
            largest.renewing = threading.Event()
        renew = partial(self._renew, largest, text, largest.renewing)
        threading.Thread(target=renew, name="tandem-grammar", daemon=True).start()

    def _count_states(self) -> float:
        """Returns the bytes of all states but those that are about to be given up."""
        found = [each for each in self._held if isinstance(each, CompiledGrammar)]
        return sum([each.state_bytes for each in found if each.renewing is None])

    def _renew(self, compiled: CompiledGrammar, grammar: str, done: threading.Event) -> None:
        """Compiles a grammar again. One that cannot be compiled now, for want of memory, goes on as
        it is.
        """
        fresh: CompiledGrammar | None = None
        with suppress(ValueError, OSError, RuntimeError, MemoryError):
            compile_it = partial(_compile, self._load_tokenizer(), grammar)
            fresh = on_deep_stack(compile_it, nice=_COMPILE_NICE)
        with self._lock:
            if fresh is not None:
                compiled.matcher, compiled.mask = fresh.matcher, fresh.mask
                compiled.generation += 1
            compiled.state_bytes, compiled.renewing = 0.0, None
        done.set()

    def _load_tokenizer(self) -> LLTokenizer:
        """Reads the tokenizer at its first use. Raises ValueError if it does not support grammars,
        OSError if it cannot be read.
        """
        if self._folder is None or not self.end_ids:
            raise ValueError(
                "this model has no tokenizer or no end token, so grammars are not supported"
            )
        with self._loading:
            if self._tokenizer is None:
                try:
                    read = tokenizer_file(self._folder).read_bytes()
                except FileNotFoundError:
                    raise ValueError(
                        "this model has no tokenizer.json, so grammars are not supported"
                    ) from None
                except OSError:
                    raise OSError("tokenizer.json cannot be read") from None
                try:
                    fields = json.loads(read)
                    text = json.dumps(_generated(fields, self._vocab_size))
                    self._tokenizer = LLTokenizer(
                        text, n_vocab=self._vocab_size, eos_token=list(self.end_ids)
                    )
                except (ValueError, TypeError, KeyError, AttributeError):
                    raise ValueError(
                        "this model's tokenizer.json does not support grammars"
                    ) from None
            return self._tokenizer


def _generated(fields: dict[str, Any], vocab_size: int) -> dict[str, Any]:
    """Returns a tokenizer.json without what matters to prompts alone: padding, truncation, and the
    added tokens beyond the embedding, which no model generates.
    """
    added = fields.get("added_tokens") or []
    beyond = {token["content"] for token in added if token["id"] >= vocab_size}
    fields = fields | {"padding": None, "truncation": None}
    if beyond:
        model, vocab = fields["model"], fields["model"]["vocab"]
        if isinstance(vocab, dict):
            model = model | {
                "vocab": {text: index for text, index in vocab.items() if text not in beyond}
            }
        fields["added_tokens"] = [token for token in added if token["content"] not in beyond]
        fields |= {"model": model, "post_processor": None}  # which may name one of them
    return fields


def _compile(tokenizer: LLTokenizer, grammar: str) -> CompiledGrammar:
    """Compiles a grammar, recursing over chains of rules. Raises ValueError if it is not valid or
    over the limits.
    """
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=_LIMITS)
    mask = (
        matcher.compute_bitmask()
    )  # fills the lexer's cache for all copies, and may reach a limit
    if matcher.is_error():
        raise ValueError(f"the grammar cannot be compiled: {_brief(matcher.get_error())}")
    return CompiledGrammar(matcher, torch.frombuffer(bytearray(mask), dtype=torch.int32))


@dataclass(slots=True, eq=False)
class _Constraint:
    """Holds how far one sequence under a grammar is."""

    grammar: str
    owner: bytes
    num_prompt: int
    num_read: int  # of its tokens that are prompt or were given to its matcher
    compiled: CompiledGrammar | None = None  # what its matcher is a copy of, or its mask
    generation: int = 0  # of `compiled`, of which its matcher is
    matcher: LLMatcher | None = None  # at the beginning of a completion none is needed
    mask: torch.Tensor | None = None  # what may follow the tokens that were read, int32 [num_words]
    seconds: float = 0.0  # that its masks have taken
    turn: float = 0.0  # who has the least is next; grows by the same seconds
    failure: str = ""  # why it cannot continue

    def is_ready(self, num_tokens: int) -> bool:
        """Whether what may follow its first num_tokens is known."""
        return bool(self.failure) or (self.num_read >= num_tokens and self.mask is not None)

    def must_wait(self) -> bool:
        """Returns whether its grammar is being compiled again. If that is done, it begins to read
        anew.
        """
        if self.compiled is None:
            return False
        if self.compiled.renewing is not None:
            return True
        if self.matcher is not None and self.generation != self.compiled.generation:
            self.matcher = self.mask = None
            self.num_read = self.num_prompt
        return False

    def charge(self, seconds: float) -> None:
        """Counts the time that its masks take, and ends it when that is too much."""
        self.seconds += seconds
        self.turn += seconds
        if self.seconds > _MAX_SEQUENCE_SECONDS and not self.failure:
            self.fail(
                f"it has taken more than {_MAX_SEQUENCE_SECONDS:g} seconds to find what may follow "
                "its tokens"
            )

    def fail(self, reason: str) -> None:
        """Ends it with its next sample."""
        self.failure = f"grammar: {reason}"
        self.matcher = self.mask = self.compiled = None


class GrammarMatchers:
    """Holds a matcher for each sequence under a grammar. Used from one thread."""

    def __init__(
        self,
        grammars: GrammarCache | None,
        vocab_size: int,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Without `grammars` no sequence is constrained. `clock` returns seconds."""
        self._grammars = grammars
        self._clock = clock
        self._num_words = -(-vocab_size // 32)
        ends = np.zeros(32 * self._num_words, bool)
        ends[list(grammars.end_ids if grammars else ())] = True
        self._ends = torch.from_numpy(
            np.packbits(ends, bitorder="little").view(np.int32)
        )  # [num_words], bits
        self._constraints: dict[int, _Constraint] = {}
        self._failures: dict[int, str] = {}
        self._turn = 0.0  # the highest that was served
        # On few cores more threads compete with the model's: one wait for a core is longer than
        # most masks take.
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
        """Adds a sequence, or replaces it; its tokens so far are `history`. Whatever `prepare` has
        done for it is kept.
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
        """See `Executor.prepare_masks`. One mask takes 5 to 500 us, or what the limits allow, with
        the GIL released.

        Who has had the least time so far comes first: a sequence whose masks take long does not
        delay those whose masks do not. A new one begins where the others are, so none waits for
        ever.
        """
        ready, waiting, renewing = [], [], []
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
            before, now = now, self._clock()
            for known, _ in group:
                known.charge((now - before) / len(group))
            ready += [each.sequence_id for known, each in group if known.is_ready(len(each.tokens))]
        if renewing and not ready:
            _wait_for(renewing[0], seconds)
        return ready

    def masks(self, steps: Sequence[SequenceStep]) -> torch.Tensor:
        """Returns what may follow the tokens of the steps of sequences under grammars, none of them
        pending, which `SequenceStep.each_sample` has split: int32 [num_steps, num_words], a bit for
        each token; for failed sequences only the end tokens. Computes what has not been prepared.
        """
        constraints = {step.sequence_id: self._constraints[step.sequence_id] for step in steps}
        for step in steps:
            known = constraints[step.sequence_id]
            if not step.num_draft and (
                unread := step.token_ids[max(known.num_read - step.start, 0) :]
            ):
                self._consume(known, unread)
        self._compute([known for known in constraints.values() if known.mask is None])
        drafts = {
            step.sequence_id: step.draft for step in steps
        }  # the last step of each has all of its draft
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
        """Returns what may follow the tokens that were read, and what may follow each token of a
        draft, by a copy of the matcher, so that there is nothing to take back. After a guess that
        the grammar does not allow, which is therefore wrong, the masks do not matter. Masks that
        take too long fail the step, but not the sequence.
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
            if (
                is_late or matcher.is_error() or matcher.is_stopped()
            ):  # after its end it fails, but not each time
                self._failures[sequence_id] = "grammar: what may follow guessed tokens is not known"
                matcher = None
        known.turn += time.thread_time() - began
        if draft:
            self._charge_states([known], [time.thread_time() - began])
        return masks

    def take_failures(self) -> dict[int, str]:
        """Returns by sequence why those failed whose masks were computed since the last call."""
        failures, self._failures = self._failures, {}
        return failures

    def _read(
        self, known: _Constraint, tokens: Sequence[int], deadline: float = float("inf")
    ) -> None:
        """Gives the matcher the tokens of a sequence that it has not read yet, until the deadline
        but one at least: the worst take 8 ms each.
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
        """Computes the masks of what may follow the tokens that were read."""
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
        seconds: list[float] = []  # of a core, for each mask
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
        """Counts the memory that masks may have added to the lexers of their grammars."""
        if self._grammars is None:
            return
        for known, each in zip(constraints, seconds, strict=True):
            if known.compiled is not None:
                self._grammars.charge(known.grammar, known.compiled, each)

    def _fail(self, known: _Constraint, matcher: LLMatcher) -> None:
        known.fail(f"the completion cannot continue: {_brief(matcher.get_error())}")
        if self._grammars is not None:
            self._grammars.forget(known.grammar, known.owner)


def _wait_for(known: _Constraint, seconds: float) -> None:
    """Waits until the grammar of a sequence is compiled again, at most so long: nothing else can be
    prepared.
    """
    renewing = None if known.compiled is None else known.compiled.renewing
    if renewing is not None:
        renewing.wait(seconds)


def _brief(error: str) -> str:
    """Returns the first line of llguidance's message, without what it quotes after it."""
    return error.strip().partition("\n")[0].rstrip(" :")[:_MAX_ERROR_CHARACTERS]
