"""Loads LoRA adapters on all ranks of a worker when requests need them.

Keeps the adapters that were used last.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from queue import Full

from ...proto import worker_pb2
from ...proto.errors import Unavailable
from ..host.threads import in_thread
from .rank_client import RankClient

LoadOnRank = Callable[[int, worker_pb2.Adapter], str]
"""Loads an adapter on one rank, under a number. Returns the reason why it cannot be used, with file
and field, or an empty text. Thread-safe.
"""


@dataclass(slots=True, eq=False)
class _Entry:
    number: int
    loading: "asyncio.Task[str]"


class AdapterCache:
    """Holds the adapters of a worker, at most `max_loras`. Lives in its event loop."""

    def __init__(
        self,
        load: LoadOnRank,
        clients: Sequence[RankClient] = (),
        *,
        max_loras: int,
        unload: Callable[[int], None],
    ) -> None:
        """Uses `load` for this rank and `clients` for the others.

        `unload` makes all ranks free an adapter once no sequence uses it.
        """
        self._load_here = load
        self._clients = clients
        self._max_loras = max_loras
        self._unload = unload
        # By fingerprint, in the order of eviction.
        self._entries: OrderedDict[bytes, _Entry] = OrderedDict()
        self._last_number = 0

    @property
    def loaded(self) -> list[bytes]:
        """Returns the fingerprints of the loaded adapters, the most recently used last."""
        return [key for key, entry in self._entries.items() if entry.loading.done()]

    async def load(self, adapter: worker_pb2.Adapter, in_use: Collection[bytes]) -> int:
        """Returns the number of an adapter after it is loaded on all ranks.

        To make room it evicts the least recently used adapter that is not `in_use`, which has the
        fingerprints of the adapters that requests use or wait for. Raises Unavailable if the
        adapter cannot be used here, and queue.Full if all `max_loras` adapters are in use.
        """
        key = adapter.fingerprint
        if key not in self._entries:
            self._make_place(in_use)
            self._last_number += 1
            number = self._last_number
            self._entries[key] = _Entry(number, asyncio.create_task(self._load(number, adapter)))
        self._entries.move_to_end(key)
        entry = self._entries[key]
        if reason := await asyncio.shield(entry.loading):
            if self._entries.get(key) is entry:
                del self._entries[key]
                self._unload(entry.number)  # other ranks may have loaded it
            raise Unavailable(f"adapter: {reason}")
        return entry.number

    def _make_place(self, in_use: Collection[bytes]) -> None:
        if len(self._entries) < self._max_loras:
            return
        for key, entry in self._entries.items():
            if key not in in_use and entry.loading.done():
                del self._entries[key]
                self._unload(entry.number)
                return
        raise Full(f"{self._max_loras} adapters are in use (max_loras)")

    async def _load(self, number: int, adapter: worker_pb2.Adapter) -> str:
        """Loads on all ranks; returns the first rank's reason against it, or an empty text."""
        numbered = worker_pb2.NumberedAdapter(number=number, adapter=adapter)
        others = [client.ask(load_adapter=numbered) for client in self._clients]
        here = in_thread(partial(self._load_here, number, adapter), "tandem-adapter")
        reasons: list[str] = await asyncio.gather(here, *others)
        return next(filter(None, reasons), "")
