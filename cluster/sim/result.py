"""Holds the results of a simulation: the requests, and the use of the workers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ...proto import inference_pb2
from ...router.telemetry.requests import PARTS
from ..bench.metrics import RequestRecord, Summary, summarize
from ..config import PoolRole


@dataclass(eq=False, kw_only=True)
class Lifetime:
    """Holds when something of a worker began and ended."""

    role: PoolRole
    started: float
    ended: float | None = None  # None: it still lasts

    def end_before(self, seconds: float) -> float:
        """Returns the time of its end, but at most `seconds`."""
        return seconds if self.ended is None else min(self.ended, seconds)


@dataclass(eq=False, kw_only=True)
class WorkerUsage(Lifetime):
    """Measures the use of one worker from when it is ready to its end."""

    worker_id: str
    num_blocks: int
    busy_seconds: float = 0.0  # of its steps
    peak_blocks: int = 0  # the most that sequences, leases and reservations held

    def count_blocks(self, num_held: int) -> None:
        """Counts the blocks that are held after a step."""
        self.peak_blocks = max(self.peak_blocks, num_held)

    @property
    def peak_kv(self) -> float:
        """Returns the peak of the held blocks as a share of all blocks."""
        return self.peak_blocks / self.num_blocks


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedRequest:
    """Holds the times of one request, as its client and its trailers would report them."""

    record: RequestRecord
    # From its arrival at the router to its end; as in the trailers of a real request.
    timeline: inference_pb2.Timeline
    tenant: str = ""

    def __reduce__(self) -> tuple[object, ...]:
        """Lets processes exchange requests; pickle does not know messages of protobuf."""
        return _restore, (self.record, self.timeline.SerializeToString(), self.tenant)


@dataclass(frozen=True, kw_only=True)
class SimulationResult:
    """Holds the outcome of one simulation. Times are virtual seconds from its start."""

    requests: Sequence[SimulatedRequest]  # in the order of the trace
    workers: Sequence[WorkerUsage]  # in the order in which they were ready
    seconds: float  # until the last request has ended
    router_busy_share: float  # of the busiest router
    # Seconds that requests waited in the routers, by the pool that had no room for the next one.
    queue_seconds: Mapping[str, float]
    # The sizes of the pools: (time, number of ready workers) at each change.
    sizes: Mapping[PoolRole, Sequence[tuple[float, int]]] = field(default_factory=dict)
    # Of the workers that began to start after the simulation had begun, whether they were ready or
    # not: from the begin to the end of the start.
    starts: Sequence[Lifetime] = ()

    def summary(self, slo: Mapping[str, float] | None = None) -> Summary:
        """Returns the metrics of `tandem bench`; `slo`: limits in ms, see `summarize`."""
        return summarize([each.record for each in self.requests], slo or {})

    def busy_share(self, role: PoolRole) -> float:
        """Returns the share of their time that the workers of a role spent in steps."""
        workers = [each for each in self.workers if each.role == role]
        alive = sum(each.end_before(self.seconds) - each.started for each in workers)
        return sum(each.busy_seconds for each in workers) / alive if alive > 0 else 0.0

    def peak_kv(self, role: PoolRole) -> float:
        """Returns the largest share of its blocks that a worker of a role has held."""
        return max((each.peak_kv for each in self.workers if each.role == role), default=0.0)

    def wait_seconds(self) -> dict[str, float]:
        """Returns the mean seconds of a request by the stage in which it waited or worked.

        They add up to its mean time; `tokenize` has the wait for a busy router.
        """
        count = max(len(self.requests), 1)
        return {
            stage: sum(getattr(each.timeline, f"{stage}_seconds") for each in self.requests) / count
            for stage in PARTS
        }


def _restore(record: RequestRecord, timeline: bytes, tenant: str) -> SimulatedRequest:
    return SimulatedRequest(
        record=record, timeline=inference_pb2.Timeline.FromString(timeline), tenant=tenant
    )
