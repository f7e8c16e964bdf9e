"""Reads one stream to its end, and measures its pauses."""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from ....proto.errors import TandemError
from ....router.client.client import AsyncClient
from ....router.client.types import Choice, Delta
from .mixed_requests import MixedRequest

STREAM_SECONDS: Final = 120.0
"""The timeout of a stream: far above the time that it needs, so that only a hang exceeds it."""

State = Literal["waiting", "running", "complete", "lost"]


NUM_TOKENS_AFTER: Final = 8
"""The tokens that each choice must get from another process after a kill."""


@dataclass(slots=True)
class Pause:
    """Measures the longest time without a token around a kill, from the last token before it.

    It is over when every choice has got its `missing` tokens, or has ended. They count from the
    time when the stream is known to be elsewhere: others may have been on their way before.
    """

    is_cut: bool  # the killed process worked for the stream
    missing: dict[int, int]  # tokens by choice
    seconds: float = 0.0
    is_elsewhere: bool = False  # no killed process works for the stream

    @property
    def is_over(self) -> bool:
        return not self.missing

    def take(self, choice: int, num_tokens: int, seconds: float) -> None:
        """Adds a message of a choice, which has come so many seconds after the one before."""
        if choice in self.missing:
            self.seconds = max(self.seconds, seconds)
            self.missing[choice] -= num_tokens if self.is_elsewhere else 0
            if self.missing[choice] <= 0:
                del self.missing[choice]


class FollowedStream:
    """Holds the progress of one request while it is read, and its result afterwards."""

    def __init__(self, request: MixedRequest, changed: Callable[["FollowedStream"], None]) -> None:
        """`changed` is called after each message of the stream, and at its end."""
        self.request = request
        self.state: State = "waiting"
        self.num_tokens = 0
        self.text = ""  # of the first choice
        self.longest_gap = 0.0  # seconds between two messages of a choice
        self._begun: set[int] = set()  # choices that have a message
        self.pauses: dict[str, Pause] = {}  # by the kind of process that was killed
        self.choices: Sequence[Choice] = ()
        self.error = ""
        self._changed = changed
        # By choice that has not ended: the time of its last message, or of its start.
        self._last: dict[int, float] = {}

    async def read(self, addresses: Sequence[str]) -> None:
        """Sends the request to the routers at these addresses, and reads the stream to its end."""
        self._last = dict.fromkeys(range(self.request.num_choices), time.monotonic())
        try:
            # A client of its own, because each begins with a random router.
            async with (
                AsyncClient(addresses) as client,
                self.request.open(client, STREAM_SECONDS) as stream,
            ):
                async for delta in stream:
                    self._take(delta, time.monotonic())
                self.choices = (await stream.completion()).choices
            self.state = "complete"
        except TandemError as error:
            self.error = f"{type(error).__name__}: {error}"
            self.state = "lost"
        self._last.clear()
        for pause in self.pauses.values():
            pause.missing.clear()
        self._changed(self)

    def begin_pause(self, kind: str, *, is_cut: bool) -> None:
        """Begins to measure the pause after the kill of a process. The stream must be running."""
        self.pauses[kind] = Pause(is_cut, dict.fromkeys(self._last, NUM_TOKENS_AFTER))

    def _take(self, delta: Delta, now: float) -> None:
        gap = now - self._last[delta.choice]
        for pause in self.pauses.values():
            pause.take(delta.choice, len(delta.token_ids), gap)
        if delta.choice in self._begun:
            self.longest_gap = max(self.longest_gap, gap)
        self._begun.add(delta.choice)
        self._last[delta.choice] = now
        self.num_tokens += len(delta.token_ids)
        if delta.choice == 0:
            self.text += delta.text
        if delta.finish_reason is not None:
            del self._last[delta.choice]
            for pause in self.pauses.values():
                pause.missing.pop(delta.choice, None)
        self._changed(self)


async def wait_until(condition: Callable[[], bool], changed: asyncio.Event, seconds: float) -> bool:
    """Waits until a condition holds, and checks it after each change; False: not within `seconds`.

    One task at a time may wait for the event.
    """
    try:
        async with asyncio.timeout(seconds):
            while not condition():
                changed.clear()
                await changed.wait()
    except TimeoutError:
        return False
    return True
