"""Tests that content, reasoning and calls of each format are read from any pieces of text."""

import functools
import json
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from llguidance import LLMatcher

from tandem.proto import inference_pb2
from tandem.proto.errors import InvalidArgument
from tandem.router.frontend.formats.calls import CALL_FORMATS, ToolCallParserName, call_format
from tandem.router.frontend.formats.reasoning import (
    REASONING_FORMATS,
    ReasoningParserName,
    reasoning_format,
)
from tandem.router.frontend.prepare import RequestContext, prepare
from tandem.router.frontend.served_model import ServedModel
from tandem.router.frontend.tokenizer import Tokenizer
from tandem.router.frontend.tools import tool_call_constraint
from tandem.router.output import tool_parser
from tandem.router.output.chat_parser import ChatParser
from tandem.router.output.choice import CompletionText
from tandem.router.stopping.rules import StopRules
from tandem.tests.router.fake_source import byte_tokenizer
from tandem.tests.router.frontend.test_tools import accepts, call_grammar, chat, hermes, llama
from tandem.tests.tiny_tokenizer import make_tokenizer

SIGNS = {
    "pythonic": "Use the format [func_name1(params_name1=value1)]",
    "seed_oss": "<seed:tool_call>\n<function=",
    "minimax_m2": "<minimax:tool_call><invoke name=",
    "longcat": "<longcat_tool_call>",
    "deepseek_v32": "<｜DSML｜function_calls>",
    "olmo3": "<function_calls>",
    "apertus": "<|tools_prefix|>",
    "hy_v3": "<tool_calls>\n<tool_call>{name}<tool_sep>\n<arg_key>",
    "hy_v4": "{{ '<tool_calls{}><arg_key{}>' }}",
    "jamba": "<tool_calls>",
    "hunyuan_a13b": "<tool_calls>",
    "minimax": "<tool_calls>",
    "glm45": "<tool_call>{name}\n<arg_key>",
    "qwen3_coder": "<tool_call><function=",
    "nemotron_json": "<TOOLCALL>",
    "deepseek_v3": "{# '<｜tool▁calls▁begin｜>' + tool['type'] + '<｜tool▁sep｜>' #}x",
    "deepseek_v31": "<｜tool▁calls▁begin｜>",
    "kimi_k2": "<|tool_calls_section_begin|>",
    "hermes": "<tool_call>",
    "openai": "<|channel|>analysis<|message|>",
    "mistral_v11": "[TOOL_CALLS] [ARGS]",
    "mistral": "[TOOL_CALLS]",
    "functiongemma": "<start_function_call>",
    "gemma4": "<|tool_call>",
    "phi4_mini_json": "<|tool|><|/tool|>",
    "granite": "<|tool_call|>",
    "cohere_command3": "<|START_ACTION|>",
    "lfm2": "List of tools: <|tool_list_start|>[",
    "internlm": "<|action_start|><|plugin|>",
    "llama3_json": "<|python_tag|>",
}
"""By format, what the chat templates of its models have."""

CITY = '{"city": "Köln"}'
ONE, TWO = [("weather", {"city": "Köln"})], [("weather", {"city": "Köln"}), ("now", {})]
LIST = f'[{{"name": "weather", "arguments": {CITY}}}, {{"name": "now", "arguments": {{}}}}]'
COMMENTARY = (
    "<|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json<|message|>"
)
CODER = """<tool_call>
<function=weather>
<parameter=city>
Köln
</parameter>
<parameter=days>
3
</parameter>
<parameter=x></a>
</parameter>
</function>
</tool_call>"""
GLM = """<tool_call>weather
<arg_key>city</arg_key>
<arg_value>Köln</arg_value>
<arg_key>days</arg_key>
<arg_value>3</arg_value>
</tool_call>"""
DEEPSEEK_V3 = (
    "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n"
    f"```json\n{CITY}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
)
DEEPSEEK_V31 = (
    f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{CITY}"
    "<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
)
KIMI = (
    "<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0"
    f"<|tool_call_argument_begin|>{CITY}<|tool_call_end|><|tool_calls_section_end|>"
)
MINIMAX = """<minimax:tool_call>
<invoke name="weather">
<parameter name="city">Köln</parameter>
<parameter name="days">3</parameter>
</invoke>
<invoke name="now">
</invoke>
</minimax:tool_call>"""
INVOKED = [("weather", {"city": "Köln", "days": "3"}), ("now", {})]
DEEPSEEK_V32 = (
    MINIMAX.replace("</invoke", "</｜DSML｜invoke")
    .replace("<invoke", "<｜DSML｜invoke")
    .replace('<parameter name="city"', '<｜DSML｜parameter name="city" string="true"')
    .replace('<parameter name="days"', '<｜DSML｜parameter name="days" string="false"')
    .replace("</parameter", "</｜DSML｜parameter")
    .replace("minimax:tool_call", "｜DSML｜function_calls")
)
HY = """<tool_calls>
<tool_call>weather<tool_sep>
<arg_key>city</arg_key>
<arg_value>Köln</arg_value>
<arg_key>days</arg_key>
<arg_value>3</arg_value>
</tool_call>
<tool_call>now<tool_sep>
</tool_call>
</tool_calls>"""


def hy(suffix: str, separator: str) -> str:
    """Returns Hunyuan's calls with a suffix of their tags."""
    return HY.replace("<tool_sep>", separator).replace(">", f"{suffix}>")


LONGCAT = GLM.replace("arg_", "longcat_arg_").replace("tool_call>", "longcat_tool_call>")
LINES = "\n".join(f'{{"name": "{name}", "arguments": {json.dumps(given)}}}' for name, given in TWO)
BARE = CODER.removeprefix("<tool_call>\n")
LONGEST = "f" * 128
Read = tuple[str, str, list[tuple[str, Any]]]
"""Text, reasoning, calls."""

