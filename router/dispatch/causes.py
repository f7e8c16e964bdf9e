"""Defines why an attempt ends before its time, and who is blamed for it."""

from enum import Enum
from typing import Final

from ...proto import worker_pb2


class Cause(Enum):
    """Why choices of an attempt were interrupted. The values tell who is blamed: whether the
    request avoids the worker for a while, and whether the request itself may be at fault.
    """

    INVALID = ("invalid", False, True)  # the worker refused the request: another would, too
    FULL = ("full", True, False)  # the worker's queue or KV budget is full
    GONE = (
        "gone",
        True,
        False,
    )  # the worker drains, has left, or was lost before it can have begun with the request
    CRASH = ("crash", True, True)  # the worker was lost after it may have begun
    TRANSFER = (
        "transfer",
        False,
        False,
    )  # the KV cache could not be fetched; which side failed is not known
    PREEMPTED = ("preempted", False, False)  # the worker needed the blocks for older sequences
    SUSPENDED = ("suspended", True, False)  # the worker drains, and holds the KV cache for another
    # The model computed NaN or infinity. A second report of the same request ends it; it has harmed
    # no worker, so it is no candidate, see PoisonGuard.
    NOT_FINITE = ("not_finite", True, False)
    UNABLE = ("unable", True, False)  # the worker cannot serve the request, by a fault of its own

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
"""By what a worker reports. A failure of another kind, such as the loss of a worker, is a crash or
a leave.
"""
