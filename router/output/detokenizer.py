"""Turns token ids into text while they arrive: whole characters only."""

from collections.abc import Sequence, Set

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