CALLS: list[tuple[str, str, Read]] = [
    *(
        (name, text, ("", "", [(LONGEST, {})]))
        for name, text in (
            ("openai", f"{COMMENTARY.replace('weather', LONGEST)}{{}}<|call|>"),
            ("mistral_v11", f"[TOOL_CALLS]{LONGEST}[ARGS]{{}}"),
            ("gemma4", f"<|tool_call>call:{LONGEST}{{}}<tool_call|>"),
            ("qwen3_coder", f"<tool_call><function={LONGEST}></function></tool_call>"),
        )
    ),
    ("openai", f"{COMMENTARY}{CITY}<|call|>", ("", "", ONE)),
    ("openai", f"<|channel|>analysis<|message|>Hm.<|end|>{COMMENTARY}{CITY}", ("", "Hm.", ONE)),
    (
        "openai",
        f" to=functions.weather<|channel|>commentary json<|message|>{CITY}<|call|>",
        ("", "", ONE),
    ),
    (
        "openai",
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Hi.",
        ("Hi.", "Hm.", []),
    ),
    ("openai", "<|channel|>final<|message|>Hi.<|return|>", ("Hi.", "", [])),
    ("openai", f"{COMMENTARY}{{broken<|call|>", (f"{COMMENTARY}{{broken<|call|>", "", [])),
    ("openai", f"{COMMENTARY}<|call|>", ("", "", [("weather", {})])),
    ("openai", f"{COMMENTARY} \n<|call|>", ("", "", [("weather", {})])),
    ("openai", f"{COMMENTARY}null<|call|>", ("", "", [("weather", {})])),
    *(  # without `functions.`
        ("openai", f"{header}<|message|>{CITY}<|call|>", ("", "", ONE))
        for header in (
            "<|channel|>commentary to=weather <|constrain|>json",
            "<|start|>assistant<|channel|>analysis to=weather code",
            "<|start|>assistant to=functions.weather<|channel|>commentary <|constrain|>json",
            " to=weather<|channel|>commentary json",
        )
    ),
    (
        "openai",
        "<|channel|>commentary to=assistant_2<|message|>{}<|call|>",
        ("", "", [("assistant_2", {})]),
    ),
    *(
        ("openai", text, (text, "", []))
        for text in (
            "<|channel|>commentary to=assistant <|message|>{}<|call|>",
            "<|channel|>commentary to=functions.<|message|>{}<|call|>",
            "<|channel|>analysis to=python code<|message|>print(1)<|call|>",
            "Go to=weather, then",
        )
    ),
    ("openai", "no channel", ("no channel", "", [])),
    ("mistral", f"[TOOL_CALLS]{LIST}", ("", "", TWO)),
    ("mistral", f"I look.[TOOL_CALLS] {LIST}", ("I look.", "", TWO)),
    ("mistral", "[TOOL_CALLS][{broken", ("[TOOL_CALLS][{broken", "", [])),
    ("mistral", "[TOOL", ("[TOOL", "", [])),
    ("mistral_v11", f"[TOOL_CALLS]weather[ARGS]{CITY}[TOOL_CALLS]now[ARGS]{{}}", ("", "", TWO)),
    ("mistral_v11", f"a[TOOL_CALLS]weather[CALL_ID]x1[ARGS]{CITY}", ("a", "", ONE)),
    (
        "mistral_v11",
        f'[TOOL_CALLS]now[ARGS]{{"x": "[TOOL_CALLS]"}} [TOOL_CALLS] weather{CITY}\n',
        ("", "", [("now", {"x": "[TOOL_CALLS]"}), *ONE]),
    ),
    (
        "mistral_v11",
        f"[TOOL_CALLS]weather[ARGS]{CITY} so",
        (f"[TOOL_CALLS]weather[ARGS]{CITY} so", "", []),
    ),
    (
        "functiongemma",
        "<start_function_call>call:weather{city:<escape>Köln<escape>}<end_function_call>",
        ("", "", ONE),
    ),
    ("gemma4", 'a <|tool_call>call:weather{city:<|"|>Köln<|"|>}<tool_call|>', ("a ", "", ONE)),
    ("gemma4", "<|tool_call>call:now{}<tool_call|> b", (" b", "", [("now", {})])),
    (
        "gemma4",
        '<|tool_call>call:now{user-id:5, $filter : <|"|>a, b:{c}<|"|> ,a.b:[1, true, None, [],{}]'
        ',\n<|"|>d e<|"|>:{x:null,y:False},"z":-2.5}<tool_call|>',
        (
            "",
            "",
            [
                (
                    "now",
                    {
                        "user-id": 5,
                        "$filter": "a, b:{c}",
                        "a.b": [1, True, None, [], {}],
                        "d e": {"x": None, "y": False},
                        "z": -2.5,
                    },
                )
            ],
        ),
    ),
    *(
        ("gemma4", f"<|tool_call>{text}<tool_call|>", (f"<|tool_call>{text}<tool_call|>", "", []))
        for text in (
            "call:now{a:1",
            "call:now{a:1}}",
            "call:now{a:1,}",
            "call:now{a}",
            "call:now{a:b}",
            "call:now{a:1 b:2}",
            'call:now{a:<|"|>b}',
            "call:now[]",
            "call:now{,}",
        )
    ),
    ("phi4_mini_json", f"<|tool_call|>{LIST}<|/tool_call|>", ("", "", TWO)),
    ("phi4_mini_json", f"functools{LIST}", ("", "", TWO)),
    ("phi4_mini_json", "use functools.cache", ("use functools.cache", "", [])),
    ("granite", f"<|tool_call|>{LIST}", ("", "", TWO)),
    ("granite", '<|tool_call|>{"name": "now", "arguments": null}', ("", "", [("now", {})])),
    (
        "granite",
        '<|tool_call|>{"name": "now", "arguments": [1]}',
        ('<|tool_call|>{"name": "now", "arguments": [1]}', "", []),
    ),
    (
        "cohere_command3",
        f'<|START_ACTION|>[{{"tool_name": "weather", "parameters": {CITY}}}]<|END_ACTION|>',
        ("", "", ONE),
    ),
    (
        "lfm2",
        "I look.<|tool_call_start|>[weather(city='Köln'), now()]<|tool_call_end|>",
        ("I look.", "", TWO),
    ),
    ("lfm2", f"<|tool_call_start|>{LIST}<|tool_call_end|>", ("", "", TWO)),
    ("lfm2", '<|tool_call_start|>weather(city="Köln")<|tool_call_end|> b', (" b", "", ONE)),
    (
        "lfm2",
        "<|tool_call_start|>[weather(city=town)]<|tool_call_end|>",
        ("<|tool_call_start|>[weather(city=town)]<|tool_call_end|>", "", []),
    ),
    (
        "cohere_command3",
        "<|START_ACTION|>5<|END_ACTION|> a",
        ("<|START_ACTION|>5<|END_ACTION|> a", "", []),
    ),
    (
        "qwen3_coder",
        f"a\n{CODER}\nb",
        ("a\n\nb", "", [("weather", {"city": "Köln", "days": "3", "x": "</a>"})]),
    ),
    *(
        (
            "qwen3_coder",
            f"<tool_call><function=now><parameter=x>{text}</parameter>\n<parameter=y>\n5\n"
            f"</parameter>\n</function>\n</tool_call> so {hermes('weather', CITY)}",
            ("so", "", [("now", {"x": text, "y": "5"}), *ONE]),
        )
        for text in (
            "use </parameter> here",
            'use "</tool_call> here',
            "</function> </parameter></tool_call> <tool_call>",
        )
    ),
    (
        "qwen3_coder",
        hermes("now", '{"x": "</tool_call>"}'),
        ("", "", [("now", {"x": "</tool_call>"})]),
    ),
    (
        "qwen3_coder",
        "in <tool_call></tool_call>: <tool_call><function=now></function>",
        ("in <tool_call></tool_call>:", "", [("now", {})]),
    ),
    ("qwen3_coder", hermes("weather", CITY), ("", "", ONE)),
    (
        "qwen3_coder",
        "<tool_call><function=now>5</function></tool_call>",
        ("<tool_call><function=now>5</function></tool_call>", "", []),
    ),
    (  # without its opening tag
        "qwen3_coder",
        f"a\n{BARE}\n{BARE}b",
        ("a\n\nb", "", [("weather", {"city": "Köln", "days": "3", "x": "</a>"})] * 2),
    ),
    ("qwen3_coder", "<function=now></function>", ("", "", [("now", {})])),  # without both tags
    (
        "qwen3_coder",
        "Write <function=f> in <tool_call><function=now></function></tool_call>",
        ("Write <function=f> in", "", [("now", {})]),
    ),
    (
        "qwen3_coder",
        "<function=now></function> is text",
        ("<function=now></function> is text", "", []),
    ),
    (
        "glm45",
        f"a\n{GLM}\n{GLM}b",
        ("a\n\nb", "", [("weather", {"city": "Köln", "days": "3"})] * 2),
    ),
    ("glm45", GLM.replace("\n", ""), ("", "", [("weather", {"city": "Köln", "days": "3"})])),
    ("glm45", "<tool_call>now\n</tool_call><tool_call>now</tool_call>", ("", "", TWO[1:] * 2)),
    (
        "glm45",
        GLM.replace("Köln", "a</tool_call></arg_value> <tool_call>\n<arg_key >"),
        (
            "",
            "",
            [
                (
                    "weather",
                    {"city": "a</tool_call></arg_value> <tool_call>\n<arg_key >", "days": "3"},
                )
            ],
        ),
    ),
    ("glm45", f"{hermes('weather', CITY)} so", ("so", "", ONE)),
    ("glm45", hermes("weather", CITY).removesuffix("</tool_call>"), ("", "", ONE)),
    ("glm45", GLM.removesuffix("\n</tool_call>"), (GLM.removesuffix("\n</tool_call>"), "", [])),
    *(
        ("glm45", f"<tool_call>{text}</tool_call>", (f"<tool_call>{text}</tool_call>", "", []))
        for text in (
            "yes",
            "now<arg_key>a</arg_key>",
            "now<arg_key>a</arg_key><arg_value>1</arg_value>2",
            "now<arg_key>a</arg_key><arg_value>1</arg_value><arg_key>a</arg_key><arg_value>2</arg_value>",
        )
    ),
    *(
        (
            "deepseek_v3",
            f"I look.{DEEPSEEK_V3}".replace(
                "<｜tool▁calls▁end｜>",
                "\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n{}\n```"
                f"<｜tool▁call▁end｜>{end}",
            ),
            ("I look.", "", TWO),
        )
        for end in ("", "\n", "<｜tool▁calls▁end｜>", "\n<｜tool▁calls▁end｜>")
    ),
    ("deepseek_v31", f"{DEEPSEEK_V31} b", (" b", "", ONE)),
    (
        "deepseek_v31",
        DEEPSEEK_V31.replace("weather", "function"),
        ("", "", [("function", ONE[0][1])]),
    ),
    ("deepseek_v31", DEEPSEEK_V31.replace("}", ""), (DEEPSEEK_V31.replace("}", ""), "", [])),
    ("kimi_k2", f"I look.{KIMI} b", ("I look. b", "", ONE)),
    (
        "kimi_k2",
        "<|tool_calls_section_begin|> <|tool_call_begin|> functions.a.b:c:10 "
        '<|tool_call_argument_begin|> {"x": 1} <|tool_call_end|>\n<|tool_call_begin|>now'
        "<|tool_call_argument_begin|>{}<|tool_call_end|> <|tool_calls_section_end|>",
        ("", "", [("a.b:c", {"x": 1}), ("now", {})]),
    ),
    ("kimi_k2", KIMI.replace("tool_call_end", "x"), (KIMI.replace("tool_call_end", "x"), "", [])),
    ("nemotron_json", f"I look.<TOOLCALL>{LIST}</TOOLCALL> b", ("I look. b", "", TWO)),
    ("nemotron_json", "<TOOLCALL>[5]</TOOLCALL>", ("<TOOLCALL>[5]</TOOLCALL>", "", [])),
    ("pythonic", "[weather(city='Köln'), now()]", ("", "", TWO)),
    ("pythonic", '<|python_start|>[weather(city="Köln")]<|python_end|>', ("", "", ONE)),
    ("pythonic", "[1] see [now()]", ("[1] see [now()]", "", [])),
    ("pythonic", "[now() or later]", ("[now() or later]", "", [])),
    ("pythonic", "So: [now()]", ("So: [now()]", "", [])),
    *(
        (
            "seed_oss",
            f"I look.<seed:tool_call>\n{call}\n</seed:tool_call>b",
            ("I look.b", "", [("weather", {"city": "Köln", "days": "3", "x": "</a>"})]),
        )
        for call in (BARE.removesuffix("\n</tool_call>"),)
    ),
    (
        "seed_oss",
        "<seed:tool_call>so</seed:tool_call>",
        ("<seed:tool_call>so</seed:tool_call>", "", []),
    ),
    ("minimax_m2", f"I look.{MINIMAX}", ("I look.", "", INVOKED)),
    (
        "minimax_m2",
        MINIMAX.replace("Köln", "</parameter> <invoke> </invoke>\n"),
        (
            "",
            "",
            [("weather", {"city": "</parameter> <invoke> </invoke>\n", "days": "3"}), INVOKED[1]],
        ),
    ),
    *(
        ("minimax_m2", wrong, (wrong, "", []))
        for wrong in (
            MINIMAX.replace("</invoke>\n</mini", "</mini"),
            MINIMAX.replace("<parameter", "<argument"),
            MINIMAX.replace('"now"', '""'),
        )
    ),
    (
        "deepseek_v32",
        f"I look.{DEEPSEEK_V32}",
        ("I look.", "", [("weather", {"city": "Köln", "days": 3}), ("now", {})]),
    ),
    (
        "deepseek_v32",
        DEEPSEEK_V32.replace(">3<", ">three<"),
        ("", "", [("weather", {"city": "Köln", "days": "three"}), ("now", {})]),
    ),
    (
        "olmo3",
        "I look.<function_calls>\nweather(\n  city='Köln')\nnow()\n</function_calls>",
        ("I look.", "", TWO),
    ),
    ("olmo3", "<function_calls>[weather(city='Köln'),\nnow()]</function_calls>", ("", "", TWO)),
    (
        "olmo3",
        "<function_calls>now() now()</function_calls>",
        ("<function_calls>now() now()</function_calls>", "", []),
    ),
    (
        "apertus",
        f'I look.<|tools_prefix|>[{{"weather": {CITY}}}, {{"now": {{}}}}]<|tools_suffix|>',
        ("I look.", "", TWO),
    ),
    (
        "apertus",
        '<|tools_prefix|>[{"a": {}, "b": {}}]<|tools_suffix|>',
        ('<|tools_prefix|>[{"a": {}, "b": {}}]<|tools_suffix|>', "", []),
    ),
    *(
        (
            name,
            f"I look.{hy(suffix, separator)}{end}",
            ("I look.", "", [("weather", {"city": "Köln", "days": "3"}), ("now", {})]),
        )
        for name in ("hy_v3", "hy_v4")
        for suffix in ("", ":opensource", ":6124c78e")
        for separator in ("<tool_sep>", "")
        for end in ("", "\n")
    ),
    ("hy_v3", HY.removesuffix("\n</tool_calls>"), ("", "", INVOKED)),
    (
        "hy_v3",
        HY.replace("Köln", "</tool_call> </arg_value> </tool_calls>\n"),
        (
            "",
            "",
            [
                ("weather", {"city": "</tool_call> </arg_value> </tool_calls>\n", "days": "3"}),
                INVOKED[1],
            ],
        ),
    ),
    *(
        ("hy_v3", wrong, (wrong, "", []))
        for wrong in (
            "The tag <tool_calls> is text.",
            HY.removesuffix("</tool_call>\n</tool_calls>"),
            HY.replace("<tool_call>now", "now"),
            HY.replace("<arg_key>city", "city"),
            f"{HY} so",
        )
    ),
    ("longcat", f"I look.{LONGCAT}", ("I look.", "", INVOKED[:1])),
    (
        "longcat",
        "<longcat_tool_call>now</longcat_tool_call><longcat_tool_call>"
        f'{{"name": "weather", "arguments": {CITY}}}</longcat_tool_call> b',
        (" b", "", [*TWO[1:], *ONE]),
    ),
    (
        "longcat",
        "<longcat_tool_call>so</longcat_tool_call>",
        ("<longcat_tool_call>so</longcat_tool_call>", "", []),
    ),
    (
        "internlm",
        f'I look.<|action_start|><|plugin|>\n{{"name": "weather", "parameters": {CITY}}}\n'
        "<|action_end|> b",
        ("I look. b", "", ONE),
    ),
    (
        "internlm",
        "<|action_start|><|plugin|>so<|action_end|>",
        ("<|action_start|><|plugin|>so<|action_end|>", "", []),
    ),
    ("jamba", f"I look.<tool_calls>{LIST}</tool_calls> b", ("I look. b", "", TWO)),
    ("jamba", f"<tool_calls>\n{LINES}\n</tool_calls>", ("", "", TWO)),
    ("jamba", "<tool_calls>{} so</tool_calls>", ("<tool_calls>{} so</tool_calls>", "", [])),
    ("hermes", hermes("weather", CITY), ("", "", ONE)),
    ("llama3_json", llama("weather", CITY), ("", "", ONE)),
]

