"""Tests that chat templates render as in transformers, and that bad templates are stopped."""

import json
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta
from functools import partial
from itertools import pairwise
from typing import Any

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.proto import inference_pb2
from tandem.proto.errors import InvalidArgument
from tandem.router.frontend import template as templates
from tandem.router.frontend.chat import check_chat
from tandem.router.frontend.child_process import ChildProcess
from tandem.router.frontend.messages.calls import REASONING_NAMES
from tandem.router.frontend.messages.turns import arrange
from tandem.router.frontend.tokenizer import Tokenizer
from tandem.tests.router.fake_source import byte_tokenizer
from tandem.tests.router.frontend.test_chat import MODES, WEATHER, chat, tool
from tandem.tests.tiny_tokenizer import make_tokenizer

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
"""  # noqa: E501


async def test_tools_and_calls_render_as_in_transformers() -> None:
    """Definition, call and result of a tool equal apply_chat_template, token by token."""
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "Wetter in Köln?"},
        {
            "role": "assistant",
            "content": "I look.",
            "tool_calls": [
                {
                    "id": "c1",
                    "type": "function",
                    "function": {"name": "weather", "arguments": {"city": "Köln <3"}},
                }
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
                tool_calls=[
                    inference_pb2.ToolCall(
                        id="c1", name="weather", arguments='{"city":"K\\u00f6ln <3"}'
                    )
                ],
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


async def test_variables_of_the_operator_give_way_to_those_of_the_chat() -> None:
    template = byte_tokenizer(chat_template="{{ mood }}{{ tone }}")._template
    tokenizer = Tokenizer(template, chat_template_kwargs={"mood": "a", "tone": [1]})
    own = chat(template_kwargs='{"tone": null}')
    assert bytes(await tokenizer.encode_chat(chat())) == b"a[1]"
    assert bytes(await tokenizer.encode_chat(own)) == b"aNone"


async def test_without_tools_the_template_hears_of_none() -> None:
    tokenizer = byte_tokenizer(chat_template="{{ tools is none }} {{ messages[0] }}")
    hidden = chat(tools=[tool()], tool_choice=MODES(mode=MODES.MODE_NONE))
    for each in (chat(), hidden):
        assert bytes(await tokenizer.encode_chat(each)) == b"True {'role': 'user', 'content': 'hi'}"


@pytest.mark.parametrize(
    "content", ["The answer is", "ends with a space ", "", "CONTINUE_FINAL_MESSAGE_TAG x"]
)
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
        assert (
            bytes(await byte_tokenizer(chat_template=template).encode_chat(given)).decode()
            == expected
        )


async def test_a_template_that_drops_the_last_message_cannot_continue_it() -> None:
    tokenizer = byte_tokenizer(chat_template="{{ messages[0].content }}")
    with pytest.raises(InvalidArgument) as caught:
        await tokenizer.encode_chat(
            chat(("user", "?"), ("assistant", "so"), continue_final_message=True)
        )
    assert caught.value.field == "prompt.chat.continue_final_message"


PARTS = (
    "{% for m in messages %}[{{ m.role }}]{% for part in m['content'] %}{% if part['type'] == "
    "'text' %}"
    " {{ part.text }}{% endif %}{% endfor %}|{% endfor %}"
)
BY_MACRO = (
    "{% macro text(content) %}{% if content is string %}{{ content }}{% else %}"
    "{% for part in content %}{{ part.text }}{% endfor %}{% endif %}{% endmacro %}"
    "{% for m in messages %}[{{ m.role }}] {{ text(m.content) }}|{% endfor %}"
)
BY_ROLE = (
    "{% for m in messages %}[{{ m.role }}] {% if m.role == 'user' %}{{ m.content | "
    "map(attribute='text') | join }}"
    "{% else %}{{ m.content }}{% endif %}|{% endfor %}"
)
NO_CRITIC = (
    "{% for m in messages %}{% if m.role == 'critic' %}{{ raise_exception('no critic') }}{% endif "
    "%}"
    "[{{ m.role }}] {{ m.content[0].text }}|{% endfor %}"
)


@pytest.mark.parametrize("template", [PARTS, BY_MACRO, BY_ROLE])
def test_a_template_gets_content_in_the_form_that_it_takes(
    renderer: ChildProcess, template: str
) -> None:
    """Of each role: a template may take the parts of some and the text of others."""
    roles = ("system", "user", "assistant", "tool", "critic")
    messages = [{"role": role, "content": f"text of {role}"} for role in roles]
    expected = "".join(f"[{role}] text of {role}|" for role in roles)
    assert render(renderer, template, {"conversations": [messages]}) == expected
    empty = [{"role": "user", "content": "Look."}, {"role": "assistant", "content": ""}]
    assert (
        render(renderer, template, {"conversations": [empty]}).replace(" |", "|")
        == "[user] Look.|[assistant]|"
    )


def test_a_template_that_refuses_a_role_still_does(renderer: ChildProcess) -> None:
    messages = [{"role": "critic", "content": "x"}, {"role": "user", "content": "Look."}]
    assert render(renderer, NO_CRITIC, {"conversations": [messages[1:]]}) == "[user] Look.|"
    with pytest.raises(InvalidArgument, match="refuses these messages: no critic"):
        render(renderer, NO_CRITIC, {"conversations": [messages]})


SYSTEM_FIRST = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception("
    "'System message must be at the beginning.') }}{% endif %}[{{ m.role }}] {{ m.content }}"
    "{% for c in m.tool_calls %} {{ c.function.name }}(){% endfor %}|{% endfor %}"
)
"""As Qwen3.5."""
ALTERNATING = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}"
    "{% endif %}{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}[{{ m.role }}] {{ m.content }}|"
    "{% endfor %}"
)
"""As Gemma."""
FIRST_ONLY = (
    "{% if messages[0].role in ('system', 'developer') %}[developer] {{ messages[0].content }}|"
    "{% endif %}{% for m in messages %}{% if m.role not in ('system', 'developer') %}[{{ m.role }}]"
    " {{ m.content }}|{% endif %}{% endfor %}"
)
"""As gpt-oss, which leaves out later ones without a word."""
ANYWHERE = "{% for m in messages %}[{{ m.role }}] {{ m.content }}|{% endfor %}"

COUNTED = (
    "{% set ns = namespace(n=0) %}{% for m in messages %}{% if m.role == 'user' or "
    "(m.role == 'assistant' and not m.tool_calls) %}{% if (m.role == 'user') != (ns.n % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{% set ns.n = ns.n + 1 %}{% endif %}"
    "{% for c in m.tool_calls %}{% if c.id|length != 9 %}{{ raise_exception('id') }}{% endif %}"
    "{% endfor %}[{{ m.role }}] {{ m.content }}{% for c in m.tool_calls %}{{ c.function.name }}()"
    "{% endfor %}|{% endfor %}"
)
"""As Mistral Nemo, whose count leaves out calls and their results."""
NO_RESULTS = (
    "{% for m in messages %}{% if m.role != 'tool' %}{% if not loop.last and "
    "messages[loop.index0 + 1].role == 'user' and m.role == 'user' %}{{ raise_exception('x') }}"
    "{% endif %}[{{ m.role }}] {{ m.content }}|{% endif %}{% endfor %}"
)

CALL_TEXT = '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'
CODEX = ("system:a", "developer:b", "user:c")
CLAUDE_CODE = ("system:a", "user:b", "system:c", "assistant:d", "system:e", "user:f")


@pytest.mark.parametrize(
    ("template", "given", "expected"),
    [
        (SYSTEM_FIRST, ("system:a", "system:b", "user:c"), "[system] a\n\nb|[user] c|"),
        (FIRST_ONLY, CODEX, "[developer] a\n\nb|[user] c|"),
        (ALTERNATING, CODEX, "[user] a\n\nb\n\nc|"),
        (ANYWHERE, CODEX, "[system] a|[developer] b|[user] c|"),
        (
            SYSTEM_FIRST,
            CLAUDE_CODE,
            "[system] a|[user] b\n\nc|[assistant] d|[user] e\n\nf|",
        ),
        (
            FIRST_ONLY,
            CLAUDE_CODE,
            "[developer] a|[user] b\n\nc|[assistant] d|[user] e\n\nf|",
        ),
        (
            ALTERNATING,
            CLAUDE_CODE,
            "[user] a\n\nb\n\nc|[assistant] d|[user] e\n\nf|",
        ),
        (
            ANYWHERE,
            CLAUDE_CODE,
            "[system] a|[user] b|[system] c|[assistant] d|[system] e|[user] f|",
        ),
        (
            SYSTEM_FIRST,
            ("user:a", "assistant:!", "system:b", "tool:c", "tool:d", "system:e"),
            "[user] a|[assistant]  look()|[tool] b\n\nc|[tool] d\n\ne|",
        ),
        (SYSTEM_FIRST, ("user:a", "assistant:b", "system:c"), "[user] a|[assistant] b|[user] c|"),
        (
            ALTERNATING,
            ("user:a", "user:b", "assistant:c", "assistant:d"),
            "[user] a\n\nb|[assistant] c\n\nd|",
        ),
        (SYSTEM_FIRST, ("user:a", "user:b"), "[user] a|[user] b|"),
        (
            COUNTED,
            ("user:a", "assistant:!", "tool:b", "user:c", "user:d", "assistant:e", "user:f"),
            "[user] a|[assistant] look()|[tool] b\n\nc\n\nd|[assistant] e|[user] f|",
        ),
        (
            ANYWHERE,
            ("user:a", "assistant:!", "tool:b", "user:c"),
            f"[user] a|[assistant] {CALL_TEXT}|[tool] b|[user] c|",
        ),
        (
            NO_RESULTS,
            ("user:a", "assistant:!", "tool:b", "user:c"),
            "[user] a|[assistant] |[user] c|",
        ),
    ],
)
def test_messages_that_a_template_does_not_write_are_merged(
    renderer: ChildProcess, template: str, given: tuple[str, ...], expected: str
) -> None:
    """No message is refused or left out, because agents send system messages at any place."""
    messages = [message(each) for each in given]
    assert render(renderer, template, {"conversations": [messages]}) == expected


def message(text: str) -> dict[str, Any]:
    """Returns the message of ROLE:CONTENT; ! stands for a call."""
    role, _, content = text.partition(":")
    if content != "!":
        return {"role": role, "content": content}
    call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": {}}}
    return {"role": role, "content": "", "tool_calls": [call]}


CALLING = (
    "{% for m in messages %}[{{ m.role }}] {% if m.thinking %}({{ m.thinking }}){% endif %}"
    "{{ m.content }}{% for c in m.tool_calls %}CHECK{{ c.function.name }}#{{ c.id }}{% endfor %}"
    "{% if m.tool_call_id %}#{{ m.tool_call_id }}{% endif %}|{% endfor %}"
)
REFUSED = "{{ raise_exception('not so') }}"
SHORT_IDS = CALLING.replace("CHECK", f"{{% if c.id|length != 9 %}}{REFUSED}{{% endif %}}")
SINGLE_CALLS = CALLING.replace(
    "CHECK", f"{{% if m.tool_calls|length != 1 %}}{REFUSED}{{% endif %}}"
)
THOUGHT_ONLY = CALLING.replace(
    "CHECK", f"{{% if m.content and m.thinking %}}{REFUSED}{{% endif %}}"
)
TEXT_ARGUMENTS = CALLING.replace("CHECK", "{{ c.function.arguments + ';' }}")
"""As Apertus."""
ARGUMENTS_ALONE = (
    "{% for m in messages %}[{{ m.role }}] {% if m.content is none %}{% for c in m.tool_calls %}"
    "{{ c.function.name + c.function.arguments }}{% endfor %}{% else %}{{ m.content }}{% endif %}|"
    "{% endfor %}"
)
"""As the models that DeepSeek distilled."""
NAMED_RESULTS = (
    f"{{% for m in messages if m.role == 'tool' and not m.name %}}{REFUSED}{{% endfor %}}"
    "{% for m in messages %}[{{ m.name or m.role }}] {{ m.content }}"
    "{% for c in m.tool_calls %}CHECK{{ c.function.name }}{% endfor %}|{% endfor %}"
)
ANY_CALLS = CALLING.replace("CHECK", "")


def called(*ids: str, **fields: str) -> list[dict[str, Any]]:
    """Returns a chat with calls of these ids, and their results in the other order."""
    calls = [
        {"id": each, "type": "function", "function": {"name": f"f{i}", "arguments": {}}}
        for i, each in enumerate(ids)
    ]
    return [
        message("user:a"),
        {"role": "assistant", "content": "b", "tool_calls": calls} | fields,
        *({"role": "tool", "tool_call_id": each, "content": f"of {each}"} for each in ids[::-1]),
        {"role": "tool", "tool_call_id": "other", "content": "c"},
        message("user:d"),
    ]


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (
            ANY_CALLS,
            "[user] a|[assistant] (t)bf0#i0f1#i1|[tool] of i0#i0|[tool] of i1#i1|[tool] c#other|"
            "[user] d|",
        ),
        (
            SINGLE_CALLS,
            "[user] a|[assistant] (t)bf0#i0|[tool] of i0#i0|[assistant] f1#i1|[tool] of i1#i1|"
            "[tool] c#other|[user] d|",
        ),
        *(
            (
                THOUGHT_ONLY.replace("thinking", name),
                "[user] a|[assistant] (t\n\nb)f0#i0f1#i1|[tool] of i0#i0|[tool] of i1#i1|"
                "[tool] c#other|[user] d|",
            )
            for name in REASONING_NAMES
        ),
    ],
)
def test_calls_are_written_in_the_form_that_a_template_takes(
    renderer: ChildProcess, template: str, expected: str
) -> None:
    """A template that refuses the answer of its own model would end the conversation."""
    given = called("i0", "i1", **dict.fromkeys(REASONING_NAMES, "t"))
    assert render(renderer, template, {"conversations": [given]}) == expected


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (TEXT_ARGUMENTS, '[assistant] {"x": "ö<"};f0#i0|[tool] of i0#i0|'),
        (ARGUMENTS_ALONE, '[assistant] f0{"x": "ö<"}|[tool] of i0|'),
        (ANY_CALLS, "[assistant] f0#i0|[tool] of i0#i0|"),
        (
            ANY_CALLS.replace("m.content }}", "m.content }}{% if m.content is none %}!{% endif %}"),
            "[assistant] f0#i0|[tool] of i0#i0|",
        ),
    ],
)
def test_arguments_are_text_where_a_template_demands_it(
    renderer: ChildProcess, template: str, expected: str
) -> None:
    given = called("i0", content="")
    (call,) = given[1]["tool_calls"]
    call["function"]["arguments"] = {"x": "ö<"}
    assert expected in render(renderer, template, {"conversations": [given]})
    call["function"]["arguments"] = "no JSON"
    given[0]["role"] = given[-1]["role"] = "system"
    found = render(renderer, template, {"conversations": [given]})
    assert ("no JSON" in found) is ("arguments" in template)


@pytest.mark.parametrize("refused", ["", "c.id|length != 9", "m.tool_calls|length != 1"])
def test_results_have_names_only_where_a_template_demands_them(
    renderer: ChildProcess, refused: str
) -> None:
    """Clients of OpenAI and Anthropic send none. A template may write a name as the role."""
    check = f"{{% if {refused} %}}{REFUSED}{{% endif %}}" if refused else ""
    template = NAMED_RESULTS.replace("CHECK", check)
    given = called("i0", "i1")
    given[2]["name"] = "given"  # of the result of i1
    found = render(renderer, template, {"conversations": [given]})
    between = "|" if "length != 1" not in refused else "|[assistant] f1|"
    for part in ("|[f0] of i0|", f"{between}[given] of i1|[unknown] c|"):
        assert part in found
    free = template.replace(REFUSED, "")
    assert "|[tool] of i0|" in render(renderer, free, {"conversations": [given]})


def test_ids_have_the_names_of_calls_where_a_template_writes_only_ids(
    renderer: ChildProcess,
) -> None:
    """As Kimi K2's, which writes the name of a result in place of its role."""
    template = (
        "{% for m in messages %}[{{ m.name or m.role }}] {{ m.content }}{% for c in m.tool_calls %}"
        "{{ c.id }};{% endfor %}{% if m.tool_call_id %}#{{ m.tool_call_id }}{% endif %}|"
        "{% endfor %}"
    )
    given = [*called("i0", "i1"), *called("i0")]
    assert render(renderer, template, {"conversations": [given]}) == (
        "[user] a|[assistant] bfunctions.f0:0;functions.f1:1;|[tool] of i0#functions.f0:0|"
        "[tool] of i1#functions.f1:1|[tool] c#other|[user] d|"
        "[user] a|[assistant] bfunctions.f0:2;|[tool] of i0#functions.f0:2|[tool] c#other|[user] d|"
    )


