"""Ends a block of code at SIGINT or SIGTERM."""

import logging
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

log = logging.getLogger(__name__)


@contextmanager
def stopped_by_signals() -> Iterator[threading.Event]:
    """Leaves the block at the first SIGINT or SIGTERM, and sets the event.

    The event is for the case that a library catches the exception. If a library turns it into
    another one, as native modules do while they are imported, the block ends just as well. Later
    signals are ignored: the stop has a time limit, and an interrupt would leave it incomplete.
    """
    stopped = threading.Event()

    def interrupt(signum: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        stopped.set()
        raise KeyboardInterrupt

    signal.signal(signal.SIGINT, interrupt)
    signal.signal(signal.SIGTERM, interrupt)
    try:
        yield stopped
    except KeyboardInterrupt:
        pass
    except Exception as error:
        if not stopped.is_set():
            raise
        log.warning("interrupted, then: %s: %s", type(error).__name__, error)


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


@contextmanager
def signals_deferred() -> Iterator[None]:
    """Lets SIGINT and SIGTERM wait until the block has ended.

    For a block that starts a process: an exception between its start and the first scope that ends
    it would leave it behind. Does nothing in other threads than the main one, which no signal
    interrupts.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    received: list[int] = []
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    # One that was not set in Python is unknown here and could not be set again.
    kept = {number: handler for number, handler in handlers.items() if handler is not None}
    for number in kept:
        signal.signal(number, lambda signum, frame: received.append(signum))
    try:
        yield
    finally:
        for number, handler in kept.items():
            signal.signal(number, handler)
        for signum in received:
            signal.raise_signal(signum)
