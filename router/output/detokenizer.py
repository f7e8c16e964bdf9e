"""Token ids to text while they arrive: whole characters only, nothing of a stop string.

Pure: knows nothing of requests, networks or time.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from ..frontend.tokenizer import Tokenizer

_REPLACEMENT = "\ufffd"
_MAX_HELD_TOKENS = 16
"""A character has at most 4 bytes, hence tokens; whatever is still broken after this many stays broken."""
_MAX_CONTEXT_TOKENS = 8


class Detokenizer:
    """Decodes the tokens after a prompt, piece by piece, in amortised constant time per token.

    Decodes a short window, the last finished piece and what follows it, and takes the difference: a piece before
    makes a tokenizer write the space between two words. The same method serves transformers' TextStreamer and vLLM.
    For byte-level tokenizers the pieces always add up to `decode(ids)`; for byte-fallback ones they do wherever the
    bytes are UTF-8.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._window = self._context(prompt)  # ids: a finished piece, then what is held
        self._num_finished = len(self._window)
        self._num_emitted = len(tokenizer.decode(self._window))  # characters of the window's text

    def push(self, ids: Sequence[int]) -> str:
        """Takes the next ids; returns the text that they complete, perhaps none."""
        # One by one: only where a character ends can a window be closed. Special tokens have no text, but would
        # lengthen a window that waits for the rest of a character.
        return "".join([self._push(token) for token in ids if token not in self._tokenizer.special_ids])

    def _push(self, token: int) -> str:
        self._window.append(token)
        text = self._tokenizer.decode(self._window)
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
        """The end: returns what was held back, a cut character as U+FFFD."""
        return self._take(self._tokenizer.decode(self._window))

    def _take(self, text: str) -> str:
        piece = text[self._num_emitted :]
        self._num_emitted = max(self._num_emitted, len(text))
        return piece

    def _start_after(self, num_tokens: int) -> None:
        self._window = self._window[len(self._window) - num_tokens :]
        self._num_finished = num_tokens
        self._num_emitted = len(self._tokenizer.decode(self._window))

    def _give_up(self, text: str) -> str:
        """Emits broken bytes as they are. Only the last replacement can still become a character."""
        piece = self._take(text[:-1])
        self._window = self._window[-4:]
        self._num_finished = 4
        self._num_emitted = len(self._tokenizer.decode(self._window)) - 1
        return piece

    def _context(self, prompt: Sequence[int]) -> list[int]:
        """The shortest end of the prompt that is text by itself."""
        for start in range(len(prompt) - 1, max(len(prompt) - _MAX_CONTEXT_TOKENS, 0) - 1, -1):
            context = [i for i in prompt[start:] if i not in self._tokenizer.special_ids]
            text = self._tokenizer.decode(context)
            if text and _REPLACEMENT not in text:
                return context
        return []


class StopStrings:
    """Cuts a text that arrives in pieces before the stop string that is complete first.

    Of two stop strings that are complete at the same character the longer counts. The result does not depend on how
    the text is cut into pieces. Costs O(characters x stop strings) by the automaton of Knuth, Morris and Pratt.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        """`stops`: none of them empty."""
        self._automata = [_Automaton(stop) for stop in sorted(stops, key=len, reverse=True)]
        self._held = ""  # the end of the text so far that may begin a stop string

    def push(self, text: str) -> tuple[str, bool]:
        """Returns the text that is safe to show and whether a stop string was found; after that, push no more."""
        if not self._automata:
            return text, False
        known = len(self._held)
        text = self._held + text
        for end in range(known, len(text)):
            char = text[end]
            for automaton in self._automata:
                if automaton.step(char):
                    self._held = ""
                    return text[: end + 1 - len(automaton.pattern)], True
        cut = len(text) - max(automaton.matched for automaton in self._automata)
        self._held = text[cut:]
        return text[:cut], False

    def flush(self) -> str:
        """The end: returns what was held back."""
        held, self._held = self._held, ""
        return held


class _Automaton:
    """Searches one pattern character by character."""

    def __init__(self, pattern: str) -> None:
        self.pattern = pattern
        self.matched = 0  # characters of the pattern that the text so far ends with
        self._fallback = [0] * len(pattern)
        length = 0
        for i in range(1, len(pattern)):
            while length and pattern[i] != pattern[length]:
                length = self._fallback[length - 1]
            length += pattern[i] == pattern[length]
            self._fallback[i] = length

    def step(self, char: str) -> bool:
        """True if the pattern ends here; then it must not be stepped again."""
        while self.matched and self.pattern[self.matched] != char:
            self.matched = self._fallback[self.matched - 1]
        self.matched += self.pattern[self.matched] == char
        return self.matched == len(self.pattern)


@dataclass(frozen=True, slots=True, kw_only=True)
class TextDelta:
    """What some token ids added to the text."""

    text: str
    num_tokens: int  # how many of the ids count: all, or those up to the end of the stop string
    stopped: bool  # a stop string was found; the text ends before it


class CompletionText:
    """The text of one completion: detokenised, cut before the first stop string.

    The text of the first min_tokens tokens is shown at once, whatever it is; a stop string begins after it."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], stops: Sequence[str], min_tokens: int = 0) -> None:
        self._detokenizer = Detokenizer(tokenizer, prompt)
        self._stops = StopStrings(stops)
        self._watches = bool(stops)
        self._num_unwatched = min_tokens

    def push(self, ids: Sequence[int]) -> TextDelta:
        """Takes the next ids. After a stop string was found, push no more."""
        if not self._watches:
            return TextDelta(text=self._detokenizer.push(ids), num_tokens=len(ids), stopped=False)
        texts = []
        unwatched = ids[: self._num_unwatched]
        if unwatched:
            self._num_unwatched -= len(unwatched)
            texts.append(self._detokenizer.push(unwatched))
        # One by one, to know which of them ends the stop string.
        for count, token in enumerate(ids[len(unwatched) :], start=len(unwatched) + 1):
            text, stopped = self._stops.push(self._detokenizer.push((token,)))
            texts.append(text)
            if stopped:
                return TextDelta(text="".join(texts), num_tokens=count, stopped=True)
        return TextDelta(text="".join(texts), num_tokens=len(ids), stopped=False)

    def finish(self) -> TextDelta:
        """The end of the completion: whatever was held back, unless it holds a stop string."""
        text = self._detokenizer.flush()
        if self._num_unwatched:
            return TextDelta(text=text, num_tokens=0, stopped=False)
        text, stopped = self._stops.push(text)
        return TextDelta(text=text + self._stops.flush(), num_tokens=0, stopped=stopped)