CALLED_F = '{"name": "f0", "arguments": {}}', '{"name": "f1", "arguments": {"x": "ö"}}'


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (ANYWHERE + "{# <|tool_call|> #}", f"b\n<|tool_call|>[{CALLED_F[0]}, {CALLED_F[1]}]"),
        (
            ANYWHERE + "{# <|/tool_call|> #}",
            f"b\n<|tool_call|>[{CALLED_F[0]}, {CALLED_F[1]}]<|/tool_call|>",
        ),
        (
            ANYWHERE,
            f"b\n<tool_call>\n{CALLED_F[0]}\n</tool_call>\n<tool_call>\n{CALLED_F[1]}\n</tool_call>",
        ),
        (ANYWHERE + "{# <start_function_call> #}", "b"),  # its format has no grammar
        (ANY_CALLS, "bf0#i0f1#i1"),
    ],
)
def test_calls_that_a_template_leaves_out_are_text(
    renderer: ChildProcess, template: str, expected: str
) -> None:
    given = called("i0", "i1")
    given[1]["tool_calls"][1]["function"]["arguments"] = {"x": "ö"}
    found = render(renderer, template, {"conversations": [given]})
    assert f"|[assistant] {expected}|[tool] of i0" in found


IN_SYSTEM = (
    "{% for m in messages %}{% if m.role == 'system' and 'tools' in m and m.tools is not none %}"
    "[system] {{ m.content }}<tools>{{ m.tools }}</tools>|{% else %}[{{ m.role }}] {{ m.content }}|"
    "{% endif %}{% endfor %}"
)
"""As Phi-4-mini."""


