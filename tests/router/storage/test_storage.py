"""Tests the store of responses, files and batches, in memory and on disk."""

import asyncio
import json
import re
import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.router.storage.batches import LEASE_SECONDS
from tandem.router.storage.config import StorageConfig
from tandem.router.storage.interface import (
    MAX_FILES,
    MAX_RESPONSES,
    Batch,
    BatchLine,
    KeyUsage,
    LineAnswer,
    Owner,
    Page,
    StoredResponse,
)
from tandem.router.storage.local import LocalStorage
from tandem.router.storage.usage import KEPT_DAYS

MIB = 1 / 1024  # GiB


@dataclass
class Clock:
    now: float = 1_000_000.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Case:
    """A store whose clock the test moves."""

    clock: Clock
    store: LocalStorage
    config: StorageConfig = field(default_factory=StorageConfig)

    def restart(self) -> None:
        self.store.check_integrity()
        self.store.close()
        self.store = LocalStorage(self.config, self.clock, self.clock)


def make(config: StorageConfig = StorageConfig()) -> Case:
    clock = Clock()
    return Case(clock, LocalStorage(config, clock, clock), config)


def response(name: str, num_bytes: int = 10) -> StoredResponse:
    return StoredResponse(response_id=name, body=b"b" * num_bytes, items=b"[]")


def batch(case: Case, name: str, tenant: str, total: int) -> tuple[Batch, list[bytes]]:
    lines = [json.dumps({"custom_id": f"{name}-{i}"}).encode() for i in range(total)]
    now = int(case.clock())
    return (
        Batch(
            batch_id=name,
            owner=Owner(tenant=tenant, key_name="k"),
            endpoint="/v1/completions",
            input_file_id="file-1",
            metadata=None,
            created=now,
            expires=now + 86_400,
            output_seconds=None,
            total=total,
        ),
        lines,
    )


async def answer(
    store: LocalStorage, line: BatchLine, text: str = "", *, fails: bool = False
) -> None:
    custom_id = json.loads(line.request)["custom_id"]
    made = json.dumps({"custom_id": custom_id, "text": text}).encode() + b"\n"
    key = (line.batch_id, line.number)
    await store.answer(LineAnswer(key=key, line=made, has_failed=fails))


async def content(store: LocalStorage, tenant: str, file_id: str | None) -> list[Any]:
    """Returns the lines of a file; [] without a file."""
    if file_id is None:
        return []
    data = await store.read_file(tenant, file_id, 0, 2**30)
    assert data is not None
    return [json.loads(line) for line in data.splitlines()]


async def test_an_entry_of_another_tenant_does_not_exist() -> None:
    store = make().store
    assert await store.keep_response("a", response("r"))
    stored = await store.add_file("a", "in.jsonl", "batch", b"abc")
    assert stored is not None
    await store.add_batch(*batch(make(), "batch_1", "a", 1))
    page = Page(limit=10)
    for tenant, exists in (("b", False), ("", False), ("a", True)):
        assert (await store.find_response(tenant, "r") is not None) is exists
        assert (await store.find_file(tenant, stored.file_id) is not None) is exists
        assert (await store.read_file(tenant, stored.file_id, 0, 9) == b"abc") is exists
        assert (await store.find_batch(tenant, "batch_1") is not None) is exists
        assert (await store.cancel_batch(tenant, "batch_1") is not None) is exists
        assert bool(await store.list_files(tenant, page)) is exists
        assert bool(await store.list_batches(tenant, page)) is exists
        assert await store.delete_response(tenant, "r") is exists
        assert await store.delete_file(tenant, stored.file_id) is exists
    store.check_integrity()


async def test_a_tenant_at_its_bound_loses_its_own_oldest_responses() -> None:
    store = make(StorageConfig(tenant_gb=MIB, total_gb=10 * MIB)).store
    assert await store.keep_response("other", response("r"))
    for i in range(5):
        assert await store.keep_response("a", response(f"r{i}", 300_000))
    kept = [await store.find_response("a", f"r{i}") is not None for i in range(5)]
    assert kept == [False, False, True, True, True]
    assert await store.find_response("other", "r") is not None
    assert not await store.keep_response("a", response("large", 2**20))  # evicts nothing
    assert await store.find_response("a", "r4") is not None
    assert await store.add_file("a", "f", "batch", b"x" * 900_000) is not None
    assert await store.find_response("a", "r4") is None
    assert await store.add_file("a", "f", "batch", b"x" * 900_000) is None
    store.check_integrity()