THINK = "<think>"
REASONED: list[
    tuple[str, str, bool, str, str]
] = [  # template, answer, whether it may call, text, reasoning
    (THINK, "<think>\nHm.\n\nSo.\n</think>\n\nHi.", False, "Hi.", "Hm.\n\nSo."),
    (THINK, "Hi <thing>.", False, "Hi <thing>.", ""),
    (THINK, "<think>\n\n</think>\n\nHi.", False, "Hi.", ""),
    (THINK, "\n<think>Hm.</think>Hi.", False, "Hi.", "Hm."),
    (THINK, "The tag <think> is text </think>.", False, "The tag <think> is text </think>.", ""),
    (THINK, "<think>Hm.</think>Use <think>.", False, "Use <think>.", "Hm."),
    (THINK, "<think>cut off", False, "", "cut off"),
    (THINK, "<think>a < b </thin", False, "", "a < b </thin"),
    (THINK + SIGNS["hermes"], f"<think>Hm.</think>\n\n{hermes('now', '{}')}", True, "", "Hm."),
    ("[THINK]" + SIGNS["mistral"], f"[THINK]Hm.[/THINK]Hi.[TOOL_CALLS]{LIST}", True, "Hi.", "Hm."),
    ("<|channel>thought", "<|channel>thought\nHm.<channel|>Hi.", False, "Hi.", "Hm."),
    ("<seed:think>", "<seed:think>Hm.</seed:think>\nHi.", False, "Hi.", "Hm."),
    ("<longcat_think>", "<longcat_think>\nHm.\n</longcat_think>\nHi.", False, "Hi.", "Hm."),
    *(
        ("<think{}>", f"<think{suffix}>Hm.</think{suffix}>Hi.", False, "Hi.", "Hm.")
        for suffix in (":opensource", ":6124c78e", "")
    ),
    ("<|inner_prefix|>", "<|inner_prefix|>Hm.<|inner_suffix|>Hi.", False, "Hi.", "Hm."),
    (
        "Here is my thought process:",
        "Here is my thought process: Hm.\n\nHere is my response: Hi.",
        False,
        "Hi.",
        "Hm.",
    ),
    (
        "Here is my thought process:",
        "Hm. Here is my thought process: x",
        False,
        "Hm. Here is my thought process: x",
        "",
    ),
    (
        "<|inner_prefix|><|tools_prefix|>",
        '<|inner_prefix|>Hm.<|tools_prefix|>[{"now": {}}]<|tools_suffix|>',
        True,
        "",
        "Hm.",
    ),
    (
        "<|START_THINKING|>",
        "<|START_THINKING|>Hm.<|END_THINKING|><|START_RESPONSE|>Hi.<|END_RESPONSE|>",
        False,
        "Hi.",
        "Hm.",
    ),
]


