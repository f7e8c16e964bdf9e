"""Remembers the running and the last ended requests of a router for the console.

The log holds names, counts and times of a request, never a prompt, a token or a key. It costs
nothing for a token: the progress of a request is read at each poll.
"""

import time
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from itertools import takewhile
from typing import Any, Final, Generic, TypeVar

from ...telemetry.requests import (
    PARTS,
    EndedRequest,
    RequestTelemetry,
    RequestTotals,
    RunningRequest,
)

MAX_ENDED: Final = 128
MAX_EVENTS: Final = 128
MAX_SAMPLES: Final = 300  # seconds
FIRST_NUMBER: Final = 1_000_000_000
_MAX_TIMES: Final = 4_096  # of the requests of a tenant in one second, for their percentiles


_T = TypeVar("_T")


def clock_numbers(clock: Callable[[], float] = time.monotonic) -> Iterator[int]:
    """Yields growing numbers that depend on the time, in microseconds, and not on their count.

    So a caller that may see only some of the items does not learn how many others there are.
    """
    start = clock()
    number = FIRST_NUMBER - 1
    while True:
        number = max(number + 1, FIRST_NUMBER + round((clock() - start) * 1e6))
        yield number


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestSample:
    """Holds the sums over the requests of a router for about one second."""

    time: float  # by time.time()
    seconds: float  # since the last sample
    total: Mapping[str, Any]
    tenants: Mapping[str, Mapping[str, Any]]  # of each tenant with requests

    def of_all(self) -> dict[str, Any]:
        """Returns the sums of all requests as plain data."""
        return {"time": self.time, "seconds": self.seconds, **self.total}

    def of(self, tenant: str) -> dict[str, Any]:
        """Returns the sums of one tenant's requests as plain data.

        A caller without a key has tenant "" and no requests.
        """
        own = self.tenants.get(tenant, _NOTHING) if tenant else _NOTHING
        return {"time": self.time, "seconds": self.seconds, **own}


class Ring(Generic[_T]):
    """Holds the last items, each with a number greater than those before."""

    def __init__(self, size: int, numbers: Iterator[int]) -> None:
        """`numbers`: shared by all rings that one cursor covers."""
        self._items: deque[tuple[int, _T]] = deque(maxlen=size)
        self._numbers = numbers

    def add(self, item: _T) -> None:
        """Adds an item."""
        self._items.append((next(self._numbers), item))

    def after(self, number: int) -> list[tuple[int, _T]]:
        """Returns the items with greater numbers, each with its number, the oldest first."""
        return list(takewhile(lambda each: each[0] > number, reversed(self._items)))[::-1]


class RequestLog:
    """Holds the requests that the console shows. The owner calls `sample` once a second.

    Lives in one event loop.
    """

    def __init__(self, telemetry: RequestTelemetry) -> None:
        self.numbers = clock_numbers()
        self.ended: Ring[dict[str, Any]] = Ring(MAX_ENDED, self.numbers)
        self.events: Ring[dict[str, Any]] = Ring(MAX_EVENTS, self.numbers)
        self.samples: Ring[RequestSample] = Ring(MAX_SAMPLES, self.numbers)
        self._telemetry = telemetry
        telemetry.take_totals()
        self._sampled = time.monotonic()
        self._parts: defaultdict[str, _Part] = defaultdict(_Part)  # by tenant
        telemetry.observers.append(self._add_ended)

    @property
    def running(self) -> Collection[RunningRequest]:
        """The running requests, the oldest first."""
        return self._telemetry.running

    def sample(self) -> None:
        """Adds a sample of the time since the last one."""
        self._telemetry.count_running()
        for request in self.running:
            self._add_news(request)
            self._parts[request.facts.tenant].states.append(state_of(request))
        for tenant, totals in self._telemetry.take_totals().items():
            self._parts[tenant].totals = totals
        total = _Part()
        for part in self._parts.values():
            total.add(part)
        now = time.monotonic()
        self.samples.add(
            RequestSample(
                time=round(time.time(), 1),
                seconds=round(max(now - self._sampled, 1e-3), 3),
                total=total.describe(),
                tenants={tenant: part.describe() for tenant, part in self._parts.items()},
            )
        )
        self._sampled = now
        self._parts.clear()

    def _add_ended(self, request: EndedRequest) -> None:
        self._add_news(request)
        if request.timeline.tpot_seconds:
            self._parts[request.facts.tenant].tpots.append(request.timeline.tpot_seconds)
        self.ended.add(describe(request, time.monotonic()))

    def _add_news(self, request: RunningRequest | EndedRequest) -> None:
        """Adds the first token and the interruptions of a request since the last sample."""
        facts = request.facts
        timeline = request.timeline
        since = self._sampled - facts.arrived
        if request.num_generated and timeline.ttft_seconds > since:
            self._parts[facts.tenant].ttfts.append(timeline.ttft_seconds)
        for each in timeline.interruptions:
            if each.at_seconds > since:
                event = {"kind": "request", "cause": each.cause, "worker": each.worker}
                event |= {"request": facts.request_id, "tenant": facts.tenant}
                self.events.add({"time": round(facts.began + each.at_seconds, 3), **event})


