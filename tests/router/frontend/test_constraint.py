"""Tests that a constraint becomes a grammar of exactly the right texts, or is refused."""

import asyncio
import json
import threading
import time
from typing import Annotated, Any, ClassVar, Literal

import llguidance
import pytest
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper
from pydantic import BaseModel, Field, TypeAdapter

from tandem.proto import inference_pb2, limits
from tandem.proto.errors import InvalidArgument, Overloaded
from tandem.router.frontend.child_process import ChildProcess
from tandem.router.frontend.constraint import GrammarValidator, either
from tandem.router.frontend.schemas.json_schemas import close_objects
from tandem.tests.waits import WAIT
from tandem.workers.serve.submit import MAX_SUBMITTED_GRAMMAR_CHARACTERS

EOS = 256

VALIDATOR = GrammarValidator(seconds=60)  # however busy the machine is


class Bytes:
    """A token for each byte, and an end."""

    eos_token_id = EOS
    bos_token_id = None
    tokens: ClassVar = [bytes([byte]) for byte in range(256)] + [b"<end>"]
    special_token_ids: ClassVar = [EOS]

    def __call__(self, text: str | bytes) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)


TOKENIZER = LLTokenizer(TokenizerWrapper(Bytes()), n_vocab=257)


async def grammar_of(**constraint: Any) -> str:
    return await VALIDATOR.validate(inference_pb2.Constraint(**constraint))


def takes(grammar: str, text: str) -> bool:
    """Whether the whole text matches."""
    matcher = LLMatcher(TOKENIZER, grammar)
    assert not matcher.is_error(), matcher.get_error()
    ids = [*text.encode(), EOS]
    return matcher.validate_tokens(ids) == len(ids)


SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "array", "items": {"type": "integer"}}, "b": {"enum": ["x", "ü"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    ("constraint", "good", "bad"),
    [
        (
            {"json_schema": json.dumps(SCHEMA)},
            ['{"a": [1, 2], "b": "x"}', '{"a": [], "b": "ü"}'],
            [
                '{"a": [1, 2]}',
                '{"a": ["1"], "b": "x"}',
                "",
                '{"a": [],  "b": "x"}',
                '{"a": [], "b": "x"} ',
            ],
        ),
        ({"json_schema": "true"}, ["1", '{"a": [null]}'], ["", "nil"]),
        ({"json_object": True}, ["{}", '{"x": {"y": [1, "2"]}}'], ["[]", "1", "", "{"]),
        ({"regex": "[a-c]+|x\\d{2}"}, ["abc", "x12"], ["abd", "x1", "", "xabc"]),
        (
            {"choice": {"texts": ["yes", "no", 'say "\\n"', "\n", "🦊", "no", "\x7f"]}},
            ["yes", "no", 'say "\\n"', "\n", "🦊", "\x7f"],
            ["", "ye", "yesno", "Yes"],
        ),
        ({"grammar": 'start: "a" (x | "-")*\nx: /[0-9]/'}, ["a", "a1-2"], ["", "b", "a1x"]),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
async def test_a_grammar_accepts_the_texts_of_its_constraint(
    constraint: dict[str, Any], good: list[str], bad: list[str]
) -> None:
    grammar = await grammar_of(**constraint)
    assert [text for text in good if not takes(grammar, text)] == []
    assert [text for text in bad if takes(grammar, text)] == []


DEEP = '{"type": "array", "items":' * 5_000 + "{}" + "}" * 5_000
LONG = {"type": "array", "items": {"type": "null"}, "maxItems": 10**12}
"""llguidance keeps counts, not an item for each."""


@pytest.mark.parametrize(
    ("constraint", "field", "reason"),
    [
        ({}, "constraint", "must be set"),
        ({"json_schema": ""}, "constraint.json_schema", "1 to 131072"),
        ({"json_schema": "{"}, "constraint.json_schema", "not JSON: .* at line 1 column 2"),
        ({"json_schema": '{} }, {"lark_grammar": "x"'}, "constraint.json_schema", "not JSON"),
        ({"json_schema": "[1]"}, "constraint.json_schema", "object or boolean"),
        ({"json_schema": "1"}, "constraint.json_schema", "object or boolean"),
        ({"json_schema": "false"}, "constraint.json_schema", "matches nothing"),
        ({"json_schema": '{"const": NaN}'}, "constraint.json_schema", "NaN"),
        ({"json_schema": '{"const": 1e999}'}, "constraint.json_schema", "too large"),
        ({"json_schema": '{"const": %s}' % ("9" * 5_000)}, "constraint.json_schema", "too large"),
        ({"json_schema": '{"const": "\\ud800"}'}, "constraint.json_schema", "lone surrogate"),
        ({"json_schema": '{"type": "objec"}'}, "constraint.json_schema", "objec"),
        ({"json_schema": '{"not": {}}'}, "constraint.json_schema", "'not' is not supported"),
        (
            {"json_schema": '{"$ref": "file:///etc/passwd"}'},
            "constraint.json_schema",
            "not present",
        ),
        ({"json_schema": DEEP[: limits.MAX_GRAMMAR_CHARACTERS]}, "constraint.json_schema", "."),
        ({"json_schema": "[" * 100_000}, "constraint.json_schema", "nested too deeply"),
        (
            {"json_schema": " " * (limits.MAX_GRAMMAR_CHARACTERS + 1)},
            "constraint.json_schema",
            "1 to 131072",
        ),
        ({"json_object": False}, "constraint.json_object", "true"),
        ({"regex": ""}, "constraint.regex", "1 to 131072"),
        ({"regex": "a("}, "constraint.regex", "unclosed group$"),
        ({"regex": "(?=a)b"}, "constraint.regex", "look-around"),
        ({"choice": {}}, "constraint.choice", "1 to 1024"),
        ({"choice": {"texts": ["x"] * 1_025}}, "constraint.choice", "1 to 1024"),
        ({"choice": {"texts": ["x", ""]}}, "constraint.choice.texts[1]", "at least 1"),
        ({"choice": {"texts": ["x" * 65_537] * 2}}, "constraint.choice", "131072"),
        ({"grammar": "start: nothing"}, "constraint.grammar", "nothing"),
        ({"grammar": "x" * 1_000}, "constraint.grammar", "Expected"),
        ({"grammar": 'x: "a"'}, "constraint.grammar", "start"),
        ({"grammar": "start: a\na: start"}, "constraint.grammar", "matches nothing"),
        ({"grammar": "root ::= nothing"}, "constraint.grammar", "GBNF .*: Rule 'nothing' not"),
        ({"grammar": 'main ::= "a"'}, "constraint.grammar", "No 'root' rule found"),
        ({"grammar": 'root ::= "a" %'}, "constraint.grammar", "GBNF .*: Expected name at line 1"),
        ({"grammar": 'root ::= "\\'}, "constraint.grammar", "GBNF"),
        (
            {"grammar": r'root ::= "\ud800"'},
            "constraint.grammar",
            r"GBNF .*\\ud800 is no character",
        ),
        ({"grammar": "root ::= " + "(" * 100_000}, "constraint.grammar", "GBNF .*recursion"),
        ({"grammar": f"root ::= {'|' * 100_000}"}, "constraint.grammar", "too large once"),
    ],
)
async def test_a_bad_constraint_is_refused_with_a_short_reason(
    constraint: dict[str, Any], field: str, reason: str
) -> None:
    with pytest.raises(InvalidArgument, match=reason) as caught:
        await grammar_of(**constraint)
    assert caught.value.field == field
    assert len(caught.value.message) < 300
    assert "\n" not in caught.value.message


async def test_the_bounds_themselves_are_allowed() -> None:
    await grammar_of(regex="x" * limits.MAX_GRAMMAR_CHARACTERS)
    await grammar_of(json_schema=json.dumps(LONG))
    await grammar_of(json_schema=json.dumps(LONG | {"minItems": 10**12}))
    await grammar_of(choice={"texts": [f"{i:0128d}" for i in range(limits.MAX_CONSTRAINT_CHOICES)]})


EMOJI = "🦊" * 100_000


@pytest.mark.parametrize(
    "constraint",
    [
        {"choice": {"texts": [EMOJI]}},
        {
            "choice": {
                "texts": ["\x01" * 100 + str(i) for i in range(limits.MAX_CONSTRAINT_CHOICES)]
            }
        },
        {"json_schema": json.dumps({"enum": [EMOJI]}, ensure_ascii=False)},
        {"regex": EMOJI},
        {"regex": "\x01" * limits.MAX_GRAMMAR_CHARACTERS},
    ],
    ids=["choice", "control characters", "json_schema", "regex", "regex of control characters"],
)
async def test_grammars_within_the_bounds_fit_a_submit(constraint: dict[str, Any]) -> None:
    assert len(await grammar_of(**constraint)) <= MAX_SUBMITTED_GRAMMAR_CHARACTERS


SQL = """
    root ::= select_statement   # as in the documentation of vLLM
    select_statement ::= "SELECT " column " from " table " where " condition
    column ::= "col_1 " | "col_2 "
    table ::= "table_1 " | "table_2 "
    condition ::= column "= " number
    number ::= "1 " | "2 "
"""


@pytest.mark.parametrize(
    ("grammar", "good", "bad"),
    [
        (SQL, ["SELECT col_1  from table_1  where col_2 = 1 "], ["SELECT col_3 ", "SELECT col_1 "]),
        ('root ::= "(" root ")" | [a-z]{2,3}', ["ab", "((abc))"], ["(ab", "a", "abcd"]),
        ('root-rule::="b"\r\nroot ::= "a::=" root-rule?', ["a::=", "a::=b"], ["b"]),
        ('start: "a ::= b" // no rule', ["a ::= b"], ["a", "b"]),
        (r'root ::= "d\u00e9\x41" [\u0410-\u042F\x2d]', ["déAЖ", "déA-"], ["déA", "d\ue9ca"]),
    ],
    ids=["vLLM", "recursive", "no spaces", "Lark", "escapes"],
)
async def test_a_grammar_in_gbnf_is_converted(
    grammar: str, good: list[str], bad: list[str]
) -> None:
    found = await grammar_of(grammar=grammar)
    assert [text for text in good if not takes(found, text)] == []
    assert [text for text in bad if takes(found, text)] == []


async def test_a_field_of_the_callers_own() -> None:
    with pytest.raises(InvalidArgument) as caught:
        await VALIDATOR.validate(inference_pb2.Constraint(regex="a("), "prompt.chat.tools")
    assert caught.value.field == "prompt.chat.tools"


async def test_the_longest_unused_grammars_are_forgotten() -> None:
    checked: list[str] = []

    def ask(request: bytes, _seconds: float) -> bytes:
        regex = inference_pb2.GenerateRequest.FromString(request).constraint.regex
        checked.append(regex)
        return json.dumps(["x" * (11 if regex == "e" else 3), ""]).encode()

    async def checks(regexes: str) -> list[str]:
        checked.clear()
        for regex in regexes:
            await validator.validate(inference_pb2.Constraint(regex=regex))
        return checked.copy()

    asked = inference_pb2.GenerateRequest(constraint={"regex": "a"})
    size = len(asked.SerializeToString()) + 3
    validator = GrammarValidator(capacity=3 * size, ask=ask)
    assert await checks("abca") == ["a", "b", "c"]
    assert await checks("dacd") == ["d"]
    assert await checks("b") == ["b"]  # forgotten for d
    assert await checks("e") == ["e"]
    assert await checks("e") == []
    assert await checks("abcd") == ["a", "b", "c", "d"]


SLOW = "start: " + " | ".join(f'"{number}"' for number in range(10_000))


async def test_a_slow_grammar_is_given_up_and_its_check_ends() -> None:
    """The process that checks it is killed; the next grammar is checked in another."""
    child = ChildProcess("constraint")
    hurried = GrammarValidator(seconds=60, ask=lambda request, _: child.ask(request, 0.0))
    with pytest.raises(InvalidArgument, match="takes more than 60 seconds to check"):
        await hurried.validate(inference_pb2.Constraint(grammar=SLOW))
    assert child._connection is None
    assert await GrammarValidator(seconds=60, ask=child.ask).validate(
        inference_pb2.Constraint(regex="a")
    )


@pytest.mark.parametrize(
    "multiples",
    [
        pytest.param([2**23], id="a power of two"),
        pytest.param([9_973, 9_967], id="the product of two"),
    ],
)
@pytest.mark.parametrize("special", ["", "<|im_end|>", "<[7]>"])
async def test_a_grammar_that_only_a_matcher_finds_slow_is_refused(
    multiples: list[int], special: str
) -> None:
    """Workers would compile it for minutes, with gigabytes of memory."""
    schema = json.dumps({"type": "integer", "allOf": [{"multipleOf": each} for each in multiples]})
    child = ChildProcess("constraint")
    await asyncio.to_thread(child.wait)  # its start may take longer than the check
    hurried = GrammarValidator(seconds=1, ask=child.ask)
    constraint = inference_pb2.Constraint(json_schema=schema)
    if special:
        constraint = inference_pb2.Constraint(grammar=f"start: {special} | x\nx: %json {schema}")
    with pytest.raises(InvalidArgument, match="takes more than 1 seconds to check; simplify"):
        await hurried.validate(constraint)


async def test_limits_of_workers_hold_in_the_check() -> None:
    with pytest.raises(InvalidArgument, match="fuel"):
        await grammar_of(json_schema='{"type": "integer", "multipleOf": 864000000}')


@pytest.mark.parametrize(
    "grammar",
    [
        "start: <|im_end|> <é>",
        'start: <|"|> "a"',
        "start: <[5-9,300000]> | <[*]>",
        'start: "<b>" /<i>/ <tool_call>',
        '{"grammars": [{"lark_grammar": "start: <|\\"|> <a\\\\\\\\b>"}]}',
    ],
)
async def test_a_check_knows_every_special_token(grammar: str) -> None:
    """Only the worker knows which ones the model has."""
    assert await grammar_of(grammar=grammar)


async def test_many_slow_grammars_of_one_tenant_keep_no_other_tenant_waiting() -> None:
    """But for the one that is checked."""
    checked, may_end = list[str](), threading.Semaphore(0)

    def ask(request: bytes, _seconds: float) -> bytes:
        checked.append(inference_pb2.GenerateRequest.FromString(request).constraint.regex)
        assert may_end.acquire(timeout=WAIT)
        return json.dumps(["grammar", ""]).encode()

    validator = GrammarValidator(seconds=WAIT, ask=ask)
    slow = [
        asyncio.create_task(
            validator.validate(inference_pb2.Constraint(regex=f"m{number}"), tenant="mallory")
        )
        for number in range(20)
    ]
    async with asyncio.timeout(WAIT):
        while not checked:
            await asyncio.sleep(0.01)
    other = asyncio.create_task(
        validator.validate(inference_pb2.Constraint(regex="a"), tenant="ada")
    )
    await asyncio.sleep(0)  # it has its place
    may_end.release(21)
    await asyncio.gather(*slow, other)
    assert checked.index("a") == 1
    assert not validator._turns


async def test_only_waiting_for_other_checks_may_be_tried_again() -> None:
    may_end = threading.Event()

    def ask(request: bytes, _seconds: float) -> bytes:
        assert may_end.wait(WAIT)
        return json.dumps(["grammar", ""]).encode()

    slow = asyncio.create_task(
        GrammarValidator(seconds=WAIT, ask=ask).validate(inference_pb2.Constraint(regex="slow"))
    )
    await asyncio.sleep(0)  # it has its place
    hurried = GrammarValidator(seconds=0.001, ask=ask)
    try:
        with pytest.raises(
            Overloaded, match=r"^constraint\.regex: waited 0\.003 seconds for other"
        ):
            await hurried.validate(inference_pb2.Constraint(regex="a"))
    finally:
        may_end.set()
        assert await slow == "grammar"


async def test_what_is_remembered_of_a_grammar_is_of_one_tenant() -> None:
    """By the time of an answer nobody learns which grammars others use."""
    checked: list[str] = []

    def ask(request: bytes, _seconds: float) -> bytes:
        checked.append(inference_pb2.GenerateRequest.FromString(request).constraint.regex)
        return json.dumps(["grammar", ""]).encode()

    validator, regex = GrammarValidator(ask=ask), inference_pb2.Constraint(regex="a")
    for tenant in ("ada", "bob", "ada", "bob"):
        await validator.validate(regex, tenant=tenant, salt=tenant.encode())
    assert checked == ["a", "a"]


def test_the_library_reads_no_files() -> None:
    """What a user sends can name no resource of the host."""
    for grammar in ('%import "/etc/passwd"\nstart: "a"', 'start: %json {"$ref": "/etc/passwd"}'):
        is_error, _ = llguidance.LLMatcher.validate_grammar_with_warnings(grammar)
        assert is_error


def _chain_of_rules(name: str) -> str:
    lines, size = [f"start: {name}0"], 0
    while size < limits.MAX_GRAMMAR_CHARACTERS - 100:
        lines.append(f'{name}{len(lines) - 1}: "a" {name}{len(lines)}')
        size += len(lines[-1]) + 1
    return "\n".join([*lines, f'{name}{len(lines) - 1}: "b"'])


def _chain_of_references() -> str:
    count = limits.MAX_GRAMMAR_CHARACTERS // 44
    defs: dict[str, Any] = {f"d{n}": {"items": {"$ref": f"#/$defs/d{n + 1}"}} for n in range(count)}
    defs[f"d{count}"] = {"type": "null"}
    text = json.dumps({"$ref": "#/$defs/d0", "$defs": defs}, separators=(",", ":"))
    assert limits.MAX_GRAMMAR_CHARACTERS * 0.9 < len(text) <= limits.MAX_GRAMMAR_CHARACTERS
    return text


@pytest.mark.parametrize("name", ["r", "T"], ids=["rules", "terminals"])
async def test_the_longest_chains_of_rules_do_not_overflow_the_stack(name: str) -> None:
    assert await VALIDATOR.validate(inference_pb2.Constraint(grammar=_chain_of_rules(name)))


async def test_the_longest_chain_of_references_does_not_overflow_the_stack() -> None:
    """It is refused by a limit of workers."""
    with pytest.raises(InvalidArgument, match=r"grammar\) too big \(limit"):
        await grammar_of(json_schema=_chain_of_references())


async def test_an_error_at_the_end_of_a_long_chain_is_found_at_once() -> None:
    broken = _chain_of_rules("T").rpartition('"b"')[0] + "NOTHING"
    began = time.monotonic()
    with pytest.raises(InvalidArgument, match=r"constraint\.grammar"):
        await VALIDATOR.validate(inference_pb2.Constraint(grammar=broken))
    assert time.monotonic() - began < WAIT / 2  # half of what the validator takes at most


async def test_schemas_as_zod_and_pydantic_write_them() -> None:
    """Records with keys of text or of an enum, a decimal, an annotation, keywords as properties."""
    record = {
        "type": "object",
        "propertyNames": {"type": "string"},
        "additionalProperties": {"type": "integer"},
    }
    grammar = await grammar_of(json_schema=json.dumps(record))
    assert takes(grammar, '{"a": 1, "b": 2}')
    assert not takes(grammar, '{"a": "x"}')
    grammar = await grammar_of(
        json_schema=json.dumps(record | {"propertyNames": {"enum": ["a", "b"]}})
    )
    assert takes(grammar, '{"b": 2}')
    assert not takes(grammar, '{"c": 2}')
    decimal = {"type": "string", "pattern": r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$"}
    grammar = await grammar_of(json_schema=json.dumps(decimal))
    assert [takes(grammar, f'"{text}"') for text in ("1.5", "-.5", "", "-.", "1x")] == [
        True,
        True,
        False,
        False,
        False,
    ]
    phone = {"type": "string", "format": "phone", "maxLength": 3}
    grammar = await grammar_of(json_schema=json.dumps(phone))
    assert [takes(grammar, f'"{text}"') for text in ("123", "1234")] == [True, False]
    named = {
        "type": "object",
        "properties": {"not": {"enum": [1]}, "format": {"enum": [2]}},
        "required": ["not"],
    }
    grammar = await grammar_of(json_schema=json.dumps(named))
    assert takes(grammar, '{"not": 1, "format": 2}')
    url = {"type": "string", "format": "uri", "maxLength": 2083, "minLength": 1}
    grammar = await grammar_of(json_schema=json.dumps(url))
    assert takes(grammar, '"https://example.com/a?b=1"')
    assert not takes(grammar, '"a b"')
    email = {
        "type": "string",
        "format": "email",
        "pattern": (
            r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+"
            r"[A-Za-z]{2,}$"
        ),
    }
    grammar = await grammar_of(json_schema=json.dumps(email))
    assert takes(grammar, '"ada.l@example.com"')
    assert not takes(grammar, '"ada..l@example.com"')
    text = {"type": "string", "nullable": True}
    grammar = await grammar_of(json_schema=json.dumps(text))
    assert [takes(grammar, each) for each in ("null", '"a"', "1")] == [True, True, False]


class Leaf(BaseModel):
    kind: Literal["leaf"]


class Branch(BaseModel):
    kind: Literal["branch"]
    parts: "list[Annotated[Leaf | Branch, Field(discriminator='kind')]]"


async def test_recursive_schemas_have_annotations_beside_their_references() -> None:
    """llguidance would take those that it does not know for conditions."""
    schema = close_objects(Branch.model_json_schema())
    grammar = await grammar_of(json_schema=json.dumps(schema))
    assert takes(grammar, '{"kind": "branch", "parts": [{"kind": "branch", "parts": []}]}')
    assert takes(grammar, '{"kind": "branch", "parts": [{"kind": "leaf"}]}')
    assert not takes(grammar, '{"kind": "branch", "parts": [{"kind": "leaf", "parts": []}]}')
    following = {"$ref": "#/$defs/node", "x-order": 1, "deprecated": True, "nullable": True}
    node = {"type": "object", "properties": {"next": following}, "additionalProperties": False}
    grammar = await grammar_of(
        json_schema=json.dumps({"$ref": "#/$defs/node", "$defs": {"node": node}})
    )
    assert takes(grammar, '{"next": {"next": null}}')
    assert not takes(grammar, '{"next": 1}')


async def test_a_tuple_keeps_its_items_beside_a_keyword_of_older_drafts() -> None:
    schema = {"type": "array", "prefixItems": [{"const": 1}], "items": False}
    grammar = await grammar_of(json_schema=json.dumps(schema | {"additionalItems": False}))
    assert [takes(grammar, text) for text in ("[1]", "[2]", "[1, 2]")] == [True, False, False]


@pytest.mark.parametrize(
    ("pattern", "good", "bad"),
    [
        (r"^[^[\]]+$", "a", "["),
        ("^[[a]]$", "a]", "a"),
        ("^[a&&b]$", "&", "c"),
        ("^[+--]$", ",", "a"),
        ("^[a~~b]$", "~", "c"),
        (r"^[.-\w]$", "-", "/"),
    ],
)
async def test_classes_of_characters_are_those_of_ecmascript(
    pattern: str, good: str, bad: str
) -> None:
    """Rust has classes within classes."""
    grammar = await grammar_of(json_schema=json.dumps({"type": "string", "pattern": pattern}))
    assert takes(grammar, f'"{good}"')
    assert not takes(grammar, f'"{bad}"')
    by_name = {"type": "object", "patternProperties": {pattern: {}}, "additionalProperties": False}
    grammar = await grammar_of(json_schema=json.dumps(by_name))
    assert takes(grammar, f'{{"{good}": 1}}')
    assert not takes(grammar, f'{{"{bad}": 1}}')


@pytest.mark.parametrize("number", [2**53, 2**53 + 2, 2**62 + 2**10, -(2**62)])
async def test_large_integers_are_exact(number: int) -> None:
    schemas: list[dict[str, Any]] = [{"const": number}, {"enum": [number]}]
    schemas.append({"type": "integer", "minimum": number, "maximum": number})
    for schema in schemas:
        grammar = await grammar_of(json_schema=json.dumps(schema))
        assert takes(grammar, str(number))
        assert not any(takes(grammar, str(number + step)) for step in (-2, 2))


@pytest.mark.parametrize("number", [2**63 - 1, 2**63, 2**64])
async def test_no_integer_is_above_a_maximum_beyond_64_bits(number: int) -> None:
    for name in ("maximum", "exclusiveMaximum"):
        schema = {"type": "integer", name: number}
        grammar = await grammar_of(json_schema=json.dumps(schema))
        assert takes(grammar, str(2**63 - 2))
        assert not takes(grammar, str(number + 1))


async def test_a_union_of_pydantic_with_a_discriminator() -> None:
    class Cat(BaseModel):
        kind: Literal["cat"]
        lives: int

    class Dog(BaseModel):
        kind: Literal["dog", "wolf"]
        name: str

    pet = TypeAdapter(Annotated[Cat | Dog, Field(discriminator="kind")])
    grammar = await grammar_of(json_schema=json.dumps(close_objects(pet.json_schema())))
    assert takes(grammar, '{"kind": "cat", "lives": 9}')
    assert takes(grammar, '{"kind": "wolf", "name": "x"}')
    assert not takes(grammar, '{"kind": "cat", "name": "x"}')


async def test_a_closed_schema_has_required_properties_without_a_schema() -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [1]}}, "required": ["a", "b"]}
    grammar = await grammar_of(json_schema=json.dumps(close_objects(schema)))
    assert takes(grammar, '{"a": 1, "b": [2]}')
    assert not takes(grammar, '{"a": 1, "b": [2], "c": 3}')


@pytest.mark.parametrize("character", "<>-@#%&=!:;,'~`/_.+*()|[]{}^?é")
async def test_lookaheads_exclude_each_character(character: str) -> None:
    """In the patterns of llguidance, an escaped `<` is the beginning of a word."""
    escaped = f"\\{character}" if character in ".+*()|[]{}^?" else character
    for pattern in (f"^(?!{escaped}).*$", f"^(?!.*{escaped}).*$", f"^(?!.*{escaped}a).*$"):
        grammar = await grammar_of(json_schema=json.dumps({"type": "string", "pattern": pattern}))
        assert takes(grammar, '"ba"')
        assert not takes(grammar, json.dumps(f"{character}a", ensure_ascii=False))


async def test_one_of_and_any_of_hold_together() -> None:
    schema = {"oneOf": [{"const": 1}, {"const": 2}], "anyOf": [{"const": 2}, {"const": 3}]}
    grammar = await grammar_of(json_schema=json.dumps(schema))
    assert [takes(grammar, text) for text in "123"] == [False, True, False]


async def test_a_schema_that_grows_too_large_is_refused() -> None:
    width = r"(?=[\d.]{1,99}0*$)\d*\.\d*0*$"
    schemas = [{"pattern": f"^(?:a|{width})"}] * 1_000
    with pytest.raises(InvalidArgument, match="too large once"):
        await grammar_of(json_schema=json.dumps({"anyOf": schemas}))


def test_a_schema_that_is_too_deep_is_not_combined() -> None:
    schema = '{"items": ' * 5_000 + "{}" + "}" * 5_000
    with pytest.raises(ValueError, match="is nested too deeply"):
        either("start: /a/", f'{{"grammars": [{{"json_schema": {schema}}}]}}')
