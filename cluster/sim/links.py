"""Simulates the time of KV transfers: bytes that become ready, over links that transfers share.

Knows nothing of sequences, blocks or workers.
"""

import asyncio
from typing import Final

_NEGLIGIBLE: Final = 1e-6  # bytes


class Link:
    """Holds the running flows of one end: of a worker's network interface."""

    def __init__(self) -> None:
        self.flows: dict[Flow, None] = {}


class Flow:
    """Moves the bytes of one transfer as they become ready, at its share of two links.

    Flows that run at the same time share a link equally. A flow runs at the smaller one of its
    shares, and only while it has ready bytes that it has not moved.
    """

    def __init__(
        self, source: Link, target: Link, *, num_bytes: float, bytes_per_second: float
    ) -> None:
        self.active_seconds = 0.0  # without the waits for ready bytes
        self._links = (source, target)
        self._num_bytes = num_bytes
        self._bytes_per_second = bytes_per_second
        self._ready = 0.0
        self._moved = 0.0
        self._rate = 0.0
        self._since = 0.0  # when `_moved` was computed
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._done: asyncio.Future[None] = self._loop.create_future()
        if num_bytes <= 0:
            self._done.set_result(None)

    async def wait(self) -> None:
        """Waits until all bytes have moved. Raises the error of `fail`."""
        await self._done

    def make_ready(self, num_bytes: float) -> None:
        """Sets how many bytes may be moved so far."""
        num_bytes = min(num_bytes, self._num_bytes)
        if num_bytes <= self._ready or self._done.done():
            return
        self._settle()
        self._ready = num_bytes
        self._schedule()

    def fail(self, error: Exception) -> None:
        """Ends the flow; `wait` raises `error` unless all bytes have moved."""
        if not self._done.done():
            self._done.set_exception(error)
        self.stop()

    def stop(self) -> None:
        """Ends the flow; the others get its share. Idempotent."""
        self._done.cancel()
        if self in self._links[0].flows:
            self._change(runs=False)

    def _settle(self) -> None:
        """Computes the bytes moved until now."""
        now = self._loop.time()
        if self in self._links[0].flows:
            self._moved = min(self._moved + self._rate * (now - self._since), self._ready)
            self.active_seconds += now - self._since
        self._since = now

    def _schedule(self) -> None:
        """Runs the flow while it has ready bytes."""
        runs = self in self._links[0].flows
        has_bytes = self._ready - self._moved > _NEGLIGIBLE
        if runs != has_bytes:
            self._change(runs=has_bytes)
        else:
            self._set_timer()
        if not has_bytes and self._moved >= self._num_bytes - _NEGLIGIBLE:
            self._done.set_result(None)

    def _change(self, *, runs: bool) -> None:
        """Starts or pauses the flow, and gives every flow of its links its new share."""
        others = {flow: None for link in self._links for flow in link.flows}
        for flow in others:
            flow._settle()
        for link in self._links:
            if runs:
                link.flows[self] = None
            else:
                link.flows.pop(self, None)
        self._since = self._loop.time()
        for flow in [*others, self]:
            flow._set_timer()

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self not in self._links[0].flows:
            return
        crowd = max(len(link.flows) for link in self._links)
        self._rate = self._bytes_per_second / crowd
        self._timer = self._loop.call_later(
            (self._ready - self._moved) / self._rate, self._arrived, self._ready
        )

    def _arrived(self, num_bytes: float) -> None:
        """Handles the timer: all bytes that were ready have moved."""
        self._settle()
        self._moved = num_bytes
        self._schedule()
