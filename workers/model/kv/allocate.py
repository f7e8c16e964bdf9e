"""Allocates host memory for blocks and states, as far as it is available."""

import torch

from ...host.memory import available_memory


def host_memory(num_bytes: int, setting: str) -> torch.Tensor:
    """Returns zeros in host memory, uint8 [num_bytes].

    Raises ValueError, which names the setting, if they do not fit. All pages are allocated now:
    insufficient memory must fail here, not under load by the kernel's OOM killer.
    """
    check_available(num_bytes, setting)
    return torch.zeros(num_bytes, dtype=torch.uint8)


def check_available(num_bytes: int, setting: str) -> None:
    """Raises ValueError, which names the setting, if the host has less memory available."""
    if num_bytes > (available := available_memory()):
        raise ValueError(misfit(setting, num_bytes, available))


def misfit(setting: str, num_bytes: int, available: int) -> str:
    """Returns the message that a setting asks for more memory than is available."""
    return (
        f"{setting}: {num_bytes / 2**30:.3g} GiB do not fit into the {available / 2**30:.3g} GiB "
        "that are available"
    )
