"""Compiles grammars with llguidance and keeps them for the sequences of one model.

The memory of compiled grammars is bounded. The memory of a grammar is reserved before it is
compiled; a tenant gets at most half of the memory that the other tenants leave. llguidance adds
lexer states while masks are computed. It does not report their size, but adding them takes time: so
the time of masks is charged as bytes, at the highest measured rate. If the states of all grammars
exceed their limit, the grammar with the most states is compiled again, without them, and its
sequences read their tokens again.
"""

import json
import threading
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from queue import Full
from typing import Any, Final
from weakref import WeakSet, WeakValueDictionary

import torch
from llguidance import LLMatcher, LLTokenizer

from ....proto.home import tokenizer_file
from ....proto.llguidance_calls import PARSER_LIMITS, on_deep_stack, public_error

_NUM_RECENT: Final = 32  # grammars that stay compiled, used or not
_MAX_COMPILED_BYTES: Final = 256 * 2**20  # of all grammars, without the states that their use adds
# The most that a short grammar took was 630 KiB, a regex over all letters.
_BASE_BYTES: Final = 640 * 2**10
_CHARACTER_BYTES: Final = 300  # per character; the most was 272, of thousands of short rules
_MAX_STATE_BYTES: Final = 256 * 2**20  # of the states of all grammars
_MAX_RECENT_STATE_BYTES: Final = 64 * 2**20  # of the states of recent grammars, used or not
# A grammar with fewer bytes of states is not compiled again to drop them.
_LEAST_RENEWED_BYTES: Final = 2**20
_BYTES_PER_SECOND: Final = 80e6  # added by masks; grammars of 3 to 200 lexemes added 9 to 80 MB/s
# Charged for every mask, also for one faster than _WARM_SECONDS, which adds almost no state.
_MASK_BYTES: Final = 1_024
_WARM_SECONDS: Final = 50e-6
_COMPILE_NICE: Final = 10
_MAX_ERROR_CHARACTERS: Final = 200


GrammarKey = tuple[bytes, str]
"""The owner of a compiled grammar and its text.

Owners do not share grammars, so no tenant can measure what another one has compiled.
"""


@dataclass(slots=True, eq=False, weakref_slot=True)
class CompiledGrammar:
    """Holds a matcher at the beginning of a completion and its first mask.

    Copies of the matcher share the lexer's states.
    """

    matcher: LLMatcher
    mask: torch.Tensor  # int32 [num_words], a bit for each token
    is_exhausted: bool = False  # the lexer may be full permanently
    tenant: bytes = b""
    num_bytes: int = 0  # reserved memory
    state_bytes: float = 0.0  # estimated memory of the lexer's states
    # How often it was compiled again; matchers of earlier generations must be dropped.
    generation: int = 0
    renewing: threading.Event | None = None  # set when it has been compiled again


@dataclass(slots=True, eq=False, weakref_slot=True)
class _Reservation:
    """Reserves memory for a grammar that is being compiled."""

    tenant: bytes
    num_bytes: int


