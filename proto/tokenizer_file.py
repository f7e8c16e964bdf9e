"""Finds the tokenizer.json of a model's folder: in the folder, or in this user's cache if it had to
be made.

Routers and workers read it; `cluster/store` makes it. Nothing is written into a model's folder.
"""

import hashlib
import os
from pathlib import Path
from typing import Final

from platformdirs import user_cache_path

TOKENIZER_FILE: Final = "tokenizer.json"

_SOURCES: Final = (("tokenizer.model",), ("vocab.json", "merges.txt"))
_OTHERS: Final = (
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "config.json",
)
_FORMAT: Final = 1  # of what is made; another one makes new files


def tokenizer_file(folder: Path) -> Path:
    """Returns the path of a model's tokenizer.json, whether the file is there or not."""
    own = folder / TOKENIZER_FILE
    if tokenizer_sources(folder) is None or own.exists():
        return own
    made = made_tokenizer_file(folder)
    return made if made.is_file() else own


def tokenizer_sources(folder: Path) -> tuple[str, ...] | None:
    """Returns the older files of a folder of which tokenizer.json can be made; None if it has none."""
    return next(
        (names for names in _SOURCES if all((folder / name).is_file() for name in names)), None
    )


def made_tokenizer_file(folder: Path) -> Path:
    """Returns where the tokenizer.json of a folder that lacks one is kept: below
    `$TANDEM_HOME/models`, else below `models` in the user's cache folder. Another content of the
    folder has another path.
    """
    key = hashlib.sha256(f"{_FORMAT} {folder.resolve()}".encode())
    for name in (*(tokenizer_sources(folder) or ()), *_OTHERS):
        if (folder / name).is_file():
            status = (folder / name).stat()
            key.update(f" {name} {status.st_size} {status.st_mtime_ns}".encode())
    home = os.environ.get("TANDEM_HOME")
    cache = Path(home).expanduser() if home else user_cache_path("tandem")
    return cache / "models" / "tokenizers" / key.hexdigest()[:32] / TOKENIZER_FILE
