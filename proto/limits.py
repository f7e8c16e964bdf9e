"""Defines the bounds on a caller's input, and the service's own bounds.

The bounds of single request parameters are in parameters.py. The service's own bounds limit
connections (MAX_CONNECTIONS), messages between its processes (MAX_INTERNAL_MESSAGE_BYTES), and
waits (STALL_SECONDS, KEEPALIVE_SECONDS, PREFIX_FETCH_SECONDS).
"""

from collections.abc import Mapping
from typing import Final

MAX_MESSAGE_BYTES: Final = 4 * 1024 * 1024
"""Size of one gRPC message or HTTP body, many times the size of a prompt of the longest context."""

MAX_MESSAGE_ELEMENTS: Final = 65_536
"""Number of fields in one gRPC message, or of strings, lists, objects and members in one HTTP body.
Parsing this number takes 50 ms.
"""

MAX_JSON_DEPTH: Final = 200
"""Levels of lists and objects in JSON that a string holds; HTTP bodies have the same bound."""

MAX_PROMPT_CHARACTERS: Final = 1_000_000
MAX_PROMPTS: Final = 128
"""Number of prompts in one HTTP body."""

MAX_TEXTS: Final = 2_048
"""Number of texts to embed or to score in one HTTP body; OpenAI has the same bound."""

MAX_ANSWER_SEQUENCES: Final = 256
"""Number of completions of all prompts of one HTTP body together."""

MAX_ANSWER_SIZE: Final = 2**22
"""Size of one answer: of all completions of all prompts together.

A token without log probabilities counts 1. Otherwise its log probability and each alternative count
LOGPROB_SIZE. Log probabilities of this size have about 40 MB, as text or as objects.
"""

LOGPROB_SIZE: Final = 8

MAX_SCORED_TOKENS: Final = MAX_ANSWER_SIZE // (LOGPROB_SIZE + 1)
"""Number of tokens in all prompts to score or to rank in one HTTP body.

Their log probabilities, and one token for each prompt, are then within MAX_ANSWER_SIZE.
"""

MAX_RETURNED_CHARACTERS: Final = 4 * MAX_PROMPT_CHARACTERS
"""Number of characters of prompts in one answer: the text of token ids, or all texts that `echo`
repeats in all completions of all prompts together.
"""

MAX_CHAT_MESSAGES: Final = 4_096
"""Number of messages in one chat, or of content parts in one message.

The session of an agent that fills a context of 128k tokens has more than a thousand messages.
"""

MAX_ROLE_CHARACTERS: Final = 64
MAX_REQUEST_ID_CHARACTERS: Final = 128
MAX_TOKENS: Final = 1_048_576
MAX_STOP_TOKEN_IDS: Final = 64
MAX_TIME_MS: Final = 3_600_000  # an hour

MAX_CHOICES: Final = 32
"""Number of completions of one prompt: `n` and `best_of`."""

MAX_BEAM_WIDTH: Final = 16
MAX_LOGPROBS: Final = 20
"""Number of alternatives that are reported for one token."""

MIN_LOGPROB: Final = -9_999.0
"""OpenAI's value in JSON, which has no infinity, for tokens that are never drawn."""

MIN_TEMPERATURE: Final = 1e-5
"""Below it sampling is greedy, because the division would overflow float32."""

MAX_WATERMARK_CONTEXT: Final = 8
"""Number of previous tokens that may choose the green tokens of a watermark."""

WATERMARK_GAMMA: Final = (0.01, 0.99)
"""Bounds of the share of green tokens."""

MAX_WATERMARK_DELTA: Final = 20.0
"""Bound of the addition to the logits of green tokens, which is above 0."""

MAX_BAD_WORDS: Final = 128
MAX_BAD_WORD_TOKENS: Final = 64

MAX_GRAMMAR_CHARACTERS: Final = 131_072
"""Size of a JSON schema, a regular expression, a grammar, or all texts of a choice together."""

MAX_CONSTRAINT_CHOICES: Final = 1_024
MAX_TOOLS: Final = 512
"""Number of tools in one request; agents with several MCP servers offer more than OpenAI's 128."""

MAX_TOOL_CALLS: Final = 128
"""Number of tool calls in one message."""

MAX_TOOL_NAME_CHARACTERS: Final = 128
"""Length of a tool's name; Anthropic has the same bound."""

MAX_TOOL_CALL_ID_CHARACTERS: Final = 4_096
"""Length of a tool call's id. Some services store a signature in it, and clients send it back."""

MAX_NAME_CHARACTERS: Final = 64
"""Length of a message's `name`."""

MAX_CACHE_BREAKPOINTS: Final = 4
"""Number of marks of prefixes that stay in the prefix cache, as in Anthropic and OpenAI."""

MAX_RETENTIONS: Final = MAX_CACHE_BREAKPOINTS + 1
"""Number of such prefixes of one request: up to its marks, and the whole prompt."""

RETENTION_SECONDS: Final[Mapping[str, int]] = {
    "in_memory": 300,
    "in-memory": 300,  # of older clients
    "5m": 300,
    "30m": 1_800,
    "1h": 3_600,
    "12h": 43_200,
    "24h": 86_400,
}
"""Seconds for which a prefix stays in the prefix cache, by the names of Anthropic and OpenAI."""

MAX_TEMPLATE_KWARGS_CHARACTERS: Final = 4_096
MAX_CACHE_SALT_BYTES: Final = 64
MAX_TENANT_BYTES: Final = 16  # see hash_tenant
FINGERPRINT_BYTES: Final = 16
"""Size of an adapter's fingerprint."""

MAX_UNREAD_BYTES: Final = 8 * 1024 * 1024
"""Approximate size of a stream's generated output that its client has not read yet."""

MAX_CONNECTIONS: Final = 4_096
"""Number of connections of one HTTP or gRPC server, also between the processes of a service."""

MAX_CONNECTIONS_PER_ADDRESS: Final = 1_024
"""Number of connections that one address has to an HTTP server, or of its concurrent gRPC calls."""

MAX_STREAMS_PER_CONNECTION: Final = 1_024
"""Number of calls on one gRPC connection; further calls wait in the client."""

MAX_HEALTH_BYTES: Final = 1_024
"""Size of the message of a health check, which needs no key."""

MAX_UNREAD_HEALTH_CHECKS: Final = 64
"""Number of health checks of one address whose message has not arrived in full.

gRPC has one bound on the size of all messages, so each may hold MAX_MESSAGE_BYTES until then.
"""

MAX_METADATA_BYTES: Final = 16_384
"""Size of the metadata of a gRPC call."""

MAX_INTERNAL_MESSAGE_BYTES: Final = 64 * 1024 * 1024
"""Size of one message between routers, workers and ranks."""

MAX_HEAD_BYTES: Final = 65_536
"""Size of an HTTP request before its body."""

STALL_SECONDS: Final = 30.0
"""Default time without progress after which a client that does not read its stream is cut off."""

KEEPALIVE_SECONDS: Final = 10.0
"""Default time without bytes after which an HTTP stream sends a keep-alive.

Half of the time after which an agent warns its user (20 s); nginx closes a connection after 60 s.
"""

PREFIX_FETCH_SECONDS: Final = 5.0
"""Time in which a worker must have fetched a cached prefix from another one; then it gives up.

Routers do not let workers fetch prefixes that are predicted to take longer.
"""
