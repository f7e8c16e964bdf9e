"""Turns constraints into grammars of llguidance, and checks them in a child process.

The process is killed if a check takes too long.
"""

import asyncio
import json
import re
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache, partial
from typing import Any, Final, NoReturn
from weakref import WeakValueDictionary

from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper
from llguidance.gbnf_to_lark import gbnf_to_lark

from ...proto import inference_pb2, limits
from ...proto.errors import InvalidArgument, Overloaded, Unavailable
from ...proto.llguidance_calls import PARSER_LIMITS, on_deep_stack, public_error
from .chat import parameters_schema
from .child_process import ChildProcess, limit_memory
from .fair_threads import FairThreads
from .schemas.json_schemas import JSON_STYLE, close_objects, readable

_VALIDATE_SECONDS: Final = 5.0
_MAX_WAITS: Final = 3  # times _VALIDATE_SECONDS, to wait for other checks
_MAX_REASON: Final = 200
_MAX_DIGITS: Final = 309  # of the largest float64
_CACHE_CHARACTERS: Final = 8 * 2**20
"""Of all remembered grammars and their constraints; clients send the same schemas repeatedly."""

_MAX_REWRITTEN: Final = 2 * limits.MAX_GRAMMAR_CHARACTERS
MAX_COMBINED: Final = 4 * limits.MAX_GRAMMAR_CHARACTERS
"""Size of the result of `either`, which quotes two grammars; at most half of what workers take."""

# Of all checks, beyond the memory of the imports. The stack of a check takes a quarter, once it is
# deep, and a heap of glibc an eighth.
_MEMORY_BYTES: Final = 2**30
_SURROGATE: Final = re.compile("[\ud800-\udfff]")

_GBNF_RULE: Final = re.compile(r"^[ \t]*[\w-]+[ \t]*::=", re.MULTILINE)
"""The beginning of a rule in GBNF, the EBNF of llama.cpp and vLLM; no Lark grammar has it."""

_GBNF_ESCAPE: Final = re.compile(
    r"\\(?:u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8})|x([0-9A-Fa-f]{2})|.)", re.DOTALL
)
_FIRST_PLAIN: Final = 0xA0  # from this code on, no character has a meaning in GBNF or is a control

_SPECIAL_TOKEN: Final = re.compile(r"<[^<>\s]+>")
"""A special token in a Lark grammar, by its text or as in `<[1-5]>` by its ids."""

_MAX_VOCABULARY: Final = 2**19  # the largest known tokenizer has half as many tokens
_MAX_TOKENIZERS: Final = 4  # of child processes

_CHILD: Final = ChildProcess("constraint")
_CHECKS: Final = FairThreads("tandem-grammars", 1)
"""Shared by all models. Nothing else uses this thread: no other work waits for a slow grammar."""


