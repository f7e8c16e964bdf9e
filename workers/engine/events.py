"""What an engine tells the outside after a step. Times are seconds."""

from dataclasses import dataclass

from .plan import FirstTokens, SampledLogprobs
from .sequence import FinishReason


@dataclass(frozen=True, slots=True, kw_only=True)
class Admitted:
    """The sequence has its blocks. A DECODE sequence now waits for its KV cache."""

    id: int
    queue_seconds: float
    num_cached: int  # prompt tokens found in the prefix cache
    blocks: tuple[int, ...]  # the block table of the whole prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """The first num_computed tokens of a PREFILL sequence have their KV cache; the first num_ahead in the first
    num_layers layers, while a step runs."""

    id: int
    num_computed: int
    num_ahead: int = 0
    num_layers: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class KvReceived:
    """The committed import takes part in the batch from this step on."""

    id: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Token:
    """One generated token. With a finish reason the sequence has ended and holds nothing any more."""

    id: int
    index: int  # among the generated tokens of the request
    token: int
    finish: FinishReason | None
    prefill_seconds: float  # from admission to this token if it is the first here, else 0
    logprobs: SampledLogprobs | None = None  # if asked for
    prompt_logprobs: tuple[
        SampledLogprobs, ...
    ] = ()  # of the prompt after its first token; with the first choice's first
    score: float = 0.0  # of a hypothesis, with its last token


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillFinished:
    """A PREFILL sequence is computed and leased. Comes after the first tokens of its choices, unless these have ended
    them all, and for a beam search in their place."""

    id: int
    opening: FirstTokens
    prefill_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheChanged:
    """Blocks, by their hashes, that have come into the prefix cache and that have gone; of no sequence."""

    stored: tuple[bytes, ...]
    evicted: tuple[bytes, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Preempted:
    """The sequence gave its blocks to older ones and has ended here."""

    id: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """The sequence cannot go on, here or elsewhere, and has ended here."""

    id: int
    reason: str  # a user may see it


Event = Admitted | Progress | KvReceived | Token | PrefillFinished | Preempted | Failed | CacheChanged
