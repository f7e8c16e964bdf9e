"""Defines how routers and workers call llguidance: with limits, and in threads with large stacks.

llguidance recurses over chains of rules. The longest chains that the bounds allow take less than 64
MiB of stack, and would overflow a thread's usual 8 MiB.
"""

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Final, TypeVar

from llguidance import LLParserLimits

T = TypeVar("T")

PARSER_LIMITS: Final = LLParserLimits(
    max_items_in_row=1_500,
    step_max_items=2_000,
    initial_lexer_fuel=100_000,
    step_lexer_fuel=50_000,
    max_lexer_states=50_000,  # a state takes 0.3 to 7 kB, more if more lexemes are possible
    verbose_errors=False,
)
"""Limits of a matcher, which routers check and workers apply.

No step of any tested grammar takes more than 15 ms, with 49,152 tokens; llguidance's own limits
allow 2 s. A choice of 1,024 texts, a schema with 300 optional properties, and 128 tools are within
these limits.
"""

_STACK_BYTES: Final = 256 * 2**20  # only used pages take memory, until the thread ends
_MAX_THREADS: Final = 2

_permits = threading.BoundedSemaphore(_MAX_THREADS)
_stack_size = threading.Lock()  # threading.stack_size is a setting of the whole process


def on_deep_stack(work: Callable[[], T], nice: int = 0) -> T:
    """Runs `work` in a thread with a large stack; returns its result or raises its exception.

    At most two such threads run at a time. `nice` is added to the thread's niceness.

    Disables Rust's backtraces in this process unless RUST_LIB_BACKTRACE is set. With backtraces,
    llguidance takes one for each rule on the way to an error, which lasts minutes for a long chain.
    """
    os.environ.setdefault("RUST_LIB_BACKTRACE", "0")  # Rust reads it at the first error
    done: Future[T] = Future()

    def run() -> None:
        try:
            if nice:
                own = threading.get_native_id()
                os.setpriority(os.PRIO_PROCESS, own, os.getpriority(os.PRIO_PROCESS, own) + nice)
            done.set_result(work())
        except BaseException as error:  # raised again in the caller
            done.set_exception(error)

    with _permits:
        with _stack_size:
            before = threading.stack_size(_STACK_BYTES)
            try:
                threading.Thread(target=run, name="tandem-deep", daemon=True).start()
            finally:
                threading.stack_size(before)
        return done.result()


def public_error(error: str) -> str:
    """Returns llguidance's message about a grammar, in other words if it is for its authors.

    A panic, as by too many rules, has a message about the source and a backtrace.
    """
    if not error.lstrip().startswith("panic:"):
        return error
    return "the grammar library fails with it; simplify it"
