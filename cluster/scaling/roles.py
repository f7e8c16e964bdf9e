"""Chooses which workers prefill and which decode, while their number stays.

Pure: gets reports and times, and answers with roles. The directory runs it, because every member
of a service reports there. One worker switches at a time. A decision waits for the one before, and
for a shortage that lasts; so the split neither oscillates nor follows the noise of the reports.
"""

import logging
import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from .config import RoleScaling
from .needs import Reports, Value, prompt_need, sequence_need
from .reports import SEQUENCES
from .sizing import Need, RoleSplit, settle

log = logging.getLogger(__name__)

REPORTS_PER_WINDOW: Final = 5
# A member is gone that has been silent for so many reports, and for so many seconds.
_SILENT_REPORTS: Final = 3
_SILENT_SECONDS: Final = 5.0
_ORDER_SECONDS: Final = 10.0  # a worker that has not switched by then is not waited for
# The wait for all workers after the first one has reported. One may be missing for long: after its
# machine has failed, or when the directory has started again meanwhile.
_COMPLETE_SECONDS: Final = 120.0

Role = str
"""`prefill` or `decode`; empty for a router."""


@dataclass(slots=True)
class _Member:
    """Holds the reports of a member in the last window, the oldest first."""

    role: Role
    reports: deque[tuple[float, Mapping[str, float]]] = field(default_factory=deque)

    @property
    def seen(self) -> float:
        return self.reports[-1][0]


@dataclass(slots=True)
class _Order:
    """Holds the role that a worker should take, until it has it."""

    worker_id: str
    role: Role
    until: float


class RoleScaler:
    """Decides the roles of one application's workers from what its members report."""

    def __init__(self, scaling: RoleScaling) -> None:
        self.scaling = scaling
        self._config = scaling.config
        self._interval = self._config.window_seconds / REPORTS_PER_WINDOW
        self._members: dict[str, _Member] = {}
        self._order: _Order | None = None
        # Decisions begin once all workers have been there at once, or after _COMPLETE_SECONDS.
        self._has_begun = False
        self._first_worker = math.inf  # when the first worker reported
        self._next = 0.0  # the time of the next decision
        self._last: tuple[float, Role] | None = None  # the time and the role of the last order
        # What would have been the best split, for a shortage and for the way back.
        self._shortages: Sequence[Need] = ()
        self._returns: Sequence[Need] = ()

    def report(self, now: float, member_id: str, role: Role, figures: Mapping[str, float]) -> Role:
        """Records a report of a router or a worker; returns the role that the worker should have.

        `role` is the present one, empty for a router. `now` is in seconds and never decreases.
        """
        if role:
            self._first_worker = min(self._first_worker, now)
        member = self._members.get(member_id)
        if member is None or member.role != role:
            member = self._members[member_id] = _Member(role)
        member.reports.append((now, figures))
        while member.reports[0][0] < now - self._config.window_seconds:
            member.reports.popleft()
        if now >= self._next:
            self._next = now + self._interval
            self._decide(now)
        order = self._order
        return order.role if order is not None and order.worker_id == member_id else role

    def forget(self, member_id: str) -> None:
        """Removes a member that has left; ignores an unknown one."""
        self._members.pop(member_id, None)

    def is_silent(self, now: float) -> bool:
        """Returns True if no member has reported for long: the application has ended."""
        return all(each.seen < now - self._config.window_seconds for each in self._members.values())

    def _decide(self, now: float) -> None:
        silent_since = now - max(_SILENT_REPORTS * self._interval, _SILENT_SECONDS)
        self._members = {
            member_id: each
            for member_id, each in self._members.items()
            if each.seen >= silent_since
        }
        roles = {member_id: each.role for member_id, each in self._members.items() if each.role}
        self._has_begun = self._has_begun or self._may_begin(now, len(roles))
        if not self._has_begun or not roles or self._is_switching(now, roles):
            return
        current = sum(role == "prefill" for role in roles.values())
        target = self._target(now, current, len(roles))
        if target != current:
            role = "prefill" if target > current else "decode"
            others = [worker_id for worker_id in roles if roles[worker_id] != role]
            chosen = min(others, key=self._num_sequences)
            self._order = _Order(chosen, role, now + _ORDER_SECONDS)
            self._last = now, role

    def _may_begin(self, now: float, num_workers: int) -> bool:
        """Returns True if all workers are there, or after a wait for the missing ones."""
        if num_workers >= self.scaling.num_workers:
            return True
        if not num_workers or now < self._first_worker + _COMPLETE_SECONDS:
            return False
        log.warning(
            "role_scaling begins with %d of %d workers: the others have not reported for %g s",
            num_workers,
            self.scaling.num_workers,
            _COMPLETE_SECONDS,
        )
        return True

    def _is_switching(self, now: float, roles: Mapping[str, Role]) -> bool:
        """Returns True while a worker has still to take the role of the last decision."""
        order = self._order
        if order is None:
            return False
        if roles.get(order.worker_id, order.role) == order.role or now > order.until:
            self._order = None
        return self._order is not None

    def _target(self, now: float, current: int, num_workers: int) -> int:
        """Returns the number of prefill workers to aim at; it may be more than one switch away."""
        low, high = self._config.bounds(num_workers)
        if not low <= current <= high:  # a worker has failed, or an operator has switched one
            return min(max(current, low), high)
        routers = self._reports(of_routers=True)
        prompts = prompt_need(routers, self._config)
        sequences = sequence_need(routers, self._reports(of_routers=False), self._config)
        if prompts is None or sequences is None:
            return current
        split = RoleSplit(prefill=prompts, decode=sequences, num_workers=num_workers)
        best = split.best(current, low, high)
        usual = min(max(self.scaling.num_prefill, low), high)
        way_back = usual if split.leaves_room(usual) else current
        delay = self._config.delay_seconds
        target, self._shortages = settle(
            now, best, self._shortages, current, up_delay=delay, down_delay=delay
        )
        delay = self._config.return_seconds
        returned, self._returns = settle(
            now, way_back, self._returns, current, up_delay=delay, down_delay=delay
        )
        target = target if target != current else returned
        return current if self._is_undone_by(now, target - current) else target

    def _is_undone_by(self, now: float, change: int) -> bool:
        """Returns True if a change of the number of prefill workers would undo a recent switch."""
        if self._last is None or change == 0:
            return False
        time, role = self._last
        return now - time < self._config.delay_seconds and (change > 0) != (role == "prefill")

    def _reports(self, *, of_routers: bool) -> Reports:
        found: dict[str, dict[str, list[Value]]] = {}
        for member_id, member in self._members.items():
            if bool(member.role) is of_routers:
                continue
            for time, figures in member.reports:
                for figure, value in figures.items():
                    series = found.setdefault(figure, {}).setdefault(member_id, [])
                    series.append(Value(time, value))
        return found

    def _num_sequences(self, worker_id: str) -> tuple[float, str]:
        _, figures = self._members[worker_id].reports[-1]
        return figures.get(SEQUENCES, 0.0), worker_id
