"""Holds the table of request parameters: one row describes a parameter for all APIs.

From the rows derive the checks of router and worker, the defaults, the fields of the HTTP bodies
and of the OpenAPI document, the translation of bodies and client options to messages, the options
of the command line, and docs/parameters.md, which `python -m tandem.proto.parameters` prints. The
prompt is no row: texts, token ids and chats are checked where they are tokenized.
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
]  # "json": a string that holds JSON; "logit_bias": map<uint32, float>
_LISTS: Final = {"strings": "strings", "token_ids": "ids", "logit_bias": "tokens"}
_PIECE_TOKENS: Final = 8_192
_NUMBERS: Final = ("int32", "uint32", "uint64", "float")
_PARENTS: Final = ("", "sampling", "stopping", "beam_search")


@dataclass(frozen=True)
class RequestParameter:
    """Describes one request parameter.

    `bounds` are those of a number, or each value of a map; `max_items` the entries of a list or
    map; `max_characters` a string or each string of a list, which then has at least one. `default`
    is the value of an unset field, None where unset has a meaning of its own; a default other than
    0 needs presence (`optional`) in the message, and so does one whose place the model's
    generation_config.json takes.
    """

    field: str  # its path in tandem.v1.GenerateRequest
    kind: Kind
    help: str
    bounds: tuple[float, float] = (-math.inf, math.inf)
    excludes_minimum: bool = False
    max_items: int = 0
    max_characters: int = 0
    default: float | None = 0
    zero_is_unset: bool = (
        False  # 0 stands for unset in the message; HTTP bodies leave the field out instead
    )
    name: str = ""  # in all APIs but gRPC, if it is not the last part of `field`
    completions: tuple[str, ...] | None = (
        None  # names in /v1/completions, the first that is given counts; (): none
    )
    chat: tuple[str, ...] | None = None  # the same in /v1/chat/completions; None: as `completions`
    flag: str = ""  # of the command line, if it is not made of the name
    generation_config: str = (
        ""  # its name in a model's generation_config.json, whose value takes the default's place
    )

    @cached_property
    def leaf(self) -> str:
        """The field's name in the message that holds it."""
        return self.field.rpartition(".")[2]

    @cached_property
    def client_name(self) -> str:
        """The name of the Python clients' option."""
        return self.name or self.leaf

    @cached_property
    def limits(self) -> tuple[float, float]:
        """The bounds as the message holds them."""
        if self.kind in ("float", "logit_bias"):
            return float32(self.bounds[0]), float32(self.bounds[1])
        return self.bounds

    @property
    def option(self) -> str:
        """The name of the command line's option."""
        return self.flag or f"--{self.client_name.replace('_', '-')}"

    def body_names(self, *, chat: bool) -> tuple[str, ...]:
        """The names in the body of a completion or a chat; the first that is given counts."""
        own = self.chat if chat and self.chat is not None else self.completions
        return (self.client_name,) if own is None else own

    @cached_property
    def has_presence(self) -> bool:
        """Whether the message distinguishes an unset field from one of value 0."""
        return bool(self.default) or self.default is None or bool(self.generation_config)


_CHOICES: Final = (0, limits.MAX_CHOICES)
_LOGPROBS: Final = (0, limits.MAX_LOGPROBS)


