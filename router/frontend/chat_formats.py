"""Formats in which chat models write tool calls and reasoning. Their names are vLLM's.

A chat template shows its model's format by a text that only such templates have. Most formats
declare where calls and reasoning begin and end in the form of transformers' response templates.
Hermes, Qwen3-Coder, GLM and Llama 3 have parsers in output/tool_parser.py, because there a tag in
an argument is text.

Knows nothing of tokens.
"""

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from ...proto.limits import MAX_TOOL_NAME_CHARACTERS

CALL_MARKUP: Final = ("<tool_call>", "</tool_call>")
"""Tags around a tool call of Hermes models; text even if the tokenizer has them as special."""

_NAME_MARK: Final = re.compile("%[sj]")
PYTHON_TAG: Final = "<|python_tag|>"
AUTO: Final = "auto"
NO_FORMAT: Final = "none"

ToolCallParserName = Literal[
    "auto",
    "pythonic",
    "seed_oss",
    "minimax_m2",
    "longcat",
    "deepseek_v32",
    "olmo3",
    "apertus",
    "hy_v3",
    "hy_v4",
    "jamba",
    "hunyuan_a13b",
    "minimax",
    "glm45",
    "qwen3_coder",
    "nemotron_json",
    "deepseek_v3",
    "deepseek_v31",
    "kimi_k2",
    "hermes",
    "openai",
    "mistral_v11",
    "mistral",
    "functiongemma",
    "gemma4",
    "phi4_mini_json",
    "granite",
    "cohere_command3",
    "lfm2",
    "internlm",
    "llama3_json",
]
ReasoningParserName = Literal[
    "auto",
    "none",
    "seed_oss",
    "longcat",
    "hy_v3",
    "apertus",
    "granite",
    "qwen3",
    "openai_gptoss",
    "mistral",
    "gemma4",
    "cohere_command3",
    "deepseek_r1",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class CallGrammar:
    """Holds the texts around a demanded call and between calls.

    A text that may be a special token is separate. `%s` stands for the tool's name, `%j` for the
    name in JSON.
    """

    begin: tuple[str, ...] = ()
    open: tuple[str, ...] = ()
    head: tuple[str, ...] = ('{"name": %j, "arguments": ',)
    tail: tuple[str, ...] = ("}",)
    close: tuple[str, ...] = ()
    between: tuple[str, ...] | None = ()  # None: only one call
    end: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatFormat:
    """Holds one format of calls or of reasoning."""

    signs: tuple[str, ...]  # a template of this format has one of these texts
    markup: tuple[str, ...] = ()  # texts that may be special tokens; not part of the content
    fields: Mapping[str, Any] = field(default_factory=dict)  # of a response template
    grammar: CallGrammar | None = None  # None: calls cannot be demanded
    ends_reasoning: str = ""  # the pattern of a call that ends the reasoning it is in; "": none


_RAW: Final = {"content": "text", "content_args": {"strip": False}}
CONTENT: Final = {"content": _RAW}
"""The text outside calls and reasoning."""


def _calls(begin: str, *ends: str, **captured: str) -> dict[str, Any]:
    """Declares calls as raw text, from the pattern `begin` to one of the texts `ends`.

    Without `ends` a call goes to the end of the answer.
    """
    made = {"open": "{open}", "body": "{content}"} | captured
    close = {"close": list(ends)} if ends else {}
    return {
        "tool_calls": {
            "open_pattern": f"(?P<open>{begin})",
            **close,
            **_RAW,
            "repeats": True,
            "transform": made,
        }
    }


def _reasoning(begin: str, end: str) -> dict[str, Any]:
    return {"reasoning": {"open_pattern": begin, "close_pattern": end, **_RAW}}


def _answer(begin: str, end: str) -> dict[str, Any]:
    return {"answer": {"open_pattern": begin, "close_pattern": end, **_RAW}}


CALLED_NAME: Final = rf"[\w.:/-]{{1,{MAX_TOOL_NAME_CHARACTERS}}}"
"""The pattern of a tool's name in a call."""

_SPACE: Final = r"\s{0,4}"  # bounded, so that much white space does not slow a pattern down
# Reasoning begins the answer: further on, the tag is text, such as in an argument of a call.
_FIRST_THINK: Final = rf"\A{_SPACE}<think>\n?"
_TURN: Final = rf"(?:<\|start\|>assistant{_SPACE})?"
_CHANNEL: Final = r"(?:<\|channel\|>(?:commentary|analysis))?"
_MESSAGE: Final = rf"{_SPACE}(?:<\|constrain\|>\w{{1,16}}{_SPACE})?<\|message\|>"
# gpt-oss leaves out `functions.` now and then. A result of a tool is to the assistant.
_RECIPIENT: Final = r"(?!assistant[\s<])(?:functions\.)?+"
_HARMONY: Final = (
    "<|start|>",
    "<|channel|>",
    "<|message|>",
    "<|end|>",
    "<|return|>",
    "<|call|>",
    "<|constrain|>",
)
_DEEPSEEK: Final = (
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁sep｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁calls▁end｜>",
)
_KIMI: Final = (
    "<|tool_calls_section_begin|>",
    "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
    "<|tool_calls_section_end|>",
)
DSML: Final = "｜DSML｜"
"""The mark in the tags of DeepSeek V3.2; a special token of its own."""

_DSML_CALLS: Final = (f"<{DSML}function_calls>", f"</{DSML}function_calls>")
_HY_SUFFIXES: Final = (":opensource", ":6124c78e", "")  # of the tags, by checkpoint
HY_SUFFIX: Final = f"(?:{'|'.join(_HY_SUFFIXES)})"
"""The pattern of what ends the names of the tags of Hunyuan 3 and 4."""

_APERTUS: Final = ("<|tools_prefix|>", "<|tools_suffix|>")
_LIST_BETWEEN: Final = (", ",)
# An answer bound to JSON may begin with the same texts as a call in JSON, so these are separate as
# in JSON: llguidance's lexer takes the longest literal that may follow and never goes back.
_JSON_NAME: Final = ("{", '"name"', ": ", "%j", ", ")
_THINK_CLOSE: Final = r"\n?</think>\n{0,2}"
_HERMES_GRAMMAR: Final = CallGrammar(
    open=(CALL_MARKUP[0], "\n"), close=("\n", CALL_MARKUP[1]), between=("\n",)
)

_PYTHONIC: Final = (
    rf"\A{_SPACE}(?:<\|python_start\|>)?"
    rf"(?=\[(?:{CALLED_NAME}\(|\{{\"name\": \"{CALLED_NAME}\", \"arguments\": ))"
)


def _listed_calls(
    signs: tuple[str, ...], begin: str, end: str, ends_reasoning: str = ""
) -> ChatFormat:
    """Returns the format of calls in tags, of which a demanded one is written in a JSON list."""
    return ChatFormat(
        signs=signs,
        markup=(begin, end),
        fields=_calls(re.escape(begin), end),
        grammar=CallGrammar(begin=(begin, "["), between=_LIST_BETWEEN, end=("]", end)),
        ends_reasoning=ends_reasoning,
    )


def _hy_tags(*names: str) -> tuple[str, ...]:
    return tuple(
        f"<{slash}{name}{suffix}>"
        for name in names
        for slash in ("", "/")
        for suffix in _HY_SUFFIXES
    )


_HY: Final = ChatFormat(  # calls end the answer; a demanded one is written in a JSON list
    signs=("<tool_sep>", "<arg_key{}>", *(f"<arg_key{suffix}>" for suffix in _HY_SUFFIXES[:-1])),
    markup=_hy_tags("tool_calls", "tool_call", "tool_sep", "arg_key", "arg_value"),
    fields=_calls(rf"<tool_calls{HY_SUFFIX}>(?={_SPACE}(?:\[|<tool_call{HY_SUFFIX}>))"),
    grammar=CallGrammar(begin=("<tool_calls>", "["), between=_LIST_BETWEEN, end=("]",)),
    ends_reasoning=(
        rf"<tool_calls{HY_SUFFIX}>{_SPACE}<tool_call{HY_SUFFIX}>{_SPACE}{CALLED_NAME}{_SPACE}"
        rf"<(?:tool_sep|arg_key){HY_SUFFIX}>"
    ),
)
_TOOL_CALLS: Final = _listed_calls(("<tool_calls>",), "<tool_calls>", "</tool_calls>")

CALL_FORMATS: Final[Mapping[str, ChatFormat]] = {
    "pythonic": ChatFormat(  # the whole answer; demanded calls are a JSON list
        signs=("[func_name1(",),
        markup=("<|python_start|>", "<|python_end|>"),
        fields=_calls(_PYTHONIC, "<|python_end|>"),
        grammar=CallGrammar(
            begin=("[",),
            head=(*_JSON_NAME, '"arguments"', ": "),
            between=_LIST_BETWEEN,
            end=("]",),
        ),
    ),
    "seed_oss": _listed_calls(
        ("<seed:tool_call>",),
        "<seed:tool_call>",
        "</seed:tool_call>",
        rf"<seed:tool_call>{_SPACE}<function=",
    ),
    "minimax_m2": _listed_calls(
        ("<minimax:tool_call>",),
        "<minimax:tool_call>",
        "</minimax:tool_call>",
        rf"<minimax:tool_call>{_SPACE}<invoke name=",
    ),
    "longcat": _listed_calls(
        ("<longcat_tool_call>",),
        "<longcat_tool_call>",
        "</longcat_tool_call>",
        rf"<longcat_tool_call>{_SPACE}(?:\{{|{CALLED_NAME}{_SPACE}<longcat_arg_key>)",
    ),
    "deepseek_v32": ChatFormat(
        signs=(DSML,),
        markup=(DSML,),
        fields=_calls(*_DSML_CALLS),
        ends_reasoning=_DSML_CALLS[0],
        grammar=CallGrammar(
            begin=("<", DSML, "function_calls>", "["),
            between=_LIST_BETWEEN,
            end=("]", "</", DSML, "function_calls>"),
        ),
    ),
    "olmo3": _listed_calls(("<function_calls>",), "<function_calls>", "</function_calls>"),
    "apertus": ChatFormat(
        signs=_APERTUS[:1],
        markup=_APERTUS,
        fields=_calls(r"<\|tools_prefix\|>", _APERTUS[1]),
        ends_reasoning=r"<\|tools_prefix\|>",  # its template writes calls within thoughts
        grammar=CallGrammar(
            begin=(_APERTUS[0], "["),
            head=("{%j: ",),
            between=_LIST_BETWEEN,
            end=("]", _APERTUS[1]),
        ),
    ),
    "hy_v3": _HY,
    "hy_v4": _HY,
    "jamba": _TOOL_CALLS,
    "hunyuan_a13b": _TOOL_CALLS,
    "minimax": _TOOL_CALLS,
    "glm45": ChatFormat(  # a demanded call is written in Hermes's format
        signs=("<arg_key>",),
        markup=CALL_MARKUP,
        grammar=_HERMES_GRAMMAR,
        ends_reasoning=rf"<tool_call>{_SPACE}{CALLED_NAME}{_SPACE}<arg_key>",
    ),
    "qwen3_coder": ChatFormat(  # a demanded call is written in Hermes's format
        signs=("<function=",),
        markup=CALL_MARKUP,
        grammar=_HERMES_GRAMMAR,
        # Qwen3.5 calls before </think> now and then; a tag alone is often prose there.
        ends_reasoning=rf"<tool_call>{_SPACE}<function=",
    ),
    "nemotron_json": _listed_calls(("<TOOLCALL>",), "<TOOLCALL>", "</TOOLCALL>"),
    "deepseek_v3": ChatFormat(  # and R1; the name comes after the type, which is `function`
        signs=("tool['type'] + '<｜tool▁sep｜>'",),
        markup=_DEEPSEEK,
        fields=_calls(_DEEPSEEK[0], _DEEPSEEK[-1]),
        ends_reasoning=_DEEPSEEK[0],
        grammar=CallGrammar(
            begin=_DEEPSEEK[:1],
            head=(_DEEPSEEK[1], "function", _DEEPSEEK[2], "%s\n```json\n"),
            tail=("\n```", _DEEPSEEK[3]),
            between=("\n",),
            end=_DEEPSEEK[-1:],
        ),
    ),
    "deepseek_v31": ChatFormat(
        signs=_DEEPSEEK[:1],
        markup=_DEEPSEEK,
        fields=_calls(_DEEPSEEK[0], _DEEPSEEK[-1]),
        ends_reasoning=_DEEPSEEK[0],
        grammar=CallGrammar(
            begin=_DEEPSEEK[:1],
            head=(_DEEPSEEK[1], "%s", _DEEPSEEK[2]),
            tail=_DEEPSEEK[3:4],
            end=_DEEPSEEK[-1:],
        ),
    ),
    "kimi_k2": ChatFormat(
        signs=_KIMI[:1],
        markup=_KIMI,
        fields=_calls(r"<\|tool_calls_section_begin\|>", _KIMI[-1]),
        ends_reasoning=r"<\|tool_calls_section_begin\|>",
        grammar=CallGrammar(
            begin=_KIMI[:1],
            head=(_KIMI[1], "functions.%s:0", _KIMI[2]),
            tail=_KIMI[3:4],
            end=_KIMI[-1:],
        ),
    ),
    "hermes": ChatFormat(signs=CALL_MARKUP[:1], markup=CALL_MARKUP, grammar=_HERMES_GRAMMAR),
    "openai": ChatFormat(
        signs=("<|channel|>analysis",),
        markup=_HARMONY,
        fields=_calls(
            rf"{_TURN}{_CHANNEL}{_SPACE}to={_RECIPIENT}(?P<name>{CALLED_NAME}){_SPACE}"
            rf"{_CHANNEL}{_SPACE}(?:<\|constrain\|>)?(?:json|code)?{_SPACE}<\|message\|>",
            "<|call|>",
            "<|end|>",
            name="{name}",
        )
        | _answer(
            rf"{_TURN}<\|channel\|>(?:final|commentary|analysis){_MESSAGE}",
            r"<\|end\|>|<\|return\|>",
        ),
        grammar=CallGrammar(
            head=(
                "<|channel|>",
                "commentary to=functions.%s ",
                "<|constrain|>",
                "json",
                "<|message|>",
            ),
            tail=(),
            between=None,
        ),
    ),
    "mistral_v11": ChatFormat(
        signs=("[ARGS]",),
        markup=("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
        fields=_calls(r"\[TOOL_CALLS\]"),
        grammar=CallGrammar(open=("[TOOL_CALLS]",), head=("%s", "[ARGS]"), tail=()),
    ),
    "mistral": ChatFormat(
        signs=("[TOOL_CALLS]",),
        markup=("[TOOL_CALLS]",),
        fields=_calls(r"\[TOOL_CALLS\]"),
        grammar=CallGrammar(begin=("[TOOL_CALLS]", "["), between=_LIST_BETWEEN, end=("]",)),
    ),
    "functiongemma": ChatFormat(
        signs=("<start_function_call>",),
        markup=("<start_function_call>", "<end_function_call>", "<escape>"),
        fields=_calls("<start_function_call>", "<end_function_call>"),
    ),
    "gemma4": ChatFormat(
        signs=("<|tool_call>",),
        markup=("<|tool_call>", "<tool_call|>", '<|"|>'),
        fields=_calls(r"<\|tool_call>", "<tool_call|>"),
        ends_reasoning=r"<\|tool_call>",
    ),
    "phi4_mini_json": ChatFormat(
        signs=("<|/tool|>", "<|/tool_call|>"),
        markup=("<|tool_call|>", "<|/tool_call|>"),
        fields=_calls(r"<\|tool_call\|>|functools(?=\[)", "<|/tool_call|>"),
        grammar=CallGrammar(
            begin=("<|tool_call|>", "["), between=_LIST_BETWEEN, end=("]", "<|/tool_call|>")
        ),
    ),
    "granite": ChatFormat(
        signs=("<|tool_call|>",),
        markup=("<|tool_call|>",),
        fields=_calls(r"<\|tool_call\|>"),
        grammar=CallGrammar(begin=("<|tool_call|>", "["), between=_LIST_BETWEEN, end=("]",)),
    ),
    "cohere_command3": ChatFormat(
        signs=("<|START_ACTION|>",),
        markup=("<|START_ACTION|>", "<|END_ACTION|>"),
        fields=_calls(r"<\|START_ACTION\|>", "<|END_ACTION|>"),
        grammar=CallGrammar(
            begin=("<|START_ACTION|>", "["),
            head=('{"tool_name": %j, "parameters": ',),
            between=_LIST_BETWEEN,
            end=("]", "<|END_ACTION|>"),
        ),
    ),
    "lfm2": _listed_calls(  # in JSON, as models write them if they are asked to
        ("<|tool_call_start|>", "<|tool_list_start|>", "List of tools: ["),
        "<|tool_call_start|>",
        "<|tool_call_end|>",
    ),
    "internlm": ChatFormat(
        signs=("<|action_start|>",),
        markup=("<|action_start|>", "<|plugin|>", "<|action_end|>"),
        fields=_calls(rf"<\|action_start\|>{_SPACE}<\|plugin\|>", "<|action_end|>"),
        grammar=CallGrammar(
            open=("<|action_start|>", "<|plugin|>", "\n"),
            head=('{"name": %j, "parameters": ',),
            close=("<|action_end|>",),
        ),
    ),
    "llama3_json": ChatFormat(
        signs=(PYTHON_TAG, '"parameters": dictionary', "'\"parameters\": '"),
        grammar=CallGrammar(head=(*_JSON_NAME, '"parameters"', ": "), between=("; ",)),
    ),
}
"""By name; the first format whose sign a template has counts."""

REASONING_FORMATS: Final[Mapping[str, ChatFormat]] = {
    "seed_oss": ChatFormat(
        signs=("<seed:think>",),
        markup=("<seed:think>", "</seed:think>"),
        fields=_reasoning(rf"\A{_SPACE}<seed:think>\n?", r"\n?</seed:think>\n{0,2}"),
    ),
    "longcat": ChatFormat(
        signs=("<longcat_think>",),
        markup=("<longcat_think>", "</longcat_think>"),
        fields=_reasoning(rf"\A{_SPACE}<longcat_think>\n?", r"\n?</longcat_think>\n{0,2}"),
    ),
    "hy_v3": ChatFormat(  # and Hunyuan 4; tags without a suffix show the format qwen3
        signs=("<think{}>", *(f"<think{suffix}>" for suffix in _HY_SUFFIXES[:-1])),
        markup=_hy_tags("think"),
        fields=_reasoning(rf"\A{_SPACE}<think{HY_SUFFIX}>\n?", rf"\n?</think{HY_SUFFIX}>\n{{0,2}}"),
    ),
    "apertus": ChatFormat(
        signs=("<|inner_prefix|>",),
        markup=("<|inner_prefix|>", "<|inner_suffix|>"),
        fields=_reasoning(r"<\|inner_prefix\|>", r"<\|inner_suffix\|>"),
    ),
    "granite": ChatFormat(  # 3.2
        signs=("Here is my thought process:",),
        fields=_reasoning(
            rf"\A{_SPACE}Here(?:'s| is) my thought process:{_SPACE}",
            rf"{_SPACE}Here(?:'s| is) my response:{_SPACE}",
        ),
    ),
    "qwen3": ChatFormat(
        signs=("<think>", "</think>"),
        markup=("<think>", "</think>"),
        fields=_reasoning(_FIRST_THINK, _THINK_CLOSE),
    ),
    "openai_gptoss": ChatFormat(
        signs=("<|channel|>analysis",),
        markup=_HARMONY,
        fields=_reasoning(
            rf"{_TURN}<\|channel\|>analysis{_SPACE}<\|message\|>", r"<\|end\|>|<\|return\|>"
        )
        | _answer(
            rf"{_TURN}<\|channel\|>(?:final|commentary){_MESSAGE}", r"<\|end\|>|<\|return\|>"
        ),
    ),
    "mistral": ChatFormat(
        signs=("[THINK]",),
        markup=("[THINK]", "[/THINK]"),
        fields=_reasoning(r"\[THINK\]\n?", r"\n?\[/THINK\]\n{0,2}"),
    ),
    "gemma4": ChatFormat(
        signs=("<|channel>thought",),
        markup=("<|channel>", "<channel|>"),
        fields=_reasoning(r"<\|channel>thought\n?", r"\n?<channel\|>\n{0,2}"),
    ),
    "cohere_command3": ChatFormat(
        signs=("<|START_THINKING|>",),
        markup=("<|START_THINKING|>", "<|END_THINKING|>", "<|START_RESPONSE|>", "<|END_RESPONSE|>"),
        fields=_reasoning(r"<\|START_THINKING\|>", r"<\|END_THINKING\|>")
        | _answer(r"<\|START_RESPONSE\|>", r"<\|END_RESPONSE\|>"),
    ),
    # Every answer begins with reasoning, with or without a tag, so no template shows this format.
    "deepseek_r1": ChatFormat(
        signs=(),
        markup=("<think>", "</think>"),
        fields=_reasoning(rf"{_FIRST_THINK}(?:<think>\n?)?", _THINK_CLOSE),
    ),
}


def call_format(template: str, name: str = AUTO) -> str:
    """Returns the name of a chat template's format of calls; Hermes's if it shows no known one."""
    return _found(CALL_FORMATS, template, name) or "hermes"


def shows_call_format(template: str) -> bool:
    """Returns True if a chat template shows a known format of calls."""
    return bool(_found(CALL_FORMATS, template, AUTO))


def reasoning_format(template: str, name: str = AUTO) -> str:
    """Returns the name of a chat template's format of reasoning; "" if it shows no known one."""
    return _found(REASONING_FORMATS, template, name)


def _found(formats: Mapping[str, ChatFormat], template: str, name: str) -> str:
    if name != AUTO:
        return "" if name == NO_FORMAT else name
    signed = (
        known for known, each in formats.items() if any(sign in template for sign in each.signs)
    )
    return next(signed, "")


def grammar_texts(texts: Iterable[str], tool_name: str = "") -> list[str]:
    """Returns texts of a CallGrammar with the name of a tool."""
    forms = {"%s": tool_name, "%j": json.dumps(tool_name)}
    return [_NAME_MARK.sub(lambda mark: forms[mark[0]], text) for text in texts]
