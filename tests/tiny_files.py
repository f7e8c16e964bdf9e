"""Keeps the files of tiny random models: many tests make a model with the same arguments."""

import json
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

_MAX_KEPT: Final = 64  # models
_MAX_BYTES: Final = 2**22  # of each

_kept: dict[str, dict[str, bytes]] = {}  # by key: the files, the oldest model first


def write_once(folder: Path, key: dict[str, Any], write: Callable[[Path], object]) -> Path:
    """Writes the files of a model into `folder` (made if missing); returns the folder.

    `write` makes them if no model with this key, which JSON can express, is kept.
    """
    folder.mkdir(parents=True, exist_ok=True)
    name = json.dumps(key, sort_keys=True)
    files = _kept.get(name)
    if files is None:
        files = _files_of(write)
        if sum(map(len, files.values())) <= _MAX_BYTES:
            _kept[name] = files
        if len(_kept) > _MAX_KEPT:
            del _kept[next(iter(_kept))]
    for each, data in files.items():
        (folder / each).write_bytes(data)
    return folder


def _files_of(write: Callable[[Path], object]) -> dict[str, bytes]:
    with TemporaryDirectory() as folder:
        write(Path(folder))
        return {path.name: path.read_bytes() for path in Path(folder).iterdir()}
