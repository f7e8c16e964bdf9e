"""Reads memory of other workers by NIXL (UCX underneath), while they do nothing for it.

Optional: the extra `nixl` brings it. A read is done, or fails; whether its content was still valid,
    `leases` shows.
"""

import asyncio
import importlib
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

_MODULES: Final = ("nixl_cu12", "nixl_cu13")  # one API, built for different CUDA releases
_MAX_REGIONS: Final = 1024
# NIXL has no call that waits. A read within a host has ended when it has begun; one over a network
# takes longer.
_POLL_SECONDS: Final = 0.0002
# How long UCX's thread sleeps when nothing happens. With 0, as NIXL's own Python class sets it, it
# takes a whole core.
_IDLE_MICROSECONDS: Final = 100_000

_Regions = npt.NDArray[np.uint64]  # [num_regions, 3]: address, number of bytes, device


def available() -> bool:
    """Returns whether the library is installed."""
    return any(find_spec(name) for name in _MODULES)


@cache
def _bindings() -> Any:
    name = next(name for name in _MODULES if find_spec(name))
    return importlib.import_module(f"{name}._bindings")


class NixlMemory:
    """Holds host memory of a sender that others may read for as long as this is open.

    It runs two threads of NIXL, which sleep between reads."""

    def __init__(self, regions: Sequence[torch.Tensor], *, devices: str = "") -> None:
        """`regions` are contiguous tensors in host memory, kept until `close`. `devices` are UCX's
        network devices, as "lo" or "mlx5_0:1,mlx5_1:1"; all of the machine by default. Takes half a
        second. Raises OSError if NIXL does not work here.
        """
        self._regions = _table(regions)
        self._agent: Any = _Agent(serves=True, devices=devices)
        self._tensors = list(regions)  # after the agent: the memory goes last
        self._agent.register(self._regions)

    def describe(self) -> bytes:
        """Returns what a reader needs, about half a kilobyte; it gives access to the memory. Its
        addresses are those of the regions laid end to end.
        """
        return bytes(msgpack.packb([bytes(self._agent.call("getLocalMD")), self._regions.tolist()]))

    def close(self) -> None:
        """Ends the agent. Idempotent. It takes nothing back: within a host, a process that has the
        description may read what comes to lie there as long as this process lives.
        """
        self._agent = None
        self._tensors.clear()


