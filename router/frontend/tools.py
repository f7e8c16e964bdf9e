"""Makes the grammars of tool calls, in the format of the model's chat template."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ...proto import inference_pb2
from ...proto.errors import InvalidArgument
from .chat import active_tools, must_call
from .formats.calls import CALL_FORMATS
from .formats.chat_format import CallGrammar, grammar_texts
from .tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class ToolCallConstraint:
    """Holds the grammar of tool calls without the rules of their arguments.

    The validator adds those rules, because to rewrite the schemas of tools may take long.
    """

    constraint: inference_pb2.Constraint  # refers to `arguments_0`, `arguments_1` etc.
    tools: Sequence[inference_pb2.Tool]


def tool_call_constraint(
    chat: inference_pb2.Chat, tokenizer: Tokenizer
) -> ToolCallConstraint | None:
    """Returns the grammar of the tool calls that a checked chat demands; None if it demands none.

    Raises InvalidArgument if the format has no grammar.
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
) -> ToolCallConstraint | None:
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
) -> ToolCallConstraint:
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
    rules += [
        f"call_{i}: {literals(form.head, tool.name)} arguments_{i} {literals(form.tail)}"
        for i, tool in enumerate(tools)
    ]
    return ToolCallConstraint(inference_pb2.Constraint(grammar="\n".join(rules)), tools)


def _literal(text: str, tokenizer: Tokenizer) -> str:
    """Returns the text as a literal of the grammar, or the special token with this text."""
    if text not in tokenizer.special_markup:
        return json.dumps(text)
    if text.startswith("<"):
        return text
    (token,) = tokenizer.ids_of([text])  # llguidance reads `[TOOL_CALLS]` as an optional rule
    return f"<[{token}]>"
