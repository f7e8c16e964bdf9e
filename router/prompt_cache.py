"""Finds the prefixes of a prompt that its request wants to keep in the prefix cache, and how long.

Knows nothing of templates and tokenizers, except that they turn a chat into token ids.
"""

from collections.abc import Awaitable, Callable, Sequence
from typing import Final

from ..proto import inference_pb2, worker_pb2
from ..proto.errors import InvalidArgument
from ..proto.limits import MAX_CACHE_BREAKPOINTS, RETENTION_SECONDS
from ..proto.parameters import check_count

_KEY_RETENTION: Final = "in_memory"  # of prompt_cache_key alone, as in OpenAI
_BREAKPOINT_RETENTION: Final = "5m"  # as in Anthropic

EncodeChat = Callable[[inference_pb2.Chat], Awaitable[list[int]]]
"""Returns the token ids of a chat. Raises InvalidArgument if its template refuses the chat."""


def check_prompt_cache(request: inference_pb2.GenerateRequest) -> None:
    """Raises InvalidArgument, which names the field, unless the prompt cache fields are valid."""
    _check_retention(request.prompt_cache_retention, "prompt_cache_retention")
    field = "cache_breakpoints"
    marks = request.cache_breakpoints
    if marks and not request.prompt.HasField("chat"):
        raise InvalidArgument(
            "only allowed with a chat; for another prompt set prompt_cache_retention", field
        )
    check_count(len(marks), MAX_CACHE_BREAKPOINTS, "marks", field)
    num_messages = len(request.prompt.chat.messages)
    for i, mark in enumerate(marks):
        _check_retention(mark.retention, f"{field}[{i}].retention")
        if mark.num_messages > num_messages:
            raise InvalidArgument(
                f"must be at most {num_messages}, the number of messages",
                f"{field}[{i}].num_messages",
            )


async def find_retentions(
    request: inference_pb2.GenerateRequest, prompt: Sequence[int], encode: EncodeChat
) -> list[worker_pb2.PrefixRetention]:
    """Returns the retentions of a checked request, whose prompt has the ids `prompt`.

    A marked prefix has the ids that the prompt and the chat up to the mark have in common. Leaves
    out prefixes that a longer one retains for at least as long.
    """
    found: list[worker_pb2.PrefixRetention] = []
    longest = 0
    marks = sorted(request.cache_breakpoints, key=_place, reverse=True)
    for mark in [*_whole_prompt(request), *marks]:
        seconds = _seconds(mark)
        if seconds <= longest:
            continue
        num_tokens = await _count_common(request.prompt.chat, mark, prompt, encode)
        if num_tokens:
            longest = seconds
            found.append(worker_pb2.PrefixRetention(num_tokens=num_tokens, seconds=seconds))
    return found


def _check_retention(retention: str, field: str) -> None:
    if retention and retention not in RETENTION_SECONDS:
        raise InvalidArgument(f"must be one of {', '.join(RETENTION_SECONDS)}", field)


def _seconds(mark: inference_pb2.CacheBreakpoint) -> int:
    return RETENTION_SECONDS[mark.retention or _BREAKPOINT_RETENTION]


def _whole_prompt(request: inference_pb2.GenerateRequest) -> list[inference_pb2.CacheBreakpoint]:
    """Returns a mark after the prompt, if the request asks to keep all of it."""
    if request.only_cache_breakpoints:
        return []
    retention = request.prompt_cache_retention
    if not retention and request.prompt_cache_key and not request.cache_breakpoints:
        retention = _KEY_RETENTION
    if not retention:
        return []
    end = len(request.prompt.chat.messages)
    return [inference_pb2.CacheBreakpoint(num_messages=end, retention=retention)]


def _place(mark: inference_pb2.CacheBreakpoint) -> tuple[int, int, int]:
    return mark.num_messages, mark.num_characters, _seconds(mark)


async def _count_common(
    chat: inference_pb2.Chat,
    mark: inference_pb2.CacheBreakpoint,
    prompt: Sequence[int],
    encode: EncodeChat,
) -> int:
    """Returns the number of tokens of a prompt up to a mark.

    If the template refuses the chat up to the mark, these are all tokens.
    """
    if mark.num_messages >= len(chat.messages):
        return len(prompt)
    try:
        ids = await encode(_chat_before(chat, mark))
    except InvalidArgument:
        return len(prompt)
    pairs = zip(ids, prompt, strict=False)
    different = (i for i, (one, other) in enumerate(pairs) if one != other)
    return next(different, min(len(ids), len(prompt)))


def _chat_before(
    chat: inference_pb2.Chat, mark: inference_pb2.CacheBreakpoint
) -> inference_pb2.Chat:
    """Returns the chat up to a mark.

    Its last message is the one after the marked messages, cut at the mark even if nothing of it is
    left, because templates expect the roles in the order of the whole chat.
    """
    shorter = inference_pb2.Chat()
    shorter.CopyFrom(chat)
    shorter.continue_final_message = False
    del shorter.messages[mark.num_messages + 1 :]
    last = shorter.messages[-1]
    last.content = last.content[: mark.num_characters]
    last.ClearField("tool_calls")
    if not mark.num_characters:
        last.ClearField("reasoning")  # it comes before the content
    return shorter
