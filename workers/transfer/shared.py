"""KV cache that two workers of one host both see: the reader maps the exporter's memory and copies out of it itself.

That no block was given to somebody else while it was being copied shows in the ledger at the memory's end: there an
export has a line that holds its number for as long as its blocks are its own. Knows nothing of frames or streams.
"""

import mmap
import os
import secrets
import stat
import struct
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch

from ..kv_cache.store import LEDGER_BYTES, SAMPLE_BYTES, TAIL_BYTES, KvStore
from .nixl import NixlMemory
from .wire import Offer, TransferError

_TOKEN_BYTES: Final = 16
_LINE: Final = struct.Struct("<Q")
LINE_BYTES: Final = _LINE.size
_NUM_LINES: Final = (LEDGER_BYTES - _TOKEN_BYTES) // _LINE.size


def host_id() -> str:
    """Equal for processes that may share memory, at least: those of one running kernel. Empty where nobody can tell."""
    path = Path("/proc/sys/kernel/random/boot_id")
    return path.read_text().strip() if path.exists() else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Where a worker's KV cache lies, for other processes of its host."""

    token: bytes  # what the ledger begins with
    pid: int
    fd: int
    num_blocks: int
    block_size: int
    num_slots: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Remote:
    """The same for processes anywhere that have NIXL."""

    description: bytes  # NixlMemory's, of one region: all of the memory
    num_blocks: int
    block_size: int
    num_slots: int


class LeaseTable:
    """The exporter's side: which exports still own their blocks."""

    def __init__(self, kv: KvStore) -> None:
        self._shared = kv.shared
        self._token = secrets.token_bytes(_TOKEN_BYTES)
        self._free = list(range(_NUM_LINES))
        self._count = 0
        self._served: NixlMemory | None = None
        self._serving = threading.Lock()
        if self._shared is not None:
            self._shared.ledger[:_TOKEN_BYTES] = self._token

    def open(self) -> tuple[int, int]:
        """A line and the number that it holds from now on; number 0 if there is none left."""
        if self._shared is None or not self._free:
            return 0, 0
        line = self._free.pop()
        self._count += 1
        _LINE.pack_into(self._shared.ledger, _TOKEN_BYTES + line * _LINE.size, self._count)
        return line, self._count

    def close(self, line: int, number: int) -> None:
        """Before the blocks may be reused."""
        if number and self._shared is not None:
            _LINE.pack_into(self._shared.ledger, _TOKEN_BYTES + line * _LINE.size, 0)
            self._free.append(line)

    def put_sample(self, sample: bytes) -> None:
        """Where other processes can read it, if any can."""
        if self._shared is not None:
            self._shared.sample[:] = sample

    def describe(self) -> Memory | None:
        """What another process needs to see the memory; None if none can."""
        if self._shared is None:
            return None
        return Memory(
            token=self._token,
            pid=os.getpid(),
            fd=self._shared.fd,
            num_blocks=self._shared.num_blocks,
            block_size=self._shared.block_size,
            num_slots=self._shared.num_slots,
        )

    def serve(self, devices: str) -> Remote:
        """Lets others read the memory by NIXL, from then on for as long as this ledger lives; `devices` are as in
        NixlMemory. Takes half a second the first time; safe from any thread. Raises ValueError if the memory cannot be
        mapped, RuntimeError if NIXL does not work here."""
        if self._shared is None:
            raise ValueError("the memory is not shared")
        with self._serving:
            if self._served is None:
                whole = mmap.mmap(self._shared.fd, 0)
                self._served = NixlMemory([torch.frombuffer(whole, dtype=torch.uint8)], devices=devices)
        return Remote(
            description=self._served.describe(),
            num_blocks=self._shared.num_blocks,
            block_size=self._shared.block_size,
            num_slots=self._shared.num_slots,
        )


class PeerMemory:
    """The reader's side: another worker's cache, mapped to read."""

    def __init__(self, memory: Memory, kv: KvStore) -> None:
        """Raises OSError or ValueError if this process cannot see the memory, or it is another one."""
        file = os.open(f"/proc/{memory.pid}/fd/{memory.fd}", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            status = os.fstat(file)
            if not stat.S_ISREG(status.st_mode) or status.st_size < TAIL_BYTES:
                raise ValueError("no KV cache memory")
            self._memory = mmap.mmap(file, 0, prot=mmap.PROT_READ)
        finally:
            os.close(file)
        self._ledger = len(self._memory) - LEDGER_BYTES
        if self._memory[self._ledger : self._ledger + _TOKEN_BYTES] != memory.token:
            raise ValueError("another KV cache memory")
        self.kv = kv.attach(
            self._memory, num_blocks=memory.num_blocks, block_size=memory.block_size, num_slots=memory.num_slots
        )

    def sample(self) -> memoryview:
        """What the exporter has put before the ledger."""
        return memoryview(self._memory[self._ledger - SAMPLE_BYTES : self._ledger])

    def check(self, offer: Offer) -> None:
        """Raises TransferError unless the export has owned its blocks until now."""
        start = self._ledger + line_start(offer)
        check_line(self._memory[start : start + LINE_BYTES], offer)


def line_start(offer: Offer) -> int:
    """Where in the ledger its LINE_BYTES are. Raises TransferError if there is no such line."""
    if not 0 <= offer.line < _NUM_LINES:
        raise TransferError("KV offer with an impossible line")
    return _TOKEN_BYTES + offer.line * _LINE.size


def check_line(line: bytes | memoryview, offer: Offer) -> None:
    """Raises TransferError unless the export owned its blocks when the line was read."""
    if _LINE.unpack(line) != (offer.number,):
        raise TransferError("KV cache withdrawn")
