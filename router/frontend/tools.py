"""Makes the grammars of tool calls, in the format of the model's chat template."""

import json
from collections.abc import Iterable

from ...proto import inference_pb2, limits
from ...proto.errors import InvalidArgument
from .chat import active_tools, must_call, parameters_schema
from .chat_formats import CALL_FORMATS, CallGrammar, grammar_texts
from .constraint import JSON_STYLE
from .json_schemas import close_objects, readable
from .tokenizer import Tokenizer


def tool_call_constraint(
    chat: inference_pb2.Chat, tokenizer: Tokenizer
) -> inference_pb2.Constraint | None:
    """Returns the grammar of the tool calls that a checked chat demands; None if it demands none.

    Raises InvalidArgument if the tools are too large together, or if the format has no grammar.
    """
    if not must_call(chat):
        return None
    form = CALL_FORMATS[tokenizer.call_format].grammar
    if form is None:
        raise InvalidArgument(
            "a call cannot be demanded in this model's format of calls", "prompt.chat.tool_choice"
        )
    return _constraint(chat, tokenizer, form)


def optional_call_constraint(
    chat: inference_pb2.Chat, tokenizer: Tokenizer
) -> inference_pb2.Constraint | None:
    """Returns the grammar of the tool calls that may take the place of a bound answer.

    Returns None if a checked chat permits no calls. Raises as `tool_call_constraint`.
    """
    if not active_tools(chat):
        return None
    form = CALL_FORMATS[tokenizer.call_format].grammar
    if form is None:
        raise InvalidArgument(
            "not allowed together with tools in this model's format of calls; set tool_choice to "
            "none",
            "constraint",
        )
    return _constraint(chat, tokenizer, form)


def _constraint(
    chat: inference_pb2.Chat, tokenizer: Tokenizer, form: CallGrammar
) -> inference_pb2.Constraint:
    """Returns the grammar of one or more calls.

    It has only one call if the chat names the tool or allows a single call.
    """
    named = chat.tool_choice.mode == inference_pb2.ToolChoice.MODE_NAMED
    tools = [tool for tool in chat.tools if not named or tool.name == chat.tool_choice.name]

    def literals(texts: Iterable[str], tool_name: str = "") -> str:
        return " ".join(_literal(text, tokenizer) for text in grammar_texts(texts, tool_name))

    is_single = named or chat.tool_choice.single_call
    repeated = "" if is_single or form.between is None else f"({literals(form.between)} call)*"
    rules = [
        f"start: {literals(form.begin)} call {repeated} {literals(form.end)}",
        f"call: {literals(form.open)} object {literals(form.close)}",
        "object: " + " | ".join(f"call_{i}" for i in range(len(tools))),
    ]
    for i, tool in enumerate(tools):
        # Each schema stays a separate document, so its references stay valid.
        try:
            readable_schema = readable(close_objects(parameters_schema(tool)))
        except ValueError as error:
            raise InvalidArgument(
                f"the arguments of {tool.name!r}: {error}", "prompt.chat.tools"
            ) from None
        schema = json.dumps(readable_schema | {"x-guidance": JSON_STYLE}, ensure_ascii=False)
        rules.append(
            f"call_{i}: {literals(form.head, tool.name)} arguments_{i} {literals(form.tail)}"
        )
        rules.append(f"arguments_{i}: %json {schema}")
    grammar = "\n".join(rules)
    if len(grammar) > limits.MAX_GRAMMAR_CHARACTERS:
        raise InvalidArgument(
            f"the grammar of their calls has {len(grammar)} characters; the maximum is "
            f"{limits.MAX_GRAMMAR_CHARACTERS}",
            "prompt.chat.tools",
        )
    return inference_pb2.Constraint(grammar=grammar)


def _literal(text: str, tokenizer: Tokenizer) -> str:
    """Returns the text as a literal of the grammar; llguidance writes special tokens unquoted."""
    return text if text in tokenizer.special_markup else json.dumps(text)
