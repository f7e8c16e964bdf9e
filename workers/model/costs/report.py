"""Puts the arithmetic of one prompt and its output into a report.

The names in its JSON are the names of the fields below. Times are in seconds. Imports no torch.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from .inference import InferenceCost, Work, total
from .roofline import Roofline


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkReport:
    """Holds the work of one step, or of several together."""

    flops: int
    num_bytes: int
    flops_per_byte: float

    @classmethod
    def of(cls, work: Work) -> "WorkReport":
        """Returns the report of some work."""
        return cls(flops=work.flops, num_bytes=work.num_bytes, flops_per_byte=work.intensity)


@dataclass(frozen=True, slots=True, kw_only=True)
class Floor:
    """Holds the least times on one device."""

    device: str
    bytes_per_s: float
    flops_per_s: float
    ttft_seconds: float  # the prefill
    prefill_bound: str  # memory or compute
    tpot_seconds: float  # the mean decode step; 0 with one output token
    decode_bound: str
    tokens_per_s: float  # of all sequences of the batch
    with_cache_seconds: float  # prefill and all decode steps
    without_cache_seconds: float  # a prefill for each token


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredTimes:
    """Holds the times that a profile predicts for a worker of this machine."""

    workers: int  # that share the machine
    threads: int
    ttft_seconds: float  # of the prefill, in chunks
    tpot_seconds: float  # of a decode step of the batch at the mean context
    outside: tuple[str, ...]  # the amounts that were not measured; with any, the times are 0


@dataclass(frozen=True, slots=True, kw_only=True)
class CostReport:
    """Holds the arithmetic of a prompt of `prompt_tokens` and `output_tokens` after it."""

    model: str
    dtype: str
    parameters: int
    active_parameters: int  # in one token's step; fewer with experts
    weight_bytes: int
    prompt_tokens: int
    output_tokens: int
    batch: int
    kv_bytes_per_token: int
    kv_bytes_per_token_without_sharing: int  # no GQA and no MLA
    state_bytes: int  # of one sequence
    kv_bytes: int  # of the whole sequence at its end
    kv_bytes_without_windows: int
    prefill: WorkReport
    first_decode: WorkReport  # of the whole batch, as `last_decode`
    last_decode: WorkReport
    with_cache: WorkReport  # prefill and all decode steps of one sequence
    without_cache: WorkReport
    floors: tuple[Floor, ...]
    measured: tuple[MeasuredTimes, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """Returns the report as a JSON object."""
        return asdict(self)


def cost_report(
    model: str,
    cost: InferenceCost,
    *,
    prompt_tokens: int,
    output_tokens: int,
    batch: int = 1,
    devices: Mapping[str, Roofline] | None = None,
) -> CostReport:
    """Returns the report of a model for a prompt, an output and some devices, by name."""
    end = prompt_tokens + output_tokens - 1  # the last token is never attended to
    cached = [cost.prefill(prompt_tokens), *cost.decodes(prompt_tokens, output_tokens)]
    recomputed = cost.without_cache(prompt_tokens, output_tokens)
    first = cost.decode(prompt_tokens + 1, batch)
    last = cost.decode(max(end, prompt_tokens + 1), batch)
    middle = cost.decode((prompt_tokens + 1 + max(end, prompt_tokens + 1)) / 2, batch)
    return CostReport(
        model=model,
        dtype=cost.layout.dtype,
        parameters=cost.sizes.parameters,
        active_parameters=cost.sizes.active,
        weight_bytes=cost.sizes.weight_bytes,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        batch=batch,
        kv_bytes_per_token=cost.kv_bytes_per_token,
        kv_bytes_per_token_without_sharing=cost.kv_bytes_without_sharing,
        state_bytes=cost.layout.bytes_per_state,
        kv_bytes=cost.kv_bytes(end),
        kv_bytes_without_windows=end * cost.kv_bytes_per_token + cost.layout.bytes_per_state,
        prefill=WorkReport.of(cached[0]),
        first_decode=WorkReport.of(first),
        last_decode=WorkReport.of(last),
        with_cache=WorkReport.of(total(cached)),
        without_cache=WorkReport.of(total(recomputed)),
        floors=tuple(
            Floor(
                device=name,
                bytes_per_s=device.bytes_per_s,
                flops_per_s=device.flops_per_s,
                ttft_seconds=device.seconds(cached[0]),
                prefill_bound=device.bound(cached[0]),
                tpot_seconds=device.seconds(middle) if output_tokens > 1 else 0.0,
                decode_bound=device.bound(middle),
                tokens_per_s=batch / device.seconds(middle),
                with_cache_seconds=sum(map(device.seconds, cached)),
                without_cache_seconds=sum(map(device.seconds, recomputed)),
            )
            for name, device in (devices or {}).items()
        ),
    )
