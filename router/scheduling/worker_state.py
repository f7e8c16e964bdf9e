"""Tracks one worker for a router: its reports, and the requests that the router sent to it."""

from dataclasses import dataclass, field
from typing import Final

from ...proto import worker_pb2
from ...proto.costs import KvCost
from .capacity import NO_CAPACITY, UNBOUNDED, Capacity
from .prefix_index import Prefix

_NEWEST_WEIGHT: Final = 0.05
"""The weight of the last prompt in a moving mean."""

_LOOK_AHEAD_SECONDS: Final = 0.25
"""Prompt computation that a worker gets in advance, so that it does not idle.

More would be harmful: only the router can still change the order of requests, and only the router's
queue enforces the maximum wait.
"""


_MIN_LOOK_AHEAD_TOKENS: Final = 512  # computed by one step on a CPU
_MAX_LOOK_AHEAD_TOKENS: Final = 16_384


@dataclass(slots=True, eq=False)
class WorkerState:
    """Holds one worker of the registry.

    The use by other routers is the reported use, minus the use by this router at the time of the
    report. So nothing counts twice, and each report corrects this router's estimates. The number of
    other routers does not matter.
    """

    info: worker_pb2.WorkerInfo
    # By request id: the requests that this router sent and that have not ended.
    requests: dict[str, tuple[Capacity, Prefix]] = field(default_factory=dict)
    # Ids of requests whose prompts the worker computes before those that wait there.
    ahead: set[str] = field(default_factory=set)
    own: Capacity = NO_CAPACITY  # used by `requests`
    # The uncached share of the prompts that this router sent; a moving mean.
    uncached_rate: float = 1.0
    load: worker_pb2.WorkerLoad = field(default_factory=worker_pb2.WorkerLoad)  # the last report
    cost: KvCost = field(init=False)  # of KV cache
    is_lost: bool = False  # the last session broke, and no later one has reported anything
    _others: Capacity | None = NO_CAPACITY  # None: not computed since the last report
    _own_at_report: Capacity = NO_CAPACITY

    def __post_init__(self) -> None:
        self.cost = KvCost.of(self.info)

    def report(self, load: worker_pb2.WorkerLoad) -> None:
        """Stores a report of the worker's load, unless a newer one is known."""
        if load.version < self.load.version:
            return
        self.load = load
        self._others = None
        self._own_at_report = self.own

    @property
    def others(self) -> Capacity:
        """Returns the worker's use by other routers, according to its last report.

        Computed on the first read, because most reports are outdated before a request is placed.
        """
        if self._others is None:
            load = self.load
            held_blocks = load.total_blocks - load.free_blocks - load.cached_blocks
            reported = Capacity(
                sequences=load.num_waiting + load.num_running,
                prompts=load.num_waiting,
                prompt_tokens=load.waiting_tokens,
                kv_tokens=max(held_blocks, 0) * self.info.block_size,
            )
            self._others = (reported - self._own_at_report).clipped()
        return self._others

    def add(
        self, request_id: str, used: Capacity, prefix: Prefix, *, is_recovery: bool = False
    ) -> None:
        """Counts a request that was sent to the worker; replaces its earlier entry.

        `is_recovery`: the worker computes its prompt before others.
        """
        self.remove(request_id)
        if is_recovery:
            self.ahead.add(request_id)
        self.requests[request_id] = used, prefix
        self.own += used
        if used.prompt_tokens:
            uncached = used.uncached_tokens / used.prompt_tokens
            self.uncached_rate += _NEWEST_WEIGHT * (uncached - self.uncached_rate)

    def remove(self, request_id: str) -> Prefix | None:
        """Removes a request and returns its prefix; None for an unknown request."""
        used, prefix = self.requests.pop(request_id, (None, None))
        self.ahead.discard(request_id)
        if used is not None:
            self.own -= used
        return prefix

    def prefilled(self, request_id: str) -> None:
        """Counts the prompt of a request as computed; ignores an unknown request."""
        if found := self.requests.get(request_id):
            used, prefix = found
            self.add(
                request_id, Capacity(sequences=used.sequences, kv_tokens=used.kv_tokens), prefix
            )

    @property
    def drains(self) -> bool:
        """Returns True if the worker takes no new requests."""
        return self.info.draining or self.load.draining

    @property
    def state(self) -> str:
        """Returns `lost`, `draining` or `ready`, as in the metrics."""
        if self.is_lost:
            return "lost"
        return "draining" if self.drains else "ready"

    @property
    def takes_requests(self) -> bool:
        """Returns True if requests may be placed on the worker."""
        return not self.drains and not self.is_lost

    @property
    def pending_tokens(self) -> int:
        """Returns the prompt tokens to compute; assumes the same cache hit rate for all routers."""
        return self.own.uncached_tokens + int(self.others.prompt_tokens * self.uncached_rate)

    @property
    def ahead_tokens(self) -> int:
        """Returns the pending prompt tokens of recoveries, which are computed first."""
        return sum(self.requests[each][0].uncached_tokens for each in self.ahead)

    @property
    def size(self) -> Capacity:
        """Returns the sequences and the KV cache of the empty worker; unbounded until reported."""
        return Capacity(
            sequences=self.info.max_sequences or UNBOUNDED,
            kv_tokens=self._kv_tokens,
        )

    @property
    def free_tokens(self) -> int:
        """Returns the KV cache tokens that are free or cached after all sent requests arrive."""
        return max(self._kv_tokens - self.own.kv_tokens - self.others.kv_tokens, 0)

    def measure_free(self, token_seconds: float) -> Capacity:
        """Returns the free capacity of a worker that takes `token_seconds` per prompt token."""
        if not self.takes_requests:
            return NO_CAPACITY
        look_ahead = int(_LOOK_AHEAD_SECONDS / token_seconds)
        look_ahead = min(max(look_ahead, _MIN_LOOK_AHEAD_TOKENS), _MAX_LOOK_AHEAD_TOKENS)
        max_sequences = self.info.max_sequences or UNBOUNDED
        return Capacity(
            workers=1,
            sequences=max(max_sequences - self.own.sequences - self.others.sequences, 0),
            prompt_tokens=max(look_ahead - self.pending_tokens, 0),
            kv_tokens=self.free_tokens,
        )

    @property
    def _kv_tokens(self) -> int:
        """Returns the size of the KV cache."""
        return self.load.total_blocks * self.info.block_size or UNBOUNDED
