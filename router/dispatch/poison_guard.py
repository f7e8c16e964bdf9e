"""Finds the requests that crash workers, with few crashes. Awaits nothing."""

import math
import time
from collections.abc import Callable, Collection, Hashable
from dataclasses import dataclass, field
from typing import Final

from ..scheduling.policy import Placement
from .blocked_prompts import BlockedPrompts

SOLO_RUN_SECONDS: Final = 15.0
"""How long a first solo run, such as one of a very long prompt, keeps other suspects away."""

_MAX_WAITING: Final = 3
"""Suspects that wait for one worker before others go elsewhere. The worker has most of their
prompts cached, and to compute a prompt elsewhere takes about as long as three such solo runs.
"""

_REPORT_SECONDS: Final = 1.0
"""Within this time all requests of a crashed worker report the crash. A later report may make a
request a suspect in vain.
"""


@dataclass(slots=True, eq=False)
class _Suspect:
    """Holds the state of one suspect."""

    wake: Callable[[], object]
    crashes: set[tuple[str, int]] = field(default_factory=set)  # workers it may have crashed
    worker_id: str | None = None  # where it is on its solo run
    since: float = 0.0  # when that began
    refused: set[str] = field(default_factory=set)  # workers that were busy with another solo run

    @property
    def ends(self) -> float:
        """When its solo run keeps others away no more.

        The time doubles with each crash, so even a slow suspect is alone at last.
        """
        return self.since + SOLO_RUN_SECONDS * 2.0 ** (len(self.crashes) - 1)


class PoisonGuard:
    """Makes the requests of a crashed worker suspects, and tries each of them alone.

    After a crash any of the worker's requests may be at fault, or none. Each becomes a suspect
    and continues in a solo run: no other suspect is at its worker until it is proven there.
    Requests that are no suspects run there as well. If a worker crashes in a solo run, the
    suspect is blocked; all others lose only time. Solo runs at different workers are parallel.

    A request that crashes its workers costs two of them in every case. A harmless request is
    blocked only if something else crashes its second worker during its solo run, which takes tenths
    of a second in most cases.

    Several suspects at one worker (a bisection) would cost more workers. A long decode proves
    nothing: a request may crash its worker at a certain length, wherever it continues.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        *,
        blocked_prompts: BlockedPrompts | None = None,
    ) -> None:
        self.blocked_prompts = blocked_prompts or BlockedPrompts(clock)
        self._clock = clock
        self._suspects: dict[Hashable, _Suspect] = {}  # the oldest first
        self._solo_runs: dict[str, dict[Hashable, _Suspect]] = {}  # by worker id
        # By worker: the suspects on a solo run there when it crashed, and the time.
        self._crashes: dict[tuple[str, int], tuple[frozenset[Hashable], float]] = {}

    def __contains__(self, suspect: Hashable) -> bool:
        return suspect in self._suspects

    def count_crash(
        self,
        suspect: Hashable,
        worker: tuple[str, int],
        wake: Callable[[], object],
        *,
        is_proven: bool = False,
    ) -> bool:
        """Counts a crash of a worker (id, epoch) that may have begun to compute a request.

        Returns True if only the request can be at fault. Otherwise it becomes a suspect, unless
        another one was on its solo run there and this one is proven there. `wake` is called when
        the suspect may continue.
        """
        now = self._clock()
        self._crashes = {
            key: crash for key, crash in self._crashes.items() if crash[1] > now - _REPORT_SECONDS
        }
        # The first report counts for all, since each report changes the solo runs.
        solo, _ = self._crashes.setdefault(
            worker, (frozenset(self._solo_runs.get(worker[0], ())), now)
        )
        if solo == {suspect} and not is_proven:
            return True
        if not solo or suspect in solo or not is_proven:
            entry = self._suspects.setdefault(suspect, _Suspect(wake))
            entry.crashes.add(worker)
            if entry.worker_id == worker[0]:
                self.keep(suspect, ())
        return False

    def may_start(self, suspect: Hashable, worker_id: str) -> bool:
        """Begins the solo run of a suspect at a worker. Returns True if it may compute there.

        It may not while it is on a solo run elsewhere, or another suspect is on one there.
        Requests that are no suspects always may.
        """
        entry = self._suspects.get(suspect)
        if entry is None or entry.worker_id == worker_id:
            return True
        if entry.worker_id is not None or self._is_taken(worker_id):
            entry.refused.add(worker_id)
            return False
        entry.worker_id = worker_id
        entry.since = self._clock()
        self._solo_runs.setdefault(worker_id, {})[suspect] = entry
        entry.refused.clear()
        return True

    def place(
        self,
        suspect: Hashable,
        find: Callable[[Collection[str]], Placement | None],
        avoid: Collection[str],
    ) -> Placement | None:
        """Returns the best placement whose first worker may compute the request, see `may_start`.

        `find` returns the best placement without the given workers, at first `avoid`.
        """
        crowded = set(avoid)
        while (placement := find(crowded)) is not None:
            first = placement.prefill or placement.decode
            if self.may_start(suspect, first):
                return placement
            num_waiting = sum(first in each.refused for each in self._suspects.values())
            if num_waiting <= _MAX_WAITING:
                return None
            crowded.add(first)
        return None

    def may_ask(self, suspect: Hashable) -> bool:
        """Returns True if `place` may succeed: not while all workers that refused are busy."""
        entry = self._suspects.get(suspect)
        if entry is None or not entry.refused:
            return True
        return entry.worker_id is None and not all(map(self._is_taken, entry.refused))

    def look_elsewhere(self, suspect: Hashable) -> None:
        """Forgets the workers that refused a suspect, since after an event it may use others."""
        if suspect in self._suspects:
            self._suspects[suspect].refused.clear()

    def waits_until(self, suspect: Hashable) -> float:
        """Returns the latest time to ask again for a refused suspect; infinity for others."""
        entry = self._suspects.get(suspect)
        now = self._clock()
        if entry is None or entry.worker_id is not None:
            return math.inf
        ends = [
            max(each.ends for each in self._solo_runs[at].values())
            for at in entry.refused & self._solo_runs.keys()
        ]
        return min((end for end in ends if end > now), default=math.inf)

    def keep(self, suspect: Hashable, worker_ids: Collection[str]) -> None:
        """Ends the solo run of a suspect unless it is at one of these workers; wakes others."""
        entry = self._suspects.get(suspect)
        if entry is None or entry.worker_id is None or entry.worker_id in worker_ids:
            return
        worker_id, entry.worker_id = entry.worker_id, None
        del self._solo_runs[worker_id][suspect]
        if not self._solo_runs[worker_id]:
            del self._solo_runs[worker_id]
        for other in self._suspects.values():
            # The suspect's next worker, or its next choice, may wait for this as well.
            if worker_id in other.refused or other is entry:
                other.wake()

    def leave(self, suspect: Hashable) -> None:
        """Removes a suspect that is cleared or has ended; wakes others. Idempotent."""
        self.keep(suspect, ())
        self._suspects.pop(suspect, None)

    def _is_taken(self, worker_id: str) -> bool:
        now = self._clock()
        return any(entry.ends > now for entry in self._solo_runs.get(worker_id, {}).values())
