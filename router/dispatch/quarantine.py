"""Keeps requests that may crash workers from taking others along, and tells which one did. Awaits
nothing.
"""

import math
import time
from collections.abc import Callable, Collection, Hashable
from dataclasses import dataclass, field
from typing import Final

from ..scheduling.policy import Placement
from .convictions import Convictions

TRIAL_SECONDS: Final = 15.0
"""How long a first trial keeps other suspects from a worker, such as one of a very long prompt."""

_MAX_WAITING: Final = 3
"""Suspects that wait for one worker before others go elsewhere: mostly it has their prompts cached,
and a prompt takes about as long as so many trials of cached ones.
"""

_REPORT_SECONDS: Final = 1.0
"""Within so long all requests of a crashed worker report that. One that does so later may be
suspected in vain.
"""


@dataclass(slots=True, eq=False)
class _Suspect:
    """Holds what is known of a suspect."""

    wake: Callable[[], object]
    crashes: set[tuple[str, int]] = field(default_factory=set)  # of which workers it is suspected
    worker_id: str | None = None  # where it is on trial
    since: float = 0.0
    refused: set[str] = field(default_factory=set)  # where it may have its trial later

    @property
    def ends(self) -> float:
        """When its trial keeps others away no more. It lasts twice as long after each crash, so
        that at last even a slow one has been alone.
        """
        return self.since + TRIAL_SECONDS * 2.0 ** (len(self.crashes) - 1)


class Quarantine:
    """Has requests whose worker has crashed tried: each is alone, of all suspects, at the worker
    that computes it, until it has proved that it does no harm. Others than suspects run there, too.

    After a crash any of the worker's requests may be at fault, or none. A worker tries one suspect
    at a time, all workers try at once, so the suspect that crashes its worker is known: it is
    convicted, and all others lose nothing but time. A request that kills its workers costs two of
    them, whatever else happens. One that does not is convicted only if the second worker is killed
    by something else in its trial there, which mostly takes tenths of a second.

    Several suspects at a worker (a bisection) would cost further workers to find the one. And that
    a request has
    decoded for long is no proof: it may do harm at a certain length, which it has wherever it goes
    on.
    """

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, *, convictions: Convictions | None = None
    ) -> None:
        self.convictions = convictions or Convictions(clock)
        self._clock = clock
        self._suspects: dict[Hashable, _Suspect] = {}  # the longest first
        self._trials: dict[
            str, dict[Hashable, _Suspect]
        ] = {}  # those that are on trial, by worker id
        self._crashes: dict[
            tuple[str, int], tuple[frozenset[Hashable], float]
        ] = {}  # who was on trial there, and when

    def __contains__(self, suspect: Hashable) -> bool:
        return suspect in self._suspects

    def blame(
        self,
        suspect: Hashable,
        worker: tuple[str, int],
        wake: Callable[[], object],
        *,
        is_proven: bool = False,
    ) -> bool:
        """Notes that a worker (id, epoch) has crashed that may have begun with a request. Returns
        whether that alone can be at fault; else makes it a suspect, unless another one was on trial
        there and this is proven to do no harm there. `wake` is called when a suspect may go on.
        """
        now = self._clock()
        self._crashes = {
            key: crash for key, crash in self._crashes.items() if crash[1] > now - _REPORT_SECONDS
        }
        # What the first one to report finds counts for all: who is on trial there changes with
        # each.
        tried, _ = self._crashes.setdefault(
            worker, (frozenset(self._trials.get(worker[0], ())), now)
        )
        if tried == {suspect} and not is_proven:
            return True
        if not tried or suspect in tried or not is_proven:
            entry = self._suspects.setdefault(suspect, _Suspect(wake))
            entry.crashes.add(worker)
            if entry.worker_id == worker[0]:
                self.keep(suspect, ())
        return False

    def may_try(self, suspect: Hashable, worker_id: str) -> bool:
        """Begins the trial of a suspect at a worker, unless it is on trial elsewhere or another one
        is there. Returns whether the worker may compute the request: always if it is no suspect.
        """
        entry = self._suspects.get(suspect)
        if entry is None or entry.worker_id == worker_id:
            return True
        if entry.worker_id is not None or self._is_taken(worker_id):
            entry.refused.add(worker_id)
            return False
        entry.worker_id, entry.since = worker_id, self._clock()
        self._trials.setdefault(worker_id, {})[suspect] = entry
        entry.refused.clear()
        return True

    def place(
        self,
        suspect: Hashable,
        find: Callable[[Collection[str]], Placement | None],
        avoid: Collection[str],
    ) -> Placement | None:
        """Returns the best placement whose first worker may compute the request now, see `may_try`.
        `find` returns the best one without some workers, at first `avoid`. Any placement will do if
        it is no suspect.
        """
        crowded = set(avoid)
        while (placement := find(crowded)) is not None:
            first = placement.prefill or placement.decode
            if self.may_try(suspect, first):
                return placement
            num_waiting = sum(first in each.refused for each in self._suspects.values())
            if num_waiting <= _MAX_WAITING:
                return None
            crowded.add(first)
        return None

    def may_ask(self, suspect: Hashable) -> bool:
        """Returns whether it is worth while to look for a worker: a suspect that has been refused
        waits.
        """
        entry = self._suspects.get(suspect)
        if entry is None or not entry.refused:
            return True
        return entry.worker_id is None and not all(map(self._is_taken, entry.refused))

    def look_elsewhere(self, suspect: Hashable) -> None:
        """Forgets where a suspect was refused: something has happened, and it may be sent to other
        workers now.
        """
        if suspect in self._suspects:
            self._suspects[suspect].refused.clear()

    def waits_until(self, suspect: Hashable) -> float:
        """Returns when to ask again at the latest for a suspect that has been refused; infinite for
        others.
        """
        entry, now = self._suspects.get(suspect), self._clock()
        if entry is None or entry.worker_id is not None:
            return math.inf
        ends = [
            max(each.ends for each in self._trials[at].values())
            for at in entry.refused & self._trials.keys()
        ]
        return min((end for end in ends if end > now), default=math.inf)

    def keep(self, suspect: Hashable, worker_ids: Collection[str]) -> None:
        """Ends the trial of a suspect unless it is at one of these workers; those that it kept away
        may go on.
        """
        entry = self._suspects.get(suspect)
        if entry is None or entry.worker_id is None or entry.worker_id in worker_ids:
            return
        worker_id, entry.worker_id = entry.worker_id, None
        del self._trials[worker_id][suspect]
        if not self._trials[worker_id]:
            del self._trials[worker_id]
        for other in self._suspects.values():
            if (
                worker_id in other.refused or other is entry
            ):  # its next worker, or choice, waits for that
                other.wake()

    def leave(self, suspect: Hashable) -> None:
        """Clears a suspect, or forgets one that has ended; those that it kept away may go on.
        Idempotent.
        """
        self.keep(suspect, ())
        self._suspects.pop(suspect, None)

    def _is_taken(self, worker_id: str) -> bool:
        now = self._clock()
        return any(entry.ends > now for entry in self._trials.get(worker_id, {}).values())
