"""Compiles grammars beside the event loop, in turns of the tenants."""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final
from weakref import WeakValueDictionary

from ...proto.errors import InvalidArgument, Unavailable
from ..host.threads import in_thread

logger = logging.getLogger(__name__)

_MAX_AT_ONCE: Final = 2


@dataclass(slots=True, eq=False)
class _Compilation:
    task: asyncio.Task[object]
    num_waiting: int = 0
    has_begun: bool = False


class GrammarCompiler:
    """Compiles each grammar once for all requests of an owner that want it at the time. Lives in
    one event loop.

    Two are compiled at a time, and one of each tenant. The others of a tenant wait behind that one,
    so another tenant waits for one grammar of each tenant at most.
    """

    def __init__(self, load_grammar: Callable[[str, bytes, bytes], object]) -> None:
        """See `Rank.load_grammar`."""
        self._load_grammar = load_grammar
        self._compiling: dict[tuple[bytes, str], _Compilation] = {}
        self._slots = asyncio.Semaphore(_MAX_AT_ONCE)  # first come, first served
        self._turns: WeakValueDictionary[bytes, asyncio.Lock] = WeakValueDictionary()  # of tenants

    async def compile(self, text: str, owner: bytes = b"", tenant: bytes = b"") -> object:
        """Returns what keeps a grammar compiled. A compilation that has not begun is given up when
        nobody waits for it any more.

        Raises InvalidArgument if the grammar is wrong, queue.Full if the memory for grammars is in
        use, Unavailable if this worker cannot compile it for another reason.
        """
        key = owner, text
        if (compilation := self._compiling.get(key)) is None:
            task = asyncio.create_task(self._compile(key, tenant))
            compilation = self._compiling[key] = _Compilation(task)
            task.add_done_callback(partial(self._ended, key))
        compilation.num_waiting += 1
        try:
            return await asyncio.shield(compilation.task)
        except ValueError as error:
            raise InvalidArgument(str(error), "grammar") from error
        except (
            OSError,
            MemoryError,
            RuntimeError,
        ) as error:  # of the file, of the process's memory or threads
            logger.exception("a grammar cannot be compiled")
            raise Unavailable("grammar: cannot be compiled by this worker") from error
        finally:
            compilation.num_waiting -= 1
            if not compilation.num_waiting and not compilation.has_begun:
                compilation.task.cancel()
                self._forget(key, compilation.task)

    async def _compile(self, key: tuple[bytes, str], tenant: bytes) -> object:
        turn = self._turns.setdefault(tenant, asyncio.Lock())
        async with turn, self._slots:
            self._compiling[key].has_begun = True
            owner, text = key
            return await in_thread(
                partial(self._load_grammar, text, owner, tenant), "tandem-grammar"
            )

    def _ended(self, key: tuple[bytes, str], task: asyncio.Task[object]) -> None:
        self._forget(key, task)
        if not task.cancelled():
            task.exception()  # nobody may be left who reads it

    def _forget(self, key: tuple[bytes, str], task: asyncio.Task[object]) -> None:
        if (known := self._compiling.get(key)) is not None and known.task is task:
            del self._compiling[key]
