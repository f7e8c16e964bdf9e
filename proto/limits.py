"""Holds the bounds on what a caller may send that are not those of one request parameter
(parameters.py).
"""

from typing import Final

MAX_MESSAGE_BYTES: Final = 4 * 1024 * 1024
"""Of one gRPC message or HTTP body. A prompt of the longest context fits many times over."""

MAX_MESSAGE_ELEMENTS: Final = 65_536
"""Of one gRPC message, fields; of one HTTP body, strings, lists, objects and members. Parsing so
many takes 50 ms.
"""

MAX_PROMPT_CHARACTERS: Final = 1_000_000
MAX_PROMPTS: Final = 128
"""In one HTTP body."""

MAX_TEXTS: Final = 2_048
"""In one HTTP body of which nothing is generated: texts to embed or to score. As many as OpenAI
takes.
"""

MAX_ANSWER_SEQUENCES: Final = 256
"""Completions of all prompts of one HTTP body together."""

MAX_ANSWER_SIZE: Final = 2**22
"""Of one answer, all completions of all prompts together: a token counts 1, or 8 for its log
probability and for each alternative. So many log probabilities are about 40 MB, as text or as
objects.
"""

LOGPROB_SIZE: Final = 8

MAX_CHAT_MESSAGES: Final = 1_024
MAX_ROLE_CHARACTERS: Final = 64
MAX_REQUEST_ID_CHARACTERS: Final = 128
MAX_TOKENS: Final = 1_048_576
MAX_STOP_TOKEN_IDS: Final = 64

MAX_CHOICES: Final = 32
"""Completions of one prompt: `n` and `best_of`."""

MAX_BEAM_WIDTH: Final = 16
MAX_LOGPROBS: Final = 20
"""Alternatives reported for one token."""

MAX_BAD_WORDS: Final = 128
MAX_BAD_WORD_TOKENS: Final = 64

MAX_GRAMMAR_CHARACTERS: Final = 131_072
"""Of a JSON schema, a regular expression, a grammar, or all texts of a choice together."""

MAX_CONSTRAINT_CHOICES: Final = 1_024
MAX_TOOLS: Final = 128
MAX_TOOL_CALLS: Final = 128
"""In one message."""

MAX_NAME_CHARACTERS: Final = 64
"""Of a tool's name, a tool call's id, and a message's `name`."""

MAX_TEMPLATE_KWARGS_CHARACTERS: Final = 4_096
MAX_CACHE_SALT_BYTES: Final = 64
MAX_TENANT_BYTES: Final = 16  # see hash_tenant
FINGERPRINT_BYTES: Final = 16
"""Of an adapter."""

MAX_UNREAD_BYTES: Final = 8 * 1024 * 1024
"""Of one stream, about: generated, and not taken by its client yet."""

MAX_CONNECTIONS: Final = 4_096
"""Of one HTTP server, and of one gRPC server, also of those between the processes of a service."""

MAX_CONNECTIONS_PER_ADDRESS: Final = 1_024
"""Of one HTTP server; of one gRPC server, calls at a time."""

MAX_STREAMS_PER_CONNECTION: Final = 1_024
"""Of gRPC; a client's further calls wait in the client."""

MAX_METADATA_BYTES: Final = 16_384
"""Of a gRPC call."""

MAX_INTERNAL_MESSAGE_BYTES: Final = 64 * 1024 * 1024
"""Between routers, workers and ranks."""

MAX_HEAD_BYTES: Final = 65_536
"""Of an HTTP request before its body."""

STALL_SECONDS: Final = 30.0
"""Without progress of a client that does not read its stream, after which it is cut, by default."""


def mixed_chunk(most: int, num_sequences: int) -> int:
    """Returns how many prompt tokens, of at most `most`, a step computes beside decodes in a worker
    of so many
    sequences, waiting ones too: with few sequences about a third, since their steps are short.
    """
    return min(most, -(-most // 3) + num_sequences)
