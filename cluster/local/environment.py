"""Says what a process that computes reads from its environment; imports neither Ray nor torch,
which read it once.
"""

from typing import Final

from ..config import PoolConfig

SPINNING: Final = {"GOMP_SPINCOUNT": "3000"}
"""Between the kernels of a step OpenMP's threads spin for some microseconds, not longer: threads
that spin on while another process wants the core cost it up to a factor of 10, those that sleep at
once wake too late.
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
