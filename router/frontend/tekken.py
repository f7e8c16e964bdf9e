"""Completes what folders with Mistral's Tekken vocabularies leave out or state wrongly.

These are the names of special tokens, and the splitting of texts.
"""

import logging
import re
from pathlib import Path
from typing import Any, Final

from tokenizers import Regex, Tokenizer
from tokenizers.pre_tokenizers import ByteLevel, Sequence, Split

from ...proto.home import TEKKEN_FILE

SPLIT: Final = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""Where Tekken splits texts; transformers has the same for GGUF files."""

_MODEL_TYPES: Final = ("ministral", "mistral", "mistral3", "pixtral", "voxtral")
_FOURTH_TOKEN: Final = "[INST]"  # every Tekken vocabulary begins with <unk>, <s>, </s> and this

# It recommends a flag of transformers; `restore_splitting` repairs the splitting instead.
logging.getLogger("transformers.tokenization_utils_tokenizers").addFilter(
    lambda record: "incorrect regex pattern" not in record.getMessage()
)


def special_tokens(folder: Path) -> dict[str, Any]:
    """Returns special tokens by their names, for a folder with tekken.json that names none."""
    if (folder / "tokenizer_config.json").exists() or not (folder / TEKKEN_FILE).exists():
        return {}
    return {"bos_token": "<s>", "eos_token": "</s>"}


def restore_splitting(tokenizer: Tokenizer, config: dict[str, Any]) -> None:
    """Sets Tekken's splitting if a transformers before 5 wrote the tokenizer of a Mistral model.

    It wrote Llama 3's, which makes one token of several digits: the model was not trained on that.
    `config`: the fields of config.json.
    """
    version = re.match(r"\d{1,4}", str(config.get("transformers_version")))
    is_right = version is not None and int(version[0]) >= 5
    if is_right or config.get("model_type") not in _MODEL_TYPES:
        return
    # The state is JSON and shows a split within a sequence as well.
    splitting = tokenizer.pre_tokenizer
    splits = splitting is not None and b'"Split"' in splitting.__getstate__()
    if splits and tokenizer.token_to_id(_FOURTH_TOKEN) == 3:
        tokenizer.pre_tokenizer = Sequence(
            [
                Split(Regex(SPLIT), behavior="isolated"),
                ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
