"""Tests the file of keys: written entries, refused files, and detected changes."""

import json
import logging
import os
import stat
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from tandem.proto.errors import InvalidArgument, NotFound
from tandem.router.auth.keys import (
    KEY_PREFIX,
    MAX_FILE_BYTES,
    ApiKey,
    create_key,
    hash_key,
    load_keys,
    parse_expiry,
    revoke_key,
)
from tandem.router.auth.watch import FileWatch

DIGEST = "0" * 64


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "keys.json"


def write(path: Path, *keys: Any) -> None:
    path.write_text(json.dumps({"keys": keys}))


def remove(path: Path) -> None:
    path.unlink()


def entry(**fields: Any) -> dict[str, Any]:
    return {"name": "n", "tenant": "t", "sha256": DIGEST} | fields


def test_the_file_has_a_digest_and_no_key(path: Path) -> None:
    secret = create_key(path, name="laptop", tenant="ada", max_priority=5, requests_per_minute=60)
    assert secret.startswith(KEY_PREFIX)
    assert len(secret) == len(KEY_PREFIX) + 43  # 256 bits
    (key,) = load_keys(path)
    assert (key.name, key.tenant, key.max_priority, key.requests_per_minute) == (
        "laptop",
        "ada",
        5,
        60,
    )
    assert key.sha256 == hash_key(secret).hex()
    assert secret.removeprefix(KEY_PREFIX) not in path.read_text()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert list(path.parent.iterdir()) == [path]


def test_keys_are_added_and_revoked_by_name(path: Path) -> None:
    secrets = {create_key(path, name=name, tenant="t") for name in ("a", "b", "c")}
    assert len(secrets) == 3
    with pytest.raises(InvalidArgument, match="name: another key"):
        create_key(path, name="b", tenant="t")
    path.chmod(0o640)
    revoke_key(path, "b")
    assert [key.name for key in load_keys(path)] == ["a", "c"]
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    with pytest.raises(NotFound):
        revoke_key(path, "b")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give a file to another user")
def test_the_owner_of_the_file_stays(path: Path) -> None:
    """Otherwise, after `sudo tandem key revoke`, the router cannot read the file any more."""
    create_key(path, name="a", tenant="t")
    create_key(path, name="b", tenant="t")
    os.chown(path, 1234, 5678)
    revoke_key(path, "a")
    assert (path.stat().st_uid, path.stat().st_gid) == (1234, 5678)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_file_whose_owner_cannot_be_kept_is_not_replaced(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    create_key(path, name="a", tenant="t")
    before = path.read_bytes()

    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "chown", refuse)
    with pytest.raises(InvalidArgument, match="run the command as the owner of the file or root"):
        revoke_key(path, "a")
    assert path.read_bytes() == before
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"name": ""}, "name"),
        ({"name": "a b"}, "name"),
        ({"tenant": "a/b"}, "tenant"),
        ({"tenant": "a" * 65}, "tenant"),
        ({"max_priority": 101}, "max_priority"),
        ({"requests_per_minute": 0}, "requests_per_minute"),
        ({"tokens_per_minute": -1}, "tokens_per_minute"),
        ({"max_streams": 0}, "max_streams"),
        ({"expires": datetime(2027, 1, 1)}, "expires"),  # no zone
    ],
)
def test_a_wrong_field_is_named_and_nothing_is_written(
    path: Path, fields: dict[str, Any], named: str
) -> None:
    with pytest.raises(InvalidArgument) as caught:
        create_key(path, **({"name": "n", "tenant": "t"} | fields))
    assert caught.value.field == named
    assert not path.exists()


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("", "Invalid JSON"),
        ("[]", "object"),
        ('{"keys": [], "kyes": []}', "kyes"),
        (json.dumps({"keys": [entry(sha256="secret")]}), "keys.0.sha256"),
        (json.dumps({"keys": [entry(key="secret")]}), "keys.0.key"),
        (json.dumps({"keys": [entry(max_streams="8")]}), "keys.0.max_streams"),
        (json.dumps({"keys": [entry(), entry(name="m")]}), "same sha256"),
        (json.dumps({"keys": [entry(), entry(sha256="1" * 64)]}), "same name"),
        (" " * (MAX_FILE_BYTES + 1), "at most"),
    ],
)
def test_a_wrong_file_is_refused_in_one_line_without_its_values(
    path: Path, text: str, found: str
) -> None:
    path.write_text(text)
    with pytest.raises(InvalidArgument, match=found) as caught:
        load_keys(path)
    assert "\n" not in caught.value.message
    assert "secret" not in caught.value.message


def test_a_missing_file_is_refused(path: Path) -> None:
    with pytest.raises(InvalidArgument, match="No such file"):
        load_keys(path)
    with pytest.raises(InvalidArgument, match="No such file"):
        create_key(path / "absent" / "keys.json", name="n", tenant="t")


def test_an_expiry_without_a_zone_is_utc() -> None:
    assert parse_expiry("2027-01-31") == datetime(2027, 1, 31, tzinfo=UTC)
    assert parse_expiry("2027-01-31T12:00:00+02:00") == datetime(2027, 1, 31, 10, tzinfo=UTC)
    with pytest.raises(InvalidArgument, match="expires"):
        parse_expiry("soon")


async def test_a_changed_file_is_loaded_and_a_broken_one_is_not(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    taken: list[list[ApiKey]] = []
    create_key(path, name="a", tenant="t")
    watch = FileWatch([path], lambda: load_keys(path), taken.append)
    assert [[key.name for key in keys] for keys in taken] == [["a"]]
    await watch.check()
    assert len(taken) == 1
    create_key(path, name="b", tenant="t")
    await watch.check()
    assert [key.name for key in taken[-1]] == ["a", "b"]
    with caplog.at_level(logging.WARNING):
        write(path, {})
        for _ in range(3):
            await watch.check()
        remove(path)
        await watch.check()
    assert (len(taken), len(caplog.records)) == (2, 2)
    write(path, entry(name="c"))
    await watch.check()
    assert [key.name for key in taken[-1]] == ["c"]


async def test_a_reload_that_fails_for_a_while_is_tried_again(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A router without a free file descriptor must not accept a revoked key for ever."""
    taken: list[list[ApiKey]] = []
    reason = ""

    def load() -> list[ApiKey]:
        if reason:
            raise InvalidArgument(reason, "keys_file")
        return load_keys(path)

    write(path, entry(name="a"))
    watch = FileWatch([path], load, taken.append)
    write(path)
    with caplog.at_level(logging.WARNING):
        for each in ("Too many open files", "Too many open files", "Input/output error"):
            reason = each
            await watch.check()
        assert (len(taken), len(caplog.records)) == (1, 2)
        reason = ""
        await watch.check()
        assert taken[-1] == []
        write(path, entry(name="b"))
        reason = "Input/output error"
        await watch.check()
    assert len(caplog.records) == 3


async def test_a_link_to_another_folder_is_a_change(tmp_path: Path) -> None:
    """Kubernetes replaces mounted files in this way."""
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        write(tmp_path / name / "keys.json", entry(name=name))
    link = tmp_path / "current"
    link.symlink_to("one")
    taken: list[list[ApiKey]] = []
    watch = FileWatch([link / "keys.json"], lambda: load_keys(link / "keys.json"), taken.append)
    link.unlink()
    link.symlink_to("two")
    await watch.check()
    assert [[key.name for key in keys] for keys in taken] == [["one"], ["two"]]
