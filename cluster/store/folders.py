"""Publishes a finished folder by one rename, holds it while it is in use, removes old folders."""

import fcntl
import os
import shutil
from contextlib import suppress
from pathlib import Path

_kept: dict[Path, int] = {}  # open files, with a lock, of the folders that this process uses


def publish(made: Path, folder: Path) -> None:
    """Renames `made` to `folder`, after making its files readable for all and durable.

    Leaves subfolders as they are.
    """
    for path in made.iterdir():
        if path.is_file():
            # safetensors writes 0600, which a service of another user cannot read.
            path.chmod(0o644)
            with path.open("rb") as file:
                os.fsync(file.fileno())
    _sync_folder(made)
    made.rename(folder)
    _sync_folder(folder.parent)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def keep(folder: Path) -> None:
    """Holds a lock of the folder until this process ends, so that no other process removes it."""
    if folder in _kept:
        return
    file = os.open(folder / "config.json", os.O_RDONLY | os.O_CLOEXEC)
    fcntl.flock(file, fcntl.LOCK_SH)
    os.stat(folder)  # another process may have removed it before this one got the lock
    _kept[folder] = file


def drop_unused(used: Path, num_kept: int, locked: str) -> None:
    """Removes the folders beside `used` except the `num_kept` most recently used and those in use.

    A process that uses a folder locks the file `locked` in it. A folder that cannot be removed
    stays, since `used` does not need its room.
    """
    with suppress(OSError):  # `used` is complete also on a disk that cannot be written
        os.utime(used)
        home = used.parent
        for garbage in home.glob(".*.old/"):
            shutil.rmtree(garbage, ignore_errors=True)  # left by a killed process
        for folder in _old_folders(home, num_kept):
            # NFS grants an exclusive lock only of a file that is open for writing.
            with suppress(OSError), (folder / locked).open("r+b") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # The rename removes it at once: nobody must take a part of it for a model.
                shutil.rmtree(folder.rename(home / f".{folder.name}.old"))


def _old_folders(home: Path, num_kept: int) -> list[Path]:
    """Returns the finished folders in `home` except the `num_kept` most recently used."""
    used_at: dict[Path, float] = {}
    for path in home.iterdir():
        with suppress(OSError):  # another process has just removed it
            if path.is_dir() and not path.name.startswith("."):
                used_at[path] = path.stat().st_mtime
    return sorted(used_at, key=used_at.__getitem__, reverse=True)[num_kept:]
