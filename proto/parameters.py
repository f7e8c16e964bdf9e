"""Holds the table of request parameters: one row describes a parameter for all APIs.

The rows define the checks of router and worker, the defaults, the fields of HTTP bodies and of the
OpenAPI document, the translation of bodies and client options to messages, the options of the
command line, and docs/parameters.md, which `python -m tandem.proto.parameters` prints. The prompt
has no row: texts, token ids and chats are checked where they are tokenized.

One file because the checks and the page interpret the columns of this one table.
"""

import math
import struct
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Any, Final, Literal

from . import limits
from .errors import InvalidArgument

Kind = Literal[
    "bool",
    "int32",
    "uint32",
    "uint64",
    "float",
    "string",
    "json",
    "strings",
    "token_ids",
    "logit_bias",
]
"""The type of a field. "json" is a string that holds JSON, "logit_bias" is map<uint32, float>."""
_LISTS: Final = {"strings": "strings", "token_ids": "ids", "logit_bias": "tokens"}
_PIECE_TOKENS: Final = 8_192
_NUMBERS: Final = ("int32", "uint32", "uint64", "float")
_PARENTS: Final = ("", "sampling", "stopping", "beam_search")


@dataclass(frozen=True)
class RequestParameter:
    """Describes one request parameter.

    `bounds` apply to a number, or to each value of a map. `max_items` bounds the entries of a list
    or map. `max_characters` bounds a string or each string of a list; then each has at least one
    character. `default` is the value of an unset field; None means that unset has a meaning of its
    own. Presence (`optional`) in the message is needed for a default other than 0, and for a
    default that the model's generation_config.json can replace.
    """

    field: str  # its path in tandem.v1.GenerateRequest
    kind: Kind
    help: str
    bounds: tuple[float, float] = (-math.inf, math.inf)
    excludes_minimum: bool = False
    max_items: int = 0
    max_characters: int = 0
    default: float | None = 0
    # 0 means unset in the message; HTTP bodies leave the field out instead.
    zero_is_unset: bool = False
    # Name in all APIs except gRPC, if it is not the last part of `field`.
    name: str = ""
    # Names in /v1/completions, of which the first one that is given counts; (): not supported.
    completions: tuple[str, ...] | None = None
    # Names in /v1/chat/completions; None: as in `completions`.
    chat: tuple[str, ...] | None = None
    # Names in /v1/responses and in /v1/messages; "": not supported.
    responses: str = ""
    messages: str = ""
    # Option of the command line, if it is not made of the name.
    flag: str = ""
    # Name in a model's generation_config.json, whose value replaces the default.
    generation_config: str = ""

    @cached_property
    def leaf(self) -> str:
        """Returns the field's name in the message that holds it."""
        return self.field.rpartition(".")[2]

    @cached_property
    def client_name(self) -> str:
        """Returns the name of the Python clients' option."""
        return self.name or self.leaf

    @cached_property
    def limits(self) -> tuple[float, float]:
        """Returns the bounds as the message holds them."""
        if self.kind in ("float", "logit_bias"):
            return float32(self.bounds[0]), float32(self.bounds[1])
        return self.bounds

    @property
    def option(self) -> str:
        """Returns the name of the command line's option."""
        return self.flag or f"--{self.client_name.replace('_', '-')}"

    def body_names(self, *, chat: bool) -> tuple[str, ...]:
        """Returns the names in the body of a completion or a chat; the first given one counts."""
        own = self.chat if chat and self.chat is not None else self.completions
        return (self.client_name,) if own is None else own

    @cached_property
    def has_presence(self) -> bool:
        """Returns True if the message distinguishes an unset field from one of value 0."""
        return bool(self.default) or self.default is None or bool(self.generation_config)


_CHOICES: Final = (0, limits.MAX_CHOICES)
_LOGPROBS: Final = (0, limits.MAX_LOGPROBS)


def _constraint(leaf: str, kind: Kind, meaning: str, *names: str) -> RequestParameter:
    """Returns the row of a constraint; `names` are its names in HTTP bodies.

    A request has at most one constraint.
    """
    return RequestParameter(
        f"constraint.{leaf}",
        kind,
        meaning,
        max_items=limits.MAX_CONSTRAINT_CHOICES if kind == "strings" else 0,
        max_characters=0 if kind == "bool" else limits.MAX_GRAMMAR_CHARACTERS,
        default=None,
        completions=names,
    )


