"""Defines the events that an engine reports. Times are in seconds."""

from dataclasses import dataclass
from typing import Literal

from ..kv_cache.tables import TableBlocks
from .plan import NOT_FINITE, FirstTokens, SampledLogprobs
from .sequence import FinishReason


@dataclass(frozen=True, slots=True, kw_only=True)
class Admitted:
    """Reports that a sequence has its blocks.

    A DECODE sequence now waits for its KV cache. A sequence with `import_hashes` waits for cached
    blocks from elsewhere; see `Engine.commit_prefix`.
    """

    id: int
    queue_seconds: float
    num_cached: int  # prompt tokens found in the prefix cache
    num_loaded: int = 0  # cached tokens that the next step loads from host memory
    tables: tuple[TableBlocks, ...]  # the block tables of the whole prompt
    # The slot of the prompt's state: the import of a DECODE or a PREFILL's last step writes to it.
    state: int | None = None
    # Hashes of the blocks after the cached ones that have to be filled from elsewhere.
    import_hashes: tuple[bytes, ...] = ()
    # The blocks of each table that the import fills. Of a table with a window, only the last ones.
    import_tables: tuple[TableBlocks, ...] = ()
    import_state: int | None = None  # the slot of the state that the import fills
    # The source of the `import_hashes`. A remote is the worker of `SequenceSpec.num_remote`.
    prefix_source: Literal["disk", "remote"] = "disk"


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Reports that a PREFILL sequence has the KV cache of its first num_computed tokens.

    While a step runs, its first num_layers layers also have the cache of num_ahead tokens.
    """

    id: int
    num_computed: int
    num_ahead: int = 0
    num_layers: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class NewTokens:
    """Reports generated tokens of one sequence.

    These are one token, the accepted tokens of a draft and one more, or all tokens of a hypothesis
    of a beam search. With a finish reason, the sequence has ended and holds no blocks.
    """

    id: int
    first_index: int  # index of token_ids[0] among the generated tokens of the request
    token_ids: tuple[int, ...]
    finish: FinishReason | None
    # From admission, or the end of an import, to the first token here; 0 with later tokens.
    prefill_seconds: float
    logprobs: tuple[SampledLogprobs, ...] = ()  # one for each token, if requested
    # Of prompt tokens 1, 2, ...; only with the first token of the first choice.
    prompt_logprobs: tuple[SampledLogprobs, ...] = ()
    score: float = 0.0  # of a hypothesis
    num_draft_tokens: int = 0  # drafted for this step; all tokens but the last come from the draft
    embedding: tuple[float, ...] = ()  # of the prompt, if requested; with the first token


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillFinished:
    """Reports that a PREFILL sequence is computed and leased.

    Follows the first tokens of its choices. Does not occur if these tokens finish all choices. For
    a beam search it is the only event of generated tokens.
    """

    id: int
    first_tokens: FirstTokens
    prefill_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Suspended:
    """Reports that a sequence is leased so that another worker can continue it.

    No further token of the sequence follows.
    """

    id: int
    tables: tuple[TableBlocks, ...]
    state: int | None = None  # the slot of its state
    # All tokens with KV cache: the prompt and the generated tokens except the last.
    tokens: tuple[int, ...]
    first_token: int  # the last generated token; the next worker computes its KV cache first


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheChanged:
    """Reports the hashes that entered and left the prefix cache; belongs to no sequence."""

    stored: tuple[bytes, ...]
    evicted: tuple[bytes, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Preempted:
    """Reports that a sequence has ended because older sequences needed its blocks.

    It may be submitted again.
    """

    id: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """Reports that a sequence has ended because this worker cannot continue it."""

    id: int
    reason: str  # may be shown to a user

    @property
    def is_not_finite(self) -> bool:
        """Returns True if the model computed NaN or infinity.

        The cause is the worker or the request. In all other cases the request has reached a limit
        that it would reach on any worker.
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
