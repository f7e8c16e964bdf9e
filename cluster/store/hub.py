"""Downloads safetensors, configurations and tokenizers from the Hugging Face hub into its cache."""

import hashlib
import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import httpx2
from huggingface_hub import HfApi, hf_hub_download, snapshot_download
from huggingface_hub.constants import HF_HUB_CACHE
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    OfflineModeIsEnabled,
    RemoteEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from ...proto.errors import InvalidArgument, NotFound, PermissionDenied, Unavailable
from . import pooling

ANSWER_DEADLINE_S: Final = 10.0
"""For the hub's first response and for every file's headers; a large file's download has none."""

_HASH_BYTES: Final = 2**20
_WANTED: Final = ["*.safetensors", "*.json", "*.jinja", "tokenizer.model", "merges.txt"]
# Copies in other formats, which would double the download.
_UNWANTED: Final = ["*/*.safetensors", "*/*.json", "consolidated*"]
# Paths that a shell takes as they are: an error shows one of them in a command.
_GGUF: Final = re.compile(r"\w[\w./-]*\.gguf", re.ASCII)


def download_snapshot(repo_id: str, revision: str | None) -> Path:
    """Returns the folder of a revision of `repo_id`, with all files; None: the newest.

    Checks the content of every file against the hash by which the hub stores it. Returns the
    revision in the cache if the hub cannot be reached. Raises NotFound, PermissionDenied (gated),
    InvalidArgument (invalid name, unknown revision, or no safetensors) or Unavailable (unreachable
    and not in the cache, incomplete, modified, or no room on the disk).
    """
    with _refusals(repo_id, revision):
        names = _file_names(repo_id, revision)
        is_unreachable = names is None
        if names:
            _check_has_weights(repo_id, names)
        folder = snapshot_download(
            repo_id,
            revision=revision,
            allow_patterns=_WANTED,
            ignore_patterns=_UNWANTED,
            local_files_only=is_unreachable,
            etag_timeout=ANSWER_DEADLINE_S,
        )
        # Its own download: _UNWANTED matches these files, and patterns have no exceptions.
        if Path(folder, pooling.FILE).exists():
            snapshot_download(
                repo_id,
                revision=Path(folder).name,
                allow_patterns=pooling.CONFIGS,
                local_files_only=is_unreachable,
                etag_timeout=ANSWER_DEADLINE_S,
            )
    _check_hashes(Path(folder))
    return Path(folder)


def download_config(repo_id: str, revision: str | None) -> Path:
    """Returns config.json of a revision of `repo_id`; fetches no weights.

    Raises as `download_snapshot`, and NotFound for a repository without this file.
    """
    with _refusals(repo_id, revision):
        try:
            return Path(
                hf_hub_download(
                    repo_id,
                    "config.json",
                    revision=revision,
                    local_files_only=_file_names(repo_id, revision) is None,
                    etag_timeout=ANSWER_DEADLINE_S,
                )
            )
        except RemoteEntryNotFoundError as error:
            raise NotFound(f"model: {repo_id} has no config.json on the hub") from error


def _file_names(repo_id: str, revision: str | None) -> list[str] | None:
    """Asks the hub once for the names of the files; returns None if it is down or does not answer.

    The library's downloads would ask again for 23 s and more. They report all other refusals, for
    which the list is empty.
    """
    try:
        info = HfApi().model_info(repo_id, revision=revision, timeout=ANSWER_DEADLINE_S)
    except (httpx2.TransportError, OfflineModeIsEnabled):
        return None
    except HfHubHTTPError as error:
        return None if error.response.is_server_error else []
    return [each.rfilename for each in info.siblings or ()]


def _check_has_weights(repo_id: str, names: list[str]) -> None:
    """Raises InvalidArgument if a repository has no safetensors beside its config.json."""
    if any(name.endswith(".safetensors") and "/" not in name for name in names):
        return
    text = f"{repo_id} has no safetensors weights on the hub"
    if gguf := next(filter(_GGUF.fullmatch, names), None):
        command = f"hf download {repo_id} {gguf}"
        text += f", but GGUF files: `{command}`, for example, prints the path to give"
    raise InvalidArgument(text, "model")


@contextmanager
def _refusals(repo_id: str, revision: str | None) -> Iterator[None]:
    """Turns each error of a download into one line; raises as `download_snapshot`."""
    # The library's retries would print a dozen warnings before the one line below.
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    try:
        yield
    except HFValidationError as error:
        raise InvalidArgument(
            f"{repo_id!r} is not a valid name on the Hugging Face hub", "model"
        ) from error
    except GatedRepoError as error:
        raise PermissionDenied(
            f"model: {repo_id} is gated on the Hugging Face hub; accept its terms on "
            "huggingface.co, and set HF_TOKEN"
        ) from error
    except RevisionNotFoundError as error:
        raise InvalidArgument(f"{repo_id} has no revision {revision!r}", "model") from error
    except RepositoryNotFoundError as error:
        raise NotFound(
            f"model: there is no folder {repo_id} and no public model {repo_id} on the hub"
        ) from error
    except (FileNotFoundError, HfHubHTTPError, httpx2.TransportError) as error:
        raise Unavailable(
            f"model: {repo_id} is not a local folder, is not in the cache, and cannot be "
            "downloaded from the Hugging Face hub; offline, give a local folder, or set HF_HOME to "
            "a cache that has it"
        ) from error
    except OSError as error:
        raise Unavailable(
            f"model: {repo_id} cannot be stored: {error.filename or HF_HUB_CACHE}: "
            f"{error.strerror}; set HF_HOME to a folder that can be written"
        ) from error
    except (ImportError, ValueError) as error:  # httpx raises them for an unusable proxy or URL
        raise Unavailable(
            f"model: the Hugging Face hub cannot be asked for {repo_id}: "
            f"{' '.join(str(error).split())} (https_proxy, all_proxy, HF_ENDPOINT)"
        ) from error


def _check_hashes(folder: Path) -> None:
    """Raises Unavailable for a file whose hash is not its name in the cache.

    The hash is SHA-256, or for small files git's SHA-1. It is the name in the repository's blobs;
    these may be links to blobs that repositories share, named by another kind of hash.
    """
    for path in sorted(folder.rglob("*")):
        name = path.readlink().name if path.is_symlink() else path.name
        if not re.fullmatch(r"[0-9a-f]{40}|[0-9a-f]{64}", name):
            continue  # another kind of server than the hub chose the name
        digest = hashlib.sha256() if len(name) == 64 else hashlib.sha1(usedforsecurity=False)
        if len(name) == 40:
            digest.update(b"blob %d\0" % path.stat().st_size)
        with path.open("rb") as file:
            while block := file.read(_HASH_BYTES):
                digest.update(block)
        if digest.hexdigest() != name:
            raise Unavailable(
                f"model: {path.name} in the cache of the hub is not the published file; remove it"
            )
