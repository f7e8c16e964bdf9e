"""What a router asks of a worker, checked field by field: the worker trusts no router to have done so."""

import struct
from dataclasses import dataclass, replace
from typing import Final

from ..proto import inference_pb2, limits, worker_pb2
from .engine.plan import SamplingParams
from .engine.sequence import BeamSearch, SequenceSpec, Task
from .transfer.frames import MAX_FIRST_TOKENS

MAX_GRAMMAR_CHARACTERS: Final = 8 * limits.MAX_GRAMMAR_CHARACTERS
"""As a router writes it: a wrapping and escapes, of up to six characters, around what the user sent."""

_TASKS = {
    worker_pb2.TASK_WHOLE: Task.WHOLE,
    worker_pb2.TASK_PREFILL: Task.PREFILL,
    worker_pb2.TASK_DECODE: Task.DECODE,
}


class InvalidSubmit(Exception):
    """A submit that breaks a bound; the text is safe to show."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLimits:
    """What a worker can take at all."""

    vocab_size: int
    context_tokens: int
    max_sequences: int
    eos_ids: frozenset[int]


def parse_submit(submit: worker_pb2.Submit, sequence_id: int, room: WorkerLimits) -> SequenceSpec:
    """A submit as the engine takes it. Raises InvalidSubmit."""
    task = _TASKS.get(submit.task)
    if task is None:
        raise InvalidSubmit("task: unknown")
    _check_prompt(submit, task, room)
    _check_choices(submit, room)
    stop_ids = frozenset(submit.stop_token_ids) | (frozenset() if submit.ignore_eos else room.eos_ids)
    beam = _parse_beam(submit, len(stop_ids), room.vocab_size) if submit.HasField("beam_search") else None
    return SequenceSpec(
        id=sequence_id,
        task=task,
        tokens=tuple(submit.token_ids),
        first_index=submit.first_index,
        max_tokens=submit.max_tokens,
        sampling=_parse_sampling(submit, stop_ids, room.vocab_size),
        num_choices=submit.beam_search.width if beam else max(submit.num_choices, 1),
        beam=beam,
        stop_ids=stop_ids,
        priority=submit.priority,
        salt=submit.cache_salt,
    )


def _check(good: bool, text: str) -> None:
    """Comparisons are false for NaN, so `good` says what must hold and never what must not."""
    if not good:
        raise InvalidSubmit(text)


def _check_prompt(submit: worker_pb2.Submit, task: Task, room: WorkerLimits) -> None:
    tokens, vocab_size = submit.token_ids, room.vocab_size
    _check(bool(tokens) and max(tokens) < vocab_size, f"token_ids: at least one, each below {vocab_size}")
    _check(
        submit.max_tokens >= 1 and len(tokens) + submit.max_tokens <= room.context_tokens,
        f"max_tokens: at least 1, and with the prompt at most {room.context_tokens}",
    )
    _check(
        task is not Task.DECODE or (bool(submit.kv.endpoints) and submit.kv.num_tokens == len(tokens)),
        "kv: does not name the cache of this prompt",
    )
    _check(submit.first_index < len(tokens), "first_index: below the number of token_ids")
    _check(
        submit.min_tokens <= submit.first_index + submit.max_tokens,
        "min_tokens: at most first_index and max_tokens together",
    )
    num_stop_ids, most = len(submit.stop_token_ids), limits.MAX_STOP_TOKEN_IDS
    _check(num_stop_ids <= most, f"stop_token_ids: at most {most}")
    most = limits.MAX_CACHE_SALT_BYTES
    _check(len(submit.cache_salt) <= most, f"cache_salt: at most {most} bytes")
    most = limits.MAX_PRIORITY
    _check(-most <= submit.priority <= most, f"priority: between -{most} and {most}")


def _check_choices(submit: worker_pb2.Submit, room: WorkerLimits) -> None:
    num_choices, most = max(submit.num_choices, 1), limits.MAX_CHOICES
    _check(num_choices <= most, f"num_choices: at most {most}")
    _check(submit.first_choice + num_choices <= most, f"first_choice: with num_choices at most {most}")
    alone = num_choices == 1 and not submit.HasField("beam_search")
    _check(alone or not submit.first_index, "first_index: 0 with several choices")
    num_sequences = max(num_choices, submit.beam_search.width)
    _check(num_sequences <= room.max_sequences, f"num_choices: this worker computes {room.max_sequences} at once")


def _parse_beam(submit: worker_pb2.Submit, num_stop_ids: int, vocab_size: int) -> BeamSearch:
    beam, num_best, most = submit.beam_search, max(submit.num_choices, 1), min(limits.MAX_BEAM_WIDTH, vocab_size)
    penalty = beam.length_penalty if beam.HasField("length_penalty") else 1.0
    _check(1 <= beam.width <= most, f"beam_search.width: between 1 and {most}")
    _check(num_best <= beam.width, "num_choices: at most beam_search.width")
    _check(submit.first_choice == 0, "first_choice: 0 with beam_search")
    scored = submit.HasField("logprobs") or submit.HasField("prompt_logprobs")
    _check(not scored and not submit.grammar, "beam_search: without logprobs, prompt_logprobs and grammar")
    most_penalty = limits.MAX_LENGTH_PENALTY
    _check(
        -most_penalty <= penalty <= most_penalty,
        f"beam_search.length_penalty: between -{most_penalty:g} and {most_penalty:g}",
    )
    _check(beam.width + num_stop_ids <= MAX_FIRST_TOKENS, "stop_token_ids: too many for a beam_search of this width")
    return BeamSearch(num_best=num_best, length_penalty=penalty, early_stopping=beam.early_stopping)


def _parse_sampling(submit: worker_pb2.Submit, stop_ids: frozenset[int], vocab_size: int) -> SamplingParams:
    """How tokens are chosen. A beam search draws none, so there nothing of `submit.sampling` counts."""
    _check(len(submit.grammar) <= MAX_GRAMMAR_CHARACTERS, f"grammar: at most {MAX_GRAMMAR_CHARACTERS} characters")
    logprobs = submit.logprobs if submit.HasField("logprobs") else None
    prompt_logprobs = submit.prompt_logprobs if submit.HasField("prompt_logprobs") else None
    most = limits.MAX_LOGPROBS
    _check((logprobs or 0) <= most, f"logprobs: at most {most}")
    _check((prompt_logprobs or 0) <= most, f"prompt_logprobs: at most {most}")
    if submit.task == worker_pb2.TASK_DECODE:  # which computes nothing of the prompt
        prompt_logprobs = None
    num_prompt = len(submit.token_ids) - submit.first_index
    waits = submit.min_tokens > submit.first_index
    return replace(
        SamplingParams(temperature=0) if submit.HasField("beam_search") else _parse_drawing(submit, vocab_size),
        stop_ids=tuple(sorted(token for token in stop_ids if token < vocab_size)) if waits else (),
        min_length=num_prompt + submit.min_tokens if waits else 0,
        grammar=submit.grammar,
        logprobs=None if logprobs is None else min(logprobs, vocab_size),
        prompt_logprobs=None if prompt_logprobs is None else min(prompt_logprobs, vocab_size),
    )


def _parse_drawing(submit: worker_pb2.Submit, vocab_size: int) -> SamplingParams:
    sampling = submit.sampling
    typical_p = sampling.typical_p if sampling.HasField("typical_p") else 1.0
    repetition = sampling.repetition_penalty if sampling.HasField("repetition_penalty") else 1.0
    most = limits.MAX_TEMPERATURE
    _check(0 <= sampling.temperature <= most, f"sampling.temperature: between 0 and {most:g}")
    _check(-1 <= sampling.top_k <= limits.MAX_TOP_K, f"sampling.top_k: between -1 and {limits.MAX_TOP_K}")
    _check(0 < sampling.top_p <= 1, "sampling.top_p: above 0 and at most 1")
    _check(0 <= sampling.min_p <= 1, "sampling.min_p: between 0 and 1")
    _check(0 < typical_p <= 1, "sampling.typical_p: above 0 and at most 1")
    least, most = limits.MIN_REPETITION_PENALTY, limits.MAX_REPETITION_PENALTY
    # The least is no float32; what a caller sends for it may be a little less.
    _check(_float32(least) <= repetition <= most, f"sampling.repetition_penalty: between {least:g} and {most:g}")
    most = limits.MAX_PENALTY
    penalties = sampling.presence_penalty, sampling.frequency_penalty
    _check(
        all(-most <= penalty <= most for penalty in penalties),
        f"sampling.presence_penalty, frequency_penalty: between -{most:g} and {most:g}",
    )
    return SamplingParams(
        temperature=sampling.temperature,
        top_k=min(max(sampling.top_k, 0), vocab_size),
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        typical_p=typical_p,
        seed=(sampling.seed + submit.first_choice) % 2**64,
        repetition_penalty=repetition,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        logit_bias=_parse_logit_bias(sampling, vocab_size),
        bad_words=_parse_bad_words(submit, vocab_size),
    )


def _float32(number: float) -> float:
    return float(struct.unpack("<f", struct.pack("<f", number))[0])


def _parse_logit_bias(sampling: inference_pb2.SamplingParams, vocab_size: int) -> tuple[tuple[int, float], ...]:
    bias, most = sampling.logit_bias, limits.MAX_LOGIT_BIAS
    _check(len(bias) <= limits.MAX_LOGIT_BIASES, f"sampling.logit_bias: at most {limits.MAX_LOGIT_BIASES} tokens")
    _check(all(token < vocab_size for token in bias), f"sampling.logit_bias: tokens below {vocab_size}")
    _check(all(-most <= value <= most for value in bias.values()), f"sampling.logit_bias: from -{most:g} to {most:g}")
    return tuple(sorted(bias.items()))


def _parse_bad_words(submit: worker_pb2.Submit, vocab_size: int) -> tuple[tuple[int, ...], ...]:
    most, longest = 2 * limits.MAX_BAD_WORDS, limits.MAX_BAD_WORD_TOKENS  # each with and without a space before
    _check(not submit.sampling.bad_words, "sampling.bad_words: as tokens, in bad_words")
    _check(len(submit.bad_words) <= most, f"bad_words: at most {most}")
    words = tuple(tuple(word.ids) for word in submit.bad_words)
    _check(all(1 <= len(word) <= longest for word in words), f"bad_words: 1 to {longest} tokens each")
    _check(all(max(word) < vocab_size for word in words), f"bad_words: tokens below {vocab_size}")
    return words
