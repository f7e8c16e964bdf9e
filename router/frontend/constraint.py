"""Turns constraints into grammars of llguidance, and checks them in a child process.

The process is killed if a check takes too long.
"""

import asyncio
import json
import re
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Any, Final, NoReturn
from weakref import WeakValueDictionary

import llguidance

from ...proto import inference_pb2, limits
from ...proto.deep_stack import on_deep_stack
from ...proto.errors import InvalidArgument, Overloaded, Unavailable
from .child_process import ChildProcess
from .fair_threads import FairThreads
from .json_schemas import readable

JSON_STYLE: Final = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""Options of llguidance: the separators of Python's json.

With free white space a model could write white space for ever.
"""

_VALIDATE_SECONDS: Final = 5.0
_MAX_WAITS: Final = 3  # times _VALIDATE_SECONDS, to wait for other checks
_MAX_REASON: Final = 200
_MAX_DIGITS: Final = 309  # of the largest float64
_CACHE_CHARACTERS: Final = 8 * 2**20
"""Of all remembered grammars and their constraints; clients send the same schemas repeatedly."""

_MAX_REWRITTEN: Final = 2 * limits.MAX_GRAMMAR_CHARACTERS
_SURROGATE: Final = re.compile("[\ud800-\udfff]")

_CHILD: Final = ChildProcess("constraint")
_CHECKS: Final = FairThreads("tandem-grammars", 1)
"""Shared by all models. Nothing else uses this thread: no other work waits for a slow grammar."""


class GrammarValidator:
    """Turns the constraints of one model's requests into grammars; remembers the valid ones.

    The check needs no tokenizer. The matcher needs one, so only workers make it.
    """

    def __init__(
        self,
        capacity: int = _CACHE_CHARACTERS,
        seconds: float = _VALIDATE_SECONDS,
        ask: Callable[[bytes, float], bytes] = _CHILD.ask,
    ) -> None:
        """`ask`: as ChildProcess.ask.

        `capacity`: characters of constraints and grammars in the cache. `seconds`: for one check.
        """
        self._ask = ask
        self._capacity = capacity
        self._seconds = seconds
        self._size = 0
        # The grammar by salt and constraint, the least recently used first. The salt keeps a caller
        # from learning by the time of a check which constraints other callers send.
        self._cache: OrderedDict[tuple[bytes, bytes], str] = OrderedDict()
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()  # of tenants

    async def validate(
        self,
        constraint: inference_pb2.Constraint,
        field: str = "",
        tenant: str = "",
        salt: bytes = b"",
    ) -> str:
        """Returns the grammar of a constraint in the format of llguidance.

        Checks of one tenant take turns, so a check of another tenant waits for one of them at most.
        Callers with the same `salt` share the cache. Raises InvalidArgument with a short reason,
        which names `field` or the constraint's own field (`constraint.json_schema`), Overloaded if
        the check takes too long, and Unavailable if the child process does not start.
        """
        kind = constraint.WhichOneof("kind")
        if kind is None:
            raise InvalidArgument(
                "one of json_schema, json_object, regex, choice and grammar must be set",
                "constraint",
            )
        field = field or f"constraint.{kind}"
        serialized = constraint.SerializeToString(deterministic=True)
        key = (salt, serialized)
        if key in self._cache:
            self._cache.move_to_end(key)
            return self._cache[key]
        _check_size(constraint, field)
        turn = self._turns.setdefault(tenant, asyncio.Lock())
        too_long = f"{field}: took more than {self._seconds:g} seconds to check"
        grammar: str
        try:
            async with asyncio.timeout(_MAX_WAITS * self._seconds), turn:
                if key in self._cache:  # by a request that came at the same time
                    return self._cache[key]
                asked = _CHECKS.run(tenant, len(serialized), self._ask, serialized, self._seconds)
                grammar, reason = json.loads(await asked)
        except TimeoutError:
            raise Overloaded(too_long) from None
        except EOFError:
            raise InvalidArgument("cannot be checked", field) from None
        except ChildProcessError:
            raise Unavailable("grammars cannot be checked now") from None
        if reason:
            raise InvalidArgument(reason, field)
        self._keep(key, grammar)
        return grammar

    def _keep(self, key: tuple[bytes, bytes], grammar: str) -> None:
        if key in self._cache:  # by a request that came at the same time
            return
        self._cache[key] = grammar
        self._size += len(key[1]) + len(grammar)
        while self._size > self._capacity:
            (_, old), dropped = self._cache.popitem(last=False)
            self._size -= len(old) + len(dropped)


def _check_size(constraint: inference_pb2.Constraint, field: str) -> None:
    """Raises InvalidArgument if the constraint is empty or too large."""
    kind = constraint.WhichOneof("kind") or ""
    if kind == "json_object":
        if not constraint.json_object:
            raise InvalidArgument("must be true or not be set", field)
        return
    if kind == "choice":
        texts = constraint.choice.texts
        size = sum(map(len, texts))
        if not 1 <= len(texts) <= limits.MAX_CONSTRAINT_CHOICES:
            raise InvalidArgument(
                f"has {len(texts)} texts; it must have 1 to {limits.MAX_CONSTRAINT_CHOICES}", field
            )
        for i, text in enumerate(texts):
            if not text:
                raise InvalidArgument("must have at least 1 character", f"{field}.texts[{i}]")
    else:
        size = len(getattr(constraint, kind))
    if not 1 <= size <= limits.MAX_GRAMMAR_CHARACTERS:
        raise InvalidArgument(
            f"has {size} characters; it must have 1 to {limits.MAX_GRAMMAR_CHARACTERS}", field
        )


def either(first: str, second: str) -> str:
    """Returns the grammar of the texts of two grammars, each in the format of llguidance.

    The result is to be validated. Raises ValueError if a schema in them is nested too deeply.
    """
    try:
        named = [*_named(first, "first"), *_named(second, "second")]
        grammars = [{"lark_grammar": "start: @first | @second"}, *named]
        return json.dumps({"grammars": grammars}, ensure_ascii=False)
    except RecursionError:
        raise ValueError("is nested too deeply") from None


def _named(grammar: str, name: str) -> list[dict[str, Any]]:
    """Returns a grammar as a part of another one, which refers to it by `name`."""
    if not grammar.lstrip().startswith("{"):  # it is not JSON
        return [{"name": name, "lark_grammar": grammar}]
    first, *others = json.loads(grammar)["grammars"]
    return [first | {"name": name}, *others]


def make_answer() -> Callable[[bytes], bytes]:
    """Returns the function that checks constraints in the child process."""

    def answer(request: bytes) -> bytes:
        constraint = inference_pb2.Constraint.FromString(request)
        return json.dumps(on_deep_stack(partial(check_constraint, constraint))).encode()

    return answer


def check_constraint(constraint: inference_pb2.Constraint) -> tuple[str, str]:
    """Returns the grammar, and the reason why it is refused; "" if it is valid."""
    try:
        grammar = _grammar(constraint)
    except ValueError as error:
        return "", str(error)
    is_error, messages = llguidance.LLMatcher.validate_grammar_with_warnings(grammar)
    return grammar, _short(messages[0]) if is_error else ""


def _grammar(constraint: inference_pb2.Constraint) -> str:
    matcher = llguidance.LLMatcher
    match constraint.WhichOneof("kind"):
        case "json_schema":
            return matcher.grammar_from_json_schema(_schema(constraint.json_schema))
        case "json_object":
            return matcher.grammar_from_json_schema(_schema('{"type": "object"}'))
        case "regex":
            return matcher.grammar_from_regex(constraint.regex)
        case "choice":
            texts = " | ".join(
                json.dumps(text, ensure_ascii=False)
                for text in dict.fromkeys(constraint.choice.texts)
            )
            return matcher.grammar_from_lark(f"start: {texts}")
        case _:
            return matcher.grammar_from_lark(constraint.grammar)


def _schema(text: str) -> str:
    """Parses a schema and writes it anew, since llguidance pastes the text into a document.

    Raises ValueError with the reason why the schema is refused.
    """
    try:
        schema = json.loads(text, parse_constant=_no_number, parse_int=_integer)
    except RecursionError:
        raise ValueError("is nested too deeply") from None
    except json.JSONDecodeError as error:
        raise ValueError(
            f"is not JSON: {error.msg} at line {error.lineno} column {error.colno}"
        ) from None
    if schema is False:
        raise ValueError("matches nothing")
    if schema is not True and not isinstance(schema, dict):
        raise ValueError("must be a JSON object or boolean")
    schema = readable(schema)
    try:
        # In ASCII an emoji takes twelve characters, and workers bound the length of grammars.
        styled = ({} if schema is True else schema) | {"x-guidance": JSON_STYLE}
        text = json.dumps(styled, allow_nan=False, ensure_ascii=False)
    except ValueError:
        raise ValueError("has a number that is too large") from None
    if len(text) > _MAX_REWRITTEN:
        raise ValueError("is too large once its keywords are rewritten")
    if not text.isascii() and _SURROGATE.search(text):
        raise ValueError("has half of a character (a lone surrogate)")
    return text


def _integer(digits: str) -> int:
    if len(digits) > _MAX_DIGITS:
        raise ValueError("has a number that is too large")
    return int(digits)


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"has {name}, which is not JSON")


def _short(message: str) -> str:
    """Returns at most 200 characters of the reason, without the excerpt of the grammar after it."""
    lines = [line.strip() for line in message.splitlines()]
    excerpt = next(
        (i for i, line in enumerate(lines) if i and line[:1].isdigit() and " | " in line),
        len(lines),
    )
    return " ".join(line for line in lines[:excerpt] if line.strip("^ "))[:_MAX_REASON]
