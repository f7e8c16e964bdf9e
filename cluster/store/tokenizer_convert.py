"""Converts a folder's other tokenizer files to tokenizer.json in the working folder.

Run as `python -m tandem.cluster.store.tokenizer_convert FOLDER`; transformers converts.
"""

import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import transformers
from transformers import AutoTokenizer

from ...proto.home import TEKKEN_FILE, tokenizer_sources


def main(folder: Path) -> None:
    """Converts; if that fails, the last line of stderr tells why."""
    try:
        _read(folder).backend_tokenizer.save("tokenizer.json")
    except Exception as error:  # transformers may raise any exception for damaged files
        reason = " ".join(str(error).replace(str(folder), folder.name).split())
        sys.exit(
            f"ERROR: transformers {transformers.__version__} cannot convert them: "
            f"{type(error).__name__} {reason:.200}"
        )


def _read(folder: Path) -> Any:
    if tokenizer_sources(folder) != (TEKKEN_FILE,):
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    # Some versions of transformers cannot import it, but convert the other files.
    convert: Any = import_module("transformers.integrations.mistral").convert_tekken_tokenizer
    tokenizer = convert(str(folder / TEKKEN_FILE))
    tokenizer.add_bos_token = True  # Mistral's own tokenizer begins every text with it
    return tokenizer


if __name__ == "__main__":
    main(Path(sys.argv[1]))
