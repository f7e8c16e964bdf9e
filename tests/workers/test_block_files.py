"""Blocks of KV cache in files: what is read is what was written, the bound holds whenever the
process is killed.
"""

import errno
import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tandem.tests.examples import num_examples
from tandem.tests.waits import WAIT
from tandem.workers.kv_cache.block_files import BlockFiles

KIND, OTHER = b"k" * 16, b"o" * 16
PAYLOAD = 8_000  # with the header, two pages
FILE_BYTES = 8_192


def digest(number: int) -> bytes:
    return number.to_bytes(16)


def payload(number: int) -> bytes:
    return bytes([number % 251]) * PAYLOAD


def opened(folder: Path, max_files: int = 4, kind: bytes = KIND) -> BlockFiles:
    return BlockFiles.open(
        folder, "decode", kind=kind, block_bytes=PAYLOAD, max_bytes=max_files * FILE_BYTES
    )


def put(files: BlockFiles, *numbers: int) -> None:
    for number in numbers:
        data = memoryview(payload(number))
        files.write(digest(number), [data[:100], data[100:]])


def held(files: BlockFiles) -> list[int]:
    return [number for number in range(300) if digest(number) in files]


@pytest.fixture
def files(tmp_path: Path) -> Iterator[BlockFiles]:
    made = opened(tmp_path)
    yield made
    made.close()


class FilesMachine(RuleBasedStateMachine):
    """The model: which hashes there are, the next to leave first."""

    @initialize(max_files=st.integers(1, 5))
    def start(self, max_files: int) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.max_files = max_files
        self.files = opened(Path(self.folder.name), max_files)
        self.model: list[int] = []
        self.reported: set[bytes] = set()

    @rule(number=st.integers(0, 9))
    def write(self, number: int) -> None:
        put(self.files, number)
        if number not in self.model:
            self.model = [*self.model, number][-self.max_files :]

    @rule(number=st.integers(0, 9))
    def read(self, number: int) -> None:
        found = self.files.read(digest(number))
        assert (None if found is None else bytes(found)) == (
            payload(number) if number in self.model else None
        )
        if number in self.model:
            self.model.remove(number)
            self.model.append(number)

    @rule(number=st.integers(0, 9), size=st.integers(0, FILE_BYTES), flip=st.booleans())
    def damage(self, number: int, size: int, flip: bool) -> None:
        """Is noticed with the next read: the file leaves."""
        if number not in self.model:
            return
        (path,) = Path(self.folder.name).rglob(f"*-{digest(number).hex()}.kv")
        data = bytearray(path.read_bytes())
        if flip:
            data[size % len(data)] ^= 4
        else:
            del data[size % len(data) :]
        path.write_bytes(data)
        assert self.files.read(digest(number)) is None
        self.model.remove(number)

    @rule(max_files=st.integers(1, 5))
    def restart(self, max_files: int) -> None:
        """Another process has as many of the last ones as it has room for."""
        self.files.close()
        self.max_files, self.reported = max_files, set()
        self.files = opened(Path(self.folder.name), max_files)
        self.model = self.model[-max_files:]

    @rule()
    def clear(self) -> None:
        self.files.clear()
        self.model = []
        assert self.files.num_bytes == 0
        assert not list(Path(self.folder.name).rglob("*.kv"))

    @rule()
    def take_changes(self) -> None:
        stored, evicted = self.files.take_changes()
        self.reported = self.reported.difference(evicted).union(stored)
        assert self.reported == set(map(digest, self.model))

    @invariant()
    def the_folder_is_as_the_model(self) -> None:
        if hasattr(self, "files"):
            assert held(self.files) == sorted(self.model)
            assert (
                self.files.num_bytes
                == size_of(Path(self.folder.name))
                == len(self.model) * FILE_BYTES
            )

    def teardown(self) -> None:
        if hasattr(self, "files"):
            self.files.close()
            self.folder.cleanup()


TestFiles = FilesMachine.TestCase
TestFiles.settings = settings(max_examples=num_examples(60), stateful_step_count=30, database=None)


