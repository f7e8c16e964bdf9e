"""Switches a worker's role, both ways, while streams run: none may fail or change.

    python -m tandem.tests.soak.role_switch

Serves a random model on a Ray cluster of four nodes on this machine, with two workers of each role,
and keeps streams going through the gRPC client of both routers. A decode worker prefills and
decodes again, `--times` times, by the call of `tandem role`. Each switch has to be done within 2 s:
the worker has its new role, and no stream of the earlier one. After the streams, the worker
switches both ways while it is idle: its prefix cache must have as many blocks as before. The
workers must not have computed a token again.
"""

import argparse
import asyncio
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from tandem.cluster.config import TandemConfig
from tandem.cluster.serve.identity_file import read_identity
from tandem.cluster.serve.launch import Service, start_service
from tandem.cluster.serve.status import SWITCH_SECONDS, switch_worker
from tandem.proto.identity import PeerIdentity
from tandem.tests.service import wait_until_idle, workers
from tandem.tests.soak.nemesis import MODEL, cluster
from tandem.tests.soak.redeploy import (
    FILL_SECONDS,
    Disturbed,
    joined,
    listening,
    make_configs,
    recomputed,
    streams_through,
)
from tandem.tests.tiny import make_tiny_model

BOTH_WAYS: Final = ("prefill", "decode")
NUM_WORKERS: Final = 2  # of each role
FULL: Final = 0.9  # of the streams decode, while the others begin


@dataclass
class Switched:
    """Holds what was seen while a worker's role was switched."""

    disturbed: Disturbed = field(default_factory=lambda: Disturbed(limit=SWITCH_SECONDS))
    seconds: list[float] = field(default_factory=list)  # of each switch
    left: int = 0  # requests that had not moved
    cached_blocks: list[int] = field(default_factory=list)  # of an idle worker, before and after

    @property
    def passed(self) -> bool:
        before, *after = self.cached_blocks
        keeps_cache = before > 0 and set(after) == {before}
        return self.disturbed.passed and keeps_cache and not self.left and bool(self.seconds)

    def __str__(self) -> str:
        times = " ".join(f"{each:.2f}" for each in self.seconds)
        return (
            f"switches {len(self.seconds)}, longest {max(self.seconds, default=0.0):.2f} s: {times}"
            f"\nrequests left {self.left}, cached blocks of an idle worker {self.cached_blocks}"
            f"\n{self.disturbed}\n{'passed' if self.passed else 'NOT PASSED'}"
        )


def switch_under_streams(
    config: TandemConfig, folder: Path, address: str, *, streams: int, tokens: int, times: int
) -> Switched:
    """Runs a service and switches a decode worker of it, both ways, `times` times."""
    with joined(address), start_service(config, str(folder), address=address) as service:
        return asyncio.run(_switch(service, streams=streams, tokens=tokens, times=times))


async def _switch(service: Service, *, streams: int, tokens: int, times: int) -> Switched:
    found = Switched()
    identity = read_identity(service.status_url)
    async with streams_through(service, found.disturbed, streams, tokens):
        for turn in range(times):
            worker = (await _decoding(service, NUM_WORKERS, streams))[turn % NUM_WORKERS]
            for role in BOTH_WAYS:
                await _decoding(service, NUM_WORKERS - (role == "decode"), streams)
                began = time.monotonic()
                found.left += await _give_role(worker, role, identity)
                found.seconds.append(time.monotonic() - began)
    found.disturbed.seconds = max(found.seconds)
    found.disturbed.addresses = [listening(service)]
    found.disturbed.recomputed = await asyncio.to_thread(recomputed, service)
    await asyncio.to_thread(wait_until_idle, service.status_url, 40)
    for role in ("", *BOTH_WAYS):
        if role:
            found.left += await _give_role(worker, role, identity)
        known = await asyncio.to_thread(workers, service.status_url)
        (load,) = [each["load"] for each in known if each["id"] == worker["id"]]
        found.cached_blocks.append(load["cached_blocks"])
    return found


async def _decoding(service: Service, number: int, streams: int) -> list[dict[str, Any]]:
    """Waits until so many decode workers run the streams, but for those that are beginning.

    Returns these workers.
    """
    async with asyncio.timeout(FILL_SECONDS):
        while True:
            known = await asyncio.to_thread(workers, service.status_url)
            found = [each for each in known if each["role"] == "decode"]
            num_running = sum(each["load"]["num_running"] for each in found)
            if len(found) == number and num_running >= FULL * streams:
                return found
            await asyncio.sleep(0.02)


async def _give_role(worker: dict[str, Any], role: str, identity: PeerIdentity) -> int:
    return await switch_worker(worker["address"], role, SWITCH_SECONDS, identity)


def main(arguments: Sequence[str]) -> int:
    """Runs the command; returns its exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m tandem.tests.soak.role_switch", description=__doc__
    )
    parser.add_argument("--streams", type=int, default=16, help="at a time")
    parser.add_argument("--tokens", type=int, default=400, help="of each stream")
    parser.add_argument("--times", type=int, default=10, help="a worker switches both ways")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="tandem-roles-") as scratch, cluster() as address:
        folder = make_tiny_model(Path(scratch) / "tiny", dtype="bfloat16", **MODEL)
        config, _ = make_configs(folder, "roles", 8225, 2, NUM_WORKERS)
        found = switch_under_streams(
            config,
            folder,
            address,
            streams=options.streams,
            tokens=options.tokens,
            times=options.times,
        )
    print(found)
    return 0 if found.passed else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
