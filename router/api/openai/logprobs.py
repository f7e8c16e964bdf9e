"""Writes log probabilities as JSON: OpenAI's forms of completions and chats, vLLM's of prompts.

They are written token by token: `json.dumps` of a long prompt would hold the interpreter's lock for
up to half a second.
"""

import codecs
import copy
import json
from collections.abc import Iterable, Sequence
from typing import Any, Final, Self

from ....proto import inference_pb2
from ....proto.limits import MIN_LOGPROB

_MAX_ADDED: Final = 64  # characters that a tokenizer puts before a text
_COMPARED: Final = 256  # characters, enough to find where the text begins


class TextLogprobs:
    """Writes the form of /v1/completions; counts the characters of one choice for text offsets."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0  # negative before the begin of the text
        self._rendered: dict[str, tuple[str, ...]] = {}  # by list, its entries as JSON

    def fork(self) -> Self:
        """Returns a copy for another choice that begins with the tokens taken so far."""
        other = copy.copy(self)
        other._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        other._decoder.setstate(self._decoder.getstate())
        return other

    def take_prompt(self, tokens: Sequence[inference_pb2.TokenLogprobs], text: str) -> None:
        """Adds the tokens of the prompt; `text` begins with the prompt.

        The text lacks the special tokens that the tokenizer puts first, and the space that
        SentencePiece puts before the first word. They have the offset 0.
        """
        named = _text(b"".join(each.token.text for each in tokens))
        lengths = range(min(len(named), _MAX_ADDED) + 1)
        starts = (each for each in lengths if text.startswith(named[each : each + _COMPARED]))
        self._offset = -next(starts, 0)
        self.take(tokens)

    def take(self, tokens: Sequence[inference_pb2.TokenLogprobs]) -> None:
        """Adds the next tokens of the choice."""
        if not tokens:
            return
        new = {
            "tokens": (_token(each.token.text) for each in tokens),
            "token_logprobs": (_logprob(each.token) for each in tokens),
            "top_logprobs": (_top(each) for each in tokens),
            "text_offset": (self._text_offset(each.token.text) for each in tokens),
        }
        self._rendered = {
            name: (*self._rendered.get(name, ()), _entries(each)) for name, each in new.items()
        }

    def render(self) -> str:
        """Returns the JSON object of the tokens added since the last call; null without tokens."""
        rendered, self._rendered = self._rendered, {}
        lists = (
            f'"{name}": [{", ".join(filter(None, parts))}]' for name, parts in rendered.items()
        )
        return f"{{{', '.join(lists)}}}" if rendered else "null"

    def _text_offset(self, text: bytes) -> int:
        """Returns the number of characters before the token, without one that it completes."""
        offset = self._offset
        self._offset += len(self._decoder.decode(text))
        return max(offset, 0)


def chat_logprobs(tokens: Sequence[inference_pb2.TokenLogprobs]) -> str:
    """Returns the form of /v1/chat/completions as JSON; null without tokens."""
    if not tokens:
        return "null"
    content = (
        _entry(each.token) | {"top_logprobs": [_entry(other) for other in each.top]}
        for each in tokens
    )
    return f'{{"content": [{_entries(content)}], "refusal": null}}'


def prompt_logprobs(tokens: Sequence[inference_pb2.TokenLogprobs]) -> str:
    """Returns vLLM's form as JSON: by position, the token and its alternatives by token id.

    The first position of a prompt has no log probability: null.
    """
    ranked = (_ranked(each) if each.token.HasField("logprob") else None for each in tokens)
    return f"[{_entries(ranked)}]"


def _entries(values: Iterable[Any]) -> str:
    return ", ".join(map(json.dumps, values))


def _top(each: inference_pb2.TokenLogprobs) -> dict[str, float | None] | None:
    """Returns the alternatives and the token itself, by text."""
    if not each.token.HasField("logprob"):
        return None
    return {_token(other.text): _logprob(other) for other in (*each.top, each.token)}


def _ranked(each: inference_pb2.TokenLogprobs) -> dict[str, Any]:
    """Returns the token itself and its alternatives by id, with their ranks in the vocabulary."""
    found: dict[str, Any] = {}
    for other in (each.token, *each.top):
        entry = {"logprob": _logprob(other), "rank": other.rank, "decoded_token": _text(other.text)}
        found.setdefault(str(other.token_id), entry)
    return found


def _entry(token: inference_pb2.Logprob) -> dict[str, Any]:
    return {"token": _text(token.text), "logprob": _logprob(token), "bytes": list(token.text)}


def _logprob(token: inference_pb2.Logprob) -> float | None:
    return max(token.logprob, MIN_LOGPROB) if token.HasField("logprob") else None


def _text(text: bytes) -> str:
    return text.decode("utf-8", "replace")


def _token(text: bytes) -> str:
    """Returns the text; for a part of a character OpenAI's form `bytes:\\xf0\\x9f`."""
    try:
        return text.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in text)