class NixlReader:
    """Reads from any number of peers. All calls into NIXL run in one thread, one after the other."""

    def __init__(self, *, timeout: float, devices: str = "") -> None:
        """`timeout` is in seconds, of each read; `devices` are as in NixlMemory. Takes half a
        second. Raises OSError if NIXL does not work here.
        """
        self._timeout = timeout
        self._agent: Any = _Agent(serves=False, devices=devices)
        self._users: Counter[str] = Counter()  # peers by the name of the sender's agent
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="kv-nixl")

    async def connect(self, description: bytes, *, staging_bytes: int) -> "NixlPeer":
        """Returns a peer by its description; its reads are of at most staging_bytes. Raises
        TransportError.
        """
        metadata, regions = _parse(description)
        peer = NixlPeer(self, regions, torch.empty(staging_bytes, dtype=torch.uint8))
        try:
            await self._run(self._connect, peer, metadata)
        except BaseException:
            peer.close()  # if it is cancelled here it continues there
            raise
        return peer

    def close(self) -> None:
        """Ends the agent: later reads raise TransportError; one under way ends first. Idempotent."""
        if self._agent is not None:
            agent, self._agent = self._agent, None
            self._thread.submit(agent.close)
            self._thread.shutdown(wait=False)

    async def _run(self, call: Any, *values: Any) -> Any:
        """Runs it in the thread. A read that is cancelled here continues there until its own
        deadline.
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
            # To cancel a read does not prove that nothing is written any more; to unregister the
            # memory does.
            self._forget(agent, peer)
            raise

    def _forget(self, agent: "_Agent", peer: "NixlPeer") -> None:
        if not peer.name:
            return
        name, peer.name = peer.name, ""
        self._users[name] -= 1
        try:
            if not self._users[name]:
                del self._users[name]
                agent.call("invalidateRemoteMD", name)
        finally:
            agent.register(_table([peer.staging]), undo=True)

    def _release(self, peer: "NixlPeer") -> None:
        """Forgets the peer as soon as its read under way has ended."""
        if self._agent is not None:
            self._thread.submit(self._forget, self._agent, peer)


class NixlPeer:
    """Reads the memory of one sender in pieces."""

    def __init__(self, reader: NixlReader, regions: _Regions, staging: torch.Tensor) -> None:
        # of its agent, from when it is connected until it is lost; used by the reader's thread
        # alone
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
        """Of all regions."""
        return int(self._starts[-1])

    async def read(self, pieces: npt.ArrayLike) -> memoryview:
        """Returns pieces, [n, 2] (offset, number of bytes), of the peer's memory, one after the
        other; they stay until the next read of this peer, so there must be one at a time. Raises
        ValueError for pieces that lie outside of a region or take more than the staging,
        TransportError if the peer is gone or silent, or was before.
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
        """Ends the peer: later reads raise TransportError. Idempotent."""
        self._closed = True
        self._reader._release(self)

    def _place(self, pieces: npt.NDArray[np.uint64]) -> tuple[_Regions, _Regions]:
        """Returns where pieces, [n, 2], lie in the peer's memory, and where they go."""
        offsets, sizes = pieces[:, 0], pieces[:, 1]
        index = np.searchsorted(self._starts, offsets, "right") - 1
        ends = offsets + sizes
        if (
            index.max() >= len(self._regions)
            or (ends > self._starts[index + 1]).any()
            or (ends <= offsets).any()
        ):
            raise ValueError("KV pieces outside of the memory")
        if int(sizes.sum()) > len(self.staging):
            raise ValueError("KV pieces larger than the staging memory")
        base = self._regions[index]
        remote = np.stack([base[:, 0] + offsets - self._starts[index], sizes, base[:, 2]], 1)
        places = np.uint64(self.staging.data_ptr()) + np.cumsum(sizes, dtype=np.uint64) - sizes
        return remote, np.stack([places, sizes, np.zeros_like(sizes)], 1)


class _Agent:
    """Calls NIXL's agent by its bindings: its Python class cannot be told to let the thread of UCX
    sleep. Every failure is OSError.
    """

    def __init__(self, *, serves: bool, devices: str) -> None:
        self._nixl = _bindings()
        config = self._nixl.nixlAgentConfig()
        config.useProgThread = serves  # a reader's own calls make its progress
        config.pthrDelay = _IDLE_MICROSECONDS
        self._agent = self._nixl.nixlAgent(secrets.token_hex(16), config)
        self.call(
            "createBackend", "UCX", {"engine_config": f"NET_DEVICES={devices}"} if devices else {}
        )

    def call(self, name: str, *values: Any) -> Any:
        try:
            return getattr(self._agent, name)(*values)
        except Exception as error:
            # NIXL's own exceptions have nothing in common but their module.
            raise OSError(f"NIXL: {error}") from error

    def register(self, regions: _Regions, *, undo: bool = False) -> None:
        name = "deregisterMem" if undo else "registerMem"
        self.call(name, self._nixl.nixlRegDList(self._nixl.DRAM_SEG, regions))

    def read(self, name: str, local: _Regions, remote: _Regions, timeout: float) -> None:
        """Returns when everything is read. Raises TimeoutError after that many seconds: it may
        still arrive.
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
    """Returns what `NixlMemory.describe` packed. Raises TransportError for anything else."""
    try:
        metadata, rows = msgpack.unpackb(description, max_array_len=_MAX_REGIONS)
        regions = np.array(rows, np.uint64)
    except (ValueError, TypeError, OverflowError) as error:
        raise TransportError("NIXL memory with an unreadable description") from error
    if type(metadata) is not bytes or regions.ndim != 2 or regions.shape[1] != 3:
        raise TransportError("NIXL memory with an impossible description")
    return metadata, regions
