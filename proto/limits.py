"""Every bound on what a caller may send, in one table; enforced at the front doors and again at the workers."""

from typing import Final

MAX_MESSAGE_BYTES: Final = 4 * 1024 * 1024
"""One gRPC message or HTTP body. A prompt of the longest context fits many times over."""

MAX_PROMPT_CHARACTERS: Final = 1_000_000
MAX_PROMPTS: Final = 128
"""Prompts in one HTTP body."""

MAX_CHAT_MESSAGES: Final = 1_024
MAX_ROLE_CHARACTERS: Final = 64
MAX_REQUEST_ID_CHARACTERS: Final = 128
MAX_MODEL_NAME_CHARACTERS: Final = 256

MAX_TOKENS: Final = 1_048_576
MAX_TEMPERATURE: Final = 2.0
MAX_TOP_K: Final = 1_000_000
MAX_SEED: Final = 2**64 - 1

MAX_STOP_STRINGS: Final = 16
MAX_STOP_STRING_CHARACTERS: Final = 1_024
MAX_STOP_TOKEN_IDS: Final = 64

MAX_CHOICES: Final = 32
"""Completions of one prompt: `n` and `best_of`."""

MAX_BEAM_WIDTH: Final = 16
MAX_LENGTH_PENALTY: Final = 10.0
"""Either way."""

MAX_LOGPROBS: Final = 20
"""Alternatives of one token that are reported."""

MIN_REPETITION_PENALTY: Final = 0.01
MAX_REPETITION_PENALTY: Final = 10.0
MAX_PENALTY: Final = 2.0
"""Of presence and frequency, either way."""

MAX_LOGIT_BIASES: Final = 1_024
MAX_LOGIT_BIAS: Final = 100.0
"""Either way."""

MAX_BAD_WORDS: Final = 128
MAX_BAD_WORD_CHARACTERS: Final = 256
MAX_BAD_WORD_TOKENS: Final = 64

MAX_GRAMMAR_CHARACTERS: Final = 131_072
"""A JSON schema, a regular expression, a grammar, and all choices together."""

MAX_CONSTRAINT_CHOICES: Final = 1_024

MAX_TOOLS: Final = 128
MAX_TOOL_CALLS: Final = 128
"""In one message."""

MAX_NAME_CHARACTERS: Final = 64
"""Of a tool, a call's id, a speaker."""

MAX_TEMPLATE_KWARGS_CHARACTERS: Final = 4_096
MAX_PRIORITY: Final = 100
"""Either way."""

MAX_CACHE_SALT_BYTES: Final = 64
