"""One generation request as the dispatcher sees it: token ids in, token ids out."""

import hashlib
from collections.abc import AsyncGenerator, Collection
from dataclasses import dataclass
from typing import Protocol

from ..proto import inference_pb2, worker_pb2


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenRequest:
    """A checked request. Every bound holds and the prompt fits the context."""

    request_id: str
    prompt: tuple[int, ...]
    max_tokens: int  # at least 1; prompt and completion fit the context
    sampling: inference_pb2.SamplingParams  # every field set, the seed too; but no bad_words, which are below
    bad_words: tuple[tuple[int, ...], ...] = ()
    num_choices: int = 1
    beam_search: inference_pb2.BeamSearch | None = None  # of at least num_choices hypotheses; every field set
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    logprobs: int | None = None  # alternatives of each token to report; None reports nothing
    prompt_logprobs: int | None = None
    grammar: str = ""  # of each completion, as llguidance reads it
    priority: int = 0
    tenant: str = ""  # who asks: fairness between those that wait is among tenants
    cache_salt: bytes = b""
    arrived: float  # time.monotonic() when the front door had the request
    deadline: float | None = None  # time.monotonic() at which it must have ended


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenDelta:
    """Tokens that follow those of the choice's deltas before; first_index counts them from 0 without a gap."""

    first_index: int
    ids: tuple[int, ...]
    finish_reason: "inference_pb2.FinishReason"  # set in the choice's last delta, FINISH_REASON_UNSPECIFIED before
    choice: int = 0
    logprobs: tuple[worker_pb2.TokenScores, ...] = ()  # one for each of ids, if asked for
    prompt_logprobs: tuple[worker_pb2.TokenScores, ...] = ()  # of the prompt after its first token, in the first delta
    score: float = 0.0  # of a hypothesis of a beam search, in its last delta


class TokenSource(Protocol):
    """Generates tokens; the dispatcher is the real one."""

    def generate(
        self, request: TokenRequest, timeline: inference_pb2.Timeline, ended: Collection[int] = ()
    ) -> AsyncGenerator[TokenDelta, None]:
        """Yields the tokens of one request; of each choice the last delta, and only that, carries a finish reason.

        The caller may add to `ended` choices of which it wants no more; they are cancelled as soon as they have
        something new to say, and say nothing more. Ends when all choices have. Closing the generator early cancels the
        request everywhere. When it has ended, whichever way, the caller's `timeline` is filled in. Raises a TandemError
        if the request cannot be carried through, DeadlineExceeded at its deadline."""
        ...


def tenant_of(authorization: str | None) -> str:
    """The name of whoever has the API key of an `Authorization: Bearer KEY`, from which the key cannot be told; "" for
    all who have none."""
    scheme, _, key = (authorization or "").strip().partition(" ")
    if scheme.lower() != "bearer" or not key.strip():
        return ""
    return hashlib.blake2b(key.strip().encode("utf-8", "surrogateescape"), digest_size=16).hexdigest()
