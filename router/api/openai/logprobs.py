"""Log probabilities as JSON, in the three forms that clients know: OpenAI's two, and vLLM's of a prompt.

All is written token by token: one json.dumps of a long prompt's would stop every other thread while it runs.
"""

import codecs
import copy
import json
from collections.abc import Iterable, Sequence
from typing import Any, Self

from ....proto import inference_pb2

_LEAST = -9_999.0
"""What OpenAI writes for impossible tokens; JSON has no infinity."""


class TextLogprobs:
    """The form of /v1/completions. Counts along one choice, for it tells where in the text each token begins."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0
        self._noted: dict[str, tuple[str, ...]] = {}  # by list, its entries in JSON

    def fork(self) -> Self:
        """Another choice that goes on from here; what was taken is shared."""
        other = copy.copy(self)
        other._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        other._decoder.setstate(self._decoder.getstate())
        return other

    def take(self, tokens: Sequence[inference_pb2.TokenLogprobs]) -> None:
        """Notes the next tokens of the choice."""
        new = {
            "tokens": (_token(each.token.text) for each in tokens),
            "token_logprobs": (_logprob(each.token) for each in tokens),
            "top_logprobs": (_top(each) for each in tokens),
            "text_offset": (self._place(each.token.text) for each in tokens),
        }
        self._noted = {name: (*self._noted.get(name, ()), _entries(each)) for name, each in new.items()}

    def render(self) -> str:
        """The object of what was noted since the last call; null if nothing was."""
        noted, self._noted = self._noted, {}
        lists = (f'"{name}": [{", ".join(filter(None, parts))}]' for name, parts in noted.items())
        return f"{{{', '.join(lists)}}}" if noted else "null"

    def _place(self, text: bytes) -> int:
        """Characters before the token; one of which it completes a part counts as its own."""
        place = self._offset
        self._offset += len(self._decoder.decode(text))
        return place


def chat_logprobs(tokens: Sequence[inference_pb2.TokenLogprobs]) -> str:
    """The form of /v1/chat/completions; null without tokens."""
    if not tokens:
        return "null"
    content = (_entry(each.token) | {"top_logprobs": [_entry(other) for other in each.top]} for each in tokens)
    return f'{{"content": [{_entries(content)}], "refusal": null}}'


def prompt_logprobs(tokens: Sequence[inference_pb2.TokenLogprobs]) -> str:
    """vLLM's form: for each token of the prompt alternatives by token id, itself among them; null for the first."""
    return f"[{_entries(_ranked(each) if each.token.HasField('logprob') else None for each in tokens)}]"


def _entries(values: Iterable[Any]) -> str:
    return ", ".join(map(json.dumps, values))


def _top(each: inference_pb2.TokenLogprobs) -> dict[str, float | None] | None:
    """The alternatives, and the token itself even where it is none of the likeliest."""
    if not each.token.HasField("logprob"):
        return None
    return {_token(other.text): _logprob(other) for other in (*each.top, each.token)}


def _ranked(each: inference_pb2.TokenLogprobs) -> dict[str, Any]:
    ranked = {
        str(other.token_id): {"logprob": _logprob(other), "rank": rank, "decoded_token": _text(other.text)}
        for rank, other in enumerate(each.top, start=1)
    }
    own = {"logprob": _logprob(each.token), "rank": None, "decoded_token": _text(each.token.text)}
    return {str(each.token.token_id): own} | ranked


def _entry(token: inference_pb2.Logprob) -> dict[str, Any]:
    return {"token": _text(token.text), "logprob": _logprob(token), "bytes": list(token.text)}


def _logprob(token: inference_pb2.Logprob) -> float | None:
    return max(token.logprob, _LEAST) if token.HasField("logprob") else None


def _text(text: bytes) -> str:
    return text.decode("utf-8", "replace")


def _token(text: bytes) -> str:
    """The token as text, or as OpenAI writes it if it is a part of a character: `bytes:\\xf0\\x9f`."""
    try:
        return text.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in text)