PARAMETERS: Final = (
    RequestParameter(
        "model",
        "string",
        "One of the served names; may be absent if only one is served.",
        max_characters=256,
        responses="model",
        messages="model",
    ),
    RequestParameter(
        "request_id",
        "string",
        "Names the request in logs and timelines.",
        max_characters=128,
        completions=(),
    ),
    RequestParameter(
        "priority",
        "int32",
        "The greatest value goes first; over HTTP, as in vLLM, the smallest.",
        bounds=(-100, 100),
    ),
    RequestParameter(
        "service_tier",
        "string",
        "The SLO class, one of the service's configuration. `auto`, `default` or unset: the class "
        "`default`, if there is one.",
        max_characters=32,
        responses="service_tier",
        messages="service_tier",
    ),
    RequestParameter(
        "truncate_prompt", "bool", "Keeps only the end of a prompt that exceeds the context."
    ),
    RequestParameter(
        "truncate_prompt_tokens",
        "int32",
        "Keeps this many tokens of the prompt's end; -1 keeps as many as fit the context, 0 all.",
        bounds=(-1, limits.MAX_TOKENS),
        responses="truncate_prompt_tokens",
        messages="truncate_prompt_tokens",
    ),
    RequestParameter(
        "truncation",
        "string",
        "`auto` drops the oldest turns of a chat that does not fit the context; `disabled`, the "
        "default, refuses it.",
        max_characters=8,
        completions=(),
        chat=("truncation",),
        responses="truncation",
        messages="truncation",
    ),
    RequestParameter(
        "prompt_cache_key",
        "string",
        "Requests with one key go to one worker, if that does not take much longer; their prompts "
        "stay in the prefix cache as with prompt_cache_retention, `in_memory` by default.",
        max_characters=256,
        responses="prompt_cache_key",
    ),
    RequestParameter(
        "prompt_cache_retention",
        "string",
        "Keeps the prompt in the prefix cache for this time, within the tenant's share: `5m`, "
        "`30m`, `1h`, `12h`, `24h`, or `in_memory`, which is 5m.",
        max_characters=9,
        responses="prompt_cache_retention",
    ),
    RequestParameter(
        "stopping.max_tokens",
        "int32",
        "Maximum of generated tokens; 0 only with echo, prompt_logprobs, cache_breakpoints or "
        "prompt_cache_retention. Unset: up to the end of the context for chats, 16 for other "
        "prompts.",
        bounds=(0, limits.MAX_TOKENS),
        default=None,
        chat=("max_completion_tokens", "max_tokens"),
        generation_config="max_new_tokens",
        responses="max_output_tokens",
        messages="max_tokens",
    ),
    RequestParameter(
        "stopping.min_tokens",
        "int32",
        "Minimum of generated tokens before the completion may end.",
        bounds=(0, limits.MAX_TOKENS),
    ),
    RequestParameter(
        "stopping.stop",
        "strings",
        "Ends the text before the first of these texts. They may be special tokens.",
        max_items=16,
        max_characters=1_024,
        responses="stop",
        messages="stop_sequences",
    ),
    RequestParameter(
        "stopping.stop_token_ids",
        "token_ids",
        "Ends the completion at one of these tokens.",
        max_items=limits.MAX_STOP_TOKEN_IDS,
        flag="--stop-token-id",
        responses="stop_token_ids",
        messages="stop_token_ids",
    ),
    RequestParameter("stopping.ignore_eos", "bool", "Continues after an end-of-sequence token."),
    RequestParameter(
        "stopping.max_time_ms",
        "uint32",
        "Ends the answer this many milliseconds after the request's arrival, with the output so "
        "far; 0 means no limit.",
        bounds=(0, limits.MAX_TIME_MS),
        zero_is_unset=True,
        responses="max_time_ms",
        messages="max_time_ms",
    ),
    RequestParameter(
        "stopping.stop_regex",
        "string",
        "Ends the text before the first match of this regular expression.",
        max_characters=1_024,
        responses="stop_regex",
        messages="stop_regex",
    ),
    RequestParameter(
        "stopping.repetition_stop_ngram",
        "uint32",
        "Ends the completion when its last n-gram of this many tokens has occurred "
        "repetition_stop_count times in a row; 0 means never.",
        bounds=(0, 256),
        zero_is_unset=True,
        responses="repetition_stop_ngram",
        messages="repetition_stop_ngram",
    ),
    RequestParameter(
        "stopping.repetition_stop_count",
        "uint32",
        "Occurrences of the n-gram in a row, at least 2; set with repetition_stop_ngram.",
        bounds=(0, 1_024),
        zero_is_unset=True,
        responses="repetition_stop_count",
        messages="repetition_stop_count",
    ),
    RequestParameter(
        "sampling.temperature",
        "float",
        "0 is greedy.",
        bounds=(0, 2),
        default=1,
        generation_config="temperature",
        responses="temperature",
        messages="temperature",
    ),
    RequestParameter(
        "sampling.top_k",
        "int32",
        "Keeps the k most likely tokens; 0 or -1 keeps all.",
        bounds=(-1, 1_000_000),
        generation_config="top_k",
        messages="top_k",
    ),
    RequestParameter(
        "sampling.top_p",
        "float",
        "Keeps the most likely tokens up to this probability.",
        bounds=(0, 1),
        excludes_minimum=True,
        default=1,
        generation_config="top_p",
        responses="top_p",
        messages="top_p",
    ),
    RequestParameter(
        "sampling.min_p",
        "float",
        "Keeps tokens with at least this share of the most likely token's probability.",
        bounds=(0, 1),
        generation_config="min_p",
    ),
    RequestParameter(
        "sampling.typical_p",
        "float",
        "Keeps the most typical tokens up to this probability (Meister et al., 2022).",
        bounds=(0, 1),
        excludes_minimum=True,
        default=1,
    ),
    RequestParameter(
        "sampling.repetition_penalty",
        "float",
        "Divides the positive logits of tokens in prompt or completion, multiplies negative ones "
        "(Keskar et al., 2019).",
        bounds=(0.01, 10),
        default=1,
        generation_config="repetition_penalty",
    ),
    RequestParameter(
        "sampling.presence_penalty",
        "float",
        "Subtracted from the logits of generated tokens.",
        bounds=(-2, 2),
    ),
    RequestParameter(
        "sampling.frequency_penalty",
        "float",
        "Subtracted from a token's logit for each generated occurrence.",
        bounds=(-2, 2),
    ),
    RequestParameter(
        "sampling.logit_bias",
        "logit_bias",
        "Added to logits, by token id.",
        bounds=(-100, 100),
        max_items=1_024,
    ),
    RequestParameter(
        "sampling.bad_words",
        "strings",
        "Texts to avoid: the token sequences of each text, with and without a space before it, are "
        "never completed; another tokenization of the text is possible. At most "
        f"{limits.MAX_BAD_WORD_TOKENS} tokens each.",
        max_items=limits.MAX_BAD_WORDS,
        max_characters=256,
        flag="--bad-word",
    ),
    RequestParameter(
        "sampling.watermark",
        "bool",
        "Marks the text statistically (Kirchenbauer et al., 2023); the service must have a key.",
    ),
    RequestParameter(
        "sampling.seed", "uint64", "Same seed, same tokens. Unset: a random seed.", default=None
    ),
    RequestParameter(
        "n",
        "uint32",
        "Number of completions of the prompt; 0 means 1. Choice i samples with seed + i.",
        bounds=_CHOICES,
        zero_is_unset=True,
    ),
    RequestParameter(
        "best_of",
        "uint32",
        "Number of completions to generate; the n most likely are returned. 0 means n.",
        bounds=_CHOICES,
        zero_is_unset=True,
    ),
    RequestParameter(
        "beam_search.width",
        "uint32",
        "Runs a beam search with this many hypotheses instead of sampling.",
        bounds=(1, limits.MAX_BEAM_WIDTH),
        name="beam_width",
    ),
    RequestParameter(
        "beam_search.length_penalty",
        "float",
        "Exponent of the length in beam scores.",
        bounds=(-10, 10),
        default=1,
    ),
    RequestParameter(
        "beam_search.early_stopping",
        "bool",
        "Ends the beam search when `width` hypotheses are complete.",
    ),
    RequestParameter(
        "logprobs",
        "uint32",
        "Reports the log probability of each generated token and of this many alternatives.",
        bounds=_LOGPROBS,
        default=None,
        chat=("top_logprobs",),
    ),
    RequestParameter(
        "prompt_logprobs",
        "uint32",
        "Reports the log probability of each prompt token and of this many alternatives.",
        bounds=_LOGPROBS,
        default=None,
    ),
    RequestParameter(
        "processed_logprobs",
        "bool",
        "Reports `logprobs` of the distribution that tokens are drawn from: after penalties, "
        "constraint, temperature and filters.",
    ),
    RequestParameter(
        "echo", "bool", "Repeats the prompt before each completion; not in chats.", chat=()
    ),
    _constraint("json_schema", "json", "The completion is JSON with this schema.", "guided_json"),
    _constraint("json_object", "bool", "The completion is a JSON object."),
    _constraint(
        "regex", "string", "The whole completion matches this regular expression.", "guided_regex"
    ),
    _constraint("choice", "strings", "The completion is one of these texts.", "guided_choice"),
    _constraint(
        "grammar",
        "string",
        "The completion matches this grammar, in llguidance's Lark or in GBNF.",
        "guided_grammar",
    ),
)
ROWS: Final[Mapping[str, RequestParameter]] = {row.field: row for row in PARAMETERS}
"""The rows by field."""


