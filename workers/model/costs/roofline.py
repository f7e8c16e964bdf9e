"""Predicts the least time of work on a device from its bandwidth and its rate of products.

Pure arithmetic. The model is the roofline (Williams et al., CACM 2009): a step takes at least as
long as its bytes need, and at least as long as its FLOPs need.
"""

from dataclasses import dataclass
from typing import Final, Literal, NamedTuple

from .inference import Work

Bound = Literal["memory", "compute"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Roofline:
    """Describes a device by its two limits."""

    bytes_per_s: float
    flops_per_s: float

    def seconds(self, work: Work) -> float:
        """Returns the longer time of moving the bytes and computing the products."""
        return max(work.num_bytes / self.bytes_per_s, work.flops / self.flops_per_s)

    def bound(self, work: Work) -> Bound:
        """Returns the limit that holds for some work."""
        is_memory = work.num_bytes / self.bytes_per_s >= work.flops / self.flops_per_s
        return "memory" if is_memory else "compute"


class Device(NamedTuple):
    """Holds the figures of a GPU's data sheet."""

    roofline: Roofline  # of dense products in 16 bits
    memory_gb: int


def _device(terabytes_per_s: float, teraflops: float, memory_gb: int) -> Device:
    limits = Roofline(bytes_per_s=terabytes_per_s * 1e12, flops_per_s=teraflops * 1e12)
    return Device(limits, memory_gb)


DEVICES: Final = {
    "a100-80gb": _device(2.039, 312, 80),
    "b200": _device(8.0, 2250, 180),
    "h100": _device(3.35, 989, 80),
    "h200": _device(4.8, 989, 141),
    "l4": _device(0.3, 121, 24),
    "l40s": _device(0.864, 362, 48),
    "mi300x": _device(5.3, 1307, 192),
    "rtx-4090": _device(1.008, 165, 24),
}
"""The SXM form where there are several. No program reaches these rates, so the times are floors."""
