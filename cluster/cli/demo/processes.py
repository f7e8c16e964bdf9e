"""Finds the processes of a service on this machine, and which requests they work for.

Sees only processes that this process has started: a service on a Ray of its own.
"""

import http.client
import json
import urllib.request
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

import psutil

from ....proto.errors import Unavailable
from ...serve.ports import listening_children

CONTROLLER: Final = "Serve controller"
_CONTROLLER_TITLE: Final = "ray::ServeController"
_ANSWER_SECONDS: Final = 5.0
_HELD_BLOCKS: Final = ("owned_blocks", "leased_blocks", "reserved_blocks")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedRequest:
    """Describes the processes that work for a running request, by their names."""

    name: str  # the request id
    router: str
    prefill: str  # empty if the decode worker computes the prompt
    decode: str
    is_prefilling: bool  # no token has come yet


class ServiceProcesses:
    """Knows the processes of a service by name, as they were when this was made.

    A router's name is HOST:PORT of its gRPC server, a worker's name is its id.
    """

    def __init__(self, routers: Sequence[tuple[str, str]]) -> None:
        """Finds the processes. Raises Unavailable if one of them is missing.

        `routers`: the addresses of the gRPC and the HTTP server of each.
        """
        self._routers = routers
        workers = {each["id"]: each["address"] for each in self._workers()}
        addresses = workers | {grpc: grpc for grpc, _ in routers}
        found = _processes()
        missing = [name for name, address in addresses.items() if address not in found]
        if missing or CONTROLLER not in found:
            names = ", ".join(missing) or CONTROLLER
            raise Unavailable(f"no process of this command is {names}")
        self._processes = {name: found[address] for name, address in addresses.items()}
        self._processes[CONTROLLER] = found[CONTROLLER]

    def kill(self, name: str) -> int:
        """Ends a process at once, as `kill -9` does; returns its number.

        Raises Unavailable if it has ended before, also if another process has its number now.
        """
        try:
            process = self._processes[name]
            process.kill()
        except (KeyError, psutil.NoSuchProcess):
            raise Unavailable(f"no process of this command is {name} now") from None
        return process.pid

    def placed_requests(self) -> list[PlacedRequest]:
        """Returns the running requests, as the routers that answer tell them."""
        found = []
        for grpc, api in self._routers:
            with suppress(OSError, http.client.HTTPException):
                found += [_placed(each, grpc) for each in _console(api)["running"]]
        return found

    def num_held_blocks(self) -> int:
        """Returns the KV blocks that workers hold for requests, as known at most a second ago.

        Raises Unavailable if no router answers.
        """
        loads = [each["load"] for each in self._workers() if each["state"] == "ready"]
        return sum(load[name] for load in loads for name in _HELD_BLOCKS)

    def _workers(self) -> list[dict[str, Any]]:
        """Returns the workers as the first router that answers knows them. Raises Unavailable."""
        for _, api in self._routers:
            with suppress(OSError, http.client.HTTPException):
                workers: list[dict[str, Any]] = _console(api)["service"]["workers"]
                return workers
        raise Unavailable("no router answers")


def _console(api: str) -> dict[str, Any]:
    """Returns the data of the console at a router's HTTP server."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(f"http://{api}/console/data", timeout=_ANSWER_SECONDS) as answer:
        found: dict[str, Any] = json.load(answer)
    return found


def _placed(request: Mapping[str, Any], router: str) -> PlacedRequest:
    prefill, decode = request["workers"]
    return PlacedRequest(
        name=request["id"],
        router=router,
        prefill="" if prefill == decode else prefill,
        decode=decode,
        is_prefilling=request["state"] == "prefill",
    )


def _processes() -> dict[str, psutil.Process]:
    """Returns the process that listens at each HOST:PORT, and the Serve controller by its name."""
    found = listening_children()
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            if "".join(process.cmdline()).startswith(_CONTROLLER_TITLE):
                found[CONTROLLER] = process
    return found