def size_of(folder: Path) -> int:
    """Bytes on disk of all files, in whole pages."""
    return sum(
        -(-path.stat().st_size // 4_096) * 4_096 for path in folder.rglob("*") if path.is_file()
    )


WRITER = """
import sys
from tandem.tests.workers.test_block_files import opened, put
from pathlib import Path
files = opened(Path(sys.argv[1]), max_files=6)
for number in range(10**9):
    put(files, number % 256)
    if number == 20:
        print("full", flush=True)
"""


@pytest.mark.io
def test_the_bound_holds_whenever_the_process_is_killed(tmp_path: Path) -> None:
    """Killed while it writes, several times: no more than the bound is there, and what is there is
    whole.
    """
    for _ in range(4):
        process = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE
        )
        try:
            assert process.stdout is not None
            assert select.select([process.stdout], [], [], WAIT)[0], "the process does not write"
            assert process.stdout.readline() == b"full\n"
        finally:
            process.send_signal(signal.SIGKILL)
            process.communicate(timeout=WAIT)
        assert FILE_BYTES < size_of(tmp_path) <= 6 * FILE_BYTES
        files = opened(tmp_path, max_files=6)
        numbers = held(files)
        assert len(numbers) >= 4
        assert all(files.read(digest(number)) == memoryview(payload(number)) for number in numbers)
        assert not list(tmp_path.rglob("*.tmp"))
        files.close()


def test_a_smaller_bound_holds_from_the_start(tmp_path: Path) -> None:
    files = opened(tmp_path, 5)
    put(files, *range(5))
    files.read(digest(0))
    files.close()
    files = opened(tmp_path, 2)
    assert held(files) == [0, 4]
    files.close()


def test_other_blocks_count_and_leave_first(tmp_path: Path) -> None:
    files = opened(tmp_path, kind=OTHER)
    put(files, 1, 2, 3)
    files.close()
    files = opened(tmp_path)
    assert (held(files), files.num_bytes) == ([], 3 * FILE_BYTES)
    put(files, 4, 5)
    assert (held(files), files.num_bytes) == ([4, 5], 4 * FILE_BYTES)
    put(files, 6, 7)
    assert held(files) == [4, 5, 6, 7]
    files.close()


def test_each_process_has_a_folder_of_its_own(tmp_path: Path, files: BlockFiles) -> None:
    other = opened(tmp_path)
    put(files, 1)
    put(other, 2)
    assert (held(files), held(other)) == ([1], [2])
    other.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["decode-0", "decode-1"]


def test_files_are_this_users_alone(tmp_path: Path, files: BlockFiles) -> None:
    put(files, 1)
    (path,) = tmp_path.rglob("*.kv")
    assert (path.stat().st_mode & 0o777, path.parent.stat().st_mode & 0o777) == (0o600, 0o700)


def test_links_are_not_followed(tmp_path: Path, files: BlockFiles) -> None:
    put(files, 1, 2)
    secret = tmp_path / "secret"
    secret.write_text("before")
    for number in (1, 2):
        (path,) = (tmp_path / "decode-0").glob(f"*{digest(number).hex()}.kv")
        path.unlink()
        path.symlink_to(secret)
    (tmp_path / "decode-0" / "writing.tmp").symlink_to(secret)
    assert files.read(digest(1)) is None
    with pytest.raises(OSError, match=r"writing\.tmp"):
        put(files, 3)
    put(files, 3)
    assert secret.read_text() == "before"
    assert held(files) == [2, 3]


def test_a_disk_that_has_become_read_only_is_still_read(
    tmp_path: Path, files: BlockFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(files, 1, 2)
    (path,) = tmp_path.rglob(f"*{digest(2).hex()}.kv")
    path.write_bytes(b"damaged")

    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(os, "utime", refuse)
    monkeypatch.setattr(os, "unlink", refuse)
    read = files.read(digest(1))
    assert read is not None
    assert bytes(read) == payload(1)
    assert files.read(digest(2)) is None


def test_what_is_not_ours_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "decode-0").mkdir(mode=0o700)
    (tmp_path / "decode-0" / "notes.txt").write_text("mine")
    files = opened(tmp_path, 1)
    put(files, 1, 2)
    assert (tmp_path / "decode-0" / "notes.txt").read_text() == "mine"
    files.close()


def test_a_folder_that_cannot_be_used_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match="kv_disk_gb: 0 bytes hold no block; it must be at least 8192"
    ):
        opened(tmp_path, 0)
    (tmp_path / "decode-0").symlink_to(tmp_path)
    with pytest.raises(ValueError, match=r"kv_disk: .*decode-0: Not a directory|Too many levels"):
        opened(tmp_path)
    (tmp_path / "decode-0").unlink()
    (tmp_path / "decode-0").mkdir()
    os.chmod(tmp_path / "decode-0", 0o777)
    with pytest.raises(
        ValueError, match=r"kv_disk: .*decode-0: belongs to another user, or other users may write"
    ):
        opened(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"kv_disk: .*file"):
        opened(tmp_path / "file")
