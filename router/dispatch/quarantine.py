"""Keeps requests that may crash workers from taking others along. Awaits nothing."""

import math
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Final

from .convictions import Convictions

TURN_SECONDS: Final = 15.0
"""How long the others wait for a suspect. One whose client reads nothing shows no token, and proves nothing."""


class Quarantine:
    """Lets requests whose worker has crashed start again one after the other, each until it has proved that it does no
    harm: it decodes.

    After a crash any of the worker's requests may be at fault. If no two of them are at one worker, the one that
    crashes a second worker is known, and the others lose nothing but time. To save of that, one may compute its prompt
    on a prefill worker while those before it decode elsewhere, or wait to."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, *, convictions: Convictions | None = None) -> None:
        self.convictions = convictions or Convictions(clock)
        self._clock = clock
        self._suspects: OrderedDict[Hashable, Callable[[], object]] = OrderedDict()  # the first may decode
        self._prefilled: set[Hashable] = set()  # suspects that only have to decode
        self._turn_ends = 0.0  # of the first, if there is one

    def enter(self, suspect: Hashable, wake: Callable[[], object]) -> None:
        """Queues a suspect; `wake` is called when it may start, and when it may decode. Idempotent."""
        if not self._suspects:
            self._turn_ends = self._clock() + TURN_SECONDS
        self._suspects.setdefault(suspect, wake)

    def may_start(self, suspect: Hashable) -> bool:
        """Returns whether a prefill worker may compute the prompt of a suspect, or it is none (any more)."""
        self._end_turn()
        return suspect not in self._suspects or suspect in (*self._prefilled, self._first_unprefilled())

    def may_decode(self, suspect: Hashable) -> bool:
        """Returns whether it is the turn of a suspect at any worker, or it is none (any more)."""
        self._end_turn()
        return suspect not in self._suspects or self._is_first(suspect)

    def waits_until(self, suspect: Hashable) -> float:
        """Returns when to ask again at the latest what a suspect may do that is not the first; infinite for others."""
        self._end_turn()
        return self._turn_ends if suspect in self._suspects and not self._is_first(suspect) else math.inf

    def prefilled(self, suspect: Hashable) -> None:
        """Lets the next suspect start: no prefill worker computes for this one any more. Idempotent."""
        if suspect in self._suspects and suspect not in self._prefilled:
            self._prefilled.add(suspect)
            self._wake_next()

    def leave(self, suspect: Hashable) -> None:
        """Clears a suspect, or forgets one that has ended; the next may go on. Idempotent."""
        was_first = self._is_first(suspect)
        if self._suspects.pop(suspect, None) is None:
            return
        self._prefilled.discard(suspect)
        if was_first and self._suspects:
            self._turn_ends = self._clock() + TURN_SECONDS
            next(iter(self._suspects.values()))()
        self._wake_next()

    def _end_turn(self) -> None:
        if self._suspects and self._clock() >= self._turn_ends:
            self.leave(next(iter(self._suspects)))

    def _is_first(self, suspect: Hashable) -> bool:
        return next(iter(self._suspects), None) == suspect

    def _first_unprefilled(self) -> Hashable | None:
        return next((suspect for suspect in self._suspects if suspect not in self._prefilled), None)

    def _wake_next(self) -> None:
        if (suspect := self._first_unprefilled()) is not None:
            self._suspects[suspect]()
