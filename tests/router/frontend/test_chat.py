"""Tests the bounds of chats and the variables of their templates."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.proto import inference_pb2, limits
from tandem.proto.errors import InvalidArgument, PromptTooLong
from tandem.router.frontend.chat import (
    check_chat,
    json_object,
    template_variables,
    with_developer_as_system,
    within_characters,
)
from tandem.router.turns import droppable_parts, without

MODES = inference_pb2.ToolChoice
WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city"],
}


def chat(*said: tuple[str, str], **fields: Any) -> inference_pb2.Chat:
    messages = [
        inference_pb2.ChatMessage(role=role, content=content)
        for role, content in said or [("user", "hi")]
    ]
    return inference_pb2.Chat(**{"messages": messages} | fields)


def call(**fields: Any) -> inference_pb2.ChatMessage:
    return inference_pb2.ChatMessage(
        role="assistant", tool_calls=[inference_pb2.ToolCall(**fields)]
    )


def tool(name: str = "weather", **fields: Any) -> inference_pb2.Tool:
    return inference_pb2.Tool(name=name, **fields)


def nested(levels: int) -> str:
    return '{"a":' * (levels - 1) + "{}" + "}" * (levels - 1)


DEEP, TOO_DEEP = nested(limits.MAX_JSON_DEPTH), nested(limits.MAX_JSON_DEPTH + 1)
MAX_CHARACTERS = limits.MAX_PROMPT_CHARACTERS
NAME, TOOL_NAME, CALL_ID = "n" * 64, "f" * 128, "c" * 4_096
AT_THE_BOUNDS = [
    chat(*[("user", "x")] * limits.MAX_CHAT_MESSAGES),
    chat(("r" * limits.MAX_ROLE_CHARACTERS, "x" * MAX_CHARACTERS)),
    chat(
        tools=[tool(f"t{i}") for i in range(limits.MAX_TOOLS)],
        tool_choice=MODES(mode=MODES.MODE_REQUIRED),
    ),
    chat(tools=[tool(TOOL_NAME)], tool_choice=MODES(mode=MODES.MODE_NAMED, name=TOOL_NAME)),
    chat(messages=[call(id=CALL_ID, name=TOOL_NAME, arguments="no JSON")]),
    chat(messages=[inference_pb2.ChatMessage(role="tool", tool_call_id=CALL_ID, name=TOOL_NAME)]),
    chat(messages=[inference_pb2.ChatMessage(role="user", name=NAME)]),
    *(chat(messages=[call(name=name)]) for name in ("get weather", "天" * 128, 'f"\n')),
    chat(tools=[tool(parameters='{"a": "%s"}' % ("x" * (limits.MAX_GRAMMAR_CHARACTERS - 9)))]),
    chat(template_kwargs='{"a": "%s"}' % ("x" * (limits.MAX_TEMPLATE_KWARGS_CHARACTERS - 9))),
    chat(
        messages=[call(name="f", arguments=DEEP)],
        tools=[tool(parameters=DEEP)],
        template_kwargs=DEEP,
    ),
    chat(messages=[call(name="f", arguments='{"a": "\\"%s"}' % ("[" * 900))]),
    chat(messages=[call(name="f", arguments="[" + "[], " * 900 + "0]")]),
    chat(("assistant", "so"), continue_final_message=True),
]
REFUSED: list[tuple[inference_pb2.Chat, str, str]] = [
    (inference_pb2.Chat(), "messages", f"1 to {limits.MAX_CHAT_MESSAGES}"),
    (
        chat(*[("user", "x")] * (limits.MAX_CHAT_MESSAGES + 1)),
        "messages",
        f"1 to {limits.MAX_CHAT_MESSAGES}",
    ),
    (chat(("user", "x"), ("", "x")), "messages[1].role", "1 to 64"),
    (chat(("r" * 65, "x")), "messages[0].role", "1 to 64"),
    (chat(("user", "x" * (MAX_CHARACTERS + 1))), "", "1000001 characters"),
    (chat(("user", "x" * MAX_CHARACTERS), tools=[tool(description="y")]), "", "1000001 characters"),
    (
        chat(messages=[inference_pb2.ChatMessage(role="user", name=NAME + "n")]),
        "messages[0].name",
        "maximum is 64",
    ),
    (
        chat(messages=[inference_pb2.ChatMessage(role="tool", tool_call_id=CALL_ID + "c")]),
        "messages[0].tool_call_id",
        "maximum is 4096",
    ),
    (
        chat(messages=[inference_pb2.ChatMessage(role="tool", name=TOOL_NAME + "f")]),
        "messages[0].name",
        "maximum is 128",
    ),
    (chat(messages=[call(name="")]), "messages[0].tool_calls[0].name", "1 to 128"),
    (chat(messages=[call(name="天" * 129)]), "messages[0].tool_calls[0].name", "1 to 128"),
    (
        chat(messages=[call(name="f", id=CALL_ID + "c")]),
        "messages[0].tool_calls[0].id",
        "maximum is 4096",
    ),
    (
        chat(messages=[call(name="f", arguments=TOO_DEEP)]),
        "messages[0].tool_calls[0].arguments",
        "nested too deeply; the maximum is 200 levels",
    ),
    (
        chat(messages=[call(name="f", arguments="[" * 100_000)]),
        "messages[0].tool_calls[0].arguments",
        "too deeply",
    ),
    (chat(template_kwargs=TOO_DEEP), "template_kwargs", "too deeply"),
    (
        chat(
            messages=[
                inference_pb2.ChatMessage(
                    role="user", tool_calls=[inference_pb2.ToolCall(name="f")]
                )
            ]
        ),
        "messages[0].tool_calls",
        "role assistant",
    ),
    (
        chat(
            messages=[
                inference_pb2.ChatMessage(
                    role="assistant", tool_calls=[inference_pb2.ToolCall(name="f")] * 129
                )
            ]
        ),
        "messages[0].tool_calls",
        "maximum is 128",
    ),
    (
        chat(tools=[tool(f"t{i}") for i in range(limits.MAX_TOOLS + 1)]),
        "tools",
        f"maximum is {limits.MAX_TOOLS}",
    ),
    (chat(tools=[tool(), tool("")]), "tools[1].name", "1 to 128"),
    (chat(tools=[tool(TOOL_NAME + "f")]), "tools[0].name", "1 to 128"),
    (chat(tools=[tool('f"')]), "tools[0].name", "letters"),
    (chat(tools=[tool(), tool()]), "tools[1].name", "already the name of a tool"),
    (
        chat(tools=[tool(parameters="x" * (limits.MAX_GRAMMAR_CHARACTERS + 1))]),
        "tools[0].parameters",
        "131072",
    ),
    (chat(tools=[tool(parameters="[]")]), "tools[0].parameters", "JSON schema"),
    (chat(tools=[tool(parameters='{"a": NaN}')]), "tools[0].parameters", "JSON schema"),
    (chat(tools=[tool(parameters='{"type": "string"}')]), "tools[0].parameters", "of an object"),
    (chat(tools=[tool(parameters='{"a":' * 20_000)]), "tools[0].parameters", "too deeply"),
    (chat(tools=[tool(parameters=TOO_DEEP)]), "tools[0].parameters", "too deeply"),
    (chat(tool_choice=MODES(mode=MODES.MODE_REQUIRED)), "tool_choice", "no tools"),
    (chat(tool_choice=MODES(mode=9)), "tool_choice.mode", "not a mode"),  # type: ignore[arg-type]
    (
        chat(tools=[tool()], tool_choice=MODES(mode=MODES.MODE_NAMED, name="g")),
        "tool_choice.name",
        "one of the tools",
    ),
    (chat(tools=[tool()], tool_choice=MODES(name="weather")), "tool_choice.name", "MODE_NAMED"),
    (chat(template_kwargs="x" * 4_097), "template_kwargs", "maximum is 4096"),
    (chat(template_kwargs="[1]"), "template_kwargs", "JSON object"),
    (chat(template_kwargs='{"a": "\\ud800"}'), "template_kwargs", "JSON object"),
    (chat(template_kwargs='{"a": 1e999}'), "template_kwargs", "JSON object"),
    (chat(template_kwargs='{"messages": []}'), "template_kwargs", "'messages'"),
    (chat(template_kwargs='{"range": 1}'), "template_kwargs", "'range'"),
    (chat(("user", "x"), continue_final_message=True), "continue_final_message", "assistant"),
    (
        chat(messages=[call(name="f")], continue_final_message=True),
        "continue_final_message",
        "assistant",
    ),
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
def test_chats_past_the_bounds_are_refused_by_field(
    bad: inference_pb2.Chat, field: str, said: str
) -> None:
    with pytest.raises(InvalidArgument) as caught:
        check_chat(bad)
    assert caught.value.field == ".".join(["prompt.chat", *([field] if field else [])])
    assert said in caught.value.message


@given(
    said=st.lists(
        st.tuples(st.sampled_from(["system", "user", "assistant"]), st.text("x", max_size=9)),
        min_size=1,
        max_size=12,
    ),
    most=st.integers(0, 60),
)
def test_the_fewest_and_oldest_turns_are_dropped_for_the_characters(
    said: list[tuple[str, str]], most: int
) -> None:
    whole = chat(*said)
    parts = droppable_parts(whole)
    shorter = [without(whole, parts[:count]) for count in range(len(parts) + 1)]
    sizes = [sum(len(message.content) for message in each.messages) for each in shorter]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(limits, "MAX_PROMPT_CHARACTERS", most)
        if sizes[-1] > most:
            with pytest.raises(PromptTooLong):
                check_chat(whole, drops_turns=True)
            return
        check_chat(whole, drops_turns=True)
        found = within_characters(whole)
    assert found == next(each for each, size in zip(shorter, sizes, strict=True) if size <= most)


def test_json_object_parses_objects_only() -> None:
    assert json_object('{"a": [1, "é"]}') == {"a": [1, "é"]}
    for text in (
        "",
        "1",
        "{",
        '{"a": Infinity}',
        '{"a": "\\udc00"}',
        "[" * 100_000,
        TOO_DEEP,
        '{"a": ' + "9" * 5_000 + "}",
    ):
        assert json_object(text) is None


def test_arguments_that_are_no_json_stay_text() -> None:
    for arguments, expected in (
        ("", {}),
        ("{}", {}),
        ('{"a": 1}', {"a": 1}),
        ("{a: 1}", "{a: 1}"),
        ("[1]", "[1]"),
    ):
        variables = template_variables(chat(messages=[call(name="f", arguments=arguments)]))
        assert (
            variables["conversations"][0][0]["tool_calls"][0]["function"]["arguments"] == expected
        )


def test_reasoning_has_every_name_that_templates_know() -> None:
    said = inference_pb2.ChatMessage(role="assistant", content="a", reasoning="Hm.")
    ((found,),) = template_variables(chat(messages=[said]))["conversations"]
    assert {name: found[name] for name in found if found[name] == "Hm."} == dict.fromkeys(
        ("reasoning", "reasoning_content", "thinking"), "Hm."
    )


@pytest.mark.parametrize(
    ("template", "role"),
    [
        ("{{ message.role }}", "system"),
        ("{# of developers #}{{ message.role }}", "system"),
        ("{% if message.role == 'developer' %}x{% endif %}", "developer"),
        ('{% if message["role"] in ("system", "developer") %}x{% endif %}', "developer"),
    ],
)
def test_a_developer_is_the_system_unless_the_template_names_developers(
    template: str, role: str
) -> None:
    messages = [{"role": "developer", "content": "a"}, {"role": "user", "content": "developer"}]
    variables = template_variables(inference_pb2.Chat(messages=messages))
    (found,) = with_developer_as_system(variables, template)["conversations"]
    assert [each["role"] for each in found] == [role, "user"]
    assert [each["content"] for each in found] == ["a", "developer"]
