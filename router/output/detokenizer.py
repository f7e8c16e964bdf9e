"""Turns token ids into text while they arrive: whole characters only, cut before stop strings."""

from collections.abc import Sequence, Set
from functools import lru_cache

from ..frontend.tokenizer import Tokenizer

_REPLACEMENT = "\ufffd"
_MAX_HELD_TOKENS = 16
"""A character has at most 4 bytes, hence tokens; bytes that are no text after this many tokens stay
none.
"""
_MAX_CONTEXT_TOKENS = 8


class Detokenizer:
    """Decodes the tokens after a prompt, piece by piece, in amortised constant time per token.

    Decodes a short window, the last finished piece and what follows it, and takes the difference: a
    piece before makes a tokenizer write the space between two words. The same method serves
    transformers' TextStreamer and vLLM. For byte-level tokenizers the pieces always add up to
    `decode(ids)`; for byte-fallback ones they do wherever the bytes are UTF-8.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt: Sequence[int], shown_ids: Set[int] = frozenset()
    ) -> None:
        """`shown_ids`: special tokens that are text here."""
        self._tokenizer = tokenizer
        self._shown_ids = shown_ids
        self._window = self._context(prompt)  # ids: a finished piece, then what is held
        self._num_finished = len(self._window)
        self._num_emitted = len(self._decode(self._window))  # characters of the window's text

    def push(self, ids: Sequence[int]) -> str:
        """Takes the next ids; returns the text that they complete."""
        # One by one: only where a character ends can a window be closed. Special tokens have no
        # text, but would lengthen a window that waits for the rest of a character.
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
        """Ends the text; returns what was held back, a cut character as U+FFFD."""
        return self._take(self._decode(self._window))

    def _is_hidden(self, token: int) -> bool:
        return token in self._tokenizer.special_ids and token not in self._shown_ids

    def _decode(self, ids: Sequence[int]) -> str:
        """Returns the text of ids, none of which is hidden."""
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
        """Emits broken bytes as they are. Only the last replacement can still become a character."""
        piece = self._take(text[:-1])
        self._window = self._window[-4:]
        self._num_finished = 4
        self._num_emitted = len(self._decode(self._window)) - 1
        return piece

    def _context(self, prompt: Sequence[int]) -> list[int]:
        """Returns the shortest end of the prompt that is text by itself."""
        for start in range(len(prompt) - 1, max(len(prompt) - _MAX_CONTEXT_TOKENS, 0) - 1, -1):
            context = [i for i in prompt[start:] if not self._is_hidden(i)]
            text = self._decode(context)
            if text and _REPLACEMENT not in text:
                return context
        return []


class StopStrings:
    """Cuts a text that arrives in pieces before the stop string that is complete first.

    Of two stop strings that are complete at the same character the longer counts. The result does
    not depend on how the text is cut into pieces. Costs O(characters x stop strings) by the
    automaton of Knuth, Morris and Pratt.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        """`stops`: none of them empty."""
        self.found = ""  # the stop string that was complete
        self._stops = sorted(stops, key=len, reverse=True)
        self._fallbacks = [_fallbacks(stop) for stop in self._stops]
        self._matched = [0] * len(
            stops
        )  # characters of each stop string that the text so far ends with
        self._held = ""  # the end of the text so far that may begin a stop string

    def push(self, text: str) -> tuple[str, bool]:
        """Returns the text that is safe to show and whether a stop string was found; after that,
        push no more.
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
        """Ends the text; returns what was held back."""
        held, self._held = self._held, ""
        return held

    def _step(self, i: int, char: str) -> bool:
        """Returns whether stop string `i` ends with this character; then it must not be stepped
        again.
        """
        stop, matched = self._stops[i], self._matched[i]
        while matched and stop[matched] != char:
            matched = self._fallbacks[i][matched - 1]
        self._matched[i] = matched = matched + (stop[matched] == char)
        return matched == len(stop)


@lru_cache(maxsize=64)  # the same for all completions of a body, of which there may be hundreds
def _fallbacks(pattern: str) -> tuple[int, ...]:
    """Returns for each prefix of the pattern the length of its longest proper prefix that it also
    ends with.
    """
    fallbacks = [0] * len(pattern)
    length = 0
    for i in range(1, len(pattern)):
        while length and pattern[i] != pattern[length]:
            length = fallbacks[length - 1]
        length += pattern[i] == pattern[length]
        fallbacks[i] = length
    return tuple(fallbacks)


class CompletionText:
    """Makes the text of one completion: detokenized, cut before the first stop string.

    The text of the first min_tokens tokens is shown at once; a stop string begins after it."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt: Sequence[int],
        stops: Sequence[str],
        min_tokens: int = 0,
        shown_ids: Set[int] = frozenset(),
    ) -> None:
        """`shown_ids`: see Detokenizer."""
        self._detokenizer = Detokenizer(tokenizer, prompt, shown_ids)
        self._stops = StopStrings(stops)
        self._has_stops = bool(stops)
        self._num_unchecked = min_tokens  # tokens still to come in which no stop string is searched

    def push(self, ids: Sequence[int]) -> tuple[str, int, bool]:
        """Takes the next ids. Returns the text, how many of the ids count (all, or those up to the
        end of a stop string), and whether a stop string was found; after that, push no more.
        """
        if not self._has_stops:
            return self._detokenizer.push(ids), len(ids), False
        texts = []
        unchecked = ids[: self._num_unchecked]
        if unchecked:
            self._num_unchecked -= len(unchecked)
            texts.append(self._detokenizer.push(unchecked))
        # One by one, to know which of them ends the stop string.
        for count, token in enumerate(ids[len(unchecked) :], start=len(unchecked) + 1):
            text, stopped = self._stops.push(self._detokenizer.push((token,)))
            texts.append(text)
            if stopped:
                return "".join(texts), count, True
        return "".join(texts), len(ids), False

    @property
    def stop_string(self) -> str:
        """The stop string that was found; "" if none was."""
        return self._stops.found

    def finish(self) -> tuple[str, bool]:
        """Ends the completion. Returns the text that was held back, and whether it ended before a
        stop string.
        """
        text = self._detokenizer.flush()
        if self._num_unchecked:
            return text, False
        text, stopped = self._stops.push(text)
        return text + self._stops.flush(), stopped