async def test_all_tenants_together_are_bounded_and_the_largest_gives_way() -> None:
    store = make(StorageConfig(tenant_gb=MIB, total_gb=2 * MIB)).store
    assert await store.keep_response("small", response("r", 100))
    for tenant in ("a", "b", "c"):
        for i in range(3):
            assert await store.keep_response(tenant, response(f"r{i}", 300_000))
    assert await store.find_response("small", "r") is not None
    assert await store.find_response("c", "r2") is not None
    store.check_integrity()


async def test_a_refused_entry_deletes_no_response() -> None:
    """Of the tenants with the most bytes, which would have given way, nor of its own."""
    store = make(StorageConfig(tenant_gb=MIB, total_gb=2 * MIB)).store
    for i in range(2):
        assert await store.keep_response("large", response(f"r{i}", 100_000))
    assert await store.keep_response("small", response("r", 100))
    for tenant in ("large", "a"):
        assert await store.add_file(tenant, "f", "batch", b"x" * 800_000, None) is not None
    assert await store.add_file("b", "f", "batch", b"x" * 900_000, None) is None
    for i in range(2):
        assert await store.find_response("large", f"r{i}") is not None
    assert await store.find_response("small", "r") is not None
    store.check_integrity()


async def test_entries_are_bounded_in_number(monkeypatch: pytest.MonkeyPatch) -> None:
    assert MAX_RESPONSES >= 1_000
    assert MAX_FILES >= 100
    monkeypatch.setattr("tandem.router.storage.local.MAX_RESPONSES", 3)
    monkeypatch.setattr("tandem.router.storage.local.MAX_FILES", 3)
    store = make().store
    for i in range(5):
        assert await store.keep_response("a", response(f"r{i}"))
    assert [await store.find_response("a", f"r{i}") is not None for i in range(5)] == [
        False,
        False,
        True,
        True,
        True,
    ]
    added = [await store.add_file("a", "f", "batch", b"x") for _ in range(5)]
    assert [each is not None for each in added] == [True, True, True, False, False]
    store.check_integrity()


