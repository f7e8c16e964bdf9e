"""Reads another worker's KV cache by NIXL; works like `shared_memory`, but without mapping memory.

The sender registers two regions, its KV cache and its lease table. The receiver addresses them as
one memory in which the table follows the cache.
"""

import asyncio
import mmap
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from ...proto.addresses import is_loopback
from ..kv_cache.layout import KvSpan
from ..kv_cache.memory import KvMemory
from ..kv_cache.tables import TableBlocks
from .connector import (
    CONNECT_SECONDS,
    MEMORY_FIELDS,
    KvConnector,
    TransferContext,
    checked,
    described_memory,
    memory_description,
)
from .frames import FRAME_BYTES, Announce, BlockTable, Data
from .leases import ENTRY_BYTES, TABLE_BYTES, check_entry, entry_offset
from .nixl_agent import NixlMemory, NixlPeer, NixlReader, available

_STAGING_BYTES: Final = 4 * 1024 * 1024  # at least; holds several rows of a span at a time


class NixlConnector(KvConnector):
    """Connects two ranks by NIXL. The receiver reads one span at a time; other transfers wait."""

    one_sided = True
    _memory: NixlMemory
    _peer: NixlPeer
    _reading: asyncio.Lock
    # The sender's memory.
    _plan: KvMemory

    @classmethod
    def capabilities(cls, context: TransferContext, name: str) -> dict[str, Any] | None:
        """Returns True if this rank's memory can be read, which a sender needs.

        Returns None if the rank is on a GPU, or if the library is not installed or cannot be
        loaded.
        """
        if context.device != "cpu" or not available():
            return None
        return {"shares": context.kv.shared_fd is not None}

    @classmethod
    def reaches(cls, sender: Mapping[str, Any], receiver: Mapping[str, Any]) -> bool:
        """Returns True if the sender's memory can be read."""
        return bool(sender["shares"])

    @classmethod
    async def listen(
        cls, context: TransferContext, name: str, announce: Callable[[Announce], None]
    ) -> "NixlConnector":
        """Registers the rank's memory, the first time. Raises OSError if NIXL does not work."""
        connector = cls(context, name)
        connector._memory = await context.resource("nixl memory", partial(_register, context))
        return connector

    def description(self) -> dict[str, Any]:
        """Returns the memory's NIXL description and its layout."""
        return {"memory": self._memory.describe(), **memory_description(self.context.kv)}

    @classmethod
    async def connect(
        cls, context: TransferContext, name: str, description: dict[str, Any]
    ) -> "NixlConnector":
        """Connects to the sender's memory.

        Raises TransferError if NIXL cannot reach it, OSError if NIXL does not work here, and
        ValueError if the memory has another size than described.
        """
        found = checked(description, {"memory": bytes, **MEMORY_FIELDS})
        connector = cls(context, name)
        connector._plan = described_memory(context.kv, found)
        connector.sender_block_size = found["block_size"]
        make_reader = partial(NixlReader, timeout=CONNECT_SECONDS, devices=_devices(context.host))
        reader = await context.resource("nixl reader", make_reader)
        connector._peer = await reader.connect(
            found["memory"], staging_bytes=_staging_bytes(connector._plan)
        )
        connector._reading = asyncio.Lock()
        kv_bytes = connector._peer.num_bytes - TABLE_BYTES
        if min(found["num_blocks"], found["block_size"]) < 1 or (
            kv_bytes != connector._plan.num_bytes
        ):
            connector.close()
            raise ValueError(
                f"NIXL memory: {kv_bytes} bytes are not the size of {found['num_blocks']} blocks"
            )
        return connector

    async def fetch(
        self, stream: int, table: TableBlocks, data: Data, payload: memoryview
    ) -> memoryview:
        """Reads the span, in parts if it is larger than the staging memory."""
        groups = self._plan.groups
        if data.group >= len(groups):
            raise ValueError(f"group {data.group} is not within {len(groups)}")
        *_, block_size, head_bytes = groups[data.group].shape
        num_blocks = self._plan.num_blocks
        tokens = table.tokens(block_size)
        slots = [group.shape[3] for group in groups]
        data.check(self.context.kv.layout, tokens=tokens, num_slots=slots)
        if min(table.blocks) < 0 or max(table.blocks) >= num_blocks:
            raise ValueError(f"KV block table: a block is not below {num_blocks}")
        first = data.first_token - tokens.start
        first_block, offset = divmod(first, block_size)
        end_block = -(-(first + data.num_tokens) // block_size)
        rows = self._rows(table.blocks[first_block:end_block], data)
        piece_bytes = data.num_slots * block_size * head_bytes
        num_rows = max(1, len(self._peer.staging) // (rows.shape[1] * piece_bytes))
        order = np.arange(min(num_rows, len(rows)) * rows.shape[1] * data.num_slots * block_size)
        order = order.reshape(-1, rows.shape[1], data.num_slots, block_size).swapaxes(2, 3)
        order = order.reshape(len(order), -1, data.num_slots)[:, offset : offset + data.num_tokens]
        dense = np.empty((len(rows), data.num_tokens, data.num_slots, head_bytes), np.uint8)
        async with self._reading:
            for start in range(0, len(rows), num_rows):
                places = rows[start : start + num_rows]
                pieces = np.stack([places.ravel(), np.full(places.size, piece_bytes)], 1)
                heads = np.frombuffer(await self._peer.read(pieces), np.uint8).reshape(
                    -1, head_bytes
                )
                # numpy's fastest gather for short rows: 30 us for 1 MB; an index takes 800 us.
                np.take(
                    heads, order[: len(places)], 0, dense[start : start + num_rows], mode="clip"
                )
        return dense.reshape(-1).data

    def _rows(self, blocks: Sequence[int], span: KvSpan) -> npt.NDArray[np.int64]:
        """Returns the byte offset of the span's slots in each block: [num_rows, num_blocks].

        The rows are the planes of each layer.
        """
        group = self._plan.groups[span.group]
        layer_bytes, plane_bytes, block_bytes, slot_bytes, *_ = group.strides
        layers = np.asarray(span.layers)[:, None] * layer_bytes
        planes = (layers + np.arange(group.shape[1]) * plane_bytes).reshape(-1, 1)
        places: npt.NDArray[np.int64] = (
            group.offset
            + planes
            + np.asarray(blocks, np.int64) * block_bytes
            + span.first_slot * slot_bytes
        )
        return places

    async def verify(self, table: BlockTable) -> None:
        async with self._reading:
            check_entry(
                await self._peer.read([(self._plan.num_bytes + entry_offset(table), ENTRY_BYTES)]),
                table,
            )

    def close(self) -> None:
        """Ends the receiver's side. Idempotent."""
        if hasattr(self, "_peer"):
            self._peer.close()


def _staging_bytes(sender: KvMemory) -> int:
    """Returns the size that is enough for any row of a frame from this memory.

    Whole blocks are read, also the two that a span begins and ends in.
    """
    pieces = [group.shape[3] * group.shape[4] * group.shape[5] for group in sender.groups]
    return max(_STAGING_BYTES, FRAME_BYTES + 2 * max(pieces))


def _register(context: TransferContext) -> NixlMemory:
    """Registers KV cache and lease table with NIXL. Raises OSError if NIXL does not work here."""
    assert context.kv.shared_fd is not None
    memory = mmap.mmap(context.kv.shared_fd, 0)
    regions = [
        torch.frombuffer(each, dtype=torch.uint8) for each in (memory, context.leases.memory)
    ]
    return NixlMemory(regions, devices=_devices(context.host))


def _devices(host: str) -> str:
    """Returns UCX's network devices: all by default, loopback if `host` is a loopback address."""
    return "lo" if is_loopback(host) else ""