def _constraint(leaf: str, kind: Kind, meaning: str, *names: str) -> RequestParameter:
    """Makes the row of a constraint, of which a request has at most one; `names` are those in HTTP
    bodies.
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
        "The greatest goes first; over HTTP, as in vLLM, the least.",
        bounds=(-100, 100),
    ),
    RequestParameter(
        "truncate_prompt", "bool", "Keeps the end of a prompt that does not fit the context."
    ),
    RequestParameter(
        "truncate_prompt_tokens",
        "int32",
        "Keeps so many tokens of the prompt's end; -1 keeps what fits the context, 0 all.",
        bounds=(-1, limits.MAX_TOKENS),
    ),
    RequestParameter(
        "stopping.max_tokens",
        "int32",
        "Tokens to generate at most; 0 only with echo or prompt_logprobs. Unset: of a chat to the "
        "end of the context, "
        "of another prompt 16.",
        bounds=(0, limits.MAX_TOKENS),
        default=None,
        chat=("max_completion_tokens", "max_tokens"),
        generation_config="max_new_tokens",
    ),
    RequestParameter(
        "stopping.min_tokens",
        "int32",
        "No end before so many tokens.",
        bounds=(0, limits.MAX_TOKENS),
    ),
    RequestParameter(
        "stopping.stop",
        "strings",
        "Ends the text before the first of these; one that is a special token ends it, too.",
        max_items=16,
        max_characters=1_024,
    ),
    RequestParameter(
        "stopping.stop_token_ids",
        "token_ids",
        "Ends the completion at one of these tokens.",
        max_items=limits.MAX_STOP_TOKEN_IDS,
        flag="--stop-token-id",
    ),
    RequestParameter("stopping.ignore_eos", "bool", "Goes on after an end-of-sequence token."),
    RequestParameter(
        "sampling.temperature",
        "float",
        "0 is greedy.",
        bounds=(0, 2),
        default=1,
        generation_config="temperature",
    ),
    RequestParameter(
        "sampling.top_k",
        "int32",
        "Keeps the k most likely tokens; 0 or -1 keeps all.",
        bounds=(-1, 1_000_000),
        generation_config="top_k",
    ),
    RequestParameter(
        "sampling.top_p",
        "float",
        "Keeps the most likely tokens up to this probability.",
        bounds=(0, 1),
        excludes_minimum=True,
        default=1,
        generation_config="top_p",
    ),
    RequestParameter(
        "sampling.min_p",
        "float",
        "Keeps tokens so many times as likely as the likeliest.",
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
        "Divides the positive logits of tokens of prompt and completion (Keskar et al., 2019).",
        bounds=(0.01, 10),
        default=1,
        generation_config="repetition_penalty",
    ),
    RequestParameter(
        "sampling.presence_penalty",
        "float",
        "Taken from the logits of generated tokens.",
        bounds=(-2, 2),
    ),
    RequestParameter(
        "sampling.frequency_penalty",
        "float",
        "Taken from the logit for each generated occurrence.",
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
        f"Texts that are not generated; at most {limits.MAX_BAD_WORD_TOKENS} tokens each.",
        max_items=limits.MAX_BAD_WORDS,
        max_characters=256,
        flag="--bad-word",
    ),
    RequestParameter(
        "sampling.seed", "uint64", "Same seed, same tokens. Unset: a random one.", default=None
    ),
    RequestParameter(
        "n",
        "uint32",
        "Completions of the prompt; 0 means 1. Choice i samples with seed + i.",
        bounds=_CHOICES,
        zero_is_unset=True,
    ),
    RequestParameter(
        "best_of",
        "uint32",
        "Completions to generate, of which the n likeliest are returned; 0 means n.",
        bounds=_CHOICES,
        zero_is_unset=True,
    ),
    RequestParameter(
        "beam_search.width",
        "uint32",
        "Searches with so many hypotheses instead of sampling.",
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
        "Reports the log probability of each generated token and of so many alternatives.",
        bounds=_LOGPROBS,
        default=None,
        chat=("top_logprobs",),
    ),
    RequestParameter(
        "prompt_logprobs",
        "uint32",
        "The same for the prompt's tokens.",
        bounds=_LOGPROBS,
        default=None,
    ),
    RequestParameter(
        "echo", "bool", "Repeats the prompt before each completion; not in chats.", chat=()
    ),
    _constraint("json_schema", "json", "The completion is JSON of this schema.", "guided_json"),
    _constraint("json_object", "bool", "The completion is a JSON object."),
    _constraint(
        "regex", "string", "The whole completion matches this regular expression.", "guided_regex"
    ),
    _constraint("choice", "strings", "The completion is one of these texts.", "guided_choice"),
    _constraint(
        "grammar",
        "string",
        "The completion matches this Lark grammar of llguidance.",
        "guided_grammar",
    ),
)
ROWS: Final[Mapping[str, RequestParameter]] = {row.field: row for row in PARAMETERS}
"""The rows by field."""


def float32(number: float) -> float:
    """Rounds a number to what a message's float field holds."""
    return float(struct.unpack("<f", struct.pack("<f", number))[0])


def parameters_of(parent: str) -> tuple[RequestParameter, ...]:
    """Returns the rows whose fields lie in one message: "sampling", or "" for GenerateRequest
    itself.
    """
    return tuple(row for row in PARAMETERS if row.field.rpartition(".")[0] == parent)


