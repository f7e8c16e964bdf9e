"""Lists the bounds of requests, and values one past each, for a model with 64 tokens of context."""

import math
from typing import Any, Final

from tandem.proto import inference_pb2, limits
from tandem.proto.parameters import parameters_of

VOCAB: Final = 258
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}]}
TOOL_CHAT = CHAT | {
    "tools": [{"name": "f"}],
    "tool_choice": {"mode": inference_pb2.ToolChoice.MODE_REQUIRED},
}

REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"sampling": {"temperature": math.nan}}, "sampling.temperature", "0 to 2"),
    ({"sampling": {"temperature": math.inf}}, "sampling.temperature", "0 to 2"),
    ({"sampling": {"temperature": -0.1}}, "sampling.temperature", "0 to 2"),
    ({"sampling": {"temperature": 2.1}}, "sampling.temperature", "0 to 2"),
    ({"sampling": {"top_k": -2}}, "sampling.top_k", "-1 to 1000000"),
    ({"sampling": {"top_k": 1_000_001}}, "sampling.top_k", "-1 to 1000000"),
    ({"sampling": {"top_p": 0.0}}, "sampling.top_p", "greater than 0"),
    ({"sampling": {"top_p": 1.1}}, "sampling.top_p", "at most 1"),
    ({"sampling": {"top_p": math.nan}}, "sampling.top_p", "at most 1"),
    ({"sampling": {"min_p": -0.1}}, "sampling.min_p", "0 to 1"),
    ({"sampling": {"min_p": 1.1}}, "sampling.min_p", "0 to 1"),
    ({"sampling": {"min_p": math.nan}}, "sampling.min_p", "0 to 1"),
    ({"stopping": {"max_tokens": -1}}, "stopping.max_tokens", "1 to 1048576"),
    ({"stopping": {"max_tokens": 0}}, "stopping.max_tokens", "1 to 1048576"),
    ({"stopping": {"max_tokens": 1_048_577}}, "stopping.max_tokens", "1 to 1048576"),
    (
        {"stopping": {"max_tokens": 0, "min_tokens": 0}, "echo": False},
        "stopping.max_tokens",
        "1 to 1048576",
    ),
    ({"stopping": {"max_tokens": -1}, "echo": True}, "stopping.max_tokens", "0 to 1048576"),
    ({"stopping": {"min_tokens": -1}}, "stopping.min_tokens", "0 to 1048576"),
    (
        {"stopping": {"min_tokens": 5, "max_tokens": 4}},
        "stopping.min_tokens",
        "max_tokens, which is 4",
    ),
    ({"stopping": {"min_tokens": 63}}, "stopping.min_tokens", "max_tokens, which is 16"),
    ({"sampling": {"typical_p": 0.0}}, "sampling.typical_p", "greater than 0"),
    ({"sampling": {"typical_p": 1.1}}, "sampling.typical_p", "at most 1"),
    ({"sampling": {"typical_p": math.nan}}, "sampling.typical_p", "at most 1"),
    ({"sampling": {"repetition_penalty": 0.0}}, "sampling.repetition_penalty", "0.01 to 10"),
    ({"sampling": {"repetition_penalty": 0.0099}}, "sampling.repetition_penalty", "0.01 to 10"),
    ({"sampling": {"repetition_penalty": 10.1}}, "sampling.repetition_penalty", "0.01 to 10"),
    ({"sampling": {"repetition_penalty": math.inf}}, "sampling.repetition_penalty", "0.01 to 10"),
    ({"sampling": {"presence_penalty": 2.1}}, "sampling.presence_penalty", "-2 to 2"),
    ({"sampling": {"presence_penalty": math.nan}}, "sampling.presence_penalty", "-2 to 2"),
    ({"sampling": {"frequency_penalty": -2.1}}, "sampling.frequency_penalty", "-2 to 2"),
    ({"sampling": {"frequency_penalty": -math.inf}}, "sampling.frequency_penalty", "-2 to 2"),
    ({"sampling": {"logit_bias": {1: 100.1}}}, "sampling.logit_bias[1]", "-100 to 100"),
    ({"sampling": {"logit_bias": {7: math.nan}}}, "sampling.logit_bias[7]", "-100 to 100"),
    ({"sampling": {"logit_bias": {VOCAB: 1.0}}}, "sampling.logit_bias", "258 tokens"),
    (
        {"sampling": {"logit_bias": dict.fromkeys(range(1_025), 1.0)}},
        "sampling.logit_bias",
        "maximum is 1024",
    ),
    ({"sampling": {"bad_words": ["x"] * 129}}, "sampling.bad_words", "maximum is 128"),
    ({"sampling": {"bad_words": ["x", "y", "z", ""]}}, "sampling.bad_words[3]", "1 to 256"),
    ({"sampling": {"bad_words": ["x" * 257]}}, "sampling.bad_words[0]", "1 to 256"),
    ({"sampling": {"bad_words": ["x", "y" * 64]}}, "sampling.bad_words[1]", "maximum is 64"),
    ({"n": 33}, "n", "0 to 32"),
    ({"best_of": 33}, "best_of", "0 to 32"),
    ({"n": 3, "best_of": 2}, "best_of", "n, which is 3"),
    ({"logprobs": 21}, "logprobs", "0 to 20"),
    ({"prompt_logprobs": 21}, "prompt_logprobs", "0 to 20"),
    ({"priority": 101}, "priority", "-100 to 100"),
    ({"priority": -101}, "priority", "-100 to 100"),
    ({"echo": True, "prompt": {"chat": CHAT}}, "echo", "chat"),
    (
        {"echo": True, "prompt": {"text": "a", "suffix": "b"}, "logprobs": 0},
        "logprobs",
        "leave out echo",
    ),
    ({"beam_search": {}}, "beam_search.width", "1 to 16"),
    ({"beam_search": {"width": 17}}, "beam_search.width", "1 to 16"),
    ({"beam_search": {"width": 3}, "n": 4}, "n", "beam_search.width, which is 3"),
    (
        {"beam_search": {"width": 3, "length_penalty": 10.1}},
        "beam_search.length_penalty",
        "-10 to 10",
    ),
    (
        {"beam_search": {"width": 3, "length_penalty": math.nan}},
        "beam_search.length_penalty",
        "-10 to 10",
    ),
    ({"beam_search": {"width": 3}, "sampling": {"seed": 0}}, "sampling.seed", "beam_search"),
    (
        {"beam_search": {"width": 3}, "sampling": {"temperature": 1.0}},
        "sampling.temperature",
        "beam_search",
    ),
    ({"beam_search": {"width": 3}, "best_of": 3}, "best_of", "beam_search"),
    ({"beam_search": {"width": 3}, "logprobs": 0}, "logprobs", "beam_search"),
    ({"beam_search": {"width": 3}, "constraint": {"regex": "a"}}, "constraint", "beam_search"),
    (
        {"constraint": {"regex": "a"}, "stopping": {"min_tokens": 1}},
        "stopping.min_tokens",
        "constraint",
    ),
    (
        {"constraint": {"regex": "a"}, "stopping": {"ignore_eos": True}},
        "stopping.ignore_eos",
        "constraint",
    ),
    ({"constraint": {"regex": "a("}}, "constraint.regex", "unclosed group"),
    ({"constraint": {"regex": "a"}, "prompt": {"chat": TOOL_CHAT}}, "constraint", "tool_choice"),
    ({"beam_search": {"width": 3}, "prompt": {"chat": TOOL_CHAT}}, "beam_search", "tool_choice"),
    (
        {"stopping": {"min_tokens": 1}, "prompt": {"chat": TOOL_CHAT}},
        "stopping.min_tokens",
        "constraint",
    ),
    ({"stopping": {"stop": ["x"] * 17}}, "stopping.stop", "maximum is 16"),
    ({"stopping": {"stop_regex": "x" * 1_025}}, "stopping.stop_regex", "1 to 1024"),
    ({"stopping": {"stop_regex": "a*"}}, "stopping.stop_regex", "matches the empty text"),
    ({"stopping": {"max_time_ms": 3_600_001}}, "stopping.max_time_ms", "0 to 3600000"),
    (
        {"stopping": {"max_time_ms": 5}, "beam_search": {"width": 2}},
        "stopping.max_time_ms",
        "not allowed with beam_search",
    ),
    (
        {"stopping": {"repetition_stop_ngram": 2}},
        "stopping.repetition_stop_count",
        "must be set together",
    ),
    (
        {"stopping": {"repetition_stop_ngram": 2, "repetition_stop_count": 1}},
        "stopping.repetition_stop_count",
        "at least 2",
    ),
    ({"truncation": "oldest"}, "truncation", "auto or disabled"),
    ({"prompt_cache_key": "k" * 257}, "prompt_cache_key", "1 to 256"),
    ({"prompt_cache_retention": "2h"}, "prompt_cache_retention", "must be one of"),
    ({"cache_breakpoints": [{}]}, "cache_breakpoints", "only allowed with a chat"),
    ({"truncation": "auto"}, "truncation", "drops turns of a chat"),
    ({"stopping": {"stop": ["x", ""]}}, "stopping.stop[1]", "1 to 1024"),
    ({"stopping": {"stop": ["x" * 1_025]}}, "stopping.stop[0]", "1 to 1024"),
    ({"stopping": {"stop_token_ids": [1] * 65}}, "stopping.stop_token_ids", "maximum is 64"),
    ({"stopping": {"stop_token_ids": [VOCAB]}}, "stopping.stop_token_ids", "258 tokens"),
    ({"prompt": {"token_ids": {"ids": [1, VOCAB]}}}, "prompt.token_ids", "258 tokens"),
    ({"prompt": {"token_ids": {}}}, "prompt", "at least 1"),
    ({"prompt": {"text": ""}}, "prompt", "at least 1"),
    ({"prompt": {}}, "prompt", "must be set"),
    (
        {"prompt": {"text": "x" * (limits.MAX_PROMPT_CHARACTERS + 1)}},
        "prompt.text",
        "maximum is 1000000",
    ),
    ({"prompt": {"chat": {}}}, "prompt.chat.messages", f"1 to {limits.MAX_CHAT_MESSAGES}"),
    (
        {"prompt": {"chat": {"messages": [{"role": "user"}] * (limits.MAX_CHAT_MESSAGES + 1)}}},
        "prompt.chat.messages",
        f"1 to {limits.MAX_CHAT_MESSAGES}",
    ),
    (
        {"prompt": {"chat": {"messages": [{"content": "x"}]}}},
        "prompt.chat.messages[0].role",
        "1 to 64",
    ),
    (
        {"prompt": {"chat": {"messages": [{"role": "r" * 65}]}}},
        "prompt.chat.messages[0].role",
        "1 to 64",
    ),
    (
        {"prompt": {"chat": {"messages": [{"role": "robot", "content": "x"}]}}},
        "prompt.chat",
        "unknown role",
    ),
    (
        {"prompt": {"chat": {"messages": [{"role": "user", "content": "x" * 500_001}] * 2}}},
        "prompt.chat",
        "maximum is 1000000",
    ),
    ({"request_id": "x" * 129}, "request_id", "128"),
    ({"request_id": "a\nb"}, "request_id", "ASCII"),
]
"""Fields of a GenerateRequest, the field that is wrong, and words of the error."""

