"""Defines the configuration of pools whose workers, or whose workers' roles, follow the load."""

import re
from dataclasses import dataclass
from datetime import UTC, datetime, time, tzinfo
from typing import Annotated, Final, Literal
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, Strict, field_validator

from ...router.fields import shorten

SERVE_CONFIG_ONLY: Final = (
    "needs a configuration of Ray Serve, as with KubeRay or `serve deploy`; `tandem serve` starts "
    "a fixed number of workers, whose roles may change (role_scaling)"
)


_SECTION: Final = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)
_TIME: Final = re.compile(r"([01][0-9]|2[0-3]):[0-5][0-9]")
_DAYS: Final = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")

Day = Literal["mon", "tue", "wed", "thu", "fri", "sat", "sun"]


def _check_time(value: object) -> object:
    if not isinstance(value, str) or _TIME.fullmatch(value) is None:
        # YAML reads 20:00 without quotes as 1200.
        raise ValueError(
            f'must be a time of day from "00:00" to "23:59", in quotes, got {shorten(value)}'
        )
    return value


TimeOfDay = Annotated[str, BeforeValidator(_check_time)]


class ScheduledBounds(BaseModel):
    """Configures the bounds of a pool from `start` to `end` of some days, within the usual ones."""

    model_config = _SECTION

    # The days on which the time starts; it may end on the next day.
    days: Annotated[tuple[Day, ...], Field(min_length=1, max_length=7), Strict(False)] = _DAYS
    start: TimeOfDay
    end: TimeOfDay
    replicas: int | None = Field(default=None, ge=0, le=256)  # None: the usual bound
    max_replicas: int | None = Field(default=None, ge=1, le=256)

    def contains(self, now: datetime) -> bool:
        """Returns True if the bounds hold at this local time."""
        start, end = time.fromisoformat(self.start), time.fromisoformat(self.end)
        weekday = now.weekday()
        if start < end:
            return _DAYS[weekday] in self.days and start <= now.time() < end
        return (_DAYS[weekday] in self.days and now.time() >= start) or (
            _DAYS[weekday - 1] in self.days and now.time() < end
        )


class ScalingConfig(BaseModel):
    """Configures how the number of workers of a pool follows its load.

    `replicas` of the pool is the minimum.
    """

    model_config = _SECTION

    max_replicas: int = Field(ge=1, le=256)
    # The target share of the workers' capacity in use: of their time for prompts, or of their KV
    # cache and their sequences.
    utilization: float = Field(default=0.8, ge=0.05, le=1)
    # Of decode: the maximum seconds between two tokens of a sequence. None: all sequences that fit.
    tpot_seconds: float | None = Field(default=None, ge=0.0001, le=60)
    # Of prompts: the time in which the prompts that wait in the queues of routers are computed.
    catch_up_seconds: float = Field(default=5.0, ge=0.1, le=3600)
    # How long a need of more, or of fewer, workers must last until some are started or stopped.
    up_delay_seconds: float = Field(default=3.0, ge=0, le=3600)
    down_delay_seconds: float = Field(default=300.0, ge=0, le=86_400)
    # The period over which the load is measured; five reports fall into it.
    window_seconds: float = Field(default=10.0, ge=0.5, le=3600)
    # Narrower bounds by time of day; the first that holds counts.
    schedule: Annotated[tuple[ScheduledBounds, ...], Field(max_length=64), Strict(False)] = ()
    timezone: str = Field(default="UTC", max_length=64)  # of the schedule, as Europe/Berlin

    @field_validator("timezone")
    @classmethod
    def _is_known(cls, name: str) -> str:
        try:
            _zone(name)
        except (ZoneInfoNotFoundError, ValueError, OSError):
            raise ValueError(
                f"{name} is unknown; use a name of the IANA database, such as Europe/Berlin"
            ) from None
        return name

    def bounds_at(self, now: float, fewest: int, most: int) -> tuple[int, int]:
        """Returns the bounds at `now`, in seconds since 1970; `fewest` and `most` are the usual."""
        if not self.schedule:
            return fewest, most
        local = datetime.fromtimestamp(now, _zone(self.timezone))
        for each in self.schedule:
            if each.contains(local):
                low = fewest if each.replicas is None else max(each.replicas, fewest)
                return low, most if each.max_replicas is None else min(each.max_replicas, most)
        return fewest, most

    def check(self, role: str, replicas: int) -> None:
        """Raises ValueError unless it fits a pool of this role with at least `replicas` workers."""
        if self.max_replicas < replicas:
            key = f"{role}.autoscaling.max_replicas"
            raise ValueError(
                f"{key}: must be at least {role}.replicas, {replicas}, got {self.max_replicas}"
            )
        for number, each in enumerate(self.schedule):
            low = replicas if each.replicas is None else each.replicas
            most = self.max_replicas if each.max_replicas is None else each.max_replicas
            if not replicas <= low <= most <= self.max_replicas:
                raise ValueError(
                    f"{role}.autoscaling.schedule.{number}: replicas {low} and max_replicas {most} "
                    f"must lie within {role}.replicas, {replicas}, and max_replicas, "
                    f"{self.max_replicas}, in this order"
                )
        if role == "prefill" and self.tpot_seconds is not None:
            raise ValueError("prefill.autoscaling.tpot_seconds: only decode.autoscaling has it")