def parser(
    template: str, asked: inference_pb2.Chat, prompt: bytes = b"", *, is_bound: bool = False
) -> ChatParser:
    return ChatParser(asked, tokenizer_of(template), prompt, is_bound=is_bound)


@functools.cache
def tokenizer_of(template: str) -> Tokenizer:
    """Returns the byte tokenizer with a chat template, which parsers only read."""
    return byte_tokenizer(chat_template=template)


def read(reader: ChatParser, pieces: list[str], *, is_cut: bool = False) -> Read:
    parts = [*(reader.push(piece) for piece in pieces), reader.finish(is_cut=is_cut)]
    calls = [(call.name, json.loads(call.arguments)) for part in parts for call in part.calls]
    return "".join(part.text for part in parts), "".join(part.reasoning for part in parts), calls


@pytest.mark.parametrize(("name", "text", "expected"), CALLS)
def test_calls_of_each_family_however_the_text_is_cut(name: str, text: str, expected: Read) -> None:
    assert CALL_FORMATS[call_format(SIGNS[name])] is CALL_FORMATS[name]
    for pieces in ([text], list(text), *([text[:cut], text[cut:]] for cut in range(len(text)))):
        assert read(parser(SIGNS[name], chat()), pieces) == expected


@pytest.mark.parametrize(("template", "answer", "may_call", "text", "reasoning"), REASONED)
def test_reasoning_is_split_from_the_answer(
    template: str, answer: str, may_call: bool, text: str, reasoning: str
) -> None:
    asked = chat() if may_call else inference_pb2.Chat()
    for pieces in (
        [answer],
        list(answer),
        *([answer[:cut], answer[cut:]] for cut in range(len(answer))),
    ):
        found = read(parser(template, asked), pieces)
        assert found[:2] == (text, reasoning)
        assert bool(found[2]) is may_call


