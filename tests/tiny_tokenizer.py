"""Makes the tokenizer of the tiny models; without torch, which the quick tier does not import."""

import functools
import json
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

BOS, EOS = "<|begin|>", "<|end|>"
EOS_ID = 1
VOCAB_SIZE = 512

_CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '[' + message['role'] + '] ' + message['content'] + '\\n' "
    "}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '[assistant] ' }}{% endif %}"
)

_CORPUS = (
    "The quick brown fox jumps over the lazy dog, and the dog answers the fox with another "
    "question. "
    "What is the capital of France? The capital of France is Paris, and the river through it is "
    "the Seine. "
    "Der Fluss fließt durch die Stadt; las ciudades están llenas de gente; "
    "сегодня хорошая погода; 今日は良い天気です。 "
    "A cache holds what was computed before, so that nobody has to compute the same numbers again "
    "and again. "
)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Returns a byte-level BPE tokenizer of at most VOCAB_SIZE tokens: every text round trips; 0 is
    BOS, 1 is EOS.
    """
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=_trained(),  # it copies this
        bos_token=BOS,
        eos_token=EOS,
        chat_template=_CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=2048,
    )


@functools.cache
def _trained() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(
                Regex(r" ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+"), behavior="isolated"
            ),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[BOS, EOS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator([_CORPUS], trainer)
    return tokenizer


def make_router_folder(folder: Path, **config: object) -> Path:
    """Writes the files of a model that a router reads, with these fields of config.json."""
    make_tokenizer().save_pretrained(folder)
    fields = {"max_position_embeddings": 2_048, **config}
    (folder / "config.json").write_text(json.dumps(fields))
    return folder
