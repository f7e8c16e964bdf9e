"""Holds what one completion showed: tokens, shapes, work, times, candidates. Times in seconds."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from ...workers.model.costs.report import CostReport
from ...workers.model.costs.stages import Stage


@dataclass(frozen=True, slots=True, kw_only=True)
class Token:
    """Names one token of the prompt."""

    token_id: int
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenCandidate:
    """Holds one of the likeliest next tokens."""

    token_id: int
    text: str
    probability: float  # in the model's own distribution
    # In the distribution that the token was drawn from: 0 if it was excluded. None: below the
    # tokens that the API reports.
    drawn_probability: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """Holds one generated token and the step that computed it: the prefill for the first one."""

    token_id: int
    text: str
    rank: int  # in the model's own distribution; 1 is the likeliest
    probability: float
    drawn_probability: float | None
    candidates: tuple[TokenCandidate, ...]
    context: int  # tokens that the step attended to
    kv_bytes: int  # held after the step
    flops: int
    num_bytes: int
    # The engine's time of the prefill, or the time between this token and the one before it.
    seconds: float
    floor_seconds: float
    bound: str  # memory or compute


@dataclass(frozen=True, slots=True, kw_only=True)
class Recomputation:
    """Holds the same tokens computed without KV cache: a prefill of the sequence for each."""

    seconds: tuple[float, ...]  # of each token's request
    total_seconds: float
    num_different: int  # tokens that differ from those with KV cache


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """Holds everything that `tandem explain` shows."""

    model: str
    engine: str  # where the completion ran
    prompt: str
    prompt_tokens: tuple[Token, ...]
    parameters: Mapping[str, Any]  # of the request
    stages: tuple[Stage, ...]
    cost: CostReport  # as `tandem plan cost` for these numbers of tokens
    steps: tuple[Step, ...]
    text: str
    finish_reason: str
    stopped_because: str
    timeline: Mapping[str, Any]  # the engine's, by the names of the API
    tokens_per_second: float
    recomputation: Recomputation | None
    recomputation_note: str  # why there is none, or what else to know
    memory: Mapping[str, int]  # bytes by name
    watts: Mapping[str, float]  # mean power by device; empty where it cannot be read

    def as_json(self) -> dict[str, Any]:
        """Returns the explanation as a JSON object."""
        return asdict(self)
