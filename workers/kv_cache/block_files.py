"""Keeps blocks of KV cache as files in a folder of bounded size, where a later process finds them.

Knows hashes and bytes. Knows nothing of engines, sequences or tensors.
"""

import fcntl
import os
import re
import stat
import struct
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final, Self

from crc32c import crc32c

# Magic with the version, crc32c of the following bytes, kind of the blocks, hash. The block's bytes
# follow.
_HEADER: Final = struct.Struct(">4sI16s16s")
_MAGIC: Final = b"TKV1"
_NAME: Final = re.compile(r"([0-9a-f]{32})-([0-9a-f]{32})\.kv")
_TEMPORARY: Final = "writing.tmp"
_PAGE: Final = 4096  # bytes of a disk page; a file takes whole pages
_MAX_FOLDERS: Final = 1_024


class BlockFiles:
    """Keeps each block in a file named after its kind and hash; evicts the least recently used.

    All files, including the one that is being written, never exceed the bound, even if the process
    is killed: a write first makes room. A file gets its final name only when it is complete. A file
    that is damaged nevertheless is detected by its length or checksum, and is removed. Files of
    other kinds of blocks also count, and are evicted first.

    Thread-safe, with one thread that writes.
    """

    def __init__(
        self, folder: int, number: int, *, kind: bytes, block_bytes: int, max_bytes: int
    ) -> None:
        """Adopts the files of a folder; `folder` is its locked descriptor, see `open`."""
        self.max_bytes = max_bytes
        self.number = number  # the folder's number
        self._folder = folder
        self._kind = kind
        self._size = _HEADER.size + block_bytes
        self._lock = threading.Lock()
        self._files: OrderedDict[str, int] = OrderedDict()  # sizes by name; next to evict first
        self._num_bytes = 0
        self._changed: dict[bytes, None] = {}  # ordered set of hashes since `take_changes`
        self._adopt()

    @classmethod
    def open(
        cls,
        parent: Path,
        role: str,
        *,
        kind: bytes,
        block_bytes: int,
        max_bytes: int,
        number: int = 0,
    ) -> Self:
        """Opens the first folder of ROLE-NUMBER, ROLE-0, ROLE-1, ... that nobody else uses.

        The folders are in `parent`. Makes the folder if needed. `kind` is 16 bytes; blocks that
        must not be mixed up have different kinds.

        Raises ValueError, with one line for the user, if max_bytes holds no block or the folder
        cannot be used.
        """
        least = _on_disk(_HEADER.size + block_bytes)
        if max_bytes < least:
            raise ValueError(
                f"kv_disk_gb: {max_bytes} bytes hold no block; it must be at least {least} bytes"
            )
        try:
            folder, number = _open_folder(parent, role, number)
            try:
                return cls(folder, number, kind=kind, block_bytes=block_bytes, max_bytes=max_bytes)
            except BaseException:
                os.close(folder)
                raise
        except OSError as error:
            raise ValueError(f"kv_disk: {error.filename or parent}: {error.strerror}") from error

    def __contains__(self, digest: bytes) -> bool:
        return self._name(digest) in self._files

    def __len__(self) -> int:
        return len(self._files)

    @property
    def num_bytes(self) -> int:
        """Returns the bytes of disk that the files take, including the file being written."""
        return self._num_bytes

    def close(self) -> None:
        """Closes the folder, so that another process may use it."""
        with self._lock:
            self._files.clear()  # a `clear` that still runs ends
            os.close(self._folder)

    def take_changes(self) -> tuple[list[bytes], list[bytes]]:
        """Returns the hashes that were stored and those that were evicted since the last call.

        The first call includes the adopted files.
        """
        with self._lock:
            changed = self._changed
            self._changed = {}
        stored = [digest for digest in changed if digest in self]
        evicted = [digest for digest in changed if digest not in self]
        return stored, evicted

    def write(self, digest: bytes, parts: Sequence[memoryview]) -> None:
        """Writes a block, the concatenation of `parts`, unless it is here already.

        Raises OSError if the disk refuses it.
        """
        name = self._name(digest)
        size = _on_disk(self._size)
        with self._lock:
            if name in self._files:
                return
            while self._num_bytes + size > self.max_bytes:
                self._remove(next(iter(self._files)))
            self._num_bytes += size
        try:
            descriptor = os.open(
                _TEMPORARY,
                os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC,
                mode=0o600,
                dir_fd=self._folder,
            )
            with os.fdopen(descriptor, "wb") as file:
                file.write(self._header(digest, parts))
                for part in parts:
                    file.write(part)
                _touch(file.fileno())
            os.rename(_TEMPORARY, name, src_dir_fd=self._folder, dst_dir_fd=self._folder)
        except BaseException:
            with suppress(OSError):
                os.unlink(_TEMPORARY, dir_fd=self._folder)
            with self._lock:
                self._num_bytes -= size
            raise
        with self._lock:
            self._files[name] = size
            self._changed[digest] = None

    def read(self, digest: bytes) -> memoryview | None:
        """Returns the bytes of a block and makes it the most recently used.

        Returns None if the block is missing, damaged or unreadable; removes such a file, unless
        the disk refuses that.
        """
        name = self._name(digest)
        try:
            # Not blocking, because the file might be a pipe.
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            with os.fdopen(os.open(name, flags, dir_fd=self._folder), "rb") as file:
                data = memoryview(file.read(self._size + 1))
                with suppress(OSError):  # the disk may have become read-only
                    _touch(file.fileno())
        except OSError:
            data = memoryview(b"")
        payload = data[_HEADER.size :]
        is_whole = len(data) == self._size and data[: _HEADER.size] == self._header(
            digest, [payload]
        )
        with self._lock:
            if is_whole and name in self._files:
                self._files.move_to_end(name)
            elif name in self._files:
                with suppress(OSError):
                    self._remove(name)
        return payload if is_whole else None

    def clear(self) -> None:
        """Removes all files, also of other kinds; no write may run meanwhile.

        Raises OSError if the disk refuses it.
        """
        with self._lock:
            names = list(self._files)
        for name in names:
            with self._lock:  # for one file, so that nobody waits for all of them
                if name in self._files:
                    self._remove(name)

    def _header(self, digest: bytes, parts: Sequence[memoryview]) -> bytes:
        checksum = crc32c(self._kind + digest)
        for part in parts:
            checksum = crc32c(part, checksum)
        return _HEADER.pack(_MAGIC, checksum, self._kind, digest)

    def _name(self, digest: bytes) -> str:
        return f"{self._kind.hex()}-{digest.hex()}.kv"

    def _adopt(self) -> None:
        """Adopts the files of an earlier process.

        Removes the file that it was writing, and the oldest files beyond the bound. Does not touch
        files of other names.
        """
        found: list[tuple[int, str, int]] = []
        with os.scandir(self._folder) as entries:
            for entry in entries:
                if entry.name == _TEMPORARY:
                    os.unlink(_TEMPORARY, dir_fd=self._folder)
                elif _NAME.fullmatch(entry.name):
                    status = entry.stat(follow_symlinks=False)
                    found.append((status.st_mtime_ns, entry.name, _on_disk(status.st_size)))
        kind = self._kind.hex()
        for _, name, size in sorted(found, key=lambda file: (file[1].startswith(kind), *file)):
            self._files[name] = size
            self._num_bytes += size
        while self._num_bytes > self.max_bytes:
            self._remove(next(iter(self._files)))
        self._changed = {digest: None for name in self._files if (digest := self._digest(name))}

    def _remove(self, name: str) -> None:
        with suppress(FileNotFoundError):
            os.unlink(name, dir_fd=self._folder)
        self._num_bytes -= self._files.pop(name)
        if digest := self._digest(name):
            self._changed[digest] = None

    def _digest(self, name: str) -> bytes | None:
        """Returns the hash of a file of this kind, or None for another kind."""
        if bytes.fromhex(name[:32]) != self._kind:
            return None
        return bytes.fromhex(name[33:65])


def _on_disk(num_bytes: int) -> int:
    return -(-num_bytes // _PAGE) * _PAGE


def _touch(file: int) -> None:
    """Makes a file the most recently used one, also for a later process.

    Sets the time itself, because the kernel's clock for files has steps of milliseconds.
    """
    now = time.time_ns()
    os.utime(file, ns=(now, now))


def _open_folder(parent: Path, role: str, first: int) -> tuple[int, int]:
    """Returns the descriptor and the number of a folder; the lock lasts until it is closed.

    Raises OSError.
    """
    os.makedirs(parent, mode=0o700, exist_ok=True)
    for number in (first, *range(_MAX_FOLDERS)):
        path = str(parent / f"{role}-{number}")
        with suppress(FileExistsError):
            os.mkdir(path, mode=0o700)
        folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            status = os.fstat(folder)
            if status.st_uid != os.geteuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
                raise OSError(0, "belongs to another user, or other users may write to it", path)
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return folder, number
        except BlockingIOError:
            os.close(folder)
        except BaseException:
            os.close(folder)
            raise
    raise OSError(0, f"all {_MAX_FOLDERS} folders are in use", str(parent))
