"""Ends a block of code at SIGINT or SIGTERM."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType


@contextmanager
def stopped_by_signals() -> Iterator[threading.Event]:
    """Leaves the block at the first SIGINT or SIGTERM, and sets the event.

    The event is for the case that a library catches the exception. Later signals are ignored: the
    stop has a time limit, and an interrupt would leave it incomplete.
    """
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
