"""Stands for CUDA's interprocess handles: mapped host memory, and the streams of a model."""

import mmap
import os
import threading
from typing import Any

import msgpack
import pytest
import torch

from tandem.tests.waits import WAIT
from tandem.tests.workers.stream_model import Event, StreamModel
from tandem.workers.host.streams import BlockOrder, DeviceData
from tandem.workers.kv_cache.layout import KvSpan
from tandem.workers.kv_cache.tables import TableBlocks
from tandem.workers.model.kv import store as kv_store
from tandem.workers.model.kv.gpu import GpuKv
from tandem.workers.model.kv.store import PagedKv
from tandem.workers.transfer import shared_memory
from tandem.workers.transfer.connector import TransferContext
from tandem.workers.transfer.shared_memory import IpcConnector


def play_ipc(patch: pytest.MonkeyPatch) -> StreamModel:
    """Makes ranks with shared host memory take the ways of ranks on GPUs, but for `read` and
    `write`, which tests use to look at the memory.
    """
    model = StreamModel()
    model.install(patch)
    patch.setattr(IpcConnector, "capabilities", classmethod(_capabilities))
    patch.setattr(PagedKv, "export", lambda kv: msgpack.packb([os.getpid(), kv.shared_fd]))
    patch.setattr(PagedKv, "scatter", _scatter)
    patch.setattr(kv_store, "open_memory", _open)
    return model


def _capabilities(
    cls: type[IpcConnector], context: TransferContext, name: str
) -> dict[str, Any] | None:
    return {"host": shared_memory.host_id(), "shares": context.kv.shared_fd is not None}


def _open(description: bytes, device: torch.device) -> torch.Tensor:
    pid, fd = msgpack.unpackb(description)
    with open(f"/proc/{pid}/fd/{fd}", "rb") as file:
        memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    mapped: torch.Tensor = torch.frombuffer(memory, dtype=torch.uint8)
    return mapped


def _scatter(kv: PagedKv, table: TableBlocks, span: KvSpan, data: DeviceData) -> None:
    GpuKv(kv.layout, kv.tensors, BlockOrder(kv.num_blocks)).write(table, span, data)


class Held:
    """Delays the ends of copies until they are let go."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.reached = threading.Event()  # a thread waits for a copy
        self.let_go = threading.Event()
        true = Event.synchronize

        def synchronize(event: Event) -> None:
            self.reached.set()
            assert self.let_go.wait(WAIT)
            true(event)

        patch.setattr(Event, "synchronize", synchronize)