async def test_the_oldest_batch_that_has_ended_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody can delete a batch, and its record is kept for weeks."""
    monkeypatch.setattr("tandem.router.storage.batches.MAX_BATCHES", 3)
    case = make()
    for number in range(3):
        assert await case.store.add_batch(*batch(case, f"batch_{number}", "a", 1)) is not None
    assert await case.store.add_batch(*batch(case, "batch_3", "a", 1)) is None, "all run"
    for number in (2, 1):
        await case.store.cancel_batch("a", f"batch_{number}")
    assert await case.store.add_batch(*batch(case, "batch_3", "a", 1)) is not None
    listed = await case.store.list_batches("a", Page(limit=9))
    assert [each.batch_id for each in listed] == ["batch_3", "batch_2", "batch_0"]
    case.store.check_integrity()


async def test_a_batch_refused_for_its_number_or_its_size_deletes_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tandem.router.storage.batches.MAX_BATCHES", 1)
    case = make(StorageConfig(tenant_gb=MIB))
    first, lines = batch(case, "batch_0", "a", 1)
    assert await case.store.add_batch(first, lines) is not None
    for number in range(3):
        assert await case.store.keep_response("a", response(f"r{number}", 300_000))
    made, _ = batch(case, "batch_1", "a", 1)
    assert await case.store.add_batch(made, [b"x" * 400_000]) is None, "the first one runs"
    await case.store.cancel_batch("a", "batch_0")
    assert await case.store.add_batch(made, [b"x" * 2_000_000]) is None, "larger than all room"
    for number in range(3):
        assert await case.store.find_response("a", f"r{number}") is not None
    assert await case.store.find_batch("a", "batch_0") is not None
    assert await case.store.add_batch(made, [b"x" * 400_000]) is not None
    assert await case.store.find_batch("a", "batch_0") is None
    assert await case.store.find_response("a", "r0") is None
    case.store.check_integrity()


async def test_an_entry_ends_after_its_time() -> None:
    case = make(StorageConfig(keep_seconds=100))
    await case.store.keep_response("a", response("r"))
    long = await case.store.add_file("a", "f", "batch", b"x", 3_600)
    short = await case.store.add_file("a", "f", "batch", b"x", 50)
    assert long is not None
    assert short is not None
    case.clock.now += 60
    assert await case.store.find_response("a", "r") is not None
    assert [each.file_id for each in await case.store.list_files("a", Page(limit=9))] == [
        long.file_id
    ]
    assert await case.store.read_file("a", short.file_id, 0, 9) is None
    case.clock.now += 60
    assert await case.store.find_response("a", "r") is None
    assert await case.store.find_file("a", long.file_id) is None
    assert not await case.store.delete_response("a", "r")
    await case.store.keep_response("b", response("r"))  # which deletes all that has expired
    assert case.store._database.used("a") == 0
    case.store.check_integrity()


async def test_expired_entries_leave_their_places(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tandem.router.storage.local.MAX_FILES", 1)
    monkeypatch.setattr("tandem.router.storage.batches.MAX_BATCHES", 1)
    case = make(StorageConfig(keep_seconds=100))
    for number in range(2):
        assert await case.store.add_file("a", "f", "batch", b"x") is not None
        assert await case.store.add_file("a", "f", "batch", b"x") is None
        made, lines = batch(case, f"batch_{number}", "a", 1)
        assert await case.store.add_batch(made, lines) is not None
        assert await case.store.add_batch(*batch(case, "batch_more", "a", 1)) is None
        await case.store.cancel_batch("a", made.batch_id)
        case.clock.now += 86_501
    await case.store.claim("one", [], 0, 0)  # of any runner; it deletes all that has expired
    assert await case.store.find_batch("a", "batch_1") is None
    assert case.store._database.used("a") == 0
    case.store.check_integrity()


async def test_the_facts_of_a_batch_count() -> None:
    case = make()
    made, _ = batch(case, "batch_1", "a", 1)
    made.metadata = {str(i): "x" * 512 for i in range(16)}
    await case.store.add_batch(made, [])
    assert case.store._database.used("a") > 16 * 512


async def test_pages_of_lists() -> None:
    case = make()
    files = [await case.store.add_file("a", f"f{i}", "batch", b"x") for i in range(5)]
    ids = [each.file_id for each in files if each is not None]
    for i in range(5):
        await case.store.add_batch(*batch(case, f"batch_{i}", "a", 1))

    async def shown(**page: Any) -> list[str]:
        return [each.file_id for each in await case.store.list_files("a", Page(**page))]

    assert await shown(limit=2) == [ids[4], ids[3]]
    assert await shown(limit=9, after=ids[3]) == [ids[2], ids[1], ids[0]]
    assert await shown(limit=2, after=ids[1], is_ascending=True) == [ids[2], ids[3]]
    assert await case.store.list_files("a", Page(limit=9), "other") == []
    batches = await case.store.list_batches("a", Page(limit=2, after="batch_3"))
    assert [each.batch_id for each in batches] == ["batch_2", "batch_1"]


async def test_what_is_on_disk_outlives_the_process(tmp_path: Path) -> None:
    config = StorageConfig(folder=str(tmp_path / "storage"))
    case = make(config)
    await case.store.keep_response("a", response("r"))
    stored = await case.store.add_file("a", "f", "batch", b"abc")
    assert stored is not None
    await case.store.add_batch(*batch(case, "batch_1", "a", 3))
    first, second = await case.store.claim("one", [], 2, 0)
    await answer(case.store, first, "before")
    case.restart()
    assert await case.store.find_response("a", "r") is not None
    assert await case.store.read_file("a", stored.file_id, 1, 9) == b"bc"
    # The runner repeats what it holds, so that nobody else computes it.
    assert await case.store.claim("one", [("batch_1", second.number)], 0, 0) == []
    (third,) = await case.store.claim("two", [], 9, 0)
    assert third.number == 2
    await answer(case.store, third, "two")
    await answer(case.store, second, "one")
    found = await case.store.find_batch("a", "batch_1")
    assert found is not None
    assert found.status == "completed"
    lines = await content(case.store, "a", found.output_file_id)
    assert [line["text"] for line in lines] == ["before", "one", "two"]
    assert (tmp_path / "storage").stat().st_mode & 0o77 == 0
    assert (tmp_path / "storage" / "storage.db").stat().st_mode & 0o77 == 0
    case.store.check_integrity()


def test_a_folder_in_use_is_refused_without_a_wait(tmp_path: Path) -> None:
    config = StorageConfig(folder=str(tmp_path))
    owner = LocalStorage(config)
    refused = re.escape(f"storage.folder: the database in {tmp_path} is in use")
    for _ in range(2):
        with pytest.raises(sqlite3.OperationalError, match=refused):
            LocalStorage(config)
    assert owner._database.one("PRAGMA busy_timeout") == (0,)
    owner.close()
    LocalStorage(config).close()


async def test_lines_of_a_silent_runner_are_claimed_by_another() -> None:
    case = make()
    await case.store.add_batch(*batch(case, "batch_1", "a", 2))
    (line,) = await case.store.claim("one", [], 1, 0)
    held = (line.batch_id, line.number)
    assert [each.number for each in await case.store.claim("two", [], 9, 0)] == [1]
    for _ in range(4):  # a runner that repeats its claim keeps its line
        case.clock.now += LEASE_SECONDS / 2
        assert await case.store.claim("one", [held], 0, 0) == []
        assert await case.store.claim("two", [("batch_1", 1)], 9, 0) == []
    case.clock.now += LEASE_SECONDS / 2
    await case.store.claim("two", [("batch_1", 1)], 0, 0)
    case.clock.now += LEASE_SECONDS / 2 + 1
    (again,) = await case.store.claim("two", [("batch_1", 1)], 9, 0)
    assert again == line
    await answer(case.store, again, "two")
    await answer(case.store, line, "one")  # it was only slow; the first answer counts
    await case.store.release("two")
    (last,) = await case.store.claim("three", [], 9, 0)
    await answer(case.store, last, "three", fails=True)
    found = await case.store.find_batch("a", "batch_1")
    assert found is not None
    assert (found.status, found.completed, found.failed) == ("completed", 1, 1)
    assert [line["text"] for line in await content(case.store, "a", found.output_file_id)] == [
        "two"
    ]
    assert [line["text"] for line in await content(case.store, "a", found.error_file_id)] == [
        "three"
    ]
    case.store.check_integrity()


async def test_a_claim_that_still_waits_takes_no_line_of_a_runner_that_was_released() -> None:
    case = make()
    await case.store.add_batch(*batch(case, "batch_1", "a", 2))
    held = [(line.batch_id, line.number) for line in await case.store.claim("one", [], 2, 0)]
    waiting = asyncio.create_task(case.store.claim("one", held, 9, 5))
    await asyncio.sleep(0)  # it waits for lines
    await case.store.release("one")
    assert await waiting == []
    assert len(await case.store.claim("two", [], 9, 0)) == 2


async def test_tenants_take_turns() -> None:
    case = make()
    await case.store.add_batch(*batch(case, "batch_1", "a", 100))
    await case.store.add_batch(*batch(case, "batch_2", "a", 100))
    await case.store.add_batch(*batch(case, "batch_3", "b", 100))
    claimed = await case.store.claim("one", [], 10, 0)
    assert [each.batch_id for each in claimed].count("batch_3") == 5


async def test_a_cancelled_batch_keeps_the_answers_of_running_lines() -> None:
    case = make()
    await case.store.add_batch(*batch(case, "batch_1", "a", 4))
    first, second, third = await case.store.claim("one", [], 3, 0)
    await answer(case.store, first)
    cancelling = await case.store.cancel_batch("a", "batch_1")
    assert cancelling is not None
    assert cancelling.status == "cancelling"
    assert await case.store.claim("two", [], 9, 0) == []
    await answer(case.store, second)
    case.clock.now += LEASE_SECONDS + 1  # the runner of the third line has died
    assert third.number == 2
    await case.store.claim("two", [], 9, 0)
    found = await case.store.cancel_batch("a", "batch_1")
    assert found is not None
    assert (found.status, found.completed) == ("cancelled", 2)
    assert len(await content(case.store, "a", found.output_file_id)) == 2
    case.store.check_integrity()


async def test_a_batch_that_takes_too_long_expires() -> None:
    case = make()
    await case.store.add_batch(*batch(case, "batch_1", "a", 3))
    (line, _) = await case.store.claim("one", [], 2, 0)
    await answer(case.store, line)
    case.clock.now += 86_401
    assert await case.store.claim("one", [], 9, 0) == []
    found = await case.store.find_batch("a", "batch_1")
    assert found is not None
    assert (found.status, found.completed, found.failed) == ("expired", 1, 2)
    errors = await content(case.store, "a", found.error_file_id)
    assert [line["error"]["code"] for line in errors] == ["batch_expired"] * 2
    case.store.check_integrity()


async def test_a_claim_ends_one_batch_that_takes_too_long_and_returns_no_request_of_others() -> (
    None
):
    """A claim that ended all of them would keep other tenants' calls waiting."""
    case = make()
    for number in range(3):
        await case.store.add_batch(*batch(case, f"batch_{number}", "a", 3))
    case.clock.now += 86_401
    for number in range(3):
        found = [await case.store.find_batch("a", f"batch_{each}") for each in range(3)]
        ended = [each is not None and each.status == "expired" for each in found]
        assert sum(ended) == number
        assert await case.store.claim("one", [], 9, 0) == []
    case.store.check_integrity()


