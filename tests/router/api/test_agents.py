"""Tests requests in the form of Codex CLI, Claude Code and Open WebUI, without the programs.

The forms follow the public sources and documentation of the programs; the texts are shortened.
"""

import json
from typing import Any, Final

import httpx
import pytest

from tandem.router.frontend.served_model import ServedModel
from tandem.router.frontend.tokenizer import Tokenizer
from tandem.tests.router.api.http_bodies import events_of
from tandem.tests.router.api.weather_tool import HERMES, last_prompt
from tandem.tests.router.conftest import Service
from tandem.tests.router.fake_source import EOS_ID, byte_tokenizer

CODEX_HEADERS: Final = {
    "accept": "text/event-stream",
    "authorization": "Bearer none",
    "originator": "codex_cli_rs",
    "session_id": "0199c0de-0000-7000-8000-000000000001",
    "user-agent": "codex_cli_rs/0.147.0 (Ubuntu 24.4.0; x86_64) xterm-256color",
}
PATCH: Final = "*** Begin Patch\n*** Add File: a.txt\n+hello\n*** End Patch"
GRAMMAR: Final = 'start: begin_patch hunk+ end_patch\nbegin_patch: "*** Begin Patch" LF'
CODEX_TOOLS: Final[list[dict[str, Any]]] = [
    {
        "type": "function",
        "name": "exec_command",
        "description": "Runs a command.",
        "strict": False,
        "parameters": {
            "type": "object",
            "properties": {"cmd": {"type": "string"}, "yield_time_ms": {"type": "number"}},
            "required": ["cmd"],
            "additionalProperties": False,
        },
    },
    {
        "type": "custom",
        "name": "apply_patch",
        "description": "Edits files.",
        "format": {"type": "grammar", "syntax": "lark", "definition": GRAMMAR},
    },
    {"type": "web_search", "external_web_access": False, "search_context_size": "low"},
    {
        "type": "namespace",
        "name": "mcp__files__",
        "description": "Tools in the mcp__files__ namespace.",
        "tools": [
            {
                "type": "function",
                "name": "read_file",
                "description": "Reads a file.",
                "strict": False,
                "parameters": {"type": "object", "properties": {"path": {"type": "string"}}},
            }
        ],
    },
    {
        "type": "tool_search",
        "execution": "client",
        "description": "Searches tools.",
        "parameters": {"type": "object", "properties": {"query": {"type": "string"}}},
    },
]
CODEX_REQUEST: Final[dict[str, Any]] = {
    "model": "tiny",
    "instructions": "You are a coding agent.",
    "input": [
        {
            "type": "message",
            "role": "developer",
            "content": [{"type": "input_text", "text": "The sandbox is read-only."}],
        },
        {
            "type": "message",
            "role": "user",
            "content": [{"type": "input_text", "text": "<cwd>/tmp</cwd>"}],
        },
        {
            "type": "message",
            "role": "user",
            "content": [{"type": "input_text", "text": "Add a.txt."}],
        },
    ],
    "tools": CODEX_TOOLS,
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "reasoning": {"effort": "medium", "summary": "auto", "context": "all_turns"},
    "store": False,
    "stream": True,
    "stream_options": {"include_obfuscation": False},
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "0199c0de-0000-7000-8000-000000000001",
    "text": {"verbosity": "low"},
    "client_metadata": {"x-codex-installation-id": "0199c0de-0000-7000-8000-000000000002"},
}


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return byte_tokenizer(chat_template=HERMES)


@pytest.fixture
def model(tokenizer: Tokenizer) -> ServedModel:
    return ServedModel(name="tiny", tokenizer=tokenizer, context_tokens=4_096)


