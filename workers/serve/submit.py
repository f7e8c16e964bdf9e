"""Checks a router's submit and converts it to the engine's form.

The worker does not rely on the router's checks.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from ...proto import inference_pb2, worker_pb2
from ...proto.errors import InvalidArgument, Unavailable
from ...proto.hashing import WATERMARK_KEY_BYTES, adapter_salt
from ...proto.limits import (
    FINGERPRINT_BYTES,
    MAX_BAD_WORD_TOKENS,
    MAX_BAD_WORDS,
    MAX_BEAM_WIDTH,
    MAX_CACHE_SALT_BYTES,
    MAX_CHOICES,
    MAX_GRAMMAR_CHARACTERS,
    MAX_RETENTIONS,
    MAX_TENANT_BYTES,
    MAX_WATERMARK_CONTEXT,
    MAX_WATERMARK_DELTA,
    MIN_TEMPERATURE,
    RETENTION_SECONDS,
    WATERMARK_GAMMA,
)
from ...proto.parameters import (
    ROWS,
    check_count,
    check_message,
    check_token_ids,
    float32,
    parameters_of,
    value_of,
)
from ..engine.plan import FirstTokens, Pooling, SamplingParams, Watermark
from ..engine.sequence import BeamSearch, PrefixRetention, SequenceSpec, Task, Turn
from ..transfer.frames import MAX_FIRST_TOKENS, TransferError

MAX_SUBMITTED_GRAMMAR_CHARACTERS: Final = 8 * MAX_GRAMMAR_CHARACTERS
"""The router wraps and escapes the client's grammar, with up to six characters for one."""

