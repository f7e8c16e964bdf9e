"""Downloads models from the Hugging Face hub into its cache: safetensors, configs and tokenizers
only.
"""

import hashlib
import logging
import re
from pathlib import Path
from typing import Final

import httpx2
from huggingface_hub import snapshot_download
from huggingface_hub.constants import HF_HUB_CACHE
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils.tqdm import disable_progress_bars, enable_progress_bars

from ...proto.errors import InvalidArgument, NotFound, PermissionDenied, Unavailable

ANSWER_DEADLINE_S: Final = 10.0
"""For the hub's first response and for every file's headers; the download of a large model has no
deadline.
"""

_HASH_BYTES: Final = 2**20
_WANTED: Final = ["*.safetensors", "*.json", "*.jinja", "tokenizer.model", "merges.txt"]
_UNWANTED: Final = [
    "*/*.safetensors",
    "*/*.json",
    "consolidated*",
]  # of other formats, which would double the download


def download_snapshot(repo_id: str, revision: str | None = None, *, progress: bool = False) -> Path:
    """Returns the folder of a revision of `repo_id`, by default the newest, after downloading what
    the cache lacks.

    The content of every file is checked against the hash under which the hub keeps it. When the hub
    cannot be reached, the revision in the cache is returned. Raises NotFound, PermissionDenied
    (gated), InvalidArgument (not a repository's name, no such revision) or Unavailable (unreachable
    and not in the cache, broken off, changed, or no room to store it).
    """
    (enable_progress_bars if progress else disable_progress_bars)()
    # Its retries would print a dozen warnings before the one line below.
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    try:
        folder = snapshot_download(
            repo_id,
            revision=revision,
            allow_patterns=_WANTED,
            ignore_patterns=_UNWANTED,
            etag_timeout=ANSWER_DEADLINE_S,
        )
    except HFValidationError as error:
        raise InvalidArgument(
            f"{repo_id!r} is not a name the Hugging Face hub allows", "model"
        ) from error
    except GatedRepoError as error:
        raise PermissionDenied(
            f"model: {repo_id} is gated on the Hugging Face hub; accept its terms, log in"
        ) from error
    except RevisionNotFoundError as error:
        raise InvalidArgument(f"{repo_id} has no revision {revision!r}", "model") from error
    except RepositoryNotFoundError as error:
        raise NotFound(
            f"model: there is no folder {repo_id} and no public model {repo_id} on the hub"
        ) from error
    except (FileNotFoundError, HfHubHTTPError, httpx2.TransportError) as error:
        text = f"{repo_id} is no folder here, not in the cache, and the Hugging Face hub does not deliver it (offline?)"
        raise Unavailable(f"model: {text}") from error
    except OSError as error:
        text = f"{error.filename or HF_HUB_CACHE}: {error.strerror}; set HF_HOME to a folder that can be written"
        raise Unavailable(f"model: {repo_id} cannot be stored: {text}") from error
    except (ImportError, ValueError) as error:  # of httpx, at a proxy or a URL that it cannot use
        text = f"the Hugging Face hub cannot be asked for {repo_id}: {' '.join(str(error).split())}"
        raise Unavailable(f"model: {text} (https_proxy, all_proxy, HF_ENDPOINT)") from error
    _check_hashes(Path(folder))
    return Path(folder)


def _check_hashes(folder: Path) -> None:
    """Raises Unavailable for a file whose content is not what its name in the cache says: its
    SHA-256, or for small files git's SHA-1. That is the name in the repository's own blobs, which
    may be links to blobs that all repositories share, whose names are hashes of another kind.
    """
    for path in sorted(folder.rglob("*")):
        name = path.readlink().name if path.is_symlink() else path.name
        if not re.fullmatch(r"[0-9a-f]{40}|[0-9a-f]{64}", name):
            continue  # of another kind of server than the hub
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
