"""Restores the parts of a GGUF file's tokenizer that transformers drops.

They are the tokens that end an answer, the splitting of digits, whole words, BOS, and texts that
begin without a blank.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from tokenizers import Regex, Tokenizer, decoders, normalizers
from tokenizers.pre_tokenizers import ByteLevel, Digits, Metaspace, Sequence, Split
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

from ...workers.model.config import CheckpointError
from .gguf_header import END_IDS, GgufHeader

_PROBE: Final = "In 2024,  7 naïve cafés served 日本茶 🍵\n\tfor 12.50!"
_TOKENS: Final = "tokenizer.ggml.tokens"
_MODEL: Final = "tokenizer.ggml.model"
_ENDS: Final = tuple(f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom"))
_END: Final = "<|end|>"
_RETURN: Final = "<|return|>"
_END_TEXTS: Final = frozenset(
    (
        _END,
        _RETURN,
        "<|call|>",
        "<|eot_id|>",
        "<|eom_id|>",
        "<|im_end|>",
        "<end_of_turn>",
        "<|endoftext|>",
        "<|end_of_text|>",
        "<EOT>",
        "<end_of_utterance>",
    )
)
"""Tokens that end an answer wherever a vocabulary has them, as in llama.cpp."""
_PRE: Final = "tokenizer.ggml.pre"  # llama.cpp's name for a byte-level tokenizer's splitting
_ADD_BOS: Final = "tokenizer.ggml.add_bos_token"
_ADD_BLANK: Final = "tokenizer.ggml.add_space_prefix"
_BLANK: Final = "▁"  # SentencePiece's sign
_GPT2_SPLIT: Final = frozenset(
    (
        "default",
        "gpt-2",
        "phi-2",
        "mpt",
        "olmo",
        "jais",
        "trillion",
        "granite-docling",
        "exaone4",
        "gigachat",
        "a.x-4.0",
        "mellum",
    )
)
"""Names of GPT-2's splitting, which transformers uses for every name that it does not know."""
_DIGITS_APART: Final = frozenset(
    ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b", "mellum2")
)
"""Names of GPT-2's splitting after single digits have been split off."""
_SAME_SPLIT: Final = {
    **dict.fromkeys(("stablelm2", "hunyuan", "solar-open", "grok-2"), "qwen2"),
    **dict.fromkeys(("glm4", "chatglm-bpe"), "llama-bpe"),
}
"""Names of splittings that transformers knows by another name."""
_WHOLE_WORDS: Final = frozenset(
    (
        "llama3",
        "llama-v3",
        "llama-bpe",
        "falcon3",
        "falcon-h1",
        "pixtral",
        "midm-2.0",
        "lfm2",
        "jina-v5-nano",
        "tekken",
    )
)
"""Names for which llama.cpp ignores the merges of words in the vocabulary, and adds BOS."""


def check_splitting(header: GgufHeader, name: str) -> None:
    """Raises CheckpointError for a byte-level tokenizer whose splitting of texts is unknown.

    transformers would split as GPT-2 does, and the model would read other tokens.
    """
    pre = header.values.get(_PRE)
    if header.values.get(_MODEL) != "gpt2":
        return
    if pre is None:
        raise CheckpointError(
            f"{name}: {_PRE}: is missing, so the splitting of texts is unknown; convert the "
            "model again"
        )
    known = (*GGUF_PRE_TOKENIZER_SPLITS, *_GPT2_SPLIT, *_DIGITS_APART, *_SAME_SPLIT)
    if pre not in known:
        raise CheckpointError(f"{name}: {_PRE}: {pre!r:.60} is not supported")


def restore_tokenizer(tokenizer: Any, header: GgufHeader) -> None:
    """Restores what transformers drops when it reads a tokenizer of GGUF.

    Raises CheckpointError if more was lost.
    """
    _restore_splitting(tokenizer.backend_tokenizer, header)
    _restore_whole_words(tokenizer, header)
    _restore_first_blank(tokenizer.backend_tokenizer, header)
    _check_tokenizer(tokenizer, header)