def float32(number: float) -> float:
    """Rounds a number to the precision of a message's float field."""
    return float(struct.unpack("<f", struct.pack("<f", number))[0])


def parameters_of(parent: str) -> tuple[RequestParameter, ...]:
    """Returns the rows whose fields lie in one message.

    `parent` is the message, such as "sampling", or "" for GenerateRequest itself.
    """
    return tuple(row for row in PARAMETERS if row.field.rpartition(".")[0] == parent)


_CHECKED: Final = {
    parent: tuple(row for row in parameters_of(parent) if row.kind != "bool") for parent in _PARENTS
}


def value_of(message: Any, row: RequestParameter) -> Any:
    """Returns the value of the row's field in its message; the default if the field is unset."""
    return (
        row.default
        if row.has_presence and not message.HasField(row.leaf)
        else getattr(message, row.leaf)
    )


def set_value(request: Any, row: RequestParameter, value: Any) -> None:
    """Sets the row's field of a GenerateRequest. Raises TypeError or ValueError for a bad value."""
    parent, _, leaf = row.field.rpartition(".")
    message = getattr(request, parent) if parent else request
    message.MergeFrom(type(message)(**{leaf: value}))


def check_request(request: Any) -> None:
    """Checks each field of a GenerateRequest against its row, except prompt and constraint.

    Raises InvalidArgument, which names the field and the bound.
    """
    for parent, rows in _CHECKED.items():
        if not parent or request.HasField(parent):
            check_message(
                getattr(request, parent) if parent else request,
                rows,
                f"{parent}." if parent else "",
            )


