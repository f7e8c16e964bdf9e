"""Formats of tool calls, and the grammar that demands a call.

Two formats, each the one that a family's chat template teaches:
- Hermes (Qwen and others): any number of `<tool_call>{"name": ..., "arguments": {...}}</tool_call>` among text.
- Llama 3: the whole answer is `{"name": ..., "parameters": {...}}`, several separated by `;`, perhaps after
  `<|python_tag|>`.
"""

import json
from typing import Final, Literal

from ...proto import inference_pb2, limits
from ...proto.errors import InvalidArgument
from .chat import must_call, parameters_schema
from .constraint import JSON_STYLE
from .open_schemas import close_objects
from .tokenizer import CALL_MARKUP, Tokenizer

ToolFormat = Literal["hermes", "llama3"]

PYTHON_TAG: Final = "<|python_tag|>"


def format_of(template: str) -> ToolFormat:
    """Returns the format that a chat template teaches; the Hermes one where it teaches none that is known."""
    if CALL_MARKUP[0] in template:
        return "hermes"
    teaches_parameters = '"parameters": dictionary' in template or "'\"parameters\": '" in template
    return "llama3" if PYTHON_TAG in template or teaches_parameters else "hermes"


def tool_call_constraint(chat: inference_pb2.Chat, tokenizer: Tokenizer) -> inference_pb2.Constraint | None:
    """Returns the grammar of one or more tool calls, or of one call of the named tool; None if the checked chat demands
    no call. Raises InvalidArgument if the tools are too large together."""
    if not must_call(chat):
        return None
    named = chat.tool_choice.mode == inference_pb2.ToolChoice.MODE_NAMED
    tools = [tool for tool in chat.tools if not named or tool.name == chat.tool_choice.name]
    if format_of(tokenizer.chat_template(tools=True)) == "hermes":
        key, between = "arguments", r'"\n"'
        opening, closing = (_literal(tag, tokenizer) for tag in CALL_MARKUP)
        call = rf'{opening} "\n" object "\n" {closing}'
    else:
        key, between, call = "parameters", '"; "', "object"
    rules = [
        "start: call" if named else f"start: call ({between} call)*",
        f"call: {call}",
        "object: " + " | ".join(f"call_{i}" for i in range(len(tools))),
    ]
    for i, tool in enumerate(tools):
        # The schema is a document of its own, so that its references stay right.
        head = json.dumps(f'{{"name": {json.dumps(tool.name)}, "{key}": ')
        schema = json.dumps(close_objects(parameters_schema(tool)) | {"x-guidance": JSON_STYLE}, ensure_ascii=False)
        rules += [f'call_{i}: {head} arguments_{i} "}}"', f"arguments_{i}: %json {schema}"]
    grammar = "\n".join(rules)
    if len(grammar) > limits.MAX_GRAMMAR_CHARACTERS:
        raise InvalidArgument(
            f"the grammar of their calls has more than {limits.MAX_GRAMMAR_CHARACTERS} characters", "prompt.chat.tools"
        )
    return inference_pb2.Constraint(grammar=grammar)


def _literal(tag: str, tokenizer: Tokenizer) -> str:
    """Returns the tag as a grammar names it; a special token is no text to llguidance."""
    return tag if tag in tokenizer.special_markup else json.dumps(tag)
