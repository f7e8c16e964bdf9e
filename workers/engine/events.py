"""Defines what an engine reports after a step. Times are seconds."""

from dataclasses import dataclass

from .plan import NOT_FINITE, FirstTokens, SampledLogprobs
from .sequence import FinishReason


@dataclass(frozen=True, slots=True, kw_only=True)
class Admitted:
    """Reports that a sequence has its blocks. A DECODE sequence now waits for its KV cache, one
    with `importing` for what is kept of it elsewhere, see `Engine.commit_prefix`.
    """

    id: int
    queue_seconds: float
    num_cached: int  # prompt tokens found in the prefix cache
    num_restored: int = 0  # those of them that come from host memory, with the next step
    blocks: tuple[int, ...]  # the block table of the whole prompt
    # hashes of the blocks after the cached ones that are to be filled from elsewhere
    importing: tuple[bytes, ...] = ()
    from_remote: bool = False  # from the worker of `SequenceSpec.num_remote`


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Reports that a PREFILL sequence has the KV cache of its first num_computed tokens and, while
    a step runs, of its first num_ahead tokens in the first num_layers layers.
    """

    id: int
    num_computed: int
    num_ahead: int = 0
    num_layers: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class NewTokens:
    """Reports generated tokens of one sequence: one, one and the tokens of a draft before it, or
    all tokens of a beam search's hypothesis. With a finish reason the sequence has ended and holds
    nothing.
    """

    id: int
    first_index: int  # index of token_ids[0] among the generated tokens of the request
    token_ids: tuple[int, ...]
    finish: FinishReason | None
    # from admission, or the end of an import, to its first token here; 0 with later tokens
    prefill_seconds: float
    logprobs: tuple[SampledLogprobs, ...] = ()  # one for each token, if requested
    # of prompt tokens 1, 2, ...; with the first choice's first token
    prompt_logprobs: tuple[SampledLogprobs, ...] = ()
    score: float = 0.0  # of a hypothesis
    num_draft_tokens: int = 0  # guessed for this step; all tokens but the last are of them
    embedding: tuple[float, ...] = ()  # of the prompt, if requested; with the first token


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillFinished:
    """Reports that a PREFILL sequence is computed and leased. Follows the first tokens of its
    choices, unless these tokens finished all choices; for a beam search it is the only event.
    """

    id: int
    first_tokens: FirstTokens
    prefill_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Suspended:
    """Reports that a sequence is suspended: leased, for another worker to continue. No token of it
    follows.
    """

    id: int
    blocks: tuple[int, ...]
    # all that have KV cache: the prompt and the generated tokens but the last
    tokens: tuple[int, ...]
    first_token: int  # the last token, the first of the worker that continues


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheChanged:
    """Reports the hashes of blocks that entered and left the prefix cache; belongs to no sequence."""

    stored: tuple[bytes, ...]
    evicted: tuple[bytes, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Preempted:
    """Reports that a sequence has ended because older ones needed its blocks; it may be submitted
    again.
    """

    id: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """Reports that a sequence has ended because this worker cannot continue it."""

    id: int
    reason: str  # may be shown to a user

    @property
    def is_not_finite(self) -> bool:
        """Whether the model computed NaN or infinity, by the worker's fault or the request's. In
        all other cases the request has reached a limit, as it would on any worker.
        """
        return self.reason == NOT_FINITE


Event = (
    Admitted
    | Progress
    | NewTokens
    | PrefillFinished
    | Suspended
    | Preempted
    | Failed
    | CacheChanged
)
