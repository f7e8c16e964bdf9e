"""Stands for NCCL: gloo moves the bytes, and the streams are those of a model."""

import os
import types
from typing import Any

import pytest
import torch

from tandem.tests.waits import WAIT
from tandem.tests.workers.stream_model import Event, Stream, StreamModel, joined
from tandem.workers.transfer.backend import open_group


class _Work:
    """As of NCCL: the current stream waits for the message when `wait` is called."""

    def __init__(self, work: Any, model: StreamModel, done: Event) -> None:
        self._work = work
        self._model = model
        self._done = done

    def wait(self, *timeout: Any) -> None:
        self._work.wait()
        self._model.current.wait_event(self._done)


def play_nccl(patch: pytest.MonkeyPatch, model: StreamModel) -> list[int]:
    """Puts it in the place of NCCL; returns the devices that threads select from now on.

    As torch does, it refuses a device without an index.
    """
    selected: list[int] = []

    def set_device(device: Any) -> None:
        if not isinstance(device, int):
            raise ValueError(
                f"Expected a torch.device with a specified index or an integer, but got: {device}"
            )
        selected.append(device)

    class Nccl:
        """Makes its communicator with the first call."""

        Options = staticmethod(types.SimpleNamespace)

        def __init__(self, store: Any, rank: int, size: int, options: Any) -> None:
            assert os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "0"
            self._group: Any = None
            self._store = torch.distributed.PrefixStore("gloo", store)  # type: ignore[attr-defined]
            self._rank = rank
            self._stream = Stream(model)

        def _call(self, name: str, *arguments: Any) -> _Work:
            if self._group is None:
                self._group = open_group(
                    self._store,
                    backend="gloo",
                    rank=self._rank,
                    size=2,
                    host="127.0.0.1",
                    timeout=WAIT,
                )
            self._stream.clock = joined((self._stream.clock, model.current.clock))
            with model.stream(self._stream):
                model.launch("message")
            done = Event(model)
            done.record(self._stream)
            return _Work(getattr(self._group, name)(*arguments), model, done)

        def send(self, *arguments: Any) -> _Work:
            return self._call("send", *arguments)

        def recv(self, *arguments: Any) -> _Work:
            return self._call("recv", *arguments)

        def abort(self) -> None: ...

    model.install(patch)
    patch.setattr(torch.cuda, "set_device", set_device)
    patch.setattr(torch.cuda, "current_device", lambda: 3)
    patch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    patch.setattr(torch.distributed, "ProcessGroupNCCL", Nccl, raising=False)
    return selected
