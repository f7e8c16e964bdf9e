"""Finds the tokens of the words that an answer must not have, and at which it ends."""

from ...proto import inference_pb2, limits
from ...proto.errors import InvalidArgument
from ...proto.parameters import check_count
from .tokenizer import Tokenizer


def find_stop_tokens(
    stopping: inference_pb2.StoppingParams, tokenizer: Tokenizer
) -> dict[int, str]:
    """Returns the stop strings that are special tokens, by token.

    Raises InvalidArgument if there are too many tokens to stop at.
    """
    found = {
        token: text
        for text in stopping.stop
        for token in tokenizer.ids_of([text]) & tokenizer.special_ids
    }
    if (count := len({*stopping.stop_token_ids, *found})) > limits.MAX_STOP_TOKEN_IDS:
        raise InvalidArgument(
            f"has {count} ids together with the special tokens of stop; the maximum is "
            f"{limits.MAX_STOP_TOKEN_IDS}",
            "stopping.stop_token_ids",
        )
    return found


async def encode_bad_words(
    sampling: inference_pb2.SamplingParams, tokenizer: Tokenizer, fairness_id: str
) -> list[inference_pb2.TokenIds]:
    """Encodes each text with and without a leading space.

    Tokenizers distinguish the first word of a text.
    """
    texts = [text for word in sampling.bad_words for text in (word, f" {word.lstrip()}")]
    found: dict[tuple[int, ...], None] = {}
    for i, ids in enumerate(
        await tokenizer.encode_all(texts, add_special_tokens=False, fairness_id=fairness_id)
    ):
        check_count(len(ids), limits.MAX_BAD_WORD_TOKENS, "tokens", f"sampling.bad_words[{i // 2}]")
        if ids and max(ids) < tokenizer.vocab_size:  # ids beyond are never generated
            found[tuple(ids)] = None
    return [inference_pb2.TokenIds(ids=word) for word in found]
