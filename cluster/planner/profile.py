"""Describes a measured profile: what `tandem plan measure` writes and `tandem plan service` reads.

Imports neither torch nor Ray.
"""

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Annotated, Final

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ...proto.costs import TableCost
from ...proto.errors import InvalidArgument
from ...router.fields import error_text
from ...workers.engine.config import Budgets, has_burst_chunks
from ..sim.cost import (
    LEAST_SAMPLES,
    ServiceCosts,
    StepCosts,
    StepFit,
    StepSample,
    fit_steps,
)

FORMAT: Final = 3
LEAST_SECONDS: Final = 5.0
"""The shortest time of a measurement."""

LEAST_CONTEXT: Final = 256
"""The least tokens of the longest measured sequence.

Half of it is a prompt that the prefill worker computes, not the decode worker
(`router.local_prefill_tokens`): only such a prompt moves KV cache.
"""

_CONFIG: Final = ConfigDict(frozen=True, extra="forbid")


class ProfiledBudgets(BaseModel):
    """Holds the budgets of a measured worker; see `Budgets`."""

    model_config = _CONFIG

    chunk_tokens: int
    mixed_chunk_tokens: int
    mixed_step_factor: float | None
    max_sequences: int

    def as_budgets(self, num_prefill_workers: int) -> Budgets:
        """Returns the budgets of an engine of a service with so many prefill workers."""
        burst_chunks = has_burst_chunks(num_prefill_workers)
        return Budgets(**self.model_dump(), burst_chunks=burst_chunks)


class WorkerProfile(BaseModel):
    """Holds the measurements of one worker, beside others on the same machine."""

    model_config = _CONFIG

    workers: int = Field(ge=1)  # that shared the machine's cores and memory
    threads: int
    num_blocks: int
    block_size: int
    context_tokens: int  # of the longest sequence
    overlap: bool
    budgets: ProfiledBudgets
    # Each a measured step: sequences, context tokens, prompt tokens, prompt context, seconds.
    grid: Annotated[
        tuple[Annotated[tuple[float, ...], Field(min_length=5, max_length=5)], ...],
        Field(min_length=LEAST_SAMPLES),
    ]
    # How much longer the steps take while the other workers compute as well.
    contention: float = Field(default=1.0, ge=1.0)
    # How much longer a prompt takes in a prefill worker while the service's streams decode, and how
    # much longer a token of these streams takes.
    prefill_contention: float = Field(default=1.0, ge=1.0)
    decode_contention: float = Field(default=1.0, ge=1.0)
    # How much longer a step takes in a service, whose other processes use the cores as well.
    background: float = Field(default=1.0, ge=1.0)
    # Seconds of a request until its first token, besides its steps.
    request_seconds: float = Field(default=0.0, ge=0.0)
    # Seconds between two steps of a served stream, in addition to the step.
    host_seconds: float = Field(default=0.0, ge=0.0)
    host_seconds_per_sequence: float = Field(default=0.0, ge=0.0)

    def fit(self) -> StepFit:
        """Returns the costs fitted to the grid, without the host's time. Fits a grid once."""
        return _fit(self.grid)

    def costs(self) -> StepCosts:
        """Returns the costs of a step of a serving worker."""
        costs = self.fit().costs.scaled(self.background)
        return costs.with_host(self.host_seconds, self.host_seconds_per_sequence)


@cache
def _fit(grid: tuple[tuple[float, ...], ...]) -> StepFit:
    """Returns the costs fitted to the rows of a grid; a fit takes about 0.2 s."""
    return fit_steps([StepSample.of_row(row) for row in grid])


class TransferProfile(BaseModel):
    """Holds the measured cost of a KV transfer between two workers."""

    model_config = _CONFIG

    seconds: float = Field(ge=0.0)  # without bytes
    bytes_per_second: float = Field(gt=0.0)
    transport: str


class RouterProfile(BaseModel):
    """Holds the measured CPU time of a router."""

    model_config = _CONFIG

    seconds_per_request: float = Field(ge=0.0)
    seconds_per_token: float = Field(ge=0.0)


