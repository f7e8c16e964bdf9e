"""Log probabilities in the three forms that clients know: OpenAI's two, and vLLM's of a prompt."""

import codecs
from collections.abc import Sequence
from typing import Any

from ..proto import inference_pb2

_LEAST = -9_999.0
"""What OpenAI writes for impossible tokens; JSON has no infinity."""


class TextLogprobs:
    """The form of /v1/completions. Counts along one choice, for it tells where in the text each token begins."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0

    def take(self, tokens: Sequence[inference_pb2.TokenLogprobs]) -> dict[str, Any]:
        """The object for the next tokens of the choice."""
        return {
            "tokens": [_token(each.token.text) for each in tokens],
            "token_logprobs": [_logprob(each.token) for each in tokens],
            "top_logprobs": [_top(each) for each in tokens],
            "text_offset": [self._place(each.token.text) for each in tokens],
        }

    def _place(self, text: bytes) -> int:
        """Characters before the token; one of which it completes a part counts as its own."""
        place = self._offset
        self._offset += len(self._decoder.decode(text))
        return place


def chat_logprobs(tokens: Sequence[inference_pb2.TokenLogprobs]) -> dict[str, Any]:
    """The form of /v1/chat/completions."""
    content = [_entry(each.token) | {"top_logprobs": [_entry(other) for other in each.top]} for each in tokens]
    return {"content": content, "refusal": None}


def prompt_logprobs(tokens: Sequence[inference_pb2.TokenLogprobs]) -> list[dict[str, Any] | None]:
    """vLLM's form: for each token of the prompt alternatives by token id, itself among them; null for the first."""
    return [_ranked(each) if each.token.HasField("logprob") else None for each in tokens]


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
