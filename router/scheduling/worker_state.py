"""Tracks one worker for a router: what this router dispatched there, and what others have there by
its reports.
"""

from dataclasses import dataclass, field
from typing import Final

from ...proto import worker_pb2
from .capacity import NO_CAPACITY, UNBOUNDED, Capacity
from .prefix_index import Prefix

_NEWEST_WEIGHT: Final = 0.05
"""The weight of the last prompt in a moving mean."""

_LOOK_AHEAD_SECONDS: Final = 0.25
"""Of prompts that are sent to a worker before it is done with others: it must not idle, but only
here can the order of requests still be changed, and what waits there has not been asked whether it
may wait so long.
"""

_MIN_LOOK_AHEAD_TOKENS: Final = 512  # what a step of a CPU computes
_MAX_LOOK_AHEAD_TOKENS: Final = 16_384


@dataclass(slots=True, eq=False)
class WorkerState:
    """Holds one worker of the registry.

    What others have there is what the worker reported beyond what this router had there at that
    moment. So a report and what follows it here never count twice, and each report corrects this
    router's own estimates. Nothing is assumed about how many other routers there are.
    """

    info: worker_pb2.WorkerInfo
    requests: dict[str, tuple[Capacity, Prefix]] = field(
        default_factory=dict
    )  # by id: dispatched here and not ended
    ahead: set[str] = field(
        default_factory=set
    )  # ids: those of them whose prompts go ahead of what waits
    own: Capacity = NO_CAPACITY  # used by `requests`
    uncached_rate: float = (
        1.0  # of the prompts dispatched here, the part that was not cached; a moving mean
    )
    load: worker_pb2.WorkerLoad = field(default_factory=worker_pb2.WorkerLoad)  # as last reported
    free: Capacity = NO_CAPACITY
    is_lost: bool = False  # the session with it has broken, and no later one has brought anything
    _others: Capacity | None = NO_CAPACITY  # None: not computed since the last report
    _own_at_report: Capacity = NO_CAPACITY

    def report(self, load: worker_pb2.WorkerLoad) -> None:
        """Takes over the worker's report of its load, unless a newer one is known."""
        if load.version < self.load.version:
            return
        self.load = load
        self._others, self._own_at_report = None, self.own

    @property
    def others(self) -> Capacity:
        """What others have at the worker, by its last report. Computed when it is first read:
        most reports are followed by newer ones before anybody places a request."""
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
        self, request_id: str, used: Capacity, prefix: Prefix, *, is_resumed: bool = False
    ) -> None:
        """Counts a request that is dispatched to the worker, in place of what it counted before.
        `is_resumed`: its prompt is computed before others.
        """
        self.remove(request_id)
        if is_resumed:
            self.ahead.add(request_id)
        self.requests[request_id] = used, prefix
        self.own += used
        if used.prompt_tokens:
            uncached = used.uncached_tokens / used.prompt_tokens
            self.uncached_rate += _NEWEST_WEIGHT * (uncached - self.uncached_rate)

    def remove(self, request_id: str) -> Prefix | None:
        """Counts a request no more; returns its prefix, None if it was not there."""
        used, prefix = self.requests.pop(request_id, (None, None))
        self.ahead.discard(request_id)
        if used is not None:
            self.own -= used
        return prefix

    def prefilled(self, request_id: str) -> None:
        """Counts a request, if it is there, as one whose prompt has been computed."""
        if found := self.requests.get(request_id):
            used, prefix = found
            self.add(
                request_id, Capacity(sequences=used.sequences, kv_tokens=used.kv_tokens), prefix
            )

    @property
    def drains(self) -> bool:
        """Whether it takes no request any more."""
        return self.info.draining or self.load.draining

    @property
    def state(self) -> str:
        """What metrics count it as."""
        if self.is_lost:
            return "lost"
        return "draining" if self.drains else "ready"

    @property
    def takes_requests(self) -> bool:
        """Whether requests may be placed on it."""
        return not self.drains and not self.is_lost

    @property
    def pending_tokens(self) -> int:
        """Prompt tokens to compute. Of others' prompts as much is taken to be cached as of this
        router's.
        """
        return self.own.uncached_tokens + int(self.others.prompt_tokens * self.uncached_rate)

    @property
    def ahead_tokens(self) -> int:
        """Those of them that are computed first: of streams that were interrupted."""
        return sum(self.requests[each][0].uncached_tokens for each in self.ahead)

    @property
    def size(self) -> Capacity:
        """Sequences and KV cache of the worker when it is empty, as far as it has reported."""
        return Capacity(
            sequences=self.info.max_sequences or UNBOUNDED,
            kv_tokens=self.load.total_blocks * self.info.block_size or UNBOUNDED,
        )

    @property
    def free_tokens(self) -> int:
        """Tokens of KV cache, free or cached, once all that was dispatched here has arrived."""
        return max(self.size.kv_tokens - self.own.kv_tokens - self.others.kv_tokens, 0)

    def measure_free(self, token_seconds: float) -> Capacity:
        """Returns what the worker has free if it computes one prompt token after the other, each in
        `token_seconds`."""
        if not self.takes_requests:
            return NO_CAPACITY
        bounds = (
            _MIN_LOOK_AHEAD_TOKENS,
            int(_LOOK_AHEAD_SECONDS / token_seconds),
            _MAX_LOOK_AHEAD_TOKENS,
        )
        look_ahead = sorted(bounds)[1]
        return Capacity(
            workers=1,
            sequences=self.size.sequences - self.own.sequences - self.others.sequences,
            prompt_tokens=look_ahead - self.pending_tokens,
            kv_tokens=self.free_tokens,
        ).clipped()
