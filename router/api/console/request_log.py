"""Remembers the requests of a router for the console: those that run, and the last ones that have ended.

Of a request it holds names, counts and times, never a prompt, a token or a key. Nothing is computed for a token: a
request tells when it begins and ends, and what it has done until now is read when somebody asks.
"""

import asyncio
import time
from collections import deque
from collections.abc import Iterable, Iterator
from itertools import count
from types import TracebackType
from typing import Any, Final, Self

from ....proto import inference_pb2
from ....proto.errors import TandemError
from ...frontend.prepare import PreparedRequest
from ...telemetry.requests import RequestProgress

MAX_ENDED: Final = 128
MAX_EVENTS: Final = 128
MAX_SAMPLES: Final = 300  # seconds
_MAX_TIMES: Final = 4_096  # of the requests of one second, from which its percentiles are taken

STAGES: Final = ("tokenize", "queue", "dispatch", "prefill", "kv_transfer", "decode")
"""The parts of a timeline, which add up, in the order in which a request goes through them."""


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


class LoggedRequest:
    """Describes one request; a context manager around its execution."""

    __slots__ = (
        "_began_at",
        "_log",
        "_model",
        "_num_seen",
        "_outputs",
        "_request_id",
        "began",
        "num_counted",
        "tenant",
        "timeline",
    )

    def __init__(
        self, log: "RequestLog", request: PreparedRequest, timeline: inference_pb2.Timeline, outputs: RequestProgress
    ) -> None:
        self._log = log
        self._request_id = request.request_id  # as the client knows it
        self._model = request.model
        self._outputs = outputs
        self._num_seen = 0  # interruptions that are in the log of events
        self.tenant = request.tokens.tenant
        self.timeline = timeline
        self.began = request.tokens.arrived  # by time.monotonic()
        self._began_at = time.time() - time.monotonic() + self.began
        self.num_counted = 0  # tokens that are in the samples; see RequestLog

    def __enter__(self) -> Self:
        self._log.begin(self)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._log.end(self, self._finish(error))

    @property
    def num_generated(self) -> int:
        return self._outputs.num_generated

    @property
    def state(self) -> str:
        """Where it is: queued, prefill or decode."""
        if not self.timeline.attempts:
            return "queued"
        return "decode" if self.timeline.ttft_seconds else "prefill"

    def describe(self, now: float, finish: str = "") -> dict[str, Any]:
        """Returns it as plain data, times in seconds. `now`: by time.monotonic(); `finish`: why it has ended, if it
        has."""
        timeline = self.timeline
        total = timeline.end_to_end_seconds or now - self.began
        return {
            "id": self._request_id,
            "tenant": self.tenant,
            "model": self._model,
            "began": round(self._began_at, 3),
            "state": "ended" if finish else self.state,
            "finish": finish,
            "prompt_tokens": timeline.prompt_tokens,
            "cached_tokens": timeline.cached_tokens,
            "tokens": self.num_generated,
            "attempts": timeline.attempts,
            "workers": [timeline.prefill_worker, timeline.decode_worker],
            "transport": timeline.kv_transport,
            "kv_bytes": timeline.kv_transfer_bytes,
            "kv_active": round(timeline.kv_transfer_active_seconds, 6),
            "ttft": round(timeline.ttft_seconds, 6),
            "tpot": round(timeline.tpot_seconds, 6),
            "total": round(total, 6),
            "stages": [round(getattr(timeline, f"{stage}_seconds"), 6) for stage in STAGES] if finish else [],
            "interruptions": [[round(each.at_seconds, 3), each.cause, each.worker] for each in timeline.interruptions],
        }

    def new_events(self) -> Iterator[dict[str, Any]]:
        """Yields what has interrupted it since the last call."""
        for each in self.timeline.interruptions[self._num_seen :]:
            self._num_seen += 1
            what = {"kind": "request", "cause": each.cause, "worker": each.worker}
            yield {
                "time": round(self._began_at + each.at_seconds, 3),
                **what,
                "request": self._request_id,
                "tenant": self.tenant,
            }

    def _finish(self, error: BaseException | None) -> str:
        if error is None:
            reasons = {inference_pb2.FinishReason.Name(each) for each in self._outputs.finish_reasons}
            return ", ".join(sorted(each.removeprefix("FINISH_REASON_").lower() for each in reasons)) or "stop"
        if isinstance(error, GeneratorExit | asyncio.CancelledError):
            return "cancelled"
        return error.code.lower() if isinstance(error, TandemError) else "internal"


