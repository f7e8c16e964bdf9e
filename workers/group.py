"""Ranks of one tensor-parallel group as processes: collectives over torch.distributed, each with a deadline.

No global process group: two engines fit in one process.
"""

from datetime import timedelta

import torch
from torch import distributed


class ProcessGroup:
    """Implements `Group` of `model.parallel` in host memory, over gloo.

    A call whose other ranks are lost or silent raises RuntimeError, within the timeout; after that the group is of no
    use any more."""

    def __init__(self, *, host: str, port: int, rank: int, size: int, timeout: float) -> None:
        """Rank 0 listens on host:port, the others find it there; returns when all have come. `timeout` is in seconds,
        of this and of every call."""
        self.rank = rank
        self.size = size
        limit = timedelta(seconds=timeout)
        store = distributed.TCPStore(  # type: ignore[attr-defined]
            host, port, size, is_master=rank == 0, timeout=limit
        )
        self._group = distributed.ProcessGroupGloo(store, rank, size, limit)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sums x over the ranks, in place."""
        x = x.contiguous()
        self._group.allreduce([x]).wait()  # type: ignore[attr-defined]
        return x

    def all_gather(self, x: torch.Tensor) -> list[torch.Tensor]:
        """Every rank's x, which all have one shape."""
        parts = [torch.empty_like(x) for _ in range(self.size)]
        self._group.allgather([parts], [x.contiguous()]).wait()  # type: ignore[attr-defined]
        return parts
