"""Ends a block of code at SIGINT, SIGTERM or SIGHUP.

A terminal sends SIGHUP when it closes. Writing to it then fails, so a block's scopes must do their
work without output. A process that nohup has started ignores SIGHUP, and so do these functions.
"""

import logging
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Final

log = logging.getLogger(__name__)

_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def stopped_by_signals() -> Iterator[threading.Event]:
    """Leaves the block at the first of the signals, and sets the event.

    The event is for the case that a library catches the exception. If a library turns it into
    another one, as native modules do while they are imported, the block ends just as well. Later
    signals are ignored: the stop has a time limit, and an interrupt would leave it incomplete.
    """
    stopped = threading.Event()

    def interrupt(signum: int, frame: FrameType | None) -> None:
        for number in _SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        stopped.set()
        raise KeyboardInterrupt

    for number in _SIGNALS:
        if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, interrupt)
    try:
        yield stopped
    except KeyboardInterrupt:
        pass
    except Exception as error:
        if not stopped.is_set():
            raise
        log.warning("interrupted, then: %s: %s", type(error).__name__, error)


@contextmanager
def unwound_by_signals() -> Iterator[None]:
    """Makes SIGTERM and SIGHUP raise SystemExit in the block, so that its scopes end.

    Otherwise child processes and scratch files would be left. Does nothing in other threads than
    the main one, and for a signal that the process handles or ignores.
    """
    is_main = threading.current_thread() is threading.main_thread()
    ours = [
        number
        for number in (signal.SIGTERM, signal.SIGHUP)
        if is_main and signal.getsignal(number) is signal.SIG_DFL
    ]

    def leave(signum: int, frame: FrameType | None) -> None:
        for number in ours:
            # A second SIGTERM ends the process at once. A second SIGHUP comes from the shell of the
            # closed terminal.
            is_hangup = number == signal.SIGHUP
            signal.signal(number, signal.SIG_IGN if is_hangup else signal.SIG_DFL)
        sys.exit(128 + signum)  # as shells report it

    for number in ours:
        signal.signal(number, leave)
    try:
        yield
    finally:
        for number in ours:
            signal.signal(number, signal.SIG_DFL)


@contextmanager
def signals_deferred() -> Iterator[None]:
    """Lets the signals wait until the block has ended.

    For a block that starts a process: an exception between its start and the first scope that ends
    it would leave it behind. Does nothing in other threads than the main one, which no signal
    interrupts.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    received: list[int] = []
    handlers = {number: signal.getsignal(number) for number in _SIGNALS}
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
