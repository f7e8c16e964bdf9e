"""Runs ranks 1 and up of a worker as processes of this machine, which end with the worker.

`python -m tandem.cluster.local.ranks` runs a rank; it reads its configuration from standard input.
"""

import asyncio
import json
import os
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import fields, replace
from typing import Final

import torch

from ...proto.errors import Unavailable
from ...proto.identity import PeerIdentity
from ...workers.model.device import check_gpu
from ...workers.tp.rank import RankConfig
from ...workers.tp.rank_server import RankServer

_START_SECONDS: Final = 120.0  # to import torch
_END_SECONDS: Final = 5.0


@asynccontextmanager
async def local_ranks(
    config: RankConfig, count: int, environment: Mapping[str, str]
) -> AsyncIterator[list[str]]:
    """Yields the addresses of `count` ranks, which wait for rank 0.

    They end with the context, and with this process also if it is killed. Raises Unavailable if one
    does not start, or if there are fewer GPUs than ranks, and ValueError if there is no GPU.
    """
    configs = _rank_configs(config, count)
    processes: list[Process] = []
    try:
        for each in configs:
            processes.append(await _start(each, environment))
        yield list(await asyncio.gather(*map(_address, processes)))
    finally:
        await asyncio.gather(*map(end_process, processes))


def _rank_configs(config: RankConfig, count: int) -> list[RankConfig]:
    """Returns the configurations of ranks 1 and up, each with a GPU of its own.

    Rank 0 is this process, which computes on the first GPU. Raises Unavailable for too few
    GPUs, and ValueError if there is none.
    """
    if config.device != "cuda":
        return [config] * count
    found = torch.cuda.device_count()
    if not found:
        check_gpu(config.device)  # tells why
    if found < count + 1:
        raise Unavailable(
            f"device: cuda needs a GPU for each rank, {count + 1} in all, and this process sees "
            f"{found} (CUDA_VISIBLE_DEVICES); lower tp (tensor_parallel_size), or use device: cpu"
        )
    return [replace(config, device=f"cuda:{number}") for number in range(1, count + 1)]


async def _start(config: RankConfig, environment: Mapping[str, str]) -> Process:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", __name__),
        stdin=PIPE,
        stdout=PIPE,
        env=os.environ | environment,
        start_new_session=True,  # only rank 0 handles Ctrl-C
    )
    assert process.stdin is not None
    # The pipe stays open: its end tells the rank that this process has ended.
    process.stdin.write(_encode(config).encode() + b"\n")
    return process


async def _address(process: Process) -> str:
    assert process.stdout is not None
    with suppress(TimeoutError):
        async with asyncio.timeout(_START_SECONDS):
            if line := await process.stdout.readline():
                return line.decode().strip()
    raise Unavailable("a rank of the model did not start")


async def end_process(process: Process, seconds: float = _END_SECONDS) -> None:
    """Closes the pipe to a process, and kills the process if it does not end in time."""
    assert process.stdin is not None
    process.stdin.close()
    try:
        async with asyncio.timeout(seconds):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()


def _encode(config: RankConfig) -> str:
    values = {each.name: getattr(config, each.name) for each in fields(config)}
    return json.dumps(values | {"identity": config.identity.to_text()})


def _decode(line: str) -> RankConfig:
    values = json.loads(line)
    values["identity"] = PeerIdentity.from_text(values["identity"])
    values["transports"] = tuple(values["transports"])
    return RankConfig(**values)


async def _serve(config: RankConfig) -> None:
    """Serves until rank 0 ends its stream, or the parent process is gone."""
    server = await RankServer.start(config)
    sys.stdout.write(f"{server.address}\n")
    sys.stdout.flush()
    left = asyncio.create_task(asyncio.to_thread(sys.stdin.read))
    ended = asyncio.create_task(server.ended.wait())
    await asyncio.wait((left, ended), return_when=asyncio.FIRST_COMPLETED)
    os._exit(0)  # without rank 0 the engine might wait in a collective for half a minute


if __name__ == "__main__":
    asyncio.run(_serve(_decode(sys.stdin.readline())))
