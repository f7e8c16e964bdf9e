"""Formats in which chat models write tool calls. Their names are vLLM's.

A chat template shows its model's format by a text that only such templates have.
"""

import re
from collections.abc import Mapping
from typing import Any, Final, Literal

from .chat_format import (
    AUTO,
    CALL_MARKUP,
    CALLED_NAME,
    HARMONY,
    HY_SUFFIX,
    HY_SUFFIXES,
    MESSAGE,
    RAW,
    SPACE,
    TURN,
    CallGrammar,
    ChatFormat,
    answer_between,
    find_format,
    hy_tags,
)

PYTHON_TAG: Final = "<|python_tag|>"
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
_CHANNEL: Final = r"(?:<\|channel\|>(?:commentary|analysis))?"
# gpt-oss leaves out `functions.` now and then. A result of a tool is to the assistant.
_RECIPIENT: Final = r"(?!assistant[\s<])(?:functions\.)?+"
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
_APERTUS: Final = ("<|tools_prefix|>", "<|tools_suffix|>")
_LIST_BETWEEN: Final = (", ",)
# An answer bound to JSON may begin with the same texts as a call in JSON, so these are separate as
# in JSON: llguidance's lexer takes the longest literal that may follow and never goes back.
_JSON_NAME: Final = ("{", '"name"', ": ", "%j", ", ")
_HERMES_GRAMMAR: Final = CallGrammar(
    open=(CALL_MARKUP[0], "\n"), close=("\n", CALL_MARKUP[1]), between=("\n",)
)

_PYTHONIC: Final = (
    rf"\A{SPACE}(?:<\|python_start\|>)?"
    rf"(?=\[(?:{CALLED_NAME}\(|\{{\"name\": \"{CALLED_NAME}\", \"arguments\": ))"
)


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
            **RAW,
            "repeats": True,
            "transform": made,
        }
    }


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


_HY: Final = ChatFormat(  # calls end the answer; a demanded one is written in a JSON list
    signs=("<tool_sep>", "<arg_key{}>", *(f"<arg_key{suffix}>" for suffix in HY_SUFFIXES[:-1])),
    markup=hy_tags("tool_calls", "tool_call", "tool_sep", "arg_key", "arg_value"),
    fields=_calls(rf"<tool_calls{HY_SUFFIX}>(?={SPACE}(?:\[|<tool_call{HY_SUFFIX}>))"),
    grammar=CallGrammar(begin=("<tool_calls>", "["), between=_LIST_BETWEEN, end=("]",)),
    ends_reasoning=(
        rf"<tool_calls{HY_SUFFIX}>{SPACE}<tool_call{HY_SUFFIX}>{SPACE}{CALLED_NAME}{SPACE}"
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
        rf"<seed:tool_call>{SPACE}<function=",
    ),
    "minimax_m2": _listed_calls(
        ("<minimax:tool_call>",),
        "<minimax:tool_call>",
        "</minimax:tool_call>",
        rf"<minimax:tool_call>{SPACE}<invoke name=",
    ),
    "longcat": _listed_calls(
        ("<longcat_tool_call>",),
        "<longcat_tool_call>",
        "</longcat_tool_call>",
        rf"<longcat_tool_call>{SPACE}(?:\{{|{CALLED_NAME}{SPACE}<longcat_arg_key>)",
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
        ends_reasoning=rf"<tool_call>{SPACE}{CALLED_NAME}{SPACE}<arg_key>",
    ),
    "qwen3_coder": ChatFormat(  # a demanded call is written in Hermes's format
        signs=("<function=",),
        markup=CALL_MARKUP,
        grammar=_HERMES_GRAMMAR,
        # Qwen3.5 calls before </think> now and then; a tag alone is often prose there.
        ends_reasoning=rf"<tool_call>{SPACE}<function=",
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
        markup=HARMONY,
        fields=_calls(
            rf"{TURN}{_CHANNEL}{SPACE}to={_RECIPIENT}(?P<name>{CALLED_NAME}){SPACE}"
            rf"{_CHANNEL}{SPACE}(?:<\|constrain\|>)?(?:json|code)?{SPACE}<\|message\|>",
            "<|call|>",
            "<|end|>",
            name="{name}",
        )
        | answer_between(
            rf"{TURN}<\|channel\|>(?:final|commentary|analysis){MESSAGE}",
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
        fields=_calls(rf"<\|action_start\|>{SPACE}<\|plugin\|>", "<|action_end|>"),
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


def call_format(template: str, name: str = AUTO) -> str:
    """Returns the name of a chat template's format of calls; Hermes's if it shows no known one."""
    return find_format(CALL_FORMATS, template, name) or "hermes"


def shows_call_format(template: str) -> bool:
    """Returns True if a chat template shows a known format of calls."""
    return bool(find_format(CALL_FORMATS, template, AUTO))
