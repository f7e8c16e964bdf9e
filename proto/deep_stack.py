"""Work that recurses as deep as a user likes, in threads whose stacks are large enough for it.

That is llguidance's: it recurses over chains of rules. The longest that the bounds allow take less than 64 MiB, and
would end the process in a thread of the usual 8 MiB.
"""

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Final, TypeVar

# Where it is 1, llguidance's errors take a backtrace for each rule on the way to them: minutes for a long chain.
os.environ.setdefault("RUST_LIB_BACKTRACE", "0")

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
