"""Defines a generation request as the dispatcher takes it: token ids in, token ids out."""

from collections.abc import AsyncGenerator, Collection, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Protocol

from ..proto import inference_pb2, worker_pb2
from ..proto.hashing import adapter_salt


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraAdapter:
    """Describes an adapter: weights that are added to some of the model's weights."""

    name: str  # under which requests ask for it
    folder: str  # the same on the nodes of all workers
    fingerprint: bytes  # of the files in the folder

    def message(self) -> worker_pb2.Adapter:
        """Returns the adapter as workers know it: without its name."""
        return worker_pb2.Adapter(folder=self.folder, fingerprint=self.fingerprint)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenRequest:
    """Holds a checked request: every bound holds and the prompt fits the context."""

    request_id: str  # unique within the router
    # The message to workers, without `attempt` and `task`; each attempt sends a copy. Every field
    # of `sampling` and `beam_search` is set, except `sampling.bad_words` and `sampling.watermark`;
    # the beam search's width is at least num_choices.
    submit: worker_pb2.Submit
    tenant: str = ""  # waiting requests are served fairly among tenants
    arrived: float  # the time of the router's clock when the API server received the request
    deadline: float | None = None  # the time by which it must have ended
    # The time by which its SLO class wants the first token; it only orders the queue.
    first_token_due: float | None = None
    # The time at which it ends with the output so far.
    ends_at: float | None = None
    # Of a request that began elsewhere: the ids that its client has of each choice; None for a
    # choice that has ended.
    emitted: tuple[tuple[int, ...] | None, ...] = ()
    # The service lost a worker and continues the stream here: workers compute its prompt first.
    # False for a request that its client resumes with a resume token (router/resume).
    is_recovery: bool = False
    # Requests with equal texts and a common prefix go to the same worker; "": no such request.
    affinity: str = ""
    is_batch: bool = False  # a line of a batch, for which no client waits

    @property
    def prefix_salt(self) -> bytes:
        """Separates the prefix caches of different tenants and adapters."""
        return adapter_salt(self.submit.cache_salt, self.submit.adapter.fingerprint)

    @property
    def retained_tokens(self) -> int:
        """Returns the length of the longest prefix that is to stay in the prefix cache."""
        return max((each.num_tokens for each in self.submit.retentions), default=0)

    @property
    def has_beam_search(self) -> bool:
        """Returns True if the choices are the best hypotheses of one beam search."""
        return self.submit.HasField("beam_search")


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenDelta:
    """Holds the next tokens of one choice."""

    first_index: int  # of `ids`, which counts the choice's tokens from 0 without a gap
    ids: tuple[int, ...]
    finish_reason: "inference_pb2.FinishReason"  # UNSPECIFIED except in the choice's last delta
    choice: int = 0
    logprobs: tuple[worker_pb2.TokenScores, ...] = ()  # one for each of `ids`, if asked for
    # Of the prompt after its first token; only in the first delta.
    prompt_logprobs: tuple[worker_pb2.TokenScores, ...] = ()
    score: float = 0.0  # of a hypothesis of a beam search; only in its last delta
    embedding: tuple[float, ...] = ()  # of the prompt, if asked for; only in the first delta


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
        self,
        request: TokenRequest,
        timeline: inference_pb2.Timeline,
        cancelled: Collection[int] = (),
    ) -> AsyncGenerator[TokenDelta, None]:
        """Yields the tokens of one request. Only the last delta of a choice has a finish reason.

        `cancelled` is a live collection: the caller adds unwanted choices while the generator runs.
        Each is cancelled at its next tokens and has no further delta. The generator ends when all
        choices have ended; closing it early cancels the request on all workers. `timeline` is
        complete when it ends, also by an error. Raises a TandemError if the request cannot be
        continued, DeadlineExceeded at its deadline.
        """
        ...
