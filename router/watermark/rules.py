"""Decides which requests are watermarked, and how."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, Self

from ...proto import inference_pb2, worker_pb2
from ...proto.errors import InvalidArgument
from ...proto.limits import MIN_TEMPERATURE
from ...proto.parameters import float32
from .config import EVERYONE, WatermarkConfig
from .detect import Evidence, find_evidence
from .key import read_watermark_key

_NO_KEY: Final = "this service has no key for a watermark; its operator sets watermark.key_file"
_GREEDY: Final = (
    "needs a temperature above 0: greedy sampling always takes the most likely token, and leaves "
    "no choice that could be marked"
)
_PROCESSED: Final = (
    "excludes the log probabilities of the distribution that tokens are drawn from, because they "
    "show which tokens are green"
)
_BEAM_SEARCH: Final = "excludes a beam search, which leaves no choice that could be marked"


@dataclass(frozen=True, slots=True, kw_only=True)
class WatermarkRules:
    """Holds the watermark of a service and the tenants that always get it."""

    key: bytes = field(repr=False)
    gamma: float
    delta: float
    context_width: int
    tenants: frozenset[str] = frozenset()

    @classmethod
    def load(cls, config: WatermarkConfig) -> Self | None:
        """Reads the key; returns None without one. Raises InvalidArgument for a wrong file."""
        if config.key_file is None:
            return None
        return cls(
            key=read_watermark_key(config.key_file),
            gamma=float32(config.gamma),
            delta=float32(config.delta),
            context_width=config.context_width,
            tenants=frozenset(config.tenants),
        )

    def demands(self, tenant: str) -> bool:
        """Returns True if each completion of the tenant has the watermark."""
        return EVERYONE in self.tenants or tenant in self.tenants

    def message(self) -> worker_pb2.Watermark:
        """Returns the watermark as workers know it."""
        return worker_pb2.Watermark(
            key=self.key,
            gamma=self.gamma,
            delta=self.delta,
            context_width=self.context_width,
        )

    def detect(self, ids: Sequence[int]) -> Evidence:
        """Returns the evidence for this watermark in token ids."""
        return find_evidence(ids, self.key, self.gamma, self.context_width)


def choose_watermark(
    request: inference_pb2.GenerateRequest,
    temperature: float,
    rules: WatermarkRules | None,
    tenant: str,
) -> worker_pb2.Watermark | None:
    """Returns the watermark of a checked request that generates tokens; None without one.

    `temperature`: of the request, or the default. Raises InvalidArgument if the request
    cannot have the watermark that it asks for, or that its tenant must have.
    """
    is_wanted = request.sampling.watermark
    is_demanded = rules is not None and rules.demands(tenant)
    if not is_wanted and not is_demanded:
        return None
    if rules is None:
        raise InvalidArgument(_NO_KEY, "sampling.watermark")
    if request.HasField("beam_search"):
        raise InvalidArgument(f"{_why(is_demanded)}{_BEAM_SEARCH}", "beam_search")
    if temperature < MIN_TEMPERATURE:
        field_ = "sampling.watermark" if is_wanted else "sampling.temperature"
        raise InvalidArgument(f"{_why(is_demanded)}{_GREEDY}", field_)
    if request.processed_logprobs:
        raise InvalidArgument(f"{_why(is_demanded)}{_PROCESSED}", "processed_logprobs")
    return rules.message()


def _why(is_demanded: bool) -> str:
    return "the watermark of all your completions " if is_demanded else "the watermark "