def check_message(message: Any, rows: Iterable[RequestParameter], prefix: str = "") -> None:
    """Checks the fields of a message that has the rows' last names. Raises InvalidArgument.

    Errors have `prefix` before the names.
    """
    for row in rows:
        value = value_of(message, row)
        if value is not None:
            check_value(row, value, prefix + row.leaf)


def check_value(
    row: RequestParameter, value: Any, field: str, *, minimum: float | None = None
) -> None:
    """Checks a value against its row; `minimum` replaces the row's own minimum.

    Raises InvalidArgument, which names `field` and the bound.
    """
    if row.kind in _LISTS:
        check_count(len(value), row.max_items, _LISTS[row.kind], field)
    if row.kind == "logit_bias":
        for token, bias in value.items():
            _check_number(row, bias, f"{field}[{token}]", None)
    elif row.kind == "strings":
        for i, text in enumerate(value):
            check_length(text, row.max_characters, f"{field}[{i}]")
    elif row.kind in _NUMBERS:
        _check_number(row, value, field, minimum)
    elif row.kind == "string" and value:
        check_length(value, row.max_characters, field)


def check_count(
    count: int,
    most: int,
    noun: str,
    field: str,
    error: type[InvalidArgument] = InvalidArgument,
) -> None:
    """Raises `error` if there are more than `most` items; `noun` names them."""
    if count > most:
        raise error(f"has {count} {noun}; the maximum is {most}", field)