class Profile(BaseModel):
    """Holds the measurements of one model on one machine."""

    model_config = _CONFIG

    format: int = FORMAT
    model: str
    dtype: str
    quantization: str | None
    kv_cache_dtype: str
    device: str  # cpu or cuda
    device_name: str
    cores: int
    tp: int
    commit: str
    date: str
    token_bytes: int  # of KV cache, in the whole model
    tables: Annotated[tuple[TableCost, ...], Field(min_length=1)]  # of this KV cache
    workers: Annotated[tuple[WorkerProfile, ...], Field(min_length=1)]
    router: RouterProfile | None = None
    transfer: TransferProfile | None = None

    def check_model(self, name: str) -> None:
        """Raises InvalidArgument unless the profile is of the model `name`."""
        if self.model != name:
            raise InvalidArgument(f"is of {self.model}, not of {name}", "--profile")

    def worker(self, num_workers: int) -> WorkerProfile:
        """Returns the measurements of a worker among `num_workers`.

        Workers on CPUs share the cores of a machine; workers on GPUs share nothing. Raises
        InvalidArgument if so many workers were not measured.
        """
        for each in self.workers:
            if each.workers == num_workers or self.device != "cpu":
                return each
        numbers = {each.workers for each in self.workers}
        measured = " and ".join(map(str, sorted(numbers)))
        options = " ".join(f"--workers {number}" for number in sorted({*numbers, num_workers}))
        raise InvalidArgument(
            f"a split of {_count(num_workers, 'worker')} is not measured, only {measured}; lower "
            f"--devices, or run `tandem plan measure MODEL {options}`",
            "--profile",
        )

    def costs(self, num_prefill: int, num_decode: int) -> ServiceCosts:
        """Returns the costs of a service. Raises InvalidArgument for an unmeasured part."""
        worker = self.worker(num_prefill + num_decode)
        if num_prefill and self.transfer is None:
            remedy = "run `tandem plan measure MODEL --workers 1 --workers 2`"
            if self.device != "cpu":
                remedy = "give --device instead, which computes the costs"
            raise InvalidArgument(f"has no measured transfer of KV cache; {remedy}", "--profile")
        steps = worker.costs()
        router = self.router or RouterProfile(seconds_per_request=0.0, seconds_per_token=0.0)
        costs = ServiceCosts(
            prefill=steps,
            decode=steps,
            contention=max(worker.contention, worker.decode_contention if num_prefill else 1.0),
            prefill_contention=worker.prefill_contention,
            # The measured time has the router's work for the request and for its first token.
            request_seconds=max(
                worker.request_seconds - router.seconds_per_request - router.seconds_per_token, 0.0
            ),
            router_seconds_per_request=router.seconds_per_request,
            router_seconds_per_token=router.seconds_per_token,
        )
        if self.transfer is None:
            return costs
        return replace(
            costs,
            transfer_seconds=self.transfer.seconds,
            transfer_bytes_per_second=self.transfer.bytes_per_second,
        )


class _Format(BaseModel):
    """Reads only the format of a profile, whose fields may have changed."""

    format: int = FORMAT


def read_profile(path: Path) -> Profile:
    """Reads a profile. Raises InvalidArgument that names the file, and the format or the field."""
    try:
        text = path.read_bytes()
        found = _Format.model_validate_json(text).format
        if found != FORMAT:
            raise InvalidArgument(
                f"{path}: has format {found}, expected {FORMAT}; run `tandem plan measure` again",
                "--profile",
            )
        return Profile.model_validate_json(text)
    except OSError as error:
        raise InvalidArgument(f"{path}: {error.strerror}", "--profile") from None
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise InvalidArgument(f"{path}: {where}: {error_text(first)}", "--profile") from None


def describe_fit(worker: WorkerProfile) -> str:
    """Returns the fitted costs of a worker and their error as text."""
    fit = worker.fit()
    costs = fit.costs
    beside = f" beside {worker.workers - 1} other" if worker.workers > 1 else ""
    return (
        f"worker with {_count(worker.threads, 'thread')}{beside}: "
        f"{1e3 * costs.fixed:.3g} ms + {1e6 * costs.each_sequence:.3g} us a sequence + "
        f"{1e9 * costs.each_context_token:.3g} ns a context token + "
        f"{1e6 * costs.each_prompt_token:.3g} us a prompt token + "
        f"{1e9 * costs.each_prompt_context:.3g} ns a prompt token x context + "
        f"{1e6 * costs.each_further_token:.3g} us a token beyond {costs.few_tokens}; "
        f"leave-one-out error {fit.mean_error:.1%} mean, {fit.worst_error:.1%} worst, "
        f"of {len(fit.errors)} steps"
    )


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")