class GrammarCache:
    """Holds the compiled grammars of one model's sequences. Safe to use from any thread."""

    def __init__(self, folder: Path | None, vocab_size: int, end_ids: Sequence[int]) -> None:
        """Takes the model's `folder`; tokenizer.json is read when the first grammar is loaded."""
        self._folder = folder
        self._vocab_size = vocab_size
        self.end_ids = tuple(end_ids)
        self._lock = threading.RLock()
        self._loading = threading.Lock()
        self._tokenizer: LLTokenizer | None = None
        self._compiled: WeakValueDictionary[GrammarKey, CompiledGrammar] = WeakValueDictionary()
        self._recent: OrderedDict[GrammarKey, CompiledGrammar] = OrderedDict()  # the last used
        # All grammars in memory, also exhausted ones and those that are being compiled.
        self._held: WeakSet[CompiledGrammar | _Reservation] = WeakSet()
        # Bytes that may be charged until the states of all grammars are counted again.
        self._state_room = float(_MAX_STATE_BYTES)

    def load(self, grammar: str, owner: bytes = b"", tenant: bytes = b"") -> CompiledGrammar:
        """Compiles a grammar, unless it is already compiled for the owner.

        The grammar is JSON or Lark in llguidance's format. It stays compiled while the result is
        held. May take seconds, but does not block other threads. Raises ValueError if it cannot be
        compiled, OSError if the tokenizer cannot be read, queue.Full if the tenant has used its
        share of the memory.
        """
        key = (owner, grammar)
        with self._lock:
            compiled = self._compiled.get(key)
        if compiled is None or compiled.is_exhausted:
            # The largest grammars, whose text is mostly escapes, take less than this maximum, and
            # one of them fits alone.
            num_bytes = min(_BASE_BYTES + _CHARACTER_BYTES * len(grammar), _MAX_COMPILED_BYTES // 4)
            reserved = self._reserve(tenant, num_bytes)
            tokenizer = self._load_tokenizer()
            compiled = on_deep_stack(partial(_compile, tokenizer, grammar), nice=_COMPILE_NICE)
            compiled.tenant = tenant
            compiled.num_bytes = reserved.num_bytes
        with self._lock:
            faster = self._compiled.get(key)  # another thread may have been faster
            compiled = compiled if faster is None or faster.is_exhausted else faster
            self._compiled[key] = compiled
            self._held.add(compiled)
            return self._use(key, compiled)

    def find(self, grammar: str, owner: bytes = b"") -> CompiledGrammar:
        """Returns a sequence's compiled grammar, exhausted or not; compiles it only if missing.

        Raises as `load`.
        """
        with self._lock:
            if compiled := self._compiled.get((owner, grammar)):
                return self._use((owner, grammar), compiled)
        return self.load(grammar, owner)

    def _reserve(self, tenant: bytes, num_bytes: int) -> _Reservation:
        """Reserves memory for a tenant's grammar as long as the result is held.

        Drops unused grammars if necessary. Raises queue.Full if the tenant would still have more
        than half of the memory that the other tenants leave.
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
        """Returns a matcher at the beginning of a completion, and its generation."""
        with self._lock:
            return compiled.matcher.deep_copy(), compiled.generation

    def forget(self, grammar: str, owner: bytes = b"") -> None:
        """Makes the next `load` compile the grammar again.

        The lexer that all matchers of a grammar share may be full.
        """
        key = (owner, grammar)
        with self._lock:
            self._recent.pop(key, None)
            if compiled := self._compiled.get(key):
                compiled.is_exhausted = True

    def charge(self, grammar: str, compiled: CompiledGrammar, seconds: float) -> None:
        """Charges a mask that took `seconds` of a core to the grammar with this text.

        If the states of all grammars take too much memory, the grammar with the most states is
        compiled again in another thread.
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
            self._recent.clear()  # drops all unused grammars
            used = [(each, text) for (_, text), each in self._compiled.items()]
            used.append((compiled, grammar))  # it may be exhausted
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
        """Returns the bytes of all states, except those of grammars that are being renewed."""
        found = [each for each in self._held if isinstance(each, CompiledGrammar)]
        return sum([each.state_bytes for each in found if each.renewing is None])

    def _renew(self, compiled: CompiledGrammar, grammar: str, done: threading.Event) -> None:
        """Compiles a grammar again; keeps the old one if that fails for lack of memory."""
        fresh: CompiledGrammar | None = None
        with suppress(ValueError, OSError, RuntimeError, MemoryError):
            compile_it = partial(_compile, self._load_tokenizer(), grammar)
            fresh = on_deep_stack(compile_it, nice=_COMPILE_NICE)
        with self._lock:
            if fresh is not None:
                compiled.matcher = fresh.matcher
                compiled.mask = fresh.mask
                compiled.generation += 1
            compiled.state_bytes = 0.0
            compiled.renewing = None
        done.set()

    def _load_tokenizer(self) -> LLTokenizer:
        """Reads the tokenizer at its first use.

        Raises ValueError if it does not support grammars, OSError if it cannot be read.
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
    """Removes from a tokenizer.json the parts that only affect prompts.

    These are padding, truncation, and added tokens beyond the embedding, which no model generates.
    """
    added = fields.get("added_tokens") or []
    beyond = {token["content"] for token in added if token["id"] >= vocab_size}
    fields = fields | {"padding": None, "truncation": None}
    if beyond:
        model = fields["model"]
        vocab = model["vocab"]
        if isinstance(vocab, dict):
            model = model | {
                "vocab": {text: index for text, index in vocab.items() if text not in beyond}
            }
        fields["added_tokens"] = [token for token in added if token["content"] not in beyond]
        # The post-processor may refer to a removed token.
        fields |= {"model": model, "post_processor": None}
    return fields


def _compile(tokenizer: LLTokenizer, grammar: str) -> CompiledGrammar:
    """Compiles a grammar; recurses over chains of rules.

    Raises ValueError if the grammar is invalid or exceeds the limits.
    """
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=PARSER_LIMITS)
    # Fills the lexer's cache for all copies, and may reach a limit.
    mask = matcher.compute_bitmask()
    if matcher.is_error():
        raise ValueError(f"the grammar cannot be compiled: {brief(matcher.get_error())}")
    return CompiledGrammar(matcher, torch.frombuffer(bytearray(mask), dtype=torch.int32))


def brief(error: str) -> str:
    """Returns the first line of llguidance's message, without the quotation after it."""
    return public_error(error).strip().partition("\n")[0].rstrip(" :")[:_MAX_ERROR_CHARACTERS]
