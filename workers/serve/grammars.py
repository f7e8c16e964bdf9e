"""Compiles grammars in threads, with fair turns between tenants."""

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
    """Compiles each grammar once for all concurrent requests of an owner that need it.

    At most two grammars are compiled at a time, and one per tenant. So a tenant waits for at most
    one grammar of each other tenant. Lives in one event loop.
    """

    def __init__(self, load_grammar: Callable[[str, bytes, bytes], object]) -> None:
        """Makes a compiler that calls `load_grammar` in threads; see `Rank.load_grammar`."""
        self._load_grammar = load_grammar
        self._compiling: dict[tuple[bytes, str], _Compilation] = {}
        self._permits = asyncio.Semaphore(_MAX_AT_ONCE)  # first come, first served
        # By tenant.
        self._turns: WeakValueDictionary[bytes, asyncio.Lock] = WeakValueDictionary()

    async def compile(self, text: str, owner: bytes = b"", tenant: bytes = b"") -> object:
        """Compiles a grammar and returns a reference that keeps it compiled.

        A compilation that has not begun is cancelled when no request waits for it any more. Raises
        InvalidArgument if the grammar is invalid, queue.Full if the memory for grammars is in use,
        and Unavailable if this worker cannot compile it for another reason.
        """
        key = (owner, text)
        compilation = self._compiling.get(key)
        if compilation is None:
            task = asyncio.create_task(self._compile(key, tenant))
            compilation = self._compiling[key] = _Compilation(task)
            task.add_done_callback(partial(self._ended, key))
        compilation.num_waiting += 1
        try:
            return await asyncio.shield(compilation.task)
        except ValueError as error:
            raise InvalidArgument(str(error), "grammar") from error
        # The file, the process's memory or its threads have failed.
        except (OSError, MemoryError, RuntimeError) as error:
            logger.exception("a grammar cannot be compiled")
            raise Unavailable("grammar: cannot be compiled by this worker") from error
        finally:
            compilation.num_waiting -= 1
            if not compilation.num_waiting and not compilation.has_begun:
                compilation.task.cancel()
                self._forget(key, compilation.task)

    async def _compile(self, key: tuple[bytes, str], tenant: bytes) -> object:
        turn = self._turns.setdefault(tenant, asyncio.Lock())
        async with turn, self._permits:
            self._compiling[key].has_begun = True
            owner, text = key
            return await in_thread(
                partial(self._load_grammar, text, owner, tenant), "tandem-grammar"
            )

    def _ended(self, key: tuple[bytes, str], task: asyncio.Task[object]) -> None:
        self._forget(key, task)
        if not task.cancelled():
            task.exception()  # marks it as retrieved, because no request may be left to read it

    def _forget(self, key: tuple[bytes, str], task: asyncio.Task[object]) -> None:
        if (known := self._compiling.get(key)) is not None and known.task is task:
            del self._compiling[key]
