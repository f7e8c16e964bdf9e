"""Defines the configuration of a pool whose number of workers follows its load."""

from typing import Final

from pydantic import BaseModel, ConfigDict, Field

SERVE_CONFIG_ONLY: Final = (
    "needs a configuration of Ray Serve, as with KubeRay or `serve deploy`; `tandem serve` starts "
    "a fixed number of workers"
)


class ScalingConfig(BaseModel):
    """Configures how the number of workers of a pool follows its load.

    `replicas` of the pool is the minimum.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

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

    def check(self, role: str, replicas: int) -> None:
        """Raises ValueError unless it fits a pool of this role with at least `replicas` workers."""
        if replicas < 1:
            raise ValueError(f"{role}.autoscaling: needs {role}.replicas of at least 1")
        if self.max_replicas < replicas:
            key = f"{role}.autoscaling.max_replicas"
            raise ValueError(
                f"{key}: must be at least {role}.replicas, {replicas}, got {self.max_replicas}"
            )
        if role == "prefill" and self.tpot_seconds is not None:
            raise ValueError("prefill.autoscaling.tpot_seconds: only decode.autoscaling has it")
