"""Tool calls: read from text that arrives in any pieces, and demanded by a grammar."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from llguidance import LLMatcher

from tandem.proto import inference_pb2, limits
from tandem.router.frontend import chat as chat_module
from tandem.router.frontend import constraint
from tandem.router.frontend.constraint import check_constraint
from tandem.router.frontend.formats.calls import call_format
from tandem.router.frontend.tokenizer import Tokenizer
from tandem.router.frontend.tools import tool_call_constraint
from tandem.router.output.tool_parser import parser_for
from tandem.tests.router.fake_source import byte_tokenizer
from tandem.tests.tiny_tokenizer import make_tokenizer

MODES = inference_pb2.ToolChoice
HERMES, LLAMA = (
    "Use <tool_call></tool_call>.",
    'Respond with {"name": ..., "parameters": dictionary of arguments}.',
)
SCHEMA = {
    "type": "object",
    "properties": {"city": {"$ref": "#/$defs/name"}},
    "required": ["city"],
    "additionalProperties": False,
    "$defs": {"name": {"type": "string", "maxLength": 9}},
}

QWEN_2_5 = """{%- if tools %}
    {{- "\\n\\n# Tools\\n\\nYou may call one or more functions to assist with the user query." }}
    {{- "\\n</tools>\\n\\nFor each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:\\n<tool_call>\\n{\\"name\\": <function-name>, \\"arguments\\": <args-json-object>}\\n</tool_call><|im_end|>\\n" }}
{%- endif %}"""  # noqa: E501
QWEN_3 = (
    QWEN_2_5 + "{%- if enable_thinking is defined and enable_thinking is false %}"
    "{{- '<think>' }}{%- endif %}"
)
LLAMA_3_1 = """{%- if not tools is none %}
    {{- "Given the following functions, please respond with a JSON for a function call with its proper arguments." }}
    {{- 'Respond in the format {"name": function name, "parameters": dictionary of argument name and its value}. ' }}
{%- endif %}
{%- if builtin_tools is defined %}{{- "<|python_tag|>" + tool_call.name + ".call(" }}
{%- else %}{{- '{"name": "' + tool_call.name + '", ' }}{{- '"parameters": ' }}{%- endif %}"""  # noqa: E501
LLAMA_3_2 = LLAMA_3_1.replace("<|python_tag|>", "")


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (QWEN_2_5, "hermes"),
        (QWEN_3, "hermes"),
        (LLAMA_3_1, "llama3_json"),
        (LLAMA_3_2, "llama3_json"),
        ("{{ x }}", "hermes"),
    ],
)
def test_the_format_is_the_one_that_the_template_teaches(template: str, expected: str) -> None:
    assert call_format(template) == expected


def chat(mode: int = 0, name: str = "", **fields: Any) -> inference_pb2.Chat:
    tools = [
        inference_pb2.Tool(name="weather", parameters=json.dumps(SCHEMA)),
        inference_pb2.Tool(name="now"),
    ]
    given: dict[str, Any] = {"tools": tools, "tool_choice": MODES(mode=mode, name=name)}  # type: ignore[arg-type]
    return inference_pb2.Chat(**given | fields)


def read(template: str, pieces: list[str]) -> tuple[str, list[tuple[str, str]]]:
    """The text and the calls of a completion that arrives in `pieces`."""
    parser = parser_for(chat(), byte_tokenizer(chat_template=template))
    assert parser is not None
    texts, calls = [], []
    for text, found in (*[parser.push(piece) for piece in pieces], parser.finish()):
        texts.append(text)
        calls += found
    assert len({call.id for call in calls}) == len(calls)
    assert all(call.id.startswith("call_") and len(call.id) == 29 for call in calls)
    return "".join(texts), [(call.name, call.arguments) for call in calls]


def hermes(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def llama(name: str, arguments: str) -> str:
    return f'{{"name": "{name}", "parameters": {arguments}}}'


CITY = '{"city": "Köln"}'
CASES: list[tuple[str, str, str, list[tuple[str, str]]]] = [
    (HERMES, "just text\n", "just text\n", []),
    (HERMES, "", "", []),
    (HERMES, hermes("weather", CITY), "", [("weather", CITY)]),
    (HERMES, f"I look.\n{hermes('weather', CITY)}\n", "I look.", [("weather", CITY)]),
    (
        HERMES,
        f"{hermes('now', '{}')}\n{hermes('weather', CITY)}",
        "",
        [("now", "{}"), ("weather", CITY)],
    ),
    (HERMES, f"a {hermes('now', '{}')} b\n", "a  b\n", [("now", "{}")]),
    (HERMES, f"{hermes('now', '{}')} b", "b", [("now", "{}")]),
    (HERMES, '<tool_call>{"name": "now"}</tool_call>', "", [("now", "{}")]),
    (HERMES, '<tool_call>{"name": "now", "arguments": "{}"}</tool_call>', "", [("now", "{}")]),
    (HERMES, hermes("now", "null"), "", [("now", "{}")]),
    (HERMES, hermes("now", '""'), "", [("now", "{}")]),
    (HERMES, hermes("now", '" \\n"'), "", [("now", "{}")]),
    (HERMES, hermes("now", '"x"'), hermes("now", '"x"'), []),
    (
        HERMES,
        hermes("weather", '{"city": "</tool_call>"}'),
        "",
        [("weather", '{"city": "</tool_call>"}')],
    ),
    (HERMES, hermes("weather", '{"city": "K\\u00f6ln"}'), "", [("weather", CITY)]),
    (HERMES, hermes("now", "{}").removesuffix("</tool_call>"), "", [("now", "{}")]),
    (HERMES, "<tool_call>{broken}</tool_call> on", "<tool_call>{broken}</tool_call> on", []),
    (
        HERMES,
        f"<tool_call>1</tool_call>{hermes('now', '{}')}",
        "<tool_call>1</tool_call>",
        [("now", "{}")],
    ),
    (HERMES, hermes("now", '{"a": NaN}'), hermes("now", '{"a": NaN}'), []),
    (HERMES, hermes("now", '{"a": "\\ud800"}'), hermes("now", '{"a": "\\ud800"}'), []),
    (HERMES, hermes("now", "[1]"), hermes("now", "[1]"), []),
    (HERMES, '<tool_call>{"name": "wea', '<tool_call>{"name": "wea', []),
    (HERMES, "1 < 2 <tool", "1 < 2 <tool", []),
    (HERMES, llama("now", "{}"), llama("now", "{}"), []),
    (LLAMA, "just text\n", "just text\n", []),
    (LLAMA, llama("weather", CITY), "", [("weather", CITY)]),
    (LLAMA, "<|python_tag|>" + llama("weather", CITY), "", [("weather", CITY)]),
    (
        LLAMA,
        f"\n{llama('now', '{}')}; {llama('weather', CITY)}",
        "",
        [("now", "{}"), ("weather", CITY)],
    ),
    (LLAMA, f"{llama('now', '{}')}\n{llama('now', '{}')};", "", [("now", "{}")] * 2),
    (LLAMA, llama("weather", '{"city": "}\\"; {"}'), "", [("weather", '{"city": "}\\"; {"}')]),
    (LLAMA, llama("now", "null"), "", [("now", "{}")]),
    (LLAMA, '{"answer": {"x": 1}} it is', '{"answer": {"x": 1}} it is', []),
    (LLAMA, '{"name": "Ada"}', '{"name": "Ada"}', []),
    (LLAMA, f"{llama('now', '{}')} then", "then", [("now", "{}")]),
    (LLAMA, '{"name": "now", "parameters": {', '{"name": "now", "parameters": {', []),
    (LLAMA, "<|python", "<|python", []),
    (LLAMA, f"see {llama('now', '{}')}", f"see {llama('now', '{}')}", []),
]


@pytest.mark.parametrize(("template", "text", "shown", "calls"), CASES)
def test_calls_are_read_however_the_text_is_cut(
    template: str, text: str, shown: str, calls: list[tuple[str, str]]
) -> None:
    assert read(template, [text]) == (shown, calls)
    assert read(template, list(text)) == (shown, calls)
    for cut in range(len(text)):
        assert read(template, [text[:cut], text[cut:]]) == (shown, calls)


MARKUP = st.sampled_from(
    [
        *(
            "<tool_call>",
            "</tool_call>",
            "<tool",
            '{"name": "f", "arguments": {}}',
            "<|python_tag|>",
            "<|p",
        ),
        *(
            '{"name": "f", "parameters": {"x": "}"}}',
            '"name": ',
            "f",
            "; ",
            "{",
            "}",
            "[",
            '"',
            "\\",
            "1",
            "ö",
            " ",
            "\n",
        ),
    ]
)


@given(st.sampled_from([HERMES, LLAMA]), st.lists(st.lists(MARKUP, max_size=3), max_size=8))
def test_any_text_in_any_pieces(template: str, groups: list[list[str]]) -> None:
    pieces = ["".join(group) for group in groups]
    whole = read(template, ["".join(pieces)])
    assert read(template, pieces) == whole
    assert read(template, list("".join(pieces))) == whole
    if not whole[1]:
        assert whole[0] == "".join(pieces)  # without a call not a character is lost


def test_text_before_a_call_does_not_wait_for_it() -> None:
    parser = parser_for(chat(), byte_tokenizer(chat_template=HERMES))
    assert parser is not None
    assert parser.push("I look ") == ("I look", [])
    assert parser.push("up <tool") == (" up", [])
    assert parser.push("_call>" + '{"name": "now"}')[1] == []
    (call,) = parser.push("</tool_call>")[1]  # not only at the end
    assert call.name == "now"


def test_no_parser_without_tools() -> None:
    tokenizer = byte_tokenizer(chat_template=HERMES)
    assert parser_for(inference_pb2.Chat(), tokenizer) is None
    assert parser_for(chat(MODES.MODE_NONE), tokenizer) is None


@pytest.mark.parametrize("template", [HERMES, LLAMA])
def test_texts_of_the_grammar_parse_as_calls(template: str) -> None:
    """Texts that the grammar accepts give calls that fit the schemas; it refuses other texts."""
    write = hermes if template == HERMES else llama
    between = "\n" if template == HERMES else "; "
    tokenizer = byte_tokenizer(chat_template=template)
    one, other = write("weather", CITY), write("now", "{}")
    wrong = [
        write("weather", "{}"),
        write("weather", '{"city": "too long a name"}'),
        write("nope", "{}"),
    ]
    wrong += [
        write("now", '{"a": 1}'),
        write("weather", '{ "city": "Köln"}'),
        "text",
        f"text {one}",
        one[:-1],
    ]
    cases: list[tuple[inference_pb2.Chat, list[str], list[str]]] = [
        (chat(MODES.MODE_REQUIRED), [one, other, between.join([one, other, one])], wrong),
        (chat(MODES.MODE_NAMED, "weather"), [one], [other, one + between + one, *wrong]),
    ]
    for asked, good, bad in cases:
        grammar = call_grammar(asked, tokenizer)
        for text in good:
            assert accepts(grammar, text), text
            assert len(read(template, [text])[1]) == text.count('"name"')
        for text in bad:
            assert not accepts(grammar, text), text


def call_grammar(asked: inference_pb2.Chat, tokenizer: Tokenizer) -> str:
    """Returns the grammar of a demanded call. Raises ValueError if it is refused."""
    calls = tool_call_constraint(asked, tokenizer)
    assert calls is not None
    grammar, reason = check_constraint(calls.constraint, calls.tools)
    if reason:
        raise ValueError(reason)
    return grammar


def accepts(grammar: str, text: str) -> bool:
    from llguidance.hf import from_tokenizer

    tokenizer = make_tokenizer()
    matcher = LLMatcher(from_tokenizer(tokenizer), grammar)
    assert not matcher.is_error(), matcher.get_error()
    ids = tokenizer(text)["input_ids"]
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


def test_no_constraint_where_the_model_decides() -> None:
    tokenizer = byte_tokenizer(chat_template=HERMES)
    assert tool_call_constraint(chat(), tokenizer) is None
    assert tool_call_constraint(chat(MODES.MODE_NONE), tokenizer) is None
    assert tool_call_constraint(inference_pb2.Chat(), tokenizer) is None


def test_tools_that_are_too_large_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tools after the one that is too large are not read."""
    parameters = json.dumps({"description": "x" * (limits.MAX_GRAMMAR_CHARACTERS // 2)})
    tools = [inference_pb2.Tool(name=name, parameters=parameters) for name in ("a", "b", "c", "d")]
    read = []

    def parameters_schema(tool: inference_pb2.Tool) -> dict[str, Any]:
        read.append(tool.name)
        return chat_module.parameters_schema(tool)

    monkeypatch.setattr(constraint, "parameters_schema", parameters_schema)
    with pytest.raises(ValueError, match="the maximum is 131072"):
        call_grammar(chat(MODES.MODE_REQUIRED, tools=tools), byte_tokenizer())
    assert read == ["a", "b"]


async def test_markup_that_is_a_special_token_stays_in_the_text() -> None:
    """Some tokenizers have <tool_call> as a special token, which decoding drops.

    A grammar names such a token differently.
    """
    fast = make_tokenizer()
    fast.add_special_tokens({"additional_special_tokens": ["<tool_call>", "</tool_call>"]})
    tokenizer = Tokenizer(fast)
    ids = await tokenizer.encode(hermes("now", "{}"))
    assert tokenizer.decode(ids) == hermes("now", "{}")
    assert not tokenizer.special_ids & set(ids)
    assert tokenizer.decode([*ids, 1]) == tokenizer.decode(
        ids
    )  # the end of the sequence is dropped as ever
    grammar = call_grammar(chat(MODES.MODE_NAMED, "now"), tokenizer)
    assert 'call: <tool_call> "\\n" object "\\n" </tool_call>' in grammar


def test_a_special_token_in_brackets_is_named_by_its_id() -> None:
    """llguidance would read `[TOOL_CALLS]` of Mistral's models as an optional rule."""
    fast = make_tokenizer()
    fast.add_special_tokens({"additional_special_tokens": ["[TOOL_CALLS]"]})
    fast.chat_template = "[TOOL_CALLS]"
    tokenizer = Tokenizer(fast)
    (token,) = tokenizer.ids_of(["[TOOL_CALLS]"])
    grammar = call_grammar(chat(MODES.MODE_NAMED, "now"), tokenizer)
    assert f'start: <[{token}]> "[" call' in grammar


def test_the_keywords_of_arguments_are_read_or_named() -> None:
    record = {
        "type": "object",
        "propertyNames": {"type": "string"},
        "additionalProperties": {"type": "integer"},
    }
    grammar = constraint_of(record)
    assert "propertyNames" not in grammar
    with pytest.raises(ValueError, match=r"'f'.*'uniqueItems'"):
        constraint_of(
            {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
        )


def constraint_of(parameters: dict[str, Any], **choice: Any) -> str:
    tools = [{"name": "f", "parameters": json.dumps(parameters)}]
    chosen = {"mode": inference_pb2.ToolChoice.MODE_REQUIRED} | choice
    return call_grammar(inference_pb2.Chat(tools=tools, tool_choice=chosen), byte_tokenizer())


def test_a_single_call_is_not_repeated() -> None:
    parameters = {"type": "object"}
    assert "call)*" in constraint_of(parameters)
    assert "call)*" not in constraint_of(parameters, single_call=True)
