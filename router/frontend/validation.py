"""Checks the parameters of a request, and sets defaults.

Checks each parameter by the table in proto/parameters.py, and combinations here. Knows nothing of
tokens except the size of the vocabulary.
"""

import secrets
from collections.abc import Iterable, Mapping
from typing import Any, Final

from ...proto import inference_pb2, limits, parameters
from ...proto.errors import InvalidArgument
from ...proto.parameters import (
    ROWS,
    RequestParameter,
    check_token_ids,
    check_value,
    parameters_of,
    value_of,
)
from ..prompt_cache import check_prompt_cache

_SAMPLING: Final = parameters_of("sampling")
_BEAM_SEARCH: Final = parameters_of("beam_search")


def check_parameters(request: inference_pb2.GenerateRequest, vocab_size: int) -> None:
    """Checks everything except the prompt and the constraint.

    Raises InvalidArgument, which names the field and the bound.
    """
    check_request_id(request.request_id)
    max_tokens = ROWS["stopping.max_tokens"]
    needs_only_prompt = (
        request.echo
        or request.HasField("prompt_logprobs")
        or request.cache_breakpoints
        or request.prompt_cache_retention
    )
    if request.stopping.HasField(max_tokens.leaf) and not needs_only_prompt:
        check_value(max_tokens, request.stopping.max_tokens, max_tokens.field, minimum=1)
    parameters.check_request(request)
    check_token_ids(request.stopping.stop_token_ids, vocab_size, "stopping.stop_token_ids")
    check_token_ids(request.sampling.logit_bias, vocab_size, "sampling.logit_bias")
    for name in ("truncate_prompt", "truncate_prompt_tokens"):
        if getattr(request, name) and request.prompt.suffix:
            raise InvalidArgument(
                "not allowed with a suffix, whose first token would be cut off", name
            )
    if request.echo and request.prompt.suffix and request.HasField("logprobs"):
        raise InvalidArgument(
            "not allowed with echo and a suffix, whose tokens are not in the text; leave out echo",
            "logprobs",
        )
    _check_truncation(request)
    check_prompt_cache(request)
    _check_stopping(request)
    if request.echo and request.prompt.HasField("chat"):
        raise InvalidArgument("not allowed with a chat", "echo")
    if request.best_of and request.best_of < count_returned(request):
        raise InvalidArgument(f"must be at least n, which is {count_returned(request)}", "best_of")
    if request.processed_logprobs:
        _check_processed_logprobs(request)
    if request.HasField("beam_search"):
        _check_beam_search(request)
    if request.pooling:
        _check_pooling(request)


def _check_processed_logprobs(request: inference_pb2.GenerateRequest) -> None:
    name = "processed_logprobs"
    if not request.HasField("logprobs"):
        raise InvalidArgument("needs logprobs, the number of alternatives to report", name)
    if count_choices(request) > count_returned(request):
        raise InvalidArgument(
            "not allowed with best_of above n, which ranks completions by the model's own log "
            "probabilities",
            name,
        )


def _check_truncation(request: inference_pb2.GenerateRequest) -> None:
    if request.truncation not in ("", "auto", "disabled"):
        raise InvalidArgument("must be auto or disabled", "truncation")
    if request.truncation == "auto" and not request.prompt.HasField("chat"):
        raise InvalidArgument(
            "auto drops turns of a chat; for another prompt set truncate_prompt", "truncation"
        )


def _check_stopping(request: inference_pb2.GenerateRequest) -> None:
    stopping = request.stopping
    ngram, count = stopping.repetition_stop_ngram, stopping.repetition_stop_count
    if bool(ngram) != bool(count):
        missing = "repetition_stop_count" if ngram else "repetition_stop_ngram"
        raise InvalidArgument(
            "repetition_stop_ngram and repetition_stop_count must be set together",
            f"stopping.{missing}",
        )
    if count == 1:
        raise InvalidArgument("must be at least 2", "stopping.repetition_stop_count")


def check_request_id(request_id: str) -> None:
    """Raises InvalidArgument unless `request_id` is short printable ASCII, for logs and headers."""
    check_value(ROWS["request_id"], request_id, "request_id")
    if not (request_id.isascii() and request_id.isprintable()):
        raise InvalidArgument("must be printable ASCII", "request_id")


def count_returned(request: inference_pb2.GenerateRequest) -> int:
    """Returns the number of choices that the client gets: `n`, by default 1."""
    return request.n or 1


def count_choices(request: inference_pb2.GenerateRequest) -> int:
    """Returns the number of choices to generate: `best_of`, or else `n`."""
    return request.best_of or count_returned(request)


def check_num_sequences(num_prompts: int, request: inference_pb2.GenerateRequest) -> None:
    """Raises InvalidArgument if prompts with checked parameters ask for too many completions."""
    has_no_tokens = request.stopping.HasField("max_tokens") and not request.stopping.max_tokens
    num_each = max(count_choices(request), request.beam_search.width)
    if num_each == 1 and (request.pooling or has_no_tokens):
        return  # nothing is generated, and each prompt has one answer
    count = num_prompts * num_each
    if count > limits.MAX_ANSWER_SEQUENCES:
        field = "n"
        if request.HasField("beam_search"):
            field = "beam_search.width"
        elif request.best_of:
            field = "best_of"
        raise InvalidArgument(
            f"asks for {count} completions of {num_prompts} prompts; the maximum is "
            f"{limits.MAX_ANSWER_SEQUENCES}",
            field,
        )


