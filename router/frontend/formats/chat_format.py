"""Describes the forms of calls and reasoning, and what several of them share.

Most formats declare where calls and reasoning begin and end in the form of transformers' response
templates. Hermes, Qwen3-Coder, GLM and Llama 3 have parsers in output/tool_parser.py, because there
a tag in an argument is text.
"""

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from ....proto.limits import MAX_TOOL_NAME_CHARACTERS

CALL_MARKUP: Final = ("<tool_call>", "</tool_call>")
"""Tags around a tool call of Hermes models; text even if the tokenizer has them as special."""

_NAME_MARK: Final = re.compile("%[sj]")
AUTO: Final = "auto"
NO_FORMAT: Final = "none"


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


RAW: Final = {"content": "text", "content_args": {"strip": False}}
CONTENT: Final = {"content": RAW}
"""The text outside calls and reasoning."""


def answer_between(begin: str, end: str) -> dict[str, Any]:
    """Declares the answer itself as raw text between two patterns."""
    return {"answer": {"open_pattern": begin, "close_pattern": end, **RAW}}


CALLED_NAME: Final = rf"[\w.:/-]{{1,{MAX_TOOL_NAME_CHARACTERS}}}"
"""The pattern of a tool's name in a call."""

SPACE: Final = r"\s{0,4}"  # bounded, so that much white space does not slow a pattern down
TURN: Final = rf"(?:<\|start\|>assistant{SPACE})?"
MESSAGE: Final = rf"{SPACE}(?:<\|constrain\|>\w{{1,16}}{SPACE})?<\|message\|>"
HARMONY: Final = (
    "<|start|>",
    "<|channel|>",
    "<|message|>",
    "<|end|>",
    "<|return|>",
    "<|call|>",
    "<|constrain|>",
)
HY_SUFFIXES: Final = (":opensource", ":6124c78e", "")  # of the tags, by checkpoint
HY_SUFFIX: Final = f"(?:{'|'.join(HY_SUFFIXES)})"
"""The pattern of what ends the names of the tags of Hunyuan 3 and 4."""


def hy_tags(*names: str) -> tuple[str, ...]:
    """Returns the opening and closing tags of Hunyuan 3 and 4 with all suffixes."""
    return tuple(
        f"<{slash}{name}{suffix}>"
        for name in names
        for slash in ("", "/")
        for suffix in HY_SUFFIXES
    )


def find_format(formats: Mapping[str, ChatFormat], template: str, name: str) -> str:
    """Returns `name`, or if it is AUTO the first format that a template shows; "" for none."""
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