REFUSED += [
    ({"sampling": {row.leaf: value}}, row.field, "must be")
    for row in parameters_of("sampling")
    if row.kind in ("float", "int32")
    for value in (row.bounds[0] - 1, row.bounds[1] + 1)
]

ALLOWED: list[tuple[dict[str, Any], str]] = [
    ({"sampling": {"temperature": 2.0, "top_k": 1_000_000, "top_p": 1.0, "min_p": 1.0}}, "hi"),
    ({"stopping": {"stop": ["x" * 1_024] * 16, "stop_token_ids": [257] * 64}}, "hi"),
    ({"request_id": "x" * 128}, "hi"),
    ({}, "x" * 63),
    (
        {
            "n": 32,
            "best_of": 32,
            "logprobs": 20,
            "prompt_logprobs": 20,
            "priority": 100,
            "echo": True,
        },
        "hi",
    ),
    ({"priority": -100, "stopping": {"min_tokens": 62, "max_tokens": 62}}, "hi"),
    (
        {
            "sampling": {
                "repetition_penalty": 0.01,
                "presence_penalty": 2.0,
                "frequency_penalty": -2.0,
            }
        },
        "hi",
    ),
    (
        {"sampling": {"repetition_penalty": 10.0, "typical_p": 1.0, "bad_words": ["x" * 63] * 128}},
        "hi",
    ),
    ({"sampling": {"logit_bias": dict.fromkeys(range(VOCAB), 100.0)}}, "hi"),
    ({"beam_search": {"width": 16, "length_penalty": -10.0}, "n": 16}, "hi"),
]
"""Fields of a GenerateRequest, and the prompt's text."""
