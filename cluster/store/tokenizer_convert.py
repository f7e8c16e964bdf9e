"""Converts a folder's older tokenizer files to tokenizer.json in the working folder.

Run as `python -m tandem.cluster.store.tokenizer_convert FOLDER`; transformers converts.
"""

import sys
from pathlib import Path

import transformers
from transformers import AutoTokenizer


def main(folder: Path) -> None:
    """Converts; if that fails, the last line of stderr tells why."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
        tokenizer.backend_tokenizer.save("tokenizer.json")
    except Exception as error:  # transformers may raise any exception for damaged files
        reason = " ".join(str(error).replace(str(folder), folder.name).split())
        sys.exit(
            f"ERROR: transformers {transformers.__version__} cannot convert them: "
            f"{type(error).__name__} {reason:.200}"
        )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