def called(name: str, **arguments: Any) -> str:
    """Returns a call as the model writes it."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


async def test_codex_cli_calls_each_kind_of_tool(service: Service, http: httpx.AsyncClient) -> None:
    calls = [
        called("exec_command", cmd="ls"),
        called("apply_patch", input=PATCH),
        called("mcp__files__read_file", path="a.txt"),
    ]
    service.source.answer = [*"\n".join(["I look.", *calls]).encode(), EOS_ID]
    answer = await http.post("/v1/responses", json=CODEX_REQUEST, headers=CODEX_HEADERS)
    assert answer.headers["tandem-left-out"] == "web_search, tool_search"
    events = events_of(answer)
    assert last_prompt(service).startswith("[exec_command] [apply_patch] [mcp__files__read_file] ")
    assert last_prompt(service).endswith("user: <cwd>/tmp</cwd>\nuser: Add a.txt.\nassistant: ")
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    message, command, patch, read = done
    assert message["content"][0]["text"] == "I look."
    assert (command["type"], command["name"]) == ("function_call", "exec_command")
    assert json.loads(command["arguments"]) == {"cmd": "ls"}
    assert "namespace" not in command
    assert (patch["type"], patch["name"], patch["input"]) == (
        "custom_tool_call",
        "apply_patch",
        PATCH,
    )
    assert (read["type"], read["namespace"], read["name"]) == (
        "function_call",
        "mcp__files__",
        "read_file",
    )
    assert events[-1]["type"] == "response.completed"
    assert events[-1]["response"]["output"] == done
    assert [tool["type"] for tool in events[-1]["response"]["tools"]] == [
        "function",
        "custom",
        "namespace",
    ]

    # The program keeps the items and sends them back with the outputs, without the empty ones.
    kept = [
        {key: value for key, value in item.items() if key not in ("id", "status")} for item in done
    ]
    reasoning: Any = {"type": "reasoning", "summary": [], "encrypted_content": None}
    outputs = [
        {"type": "function_call_output", "call_id": command["call_id"], "output": "b.txt"},
        {"type": "custom_tool_call_output", "call_id": patch["call_id"], "output": "Done."},
        {
            "type": "function_call_output",
            "call_id": read["call_id"],
            "output": [{"type": "input_text", "text": "hello"}],
        },
    ]
    service.source.answer = [*b"It is there.", EOS_ID]
    conversation = [*CODEX_REQUEST["input"], reasoning, *kept, *outputs]
    again = CODEX_REQUEST | {"input": conversation}
    events = events_of(await http.post("/v1/responses", json=again, headers=CODEX_HEADERS))
    assert events[-1]["response"]["output"][0]["content"][0]["text"] == "It is there."
    written = "".join(calls).replace(">\n{", ">{").replace("}\n<", "}<")
    assert last_prompt(service).endswith(
        f"assistant: I look.{written}\ntool: b.txt\ntool: Done.\ntool: hello\nassistant: "
    )


async def test_claude_code_calls_a_tool(service: Service, http: httpx.AsyncClient) -> None:
    mark = {"type": "ephemeral"}
    request: dict[str, Any] = {
        "model": "tiny",
        "max_tokens": 2_000,
        "stream": True,
        "temperature": 1,
        "system": [
            {"type": "text", "text": "You are a coding agent."},
            {"type": "text", "text": "Be brief.", "cache_control": mark},
        ],
        "messages": [
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "<system-reminder>now</system-reminder>"},
                    {"type": "text", "text": "List the files.", "cache_control": mark},
                ],
            }
        ],
        "tools": [
            {
                "name": "Bash",
                "description": "Runs a command.",
                "input_schema": {
                    "$schema": "http://json-schema.org/draft-07/schema#",
                    "type": "object",
                    "properties": {"command": {"type": "string"}},
                    "required": ["command"],
                    "additionalProperties": False,
                },
            }
        ],
        "metadata": {"user_id": "user_1_account__session_2"},
        "thinking": {"type": "adaptive"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "medium"},
    }
    headers = {
        "authorization": "Bearer none",
        "anthropic-version": "2023-06-01",
        "anthropic-beta": "claude-code-20250219,interleaved-thinking-2025-05-14",
        "x-app": "cli",
    }
    service.source.answer = [*f"I look.\n{called('Bash', command='ls')}".encode(), EOS_ID]
    events = events_of(await http.post("/v1/messages?beta=true", json=request, headers=headers))
    blocks = [event["content_block"] for event in events if event["type"] == "content_block_start"]
    assert [block["type"] for block in blocks] == ["text", "tool_use"]
    call = {"type": "tool_use", "id": blocks[1]["id"], "name": "Bash", "input": {"command": "ls"}}
    result = {
        "type": "tool_result",
        "tool_use_id": blocks[1]["id"],
        "content": "a.txt",
        "is_error": False,
        "cache_control": mark,
    }
    request["messages"] += [
        {"role": "assistant", "content": [{"type": "text", "text": "I look."}, call]},
        {"role": "user", "content": [result]},
    ]
    service.source.answer = [*b"a.txt", EOS_ID]
    events = events_of(await http.post("/v1/messages?beta=true", json=request, headers=headers))
    assert events[-1]["type"] == "message_stop"
    assert last_prompt(service).endswith("</tool_call>\ntool: a.txt\nassistant: ")


async def test_open_webui_lists_models_and_streams_a_chat(
    service: Service, http: httpx.AsyncClient
) -> None:
    headers = {"authorization": "Bearer none"}
    models = (await http.get("/v1/models", headers=headers)).json()
    assert [each["id"] for each in models["data"]] == ["tiny"]
    request = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "hello?"}],
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    service.source.answer = [*b"hello", EOS_ID]
    events = events_of(await http.post("/v1/chat/completions", json=request, headers=headers))
    texts = [choice["delta"].get("content") or "" for e in events for choice in e["choices"]]
    assert "".join(texts) == "hello"
    assert events[-1]["usage"]["completion_tokens"] == 6
