"""Defines the environment of processes that compute.

Imports neither Ray nor torch, which read the environment once, when they are imported.
"""

from typing import Final

from ..config import PoolConfig

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
