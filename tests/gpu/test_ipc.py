"""KV cache in the GPU memory of another process, which only a GPU can show."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from tandem.tests.workers.spans import span
from tandem.tests.workers.transfer.played import LAYOUT
from tandem.workers.kv_cache.tables import TableBlocks
from tandem.workers.model.kv.store import PagedKv

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

SIZES: dict[str, Any] = {"num_blocks": 64, "block_size": 16, "tp": 1, "rank": 0}
BLOCKS = TableBlocks((5, 0, 63))


def memory(seed: int) -> PagedKv:
    kv = PagedKv(LAYOUT, device=torch.device("cuda", 0), **SIZES)
    kv.data.view(torch.uint8).random_(0, 256, generator=torch.Generator("cuda").manual_seed(seed))
    torch.cuda.synchronize()
    return kv


@contextmanager
def owner() -> Iterator[tuple[bytes, int]]:
    """Another process with KV cache: the description of its memory, and its process id."""
    code = (
        "from tandem.tests.gpu.test_ipc import memory; import time; kv = memory(9); "
        "print(kv.export().hex(), flush=True); time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        try:
            yield bytes.fromhex(child.stdout.readline()), child.pid
        finally:
            child.kill()


async def test_memory_of_another_process_is_copied() -> None:
    kv = memory(1)
    expected = memory(9)
    part = span(kv, 3, 40)
    with owner() as (description, _):
        gather = kv.attach_device(description, **SIZES)
        kv.scatter(BLOCKS, part, await gather(BLOCKS, part))
        assert await kv.read(BLOCKS, part) == await expected.read(BLOCKS, part)


async def test_this_process_survives_the_owner() -> None:
    """A copy of a dead owner's memory may have any content: the lease table is what refuses it."""
    kv = memory(1)
    part = span(kv, 0, 48)
    before = await kv.read(BLOCKS, part)
    with owner() as (description, pid):
        gather = kv.attach_device(description, **SIZES)
        copies = [gather(BLOCKS, part) for _ in range(100)]
        os.kill(pid, signal.SIGKILL)
        for copy in copies:
            await copy
    assert await kv.read(BLOCKS, part) == before