@pytest.mark.parametrize("name", ["hermes", "qwen3_coder", "llama3_json"])
@pytest.mark.parametrize("thought", ["", "<think>Hm.</think>"])
def test_a_tag_of_reasoning_in_an_argument_is_text(name: str, thought: str) -> None:
    given = json.dumps({"city": "a <think>b</think> <think> c"})
    answer = thought + (llama if name == "llama3_json" else hermes)("weather", given)
    for pieces in ([answer], list(answer)):
        found = read(parser(THINK + SIGNS[name], chat()), pieces)
        assert found == ("", "Hm." if thought else "", [("weather", json.loads(given))])


@pytest.mark.parametrize("end", ["</think>\n\n", "\n\n", ""])
def test_a_call_of_qwen_coder_ends_the_reasoning(end: str) -> None:
    thought = "<think>Use <tool_call>, or <function=x>."
    for answer, may_call in ((f"{thought}{end}{CODER}", True), (f"{thought}{end}{CODER}", False)):
        asked = chat() if may_call else inference_pb2.Chat()
        for pieces in ([answer], list(answer)):
            text, reasoning, calls = read(parser(THINK + SIGNS["qwen3_coder"], asked), pieces)
            if may_call:
                assert (text, reasoning) == ("", "Use <tool_call>, or <function=x>.")
                assert [name for name, _ in calls] == ["weather"]
            else:
                assert (calls, CODER in text + reasoning) == ([], True)
    hermes_too = read(parser(THINK + SIGNS["hermes"], chat()), [f"{thought}{CODER}"])
    assert hermes_too == ("", thought.removeprefix("<think>") + CODER, [])


ENDING: dict[str, tuple[str, str]] = {
    "glm45": (THINK, GLM),
    "kimi_k2": (THINK, KIMI),
    "gemma4": ("<|channel>thought", '<|tool_call>call:weather{city:<|"|>Köln<|"|>}<tool_call|>'),
    "deepseek_v3": (THINK, DEEPSEEK_V3),
    "deepseek_v31": (THINK, DEEPSEEK_V31),
    "deepseek_v32": (THINK, DEEPSEEK_V32),
    "minimax_m2": (THINK, MINIMAX),
    "seed_oss": (
        "<seed:think>",
        f"<seed:tool_call>\n{BARE.removesuffix('</tool_call>')}</seed:tool_call>",
    ),
    "longcat": ("<longcat_think>", LONGCAT),
    "hy_v3": ("<think:opensource>", hy(":opensource", "<tool_sep>")),
    "hy_v4": ("<think:opensource>", hy(":opensource", "")),
    "qwen3_coder": (THINK, CODER),
    "apertus": ("<|inner_prefix|>", '<|tools_prefix|>[{"weather": {}}]<|tools_suffix|>'),
}
"""By format whose calls end the reasoning: the opening of the reasoning and a call."""


def test_formats_whose_calls_end_the_reasoning() -> None:
    assert ENDING.keys() == {name for name, form in CALL_FORMATS.items() if form.ends_reasoning}


@pytest.mark.parametrize("name", ENDING)
@pytest.mark.parametrize("between", ["", "\n\n"])
def test_a_call_before_the_end_of_the_reasoning_is_a_call(name: str, between: str) -> None:
    opening, call = ENDING[name]
    template = opening + SIGNS[name]
    expected = read(parser(template, chat()), [call])
    assert expected[:2] == ("", "")
    assert [called for called, _ in expected[2]][:1] == ["weather"]
    answer = f"{opening}Hm.{between}{call}"
    for pieces in ([answer], list(answer)):
        assert read(parser(template, chat()), pieces) == ("", "Hm.", expected[2])
        plain = read(parser(template, inference_pb2.Chat()), pieces)
        assert plain == ("", answer.removeprefix(opening), [])


def test_a_word_between_the_tags_of_a_call_is_a_part_of_the_reasoning() -> None:
    thought = "Use <tool_call>now</tool_call>."
    found = read(parser(THINK + SIGNS["glm45"], chat()), [f"{THINK}{thought}</think>Hi."])
    assert found == ("Hi.", thought, [])


def test_a_call_that_is_cut_after_its_header_is_text() -> None:
    for pieces in ([COMMENTARY], list(COMMENTARY)):
        cut, whole = (
            read(parser(SIGNS["openai"], chat()), pieces, is_cut=is_cut) for is_cut in (True, False)
        )
        assert cut == (COMMENTARY, "", [])
        assert whole == ("", "", [("weather", {})])
    answer = f"{COMMENTARY}{CITY}"
    assert read(parser(SIGNS["openai"], chat()), [answer], is_cut=True) == ("", "", ONE)


OPENINGS = (
    THINK,
    "[THINK]",
    "<|channel>thought",
    "<|START_THINKING|>",
    "<longcat_think>",
    "<think:opensource>",
    "<seed:think>",
    "<|inner_prefix|>",
)
TEMPLATES = [f"{reasoning}{sign}" for sign in SIGNS.values() for reasoning in ("", *OPENINGS)]
MARKUP = [
    *(
        "<|START_THINKING|>",
        "<|END_THINKING|>",
        "<|START_RESPONSE|>",
        "<|START_ACTION|>",
        "<|END_ACTION|>",
    ),
    *(
        "<function=f>",
        "</function>",
        "<parameter=x>",
        "</parameter>",
        "f<arg_key>x</arg_key><arg_value>",
        "</arg_value>",
        "<TOOLCALL>",
        "</TOOLCALL>",
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁call▁begin｜>f<｜tool▁sep｜>",
        "<｜tool▁call▁end｜>",
        "<｜tool▁calls▁end｜>",
        "<|tool_calls_section_begin|>",
        "<|tool_call_begin|>f:0<|tool_call_argument_begin|>",
        "<|tool_call_end|>",
        "<|tool_calls_section_end|>",
        *("<minimax:tool_call>", "</minimax:tool_call>", '<invoke name="f">', "</invoke>"),
        *('<parameter name="x">', "<seed:tool_call>", "</seed:tool_call>", "<tool_calls>"),
        *("</tool_calls>", "<function_calls>", "</function_calls>", "f(x=3)"),
        *("<tool_sep>", "<longcat_tool_call>", "</longcat_tool_call>", "</longcat_arg_value>"),
        "f<longcat_arg_key>x</longcat_arg_key><longcat_arg_value>",
        *("<|action_start|>", "<|plugin|>", "<|action_end|>", " to=f"),
        *("<|tools_prefix|>", "<|tools_suffix|>", '{"f": {"x": 9}}'),
        '{"tool_name": "f", "parameters": {"x": 8}}',
    ),
    *("<think>", "</think>", "[THINK]", "[/THINK]", "<|channel>thought", "<channel|>", "<thi"),
    *("<seed:think>", "</seed:think>", "<|inner_prefix|>", "<|inner_suffix|>"),
    *("<longcat_think>", "</longcat_think>", "<think:opensource>", "</think:opensource>"),
    *(
        "<|channel|>",
        "analysis",
        "final",
        "commentary",
        " to=functions.f",
        "json",
        "<|message|>",
        "<|end|>",
        "<|call|>",
    ),
    *(
        "<|start|>",
        "assistant",
        "<tool_call>",
        "</tool_call>",
        "[TOOL_CALLS]",
        "[ARGS]",
        "<|tool_call|>",
        "<|tool_call>",
    ),
    *("<|tool_call_start|>", "<|tool_call_end|>", "[f(x=7)]"),
    *(
        "<tool_call|>",
        "<|/tool_call|>",
        "functools",
        "<start_function_call>",
        "<end_function_call>",
        "call:f",
        "<|",
    ),
    *(
        '{"name": "f", "arguments": {"x": 1}}',
        '{"name": "f", "parameters": {"x": 2}}',
        '{"x": 3}',
        "{x:4}",
        "f",
        "[",
        "]",
    ),
    *("{", "}", '"', "\\", "; ", ", ", " ", "\n", "5", "6", "7", "ö"),
]