class GrammarValidator:
    """Turns the constraints of one model's requests into grammars; remembers the valid ones.

    The check builds a matcher as workers do, because that may take minutes and gigabytes. It does
    not need the model's tokenizer, since most of that work does not depend on it.
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
        tools: Sequence[inference_pb2.Tool] = (),
        max_characters: int = limits.MAX_GRAMMAR_CHARACTERS,
    ) -> str:
        """Returns the grammar of a constraint in the format of llguidance.

        Adds to a grammar the rules `arguments_0`, `arguments_1` etc. of checked `tools`.
        `max_characters`: of the constraint.
        Checks of one tenant take turns, so a check of another tenant waits for one of them at most.
        Callers with the same `salt` share the cache. Raises InvalidArgument with a short reason,
        which names `field` or the constraint's own field (`constraint.json_schema`), also if the
        check itself takes too long. Raises Overloaded if it waits too long for other checks, and
        Unavailable if the child process does not start.
        """
        kind = constraint.WhichOneof("kind")
        if kind is None:
            raise InvalidArgument(
                "one of json_schema, json_object, regex, choice and grammar must be set",
                "constraint",
            )
        field = field or f"constraint.{kind}"
        serialized = _to_message(constraint, tools).SerializeToString(deterministic=True)
        key = (salt, serialized)
        if key in self._cache:
            self._cache.move_to_end(key)
            return self._cache[key]
        _check_size(constraint, field, max_characters)
        turn = self._turns.setdefault(tenant, asyncio.Lock())
        wait = _MAX_WAITS * self._seconds
        try:
            async with asyncio.timeout(wait), turn:
                if key in self._cache:  # by a request that came at the same time
                    return self._cache[key]
                grammar, reason = await self._check(tenant, serialized)
        except TimeoutError:
            raise Overloaded(f"{field}: waited {wait:g} seconds for other checks") from None
        if reason:
            raise InvalidArgument(reason, field)
        self._keep(key, grammar)
        return grammar

    async def _check(self, tenant: str, serialized: bytes) -> tuple[str, str]:
        """Returns the grammar, and the reason why it is refused; "" if it is valid.

        A grammar that takes too long is refused like a wrong one: every later try takes as long.
        """
        asked = _CHECKS.run(tenant, len(serialized), self._ask, serialized, self._seconds)
        try:
            grammar, reason = json.loads(await asked)
        except TimeoutError:
            return "", f"takes more than {self._seconds:g} seconds to check; simplify it"
        except EOFError:
            return "", "takes too much memory to check, or is nested too deeply; simplify it"
        except ChildProcessError:
            raise Unavailable("grammars cannot be checked now") from None
        return grammar, reason

    def _keep(self, key: tuple[bytes, bytes], grammar: str) -> None:
        if key in self._cache:  # by a request that came at the same time
            return
        self._cache[key] = grammar
        self._size += len(key[1]) + len(grammar)
        while self._size > self._capacity:
            (_, old), dropped = self._cache.popitem(last=False)
            self._size -= len(old) + len(dropped)


def _check_size(constraint: inference_pb2.Constraint, field: str, max_characters: int) -> None:
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
    if not 1 <= size <= max_characters:
        raise InvalidArgument(f"has {size} characters; it must have 1 to {max_characters}", field)


def _to_message(
    constraint: inference_pb2.Constraint, tools: Sequence[inference_pb2.Tool]
) -> inference_pb2.GenerateRequest:
    """Returns the message to the child process, without the parts of tools that do not matter."""
    message = inference_pb2.GenerateRequest(constraint=constraint)
    for tool in tools:
        message.prompt.chat.tools.add(name=tool.name, parameters=tool.parameters)
    return message


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
    """Bounds the memory of this process; returns the function that checks constraints in it."""
    limit_memory(_MEMORY_BYTES)

    def answer(request: bytes) -> bytes:
        message = inference_pb2.GenerateRequest.FromString(request)
        check = partial(check_constraint, message.constraint, message.prompt.chat.tools)
        return json.dumps(on_deep_stack(check)).encode()

    return answer


def check_constraint(
    constraint: inference_pb2.Constraint, tools: Iterable[inference_pb2.Tool] = ()
) -> tuple[str, str]:
    """Returns the grammar, and the reason why it is refused; "" if it is valid.

    `tools`: as in GrammarValidator.validate.
    """
    try:
        grammar = _grammar(constraint)
        if tools:
            grammar = _with_arguments(grammar, tools)
    except ValueError as error:
        return "", str(error)
    tokenizer = _tokenizer_for(grammar)
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=PARSER_LIMITS)
    matcher.compute_bitmask()
    if matcher.get_error().startswith("NoExtensionBias"):
        return grammar, "matches nothing"
    return grammar, _short(public_error(matcher.get_error())) if matcher.is_error() else ""


def _with_arguments(grammar: str, tools: Iterable[inference_pb2.Tool]) -> str:
    """Adds the rules of the tools' arguments to a Lark grammar. Raises ValueError.

    Each schema is a separate document, so its references stay valid.
    """
    rules = [grammar]
    size = len(grammar)
    for i, tool in enumerate(tools):
        try:
            schema = readable(close_objects(parameters_schema(tool)))
        except ValueError as error:
            raise ValueError(f"the arguments of {tool.name!r}: {error}") from None
        text = json.dumps(schema | {"x-guidance": JSON_STYLE}, ensure_ascii=False)
        rules.append(f"arguments_{i}: %json {text}")
        size += len(rules[-1]) + 1
        if size > limits.MAX_GRAMMAR_CHARACTERS:
            raise ValueError(
                "the grammar of their calls is too large; the maximum is "
                f"{limits.MAX_GRAMMAR_CHARACTERS} characters"
            )
    return "\n".join(rules)


class _ByteTokenizer:
    """Describes a tokenizer for llguidance, with a token for each byte and the given others."""

    eos_token_id = 256
    bos_token_id = None

    def __init__(self, special: Iterable[bytes], size: int) -> None:
        """`size`: of the vocabulary, at least; tokens without a text are added."""
        self.tokens = [*(bytes([byte]) for byte in range(256)), b"<end>", *special]
        self.special_token_ids = list(range(256, len(self.tokens)))
        self.tokens += [b""] * (size - len(self.tokens))

    def __call__(self, text: str | bytes) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)


def _tokenizer_for(grammar: str) -> LLTokenizer:
    """Returns a tokenizer that has all tokens that the grammar may name."""
    unescaped = grammar.replace('\\"', '"').replace("\\\\", "\\")  # the grammar may be in JSON
    names = {*_SPECIAL_TOKEN.findall(grammar), *_SPECIAL_TOKEN.findall(unescaped)}
    has_ids = any(name.startswith("<[") for name in names)
    return _byte_tokenizer(frozenset(names), _MAX_VOCABULARY if has_ids else 0)


@lru_cache(_MAX_TOKENIZERS)
def _byte_tokenizer(special: frozenset[str], size: int) -> LLTokenizer:
    tokenizer = _ByteTokenizer(sorted(name.encode() for name in special), size)
    return LLTokenizer(TokenizerWrapper(tokenizer), n_vocab=len(tokenizer.tokens))


def _grammar(constraint: inference_pb2.Constraint) -> str:
    matcher = LLMatcher
    match constraint.WhichOneof("kind"):
        case "json_schema":
            return matcher.grammar_from_json_schema(_schema(constraint.json_schema))
        case "json_object":
            return matcher.grammar_from_json_schema(_schema('{"type": "object"}'))
        case "regex":
            return matcher.grammar_from_regex(constraint.regex)
        case "choice":
            texts = " | ".join(
                # A delete character would be an error of the lexer.
                json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
                for text in dict.fromkeys(constraint.choice.texts)
            )
            return matcher.grammar_from_lark(f"start: {texts}")
        case _:
            return matcher.grammar_from_lark(_lark(constraint.grammar))


def _lark(grammar: str) -> str:
    """Converts a grammar in GBNF to Lark; returns any other text as it is. Raises ValueError."""
    if not _GBNF_RULE.search(grammar):
        return grammar
    try:
        lark = str(gbnf_to_lark(_GBNF_ESCAPE.sub(_unescaped, grammar)))
    except Exception as error:  # the converter raises plain exceptions, and IndexError at the end
        raise ValueError(_short(f"cannot be read as GBNF (rules with ::=): {error}")) from None
    if len(lark) > _MAX_REWRITTEN:
        raise ValueError("is too large once it is converted from GBNF to Lark; shorten it")
    return lark


def _unescaped(escape: re.Match[str]) -> str:
    """Returns the character of an escape in GBNF, where it has no other meaning.

    llguidance's converter drops leading zeros of codes.
    """
    code = escape[1] or escape[2] or escape[3]
    if code is None:
        return escape[0]
    character = chr(int(code, 16))
    if _SURROGATE.match(character):
        raise ValueError(f"{escape[0]} is no character")
    if character.isalnum() or ord(character) >= _FIRST_PLAIN:
        return character
    return f"\\x{ord(character):02x}"


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
