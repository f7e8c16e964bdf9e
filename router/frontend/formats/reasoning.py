"""Formats in which chat models write their reasoning. Their names are vLLM's.

A chat template shows its model's format by a text that only such templates have.
"""

from collections.abc import Mapping
from typing import Any, Final, Literal

from .chat_format import (
    AUTO,
    HARMONY,
    HY_SUFFIX,
    HY_SUFFIXES,
    MESSAGE,
    RAW,
    SPACE,
    TURN,
    ChatFormat,
    answer_between,
    find_format,
    hy_tags,
)

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


# Reasoning begins the answer: further on, the tag is text, such as in an argument of a call.
_FIRST_THINK: Final = rf"\A{SPACE}<think>\n?"
_THINK_CLOSE: Final = r"\n?</think>\n{0,2}"


def _reasoning(begin: str, end: str) -> dict[str, Any]:
    return {"reasoning": {"open_pattern": begin, "close_pattern": end, **RAW}}


REASONING_FORMATS: Final[Mapping[str, ChatFormat]] = {
    "seed_oss": ChatFormat(
        signs=("<seed:think>",),
        markup=("<seed:think>", "</seed:think>"),
        fields=_reasoning(rf"\A{SPACE}<seed:think>\n?", r"\n?</seed:think>\n{0,2}"),
    ),
    "longcat": ChatFormat(
        signs=("<longcat_think>",),
        markup=("<longcat_think>", "</longcat_think>"),
        fields=_reasoning(rf"\A{SPACE}<longcat_think>\n?", r"\n?</longcat_think>\n{0,2}"),
    ),
    "hy_v3": ChatFormat(  # and Hunyuan 4; tags without a suffix show the format qwen3
        signs=("<think{}>", *(f"<think{suffix}>" for suffix in HY_SUFFIXES[:-1])),
        markup=hy_tags("think"),
        fields=_reasoning(rf"\A{SPACE}<think{HY_SUFFIX}>\n?", rf"\n?</think{HY_SUFFIX}>\n{{0,2}}"),
    ),
    "apertus": ChatFormat(
        signs=("<|inner_prefix|>",),
        markup=("<|inner_prefix|>", "<|inner_suffix|>"),
        fields=_reasoning(r"<\|inner_prefix\|>", r"<\|inner_suffix\|>"),
    ),
    "granite": ChatFormat(  # 3.2
        signs=("Here is my thought process:",),
        fields=_reasoning(
            rf"\A{SPACE}Here(?:'s| is) my thought process:{SPACE}",
            rf"{SPACE}Here(?:'s| is) my response:{SPACE}",
        ),
    ),
    "qwen3": ChatFormat(
        signs=("<think>", "</think>"),
        markup=("<think>", "</think>"),
        fields=_reasoning(_FIRST_THINK, _THINK_CLOSE),
    ),
    "openai_gptoss": ChatFormat(
        signs=("<|channel|>analysis",),
        markup=HARMONY,
        fields=_reasoning(
            rf"{TURN}<\|channel\|>analysis{SPACE}<\|message\|>", r"<\|end\|>|<\|return\|>"
        )
        | answer_between(
            rf"{TURN}<\|channel\|>(?:final|commentary){MESSAGE}", r"<\|end\|>|<\|return\|>"
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
        | answer_between(r"<\|START_RESPONSE\|>", r"<\|END_RESPONSE\|>"),
    ),
    # Every answer begins with reasoning, with or without a tag, so no template shows this format.
    "deepseek_r1": ChatFormat(
        signs=(),
        markup=("<think>", "</think>"),
        fields=_reasoning(rf"{_FIRST_THINK}(?:<think>\n?)?", _THINK_CLOSE),
    ),
}


def reasoning_format(template: str, name: str = AUTO) -> str:
    """Returns the name of a chat template's format of reasoning; "" if it shows no known one."""
    return find_format(REASONING_FORMATS, template, name)
