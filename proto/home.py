"""Finds the folder that keeps this user's files between runs, and the tokenizer.json of a model.

A tokenizer.json lies in the model's folder, or in the former if it had to be converted from other
files. Routers and workers read it; `cluster/store` converts it. Nothing is written into a model's
folder.
"""

import hashlib
import os
from pathlib import Path
from typing import Final

from platformdirs import user_cache_path

TOKENIZER_FILE: Final = "tokenizer.json"
TEKKEN_FILE: Final = "tekken.json"  # Mistral's own format

_SOURCES: Final = (("tokenizer.model",), ("vocab.json", "merges.txt"), (TEKKEN_FILE,))
_OTHERS: Final = (
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "config.json",
)
_FORMAT: Final = 1  # version of the conversion; a change makes new files


def cache_home() -> Path:
    """Returns the folder `$TANDEM_HOME`, or by default `tandem` in the user's cache folder.

    The folder holds fetched models, built kernels and the identities of services. It may not exist.
    """
    home = os.environ.get("TANDEM_HOME")
    return Path(os.path.expanduser(home)) if home else user_cache_path("tandem")


def tokenizer_file(folder: Path) -> Path:
    """Returns the path of a model's tokenizer.json, even if the file does not exist."""
    own = folder / TOKENIZER_FILE
    if tokenizer_sources(folder) is None or own.exists():
        return own
    made = made_tokenizer_file(folder)
    return made if made.is_file() else own


def tokenizer_sources(folder: Path) -> tuple[str, ...] | None:
    """Returns the other files from which tokenizer.json can be converted; None without them."""
    return next(
        (names for names in _SOURCES if all((folder / name).is_file() for name in names)), None
    )


def made_tokenizer_file(folder: Path) -> Path:
    """Returns the path of the converted tokenizer.json of a folder that has none of its own.

    The path is below `models` in `cache_home`. It changes with the content of the folder.
    """
    key = hashlib.sha256(f"{_FORMAT} {folder.resolve()}".encode())
    for name in (*(tokenizer_sources(folder) or ()), *_OTHERS):
        if (folder / name).is_file():
            status = (folder / name).stat()
            key.update(f" {name} {status.st_size} {status.st_mtime_ns}".encode())
    return cache_home() / "models" / "tokenizers" / key.hexdigest()[:32] / TOKENIZER_FILE
