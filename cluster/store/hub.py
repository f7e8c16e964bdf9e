"""Downloads models from the Hugging Face hub into its cache: safetensors, configs and tokenizers only."""

import logging
from pathlib import Path
from typing import Final

import httpx2
from huggingface_hub import snapshot_download
from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, HFValidationError, RepositoryNotFoundError
from huggingface_hub.utils.tqdm import disable_progress_bars, enable_progress_bars

from ...proto.errors import InvalidArgument, NotFound, PermissionDenied, Unavailable

ANSWER_DEADLINE_S: Final = 10.0
"""For the hub's first response and for every file's headers; the download of a large model has no deadline."""

_WANTED: Final = ["*.safetensors", "*.json", "*.jinja", "tokenizer.model"]
_UNWANTED: Final = ["*/*", "consolidated*"]  # other formats of the same weights, which would double the download


def download_snapshot(repo_id: str, *, progress: bool = False) -> Path:
    """Returns the folder of the newest revision of `repo_id`, after downloading what the cache lacks.

    When the hub cannot be reached, the revision in the cache is returned. Raises NotFound, PermissionDenied (gated),
    InvalidArgument (not a repository's name) or Unavailable (unreachable and not in the cache, or broken off).
    """
    (enable_progress_bars if progress else disable_progress_bars)()
    # Its retries would print a dozen warnings before the one line below.
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    try:
        folder = snapshot_download(
            repo_id, allow_patterns=_WANTED, ignore_patterns=_UNWANTED, etag_timeout=ANSWER_DEADLINE_S
        )
    except HFValidationError as error:
        raise InvalidArgument(f"{repo_id!r} is not a name the Hugging Face hub allows", "model") from error
    except GatedRepoError as error:
        raise PermissionDenied(
            f"model: {repo_id} is gated on the Hugging Face hub; accept its terms, log in"
        ) from error
    except RepositoryNotFoundError as error:
        raise NotFound(f"model: there is no folder {repo_id} and no public model {repo_id} on the hub") from error
    except (FileNotFoundError, HfHubHTTPError, httpx2.TransportError) as error:
        text = f"{repo_id} is no folder here, not in the cache, and the Hugging Face hub does not deliver it (offline?)"
        raise Unavailable(f"model: {text}") from error
    return Path(folder)
