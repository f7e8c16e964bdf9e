"""Blocks requests that have crashed two workers; routers share the list. Awaits nothing."""

import hashlib
import time
from collections.abc import Callable, Mapping
from typing import Final

from ...proto import worker_pb2
from ..request import TokenRequest

BLOCKED_SECONDS: Final = 600.0  # how long such a request is refused
MAX_BLOCKED: Final = 512
"""Blocked requests of one holder. A request that is blocked here replaces the oldest; a reported
one is dropped if there is no room.
"""

LEAST_SHARED_SECONDS: Final = 15.0
"""Entries that end sooner are not reported. Otherwise a holder that has just forgotten an entry
would learn it again from another one, whose clock started a message later.
"""


def hash_request(request: TokenRequest) -> bytes:
    """Returns the hash of tenant, adapter, prompt and parameters.

    If a request has crashed workers, another one with the same hash may do so. The seed is not
    hashed, since a client that repeats a request gets another one.
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

    Holders exchange the seconds that are left, since the clocks of hosts differ.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        # Called after this router has blocked a request.
        self.on_news: Callable[[], object] = lambda: None
        self._clock = clock
        self._until: dict[bytes, float] = {}  # by the hash of the request

    def block(self, request: TokenRequest) -> None:
        """Blocks requests like this one for BLOCKED_SECONDS."""
        self._forget_ended()
        content = hash_request(request)
        self._until.pop(content, None)
        if len(self._until) >= MAX_BLOCKED:
            del self._until[next(iter(self._until))]
        self._until[content] = self._clock() + BLOCKED_SECONDS
        self.on_news()

    def is_blocked(self, request: TokenRequest) -> bool:
        """Returns True if requests like this one are refused now."""
        return bool(self._until) and self._until.get(hash_request(request), 0.0) > self._clock()

    def remaining(self) -> dict[bytes, float]:
        """Returns the seconds for which each request is still blocked, by hash, for others."""
        now = self._clock()
        return {
            content: until - now
            for content, until in self._until.items()
            if until - now > LEAST_SHARED_SECONDS
        }

    def learn(self, remaining: Mapping[bytes, float]) -> bool:
        """Adds another holder's `remaining` while there is room. Returns True if any was new.

        Known entries keep their end; otherwise each exchange would prolong them by its own time.
        """
        self._forget_ended()
        now = self._clock()
        num_known = len(self._until)
        for content, seconds in remaining.items():
            if content not in self._until and len(self._until) < MAX_BLOCKED:
                self._until[content] = now + min(seconds, BLOCKED_SECONDS)
        return len(self._until) > num_known

    def _forget_ended(self) -> None:
        now = self._clock()
        self._until = {content: until for content, until in self._until.items() if until > now}
