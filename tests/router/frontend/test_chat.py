"""Chats and templates: bounds, what a template sees, and templates that are programs gone wrong."""

import json
import time
from typing import Any

import jinja2
import pytest

from tandem.proto import inference_pb2, limits
from tandem.proto.errors import InvalidArgument
from tandem.router.frontend.chat import check_chat, json_object, template_variables
from tandem.router.frontend.template import render
from tandem.router.frontend.template_bounds import TemplateBoundExceeded
from tandem.tests.router.fake_source import byte_tokenizer
from tandem.tests.tiny_tokenizer import make_tokenizer

MODES = inference_pb2.ToolChoice
WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city"],
}
QWEN = """
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0]['role'] == 'system' %}{{- messages[0]['content'] }}{%- else %}{{- 'You are Qwen.' }}{%- endif %}
    {{- "\\n\\n# Tools\\n\\n<tools>" }}
    {%- for tool in tools %}{{- "\\n" }}{{- tool | tojson }}{%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- endif %}
{%- for message in messages %}
    {%- if (message.role == "user") or (message.role == "assistant" and not message.tool_calls) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {{- '<|im_start|>' + message.role }}
        {%- if message.content %}{{- '\\n' + message.content }}{%- endif %}
        {%- for tool_call in message.tool_calls %}
            {%- if tool_call.function is defined %}{%- set tool_call = tool_call.function %}{%- endif %}
            {{- '\\n<tool_call>\\n{"name": "' }}{{- tool_call.name }}{{- '", "arguments": ' }}
            {{- tool_call.arguments | tojson }}{{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {{- '<tool_response>\\n' ~ message.content ~ '\\n</tool_response>' }}
        {%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}
"""


def chat(*said: tuple[str, str], **fields: Any) -> inference_pb2.Chat:
    messages = [inference_pb2.ChatMessage(role=role, content=content) for role, content in said or [("user", "hi")]]
    return inference_pb2.Chat(**{"messages": messages} | fields)


def call(**fields: Any) -> inference_pb2.ChatMessage:
    return inference_pb2.ChatMessage(role="assistant", tool_calls=[inference_pb2.ToolCall(**fields)])


def tool(name: str = "weather", **fields: Any) -> inference_pb2.Tool:
    return inference_pb2.Tool(name=name, **fields)