def end_tokens(vocabulary: Mapping[str, int], header: GgufHeader) -> list[int]:
    """Returns the ids of the tokens that end an answer.

    Files of Gemma 2, among others, name only the token that ends a text; a turn ends with another.
    """
    ends = {header.values[name] for name in _ENDS if name in header.values}
    ends.update(header.values.get(END_IDS, ()))
    ends.update(vocabulary[text] for text in _END_TEXTS if text in vocabulary)
    if _RETURN in vocabulary:  # of gpt-oss, where <|end|> ends a message within an answer
        ends.discard(vocabulary.get(_END))
    # transformers' classes add tokens to the vocabulary.
    return sorted(each for each in ends if each < header.values.get(_TOKENS, 0))


def _restore_splitting(tokenizer: Tokenizer, header: GgufHeader) -> None:
    """Restores the splitting of texts if transformers, reading GGUF, replaced it by GPT-2's.

    Otherwise two blanks before a number would become two tokens; the model was trained on one.
    """
    pre = header.values.get(_PRE)
    if header.values.get(_MODEL) != "gpt2":
        return
    if pre in _DIGITS_APART:
        tokenizer.pre_tokenizer = Sequence(
            [Digits(individual_digits=True), ByteLevel(add_prefix_space=False)]
        )
    elif pre in _SAME_SPLIT:
        pattern = Regex(GGUF_PRE_TOKENIZER_SPLITS[_SAME_SPLIT[pre]])
        split = Split(pattern, behavior="isolated")
        tokenizer.pre_tokenizer = Sequence(
            [split, ByteLevel(add_prefix_space=False, use_regex=False)]
        )


def _restore_whole_words(tokenizer: Any, header: GgufHeader) -> None:
    """Restores the vocabularies of Llama 3 and Mistral's Tekken, whose merges lack some words.

    A word of the vocabulary is one token there, also if no merges lead to it. A file that does not
    say whether texts begin with BOS means that they do.
    """
    if header.values.get(_MODEL) != "gpt2":
        return
    if header.values.get(_PRE) in _WHOLE_WORDS:
        tokenizer.backend_tokenizer.model.ignore_merges = True
        if _ADD_BOS not in header.values:
            tokenizer.add_bos_token = True


def _restore_first_blank(tokenizer: Tokenizer, header: GgufHeader) -> None:
    """Removes the blank that transformers puts before a text of a SentencePiece vocabulary.

    Gemma's tokenizers of transformers put none.
    """
    if header.values.get(_MODEL) != "llama" or header.values.get(_ADD_BLANK, True):
        return
    if isinstance(tokenizer.pre_tokenizer, Metaspace):
        tokenizer.pre_tokenizer = Metaspace(_BLANK, prepend_scheme="never", split=False)
    elif header.architecture == "phi3":
        tokenizer.normalizer = normalizers.Replace(" ", _BLANK)
    else:
        return
    # transformers' also strips the first blank of a text.
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(_BLANK, " "), decoders.ByteFallback(), decoders.Fuse()]
    )


def drop_invented_tokens(folder: Path, num_tokens: int) -> None:
    """Removes special tokens that transformers' classes add; the model has no rows for them."""
    path = folder / "tokenizer.json"
    fields = json.loads(path.read_bytes())
    config_path = folder / "tokenizer_config.json"
    config = json.loads(config_path.read_bytes())
    invented = [token["content"] for token in fields["added_tokens"] if token["id"] >= num_tokens]
    if invented:
        fields["added_tokens"] = [
            token for token in fields["added_tokens"] if token["id"] < num_tokens
        ]
        path.write_text(json.dumps(fields, ensure_ascii=False), encoding="utf-8")
        kept = {name: value for name, value in config.items() if value not in invented}
        config_path.write_text(json.dumps(kept, ensure_ascii=False), encoding="utf-8")


def _check_tokenizer(tokenizer: Any, header: GgufHeader) -> None:
    if tokenizer.chat_template != header.values.get("tokenizer.chat_template"):
        raise CheckpointError("tokenizer.chat_template: was lost")
    if tokenizer.eos_token_id != header.values.get(_ENDS[0]):
        raise CheckpointError(f"{_ENDS[0]}: became {tokenizer.eos_token!r:.60}")
    is_byte_level = header.values.get(_MODEL) == "gpt2"
    if (
        is_byte_level
        and tokenizer.decode(tokenizer.encode(_PROBE, add_special_tokens=False)) != _PROBE
    ):
        raise CheckpointError("tokenizer.ggml.tokens: do not decode to the text that they encode")
