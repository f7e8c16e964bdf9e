"""Makes bodies for tests of the HTTP server, and parses its events."""

import json
from typing import Any

import httpx

TEXT = "/v1/completions"
CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "hello?"}]


def body(path: str, **fields: Any) -> dict[str, Any]:
    return (
        ({"prompt": "hi"} if path == TEXT else {"messages": MESSAGES}) | {"model": "tiny"} | fields
    )


def events(answer: httpx.Response) -> list[Any]:
    """Returns the payloads of a stream; [DONE] stays a string."""
    lines = answer.text.split("\n\n")
    assert lines.pop() == ""
    assert all(line.startswith("data: ") for line in lines)
    return [json.loads(line[6:]) if line != "data: [DONE]" else "[DONE]" for line in lines]


def events_of(answer: httpx.Response) -> list[dict[str, Any]]:
    """Returns the payloads of a stream, whose events may have names."""
    assert answer.status_code == 200, answer.text
    lines = [line for line in answer.text.splitlines() if line.startswith("data: ")]
    return [json.loads(line.removeprefix("data: ")) for line in lines if line != "data: [DONE]"]


def streamed_text(chunks: list[Any], index: int = 0) -> str:
    choices = [
        choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index
    ]
    return "".join(
        choice["text"] if "text" in choice else choice["delta"].get("content", "")
        for choice in choices
    )
