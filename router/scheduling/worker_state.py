"""The books a router keeps of one worker: what it sent there, and what others have there by the worker's reports."""

from dataclasses import dataclass, field
from typing import Final, Self

from ...proto import worker_pb2
from ..request import TokenRequest
from .prefix_index import Prefix

UNBOUNDED: Final = 1 << 40

GROWTH_TOKENS: Final = 256
"""Generated tokens of each sequence that count in advance; most completions are not longer."""

_NEWS: Final = 0.05
"""The weight of the last prompt in a moving mean."""

_LOOK_AHEAD_SECONDS: Final = 0.5
"""Of prompts, sent to a prefill worker before it is done with others: it must not idle, but order is kept here."""

_MIN_LOOK_AHEAD_TOKENS: Final = 1_024
_MAX_LOOK_AHEAD_TOKENS: Final = 16_384


@dataclass(frozen=True, slots=True, kw_only=True)
class ResourceUsage:
    """What requests have of a worker."""

    sequences: int = 0
    pending: int = 0  # of them, those whose prompts are not computed yet
    prompt_tokens: int = 0  # of those prompts, as workers report them
    uncached_tokens: int = 0  # of those prompts, what is not in the prefix cache
    kv_tokens: int = 0

    def __add__(self, other: Self) -> "ResourceUsage":
        return ResourceUsage(
            sequences=self.sequences + other.sequences,
            pending=self.pending + other.pending,
            prompt_tokens=self.prompt_tokens + other.prompt_tokens,
            uncached_tokens=self.uncached_tokens + other.uncached_tokens,
            kv_tokens=self.kv_tokens + other.kv_tokens,
        )

    def less(self, other: Self) -> "ResourceUsage":
        """What is left of this without `other`; nothing is negative."""
        return ResourceUsage(
            sequences=max(self.sequences - other.sequences, 0),
            pending=max(self.pending - other.pending, 0),
            prompt_tokens=max(self.prompt_tokens - other.prompt_tokens, 0),
            uncached_tokens=max(self.uncached_tokens - other.uncached_tokens, 0),
            kv_tokens=max(self.kv_tokens - other.kv_tokens, 0),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """What workers have left."""

    workers: int = 0
    sequences: int = 0
    kv_tokens: int = 0
    prompt_tokens: int = 0  # to compute, before the queue is long enough

    def __add__(self, other: Self) -> "Capacity":
        return Capacity(
            workers=self.workers + other.workers,
            sequences=self.sequences + other.sequences,
            kv_tokens=self.kv_tokens + other.kv_tokens,
            prompt_tokens=self.prompt_tokens + other.prompt_tokens,
        )

    def __sub__(self, other: Self) -> "Capacity":
        return Capacity(
            workers=self.workers - other.workers,
            sequences=self.sequences - other.sequences,
            kv_tokens=self.kv_tokens - other.kv_tokens,
            prompt_tokens=self.prompt_tokens - other.prompt_tokens,
        )

    def exceeds(self, other: Self) -> bool:
        """Whether there is more of anything than in `other`."""
        return (
            self.workers > other.workers
            or self.sequences > other.sequences
            or self.kv_tokens > other.kv_tokens
            or self.prompt_tokens > other.prompt_tokens
        )


@dataclass(slots=True)
class DispatchedRequest:
    """A request that is at the worker."""

    usage: ResourceUsage
    prefix: Prefix


@dataclass(slots=True, eq=False)
class WorkerState:
    """One worker of the view.

    What others have there is what the worker reported beyond what this router had there at that moment. So a report
    and what follows it here never count twice, and where this router's own estimates are wrong, the rest corrects them.
    """

    info: worker_pb2.WorkerInfo
    sent: dict[str, DispatchedRequest] = field(default_factory=dict)  # by request: dispatched here and not ended
    own: ResourceUsage = ResourceUsage()
    others: ResourceUsage = ResourceUsage()
    uncached_rate: float = 1.0  # of the prompts that were sent here, the part that was not cached; a moving mean
    load: worker_pb2.WorkerLoad = field(default_factory=worker_pb2.WorkerLoad)
    room: Capacity = Capacity()

    def report(self, load: worker_pb2.WorkerLoad) -> None:
        """The worker said how busy it is."""
        self.load = load
        held = load.total_blocks - load.free_blocks - load.cached_blocks
        reported = ResourceUsage(
            sequences=load.num_waiting + load.num_running,
            pending=load.num_waiting,
            prompt_tokens=load.waiting_tokens,
            kv_tokens=max(held, 0) * self.info.block_size,
        )
        self.others = reported.less(self.own)

    def put(self, request_id: str, sent: DispatchedRequest) -> None:
        """A request is on its way to the worker."""
        self.take(request_id)
        self.sent[request_id] = sent
        self.own += sent.usage
        if sent.usage.prompt_tokens:
            self.uncached_rate += _NEWS * (sent.usage.uncached_tokens / sent.usage.prompt_tokens - self.uncached_rate)

    def take(self, request_id: str) -> DispatchedRequest | None:
        """A request has left the worker, if it was there."""
        sent = self.sent.pop(request_id, None)
        if sent is not None:
            self.own = self.own.less(sent.usage)
        return sent

    def computed(self, request_id: str) -> None:
        """The prompt of a request has been computed."""
        if sent := self.take(request_id):
            usage = ResourceUsage(sequences=sent.usage.sequences, kv_tokens=sent.usage.kv_tokens)
            self.put(request_id, DispatchedRequest(usage, sent.prefix))

    @property
    def pending_tokens(self) -> int:
        """Prompt tokens to compute; of others' prompts as much is taken to be cached as of ours."""
        return self.own.uncached_tokens + int(self.others.prompt_tokens * self.uncached_rate)

    @property
    def size(self) -> Capacity:
        """What the worker has when it is empty, as far as it has said."""
        return Capacity(
            sequences=self.info.max_sequences or UNBOUNDED,
            kv_tokens=self.load.total_blocks * self.info.block_size or UNBOUNDED,
        )

    @property
    def free_tokens(self) -> int:
        """Of KV cache, free or cached, when what was sent here has come."""
        return max(self.size.kv_tokens - self.own.kv_tokens - self.others.kv_tokens, 0)

    def measure_room(self, token_seconds: float) -> Capacity:
        """What the worker has left, if a prompt token takes it `token_seconds` to compute."""
        if self.info.draining:
            return Capacity()
        bounds = (_MIN_LOOK_AHEAD_TOKENS, int(_LOOK_AHEAD_SECONDS / max(token_seconds, 1e-9)), _MAX_LOOK_AHEAD_TOKENS)
        look_ahead = sorted(bounds)[1]
        return Capacity(
            workers=1,
            sequences=max(self.size.sequences - self.own.sequences - self.others.sequences, 0),
            kv_tokens=self.free_tokens,
            prompt_tokens=max(look_ahead - self.pending_tokens, 0),
        )


def usage_of(request: TokenRequest, *, num_tokens: int, cached_tokens: int, decodes: bool) -> ResourceUsage:
    """What a request will have at a worker that is to compute `num_tokens` of its prompt (0: none) and holds
    `cached_tokens` of it. Choices share the prompt's blocks, and all requests those of the cached part."""
    sequences = num_sequences(request) if decodes else 1
    return ResourceUsage(
        sequences=sequences,
        pending=1 if num_tokens else 0,
        prompt_tokens=num_tokens,
        uncached_tokens=max(num_tokens - cached_tokens, 1) if num_tokens else 0,
        kv_tokens=max(len(request.prompt) - cached_tokens, 0) + (growth_tokens(request) if decodes else 0),
    )


def num_sequences(request: TokenRequest) -> int:
    """How many sequences a request decodes at once."""
    return max(request.num_choices, request.beam_search.width if request.beam_search is not None else 1)


def growth_tokens(request: TokenRequest) -> int:
    """Tokens that a request is expected to generate."""
    return num_sequences(request) * min(request.max_tokens, GROWTH_TOKENS)