def check_length(text: str, most: int, field: str) -> None:
    """Raises InvalidArgument unless the text has 1 to `most` characters."""
    if not 1 <= len(text) <= most:
        raise InvalidArgument(f"must have 1 to {most} characters, not {len(text)}", field)


def check_token_ids(ids: Collection[int], vocab_size: int, field: str) -> None:
    """Raises InvalidArgument unless all are token ids.

    Checks _PIECE_TOKENS ids at a time, so that other threads can run in between.
    """
    left = iter(ids)
    while piece := list(islice(left, _PIECE_TOKENS)):
        if max(piece) >= vocab_size:
            raise InvalidArgument(
                f"{max(piece)} is not a token id; the vocabulary has {vocab_size} tokens", field
            )


def _check_number(row: RequestParameter, value: float, field: str, minimum: float | None) -> None:
    """Raises InvalidArgument unless the value is in its bounds.

    The comparisons also refuse NaN, for which every comparison is false.
    """
    least, most = row.limits
    least = least if minimum is None else minimum
    if row.excludes_minimum and not least < value <= most:
        raise InvalidArgument(f"must be greater than {least:.7g} and at most {most:.7g}", field)
    if not least <= value <= most:
        raise InvalidArgument(f"must be from {least:.7g} to {most:.7g}", field)


_HEAD: Final = """# Request parameters

Printed by `python -m tandem.proto.parameters`; do not edit.

A parameter that a request leaves out has its default. The service's `sampling_defaults` or else the
model's generation_config.json may replace a default that is marked ◆, under the same name, unless
the request is a beam search. With `generation_config: none` the service does not read the file.
`max_tokens` is named `max_new_tokens` there; for prompts other than chats the default is never
above 16. The commands have
[defaults of their own](clients/commands.md#defaults-of-the-commands). In chats over HTTP,
`top_logprobs` needs `logprobs: true`. A request has at most one constraint; `response_format` also
sets the first two.

HTTP refuses a 0 for %s: leave the field out.

The columns completions, chat, responses and messages have the names in `/v1/completions`,
`/v1/chat/completions`, `/v1/responses` and `/v1/messages`; an empty cell: the body has no such
field. The last two take a JSON schema in `text.format` and in `output_config.format`.
[learn.md](learn.md#advice-on-sampling) has advice on sampling.
"""


def markdown() -> str:
    """Returns the text of docs/parameters.md."""
    head = (
        "gRPC field",
        "type",
        "bounds",
        "default",
        "completions",
        "chat",
        "responses",
        "messages",
        "Python",
        "command line",
        "meaning",
    )
    lines = [head, ("---",) * len(head), *(_cells(row) for row in PARAMETERS)]
    table = "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
    not_zero = ", ".join(f"`{row.client_name}`" for row in PARAMETERS if row.zero_is_unset)
    return f"{_HEAD % not_zero}\n{table}\n"


def _cells(row: RequestParameter) -> Iterator[str]:
    yield f"`{row.field}`"
    yield row.kind.replace("_", " ")
    yield ", ".join(_bounds(row))
    default = f"{row.default:g}" if row.kind in _NUMBERS and row.default is not None else ""
    yield f"{default} ◆".strip() if row.generation_config else default
    for chat in (False, True):
        names = row.body_names(chat=chat)
        if row.field.startswith("constraint."):
            names = (f"structured_outputs.{row.leaf.removesuffix('_schema')}", *names)
        yield ", ".join(f"`{name}`" for name in names)
    for name in (row.responses, row.messages):
        yield f"`{name}`" if name else ""
    yield f"`{row.client_name}`"
    yield f"`{row.option}`"
    yield row.help


def _bounds(row: RequestParameter) -> Iterator[str]:
    if math.isfinite(row.bounds[1]):
        yield f"{'above ' if row.excludes_minimum else ''}{row.bounds[0]:g} to {row.bounds[1]:.7g}"
    if row.max_items:
        yield f"at most {row.max_items} entries"
    if row.max_characters:
        yield f"at most {row.max_characters} characters" + (
            " each" if row.kind == "strings" else ""
        )


if __name__ == "__main__":
    print(markdown(), end="")
