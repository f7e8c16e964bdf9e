"""Decides when a worker reports its load, and changes of its prefix cache, to a router's session.

A message costs a router about 0.4 ms of CPU time, and it may have 1,000 sessions. So a session
gets a load at most every `LOAD_SECONDS`, and only if it has changed; a session without requests
every `IDLE_SECONDS`. Cache changes go with the outputs of a step or with the load.
"""

import asyncio
from collections.abc import Callable
from typing import Final

from ...proto import worker_pb2
from .session import RouterSession

LOAD_SECONDS: Final = 0.25
IDLE_SECONDS: Final = 2.0


class LoadReports:
    """Wakes the sessions of a worker when a report is due. Lives in one event loop."""

    def __init__(
        self, load: Callable[[], worker_pb2.WorkerLoad], sessions: set[RouterSession]
    ) -> None:
        """`load` returns the current load; its version tells whether it has changed."""
        self._load = load
        self._sessions = sessions
        self._timer: asyncio.TimerHandle | None = None
        self._next = 0.0  # the earliest time of the next check
        self._may_change = False  # the load may have changed since the last check

    def changed(self) -> None:
        """Reports the load soon if it has changed.

        The engine's thread may apply the change later, so that the load is checked twice.
        """
        self._may_change = True
        if self._timer is None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_at(max(loop.time(), self._next), self._check)

    def report_all(self) -> None:
        """Reports the load to every session at once."""
        for session in self._sessions:
            session.wake()

    def add_to(self, message: worker_pb2.SessionResponse, session: RouterSession) -> None:
        """Adds the load to a session's message, unless it is the one that the session knows."""
        load = self._load()
        if load.version != session.load_version:
            session.load_version = load.version
            message.load.CopyFrom(load)
            message.load.draining |= session.is_retired

    def _check(self) -> None:
        loop = asyncio.get_running_loop()
        now = loop.time()
        self._timer = None
        self._next = now + LOAD_SECONDS
        version = self._load().version
        stale = [each for each in self._sessions if each.is_stale(version)]
        for session in stale:
            if session.requests or now >= session.next_idle_report:
                session.next_idle_report = now + IDLE_SECONDS
                session.wake()
        if self._may_change or stale:
            self._may_change = False
            self._timer = loop.call_at(self._next, self._check)
