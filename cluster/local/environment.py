"""Defines the environment of processes that compute.

Imports neither Ray nor torch, which read the environment once, when they are imported.
"""

from collections.abc import Mapping
from typing import Final

from ..config import PoolConfig, TandemConfig

SPINNING: Final = {"GOMP_SPINCOUNT": "3000"}
"""Lets OpenMP's threads spin for some microseconds between the kernels of a step.

Threads that spin longer, while another process wants the core, slow that process down by up to a
factor of 10. Threads that sleep at once wake too late.
"""


def compute_environment(pool: PoolConfig) -> dict[str, str]:
    """Returns the environment of a process that computes on CPUs."""
    threads = (
        dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(pool.num_threads))
        if pool.num_threads
        else {}
    )
    # A replica serves a folder that is present; it must not ask the Hugging Face hub.
    return threads | SPINNING | {"HF_HUB_OFFLINE": "1"}


ROUTER_ENVIRONMENT: Final[Mapping[str, str]] = {
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
}
"""The environment of a router's process."""


def shared_environment(config: TandemConfig) -> dict[str, str]:
    """Returns the variables that have one value in all processes that set them.

    All processes of a local Ray inherit them. A process that needs no variable of its own can be
    started before it is known what it runs, which shortens the start of a service.
    """
    found: dict[str, set[str]] = {}
    pools = [compute_environment(pool) for pool in config.pools.values() if pool.max_replicas]
    for environment in (ROUTER_ENVIRONMENT, *pools):
        for name, value in environment.items():
            found.setdefault(name, set()).add(value)
    return {name: min(values) for name, values in found.items() if len(values) == 1}