_CHECKED: Final = {
    parent: tuple(row for row in parameters_of(parent) if row.kind != "bool") for parent in _PARENTS
}


def value_of(message: Any, row: RequestParameter) -> Any:
    """Returns the value of the row's field in the message that holds it; the default if it is
    unset.
    """
    return (
        row.default
        if row.has_presence and not message.HasField(row.leaf)
        else getattr(message, row.leaf)
    )


def set_value(request: Any, row: RequestParameter, value: Any) -> None:
    """Sets the row's field of a GenerateRequest. Raises TypeError or ValueError for a value that
    does not fit it.
    """
    parent, _, leaf = row.field.rpartition(".")
    message = getattr(request, parent) if parent else request
    message.MergeFrom(type(message)(**{leaf: value}))


def check_request(request: Any) -> None:
    """Checks each field of a GenerateRequest against its row, but for prompt and constraint.

    Raises InvalidArgument, which names the field and the bound."""
    for parent, rows in _CHECKED.items():
        if not parent or request.HasField(parent):
            check_message(
                getattr(request, parent) if parent else request,
                rows,
                f"{parent}." if parent else "",
            )


def check_message(message: Any, rows: Iterable[RequestParameter], prefix: str = "") -> None:
    """Checks the fields of a message that has them under the rows' last names; `prefix` is put
    before their names in errors. Raises InvalidArgument.
    """
    for row in rows:
        value = value_of(message, row)
        if value is not None:
            check_value(row, value, prefix + row.leaf)


def check_value(
    row: RequestParameter, value: Any, field: str, *, minimum: float | None = None
) -> None:
    """Checks a value against its row; `minimum` takes the place of the row's own.

    Raises InvalidArgument, which names `field` and the bound."""
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


def check_count(count: int, most: int, what: str, field: str) -> None:
    """Raises InvalidArgument if there are more than `most`."""
    if count > most:
        raise InvalidArgument(f"has {count} {what}; at most {most} are taken", field)


def check_length(text: str, most: int, field: str) -> None:
    """Raises InvalidArgument unless the text has 1 to `most` characters."""
    if not 1 <= len(text) <= most:
        raise InvalidArgument(f"must have 1 to {most} characters, not {len(text)}", field)


def check_token_ids(ids: Collection[int], vocab_size: int, field: str) -> None:
    """Raises InvalidArgument unless all are token ids. Looks at piece by piece, and other threads
    run between them.
    """
    left = iter(ids)
    while piece := list(islice(left, _PIECE_TOKENS)):
        if max(piece) >= vocab_size:
            raise InvalidArgument(
                f"{max(piece)} is not a token id; the vocabulary has {vocab_size} tokens", field
            )


def _check_number(row: RequestParameter, value: float, field: str, minimum: float | None) -> None:
    """Compares so that NaN, for which every comparison is false, is refused."""
    least, most = row.limits
    least = least if minimum is None else minimum
    if row.excludes_minimum and not least < value <= most:
        raise InvalidArgument(f"must be greater than {least:.7g} and at most {most:.7g}", field)
    if not least <= value <= most:
        raise InvalidArgument(f"must be from {least:.7g} to {most:.7g}", field)


_HEAD: Final = """# Request parameters

Printed by `python -m tandem.proto.parameters`; do not edit.

What a request leaves out has the default. Where that is marked ◆, the model's generation_config.json may say another
one by the same name, unless the service runs with `generation_config: none`; a beam search takes none of them.
`max_tokens` is `max_new_tokens` there: of a text 16 still, if that is less.
"""


def markdown() -> str:
    """Returns the table as docs/parameters.md has it."""
    head = (
        "gRPC field",
        "type",
        "bounds",
        "default",
        "completions",
        "chat",
        "Python",
        "command line",
        "meaning",
    )
    lines = [head, ("---",) * len(head), *(_cells(row) for row in PARAMETERS)]
    table = "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
    return f"{_HEAD}\n{table}\n"


def _cells(row: RequestParameter) -> Iterator[str]:
    yield f"`{row.field}`"
    yield row.kind.replace("_", " ")
    yield ", ".join(_bounds(row))
    default = f"{row.default:g}" if row.kind in _NUMBERS and row.default is not None else ""
    yield f"{default} ◆".strip() if row.generation_config else default
    for chat in (False, True):
        yield ", ".join(f"`{name}`" for name in row.body_names(chat=chat))
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
