"""How commands that hold a service end: at the first SIGINT or SIGTERM, in order."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType


@contextmanager
def stopped_by_signals() -> Iterator[threading.Event]:
    """Leaves the block at the first SIGINT or SIGTERM and sets the event, in case a library eats the exception.

    Later signals are ignored: the stop has its own limit of time, and an interrupt would leave half of it undone."""
    stopped = threading.Event()

    def interrupt(signum: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        stopped.set()
        raise KeyboardInterrupt

    signal.signal(signal.SIGINT, interrupt)
    signal.signal(signal.SIGTERM, interrupt)
    with suppress(KeyboardInterrupt):
        yield stopped
