"""One generation request as the dispatcher sees it: token ids in, token ids out."""

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Protocol

from ..proto import inference_pb2


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenRequest:
    """A checked request. Every bound holds and the prompt fits the context."""

    request_id: str
    prompt: tuple[int, ...]
    max_tokens: int  # at least 1; prompt and completion fit the context
    sampling: inference_pb2.SamplingParams  # every field set, the seed too
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    cache_salt: bytes = b""
    arrived: float  # time.monotonic() when the front door had the request
    deadline: float | None = None  # time.monotonic() at which it must have ended


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenDelta:
    """Tokens that follow those of the deltas before; first_index counts generated tokens from 0 without a gap."""

    first_index: int
    ids: tuple[int, ...]
    finish_reason: "inference_pb2.FinishReason"  # set in the last delta, FINISH_REASON_UNSPECIFIED before


class TokenSource(Protocol):
    """Generates tokens; the dispatcher is the real one."""

    def generate(self, request: TokenRequest, timeline: inference_pb2.Timeline) -> AsyncGenerator[TokenDelta, None]:
        """Yields the tokens of one request; the last delta, and only that, carries a finish reason.

        Closing the generator early cancels the request everywhere. When the generator has ended, whichever way, the
        caller's `timeline` is filled in. Raises a TandemError if the request cannot be carried through."""
        ...
