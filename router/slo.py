"""Defines SLO classes: latencies that order waiting requests and judge ended ones."""

from collections.abc import Mapping
from typing import Annotated, Final, Literal, NamedTuple, Self, get_args

from pydantic import BaseModel, Field, model_validator

from ..proto import inference_pb2
from ..proto.errors import InvalidArgument
from .auth.config import SECTION
from .fields import matching

DEFAULT_CLASS: Final = "default"
"""The class of requests that name none."""

SloOutcome = Literal["met", "ttft", "tpot", "e2e", "failed", "refused"]
"""The limits are kept, or the first one that is not; or the request has no complete answer."""

OUTCOMES: Final[tuple[SloOutcome, ...]] = get_args(SloOutcome)

_DEFAULT_TIERS: Final = ("", "auto", DEFAULT_CLASS)
_Milliseconds = Annotated[float, Field(gt=0, le=86_400_000)]

ClassName = Annotated[
    str,
    matching(
        r"[a-z][a-z0-9_-]{0,31}",
        "1 to 32 lowercase letters, digits, '_' and '-', with a letter first",
    ),
]


class SloClass(BaseModel):
    """Holds the limits of one class, at least one; None is no limit."""

    model_config = SECTION

    ttft_ms: _Milliseconds | None = None  # until the first token
    tpot_ms: _Milliseconds | None = None  # mean of each token after the first
    e2e_ms: _Milliseconds | None = None  # until the last token

    @model_validator(mode="after")
    def _has_a_limit(self) -> Self:
        if (self.ttft_ms, self.tpot_ms, self.e2e_ms) == (None, None, None):
            raise ValueError("needs ttft_ms, tpot_ms or e2e_ms")
        return self

    def judge(self, timeline: inference_pb2.Timeline) -> SloOutcome:
        """Returns `met`, or the first limit that a complete answer did not keep.

        An answer of one token has no TPOT and keeps any limit on it.
        """
        found: tuple[tuple[SloOutcome, float | None, float], ...] = (
            ("ttft", self.ttft_ms, timeline.ttft_seconds),
            ("tpot", self.tpot_ms, timeline.tpot_seconds),
            ("e2e", self.e2e_ms, timeline.end_to_end_seconds),
        )
        for name, limit, seconds in found:
            if limit is not None and 1000 * seconds > limit:
                return name
        return "met"


SloClasses = Mapping[ClassName, SloClass]


class RequestSlo(NamedTuple):
    """Holds the class of one request."""

    name: str
    limits: SloClass


def first_token_due(slo: RequestSlo | None, arrived: float) -> float | None:
    """Returns the time by which the first token is due; None without a limit on TTFT."""
    ttft_ms = None if slo is None else slo.limits.ttft_ms
    return None if ttft_ms is None else arrived + ttft_ms / 1000


def find_slo(
    classes: SloClasses, service_tier: str, *, is_batch: bool = False
) -> RequestSlo | None:
    """Returns the class that a request names, or the default class; None if there is none.

    A line of a batch never has the default class, because no client waits for it. Raises
    InvalidArgument for a name that is not configured.
    """
    if is_batch and service_tier in _DEFAULT_TIERS:
        return None
    for name in (service_tier, DEFAULT_CLASS):
        if name in classes:
            return RequestSlo(name, classes[name])
        if name not in _DEFAULT_TIERS:
            known = ", ".join(sorted({*_DEFAULT_TIERS, *classes} - {""}))
            raise InvalidArgument(f"must be one of {known}", "service_tier")
    return None
