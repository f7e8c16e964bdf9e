"""Bounds for how long, and how often from one place, an answer is resumed.

Each router counts alone, so a service of R routers resumes an answer R times as often.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, TypeVar

from ...proto.errors import InvalidArgument

_K = TypeVar("_K")

RESUME_SECONDS: Final = 600.0
"""The default lifetime of a resume token or event id.

It covers a change of networks, a laptop that sleeps for a moment and a restart of the service.
"""

MAX_USES: Final = 3
"""Resumptions from one place of an answer.

The first connection may break before its first token comes, and a client may notice the end of its
connection before the router does.
"""

_MAX_PLACES: Final = 65_536
"""Places and answers that are remembered; the one that was used first is forgotten first."""

_Place = tuple[bytes, int]
"""An answer, and the number of tokens that its client has."""


@dataclass(slots=True)
class _Use:
    """Counts resumptions."""

    until: float  # the time from which no token can be valid
    count: int = 0


class ResumePolicy:
    """Decides which answers may be resumed. Lives in one event loop."""

    def __init__(
        self,
        lifetime: float = RESUME_SECONDS,
        *,
        wall_clock: Callable[[], float] = time.time,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`wall_clock` gives the time in tokens, which another router may have signed."""
        self._lifetime = lifetime
        self._wall_clock = wall_clock
        self._clock = clock
        self._uses: dict[_Place, _Use] = {}  # the last used at the end
        self._resumed: dict[bytes, _Use] = {}  # by answer, likewise

    def now(self) -> int:
        """Returns the time for a token, in seconds."""
        return int(self._wall_clock())

    def milliseconds_at(self, moment: float) -> int:
        """Returns the time of the wall clock at a moment of the monotonic clock."""
        return round(1000 * (self._wall_clock() - (self._clock() - moment)))

    def check_age(self, signed: int, field: str) -> None:
        """Raises InvalidArgument if a token that was signed at that time is too old."""
        if self.now() - signed > self._lifetime:
            raise InvalidArgument(
                f"has expired after {self._lifetime:g} seconds; send the request without it", field
            )

    def use(self, answer: bytes, num_tokens: int, field: str) -> bool:
        """Counts a resumption after `num_tokens`; returns True if it is the answer's first one.

        Raises InvalidArgument if MAX_USES resumptions have begun there.
        """
        now = self._clock()
        place = (answer, num_tokens)
        used = self._uses.get(place)
        if used is not None and used.until > now and used.count >= MAX_USES:
            reason = f"was used {MAX_USES} times; send the request without it"
            raise InvalidArgument(reason, field)
        self._count(self._uses, place, now)
        return self._count(self._resumed, answer, now) == 1

    def give_back(self, answer: bytes, num_tokens: int) -> None:
        """Takes back the count of a resumption that the service could not begin."""
        for used in (self._uses.get((answer, num_tokens)), self._resumed.get(answer)):
            if used is not None:
                used.count = max(used.count - 1, 0)

    def _count(self, uses: dict[_K, _Use], key: _K, now: float) -> int:
        used = uses.pop(key, None)
        if used is None or used.until <= now:
            used = _Use(now)
        used.until = now + self._lifetime
        used.count += 1
        uses[key] = used
        while uses[first := next(iter(uses))].until <= now or len(uses) > _MAX_PLACES:
            del uses[first]
        return used.count
