"""Tests the Responses API with the official `openai` package."""

import json
from typing import Any

import httpx
import openai
import pytest
from pydantic import BaseModel

from tandem.proto import errors, limits
from tandem.router.frontend.tokenizer import Tokenizer
from tandem.tests.router.api.http_bodies import events_of
from tandem.tests.router.api.weather_tool import CALL, HERMES, SCHEMA, last_prompt
from tandem.tests.router.conftest import Service
from tandem.tests.router.fake_source import EOS_ID, byte_tokenizer
from tandem.tests.router.frontend.test_tools import accepts

TOOLS: Any = [
    {
        "type": "function",
        "name": "weather",
        "description": "Tells the weather.",
        "strict": True,
        "parameters": SCHEMA,
    }
]


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return byte_tokenizer(chat_template=HERMES)


async def test_a_response(service: Service, client: openai.AsyncOpenAI) -> None:
    service.source.answer = [*b"hello", EOS_ID]
    made = await client.responses.create(
        model="tiny",
        input="hello?",
        instructions="Be brief.",
        temperature=0.5,
        max_output_tokens=9,
        store=False,
    )
    assert (made.object, made.status, made.model, made.output_text) == (
        "response",
        "completed",
        "tiny",
        "hello",
    )
    assert (made.temperature, made.max_output_tokens, made.instructions) == (0.5, 9, "Be brief.")
    assert made.output[0].to_dict()["type"] == "message"
    assert made.output[0].to_dict()["status"] == "completed"
    assert last_prompt(service) == "system: Be brief.\nuser: hello?\nassistant: "
    assert made.usage is not None
    assert (made.usage.input_tokens, made.usage.output_tokens) == (len(last_prompt(service)), 6)
    assert (made.to_dict()["store"], made.previous_response_id) == (False, None)
    cut = await client.responses.create(model="tiny", input="hello?", max_output_tokens=2)
    assert cut.incomplete_details is not None
    assert (cut.status, cut.incomplete_details.reason, cut.output_text) == (
        "incomplete",
        "max_output_tokens",
        "he",
    )


async def test_a_conversation(service: Service, client: openai.AsyncOpenAI) -> None:
    """The items of an earlier answer are sent back unchanged."""
    service.source.answer = [*b"hello", EOS_ID]
    first = await client.responses.create(model="tiny", input="hi")
    conversation: Any = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
        *(item.model_dump() for item in first.output),
        {"type": "reasoning", "id": "rs_1", "summary": []},
        {"role": "user", "content": "and?"},
    ]
    await client.responses.create(model="tiny", input=conversation)
    assert (
        last_prompt(service)
        == "system: Be brief.\nuser: hi\nassistant: hello\nuser: and?\nassistant: "
    )


