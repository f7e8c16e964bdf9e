"""Defines the causes of interruptions."""

from enum import Enum, auto
from typing import Final

from ...proto import worker_pb2


class Cause(Enum):
    """The cause of an interruption of choices."""

    # The worker refused the request; another one would do the same.
    INVALID = auto()
    # The worker's queue or KV cache is full.
    FULL = auto()
    # The worker drains, has left, or was lost before it can have begun to compute the request.
    GONE = auto()
    # The worker was lost after it may have begun.
    CRASH = auto()
    # The KV cache could not be fetched, by the fault of either side.
    TRANSFER = auto()
    # The worker needed the blocks for older sequences.
    PREEMPTED = auto()
    # The worker drains, and holds the KV cache for another one.
    SUSPENDED = auto()
    # The model computed NaN or infinity. A second report of the same request ends it. It has not
    # harmed the worker, so it is no suspect of the PoisonGuard.
    NOT_FINITE = auto()
    # The worker cannot serve the request, by its own fault.
    UNABLE = auto()

    @property
    def avoids_worker(self) -> bool:
        """Returns True if the request avoids the worker for a while, see AVOID_SECONDS."""
        return self not in (Cause.INVALID, Cause.TRANSFER, Cause.PREEMPTED)


CAUSES: Final = {
    worker_pb2.FAILURE_KIND_INVALID: Cause.INVALID,
    worker_pb2.FAILURE_KIND_FULL: Cause.FULL,
    worker_pb2.FAILURE_KIND_TRANSFER: Cause.TRANSFER,
    worker_pb2.FAILURE_KIND_PREEMPTED: Cause.PREEMPTED,
    worker_pb2.FAILURE_KIND_GONE: Cause.GONE,
    worker_pb2.FAILURE_KIND_NOT_FINITE: Cause.NOT_FINITE,
    worker_pb2.FAILURE_KIND_UNABLE: Cause.UNABLE,
}
"""The causes that a worker reports. Any other failure, such as its loss, is CRASH or GONE."""
