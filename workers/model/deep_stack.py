"""Work that recurses as deep as a user likes, in threads whose stacks are large enough for it."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Final, TypeVar

T = TypeVar("T")

_STACK_BYTES: Final = 256 * 2**20  # only what is used takes memory, and that goes with the thread
_MAX_THREADS: Final = 2

_places = threading.BoundedSemaphore(_MAX_THREADS)
_stack_size = threading.Lock()  # which is the process's


def on_deep_stack(work: Callable[[], T]) -> T:
    """Runs `work` in a thread of its own and returns or raises what it does; two at a time, others wait."""
    done: Future[T] = Future()

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:  # handed to the caller
            done.set_exception(error)

    with _places:
        with _stack_size:
            before = threading.stack_size(_STACK_BYTES)
            try:
                threading.Thread(target=run, name="tandem-deep", daemon=True).start()
            finally:
                threading.stack_size(before)
        return done.result()