MAX_CHARACTERS, NAME = limits.MAX_PROMPT_CHARACTERS, "n" * limits.MAX_NAME_CHARACTERS
AT_THE_BOUNDS = [
    chat(*[("user", "x")] * limits.MAX_CHAT_MESSAGES),
    chat(("r" * limits.MAX_ROLE_CHARACTERS, "x" * MAX_CHARACTERS)),
    chat(tools=[tool(f"t{i}") for i in range(limits.MAX_TOOLS)], tool_choice=MODES(mode=MODES.MODE_REQUIRED)),
    chat(tools=[tool(NAME)], tool_choice=MODES(mode=MODES.MODE_NAMED, name=NAME)),
    chat(messages=[call(id=NAME, name=NAME, arguments="no JSON")]),
    chat(messages=[inference_pb2.ChatMessage(role="tool", tool_call_id=NAME, name=NAME)]),
    chat(tools=[tool(parameters='{"a": "%s"}' % ("x" * (limits.MAX_GRAMMAR_CHARACTERS - 9)))]),
    chat(template_kwargs='{"a": "%s"}' % ("x" * (limits.MAX_TEMPLATE_KWARGS_CHARACTERS - 9))),
    chat(("assistant", "so"), continue_final_message=True),
]
REFUSED: list[tuple[inference_pb2.Chat, str, str]] = [
    (inference_pb2.Chat(), "messages", "1 to 1024"),
    (chat(*[("user", "x")] * (limits.MAX_CHAT_MESSAGES + 1)), "messages", "1 to 1024"),
    (chat(("user", "x"), ("", "x")), "messages[1].role", "1 to 64"),
    (chat(("r" * 65, "x")), "messages[0].role", "1 to 64"),
    (chat(("user", "x" * (MAX_CHARACTERS + 1))), "", "1000001 characters"),
    (chat(("user", "x" * MAX_CHARACTERS), tools=[tool(description="y")]), "", "1000001 characters"),
    (chat(messages=[inference_pb2.ChatMessage(role="user", name=NAME + "n")]), "messages[0].name", "at most 64"),
    (
        chat(messages=[inference_pb2.ChatMessage(role="tool", tool_call_id=NAME + "n")]),
        "messages[0].tool_call_id",
        "64",
    ),
    (chat(messages=[call(name="")]), "messages[0].tool_calls[0].name", "1 to 64"),
    (chat(messages=[call(name="f", id=NAME + "n")]), "messages[0].tool_calls[0].id", "at most 64"),
    (
        chat(messages=[inference_pb2.ChatMessage(role="user", tool_calls=[inference_pb2.ToolCall(name="f")])]),
        "messages[0].tool_calls",
        "assistant only",
    ),
    (
        chat(
            messages=[inference_pb2.ChatMessage(role="assistant", tool_calls=[inference_pb2.ToolCall(name="f")] * 129)]
        ),
        "messages[0].tool_calls",
        "at most 128",
    ),
    (chat(tools=[tool(f"t{i}") for i in range(129)]), "tools", "at most 128"),
    (chat(tools=[tool(), tool("")]), "tools[1].name", "1 to 64"),
    (chat(tools=[tool(NAME + "n")]), "tools[0].name", "1 to 64"),
    (chat(tools=[tool('f"')]), "tools[0].name", "letters"),
    (chat(tools=[tool(), tool()]), "tools[1].name", "another tool"),
    (chat(tools=[tool(parameters="x" * (limits.MAX_GRAMMAR_CHARACTERS + 1))]), "tools[0].parameters", "131072"),
    (chat(tools=[tool(parameters="[]")]), "tools[0].parameters", "JSON schema"),
    (chat(tools=[tool(parameters='{"a": NaN}')]), "tools[0].parameters", "JSON schema"),
    (chat(tools=[tool(parameters='{"type": "string"}')]), "tools[0].parameters", "of an object"),
    (chat(tools=[tool(parameters='{"a":' * 20_000)]), "tools[0].parameters", "JSON schema"),
    (chat(tool_choice=MODES(mode=MODES.MODE_REQUIRED)), "tool_choice", "no tools"),
    (chat(tool_choice=MODES(mode=9)), "tool_choice.mode", "not a mode"),  # type: ignore[arg-type]
    (chat(tools=[tool()], tool_choice=MODES(mode=MODES.MODE_NAMED, name="g")), "tool_choice.name", "one of the tools"),
    (chat(tools=[tool()], tool_choice=MODES(name="weather")), "tool_choice.name", "MODE_NAMED"),
    (chat(template_kwargs="x" * 4_097), "template_kwargs", "at most 4096"),
    (chat(template_kwargs="[1]"), "template_kwargs", "JSON object"),
    (chat(template_kwargs='{"a": "\\ud800"}'), "template_kwargs", "JSON object"),
    (chat(template_kwargs='{"a": 1e999}'), "template_kwargs", "JSON object"),
    (chat(template_kwargs='{"messages": []}'), "template_kwargs", "'messages'"),
    (chat(template_kwargs='{"range": 1}'), "template_kwargs", "'range'"),
    (chat(("user", "x"), continue_final_message=True), "continue_final_message", "assistant"),
    (chat(messages=[call(name="f")], continue_final_message=True), "continue_final_message", "assistant"),
    (
        chat(
            ("assistant", "x"),
            continue_final_message=True,
            tools=[tool()],
            tool_choice=MODES(mode=MODES.MODE_REQUIRED),
        ),
        "continue_final_message",
        "tool_choice",
    ),
]


@pytest.mark.parametrize("good", AT_THE_BOUNDS)
def test_chats_at_the_bounds_are_taken(good: inference_pb2.Chat) -> None:
    check_chat(good)


@pytest.mark.parametrize(("bad", "field", "said"), REFUSED)
def test_chats_past_the_bounds_are_refused_by_field(bad: inference_pb2.Chat, field: str, said: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        check_chat(bad)
    assert caught.value.field == ".".join(["prompt.chat", *([field] if field else [])])
    assert said in caught.value.message


def test_json_object_parses_objects_only() -> None:
    assert json_object('{"a": [1, "é"]}') == {"a": [1, "é"]}
    for text in ("", "1", "{", '{"a": Infinity}', '{"a": "\\udc00"}', "[" * 100_000, '{"a": ' + "9" * 5_000 + "}"):
        assert json_object(text) is None


async def test_tools_and_calls_render_as_in_transformers() -> None:
    """The whole way of a tool call: definition, call, result; equal to apply_chat_template, token by token."""
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "Wetter in Köln?"},
        {
            "role": "assistant",
            "content": "I look.",
            "tool_calls": [
                {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Köln <3"}}}
            ],
        },
        {"role": "tool", "content": "rain", "tool_call_id": "c1"},
    ]
    function = {"name": "weather", "description": "Tells the weather.", "parameters": WEATHER}
    reference = make_tokenizer()
    reference.chat_template = QWEN
    expected = reference.apply_chat_template(
        messages,
        tools=[{"type": "function", "function": function}],
        add_generation_prompt=True,
        enable_thinking=False,
        tokenize=False,
    )
    given = chat(
        messages=[
            inference_pb2.ChatMessage(role="user", content="Wetter in Köln?"),
            inference_pb2.ChatMessage(
                role="assistant",
                content="I look.",
                tool_calls=[inference_pb2.ToolCall(id="c1", name="weather", arguments='{"city":"K\\u00f6ln <3"}')],
            ),
            inference_pb2.ChatMessage(role="tool", content="rain", tool_call_id="c1"),
        ],
        tools=[tool(description="Tells the weather.", parameters=json.dumps(WEATHER))],
        template_kwargs='{"enable_thinking": false}',
    )
    check_chat(given)
    found = bytes(await byte_tokenizer(chat_template=QWEN).encode_chat(given)).decode()
    assert found == expected
    assert '"arguments": {"city": "Köln <3"}' in found