@pytest.mark.parametrize(
    ("template", "given", "expected"),
    [
        (IN_SYSTEM, ("user:a",), "[system] <tools>[TOOL]</tools>|[user] a|"),
        (
            IN_SYSTEM,
            ("system:b", "user:a"),
            "[system] b<tools>[TOOL]</tools>|[user] a|",
        ),
        (ANYWHERE + "{{ tools | tojson }}", ("user:a",), '[user] a|[{"function": TOOL}]'),
        (ANYWHERE, ("user:a",), "[user] a|"),
    ],
)
def test_a_template_gets_tools_in_the_form_that_it_takes(
    renderer: ChildProcess, template: str, given: tuple[str, ...], expected: str
) -> None:
    messages = [message(each) for each in given]
    function = {"name": "f", "description": "ö<", "parameters": {"type": "object"}}
    variables = {"conversations": [messages], "tools": [{"function": function}]}
    written = expected.replace("TOOL", json.dumps(function, ensure_ascii=False))
    assert render(renderer, template, variables) == written
    assert "tools" not in render(renderer, template, {**variables, "tools": None})


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (ANYWHERE, ["does not write tools"]),
        (IN_SYSTEM, ["no known format"]),
        (IN_SYSTEM + "{# <TOOLCALL> #}", []),
        (QWEN, []),
        ("{{ raise_exception('no day') }}<tool_call>", []),
    ],
)
async def test_the_log_tells_what_a_template_lacks_for_tools(
    template: str, expected: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    await byte_tokenizer(chat_template=template).wait_for_chats()
    assert len(caplog.messages) == len(expected)
    assert all(part in line for part, line in zip(expected, caplog.messages, strict=True))


def test_results_are_in_the_order_of_their_calls_in_each_turn(renderer: ChildProcess) -> None:
    """A template that writes no ids would give a result to another call."""
    first, second = called("i0", "i1"), called("i2", "i0", "i1")
    second[1]["content"] = "e"
    found = render(renderer, ANY_CALLS, {"conversations": [[*first, *second, message("tool:f")]]})
    results = [each for each in found.split("|") if each.startswith("[tool]")]
    ids = [each.partition("#")[2] for each in results]
    assert ids == ["i0", "i1", "other", "i2", "i0", "i1", "other", ""]


def test_ids_of_calls_are_as_short_as_a_template_demands(renderer: ChildProcess) -> None:
    given = called("call_0123456789abcdef01234567", "toolu_1", "abcDEF123")
    found = render(renderer, SHORT_IDS, {"conversations": [given]})
    _, calls, *results, _, _, _ = found.split("|")
    ids = [each[:9] for each in calls.split("#")[1:]]
    assert [each.rpartition("#")[2] for each in results] == ids
    assert (len({*ids}), ids[2]) == (3, "abcDEF123")
    assert all(each.isalnum() for each in ids)
    assert render(renderer, SHORT_IDS, {"conversations": [given]}) == found


def test_a_template_that_needs_variables_gets_the_messages_as_they_are(
    renderer: ChildProcess,
) -> None:
    template = "{% if not day %}{{ raise_exception('no day') }}{% endif %}" + ANYWHERE
    messages = [message("user:a"), message("user:b")]
    found = render(renderer, template, {"conversations": [messages], "day": "Monday"})
    assert found == "[user] a|[user] b|"


@given(
    st.lists(st.sampled_from(["system", "developer", "user", "assistant", "tool"])),
    st.booleans(),
    st.booleans(),
)
def test_merging_keeps_every_text_and_the_order_of_turns(
    roles: list[str], takes_first: bool, takes_repeats: bool
) -> None:
    """The order of texts can differ only where a system message is moved to the next turn."""
    messages = [{"role": role, "content": f"<{i}>"} for i, role in enumerate(roles)]

    def shows(tried: tuple[str, ...]) -> bool:
        if not {"system", "developer"} & set(tried):
            in_turn = all(a != b for a, b in pairwise(tried)) and tried[-2:] != ("tool", "user")
            return takes_repeats or in_turn
        return takes_first and len(tried) == 2

    found = arrange(messages, shows)
    texts = "".join(each["content"] for each in found)
    assert sorted(texts.replace("\n\n", "")) == sorted(
        "".join(each["content"] for each in messages)
    )
    turns = [i for i, role in enumerate(roles) if role not in ("system", "developer")]
    assert [texts.index(f"<{i}>") for i in turns] == sorted(texts.index(f"<{i}>") for i in turns)
    assert all(each["role"] not in ("system", "developer") for each in found[1:])
    if not takes_repeats:
        pairs = pairwise(found)
        roles_in_row = {(a["role"], b["role"]) for a, b in pairs}
        assert not roles_in_row & {("user", "user"), ("assistant", "assistant"), ("tool", "user")}
    assert messages == [{"role": role, "content": f"<{i}>"} for i, role in enumerate(roles)]


ENDLESS = [
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "{% for a in m recursive %}{% if loop.depth < 60 %}{{ loop(m) }}{{ loop(m) }}{% endif %}{% "
    "endfor %}",
    "{{ 10 ** (10 ** 10) }}",  # one step in C
]
TOO_LARGE = [
    "{{ 'x' * 2000000 }}",
    "{{ 'x' * 10 ** 12 }}",
    "{% for i in range(99999) %}0123456789A{% endfor %}",
    "{% set ns = namespace(x='aa') %}{% for i in range(99) %}{% set ns.x = ns.x ~ ns.x %}{% endfor "
    "%}",
    "{% set ns = namespace(x=[1]) %}{% for i in range(99) %}{% set ns.x = ns.x + ns.x %}{% endfor "
    "%}",
    "{{ '%500000000d' % 1 }}",
    "{{ ('{0}' * 1000).format(big) }}",
    "{{ 'x'.encode().ljust(500000000) }}",
    "{{ big.replace('', big) }}",
    "{{ 'x' | center(500000000) }}",
    "{{ ([{'a': big}] * 1000) | join(attribute='a') }}",
    "{{ [1] | batch(500000000, 'x') | list }}",
    "{{ {'a': 1} | tojson(indent=500000000) }}",
    "{{ ([big] * 1000) | tojson }}",
    "{{ (1).to_bytes(500000000, 'big') | length }}",
]


@pytest.fixture(scope="module")
def renderer() -> ChildProcess:
    return templates.template_process()


def render(
    renderer: ChildProcess,
    template: str,
    variables: dict[str, Any],
    seconds: float = 60,
    now: float = 0.0,
) -> str:
    arguments = {"conversations": [[]], "chat_template": template} | variables
    return templates.render(renderer, arguments, max_characters=1_000_000, seconds=seconds, now=now)


def test_a_template_sees_the_time_of_the_request(renderer: ChildProcess) -> None:
    template = "{{ strftime_now('%Y-%m-%d %H:%M:%S') }}"
    evening = datetime(2026, 3, 1, 23, 59, 50)
    for moment in (evening, evening + timedelta(seconds=20), evening):
        found = render(renderer, template, {}, now=moment.timestamp())
        assert found == moment.strftime("%Y-%m-%d %H:%M:%S")


async def test_without_a_time_a_template_sees_the_present() -> None:
    before = int(time.time())
    tokenizer = byte_tokenizer(chat_template="{{ strftime_now('%s') }}")
    seen = int(bytes(await tokenizer.encode_chat(chat())))
    assert before <= seen <= time.time()


@pytest.mark.parametrize("template", ENDLESS)
def test_a_template_without_end_is_stopped(renderer: ChildProcess, template: str) -> None:
    renderer.wait()  # a process that was stopped before is replaced first
    with pytest.raises(InvalidArgument, match=r"takes more than 0\.05 seconds"):
        render(renderer, template, {"m": [1, 2]}, 0.05)
    assert render(renderer, "{{ 1 }}", {}) == "1"


@pytest.mark.parametrize("template", TOO_LARGE)
def test_a_template_that_makes_too_much_is_stopped(renderer: ChildProcess, template: str) -> None:
    with pytest.raises(InvalidArgument, match="renders more than 1000000 characters"):
        render(renderer, template, {"big": "x" * 10_000})


def test_the_largest_prompt_is_rendered(renderer: ChildProcess) -> None:
    text = "🍵" * 1_000_000
    assert render(renderer, "{{ text }}", {"text": text}) == text


def test_threads_share_the_process_and_it_ends_with_the_renderer() -> None:
    renderer = templates.template_process()
    before = set(psutil.Process().children())

    with ThreadPoolExecutor(8) as threads:
        texts = threads.map(
            partial(render, renderer, "{{ number }}"), [{"number": number} for number in range(99)]
        )
        assert list(texts) == list(map(str, range(99)))
    (process,) = set(psutil.Process().children()) - before
    process.kill()  # as by the kernel, for want of memory
    with pytest.raises(InvalidArgument, match="refuses these messages"):
        render(renderer, "{{ 1 }}", {})
    assert render(renderer, "{{ 2 }}", {}) == "2"
    (process,) = set(psutil.Process().children()) - before
    del texts, renderer
    assert not process.is_running()


async def test_a_slow_template_names_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tandem.router.frontend.tokenizer._TEMPLATE_SECONDS", 0.05)
    with pytest.raises(InvalidArgument, match=r"takes more than 0\.05 seconds") as caught:
        await byte_tokenizer(chat_template=ENDLESS[0]).encode_chat(chat())
    assert caught.value.field == "prompt.chat"
