"""NIXL's bindings for agents of one process: reads copy at once. For tests where the library is not
installed.
"""

import ctypes
from typing import Any

NIXL_READ, NIXL_IN_PROG, NIXL_SUCCESS, DRAM_SEG = "read", "in progress", "success", "dram"

_AGENTS: dict[bytes, "nixlAgent"] = {}


class nixlAgentConfig:
    """Takes any attribute."""


def nixlRegDList(segment: str, table: Any) -> list[list[int]]:
    return [[int(value) for value in row] for row in table]


nixlXferDList = nixlRegDList


class nixlAgent:
    """An agent; those that register memory before they give their metadata can be read."""

    def __init__(self, name: str, config: nixlAgentConfig) -> None:
        self.name = name.encode()
        self.regions: list[list[int]] = []
        self.peers: set[bytes] = set()
        self.lost = False  # set by tests
        self._posted = False
        _AGENTS[self.name] = self

    def createBackend(self, name: str, params: dict[str, Any]) -> None: ...

    def registerMem(self, regions: list[list[int]]) -> None:
        self.regions += regions

    def deregisterMem(self, regions: list[list[int]]) -> None:
        for region in regions:
            self.regions.remove(region)

    def getLocalMD(self) -> bytes:
        return self.name

    def loadRemoteMD(self, metadata: bytes) -> bytes:
        if metadata not in _AGENTS:
            raise ValueError("no such agent")
        self.peers.add(metadata)
        return metadata

    def invalidateRemoteMD(self, name: str) -> None:
        self.peers.remove(name.encode())

    def createXferReq(
        self, kind: str, local: list[list[int]], remote: list[list[int]], name: str
    ) -> Any:
        agent = _AGENTS[name.encode()]
        if agent.lost or agent.name not in self.peers:
            raise ValueError("lost")
        for rows, owner in ((local, self), (remote, agent)):
            for start, size, _ in rows:
                if not any(
                    first <= start and start + size <= first + length
                    for first, length, _ in owner.regions
                ):
                    raise ValueError("not registered")
        return local, remote

    def postXferReq(self, request: Any) -> str:
        for (target, size, _), (source, _, _) in zip(*request, strict=True):
            ctypes.memmove(target, source, size)
        return NIXL_IN_PROG

    def getXferStatus(self, request: Any) -> str:
        return NIXL_SUCCESS

    def releaseXferReq(self, request: Any) -> None: ...