async def test_an_answer_without_room_becomes_an_error() -> None:
    case = make(StorageConfig(tenant_gb=MIB))
    await case.store.add_batch(*batch(case, "batch_1", "a", 3))
    for line in await case.store.claim("one", [], 3, 0):
        await answer(case.store, line, "x" * 600_000)
    found = await case.store.find_batch("a", "batch_1")
    assert found is not None
    assert (found.completed, found.failed) == (1, 2)
    errors = await content(case.store, "a", found.error_file_id)
    assert [line["error"]["code"] for line in errors] == ["storage_full"] * 2
    case.store.check_integrity()


async def test_the_answers_of_a_batch_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A larger file would be beyond SQLite's bound, and the batch could not end."""
    monkeypatch.setattr("tandem.router.storage.batches.MAX_ANSWER_BYTES", 1_000)
    case = make()
    await case.store.add_batch(*batch(case, "batch_1", "a", 3))
    for line in await case.store.claim("one", [], 3, 0):
        await answer(case.store, line, "x" * 600)
    found = await case.store.find_batch("a", "batch_1")
    assert found is not None
    assert (found.status, found.completed, found.failed) == ("completed", 1, 2)
    errors = await content(case.store, "a", found.error_file_id)
    assert [line["error"]["code"] for line in errors] == ["storage_full"] * 2
    case.store.check_integrity()