@given(st.sampled_from(TEMPLATES), st.lists(st.sampled_from(MARKUP), max_size=24), st.data())
def test_nothing_depends_on_the_pieces_and_nothing_is_lost(
    template: str, parts: list[str], data: st.DataObject
) -> None:
    whole = "".join(parts)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)))))
    expected = read(parser(template, chat()), [whole])
    pieces = [whole[start:end] for start, end in zip([0, *cuts], [*cuts, len(whole)], strict=True)]
    assert read(parser(template, chat()), pieces) == expected
    assert read(parser(template, chat()), list(whole)) == expected
    text, reasoning, calls = expected
    found = text + reasoning + "".join(name + json.dumps(arguments) for name, arguments in calls)
    assert sorted(filter(str.isdigit, found)) == sorted(
        filter(str.isdigit, whole)
    )  # no markup has digits
    if not calls and not any(
        opening in whole for opening in (*OPENINGS, "<|START_RESPONSE|>", "<|message|>")
    ):
        assert (text, reasoning) == (whole, "")


@pytest.mark.parametrize("spoken", ["final", "commentary"])
def test_without_a_format_of_reasoning_it_is_text_and_markup_is_not(spoken: str) -> None:
    answer = (
        "<|channel|>analysis<|message|>Hm.<|end|>"
        f"<|start|>assistant<|channel|>{spoken}<|message|>Hi.<|end|>"
    )
    tokenizer = byte_tokenizer(chat_template=SIGNS["openai"])
    tokenizer.reasoning_format = reasoning_format(SIGNS["openai"], "none")
    for end, calls in (("", []), (f"{COMMENTARY}{CITY}<|call|>", ONE)):
        for pieces in ([answer + end], list(answer + end)):
            assert read(ChatParser(chat(), tokenizer, b"", is_bound=False), pieces) == (
                "Hm.Hi.",
                "",
                calls,
            )


def test_a_call_of_many_closing_tags_is_not_parsed_anew_at_each(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    parsed: list[str] = []

    def note(text: str) -> bool:
        parsed.append(text)
        return ends_in_string(text)

    ends_in_string = tool_parser._ends_in_string
    monkeypatch.setattr(tool_parser, "_ends_in_string", note)
    arguments = {f"a{i}": "</tool_call>" for i in range(2_000)}
    answer = hermes("weather", json.dumps(arguments))
    assert read(parser(SIGNS["hermes"], chat()), list(answer)) == ("", "", [("weather", arguments)])
    assert sum(map(len, parsed)) < 10 * len(answer)


def test_a_call_of_gemma_that_is_nested_too_deeply_is_text() -> None:
    for text in ("{a:" * 5_000, "{a:[" * 200 + "1" + "]}" * 200):
        answer = f"<|tool_call>call:now{text}<tool_call|>"
        assert read(parser(SIGNS["gemma4"], chat()), [answer]) == (answer, "", [])


def test_much_white_space_takes_no_long_time() -> None:
    """A pattern with unbounded white space would take hours."""
    spaces = " " * 5_000
    for answer in (
        spaces,
        f"<|channel|>commentary{spaces}to",
        f"<|start|>assistant{spaces}<|channel|>{spaces}",
    ):
        assert read(parser(SIGNS["openai"], chat()), list(answer)) == (answer, "", [])
    spaces *= 20
    for name, answer in (
        ("glm45", f"<tool_call>now<arg_key>{spaces}x</arg_value></tool_call>"),
        ("glm45", f"<tool_call>now{spaces}x</tool_call>"),
        (
            "deepseek_v31",
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{}"
            f"{spaces}x<｜tool▁calls▁end｜>",
        ),
    ):
        assert read(parser(SIGNS[name], chat()), [answer]) == (answer, "", [])


def test_arguments_between_tags_are_of_the_types_of_their_schemas() -> None:
    kinds = ("integer", "array", "string", ["string", "null"], ["integer", "null"], "boolean")
    schemas: dict[str, Any] = {f"a{i}": {"type": kind} for i, kind in enumerate(kinds)}
    schemas["any"] = {"anyOf": [{"type": "integer"}, {"type": "null"}]}
    tools = [
        inference_pb2.Tool(
            name="f", parameters=json.dumps({"type": "object", "properties": schemas})
        ),
        inference_pb2.Tool(name="g", parameters=json.dumps({"properties": 5})),
    ]
    given = {
        "a0": "3",
        "a1": '[1, "x"]',
        "a2": "3",
        "a3": "3",
        "a4": "null",
        "a5": "maybe",
        "any": "7",
        "other": "1",
    }
    expected = {
        "a0": 3,
        "a1": [1, "x"],
        "a2": "3",
        "a3": "3",
        "a4": None,
        "a5": "maybe",
        "any": 7,
        "other": "1",
    }
    parameters = "".join(f"<parameter={name}>{text}</parameter>" for name, text in given.items())
    answer = "".join(
        f"<tool_call><function={name}>{parameters}</function></tool_call>" for name in "fgh"
    )
    calls = [("f", expected), ("g", given), ("h", given)]
    assert read(parser(SIGNS["qwen3_coder"], chat(tools=tools)), [answer]) == ("", "", calls)


INTEGER, STRING = {"type": "integer"}, {"type": "string"}


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        ({"$ref": "#/$defs/count"}, 3),
        ({"$ref": "#/$defs/name"}, "3"),
        ({"$ref": "#/$defs/missing"}, "3"),
        ({"$ref": "#/$defs/loop"}, "3"),
        ({"anyOf": [{"$ref": "#/$defs/count"}, {"type": "null"}]}, 3),
        ({"anyOf": [{"$ref": "#/$defs/name"}, {"type": "null"}]}, "3"),
        ({"oneOf": [INTEGER, {"type": "null"}]}, 3),
        ({"oneOf": [INTEGER, STRING]}, "3"),
        ({"allOf": [{"$ref": "#/$defs/count"}], "description": "how many"}, 3),
        ({"allOf": [STRING, {}]}, "3"),
        ({"allOf": [{}, INTEGER]}, 3),
        ({"enum": [1, 3]}, 3),
        ({"enum": [1, "3"]}, "3"),
        ({"const": 3}, 3),
        ({"const": "3"}, "3"),
        ({"description": "anything"}, "3"),
    ],
)
def test_schemas_without_a_type_of_their_own(schema: dict[str, Any], expected: object) -> None:
    definitions = {
        "count": INTEGER,
        "name": STRING,
        "loop": {"anyOf": [{"$ref": "#/$defs/loop"}] * 2},
    }
    parameters = {"properties": {"a": schema}, "$defs": definitions}
    assert coder_argument(parameters) == expected