class RequestLog:
    """Holds what the console shows of requests. `sample` is to be called once a second; it reads what has come since.

    Lives in one event loop."""

    def __init__(self) -> None:
        numbers = count(1)
        self.running: dict[int, LoggedRequest] = {}  # by identity, the oldest first
        self.ended = Ring(MAX_ENDED, numbers)
        self.events = Ring(MAX_EVENTS, numbers)
        self.samples = Ring(MAX_SAMPLES, numbers)
        self.last_number = 0  # of an item of a ring
        self._num_begun = self._num_ended = self._num_failed = self._num_tokens = self._num_prompt_tokens = 0
        self._sampled = time.monotonic()
        self._ttfts: deque[float] = deque(maxlen=_MAX_TIMES)  # since the last sample
        self._tpots: deque[float] = deque(maxlen=_MAX_TIMES)

    def record(
        self, request: PreparedRequest, timeline: inference_pb2.Timeline, outputs: RequestProgress
    ) -> LoggedRequest:
        """Returns the context manager in which the request is to be executed. `timeline` is filled meanwhile."""
        return LoggedRequest(self, request, timeline, outputs)

    def begin(self, record: LoggedRequest) -> None:
        self.running[id(record)] = record
        self._num_begun += 1

    def end(self, record: LoggedRequest, finish: str) -> None:
        """`finish`: the finish reasons of its choices, `cancelled`, or the code of its error."""
        del self.running[id(record)]
        self._count(record)
        self._num_ended += 1
        self._num_failed += finish not in ("stop", "length", "tool_calls", "cancelled") and "," not in finish
        if record.timeline.tpot_seconds:
            self._tpots.append(record.timeline.tpot_seconds)
        self._note(record.new_events())
        self.last_number = self.ended.add(record.describe(time.monotonic(), finish))

    def sample(self) -> None:
        """Adds what has happened since the last sample."""
        for record in self.running.values():
            self._count(record)
            self._note(record.new_events())
        now = time.monotonic()
        states = [record.state for record in self.running.values()]
        self.last_number = self.samples.add(
            {
                "time": round(time.time(), 1),
                "seconds": round(max(now - self._sampled, 1e-3), 3),  # since the last one
                "running": len(states),
                "queued": states.count("queued"),
                "begun": self._num_begun,
                "ended": self._num_ended,
                "failed": self._num_failed,
                "tokens": self._num_tokens,
                "prompt_tokens": self._num_prompt_tokens,
                "ttft": percentiles(self._ttfts),
                "tpot": percentiles(self._tpots),
            }
        )
        self._sampled = now
        self._num_begun = self._num_ended = self._num_failed = self._num_tokens = self._num_prompt_tokens = 0
        self._ttfts.clear()
        self._tpots.clear()

    def note(self, event: dict[str, Any]) -> None:
        """Adds an event that is of no request."""
        self.last_number = self.events.add(event)

    def _note(self, events: Iterable[dict[str, Any]]) -> None:
        for event in events:
            self.note(event)

    def _count(self, record: LoggedRequest) -> None:
        """Counts the tokens of a request that are not counted yet, and its first one once."""
        num_generated = record.num_generated
        if not record.num_counted and num_generated:
            self._num_prompt_tokens += record.timeline.prompt_tokens
            if record.timeline.ttft_seconds:
                self._ttfts.append(record.timeline.ttft_seconds)
        self._num_tokens += max(num_generated - record.num_counted, 0)
        record.num_counted = max(num_generated, record.num_counted)


def percentiles(values: Iterable[float]) -> list[float] | None:
    """Returns the 50th and the 95th percentile by nearest rank; None without values."""
    ordered = sorted(values)
    if not ordered:
        return None
    return [round(ordered[max(-(-len(ordered) * each // 100), 1) - 1], 6) for each in (50, 95)]
