"""Defines the causes of interruptions."""

from enum import Enum
from typing import Final

from ...proto import worker_pb2


class Cause(Enum):
    """The cause of an interruption of choices.

    Its two flags: the request avoids the worker for a while; the request itself may be at fault.
    """

    # The worker refused the request; another one would do the same.
    INVALID = ("invalid", False, True)
    # The worker's queue or KV cache is full.
    FULL = ("full", True, False)
    # The worker drains, has left, or was lost before it can have begun to compute the request.
    GONE = ("gone", True, False)
    # The worker was lost after it may have begun.
    CRASH = ("crash", True, True)
    # The KV cache could not be fetched, by the fault of either side.
    TRANSFER = ("transfer", False, False)
    # The worker needed the blocks for older sequences.
    PREEMPTED = ("preempted", False, False)
    # The worker drains, and holds the KV cache for another one.
    SUSPENDED = ("suspended", True, False)
    # The model computed NaN or infinity. A second report of the same request ends it. It has not
    # harmed the worker, so it is no suspect of the PoisonGuard.
    NOT_FINITE = ("not_finite", True, False)
    # The worker cannot serve the request, by its own fault.
    UNABLE = ("unable", True, False)

    def __init__(self, _name: str, avoids_worker: bool, counts_crash: bool) -> None:
        self.avoids_worker = avoids_worker
        self.counts_crash = counts_crash


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