NULLABLE = {"anyOf": [STRING, {"type": "null"}]}


@pytest.mark.parametrize("text", ["null", "None", "\nnull\n"])
@pytest.mark.parametrize(
    ("schema", "is_null"),
    [
        (NULLABLE, True),
        ({"oneOf": NULLABLE["anyOf"]}, True),
        ({"allOf": [NULLABLE]}, True),
        ({"type": ["string", "null"]}, True),
        ({"type": "string", "nullable": True}, True),
        ({"enum": ["a", None]}, True),
        ({"anyOf": [STRING, {"const": None}]}, True),
        ({"$ref": "#/$defs/optional"}, True),
        ({"anyOf": [{"$ref": "#/$defs/loop"}, {"$ref": "#/$defs/optional"}]}, True),
        ({"$ref": "#/$defs/loop"}, False),
        ({"type": "string", "nullable": False}, False),
        ({"enum": ["a", "b"]}, False),
        (STRING, False),
        ({}, False),
    ],
)
def test_a_null_is_no_text_if_the_schema_names_null(
    schema: dict[str, Any], is_null: bool, text: str
) -> None:
    definitions = {"optional": NULLABLE, "loop": {"anyOf": [{"$ref": "#/$defs/loop"}, STRING]}}
    parameters = {"properties": {"a": schema}, "$defs": definitions}
    assert coder_argument(parameters, text) == (None if is_null else text.strip())
    assert coder_argument(parameters, "no") == "no"


def test_references_of_whole_schemas() -> None:
    arguments = {"properties": {"a": INTEGER}}
    assert coder_argument({"$ref": "#/$defs/arguments", "$defs": {"arguments": arguments}}) == 3
    assert coder_argument({"$ref": "#/$defs/missing"}) == "3"


def test_a_schema_with_many_references_is_read_once() -> None:
    """Without a memory of the schemas read, this one would take 9 ** 9 steps."""
    steps = {f"s{i}": {"allOf": [{"$ref": f"#/$defs/s{i + 1}"}] * 9} for i in range(9)}
    parameters = {"properties": {"a": {"$ref": "#/$defs/s0"}}, "$defs": {**steps, "s9": INTEGER}}
    assert coder_argument(parameters) == 3


@pytest.mark.parametrize(
    ("text", "schema", "expected"),
    [
        ("True", {"type": "boolean"}, True),
        ("\nFalse\n", {"type": "boolean"}, False),
        ("None", {"type": ["integer", "null"]}, None),
        ("{'a': [1, True], 'b': null}", {"type": "object"}, {"a": [1, True], "b": None}),
        ("True", {"type": "string"}, "True"),
        ("exit()", {"type": "boolean"}, "exit()"),
        ("[" * 2000, {"type": "array"}, "[" * 2000),
    ],
)
def test_arguments_in_the_form_of_python(
    text: str, schema: dict[str, Any], expected: object
) -> None:
    assert coder_argument({"properties": {"a": schema}}, text) == expected


def test_arguments_of_glm_are_of_the_types_of_their_schemas() -> None:
    properties = {"city": STRING, "days": INTEGER}
    tool = inference_pb2.Tool(name="weather", parameters=json.dumps({"properties": properties}))
    asked = chat(tools=[tool])
    calls = [("weather", {"city": "7", "days": 3})]
    answer = GLM.replace("Köln", "7")
    assert read(parser(SIGNS["glm45"], asked), list(answer)) == ("", "", calls)


def coder_argument(parameters: dict[str, Any], text: str = "3") -> object:
    """Returns the argument that the parser of Qwen3-Coder reads from a text."""
    tool = inference_pb2.Tool(name="f", parameters=json.dumps(parameters))
    answer = f"<tool_call><function=f><parameter=a>{text}</parameter></function></tool_call>"
    outside, _, calls = read(parser(SIGNS["qwen3_coder"], chat(tools=[tool])), [answer])
    assert not outside
    ((_, arguments),) = calls
    return arguments["a"]


def test_a_template_that_opens_the_reasoning_itself() -> None:
    for prompt, text, reasoning in (
        (b"user: x\n<think>\n", "Hi.", "Hm."),
        (b"<think>\n\n</think>\n\n", "Hm.\n</think>\n\nHi.", ""),
    ):
        assert read(parser(THINK, inference_pb2.Chat(), prompt), list("Hm.\n</think>\n\nHi.")) == (
            text,
            reasoning,
            [],
        )
    named = byte_tokenizer(chat_template="x")
    named.reasoning_format = "deepseek_r1"
    assert read(
        ChatParser(inference_pb2.Chat(), named, b"", is_bound=False), ["Hm.</think>Hi."]
    ) == ("Hi.", "Hm.", [])


def test_an_answer_that_a_grammar_determines_has_no_reasoning() -> None:
    bound = parser(THINK, inference_pb2.Chat(), b"<think>\n", is_bound=True)
    assert bound.is_idle
    assert parser("x", inference_pb2.Chat()).is_idle
    assert not parser("x", chat()).is_idle


def test_names_that_the_configuration_takes() -> None:
    assert {*get_args(ToolCallParserName)} == {"auto", *CALL_FORMATS}
    assert {*get_args(ReasoningParserName)} == {"auto", "none", *REASONING_FORMATS}
    assert {name: call_format("x", name) for name in CALL_FORMATS} == {
        name: name for name in CALL_FORMATS
    }
    assert (
        reasoning_format(THINK),
        reasoning_format(THINK, "none"),
        reasoning_format("x", "qwen3"),
    ) == (
        "qwen3",
        "",
        "qwen3",
    )


@pytest.mark.parametrize("name", [name for name, form in CALL_FORMATS.items() if form.grammar])
def test_texts_of_each_grammar_parse_as_calls(name: str) -> None:
    modes = inference_pb2.ToolChoice
    tokenizer = byte_tokenizer(chat_template=SIGNS[name])
    for asked in (chat(modes.MODE_REQUIRED), chat(modes.MODE_NAMED, "weather")):
        grammar = call_grammar(asked, tokenizer)
        assert accepts(grammar, written(name))
        assert not accepts(grammar, written(name).replace("city", "town"))
        assert not accepts(grammar, f"Hm. {written(name)}")
        assert read(parser(SIGNS[name], asked, is_bound=True), [written(name)]) == ("", "", ONE)


