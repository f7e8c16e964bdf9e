"""Keeps requests that may crash workers from taking others along, and refuses those that did. Awaits nothing."""

import math
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import Final

from ...proto.hashing import hash_prompt

CONVICTED_SECONDS: Final = 600.0  # how long the prompt of a request that crashed two workers is refused
TURN_SECONDS: Final = 15.0
"""How long the others wait for a suspect. One whose client reads nothing shows no token, and proves nothing."""
_MAX_CONVICTED: Final = 4_096


class Quarantine:
    """Lets requests whose worker has crashed start again one at a time, each until it has proved that it does no harm.

    After a crash any of the worker's requests may be at fault. Started alone, the one that crashes a second worker is
    known, and the others lose nothing but time."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._suspects: OrderedDict[Hashable, Callable[[], object]] = OrderedDict()  # the first may run
        self._turn_ends = 0.0  # of the first, if there is one
        self._convicted: OrderedDict[bytes, float] = OrderedDict()  # prompt hash, until when

    def enter(self, suspect: Hashable, wake: Callable[[], object]) -> None:
        """Queues a suspect; `wake` is called when its turn comes. Idempotent."""
        if not self._suspects:
            self._turn_ends = self._clock() + TURN_SECONDS
        self._suspects.setdefault(suspect, wake)

    def may_start(self, suspect: Hashable) -> bool:
        """Returns whether it is the turn of a suspect, or it is none (any more)."""
        if self._suspects and self._clock() >= self._turn_ends:
            self.leave(next(iter(self._suspects)))
        return suspect not in self._suspects or self._is_first(suspect)

    def waits_until(self, suspect: Hashable) -> float:
        """Returns when to ask again at the latest whether a suspect that must wait may start; infinite for others."""
        return self._turn_ends if suspect in self._suspects and not self._is_first(suspect) else math.inf

    def leave(self, suspect: Hashable) -> None:
        """Clears a suspect, or forgets one that has ended; the next may start. Idempotent."""
        was_first = self._is_first(suspect)
        self._suspects.pop(suspect, None)
        if was_first and self._suspects:
            self._turn_ends = self._clock() + TURN_SECONDS
            next(iter(self._suspects.values()))()

    def convict(self, prompt: Sequence[int]) -> None:
        """Refuses requests with this prompt for a while."""
        content = hash_prompt(prompt)
        self._convicted.pop(content, None)
        self._convicted[content] = self._clock() + CONVICTED_SECONDS
        if len(self._convicted) > _MAX_CONVICTED:
            self._convicted.popitem(last=False)

    def is_convicted(self, prompt: Sequence[int]) -> bool:
        """Returns whether requests with this prompt are refused now."""
        return bool(self._convicted) and self._convicted.get(hash_prompt(prompt), 0.0) > self._clock()

    def _is_first(self, suspect: Hashable) -> bool:
        return next(iter(self._suspects), None) == suspect