async def test_tools_and_their_outputs(service: Service, client: openai.AsyncOpenAI) -> None:
    service.source.answer = [*f"I look.\n{CALL}\n{CALL}".encode(), EOS_ID]
    made = await client.responses.create(model="tiny", input="hello?", tools=TOOLS)
    assert [item.type for item in made.output] == ["message", "function_call", "function_call"]
    calls = [item for item in made.output if item.type == "function_call"]
    assert [(call.name, json.loads(call.arguments)) for call in calls] == [
        ("weather", {"city": "Köln"})
    ] * 2
    one = await client.responses.create(
        model="tiny", input="hello?", tools=TOOLS, parallel_tool_calls=False
    )
    assert [item.type for item in one.output] == ["message", "function_call"]
    conversation: Any = [
        {"role": "user", "content": "hello?"},
        *(item.model_dump() for item in made.output),
    ]
    conversation += [
        {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
        for call in calls
    ]
    service.source.answer = [*b"It rains.", EOS_ID]
    made = await client.responses.create(model="tiny", input=conversation, tools=TOOLS)
    assert made.output_text == "It rains."
    call = '<tool_call>{"name": "weather", "arguments": {"city": "Köln"}}</tool_call>'
    assert last_prompt(service).endswith(
        f"assistant: I look.{call}{call}\ntool: rain\ntool: rain\nassistant: "
    )


async def test_tool_choice(service: Service, client: openai.AsyncOpenAI) -> None:
    service.source.answer = [*CALL.encode(), EOS_ID]
    choices: list[tuple[Any, bool, bool]] = [
        ("auto", True, False),
        ("none", False, False),
        ("required", True, True),
        ({"type": "function", "name": "weather"}, True, True),
    ]
    for choice, calls, bound in choices:
        made = await client.responses.create(
            model="tiny", input="hello?", tools=TOOLS, tool_choice=choice
        )
        assert [item.type for item in made.output] == ["function_call" if calls else "message"]
        assert bool(service.source.requests[-1].submit.grammar) is bound


async def test_a_format_of_texts_does_not_bind_a_call_that_is_demanded(
    service: Service, client: openai.AsyncOpenAI
) -> None:
    service.source.answer = [*CALL.encode(), EOS_ID]
    made = await client.responses.parse(
        model="tiny", input="hello?", tools=TOOLS, tool_choice="required", text_format=Person
    )
    assert [item.type for item in made.output] == ["function_call"]
    assert '"age"' not in service.source.requests[-1].submit.grammar


async def test_a_format_of_texts_leaves_room_for_a_call(
    service: Service, client: openai.AsyncOpenAI
) -> None:
    for answer, kind in ((CALL, "function_call"), ('{"name": "Ada", "age": 36}', "message")):
        service.source.answer = [*answer.encode(), EOS_ID]
        made = await client.responses.parse(
            model="tiny", input="hello?", tools=TOOLS, text_format=Person
        )
        assert [item.type for item in made.output] == [kind]
        assert accepts(service.source.requests[-1].submit.grammar, answer)


async def test_the_events_of_a_stream(service: Service, client: openai.AsyncOpenAI) -> None:
    """Event by event, they build the response that the last event contains."""
    service.source.answer = [*f"I look.\n{CALL}\n{CALL}".encode(), EOS_ID]
    stream = await client.responses.create(model="tiny", input="hello?", tools=TOOLS, stream=True)
    events: list[Any] = [event async for event in stream]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    assert events[-1].type == "response.completed"
    output = events[-1].response.output
    assert [event.item for event in events if event.type == "response.output_item.done"] == output
    texts = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(texts) == output[0].content[0].text == "I look."
    for index in (1, 2):
        own = [event for event in events if getattr(event, "output_index", None) == index]
        kinds = [event.type.removeprefix("response.") for event in own]
        assert kinds[0] == "output_item.added"
        assert kinds[-2:] == ["function_call_arguments.done", "output_item.done"]
        deltas = [
            event.delta for event in own if event.type == "response.function_call_arguments.delta"
        ]
        assert "".join(deltas) == output[index].arguments
    async with client.responses.stream(model="tiny", input="hello?", tools=TOOLS) as helper:
        final = await helper.get_final_response()
    assert [item.type for item in final.output] == ["message", "function_call", "function_call"]


def crowd(name: str) -> dict[str, Any]:
    """Returns a namespace with as many tools as a request may have."""
    tools = [{"type": "function", "name": f"f{i}"} for i in range(limits.MAX_TOOLS)]
    return {"type": "namespace", "name": name, "tools": tools}


class Person(BaseModel):
    name: str
    age: int


async def test_output_of_a_schema(service: Service, client: openai.AsyncOpenAI) -> None:
    service.source.answer = [*b'{"name": "Ada", "age": 36}', EOS_ID]
    made = await client.responses.parse(model="tiny", input="hello?", text_format=Person)
    assert made.output_parsed == Person(name="Ada", age=36)
    assert '"age"' in service.source.requests[-1].submit.grammar
    await client.responses.create(
        model="tiny", input="hello?", text={"format": {"type": "json_object"}}
    )
    assert service.source.requests[-1].submit.grammar


async def test_errors(service: Service, client: openai.AsyncOpenAI) -> None:
    wrong: list[tuple[dict[str, Any], str, str]] = [
        ({"conversation": "conv_1"}, "conversation", "continue with previous_response_id"),
        ({"max_output_tokens": 0}, "max_output_tokens", "must be from 1"),
        ({"tools": [{"type": "weather"}]}, "tools[0]", "type function, custom or namespace"),
        (
            {"tools": [{"type": "namespace", "name": "n", "tools": [{"type": "x"}]}]},
            "tools[0].tools[0].type",
            "'function'",
        ),
        ({"tools": [{"type": "mcp"}], "tool_choice": {"type": "mcp"}}, "tool_choice", "offer a"),
        ({"tools": [{"type": "mcp"}], "tool_choice": "required"}, "tool_choice", "has no tools"),
        ({"tool_choice": {"type": "custom", "name": "x"}}, "tool_choice", "demands a call"),
        ({"tools": [crowd("a"), crowd("b")]}, "tools", f"{2 * limits.MAX_TOOLS} tools"),
    ]
    for fields, param, text in wrong:
        with pytest.raises(openai.BadRequestError, match=text) as caught:
            await client.responses.create(model="tiny", input="hello?", **fields)
        assert caught.value.param == param
    service.source.error = errors.InternalError("broken")
    service.source.error_after = 2
    stream = await client.responses.create(model="tiny", input="hello?", stream=True)
    with pytest.raises(openai.APIError, match="broken") as failed:
        [event async for event in stream]
    assert (failed.value.code, failed.value.type) == ("internal", "server_error")


@pytest.mark.parametrize("num_characters", [600, limits.MAX_PROMPT_CHARACTERS + 1])
async def test_a_stream_of_a_prompt_that_is_too_long_is_a_failed_response(
    http: httpx.AsyncClient, num_characters: int
) -> None:
    """Codex CLI knows this error only by the event, and then shortens the conversation."""
    asked = {"model": "tiny", "input": "x" * num_characters, "stream": True}
    answer = await http.post("/v1/responses", json=asked)
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = events_of(answer)
    kinds = ["response.created", "response.in_progress", "error", "response.failed"]
    assert [event["type"] for event in events] == kinds
    failed = events[-1]["response"]
    assert (failed["id"], failed["status"]) == (events[0]["response"]["id"], "failed")
    assert failed["error"]["code"] == events[2]["error"]["code"] == "context_length_exceeded"
    assert failed["error"]["message"].startswith("The input exceeds the context window. ")
    asked["stream"] = False
    assert (await http.post("/v1/responses", json=asked)).status_code == 400


@pytest.mark.parametrize("stream", [False, True])
async def test_a_cut_answer_with_calls_is_incomplete(
    service: Service, client: openai.AsyncOpenAI, stream: bool
) -> None:
    service.source.answer = f"{CALL}\n<tool_".encode()
    made: Any = await client.responses.create(model="tiny", input="x", tools=TOOLS, stream=stream)
    last = [event async for event in made][-1].response if stream else made
    assert (last.status, last.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    service.source.answer = f"{CALL}\n{CALL}".encode()
    once = await client.responses.create(
        model="tiny", input="x", tools=TOOLS, parallel_tool_calls=False
    )
    assert ([each.type for each in once.output], once.status) == (["function_call"], "completed")
    assert once.usage is not None
    assert once.usage.output_tokens == len(CALL.encode())


async def test_what_libraries_add_to_items_comes_back(
    service: Service, client: openai.AsyncOpenAI
) -> None:
    service.source.answer = [*b"hello", EOS_ID]
    text = {"type": "output_text", "text": "So.", "annotations": [], "parsed": {"a": 1}}
    refusal = {"type": "refusal", "refusal": " No."}
    call = {
        "type": "function_call",
        "call_id": "c",
        "name": "weather",
        "arguments": "{}",
        "parsed_arguments": {},
    }
    items: Any = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": "x", "client_id": "u"},
        {"type": "message", "role": "assistant", "content": [text, refusal], "agent": "a"},
        call,
        {"type": "function_call_output", "call_id": "c", "output": "rain", "created_by": "me"},
    ]
    await client.responses.create(model="tiny", input=items, tools=TOOLS)
    assert last_prompt(service).startswith(
        "[weather] system: Be brief.\nuser: x\nassistant: So. No.<tool_call>"
    )


CUSTOM: Any = {
    "type": "custom",
    "name": "apply_patch",
    "description": "Edits files.",
    "format": {"type": "grammar", "syntax": "regex", "definition": "[a-z]+"},
}


def custom_call(arguments: str) -> str:
    return f'<tool_call>\n{{"name": "apply_patch", "arguments": {arguments}}}\n</tool_call>'


async def test_a_custom_tool_has_a_text_as_its_input(
    service: Service, client: openai.AsyncOpenAI
) -> None:
    """The text is an argument for the model, and an item of its own for the client."""
    service.source.answer = [*custom_call('{"input": "a\\n\\"b\\""}').encode(), EOS_ID]
    fields: Any = {"model": "tiny", "input": "hello?", "tools": [CUSTOM]}
    stream = await client.responses.create(**fields, stream=True)
    events: list[Any] = [event async for event in stream]
    kinds = [event.type for event in events if getattr(event, "output_index", None) == 0]
    assert kinds == [
        "response.output_item.added",
        "response.custom_tool_call_input.delta",
        "response.custom_tool_call_input.done",
        "response.output_item.done",
    ]
    assert (events[3].delta, events[4].input) == ('a\n"b"', 'a\n"b"')
    (call,) = events[-1].response.output
    assert (call.type, call.name, call.input) == ("custom_tool_call", "apply_patch", 'a\n"b"')
    assert call.id.startswith("ctc_")
    assert call == events[-2].item
    output = {"type": "custom_tool_call_output", "call_id": call.call_id, "output": "done"}
    service.source.answer = [*b"Done.", EOS_ID]
    await client.responses.create(
        **fields | {"input": [{"role": "user", "content": "x"}, call.model_dump(), output]}
    )
    assert last_prompt(service).endswith(
        '{"input": "a\\n\\"b\\""}}</tool_call>\ntool: done\nassistant: '
    )


async def test_a_call_of_a_custom_tool_can_be_demanded(
    service: Service, client: openai.AsyncOpenAI
) -> None:
    """If the model writes other arguments, the client has them all."""
    service.source.answer = [*custom_call('{"patch": 1}').encode(), EOS_ID]
    made = await client.responses.create(
        model="tiny",
        input="x",
        tools=[CUSTOM, *TOOLS],
        tool_choice={"type": "custom", "name": "apply_patch"},
    )
    assert [(item.type, getattr(item, "input", "")) for item in made.output] == [
        ("custom_tool_call", '{"patch": 1}')
    ]
    grammar = service.source.requests[-1].submit.grammar
    assert accepts(grammar, custom_call('{"input": "a"}'))
    assert not accepts(grammar, custom_call('{"patch": 1}'))


async def test_allowed_tools_are_the_only_ones_of_the_prompt(
    service: Service, client: openai.AsyncOpenAI
) -> None:
    group = {
        "type": "namespace",
        "name": "files",
        "description": "",
        "tools": [{"type": "function", "name": "read"}, CUSTOM | {"name": "write"}],
    }
    tools: Any = [*TOOLS, CUSTOM, group, {"type": "image_generation"}]
    cases: list[tuple[list[dict[str, str]], str]] = [
        ([{"type": "function", "name": "weather"}], "[weather] "),
        ([{"type": "custom", "name": "apply_patch"}, {"type": "mcp"}], "[apply_patch] "),
        ([{"type": "namespace", "name": "files"}], "[files__read] [files__write] "),
        ([{"type": "custom", "name": "write", "namespace": "files"}], "[files__write] "),
        ([{"type": "image_generation"}], ""),
    ]
    service.source.answer = [*b"hello", EOS_ID]
    for allowed, listed in cases:
        choice: Any = {"type": "allowed_tools", "mode": "auto", "tools": allowed}
        await client.responses.create(model="tiny", input="x", tools=tools, tool_choice=choice)
        assert last_prompt(service).startswith(f"{listed}user: x\n")
        assert not service.source.requests[-1].submit.grammar
    choice = {"type": "allowed_tools", "mode": "required", "tools": cases[0][0]}
    service.source.answer = [*CALL.encode(), EOS_ID]
    await client.responses.create(model="tiny", input="x", tools=tools, tool_choice=choice)
    assert accepts(service.source.requests[-1].submit.grammar, CALL)
    choice["tools"] = [{"type": "image_generation"}, {"type": "function", "name": "write"}]
    with pytest.raises(openai.BadRequestError, match="one of the tools") as caught:
        await client.responses.create(model="tiny", input="x", tools=tools, tool_choice=choice)
    assert caught.value.param == "tool_choice.tools[1].name"


async def test_items_with_text_of_other_models_go_into_the_prompt_and_others_do_not(
    service: Service, client: openai.AsyncOpenAI
) -> None:
    items: Any = [
        {"role": "user", "content": "x"},
        {"type": "compaction", "id": "cmp_1", "encrypted_content": "?"},
        {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "?"},
        {
            "type": "local_shell_call",
            "id": "lsh_1",
            "call_id": "c",
            "status": "completed",
            "action": {"type": "exec", "command": ["ls"], "env": {}},
        },
        {"type": "local_shell_call_output", "id": "c", "output": "a.txt"},
        {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"query": "?"}},
        {"type": "message", "role": "assistant", "content": "So.", "phase": "commentary"},
        {"type": "additional_tools", "role": "developer", "tools": TOOLS},
        {"role": "user", "content": "y"},
    ]
    service.source.answer = [*b"hello", EOS_ID]
    raw = await client.responses.with_raw_response.create(model="tiny", input=items)
    assert raw.headers["tandem-left-out"] == "compaction, web_search_call"
    assert last_prompt(service) == (
        "[weather] user: x\nassistant: <tool_call>"
        '{"name": "local_shell", "arguments": {"type": "exec", "command": ["ls"], "env": {}}}'
        "</tool_call>\ntool: a.txt\nassistant: So.\nuser: y\nassistant: "
    )
    made = raw.parse()
    assert (
        "tandem-left-out"
        not in (
            await client.responses.with_raw_response.create(
                model="tiny", input="z", previous_response_id=made.id
            )
        ).headers
    )
    assert last_prompt(service).startswith("[weather] user: x\nassistant: <tool_call>")


async def test_fields_without_effect_are_accepted(
    service: Service, client: openai.AsyncOpenAI
) -> None:
    service.source.answer = [*b"hello", EOS_ID]
    made = await client.responses.create(
        model="tiny",
        input="x",
        include=["message.output_text.logprobs", "web_search_call.results"],
        max_tool_calls=3,
        safety_identifier="s",
        prompt_cache_key="k",
        reasoning={"effort": "low", "summary": "auto", "context": "all_turns"},
        stream_options={"include_obfuscation": True},
        text={"verbosity": "low"},
        truncation="disabled",
        store=False,
        extra_body={"client_metadata": {"session": "s"}},
    )
    assert made.output_text == "hello"
