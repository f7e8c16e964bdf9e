"""Tests the store beside the directory: its opening, its bounds, and the calls of a router."""

import asyncio
import sqlite3
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import ray

from tandem.cluster.serve.storage.host import MAX_CALLS, RETRY_SECONDS, StorageHost
from tandem.cluster.serve.storage.remote import RemoteStorage
from tandem.router.storage.config import StorageConfig
from tandem.router.storage.interface import LineAnswer, StoredResponse
from tandem.router.storage.local import LocalStorage
from tandem.tests.waits import WAIT

LARGE = b"x" * 300_000


@dataclass
class Clock:
    now: float = 100.0

    def __call__(self) -> float:
        return self.now


async def test_large_arguments_are_copied_in_other_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[int] = []
    sent: list[Any] = []

    def put(value: object) -> str:
        threads.append(threading.get_ident())
        return f"reference to {type(value).__name__}"

    async def call(method: str, *args: Any, wait: float = 0.0) -> Any:
        sent.append([str(each)[:40] for each in args])

    monkeypatch.setattr(ray, "put", put)
    storage = RemoteStorage(call)
    await storage.add_file("ada", "name", "batch", LARGE)
    await storage.add_batch("batch", [b"line"])  # type: ignore[arg-type]
    await storage.answer(LineAnswer(key=("batch", 0), line=LARGE))
    await storage.keep_response("ada", StoredResponse(response_id="r", body=LARGE, items=b""))
    assert [each for args in sent for each in args if "reference" in each] == [
        "reference to bytes",
        "reference to list",
        "reference to LineAnswer",
        "reference to StoredResponse",
    ]
    assert threading.get_ident() not in threads
    await storage.add_file("ada", "name", "batch", b"small")
    assert len(threads) == 4


async def test_a_folder_in_use_is_tried_again_once_a_second(tmp_path: Path) -> None:
    config, clock = StorageConfig(folder=str(tmp_path)), Clock()
    owner = LocalStorage(config)
    host = StorageHost(config, clock)
    with pytest.raises(sqlite3.OperationalError, match=r"storage\.folder: .* is in use"):
        await host.call("find_file", "ada", "file-1")
    owner.close()
    with pytest.raises(OSError, match=r"storage\.folder: .* is in use"):
        await host.call("find_file", "ada", "file-1")
    clock.now += RETRY_SECONDS
    assert await host.call("find_file", "ada", "file-1") is None


async def test_a_store_that_hangs_leaves_calls_to_the_directory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    may_end = threading.Event()

    async def hang(*_: object) -> None:
        assert may_end.wait(WAIT)

    monkeypatch.setattr(LocalStorage, "find_file", hang)
    host = StorageHost(StorageConfig())
    calls = [
        asyncio.create_task(host.call("find_file", "ada", "file-1")) for _ in range(MAX_CALLS + 1)
    ]
    ended, _ = await asyncio.wait(calls, timeout=WAIT, return_when=asyncio.FIRST_COMPLETED)
    may_end.set()
    assert ended == {calls[-1]}
    with pytest.raises(OSError, match=f"{MAX_CALLS} calls wait"):
        calls[-1].result()
    await asyncio.gather(*calls[:-1])
    assert await host.call("find_file", "ada", "file-1") is None
