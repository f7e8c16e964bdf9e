"""Resets the prefix cache of a worker: no prompt finds KV cache that was computed before.

Sequences and leases keep their blocks, but what they hold enters the cache no more. Other workers,
from which KV cache also comes, are reset at about the same time. So each handle of KV cache tells
after which reset it was computed, and no worker caches what is older than its own last reset.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from typing import Final

from ...proto import worker_pb2
from ..engine.engine import Engine
from ..engine.events import CacheChanged, Event
from .disk_tier import DiskTier
from .engine_thread import EngineRunner

logger = logging.getLogger(__name__)

# Timeout of a command to the engine, which runs it between two steps.
_COMMAND_SECONDS: Final = 30.0


@dataclass(slots=True)
class CacheAge:
    """Holds the times of the last resets, as in ResetPrefixCacheRequest; 0 without a reset."""

    asked: int = 0  # KV cache of other workers from before is not cached
    done: int = 0  # all cached KV cache was computed after this reset, or after the start

    def allows(self, handle: worker_pb2.KvHandle) -> bool:
        """Returns True if the KV cache of a handle was computed after the last reset.

        This worker may have started after it; the sender of the handle knows it then.
        """
        return max(handle.epoch, handle.computed_after) >= max(self.asked, handle.last_reset)


class CacheReset:
    """Empties all tiers of a worker's prefix cache. Lives in one event loop."""

    def __init__(
        self,
        thread: EngineRunner,
        disk: DiskTier | None,
        age: CacheAge,
        deliver: Callable[[Sequence[Event]], None],
    ) -> None:
        """Keeps `age` up to date; `deliver` takes the change of the cache like events of a step."""
        self._thread = thread
        self._disk = disk
        self._age = age
        self._deliver = deliver
        self._running = asyncio.Lock()

    async def run(self, time: int) -> str:
        """Empties all tiers; returns the reason why some KV cache is left, or ""."""
        try:
            async with self._running, AsyncExitStack() as pause:
                self._age.asked = max(self._age.asked, time)
                # The disk first, so that no sequence loads from it after the command to the engine.
                if self._disk is not None:
                    await pause.enter_async_context(self._disk.emptied())
                await self._thread.call(self._clear, _COMMAND_SECONDS)
        # The disk has failed, the engine does not answer or has ended, or a rank is lost.
        except (OSError, RuntimeError) as error:
            logger.warning("the prefix cache was not reset: %s: %s", type(error).__name__, error)
            return "some KV cache is left; the log of the worker has the reason"
        return ""

    def _clear(self, engine: Engine) -> None:
        """Empties the cache in memory, in the engine's thread.

        The loop learns of it after the events of earlier steps and before the events of later ones.
        """
        changed = engine.clear_cache()
        self._thread.call_in_loop(partial(self._cleared, changed, self._age.asked))

    def _cleared(self, changed: CacheChanged, time: int) -> None:
        self._age.done = time
        self._deliver([changed])