async def test_without_tools_the_template_hears_of_none() -> None:
    tokenizer = byte_tokenizer(chat_template="{{ tools is none }} {{ messages[0] }}")
    hidden = chat(tools=[tool()], tool_choice=MODES(mode=MODES.MODE_NONE))
    for given in (chat(), hidden):
        assert bytes(await tokenizer.encode_chat(given)) == b"True {'role': 'user', 'content': 'hi'}"


def test_arguments_that_are_no_json_stay_text() -> None:
    for arguments, expected in (("", {}), ("{}", {}), ('{"a": 1}', {"a": 1}), ("{a: 1}", "{a: 1}"), ("[1]", "[1]")):
        variables = template_variables(chat(messages=[call(name="f", arguments=arguments)]))
        assert variables["messages"][0]["tool_calls"][0]["function"]["arguments"] == expected


@pytest.mark.parametrize("content", ["The answer is", "ends with a space ", "", "CONTINUE_FINAL_MESSAGE_TAG x"])
async def test_the_last_message_is_continued_as_in_transformers(content: str) -> None:
    reference = make_tokenizer()
    trimming = "{% for m in messages %}[{{ m.role }}] {{ m.content | trim }}</s>{% endfor %}"
    for template in (QWEN, trimming):
        reference.chat_template = template
        expected = reference.apply_chat_template(
            [{"role": "user", "content": "?"}, {"role": "assistant", "content": content}],
            continue_final_message=True,
            tokenize=False,
        )
        given = chat(("user", "?"), ("assistant", content), continue_final_message=True)
        assert bytes(await byte_tokenizer(chat_template=template).encode_chat(given)).decode() == expected


async def test_a_template_that_drops_the_last_message_cannot_continue_it() -> None:
    tokenizer = byte_tokenizer(chat_template="{{ messages[0].content }}")
    with pytest.raises(InvalidArgument) as caught:
        await tokenizer.encode_chat(chat(("user", "?"), ("assistant", "so"), continue_final_message=True))
    assert caught.value.field == "prompt.chat.continue_final_message"