def _zone(name: str) -> tzinfo:
    """Returns a time zone; UTC also on a machine without the IANA database.

    Raises ZoneInfoNotFoundError, ValueError or OSError for an unknown name.
    """
    return UTC if name == "UTC" else ZoneInfo(name)


class RoleScalingConfig(BaseModel):
    """Configures how the workers of both pools change their roles with the load.

    The number of workers stays; the number of those that prefill is between the bounds.
    """

    model_config = _SECTION

    min_prefill: int = Field(default=1, ge=0, le=256)  # 0: decode workers may prefill instead
    max_prefill: int | None = Field(default=None, ge=1, le=256)  # None: all but one worker
    # As of `ScalingConfig`.
    utilization: float = Field(default=0.8, ge=0.05, le=1)
    tpot_seconds: float | None = Field(default=None, ge=0.0001, le=60)
    catch_up_seconds: float = Field(default=5.0, ge=0.1, le=3600)
    window_seconds: float = Field(default=10.0, ge=0.5, le=3600)
    # How long one role must be short of workers until a worker of the other one switches.
    delay_seconds: float = Field(default=3.0, ge=0, le=3600)
    # How long neither role must be short until the split returns to the numbers of the pools.
    return_seconds: float = Field(default=60.0, ge=0, le=86_400)

    def check(self, num_prefill: int, num_decode: int) -> None:
        """Raises ValueError unless it fits pools of these sizes."""
        num_workers = num_prefill + num_decode
        if num_workers < 2:
            raise ValueError(
                "role_scaling: needs 2 workers in prefill.replicas and decode.replicas together, "
                f"got {num_workers}"
            )
        if self.max_prefill is not None and self.min_prefill > self.max_prefill:
            raise ValueError(
                f"role_scaling.min_prefill: must be at most max_prefill, {self.max_prefill}, got "
                f"{self.min_prefill}"
            )
        low, high = self.bounds(num_workers)
        if not low <= num_prefill <= high:
            raise ValueError(
                f"role_scaling: prefill.replicas, {num_prefill}, must lie within min_prefill, "
                f"{low}, and max_prefill, {high}"
            )

    def bounds(self, num_workers: int) -> tuple[int, int]:
        """Returns the least and the most of these workers that prefill; one always decodes."""
        most = max(num_workers - 1, 0)
        high = most if self.max_prefill is None else min(self.max_prefill, most)
        return min(self.min_prefill, high), high


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleScaling:
    """Holds what a service's members report to the directory, for its choice of roles."""

    config: RoleScalingConfig
    num_prefill: int  # of the pools, to which the split returns
    num_workers: int  # of both pools; nothing is decided before they are there
