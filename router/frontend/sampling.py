"""The numbers of a request: every bound of sampling, stopping and beam search checked, every default set.

NaN fails each comparison and so each check. Knows nothing of tokens but the size of the vocabulary.
"""

import secrets
import struct
from collections.abc import Collection
from typing import Final

from ...proto import inference_pb2, limits
from ...proto.errors import InvalidArgument


def _float32(number: float) -> float:
    """As it arrives in a message."""
    return float(struct.unpack("<f", struct.pack("<f", number))[0])


_MIN_REPETITION_PENALTY: Final = _float32(limits.MIN_REPETITION_PENALTY)


def check_range(value: float, least: float, most: float, field: str) -> None:
    """Raises InvalidArgument unless least <= value <= most."""
    if not least <= value <= most:
        raise InvalidArgument(f"must be from {least:.7g} to {most:.7g}", field)


def check_ids(ids: Collection[int], vocab_size: int, field: str) -> None:
    """Raises InvalidArgument unless all are token ids."""
    if ids and max(ids) >= vocab_size:
        raise InvalidArgument(f"{max(ids)} is not a token id; the vocabulary has {vocab_size} tokens", field)


def check_count(count: int, most: int, what: str, field: str) -> None:
    """Raises InvalidArgument if there are more than `most`."""
    if count > most:
        raise InvalidArgument(f"has {count} {what}; at most {most} are taken", field)


def check_sampling(given: inference_pb2.SamplingParams, vocab_size: int) -> inference_pb2.SamplingParams:
    """A copy with every field set, the seed too, but for bad_words, which are only counted. Raises InvalidArgument."""
    temperature = given.temperature if given.HasField("temperature") else 1.0
    top_p = given.top_p if given.HasField("top_p") else 1.0
    typical_p = given.typical_p if given.HasField("typical_p") else 1.0
    repetition = given.repetition_penalty if given.HasField("repetition_penalty") else 1.0
    check_range(temperature, 0.0, limits.MAX_TEMPERATURE, "sampling.temperature")
    check_range(given.top_k, -1, limits.MAX_TOP_K, "sampling.top_k")
    check_range(given.min_p, 0.0, 1.0, "sampling.min_p")
    for value, name in ((top_p, "top_p"), (typical_p, "typical_p")):
        if not 0.0 < value <= 1.0:
            raise InvalidArgument("must be greater than 0 and at most 1", f"sampling.{name}")
    check_range(repetition, _MIN_REPETITION_PENALTY, limits.MAX_REPETITION_PENALTY, "sampling.repetition_penalty")
    check_range(given.presence_penalty, -limits.MAX_PENALTY, limits.MAX_PENALTY, "sampling.presence_penalty")
    check_range(given.frequency_penalty, -limits.MAX_PENALTY, limits.MAX_PENALTY, "sampling.frequency_penalty")
    _check_logit_bias(given, vocab_size)
    _check_bad_words(given)
    return inference_pb2.SamplingParams(
        temperature=temperature + 0.0,  # -0.0 becomes 0.0
        top_k=max(given.top_k, 0),
        top_p=top_p,
        min_p=given.min_p + 0.0,
        seed=given.seed if given.HasField("seed") else secrets.randbits(64),
        typical_p=typical_p,
        repetition_penalty=repetition,
        presence_penalty=given.presence_penalty + 0.0,
        frequency_penalty=given.frequency_penalty + 0.0,
        logit_bias=given.logit_bias,
    )


def check_stopping(given: inference_pb2.StoppingParams, vocab_size: int, *, may_be_empty: bool) -> None:
    """Raises InvalidArgument. `may_be_empty`: whether max_tokens may be 0."""
    least = 0 if may_be_empty else 1
    if given.HasField("max_tokens"):
        check_range(given.max_tokens, least, limits.MAX_TOKENS, "stopping.max_tokens")
    check_range(given.min_tokens, 0, limits.MAX_TOKENS, "stopping.min_tokens")
    check_count(len(given.stop), limits.MAX_STOP_STRINGS, "strings", "stopping.stop")
    for i, stop in enumerate(given.stop):
        _check_length(stop, limits.MAX_STOP_STRING_CHARACTERS, f"stopping.stop[{i}]")
    check_count(len(given.stop_token_ids), limits.MAX_STOP_TOKEN_IDS, "ids", "stopping.stop_token_ids")
    check_ids(given.stop_token_ids, vocab_size, "stopping.stop_token_ids")


def check_beam_search(request: inference_pb2.GenerateRequest) -> inference_pb2.BeamSearch | None:
    """A copy with every field set; None if the request does not search. Raises InvalidArgument."""
    if not request.HasField("beam_search"):
        return None
    given = request.beam_search
    if set_fields := [descriptor.name for descriptor, _ in request.sampling.ListFields()]:
        raise InvalidArgument("does not go with beam_search, which samples nothing", f"sampling.{set_fields[0]}")
    if request.best_of:
        raise InvalidArgument("does not go with beam_search, which answers the n best anyway", "best_of")
    for name in ("constraint", "logprobs", "prompt_logprobs"):
        if request.HasField(name):
            raise InvalidArgument("does not go with beam_search", name)
    check_range(given.width, 1, limits.MAX_BEAM_WIDTH, "beam_search.width")
    if request.n > given.width:
        raise InvalidArgument(f"must be at most beam_search.width, which is {given.width}", "n")
    penalty = given.length_penalty if given.HasField("length_penalty") else 1.0
    check_range(penalty, -limits.MAX_LENGTH_PENALTY, limits.MAX_LENGTH_PENALTY, "beam_search.length_penalty")
    return inference_pb2.BeamSearch(
        width=given.width, length_penalty=penalty + 0.0, early_stopping=given.early_stopping
    )


def num_choices(request: inference_pb2.GenerateRequest) -> tuple[int, int]:
    """How many completions to answer and how many to generate. Raises InvalidArgument."""
    check_range(request.n, 0, limits.MAX_CHOICES, "n")
    check_range(request.best_of, 0, limits.MAX_CHOICES, "best_of")
    answered = request.n or 1
    generated = request.best_of or answered
    if generated < answered:
        raise InvalidArgument(f"must be at least n, which is {answered}", "best_of")
    return answered, generated


def _check_logit_bias(given: inference_pb2.SamplingParams, vocab_size: int) -> None:
    field, most = "sampling.logit_bias", limits.MAX_LOGIT_BIAS
    check_count(len(given.logit_bias), limits.MAX_LOGIT_BIASES, "tokens", field)
    check_ids(given.logit_bias, vocab_size, field)
    for token, bias in given.logit_bias.items():
        check_range(bias, -most, most, f"{field}[{token}]")


def _check_bad_words(given: inference_pb2.SamplingParams) -> None:
    check_count(len(given.bad_words), limits.MAX_BAD_WORDS, "texts", "sampling.bad_words")
    for i, word in enumerate(given.bad_words):
        _check_length(word, limits.MAX_BAD_WORD_CHARACTERS, f"sampling.bad_words[{i}]")


def _check_length(text: str, most: int, field: str) -> None:
    if not 1 <= len(text) <= most:
        raise InvalidArgument(f"must have 1 to {most} characters", field)
