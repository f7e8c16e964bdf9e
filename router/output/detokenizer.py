"""Turns token ids into text while they arrive: whole characters only, cut before stop strings."""

from collections.abc import Sequence, Set
from functools import lru_cache

from ..frontend.tokenizer import Tokenizer

_REPLACEMENT = "\ufffd"
_MAX_HELD_TOKENS = 16
"""A character has at most 4 bytes, hence tokens; more tokens do not complete a character."""
_MAX_CONTEXT_TOKENS = 8


class Detokenizer:
    """Decodes the tokens after a prompt, piece by piece, in amortised constant time per token.

    Decodes a short window, the last finished piece and the tokens after it, and takes the
    difference: with a piece before it, a tokenizer writes the space between two words.
    transformers' TextStreamer and vLLM use the same method. For byte-level tokenizers the pieces
    always add up to `decode(ids)`; for byte-fallback tokenizers they do wherever the bytes are
    UTF-8.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt: Sequence[int], shown_ids: Set[int] = frozenset()
    ) -> None:
        """`shown_ids`: special tokens that have a text here."""
        self._tokenizer = tokenizer
        self._shown_ids = shown_ids
        self._window = self._context(prompt)  # ids: a finished piece, then held tokens
        self._num_finished = len(self._window)
        self._num_emitted = len(self._decode(self._window))  # characters of the window's text

    def push(self, ids: Sequence[int]) -> str:
        """Returns the text that the next ids complete."""
        # One by one: a window can end only where a character ends. Special tokens have no text,
        # but would lengthen a window that waits for the rest of a character.
        return "".join([self._push(token) for token in ids if not self._is_hidden(token)])

    def _push(self, token: int) -> str:
        self._window.append(token)
        text = self._decode(self._window)
        num_held_tokens = len(self._window) - self._num_finished
        stable = text.rstrip(_REPLACEMENT)
        if len(stable) == len(text):
            piece = self._take(text)
            if piece or num_held_tokens > _MAX_HELD_TOKENS:
                self._start_after(num_held_tokens)
            return piece
        if num_held_tokens <= _MAX_HELD_TOKENS:
            return self._take(stable)
        return self._give_up(text)

    def flush(self) -> str:
        """Returns the text that was held back at the end; a cut character becomes U+FFFD."""
        return self._take(self._decode(self._window))

    def _is_hidden(self, token: int) -> bool:
        return token in self._tokenizer.special_ids and token not in self._shown_ids

    def _decode(self, ids: Sequence[int]) -> str:
        """Returns the text of ids without hidden tokens."""
        return self._tokenizer.decode(ids, skip_special=False)

    def _take(self, text: str) -> str:
        piece = text[self._num_emitted :]
        self._num_emitted = max(self._num_emitted, len(text))
        return piece

    def _start_after(self, num_tokens: int) -> None:
        self._window = self._window[len(self._window) - num_tokens :]
        self._num_finished = num_tokens
        self._num_emitted = len(self._decode(self._window))

    def _give_up(self, text: str) -> str:
        """Returns broken bytes as replacement characters; the last may still become a character."""
        piece = self._take(text[:-1])
        self._window = self._window[-4:]
        self._num_finished = 4
        self._num_emitted = len(self._decode(self._window)) - 1
        return piece

    def _context(self, prompt: Sequence[int]) -> list[int]:
        """Returns the shortest end of the prompt that decodes to whole characters."""
        for start in range(len(prompt) - 1, max(len(prompt) - _MAX_CONTEXT_TOKENS, 0) - 1, -1):
            context = [i for i in prompt[start:] if not self._is_hidden(i)]
            text = self._decode(context)
            if text and _REPLACEMENT not in text:
                return context
        return []


class StopStrings:
    """Cuts a text that arrives in pieces before the stop string that is complete first.

    Of two stop strings that end at the same character the longer counts. The result does not
    depend on how the text is cut into pieces. Costs O(characters x stop strings) by the automaton
    of Knuth, Morris and Pratt.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        """`stops`: texts of at least one character each."""
        self.found = ""  # the stop string that was found
        self._stops = sorted(stops, key=len, reverse=True)
        self._fallbacks = [_fallbacks(stop) for stop in self._stops]
        # Of each stop string, the number of characters with which the text ends.
        self._matched = [0] * len(stops)
        self._held = ""  # the end of the text that may begin a stop string

    def push(self, text: str) -> tuple[str, bool]:
        """Returns the text that can be shown, and True if a stop string was found.

        After a stop string, push no more.
        """
        if not self._stops:
            return text, False
        known = len(self._held)
        text = self._held + text
        for end in range(known, len(text)):
            for i, stop in enumerate(self._stops):
                if self._step(i, text[end]):
                    self._held, self.found = "", stop
                    return text[: end + 1 - len(stop)], True
        cut = len(text) - max(self._matched)
        self._held = text[cut:]
        return text[:cut], False

    def flush(self) -> str:
        """Returns the text that was held back at the end."""
        held = self._held
        self._held = ""
        return held

    def _step(self, i: int, char: str) -> bool:
        """Returns True if stop string `i` ends with this character; then step it no more."""
        stop = self._stops[i]
        matched = self._matched[i]
        while matched and stop[matched] != char:
            matched = self._fallbacks[i][matched - 1]
        self._matched[i] = matched = matched + (stop[matched] == char)
        return matched == len(stop)


@lru_cache(maxsize=64)  # the same for all completions of a body; there may be hundreds
def _fallbacks(pattern: str) -> tuple[int, ...]:
    """Returns for each prefix of the pattern the length of its longest border.

    A border is a proper prefix that is also a suffix.
    """
    fallbacks = [0] * len(pattern)
    length = 0
    for i in range(1, len(pattern)):
        while length and pattern[i] != pattern[length]:
            length = fallbacks[length - 1]
        length += pattern[i] == pattern[length]
        fallbacks[i] = length
    return tuple(fallbacks)
