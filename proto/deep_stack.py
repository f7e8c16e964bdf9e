"""Runs recursive work in threads with large stacks.

llguidance recurses over chains of rules. The longest that the bounds allow take less than 64 MiB,
and would overflow the usual 8 MiB of a thread.
"""

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Final, TypeVar

T = TypeVar("T")

_STACK_BYTES: Final = 256 * 2**20  # only what is used takes memory, until the thread ends
_MAX_THREADS: Final = 2

_slots = threading.BoundedSemaphore(_MAX_THREADS)
_stack_size = threading.Lock()  # threading.stack_size is a setting of the process


def on_deep_stack(work: Callable[[], T], nice: int = 0) -> T:
    """Runs `work` in a thread of its own, at most two at a time, by so much nicer than others;
    returns or raises what it does.

    Switches off Rust's backtraces in this process unless RUST_LIB_BACKTRACE is set: where they are
    on, llguidance takes one for each rule on the way to an error, minutes for a long chain.
    """
    os.environ.setdefault("RUST_LIB_BACKTRACE", "0")  # Rust reads it at its first error
    done: Future[T] = Future()

    def run() -> None:
        try:
            if nice:
                own = threading.get_native_id()
                os.setpriority(os.PRIO_PROCESS, own, os.getpriority(os.PRIO_PROCESS, own) + nice)
            done.set_result(work())
        except BaseException as error:  # passed on to the caller
            done.set_exception(error)

    with _slots:
        with _stack_size:
            before = threading.stack_size(_STACK_BYTES)
            try:
                threading.Thread(target=run, name="tandem-deep", daemon=True).start()
            finally:
                threading.stack_size(before)
        return done.result()