@pytest.mark.parametrize(
    "name",
    [
        "deepseek_v3",
        "deepseek_v31",
        "deepseek_v32",
        "kimi_k2",
        "nemotron_json",
        "seed_oss",
        "apertus",
    ],
)
def test_markup_of_a_grammar_may_be_special_tokens(name: str) -> None:
    from llguidance.hf import from_tokenizer

    fast = make_tokenizer()
    fast.add_special_tokens({"additional_special_tokens": sorted(CALL_FORMATS[name].markup)})
    fast.chat_template = SIGNS[name]
    grammar = call_grammar(chat(inference_pb2.ToolChoice.MODE_REQUIRED), Tokenizer(fast))
    matcher = LLMatcher(from_tokenizer(fast), grammar)
    ids = fast(written(name))["input_ids"]
    assert all(fast.convert_tokens_to_ids(text) in ids for text in CALL_FORMATS[name].markup)
    assert (matcher.try_consume_tokens(ids), matcher.is_accepting()) == (len(ids), True)


AGE = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}
ANSWERS: list[tuple[str, dict[str, Any], str, str]] = [
    *(
        (name, {"json_schema": json.dumps(AGE)}, '{"age": 36}', '{"age": "x"}')
        for name, form in CALL_FORMATS.items()
        if form.grammar
    ),
    ("hermes", {"json_schema": '{"type": "array"}'}, "[1]", "{}"),
    ("hermes", {"json_object": True}, '{"x": "<tool_call>"}', "1"),
    ("hermes", {"regex": "[0-9]+"}, "42", "x"),
    ("hermes", {"choice": {"texts": ["yes", "no"]}}, "no", "x"),
    ("hermes", {"grammar": "start: call+\ncall: /[ab]/"}, "abab", "x"),
]


@pytest.mark.parametrize(("name", "fields", "answer", "other"), ANSWERS)
async def test_a_call_or_a_bound_answer(
    name: str, fields: dict[str, Any], answer: str, other: str
) -> None:
    model = ServedModel(
        name="tiny", tokenizer=byte_tokenizer(chat_template=SIGNS[name]), context_tokens=512
    )
    asked = chat(messages=[{"role": "user", "content": "x"}])
    request = inference_pb2.GenerateRequest(prompt={"chat": asked}, constraint=fields)
    prepared = await prepare(request, model, RequestContext(arrived=0))
    grammar = prepared.tokens.submit.grammar
    assert accepts(grammar, answer)
    assert accepts(grammar, written(name))
    for text in (other, written(name).replace("city", "town"), f"{answer}{written(name)}"):
        assert not accepts(grammar, text)
    for text, expected in ((answer, (answer, "", [])), (written(name), ("", "", ONE))):
        for pieces in ([text], list(text)):
            assert read(parser(SIGNS[name], asked, is_bound=True), pieces) == expected


def written(name: str) -> str:
    """Returns a call in a format."""
    listed = f'[{{"name": "weather", "arguments": {CITY}}}]'
    return {
        "pythonic": listed,
        "seed_oss": f"<seed:tool_call>{listed}</seed:tool_call>",
        "minimax_m2": f"<minimax:tool_call>{listed}</minimax:tool_call>",
        "longcat": f"<longcat_tool_call>{listed}</longcat_tool_call>",
        **dict.fromkeys(("hy_v3", "hy_v4"), f"<tool_calls>{listed}"),
        "deepseek_v32": f"<｜DSML｜function_calls>{listed}</｜DSML｜function_calls>",
        "olmo3": f"<function_calls>{listed}</function_calls>",
        "apertus": f'<|tools_prefix|>[{{"weather": {CITY}}}]<|tools_suffix|>',
        **dict.fromkeys(("jamba", "hunyuan_a13b", "minimax"), f"<tool_calls>{listed}</tool_calls>"),
        "glm45": hermes("weather", CITY),
        "qwen3_coder": hermes("weather", CITY),
        "nemotron_json": f"<TOOLCALL>{listed}</TOOLCALL>",
        "deepseek_v3": DEEPSEEK_V3,
        "deepseek_v31": DEEPSEEK_V31,
        "kimi_k2": KIMI,
        "hermes": hermes("weather", CITY),
        "openai": f"<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{CITY}",
        "mistral_v11": f"[TOOL_CALLS]weather[ARGS]{CITY}",
        "mistral": f"[TOOL_CALLS]{listed}",
        "phi4_mini_json": f"<|tool_call|>{listed}<|/tool_call|>",
        "granite": f"<|tool_call|>{listed}",
        "cohere_command3": (
            f'<|START_ACTION|>[{{"tool_name": "weather", "parameters": {CITY}}}]<|END_ACTION|>'
        ),
        "lfm2": f"<|tool_call_start|>{listed}<|tool_call_end|>",
        "internlm": (
            f'<|action_start|><|plugin|>\n{{"name": "weather", "parameters": {CITY}}}<|action_end|>'
        ),
        "llama3_json": llama("weather", CITY),
    }[name]


def test_a_format_without_a_grammar_refuses_to_demand_a_call() -> None:
    with pytest.raises(InvalidArgument, match="cannot be demanded") as caught:
        tool_call_constraint(
            chat(inference_pb2.ToolChoice.MODE_REQUIRED), byte_tokenizer(SIGNS["functiongemma"])
        )
    assert caught.value.field == "prompt.chat.tool_choice"


async def test_a_format_without_a_grammar_refuses_a_bound_answer_beside_tools() -> None:
    model = ServedModel(
        name="tiny", tokenizer=byte_tokenizer(SIGNS["functiongemma"]), context_tokens=512
    )
    asked = chat(messages=[{"role": "user", "content": "x"}])
    request = inference_pb2.GenerateRequest(
        prompt={"chat": asked}, constraint={"json_object": True}
    )
    with pytest.raises(InvalidArgument, match="not allowed together with tools") as caught:
        await prepare(request, model, RequestContext(arrived=0))
    assert caught.value.field == "constraint"
    request.prompt.chat.tool_choice.mode = inference_pb2.ToolChoice.MODE_NONE
    prepared = await prepare(request, model, RequestContext(arrived=0))
    assert accepts(prepared.tokens.submit.grammar, "{}")


async def test_markup_that_is_special_tokens_reaches_the_parser_alone() -> None:
    fast = make_tokenizer()
    fast.add_special_tokens(
        {"additional_special_tokens": ["<|channel|>", "<|message|>", "<|end|>", "<|start|>"]}
    )
    fast.chat_template = SIGNS["openai"]
    tokenizer = Tokenizer(fast)
    answer = (
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Hi."
    )
    ids = await tokenizer.encode(answer, add_special_tokens=False)
    reader = ChatParser(inference_pb2.Chat(), tokenizer, [], is_bound=False)
    text = CompletionText(tokenizer, [], StopRules(), shown_ids=reader.shown_ids)
    pieces = [text.push([token])[0] for token in ids] + [text.finish()[0]]
    assert "".join(pieces) == answer
    assert read(reader, pieces) == ("Hi.", "Hm.", [])
    plain = CompletionText(tokenizer, [], StopRules())
    assert plain.push(ids)[0] + plain.finish()[0] == "analysisHm.assistantfinalHi."
