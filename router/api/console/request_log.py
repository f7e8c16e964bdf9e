"""Remembers the requests of a router for the console: those that run, and the last ones that have ended.

Of a request it holds names, counts and times, never a prompt, a token or a key. Nothing is computed for a token: what a
request has done until now is read when somebody asks.
"""

import time
from collections import deque
from collections.abc import Collection, Iterable, Iterator
from dataclasses import asdict
from itertools import count
from typing import Any, Final

from ...telemetry.requests import PARTS, EndedRequest, RequestTelemetry, RunningRequest

MAX_ENDED: Final = 128
MAX_EVENTS: Final = 128
MAX_SAMPLES: Final = 300  # seconds
_MAX_TIMES: Final = 4_096  # of the requests of one second, from which its percentiles are taken


class Ring:
    """Holds the last items, each with a number that grows."""

    def __init__(self, size: int, numbers: Iterator[int]) -> None:
        """`numbers`: shared by all rings of which one cursor tells what has been read."""
        self._items: deque[tuple[int, dict[str, Any]]] = deque(maxlen=size)
        self._numbers = numbers

    def add(self, item: dict[str, Any]) -> int:
        """Adds an item; returns its number."""
        number = next(self._numbers)
        self._items.append((number, item))
        return number

    def after(self, number: int) -> list[dict[str, Any]]:
        """Returns the items with greater numbers, the oldest first."""
        found = []
        for each, item in reversed(self._items):
            if each <= number:
                break
            found.append(item)
        return found[::-1]


class RequestLog:
    """Holds what the console shows of requests. `sample` is to be called once a second; it reads what has come since.

    Lives in one event loop."""

    def __init__(self, telemetry: RequestTelemetry) -> None:
        numbers = count(1)
        self.ended = Ring(MAX_ENDED, numbers)
        self.events = Ring(MAX_EVENTS, numbers)
        self.samples = Ring(MAX_SAMPLES, numbers)
        self.last_number = 0  # of an item of a ring
        self._telemetry = telemetry
        self._totals = asdict(telemetry.totals)
        self._sampled = time.monotonic()
        self._ttfts: deque[float] = deque(maxlen=_MAX_TIMES)  # since the last sample
        self._tpots: deque[float] = deque(maxlen=_MAX_TIMES)
        telemetry.observers.append(self._add_ended)

    @property
    def running(self) -> Collection[RunningRequest]:
        """Returns the requests that run, the oldest first."""
        return self._telemetry.running

    def sample(self) -> None:
        """Adds what has happened since the last sample."""
        self._telemetry.count_running()
        for request in self.running:
            self._note_news(request)
        now = time.monotonic()
        states = [state_of(request) for request in self.running]
        totals = asdict(self._telemetry.totals)
        self.last_number = self.samples.add(
            {
                "time": round(time.time(), 1),
                "seconds": round(max(now - self._sampled, 1e-3), 3),  # since the last one
                "running": len(states),
                "queued": states.count("queued"),
                **{name: total - self._totals[name] for name, total in totals.items()},
                "ttft": percentiles(self._ttfts),
                "tpot": percentiles(self._tpots),
            }
        )
        self._sampled, self._totals = now, totals
        self._ttfts.clear()
        self._tpots.clear()

    def note(self, event: dict[str, Any]) -> None:
        """Adds an event."""
        self.last_number = self.events.add(event)

    def _add_ended(self, request: EndedRequest) -> None:
        self._note_news(request)
        if request.timeline.tpot_seconds:
            self._tpots.append(request.timeline.tpot_seconds)
        self.last_number = self.ended.add(describe(request, time.monotonic()))

    def _note_news(self, request: RunningRequest | EndedRequest) -> None:
        """Notes the first token of a request, and what has interrupted it, if that was since the last sample."""
        facts, timeline = request.facts, request.timeline
        since = self._sampled - facts.arrived
        if request.num_generated and timeline.ttft_seconds > since:
            self._ttfts.append(timeline.ttft_seconds)
        for each in timeline.interruptions:
            if each.at_seconds > since:
                event = {"kind": "request", "cause": each.cause, "worker": each.worker}
                event |= {"request": facts.request_id, "tenant": facts.tenant}
                self.note({"time": round(facts.began + each.at_seconds, 3), **event})


def state_of(request: RunningRequest) -> str:
    """Returns where a request is: queued, prefill or decode."""
    if not request.timeline.attempts:
        return "queued"
    return "decode" if request.timeline.ttft_seconds else "prefill"


def describe(request: RunningRequest | EndedRequest, now: float) -> dict[str, Any]:
    """Returns a request as plain data, times in seconds. `now`: by time.monotonic()."""
    facts, timeline = request.facts, request.timeline
    finish = _finish(request) if isinstance(request, EndedRequest) else ""
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
        "stages": [round(getattr(timeline, f"{part}_seconds"), 6) for part in PARTS] if finish else [],
        "interruptions": [[round(each.at_seconds, 3), each.cause, each.worker] for each in timeline.interruptions],
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