NAMES = ("claim", "claim", "answer", "late", "late", "release", "wait", "restart", "cancel")
ACTIONS = st.lists(
    st.tuples(st.sampled_from(NAMES), st.integers(0, 1), st.integers(1, 3)),
    min_size=10,
    max_size=40,
)


@settings(max_examples=60, deadline=None)
@given(sizes=st.lists(st.integers(2, 6), min_size=1, max_size=2), actions=ACTIONS)
async def test_each_line_is_answered_exactly_once(
    sizes: Sequence[int], actions: Sequence[tuple[str, int, int]], tmp_path_factory: Any
) -> None:
    """Whatever routers and the store do, and in whatever order."""
    case = make(StorageConfig(folder=str(tmp_path_factory.mktemp("state"))))
    for i, size in enumerate(sizes):
        await case.store.add_batch(*batch(case, f"batch_{i}", f"t{i % 2}", size))
    held: dict[int, list[BatchLine]] = {0: [], 1: []}
    lost: list[BatchLine] = []
    cancelled = set()
    for action, runner, number in actions:
        lines = held[runner]
        if action == "claim":
            keys = [(each.batch_id, each.number) for each in lines]
            lines += await case.store.claim(str(runner), keys, number, 0)
        elif action == "answer" and lines:
            await answer(case.store, lines.pop(number % len(lines)))
        elif action == "late" and lost:
            await answer(case.store, lost[number % len(lost)], "late")
        elif action == "release":
            await case.store.release(str(runner))
            lost += lines
            lines.clear()
        elif action == "wait":
            case.clock.now += LEASE_SECONDS
        elif action == "restart":
            case.restart()
        elif action == "cancel" and number == 3 and runner < len(sizes):
            await case.store.cancel_batch(f"t{runner}", f"batch_{runner}")
            cancelled.add(runner)
    case.clock.now += LEASE_SECONDS + 1
    while lines := await case.store.claim("last", [], 9, 0):
        for line in lines:
            await answer(case.store, line)
    for i, size in enumerate(sizes):
        tenant = f"t{i % 2}"
        found = await case.store.find_batch(tenant, f"batch_{i}")
        assert found is not None
        answers = await content(case.store, tenant, found.output_file_id)
        ids = [line["custom_id"] for line in answers]
        assert len(set(ids)) == len(ids) == found.completed
        if i not in cancelled or found.status == "completed":
            assert found.status == "completed"
            assert ids == [f"batch_{i}-{number}" for number in range(size)]
        else:
            assert found.status == "cancelled"
    case.store.check_integrity()
    case.store.close()


