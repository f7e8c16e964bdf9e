"""Reads memory of other workers by NIXL (over UCX); those workers do nothing for a read.

NIXL is optional; the extra `nixl` installs it. A read completes or fails. `leases` tells whether
its content was still valid.
"""

import asyncio
import importlib
import logging
import secrets
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from importlib.util import find_spec
from typing import Any, Final

import msgpack
import numpy as np
import numpy.typing as npt
import torch

from .frames import TransportError

logger = logging.getLogger(__name__)

# The same API, built for two CUDA releases; torch's own release is the first.
_MODULES: Final = ("nixl_cu13", "nixl_cu12")
_MAX_REGIONS: Final = 1024
# NIXL has no call that waits for a read. A read within a host is done when it has begun; a read
# over a network takes longer.
_POLL_SECONDS: Final = 0.0002
# The sleep of UCX's thread when idle. With 0, which NIXL's Python class sets, the thread takes a
# whole core.
_IDLE_MICROSECONDS: Final = 100_000

_Regions = npt.NDArray[np.uint64]  # [num_regions, 3]: address, number of bytes, device


def available() -> bool:
    """Returns True if the library is installed and can be loaded."""
    return _bindings() is not None


@cache
def _bindings() -> Any:
    """Returns the library, or None if it is not installed or, with a log line, cannot be loaded.

    The first call takes 0.1 s.
    """
    for name in filter(find_spec, _MODULES):
        try:
            return importlib.import_module(f"{name}._bindings")
        except ImportError as error:  # such as for CUDA libraries that the machine lacks
            logger.warning("no KV transport nixl: %s cannot be loaded: %s", name, error)
    return None


class NixlMemory:
    """Holds host memory of a sender; others may read it until `close`.

    It runs two threads of NIXL, which sleep between reads.
    """

    def __init__(self, regions: Sequence[torch.Tensor], *, devices: str = "") -> None:
        """Registers the memory. Takes half a second. Raises OSError if NIXL does not work here.

        `regions` are contiguous tensors in host memory, kept until `close`. `devices` are UCX's
        network devices, such as "lo" or "mlx5_0:1,mlx5_1:1"; the default is all devices of the
        machine.
        """
        self._regions = _table(regions)
        self._agent: Any = _Agent(serves=True, devices=devices)
        self._tensors = list(regions)  # freed after the agent
        self._agent.register(self._regions)

    def describe(self) -> bytes:
        """Returns the description that a reader needs, about half a kilobyte.

        It gives access to the memory. A reader addresses the regions as one memory, one after the
        other.
        """
        return bytes(msgpack.packb([bytes(self._agent.call("getLocalMD")), self._regions.tolist()]))

    def close(self) -> None:
        """Ends the agent. Idempotent.

        This does not revoke access: within a host, a process that has the description may read
        whatever later lies at these addresses, for as long as this process lives.
        """
        self._agent = None
        self._tensors.clear()


class NixlReader:
    """Reads from any number of peers. All calls into NIXL run in one thread, one at a time."""

    def __init__(self, *, timeout: float, devices: str = "") -> None:
        """Starts the agent. Takes half a second. Raises OSError if NIXL does not work here.

        `timeout` is in seconds, for each read; `devices` is as in NixlMemory.
        """
        self._timeout = timeout
        self._agent: Any = _Agent(serves=False, devices=devices)
        self._users: Counter[str] = Counter()  # peers by the name of the sender's agent
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="kv-nixl")

    async def connect(self, description: bytes, *, staging_bytes: int) -> "NixlPeer":
        """Returns the peer of a description; one read has at most staging_bytes.

        Raises TransportError.
        """
        metadata, regions = _parse(description)
        peer = NixlPeer(self, regions, torch.empty(staging_bytes, dtype=torch.uint8))
        try:
            await self._run(self._connect, peer, metadata)
        except BaseException:
            peer.close()  # if this was cancelled, `_connect` still runs in the thread
            raise
        return peer

    def close(self) -> None:
        """Ends the agent after the current read; later reads raise TransportError. Idempotent."""
        if self._agent is not None:
            self._thread.submit(self._agent.close)
            self._agent = None
            self._thread.shutdown(wait=False)

    async def _run(self, call: Any, *values: Any) -> Any:
        """Runs the call in the thread.

        If the caller is cancelled, a read continues in the thread until its own deadline.
        """
        if self._agent is None:
            raise TransportError("NIXL reader closed")
        try:
            return await asyncio.get_running_loop().run_in_executor(
                self._thread, call, self._agent, *values
            )
        except OSError as error:
            raise TransportError("KV cache could not be read by NIXL") from error

    def _connect(self, agent: "_Agent", peer: "NixlPeer", metadata: bytes) -> None:
        peer.name = str(agent.call("loadRemoteMD", metadata), "ascii")
        self._users[peer.name] += 1
        agent.register(_table([peer.staging]))

    def _read(self, agent: "_Agent", peer: "NixlPeer", local: _Regions, remote: _Regions) -> None:
        try:
            if not peer.name:
                raise OSError("NIXL: peer lost")
            agent.read(peer.name, local, remote, self._timeout)
        except OSError:
            # Only unregistering the memory ensures that nothing is written to it any more;
            # cancelling the read does not.
            self._forget(agent, peer)
            raise

    def _forget(self, agent: "_Agent", peer: "NixlPeer") -> None:
        if not peer.name:
            return
        name = peer.name
        peer.name = ""
        self._users[name] -= 1
        try:
            if not self._users[name]:
                del self._users[name]
                agent.call("invalidateRemoteMD", name)
        finally:
            agent.register(_table([peer.staging]), undo=True)

    def _release(self, peer: "NixlPeer") -> None:
        """Forgets the peer as soon as its current read has ended."""
        if self._agent is not None:
            self._thread.submit(self._forget, self._agent, peer)


