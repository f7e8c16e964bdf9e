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

MAX_CACHE_SALT_BYTES: Final = 64
