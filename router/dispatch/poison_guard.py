"""Keeps requests that may crash workers from taking others along, and tells which one did. Awaits
nothing.
"""

import math
import time
from collections.abc import Callable, Collection, Hashable
from dataclasses import dataclass, field
from typing import Final

from ..scheduling.policy import Placement
from .blocked_prompts import BlockedPrompts

SOLO_RUN_SECONDS: Final = 15.0
"""How long a first solo run keeps other candidates from a worker, such as one of a very long prompt."""

_MAX_WAITING: Final = 3
"""Suspects that wait for one worker before others go elsewhere: mostly it has their prompts cached,
and a prompt takes about as long as so many solo runs of cached ones.
"""

_REPORT_SECONDS: Final = 1.0
"""Within so long all requests of a crashed worker report that. One that does so later may be
suspected in vain.
"""


@dataclass(slots=True, eq=False)
class _Candidate:
    """Holds what is known of a candidate."""

    wake: Callable[[], object]
    crashes: set[tuple[str, int]] = field(default_factory=set)  # of which workers it is suspected
    worker_id: str | None = None  # where it is on solo run
    since: float = 0.0
    refused: set[str] = field(default_factory=set)  # where it may have its solo run later

    @property
    def ends(self) -> float:
        """When its solo run keeps others away no more. It lasts twice as long after each crash, so
        that at last even a slow one has been alone.
        """
        return self.since + SOLO_RUN_SECONDS * 2.0 ** (len(self.crashes) - 1)


class PoisonGuard:
    """Has requests whose worker has crashed tried: each is alone, of all candidates, at the worker
    that computes it, until it has proved that it does no harm. Others than candidates run there, too.

    After a crash any of the worker's requests may be at fault, or none. A worker tries one candidate
    at a time, all workers try at once, so the candidate that crashes its worker is known: it is
    blocked, and all others lose nothing but time. A request that kills its workers costs two of
    them, whatever else happens. One that does not is blocked only if the second worker is killed
    by something else in its solo run there, which mostly takes tenths of a second.

    Several candidates at a worker (a bisection) would cost further workers to find the one. And that
    a request has
    decoded for long is no proof: it may do harm at a certain length, which it has wherever it goes
    on.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        *,
        blocked_prompts: BlockedPrompts | None = None,
    ) -> None:
        self.blocked_prompts = blocked_prompts or BlockedPrompts(clock)
        self._clock = clock
        self._candidates: dict[Hashable, _Candidate] = {}  # the longest first
        self._solo_runs: dict[
            str, dict[Hashable, _Candidate]
        ] = {}  # those that are on solo run, by worker id
        self._crashes: dict[
            tuple[str, int], tuple[frozenset[Hashable], float]
        ] = {}  # who was on solo run there, and when

    def __contains__(self, candidate: Hashable) -> bool:
        return candidate in self._candidates

    def count_crash(
        self,
        candidate: Hashable,
        worker: tuple[str, int],
        wake: Callable[[], object],
        *,
        is_proven: bool = False,
    ) -> bool:
        """Notes that a worker (id, epoch) has crashed that may have begun with a request. Returns
        whether that alone can be at fault; else makes it a candidate, unless another one was on solo run
        there and this is proven to do no harm there. `wake` is called when a candidate may go on.
        """
        now = self._clock()
        self._crashes = {
            key: crash for key, crash in self._crashes.items() if crash[1] > now - _REPORT_SECONDS
        }
        # What the first one to report finds counts for all: who is on solo run there changes with
        # each.
        tried, _ = self._crashes.setdefault(
            worker, (frozenset(self._solo_runs.get(worker[0], ())), now)
        )
        if tried == {candidate} and not is_proven:
            return True
        if not tried or candidate in tried or not is_proven:
            entry = self._candidates.setdefault(candidate, _Candidate(wake))
            entry.crashes.add(worker)
            if entry.worker_id == worker[0]:
                self.keep(candidate, ())
        return False

    def may_start(self, candidate: Hashable, worker_id: str) -> bool:
        """Begins the solo run of a candidate at a worker, unless it is on solo run elsewhere or another one
        is there. Returns whether the worker may compute the request: always if it is no candidate.
        """
        entry = self._candidates.get(candidate)
        if entry is None or entry.worker_id == worker_id:
            return True
        if entry.worker_id is not None or self._is_taken(worker_id):
            entry.refused.add(worker_id)
            return False
        entry.worker_id, entry.since = worker_id, self._clock()
        self._solo_runs.setdefault(worker_id, {})[candidate] = entry
        entry.refused.clear()
        return True

    def place(
        self,
        candidate: Hashable,
        find: Callable[[Collection[str]], Placement | None],
        avoid: Collection[str],
    ) -> Placement | None:
        """Returns the best placement whose first worker may compute the request now, see `may_start`.
        `find` returns the best one without some workers, at first `avoid`. Any placement will do if
        it is no candidate.
        """
        crowded = set(avoid)
        while (placement := find(crowded)) is not None:
            first = placement.prefill or placement.decode
            if self.may_start(candidate, first):
                return placement
            num_waiting = sum(first in each.refused for each in self._candidates.values())
            if num_waiting <= _MAX_WAITING:
                return None
            crowded.add(first)
        return None

    def may_ask(self, candidate: Hashable) -> bool:
        """Returns whether it is worth while to look for a worker: a candidate that has been refused
        waits.
        """
        entry = self._candidates.get(candidate)
        if entry is None or not entry.refused:
            return True
        return entry.worker_id is None and not all(map(self._is_taken, entry.refused))

    def look_elsewhere(self, candidate: Hashable) -> None:
        """Forgets where a candidate was refused: something has happened, and it may be sent to other
        workers now.
        """
        if candidate in self._candidates:
            self._candidates[candidate].refused.clear()

    def waits_until(self, candidate: Hashable) -> float:
        """Returns when to ask again at the latest for a candidate that has been refused; infinite for
        others.
        """
        entry, now = self._candidates.get(candidate), self._clock()
        if entry is None or entry.worker_id is not None:
            return math.inf
        ends = [
            max(each.ends for each in self._solo_runs[at].values())
            for at in entry.refused & self._solo_runs.keys()
        ]
        return min((end for end in ends if end > now), default=math.inf)

    def keep(self, candidate: Hashable, worker_ids: Collection[str]) -> None:
        """Ends the solo run of a candidate unless it is at one of these workers; those that it kept away
        may go on.
        """
        entry = self._candidates.get(candidate)
        if entry is None or entry.worker_id is None or entry.worker_id in worker_ids:
            return
        worker_id, entry.worker_id = entry.worker_id, None
        del self._solo_runs[worker_id][candidate]
        if not self._solo_runs[worker_id]:
            del self._solo_runs[worker_id]
        for other in self._candidates.values():
            if (
                worker_id in other.refused or other is entry
            ):  # its next worker, or choice, waits for that
                other.wake()

    def leave(self, candidate: Hashable) -> None:
        """Clears a candidate, or forgets one that has ended; those that it kept away may go on.
        Idempotent.
        """
        self.keep(candidate, ())
        self._candidates.pop(candidate, None)

    def _is_taken(self, worker_id: str) -> bool:
        now = self._clock()
        return any(entry.ends > now for entry in self._solo_runs.get(worker_id, {}).values())
