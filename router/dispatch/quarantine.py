"""Keeps requests that may crash workers from taking others along, and refuses those that did. Awaits nothing."""

import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import Final

from ...proto.hashing import hash_prompt

CONVICTED_SECONDS: Final = 600.0  # how long the prompt of a request that crashed two workers is refused
_MAX_CONVICTED: Final = 4_096


class Quarantine:
    """Lets requests whose worker has crashed start again one at a time, each until it has proved that it does no harm.

    After a crash any of the worker's requests may be at fault. Started alone, the one that crashes a second worker is
    known, and the others lose nothing but time."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._suspects: OrderedDict[Hashable, Callable[[], object]] = OrderedDict()  # the first may run
        self._convicted: OrderedDict[bytes, float] = OrderedDict()  # prompt hash, until when

    def enter(self, suspect: Hashable, wake: Callable[[], object]) -> None:
        """Queues a suspect; `wake` is called when its turn comes. Idempotent."""
        self._suspects.setdefault(suspect, wake)

    def may_start(self, suspect: Hashable) -> bool:
        """Returns whether it is the turn of a suspect, or it is none."""
        return suspect not in self._suspects or next(iter(self._suspects)) == suspect

    def leave(self, suspect: Hashable) -> None:
        """Clears a suspect, or forgets one that has ended; the next may start. Idempotent."""
        if self._suspects.pop(suspect, None) is not None and self._suspects:
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
