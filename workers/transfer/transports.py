"""The ways that KV cache may take beside gRPC, and what a rank has for them.

Each has two ends, an outlet at the exporter and an inlet at the puller. A one-sided way is read by the puller alone;
into a two-sided one the exporter puts every byte.
"""

import ipaddress
from dataclasses import dataclass
from typing import Final

from torch import distributed

from . import nixl

CONNECT_SECONDS: Final = 5.0
"""How long any one step of connecting may take, and any message of a pair."""
NUM_SAMPLES: Final = 2
"""How often the sample comes: what is slow only once is not slow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Means:
    """What a rank may use to move KV cache, beside gRPC."""

    transports: tuple[str, ...] = ()  # of "shared", "gloo", "nccl" and "nixl"
    host: str = "127.0.0.1"  # the interface that pairs bind
    device: str = "cpu"  # of the rank

    def usable(self) -> list[str]:
        """The transports that this process knows how to use."""
        known = {
            "shared": True,
            "gloo": distributed.is_gloo_available(),
            "nccl": distributed.is_nccl_available() and self.device.startswith("cuda"),
            "nixl": nixl.available() and self.device == "cpu",
        }
        return [name for name in dict.fromkeys(self.transports) if known.get(name)]

    def pair_device(self, name: str) -> str:
        return self.device if name == "nccl" else "cpu"

    def nixl_devices(self) -> str:
        """UCX's network devices: all, unless only this host is to reach the rank."""
        try:
            within = ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            within = self.host == "localhost"
        return "lo" if within else ""