ENDLESS = [
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{% for i in range(99999) %}{% for j in range(99999) %}{% if false %}x{% endif %}{% endfor %}{% endfor %}",
    "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "{% for a in m recursive %}{% if loop.depth < 60 %}{{ loop(m) }}{{ loop(m) }}{% endif %}{% endfor %}",
]
TOO_LARGE = [
    "{{ 'x' * 2000000 }}",
    "{{ 'x' * 10 ** 12 }}",
    "{{ 10 ** (10 ** 10) }}",
    "{% for i in range(99999) %}0123456789A{% endfor %}",
    "{% set ns = namespace(x='aa') %}{% for i in range(99) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
    "{% set ns = namespace(x='aa') %}{% for i in range(99) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "{% set ns = namespace(x=[1]) %}{% for i in range(99) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "{{ '%500000000d' % 1 }}",
    "{{ '%*d' % (500000000, 1) }}",
    "{{ ('%s' * 1000) % (big,) }}",
    "{{ ('%(x)s' * 1000) % {'x': big} }}",
    "{{ '{:500000000}'.format(1) }}",
    "{{ '{:{w}}'.format(1, w=500000000) }}",
    "{{ '{x:500000000}'.format_map({'x': 1}) }}",
    "{{ ('{0}' * 1000).format(big) }}",
    "{{ ('%s' * 1000) | format(big) }}",
    "{{ 'x'.ljust(500000000) }}",
    "{{ 'x'.rjust(500000000) }}",
    "{{ 'x'.center(500000000) }}",
    "{{ 'x'.zfill(500000000) }}",
    "{{ 'x'.encode().ljust(500000000) }}",
    "{{ ('\t' * 1000).expandtabs(1000000) }}",
    "{{ big.replace('', big) }}",
    "{{ big.translate({120: big}) }}",
    "{{ big.join('x' * 1000) }}",
    "{{ 'x' | center(500000000) }}",
    "{{ ['x'] | map('center', 500000000) | list }}",
    "{{ ('x\n' * 1000) | indent(1000000) }}",
    "{{ ('x\n' * 1000) | indent(big) }}",
    "{{ ('x ' * 1000) | wordwrap(1, wrapstring=big) }}",
    "{{ big | replace('x', big) }}",
    "{{ ([1] * 1000) | map('string') | join(big) }}",
    "{{ ([big] * 1000) | map('upper') | join }}",
    "{{ ([{'a': big}] * 1000) | join(attribute='a') }}",
    "{{ [1] | batch(500000000, 'x') | list }}",
    "{{ [1] | slice(500000000) | list }}",
    "{{ ([[1] * 10000] * 1000) | sum(start=[]) }}",
    "{{ 1 | round(-1000000000) }}",
    "{{ {'a': 1} | tojson(indent=500000000) }}",
    "{{ ([1] * 1000) | tojson(separators=(big, ':')) }}",
    "{{ [big] * 1000 }}",
    "{{ ([big] * 1000) | string }}",
    "{{ ([big] * 1000) | tojson }}",
    "{{ ([big] * 1000) ~ 'x' }}",
    "{% set y %}{% for i in range(1000) %}{{ big }}{% endfor %}{% endset %}{{ y | length }}",
    "{% macro m() %}{% for i in range(1000) %}{{ big }}{% endfor %}{% endmacro %}{{ m() | length }}",
    "{% set ns = namespace(x=['x']) %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x }}",
    "{% set ns = namespace(x=3) %}{% for i in range(99) %}{% set ns.x = ns.x * ns.x %}{% endfor %}",
]


@pytest.mark.parametrize("template", ENDLESS)
def test_a_template_without_end_is_stopped(template: str) -> None:
    began = time.monotonic()
    with pytest.raises(TemplateBoundExceeded, match="seconds"):
        render(template, {"m": [1, 2]}, max_characters=1_000_000, seconds=0.05)
    assert time.monotonic() - began < 2


@pytest.mark.parametrize("template", TOO_LARGE)
def test_a_template_that_makes_too_much_is_stopped(template: str) -> None:
    with pytest.raises(TemplateBoundExceeded, match="characters"):
        render(template, {"big": "x" * 10_000}, max_characters=1_000_000, seconds=60)


def test_integers_are_no_way_to_memory() -> None:
    with pytest.raises(jinja2.exceptions.SecurityError):
        render("{{ (1).to_bytes(500000000, 'big') }}", {}, max_characters=1_000_000, seconds=60)


def test_within_the_bounds_filters_and_methods_are_jinjas() -> None:
    template = (
        "{{ '%-4s|%05.1f%%' % ('a', 2.25) }} {{ '{:>4}{x}'.format('b', x=1700000000) }} {{ 'c' | center(3) }}"
        "{{ ['d', 'e'] | map('upper') | join('-') }} {{ 'f'.join(['1', '2']) }} {{ 'g g'.replace('g', 'h', 1) }}"
        "{{ [{'a': 1}, {'a': 2}] | join('+', attribute='a') }} {{ 'i\nj' | indent(2) }} {{ 2.567 | round(1) }}"
        "{{ [1, 2] | sum }} {{ {'a': [1]} | tojson(indent=1) }} {{ 'k'.ljust(2) }}| {{ '%s %s' | format('l', 'm') }}"
        "{{ 7 % 4 }} {{ 'nn' | replace('n', 'o') }} {% set p %}{{ [1, 'q'] }}{% endset %}{{ p | upper }}"
        "{{ 'é' | tojson }}"
    )
    environment = jinja2.Environment()
    environment.policies["json.dumps_kwargs"] = {"ensure_ascii": False}
    expected = environment.from_string(template).render()
    assert render(template, {}, max_characters=500, seconds=9) == expected


def test_the_watched_loops_are_still_loops() -> None:
    template = (
        "{% for x in xs if x != 2 %}{{ loop.index ~ '/' ~ loop.length }}{{ '.' if loop.last else ',' }}{% endfor %}"
        "{% for x in [] %}{% else %} none{% endfor %} {% for k, v in d.items() %}{{ k ~ v }}{% endfor %}"
        "{% for x in xs %}{% if x == 2 %}{% continue %}{% endif %}{{ x }}{{ loop.previtem }}{% endfor %}"
        "{% generation %}!{% endgeneration %}"
    )
    found = render(template, {"xs": [1, 2, 3], "d": {"a": 1}}, max_characters=99, seconds=9)
    assert found == "1/2,2/2. none a1132!"


async def test_a_slow_template_names_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tandem.router.frontend.tokenizer._TEMPLATE_SECONDS", 0.05)
    with pytest.raises(InvalidArgument, match=r"takes more than 0\.05 seconds") as caught:
        await byte_tokenizer(chat_template=ENDLESS[0]).encode_chat(chat())
    assert caught.value.field == "prompt.chat"