_TASKS: Final = {
    worker_pb2.TASK_COLOCATED: Task.COLOCATED,
    worker_pb2.TASK_PREFILL: Task.PREFILL,
    worker_pb2.TASK_DECODE: Task.DECODE,
}
_TURNS: Final[Mapping[int, Turn]] = {
    worker_pb2.TURN_UNSPECIFIED: Turn.BY_INDEX,
    worker_pb2.TURN_FIRST_OF_PRIORITY: Turn.FIRST_OF_PRIORITY,
}
_POOLINGS: Final[Mapping[int, Pooling]] = {
    inference_pb2.POOLING_LAST: "last",
    inference_pb2.POOLING_MEAN: "mean",
}
_SAMPLING: Final = parameters_of("sampling")
_BEAM_SEARCH: Final = parameters_of("beam_search")
_TOP_LEVEL: Final = tuple(
    ROWS[field]
    for field in (
        "stopping.stop_token_ids",
        "stopping.min_tokens",
        "priority",
        "logprobs",
        "prompt_logprobs",
        "processed_logprobs",
    )
)
"""Parameters whose last name is the same in a submit and in a request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLimits:
    """Holds the limits of one worker that a submit is checked against."""

    vocab_size: int
    context_tokens: int
    max_sequences: int
    eos_ids: frozenset[int]
    # The worker has the role prefill: it runs whole requests only while no decode worker can.
    is_fallback: bool = False


def parse_submit(submit: worker_pb2.Submit, sequence_id: int, limits: WorkerLimits) -> SequenceSpec:
    """Checks a submit and returns it in the engine's form.

    Raises InvalidArgument, which names the field and the bound. Raises Unavailable if this worker
    is too small for the request, which another one may serve.
    """
    task = _TASKS.get(submit.task)
    if task is None:
        raise InvalidArgument("unknown", "task")
    check_message(submit, _TOP_LEVEL)
    _check_prompt(submit, task, limits)
    _check_choices(submit, task, limits)
    stop_ids = frozenset(submit.stop_token_ids)
    if not submit.ignore_eos:
        stop_ids |= limits.eos_ids
    beam = None
    if submit.HasField("beam_search"):
        beam = _parse_beam_search(submit, len(stop_ids), limits.vocab_size)
    return SequenceSpec(
        id=sequence_id,
        task=task,
        tokens=tuple(submit.token_ids),
        first_index=submit.first_index,
        max_tokens=submit.max_tokens,
        sampling=_parse_sampling(submit, stop_ids, limits.vocab_size),
        num_choices=submit.beam_search.width if beam else max(submit.num_choices, 1),
        beam=beam,
        stop_ids=stop_ids,
        priority=submit.priority,
        turn=_TURNS.get(submit.turn, Turn.IN_ORDER),
        salt=adapter_salt(submit.cache_salt, submit.adapter.fingerprint),
        num_remote=submit.prefix_holder.num_tokens if task is Task.PREFILL else 0,
        retentions=() if task is Task.DECODE else _parse_retentions(submit),
        tenant=submit.tenant,
    )


def _parse_retentions(submit: worker_pb2.Submit) -> tuple[PrefixRetention, ...]:
    check_count(len(submit.retentions), MAX_RETENTIONS, "prefixes", "retentions")
    num_tokens = len(submit.token_ids)
    longest = max(RETENTION_SECONDS.values())
    for i, each in enumerate(submit.retentions):
        _check(
            1 <= each.num_tokens <= num_tokens and 1 <= each.seconds <= longest,
            f"retentions[{i}]",
            f"must have 1 to {num_tokens} tokens and 1 to {longest} seconds",
        )
    return tuple(
        PrefixRetention(num_tokens=each.num_tokens, seconds=each.seconds)
        for each in submit.retentions
    )


def check_first_tokens(spec: SequenceSpec, first: FirstTokens, vocab_size: int) -> None:
    """Raises TransferError unless the engine can continue after `first`.

    Another worker has sampled these tokens.
    """
    try:
        spec.check_first_tokens(first)
    except ValueError as error:
        raise TransferError(str(error)) from error
    if max(first.tokens) >= vocab_size:
        raise TransferError(f"first_tokens: each must be below {vocab_size}")


def _check(is_valid: bool, field: str, bound: str) -> None:
    if not is_valid:
        raise InvalidArgument(bound, field)


def _check_prompt(submit: worker_pb2.Submit, task: Task, limits: WorkerLimits) -> None:
    num_tokens = len(submit.token_ids)
    _check(num_tokens > 0, "token_ids", "must have at least one token")
    check_token_ids(submit.token_ids, limits.vocab_size, "token_ids")
    _check(submit.max_tokens >= 1, "max_tokens", "must be at least 1")
    _check_length(num_tokens, submit.max_tokens, task, limits.context_tokens)
    has_kv = bool(submit.kv.endpoints) and submit.kv.num_tokens == num_tokens
    _check(task is not Task.DECODE or has_kv, "kv", "must name the KV cache of this prompt")
    _check(submit.first_index < num_tokens, "first_index", "must be below the number of token_ids")
    most = submit.first_index + submit.max_tokens
    _check(
        submit.min_tokens <= most,
        "min_tokens",
        "must be at most first_index and max_tokens together",
    )
    if submit.HasField("prefix_holder"):
        holder = submit.prefix_holder
        is_known = holder.num_tokens <= num_tokens and holder.block_size >= 1
        _check(is_known, "prefix_holder", f"must have a block_size and at most {num_tokens} tokens")
    check_count(len(submit.cache_salt), MAX_CACHE_SALT_BYTES, "bytes", "cache_salt")
    check_count(len(submit.tenant), MAX_TENANT_BYTES, "bytes", "tenant")
    if submit.HasField("adapter"):
        is_named = len(submit.adapter.fingerprint) == FINGERPRINT_BYTES
        _check(is_named, "adapter", f"needs {FINGERPRINT_BYTES} bytes of fingerprint")


def _check_length(num_tokens: int, max_tokens: int, task: Task, context: int) -> None:
    """Raises Unavailable if the KV cache of this worker is too small for a sequence.

    The router has compared the sequence with the largest decode worker.
    """
    if task is Task.PREFILL:  # its first token is the only one that it generates
        if num_tokens >= context:
            raise Unavailable(f"token_ids: must be at most {context - 1} on this worker")
    elif num_tokens + max_tokens > context:
        raise Unavailable(
            f"max_tokens: must be at most {context} together with the prompt on this worker"
        )


def _check_choices(submit: worker_pb2.Submit, task: Task, limits: WorkerLimits) -> None:
    num_choices = max(submit.num_choices, 1)
    _check(num_choices <= MAX_CHOICES, "num_choices", f"must be at most {MAX_CHOICES}")
    is_known = submit.first_choice + num_choices <= MAX_CHOICES
    _check(is_known, "first_choice", f"must be at most {MAX_CHOICES} together with num_choices")
    is_single = num_choices == 1 and not submit.HasField("beam_search")
    _check(is_single or not submit.first_index, "first_index", "must be 0 with several choices")
    width = submit.beam_search.width
    most = limits.max_sequences
    if task is Task.PREFILL or max(num_choices, width) <= most:  # the choices begin afterwards
        return
    field = "beam_search.width" if width > num_choices else "num_choices"
    bound = f"must be at most {most} on this worker"
    if task is Task.DECODE or limits.is_fallback:
        raise Unavailable(f"{field}: {bound}")
    raise InvalidArgument(bound, field)


def _parse_beam_search(submit: worker_pb2.Submit, num_stop_ids: int, vocab_size: int) -> BeamSearch:
    beam = submit.beam_search
    num_best = max(submit.num_choices, 1)
    most = min(MAX_BEAM_WIDTH, vocab_size)
    check_message(beam, _BEAM_SEARCH, "beam_search.")
    _check(beam.width <= most, "beam_search.width", f"must be at most {most}")
    _check(num_best <= beam.width, "num_choices", "must be at most beam_search.width")
    _check(submit.first_choice == 0, "first_choice", "must be 0 with beam_search")
    _check(not submit.HasField("watermark"), "watermark", "cannot be combined with beam_search")
    has_logprobs = submit.HasField("logprobs") or submit.HasField("prompt_logprobs")
    _check(
        not has_logprobs and not submit.grammar,
        "beam_search",
        "cannot be combined with logprobs, prompt_logprobs or grammar",
    )
    fits = beam.width + num_stop_ids <= MAX_FIRST_TOKENS
    _check(fits, "stop_token_ids", f"must be at most {MAX_FIRST_TOKENS} with beam_search.width")
    penalty = value_of(beam, ROWS["beam_search.length_penalty"])
    return BeamSearch(num_best=num_best, length_penalty=penalty, early_stopping=beam.early_stopping)


def _parse_sampling(
    submit: worker_pb2.Submit, stop_ids: frozenset[int], vocab_size: int
) -> SamplingParams:
    """Returns the sampling parameters; a beam search ignores `submit.sampling`."""
    check_count(len(submit.grammar), MAX_SUBMITTED_GRAMMAR_CHARACTERS, "characters", "grammar")
    logprobs = submit.logprobs if submit.HasField("logprobs") else None
    prompt_logprobs = submit.prompt_logprobs if submit.HasField("prompt_logprobs") else None
    if submit.task == worker_pb2.TASK_DECODE:  # a decode worker does not compute the prompt
        prompt_logprobs = None
    if submit.HasField("beam_search"):
        parameters = SamplingParams(temperature=0)
    else:
        parameters = _parse_parameters(submit, vocab_size)
    late_ids: list[int] = []
    min_length = 0
    if submit.min_tokens > submit.first_index:
        late_ids = sorted(token for token in stop_ids if token < vocab_size)
        min_length = len(submit.token_ids) - submit.first_index + submit.min_tokens
    return replace(
        parameters,
        stop_ids=tuple(late_ids),
        min_length=min_length,
        grammar=submit.grammar,
        grammar_owner=submit.cache_salt if submit.grammar else b"",
        logprobs=None if logprobs is None else min(logprobs, vocab_size),
        prompt_logprobs=None if prompt_logprobs is None else min(prompt_logprobs, vocab_size),
        processed_logprobs=submit.processed_logprobs,
        pooling=_parse_pooling(submit),
    )


def _parse_pooling(submit: worker_pb2.Submit) -> Pooling | None:
    if not submit.pooling:
        return None
    _check(submit.pooling in _POOLINGS, "pooling", "unknown")
    is_plain = (
        submit.max_tokens == 1 and submit.num_choices <= 1 and not submit.HasField("beam_search")
    )
    _check(
        is_plain and submit.task != worker_pb2.TASK_DECODE,
        "pooling",
        "needs one choice and max_tokens 1",
    )
    return _POOLINGS[submit.pooling]


def _parse_parameters(submit: worker_pb2.Submit, vocab_size: int) -> SamplingParams:
    sampling = submit.sampling
    check_message(sampling, _SAMPLING, "sampling.")
    check_token_ids(sampling.logit_bias, vocab_size, "sampling.logit_bias")
    values: dict[str, Any] = {row.leaf: value_of(sampling, row) for row in _SAMPLING}
    values |= {
        "top_k": min(max(sampling.top_k, 0), vocab_size),
        "seed": (sampling.seed + submit.first_choice) % 2**64,
        "logit_bias": tuple(sorted(sampling.logit_bias.items())),
        "bad_words": _parse_bad_words(submit.bad_words, sampling, vocab_size),
        "watermark": _parse_watermark(submit),
    }
    return SamplingParams(**values)


def _parse_watermark(submit: worker_pb2.Submit) -> Watermark | None:
    sampling = submit.sampling
    _check(not sampling.watermark, "sampling.watermark", "must be unset; set watermark")
    if not submit.HasField("watermark"):
        return None
    given = submit.watermark
    _check(
        len(given.key) == WATERMARK_KEY_BYTES,
        "watermark.key",
        f"must have {WATERMARK_KEY_BYTES} bytes",
    )
    least, most = WATERMARK_GAMMA
    is_share = float32(least) <= given.gamma <= float32(most)
    _check(is_share, "watermark.gamma", f"must be from {least} to {most}")
    _check(
        0 < given.delta <= MAX_WATERMARK_DELTA,
        "watermark.delta",
        f"must be above 0 and at most {MAX_WATERMARK_DELTA:g}",
    )
    _check(
        1 <= given.context_width <= MAX_WATERMARK_CONTEXT,
        "watermark.context_width",
        f"must be from 1 to {MAX_WATERMARK_CONTEXT}",
    )
    _check(not submit.processed_logprobs, "watermark", "excludes processed_logprobs")
    temperature = value_of(sampling, ROWS["sampling.temperature"])
    _check(temperature >= MIN_TEMPERATURE, "watermark", "needs a temperature above 0")
    return Watermark(
        key=given.key,
        gamma=given.gamma,
        delta=given.delta,
        context_width=given.context_width,
    )


def _parse_bad_words(
    given: Any, sampling: inference_pb2.SamplingParams, vocab_size: int
) -> tuple[tuple[int, ...], ...]:
    """Returns the token sequences of `given`, which are the submit's repeated TokenIds."""
    _check(
        not sampling.bad_words,
        "sampling.bad_words",
        "must be empty; put token ids into bad_words",
    )
    # Each word comes with and without a leading space.
    check_count(len(given), 2 * MAX_BAD_WORDS, "token sequences", "bad_words")
    words = tuple(tuple(word.ids) for word in given)
    for i, word in enumerate(words):
        _check(
            1 <= len(word) <= MAX_BAD_WORD_TOKENS,
            f"bad_words[{i}]",
            f"must have 1 to {MAX_BAD_WORD_TOKENS} tokens",
        )
        check_token_ids(word, vocab_size, f"bad_words[{i}]")
    return words
