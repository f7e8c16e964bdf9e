"""Ends a block of code at SIGINT or SIGTERM."""

import signal
import sys
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


@contextmanager
def unwound_by_sigterm() -> Iterator[None]:
    """Makes SIGTERM raise SystemExit in the block, so that its scopes end.

    Otherwise child processes and scratch files would be left. Does nothing in other threads than
    the main one, and in a process that handles SIGTERM.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return

    def leave(signum: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a second one ends the process at once
        sys.exit(128 + signum)  # as shells report it

    signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
