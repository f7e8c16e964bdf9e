"""Makes tokenizer.json of a folder's other files: `python -m tandem.cluster.store.tokenizer_convert
FOLDER`.

transformers converts, and what it writes into the working folder is all that the process leaves.
"""

import sys
from pathlib import Path

import transformers
from transformers import AutoTokenizer


def main(folder: Path) -> None:
    """Says in the last line of stderr why it cannot."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
        tokenizer.backend_tokenizer.save("tokenizer.json")
    except Exception as error:  # whatever the files do to transformers
        reason = " ".join(str(error).replace(str(folder), folder.name).split())
        sys.exit(
            f"ERROR: transformers {transformers.__version__} does not: {type(error).__name__} "
            f"{reason:.200}"
        )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