def answer_size(request: inference_pb2.GenerateRequest, num_prompt: int, max_tokens: int) -> int:
    """Returns the size of an answer of `max_tokens` tokens, in the unit of MAX_ANSWER_SIZE."""
    size = limits.LOGPROB_SIZE * (1 + request.logprobs) if request.HasField("logprobs") else 1
    prompt_size = (
        limits.LOGPROB_SIZE * (1 + request.prompt_logprobs)
        if request.HasField("prompt_logprobs")
        else 0
    )
    return count_choices(request) * max_tokens * size + num_prompt * prompt_size


def most_answer_tokens(request: inference_pb2.GenerateRequest, num_prompt: int) -> int:
    """Returns the largest max_tokens within MAX_ANSWER_SIZE, or 1 if even that is too much."""
    rest = limits.MAX_ANSWER_SIZE - answer_size(request, num_prompt, 0)
    return max(rest // answer_size(request, 0, 1), 1)


def check_answer_size(size: int, request: inference_pb2.GenerateRequest) -> None:
    """Raises InvalidArgument if an answer, or all answers of a body, may become too large."""
    if size > limits.MAX_ANSWER_SIZE:
        names = [name for name in ("logprobs", "prompt_logprobs") if request.HasField(name)]
        raise InvalidArgument(
            f"prompts x n x max_tokens, times {limits.LOGPROB_SIZE} for each log probability, may "
            f"be {size} in this answer; the maximum is {limits.MAX_ANSWER_SIZE}",
            names[0] if names else "stopping.max_tokens",
        )


def check_echo_size(num_characters: int) -> None:
    """Raises InvalidArgument if `echo` repeats too much text in all answers of a body together."""
    if num_characters > limits.MAX_RETURNED_CHARACTERS:
        raise InvalidArgument(
            f"repeats {num_characters} characters, each prompt in each completion; the maximum is "
            f"{limits.MAX_RETURNED_CHARACTERS}; send fewer prompts, or ask for fewer completions",
            "echo",
        )


def complete_sampling(
    request: inference_pb2.GenerateRequest, defaults: Mapping[str, float]
) -> inference_pb2.SamplingParams:
    """Returns a copy of the checked parameters with every field set.

    Leaves out bad_words and watermark, which workers get in another form.

    A missing seed is drawn at random. `defaults`: the model's, by field; they do not apply to a
    beam search, which samples nothing.
    """
    values = _complete(request.sampling, _SAMPLING)
    if not request.HasField("beam_search"):
        values |= {
            row.leaf: defaults[row.field]
            for row in _SAMPLING
            if row.field in defaults and not request.sampling.HasField(row.leaf)
        }
    del values["bad_words"]
    del values["watermark"]
    values["top_k"] = max(values["top_k"], 0)
    if values["seed"] is None:
        values["seed"] = secrets.randbits(64)
    return inference_pb2.SamplingParams(**values)


def complete_beam_search(request: inference_pb2.GenerateRequest) -> inference_pb2.BeamSearch | None:
    """Returns a copy of the checked beam search with every field set; None without one."""
    if not request.HasField("beam_search"):
        return None
    return inference_pb2.BeamSearch(**_complete(request.beam_search, _BEAM_SEARCH))


def _complete(given: Any, rows: Iterable[RequestParameter]) -> dict[str, Any]:
    """Returns the values of all fields, set or default; -0.0 becomes 0.0."""
    return {
        row.leaf: value_of(given, row) + 0.0 if row.kind == "float" else value_of(given, row)
        for row in rows
    }


def _check_pooling(request: inference_pb2.GenerateRequest) -> None:
    if request.pooling not in inference_pb2.Pooling.values():
        raise InvalidArgument(f"unknown pooling value {request.pooling}", "pooling")
    given = [
        name
        for name in ("beam_search", "constraint", "logprobs", "prompt_logprobs")
        if request.HasField(name)
    ]
    given += [name for name in ("n", "best_of") if getattr(request, name) > 1]
    if request.echo:
        given.append("echo")
    given += [
        f"stopping.{name}"
        for name in ("max_tokens", "max_time_ms")
        if getattr(request.stopping, name)
    ]
    if request.resume:
        given.append("resume")
    if given:
        raise InvalidArgument("not allowed with pooling, which generates nothing", given[0])


def _check_beam_search(request: inference_pb2.GenerateRequest) -> None:
    if set_fields := [descriptor.name for descriptor, _ in request.sampling.ListFields()]:
        raise InvalidArgument(
            "not allowed with beam_search, which samples nothing", f"sampling.{set_fields[0]}"
        )
    if request.best_of:
        raise InvalidArgument(
            "not allowed with beam_search, which answers the n best anyway", "best_of"
        )
    for name in ("constraint", "logprobs", "prompt_logprobs"):
        if request.HasField(name):
            raise InvalidArgument("not allowed with beam_search", name)
    if request.stopping.max_time_ms:
        raise InvalidArgument(
            "not allowed with beam_search, which has no output before its end; set a deadline",
            "stopping.max_time_ms",
        )
    if request.n > request.beam_search.width:
        raise InvalidArgument(
            f"must be at most beam_search.width, which is {request.beam_search.width}", "n"
        )
