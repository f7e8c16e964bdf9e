"""Defines the configuration of a pool whose number of workers follows its load."""

from typing import Final

from pydantic import BaseModel, ConfigDict, Field

SERVE_CONFIG_ONLY: Final = (
    "only where a configuration of Ray Serve starts the service, as with KubeRay or `serve "
    "deploy`; `tandem serve`"
    " starts a fixed number of workers"
)


class ScalingConfig(BaseModel):
    """Configures how the number of workers of a pool follows its load. `replicas` of the pool is
    the least.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    max_replicas: int = Field(ge=1, le=256)
    # The part of what its workers can do that the pool is sized to use: of their time for prompts,
    # or of their KV cache and their sequences.
    utilization: float = Field(default=0.8, ge=0.05, le=1)
    # Of decode: seconds between two tokens of a sequence that are not to be exceeded. None: as many
    # sequences as fit.
    tpot_seconds: float | None = Field(default=None, ge=0.0001, le=60)
    # Of prompts: within how many seconds those that wait in the queues of routers are to be
    # computed.
    catch_up_seconds: float = Field(default=5.0, ge=0.1, le=3600)
    # How long more workers must have been needed before some are started, and fewer before some are
    # stopped.
    up_delay_seconds: float = Field(default=3.0, ge=0, le=3600)
    down_delay_seconds: float = Field(default=300.0, ge=0, le=86_400)
    # Over which the load is measured; a fifth of it is between two reports.
    window_seconds: float = Field(default=10.0, ge=0.5, le=3600)

    def check(self, role: str, replicas: int) -> None:
        """Raises ValueError unless it fits a pool of this role with at least so many workers."""
        if replicas < 1:
            raise ValueError(f"{role}.autoscaling: needs {role}.replicas of at least 1")
        if self.max_replicas < replicas:
            key = f"{role}.autoscaling.max_replicas"
            raise ValueError(
                f"{key}: must be at least {role}.replicas, {replicas}, got {self.max_replicas}"
            )
        if role == "prefill" and self.tpot_seconds is not None:
            raise ValueError("prefill.autoscaling.tpot_seconds: is of decode alone")
