"""Defines a generation request as the dispatcher takes it: token ids in, token ids out."""

from collections.abc import AsyncGenerator, Collection, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Protocol

from ..proto import inference_pb2, worker_pb2
from ..proto.hashing import adapter_salt


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraAdapter:
    """Names weights that are added to some of the model's."""

    name: str  # under which requests ask for it
    folder: str  # the same on the nodes of all workers
    fingerprint: bytes  # of what the folder holds


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenRequest:
    """Holds a checked request: every bound holds and the prompt fits the context."""

    request_id: str  # unique within the router
    prompt: tuple[int, ...]
    max_tokens: int  # at least 1; prompt and completion fit the context
    sampling: (
        inference_pb2.SamplingParams
    )  # every field is set, the seed too, but bad_words: see below
    bad_words: tuple[tuple[int, ...], ...] = ()
    num_choices: int = 1
    beam_search: inference_pb2.BeamSearch | None = (
        None  # every field is set; width is at least num_choices
    )
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    logprobs: int | None = None  # alternatives to report for each token; None reports nothing
    prompt_logprobs: int | None = None
    pooling: "inference_pb2.Pooling" = (
        inference_pb2.POOLING_UNSPECIFIED
    )  # with max_tokens 1: of an embedding
    grammar: str = ""  # that each completion follows, in llguidance's format; empty: none
    priority: int = 0
    tenant: str = ""  # requests that wait are served fairly among tenants
    cache_salt: bytes = b""
    adapter: LoraAdapter | None = None
    arrived: float  # time.monotonic() when the API server received the request
    deadline: float | None = None  # time.monotonic() by which it must have ended
    # Of a request that was begun elsewhere, by choice, the ids that its caller has; None if the
    # choice has ended.
    emitted: tuple[tuple[int, ...] | None, ...] = ()
    is_resumed: bool = (
        False  # of all prompts at a worker: it stands still because a worker was lost
    )
    turn: "worker_pb2.Turn" = (
        worker_pb2.TURN_UNSPECIFIED
    )  # at workers, of a request that its client resumes

    @property
    def prefix_salt(self) -> bytes:
        """Tells prefixes apart that share no KV cache: of another tenant, or by another adapter."""
        return (
            adapter_salt(self.cache_salt, self.adapter.fingerprint)
            if self.adapter
            else self.cache_salt
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenDelta:
    """Holds the next tokens of one choice; `first_index` counts the choice's tokens from 0 without
    a gap.
    """

    first_index: int
    ids: tuple[int, ...]
    finish_reason: "inference_pb2.FinishReason"  # UNSPECIFIED but in the choice's last delta
    choice: int = 0
    logprobs: tuple[worker_pb2.TokenScores, ...] = ()  # one for each of ids, if asked for
    prompt_logprobs: tuple[
        worker_pb2.TokenScores, ...
    ] = ()  # of the prompt after its first token, in the first delta
    score: float = 0.0  # of a hypothesis of a beam search, in its last delta
    embedding: tuple[float, ...] = ()  # of the prompt, if asked for, in the only delta


def merge_deltas(run: Sequence[TokenDelta]) -> TokenDelta:
    """Merges consecutive deltas of one choice; `run` has at least one."""
    if len(run) == 1:
        return run[0]
    return replace(
        run[-1],
        first_index=run[0].first_index,
        ids=tuple(chain.from_iterable(delta.ids for delta in run)),
        logprobs=tuple(chain.from_iterable(delta.logprobs for delta in run)),
        prompt_logprobs=tuple(chain.from_iterable(delta.prompt_logprobs for delta in run)),
    )


class TokenSource(Protocol):
    """Generates tokens, as the dispatcher does."""

    def generate(
        self, request: TokenRequest, timeline: inference_pb2.Timeline, ended: Collection[int] = ()
    ) -> AsyncGenerator[TokenDelta, None]:
        """Yields the tokens of one request. The last delta of each choice, and no other, has a
        finish reason.

        The caller may add choices to `ended` that are no longer wanted: each is cancelled at its
        next tokens, and has no further delta. Ends when all choices have ended. Closing the
        generator early cancels the request on all workers. When it has ended, whichever way, the
        caller's `timeline` is filled in. Raises a TandemError if the request cannot be continued,
        DeadlineExceeded at its deadline.
        """
        ...