@dataclass(slots=True)
class _Part:
    """Sums over some of the requests since the last sample."""

    totals: RequestTotals = field(default_factory=RequestTotals)
    states: list[str] = field(default_factory=list)  # of running requests
    ttfts: deque[float] = field(default_factory=lambda: deque(maxlen=_MAX_TIMES))
    tpots: deque[float] = field(default_factory=lambda: deque(maxlen=_MAX_TIMES))

    def add(self, other: "_Part") -> None:
        """Adds the sums over other requests."""
        self.totals.add(other.totals)
        self.states += other.states
        self.ttfts += other.ttfts
        self.tpots += other.tpots

    def describe(self) -> dict[str, Any]:
        """Returns the sums as plain data."""
        return {
            "running": len(self.states),
            "queued": self.states.count("queued"),
            **asdict(self.totals),
            "ttft": percentiles(self.ttfts),
            "tpot": percentiles(self.tpots),
        }


def state_of(request: RunningRequest) -> str:
    """Returns the state of a request: queued, prefill or decode."""
    if not request.timeline.attempts:
        return "queued"
    return "decode" if request.timeline.ttft_seconds else "prefill"


def describe(request: RunningRequest | EndedRequest, now: float) -> dict[str, Any]:
    """Returns a request as plain data, times in seconds. `now`: by time.monotonic()."""
    facts = request.facts
    timeline = request.timeline
    finish = ""
    stages: list[float] = []
    if isinstance(request, EndedRequest):
        finish = _finish(request)
        stages = [round(getattr(timeline, f"{part}_seconds"), 6) for part in PARTS]
    return {
        "id": facts.request_id,
        "tenant": facts.tenant,
        "model": facts.model,
        "began": round(facts.began, 3),
        "state": "ended" if isinstance(request, EndedRequest) else state_of(request),
        "finish": finish,
        "prompt_tokens": timeline.prompt_tokens,
        "cached_tokens": timeline.cached_tokens,
        "tokens": request.num_generated,
        "attempts": timeline.attempts,
        "workers": [timeline.prefill_worker, timeline.decode_worker],
        "transport": timeline.kv_transport,
        "kv_bytes": timeline.kv_transfer_bytes,
        "kv_active": round(timeline.kv_transfer_active_seconds, 6),
        "ttft": round(timeline.ttft_seconds, 6),
        "tpot": round(timeline.tpot_seconds, 6),
        "total": round(timeline.end_to_end_seconds or now - facts.arrived, 6),
        "stages": stages,
        "interruptions": [
            [round(each.at_seconds, 3), each.cause, each.worker] for each in timeline.interruptions
        ],
    }


def _finish(request: EndedRequest) -> str:
    """Returns the finish reasons of a request's choices, `cancelled`, or the code of its error."""
    return request.error.lower() or ", ".join(sorted(set(request.finish_reasons))) or "stop"


def percentiles(values: Iterable[float]) -> list[float] | None:
    """Returns the 50th and the 95th percentile by nearest rank; None without values."""
    ordered = sorted(values)
    if not ordered:
        return None
    return [round(ordered[max(-(-len(ordered) * each // 100), 1) - 1], 6) for each in (50, 95)]


_NOTHING: Final[Mapping[str, Any]] = _Part().describe()
