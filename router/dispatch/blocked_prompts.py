"""Remembers the requests that have crashed two workers, and lets routers share that. Awaits
nothing.
"""

import hashlib
import time
from collections.abc import Callable, Mapping
from typing import Final

from ...proto import worker_pb2
from ..request import TokenRequest

BLOCKED_SECONDS: Final = 600.0  # how long such a request is refused
MAX_BLOCKED: Final = 512
"""Requests at a time. The oldest gives way to one that is blocked here; one that others report
finds room or not.
"""

LEAST_SHARED_SECONDS: Final = 15.0
"""What ends sooner is not reported: a holder that has just forgotten it would learn it again from
one whose clock began a message later.
"""


def hash_request(request: TokenRequest) -> bytes:
    """Returns the hash of tenant, adapter, prompt and parameters.

    A request may crash workers if another one with the same hash has. The seed does not count: it
    is another one each time a client asks again.
    """
    content = worker_pb2.Submit()
    content.CopyFrom(request.submit)
    content.sampling.ClearField("seed")
    for field in ("request_id", "priority", "turn"):
        content.ClearField(field)
    content.adapter.ClearField("folder")
    encoded = content.SerializeToString(deterministic=True)
    return hashlib.blake2b(encoded, digest_size=16, person=b"blocked prompt").digest()


class BlockedPrompts:
    """Holds the hashes of blocked requests, see `hash_request`.

    Clocks of hosts differ, so holders exchange the seconds that are left."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.on_news: Callable[[], object] = lambda: (
            None
        )  # called after a blocked prompt of this router's own
        self._clock = clock
        self._until: dict[bytes, float] = {}  # by the hash of the request

    def block(self, request: TokenRequest) -> None:
        """Has requests like this one refused for a while."""
        self._forget_ended()
        content = hash_request(request)
        self._until.pop(content, None)
        if len(self._until) >= MAX_BLOCKED:
            del self._until[next(iter(self._until))]
        self._until[content] = self._clock() + BLOCKED_SECONDS
        self.on_news()

    def is_blocked(self, request: TokenRequest) -> bool:
        """Returns whether requests like this one are refused now."""
        return bool(self._until) and self._until.get(hash_request(request), 0.0) > self._clock()

    def remaining(self) -> dict[bytes, float]:
        """Returns what others should know: for how many more seconds each request is refused, by
        its hash.
        """
        now = self._clock()
        return {
            content: until - now
            for content, until in self._until.items()
            if until - now > LEAST_SHARED_SECONDS
        }

    def learn(self, remaining: Mapping[bytes, float]) -> bool:
        """Takes over what another holder's `remaining` has returned, as far as there is room.
        Returns whether anything was new. What is known already keeps its end, or each exchange
        would prolong it by the time that it takes.
        """
        self._forget_ended()
        now, num_known = self._clock(), len(self._until)
        for content, seconds in remaining.items():
            if content not in self._until and len(self._until) < MAX_BLOCKED:
                self._until[content] = now + min(seconds, BLOCKED_SECONDS)
        return len(self._until) > num_known

    def _forget_ended(self) -> None:
        now = self._clock()
        self._until = {content: until for content, until in self._until.items() if until > now}