class NixlPeer:
    """Reads ranges of one sender's memory."""

    def __init__(self, reader: NixlReader, regions: _Regions, staging: torch.Tensor) -> None:
        # Name of the peer's agent while it is connected. Only the reader's thread uses it.
        self.name = ""
        self.staging = staging  # [staging_bytes] uint8
        self._reader = reader
        self._regions = regions
        self._starts = np.concatenate([[0], np.cumsum(regions[:, 1], dtype=np.uint64)]).astype(
            np.uint64
        )
        self._closed = False

    @property
    def num_bytes(self) -> int:
        """Returns the size of all regions."""
        return int(self._starts[-1])

    async def read(self, pieces: npt.ArrayLike) -> memoryview:
        """Returns the ranges `pieces`, [n, 2] (offset, number of bytes), of the peer's memory.

        They lie one after the other and are valid until the next read of this peer, so read one at
        a time. Raises ValueError for ranges that lie outside of a region or are larger than the
        staging memory, and TransportError if the peer is lost or does not answer.
        """
        if self._closed:
            raise TransportError("KV peer lost")
        table = np.asarray(pieces, np.uint64)
        remote, local = self._place(table)
        try:
            await self._reader._run(self._reader._read, self, local, remote)
        except TransportError:
            self._closed = True
            raise
        array: npt.NDArray[np.uint8] = self.staging.numpy()
        return array.data[: int(table[:, 1].sum())]

    def close(self) -> None:
        """Closes the peer; later reads raise TransportError. Idempotent."""
        self._closed = True
        self._reader._release(self)

    def _place(self, pieces: npt.NDArray[np.uint64]) -> tuple[_Regions, _Regions]:
        """Returns the ranges, [n, 2], as regions of the peer's memory and of the staging memory."""
        offsets = pieces[:, 0]
        sizes = pieces[:, 1]
        index = np.searchsorted(self._starts, offsets, "right") - 1
        ends = offsets + sizes
        if (
            index.max() >= len(self._regions)
            or (ends > self._starts[index + 1]).any()
            or (ends <= offsets).any()
        ):
            raise ValueError("KV read: a range lies outside of the sender's memory")
        if int(sizes.sum()) > len(self.staging):
            raise ValueError("KV read: the ranges are larger than the staging memory")
        base = self._regions[index]
        remote = np.stack([base[:, 0] + offsets - self._starts[index], sizes, base[:, 2]], 1)
        places = np.uint64(self.staging.data_ptr()) + np.cumsum(sizes, dtype=np.uint64) - sizes
        return remote, np.stack([places, sizes, np.zeros_like(sizes)], 1)


class _Agent:
    """Calls NIXL's agent by its bindings; every failure is OSError.

    NIXL's Python class is not used, because it cannot let UCX's thread sleep.
    """

    def __init__(self, *, serves: bool, devices: str) -> None:
        self._nixl = _bindings()
        if self._nixl is None:
            raise OSError("NIXL is not installed")
        config = self._nixl.nixlAgentConfig()
        config.useProgThread = serves  # a reader makes progress in its own calls
        config.pthrDelay = _IDLE_MICROSECONDS
        self._agent = self._nixl.nixlAgent(secrets.token_hex(16), config)
        self.call(
            "createBackend", "UCX", {"engine_config": f"NET_DEVICES={devices}"} if devices else {}
        )

    def call(self, name: str, *values: Any) -> Any:
        try:
            return getattr(self._agent, name)(*values)
        except Exception as error:
            # NIXL's own exceptions have no common base class.
            raise OSError(f"NIXL: {error}") from error

    def register(self, regions: _Regions, *, undo: bool = False) -> None:
        name = "deregisterMem" if undo else "registerMem"
        self.call(name, self._nixl.nixlRegDList(self._nixl.DRAM_SEG, regions))

    def read(self, name: str, local: _Regions, remote: _Regions, timeout: float) -> None:
        """Returns when everything is read.

        Raises TimeoutError after `timeout` seconds; the data may still arrive later.
        """
        deadline = time.monotonic() + timeout
        lists = [self._nixl.nixlXferDList(self._nixl.DRAM_SEG, table) for table in (local, remote)]
        request = self.call("createXferReq", self._nixl.NIXL_READ, *lists, name)
        try:
            status = self.call("postXferReq", request)
            while status == self._nixl.NIXL_IN_PROG:
                if time.monotonic() > deadline:
                    raise TimeoutError
                time.sleep(_POLL_SECONDS)
                status = self.call("getXferStatus", request)
            if status != self._nixl.NIXL_SUCCESS:
                raise OSError(f"NIXL: {status}")
        finally:
            self.call("releaseXferReq", request)

    def close(self) -> None:
        self._agent = None


def _table(regions: Sequence[torch.Tensor]) -> _Regions:
    return np.array([(region.data_ptr(), region.nbytes, 0) for region in regions], np.uint64)


def _parse(description: bytes) -> tuple[bytes, _Regions]:
    """Unpacks a description of `NixlMemory.describe`. Raises TransportError for anything else."""
    try:
        metadata, rows = msgpack.unpackb(description, max_array_len=_MAX_REGIONS)
        regions = np.array(rows, np.uint64)
    except (ValueError, TypeError, OverflowError) as error:
        raise TransportError("NIXL memory: the description is unreadable") from error
    if type(metadata) is not bytes or regions.ndim != 2 or regions.shape[1] != 3:
        raise TransportError("NIXL memory: the description has a wrong type or shape")
    return metadata, regions
