"""Splits the answer to a chat into content, reasoning and tool calls while it arrives.

transformers' parser of responses finds where each begins and ends, by the declarations of
frontend/formats.
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

from transformers.utils.chat_parsing import ResponseParser
from transformers.utils.chat_parsing.response_templates import (
    ResponseTemplate,
    load_response_template,
)

from ...proto import inference_pb2
from ..frontend.chat import active_tools
from ..frontend.formats.calls import CALL_FORMATS
from ..frontend.formats.chat_format import CALLED_NAME, CONTENT
from ..frontend.formats.reasoning import REASONING_FORMATS
from ..frontend.tokenizer import Tokenizer
from . import glm_calls, invocations, qwen_coder
from .gemma_calls import read_call as read_gemma_call
from .python_calls import read_calls
from .tool_parser import make_call, parser_for

_OPENINGS: Final[Mapping[str, tuple[str, ...]]] = {
    "seed_oss": ("<seed:think>", "<seed:think><seed:cot_budget_reflect>"),
    "longcat": ("<longcat_think>",),
    "hy_v3": tuple(text for text in REASONING_FORMATS["hy_v3"].markup if "/" not in text),
    "apertus": ("<|inner_prefix|>",),
    "qwen3": ("<think>",),
    "mistral": ("[THINK]",),
    "gemma4": ("<|channel>thought",),
    "cohere_command3": ("<|START_THINKING|>", "<|START_RESPONSE|>"),
    "deepseek_r1": ("<think>",),
}
"""Texts that begin the reasoning or the answer; a chat template may end the prompt with one."""

_MAX_OPENING_TOKENS: Final = 8
_MISTRAL_CALL: Final = re.compile(
    rf"\s*\[TOOL_CALLS\]\s*({CALLED_NAME})(?:\[CALL_ID\]\w+)?(?:\[ARGS\])?\s*"
)
_NOTHING: Final = re.compile("")
_DEEPSEEK_BEGIN: Final = re.compile(
    rf"\s*<｜tool▁call▁begin｜>\s*(?:function<｜tool▁sep｜>)?({CALLED_NAME})"
    r"\s*(?:<｜tool▁sep｜>|```json)\s*"
)
_DEEPSEEK_END: Final = re.compile(r"\s*+(?:```)?\s*+<｜tool▁call▁end｜>\s*+")
_KIMI_BEGIN: Final = re.compile(
    rf"\s*<\|tool_call_begin\|>\s*(?:functions\.)?({CALLED_NAME}?)(?::\d+)?\s*"
    r"<\|tool_call_argument_begin\|>\s*"
)
_KIMI_END: Final = re.compile(r"\s*<\|tool_call_end\|>\s*")
_JSON: Final = json.JSONDecoder()
_JSON_CALLS: Final = re.compile(r"\s*+\[?\s*+\{")


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatDelta:
    """Holds the next part of an answer."""

    text: str = ""
    reasoning: str = ""
    calls: tuple[inference_pb2.ToolCall, ...] = ()


class ChatParser:
    """Splits one answer that arrives in pieces; the result does not depend on the pieces."""

    def __init__(
        self,
        chat: inference_pb2.Chat,
        tokenizer: Tokenizer,
        prompt: Sequence[int],
        *,
        is_bound: bool,
    ) -> None:
        """`is_bound`: a grammar determines the answer, so it has no reasoning."""
        reasoning = "" if is_bound else tokenizer.reasoning_format
        calls = tokenizer.call_format if active_tools(chat) else ""
        template, markup = _response_template(reasoning, calls)
        self.shown_ids: frozenset[int] = (
            tokenizer.ids_of(markup) & tokenizer.special_ids if markup else frozenset()
        )
        """Special tokens whose text the parser needs."""
        self._read_calls = _reader(calls, chat)
        ends = CALL_FORMATS[calls].fields["tool_calls"].get("close", ()) if self._read_calls else ()
        self._end: str = next(iter(ends), "")
        self._tool_parser = (
            parser_for(chat, tokenizer) if calls and self._read_calls is None else None
        )
        self.is_reasoning = False  # the last piece ended within reasoning
        self._regions: ResponseParser | None = None
        if template is not None:
            self._regions = ResponseParser(template, prefix=_begun(reasoning, tokenizer, prompt))
            self._note(self._regions.initial_events)

    @property
    def is_idle(self) -> bool:
        """True if the whole answer is text."""
        return self._regions is None and self._tool_parser is None

    def push(self, text: str) -> ChatDelta:
        """Returns the parts that the next piece completes."""
        if self._regions is None:
            return self._with_tool_calls(ChatDelta(text=text))
        return self._split(self._regions.feed(text), is_last=False)

    def finish(self, *, is_cut: bool) -> ChatDelta:
        """Returns the parts that were held back at the end of the answer.

        `is_cut`: the model would have written more. A call without a body is text then.
        """
        rest = ChatDelta()
        if self._regions is not None:
            rest = self._split(self._regions.finalize()[1], is_last=True, is_cut=is_cut)
        if self._tool_parser is None:
            return rest
        text, calls = self._tool_parser.finish()
        return ChatDelta(
            text=rest.text + text, reasoning=rest.reasoning, calls=(*rest.calls, *calls)
        )

    def _split(
        self, events: Sequence[Mapping[str, Any]], *, is_last: bool, is_cut: bool = False
    ) -> ChatDelta:
        self._note(events)
        content: list[str] = []
        reasoning: list[str] = []
        calls: list[inference_pb2.ToolCall] = []
        for event in events:
            match event["type"], event["field"]:
                case "region_chunk", "content" | "answer":
                    content.append(event["text"])
                case "region_chunk", "reasoning":
                    reasoning.append(event["text"])
                case "region_close", "tool_calls":
                    is_begun = is_cut and not event["value"]["body"].strip()
                    found = [] if is_begun else self._read(event["value"])
                    calls += found
                    if not found:  # no valid call: it is text
                        end = "" if is_last else self._end
                        content.append(event["value"]["open"] + event["value"]["body"] + end)
        return self._with_tool_calls(
            ChatDelta(text="".join(content), reasoning="".join(reasoning), calls=tuple(calls))
        )

    def _with_tool_calls(self, delta: ChatDelta) -> ChatDelta:
        """Returns the delta with the calls in its text, if the format has a tool parser."""
        if self._tool_parser is None:
            return delta
        text, calls = self._tool_parser.push(delta.text)
        return ChatDelta(text=text, reasoning=delta.reasoning, calls=tuple(calls))

    def _note(self, events: Iterable[Mapping[str, Any]]) -> None:
        """Updates `is_reasoning`."""
        for event in events:
            if event["field"] == "reasoning" and event["type"] != "region_chunk":
                self.is_reasoning = event["type"] == "region_open"

    def _read(self, region: Mapping[str, str]) -> list[inference_pb2.ToolCall]:
        """Returns the calls of a region; [] if one of them is not valid."""
        if self._read_calls is None:
            return []
        try:
            found = [make_call(name, arguments) for name, arguments in self._read_calls(region)]
        except (ValueError, RecursionError):
            return []
        calls = [call for call in found if call is not None]
        return calls if len(calls) == len(found) else []


@cache
def _response_template(
    reasoning: str, calls: str
) -> tuple[ResponseTemplate | None, frozenset[str]]:
    """Returns the declaration of two formats, None if it declares nothing, and their markup."""
    # The format of reasoning comes last: its fields for text replace the call format's.
    found = (CALL_FORMATS.get(calls), REASONING_FORMATS.get(reasoning))
    forms = [form for form in found if form is not None]
    fields = {name: each for form in forms for name, each in form.fields.items()}
    markup = frozenset(text for form in forms for text in form.markup)
    begins = "|".join(form.ends_reasoning for form in forms if form.ends_reasoning)
    if begins and "reasoning" in fields:
        ends = f"{fields['reasoning']['close_pattern']}|\\n{{0,2}}(?={begins})"
        fields["reasoning"] = fields["reasoning"] | {"close_pattern": ends}
    if not fields:
        return None, markup
    return load_response_template({"start_anchor_pattern": "^", "fields": fields | CONTENT}), markup


def _begun(reasoning: str, tokenizer: Tokenizer, prompt: Sequence[int]) -> str:
    """Returns the opening of the reasoning or the answer that ends the prompt; "" without one."""
    openings = _OPENINGS.get(reasoning, ())
    if reasoning == "deepseek_r1" or not openings:
        return "".join(openings)
    end = tokenizer.decode(prompt[-_MAX_OPENING_TOKENS:], skip_special=False).rstrip()
    return next(filter(end.endswith, openings), "")


def _reader(calls: str, chat: inference_pb2.Chat) -> "_Reader | None":
    """Returns the reader of a format of calls; None if the format has a parser of its own."""
    read = _TAGGED_READERS.get(calls)
    if read is None:
        return _READERS.get(calls)
    tools = {tool.name: tool for tool in chat.tools}
    return _or_listed(lambda body: read(body, tools))


def _or_listed(read: Callable[[str], Sequence[tuple[object, object]]]) -> "_Reader":
    """Returns the reader of calls that are perhaps in JSON, else as `read` takes them."""

    def found(region: Mapping[str, str]) -> Sequence[tuple[object, object]]:
        return _listed(region) if _JSON_CALLS.match(region["body"]) else read(region["body"])

    return found


def _listed(region: Mapping[str, str]) -> Sequence[tuple[object, object]]:
    """Reads a JSON list of calls, or calls in JSON one after another."""
    return [_pair(each) for each in _objects(region["body"])]


def _objects(text: str) -> list[object]:
    """Returns the members of lists, and other values, of a text of JSON values."""
    found: list[object] = []
    at = 0
    while at < len(text):
        if text[at].isspace():
            at += 1
            continue
        value, at = _JSON.raw_decode(text, at)
        found += value if isinstance(value, list) else [value]
    return found


def _apertus(region: Mapping[str, str]) -> Sequence[tuple[object, object]]:
    """Reads a JSON list of objects whose only member has the name and the arguments of a call."""
    found: list[tuple[object, object]] = []
    for each in _objects(region["body"]):
        if not isinstance(each, dict) or len(each) != 1:
            raise ValueError
        found += each.items()
    return found


def _pair(call: object) -> tuple[object, object]:
    if not isinstance(call, dict):
        raise ValueError
    return call.get("name", call.get("tool_name")), call.get("arguments", call.get("parameters"))


def _mistral(region: Mapping[str, str]) -> Sequence[tuple[object, object]]:
    """Reads a JSON list, which older models write, or names with their arguments.

    Arguments are read up to their end, because a string in them may have the text [TOOL_CALLS].
    """
    if region["body"].lstrip()[:1] in ("[", "{"):
        return _listed(region)
    return _read_each(region["open"] + region["body"], _MISTRAL_CALL, _NOTHING)


def _between(begin: re.Pattern[str], end: re.Pattern[str]) -> "_Reader":
    """Returns the reader of calls between two patterns; see `_read_each`."""
    return lambda region: _read_each(region["body"], begin, end)


def _read_each(
    text: str, begin: re.Pattern[str], end: re.Pattern[str]
) -> Sequence[tuple[object, object]]:
    """Reads calls, each of `begin` with the name as its group, JSON arguments, and `end`."""
    text = text.rstrip()
    found: list[tuple[object, object]] = []
    at = 0
    while at < len(text):
        before = begin.match(text, at)
        if before is None:
            raise ValueError
        arguments, at = _JSON.raw_decode(text, before.end())
        after = end.match(text, at)
        if after is None:
            raise ValueError
        at = after.end()
        found.append((before[1], arguments))
    return found


_Reader = Callable[[Mapping[str, str]], Sequence[tuple[object, object]]]
_READERS: Final[Mapping[str, _Reader]] = {
    "openai": lambda region: [(region["name"], json.loads(region["body"].strip() or "null"))],
    "mistral_v11": _mistral,
    "mistral": _mistral,
    "functiongemma": lambda region: [read_gemma_call(region["body"], "<escape>")],
    "gemma4": lambda region: [read_gemma_call(region["body"], '<|"|>')],
    "nemotron_json": _listed,
    "deepseek_v3": _between(_DEEPSEEK_BEGIN, _DEEPSEEK_END),
    "deepseek_v31": _between(_DEEPSEEK_BEGIN, _DEEPSEEK_END),
    "kimi_k2": _between(_KIMI_BEGIN, _KIMI_END),
    "phi4_mini_json": _listed,
    "granite": _listed,
    "cohere_command3": _listed,
    "lfm2": _or_listed(read_calls),
    "olmo3": _or_listed(read_calls),
    "pythonic": _or_listed(read_calls),
    "apertus": _apertus,
    "internlm": _listed,
    "jamba": _listed,
    "hunyuan_a13b": _listed,
    "minimax": _listed,
}
"""By format without a parser of its own: the reader of its calls. Raises ValueError."""

_TaggedReader = Callable[[str, Mapping[str, inference_pb2.Tool]], Sequence[tuple[object, object]]]
_TAGGED_READERS: Final[Mapping[str, _TaggedReader]] = {
    "seed_oss": lambda body, tools: [qwen_coder.read_call(body, tools)],
    "minimax_m2": invocations.read_calls,
    "longcat": lambda body, tools: [glm_calls.read_longcat_call(body, tools)],
    "hy_v3": glm_calls.read_hy_calls,
    "hy_v4": glm_calls.read_hy_calls,
    "deepseek_v32": invocations.read_calls,
}
"""By format whose arguments are texts between tags: as `_READERS`, with the tools by name."""
