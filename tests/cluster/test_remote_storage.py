"""Tests that a router's calls of the store do not copy files on its event loop."""

import threading
from typing import Any

import pytest
import ray

from tandem.cluster.serve.storage.remote import RemoteStorage
from tandem.router.storage.interface import LineAnswer, StoredResponse

LARGE = b"x" * 300_000


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