def usage(day: str, key_name: str = "laptop", tenant: str = "ada", count: int = 1) -> KeyUsage:
    return KeyUsage(
        day=day,
        key_name=key_name,
        tenant=tenant,
        requests=count,
        failed=0,
        prompt_tokens=10 * count,
        cached_tokens=4 * count,
        generated_tokens=7 * count,
    )


async def test_usage_adds_up_and_outlives_the_process(tmp_path: Path) -> None:
    case = make(StorageConfig(folder=str(tmp_path)))
    case.clock.now = 1_764_000_000.0  # 2025-11-24
    await case.store.add_usage("one", 1, [usage("2025-11-23"), usage("2025-11-24", "phone")])
    await case.store.add_usage("two", 1, [usage("2025-11-23", count=2)])
    await case.store.add_usage("one", 2, [usage("2025-11-24", count=3)])
    await case.store.add_usage("two", 2, [usage("2025-11-24", "laptop", "bob")])
    expected = [
        usage("2025-11-24", count=3),
        usage("2025-11-24", "laptop", "bob"),
        usage("2025-11-24", "phone"),
        usage("2025-11-23", count=3),
    ]
    assert await case.store.find_usage("2025-01-01") == expected
    case.restart()
    assert await case.store.find_usage("2025-01-01") == expected
    assert await case.store.find_usage("2025-11-24") == expected[:3]
    phone = Owner(tenant="ada", key_name="phone")
    assert await case.store.find_usage("2025-01-01", phone) == [expected[2]]


async def test_a_repeated_report_of_usage_counts_once() -> None:
    case = make()
    for number in (1, 1, 2, 1, 2):
        await case.store.add_usage("one", number, [usage("2025-11-24")])
    assert await case.store.find_usage("2025-01-01") == [usage("2025-11-24", count=2)]


async def test_a_report_that_is_repeated_after_a_restart_of_the_store_counts_once(
    tmp_path: Path,
) -> None:
    """The store may end between the commit of a report and its answer."""
    case = make(StorageConfig(folder=str(tmp_path)))
    await case.store.add_usage("one", 7, [usage("2025-11-24")])
    case.restart()
    await case.store.add_usage("one", 7, [usage("2025-11-24")])
    await case.store.add_usage("one", 8, [usage("2025-11-24")])
    assert await case.store.find_usage("2025-01-01") == [usage("2025-11-24", count=2)]


async def test_the_latest_sources_of_usage_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tandem.router.storage.usage._MAX_SOURCES", 2)
    case = make()
    for source, number in (("one", 1), ("two", 1), ("one", 2), ("three", 1)):
        await case.store.add_usage(source, number, [])
    for source, number in (("one", 2), ("three", 1), ("two", 1)):
        await case.store.add_usage(source, number, [usage("2025-11-24")])
    assert await case.store.find_usage("2025-01-01") == [usage("2025-11-24")]


async def test_old_usage_is_deleted() -> None:
    case = make()
    case.clock.now = 1_764_000_000.0
    await case.store.add_usage("one", 1, [usage("2025-11-24")])
    case.clock.now += (KEPT_DAYS + 1) * 86_400
    await case.store.add_usage("one", 2, [usage("2027-01-01")])
    assert await case.store.find_usage("2000-01-01") == [usage("2027-01-01")]
