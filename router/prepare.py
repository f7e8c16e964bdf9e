"""From a request as it came to one the dispatcher takes: every bound checked, the prompt in tokens, defaults set."""

import secrets
import uuid
from collections.abc import Collection
from dataclasses import dataclass

from ..proto import inference_pb2, limits
from ..proto.errors import InvalidArgument
from .request import TokenRequest
from .tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """A model under the name that requests ask for."""

    name: str
    tokenizer: Tokenizer
    context_tokens: int  # the longest prompt plus completion


async def prepare(
    request: inference_pb2.GenerateRequest,
    model: ServedModel,
    *,
    arrived: float,
    deadline: float | None,
    default_max_tokens: int | None = None,
) -> tuple[TokenRequest, tuple[str, ...]]:
    """Checks and tokenises `request`; returns what the dispatcher needs and the stop strings.

    Without `stopping.max_tokens` the completion may have `default_max_tokens` tokens (None: any number) as far as the
    context goes. `arrived` and `deadline` are times of time.monotonic(). Raises InvalidArgument, which names the field
    by its path in the message (`sampling.temperature`) and the bound.
    """
    check_request_id(request.request_id)
    sampling = _sampling(request.sampling)
    stop, stop_token_ids = _stopping(request.stopping, model.tokenizer.vocab_size)
    ids = await encode_prompt(request.prompt, model.tokenizer)
    if not ids:
        raise InvalidArgument("has no tokens; at least 1 is needed", "prompt")
    explicit = request.stopping.max_tokens if request.stopping.HasField("max_tokens") else None
    prompt, max_tokens = _fit(ids, explicit, default_max_tokens, request.truncate_prompt, model.context_tokens)
    tokens = TokenRequest(
        request_id=_unique(request.request_id),
        prompt=tuple(prompt),
        max_tokens=max_tokens,
        sampling=sampling,
        stop_token_ids=stop_token_ids,
        ignore_eos=request.stopping.ignore_eos,
        arrived=arrived,
        deadline=deadline,
    )
    return tokens, stop


def check_request_id(request_id: str) -> None:
    """Raises InvalidArgument unless `request_id` is short, printable ASCII (it goes into logs and headers)."""
    if len(request_id) > limits.MAX_REQUEST_ID_CHARACTERS:
        raise InvalidArgument(f"has more than {limits.MAX_REQUEST_ID_CHARACTERS} characters", "request_id")
    if not (request_id.isascii() and request_id.isprintable()):
        raise InvalidArgument("must be printable ASCII", "request_id")


async def encode_prompt(prompt: inference_pb2.Prompt, tokenizer: Tokenizer) -> list[int]:
    """The token ids of a prompt of any kind. Raises InvalidArgument."""
    kind = prompt.WhichOneof("kind")
    if kind == "text":
        _check_characters(len(prompt.text), "prompt.text")
        return await tokenizer.encode(prompt.text)
    if kind == "token_ids":
        _check_ids(prompt.token_ids.ids, tokenizer.vocab_size, "prompt.token_ids")
        return list(prompt.token_ids.ids)
    if kind == "chat":
        return await tokenizer.encode_chat(_messages(prompt.chat))
    raise InvalidArgument("one of text, token_ids and chat must be set", "prompt")


def _unique(request_id: str) -> str:
    """Clients may use one id twice at the same time; dispatcher and workers tell requests apart by it."""
    return f"{request_id}.{secrets.token_hex(8)}" if request_id else uuid.uuid4().hex


def _messages(chat: inference_pb2.Chat) -> list[dict[str, str]]:
    if not 1 <= len(chat.messages) <= limits.MAX_CHAT_MESSAGES:
        raise InvalidArgument(
            f"has {len(chat.messages)} messages; 1 to {limits.MAX_CHAT_MESSAGES} are taken", "prompt.chat.messages"
        )
    for i, message in enumerate(chat.messages):
        if not 1 <= len(message.role) <= limits.MAX_ROLE_CHARACTERS:
            raise InvalidArgument(
                f"must have 1 to {limits.MAX_ROLE_CHARACTERS} characters", f"prompt.chat.messages[{i}].role"
            )
    _check_characters(sum(len(message.content) for message in chat.messages), "prompt.chat")
    return [{"role": message.role, "content": message.content} for message in chat.messages]


def _check_characters(count: int, field: str) -> None:
    if count > limits.MAX_PROMPT_CHARACTERS:
        raise InvalidArgument(f"has {count} characters; at most {limits.MAX_PROMPT_CHARACTERS} are taken", field)


def _check_ids(ids: Collection[int], vocab_size: int, field: str) -> None:
    if ids and max(ids) >= vocab_size:
        raise InvalidArgument(f"{max(ids)} is not a token id; the vocabulary has {vocab_size} tokens", field)


def _sampling(given: inference_pb2.SamplingParams) -> inference_pb2.SamplingParams:
    """Checks every field and sets every field. NaN fails each comparison and so each check."""
    temperature = given.temperature if given.HasField("temperature") else 1.0
    top_p = given.top_p if given.HasField("top_p") else 1.0
    if not 0.0 <= temperature <= limits.MAX_TEMPERATURE:
        raise InvalidArgument(f"must be from 0 to {limits.MAX_TEMPERATURE}", "sampling.temperature")
    if not -1 <= given.top_k <= limits.MAX_TOP_K:
        raise InvalidArgument(f"must be from -1 to {limits.MAX_TOP_K}", "sampling.top_k")
    if not 0.0 < top_p <= 1.0:
        raise InvalidArgument("must be greater than 0 and at most 1", "sampling.top_p")
    if not 0.0 <= given.min_p <= 1.0:
        raise InvalidArgument("must be from 0 to 1", "sampling.min_p")
    return inference_pb2.SamplingParams(
        temperature=temperature,
        top_k=max(given.top_k, 0),
        top_p=top_p,
        min_p=given.min_p,
        seed=given.seed if given.HasField("seed") else secrets.randbits(64),
    )


def _stopping(given: inference_pb2.StoppingParams, vocab_size: int) -> tuple[tuple[str, ...], tuple[int, ...]]:
    if given.HasField("max_tokens") and not 1 <= given.max_tokens <= limits.MAX_TOKENS:
        raise InvalidArgument(f"must be from 1 to {limits.MAX_TOKENS}", "stopping.max_tokens")
    if len(given.stop) > limits.MAX_STOP_STRINGS:
        raise InvalidArgument(
            f"has {len(given.stop)} strings; at most {limits.MAX_STOP_STRINGS} are taken", "stopping.stop"
        )
    for i, stop in enumerate(given.stop):
        if not 1 <= len(stop) <= limits.MAX_STOP_STRING_CHARACTERS:
            raise InvalidArgument(
                f"must have 1 to {limits.MAX_STOP_STRING_CHARACTERS} characters", f"stopping.stop[{i}]"
            )
    if len(given.stop_token_ids) > limits.MAX_STOP_TOKEN_IDS:
        raise InvalidArgument(
            f"has {len(given.stop_token_ids)} ids; at most {limits.MAX_STOP_TOKEN_IDS} are taken",
            "stopping.stop_token_ids",
        )
    _check_ids(given.stop_token_ids, vocab_size, "stopping.stop_token_ids")
    return tuple(given.stop), tuple(given.stop_token_ids)


def _fit(
    ids: list[int], explicit: int | None, default: int | None, truncate: bool, context: int
) -> tuple[list[int], int]:
    """Makes prompt and completion fit the context; returns the prompt and max_tokens.

    A completion length that the caller asked for is kept or refused, never shortened."""
    if explicit is not None and explicit >= context:
        raise InvalidArgument(
            f"{explicit} leaves no room for a prompt in the context of {context} tokens", "stopping.max_tokens"
        )
    wanted = explicit if explicit is not None else 1
    if len(ids) + wanted > context:
        if not truncate:
            raise InvalidArgument(
                f"{len(ids)} prompt tokens and {wanted} to generate do not fit the context of {context} tokens",
                "prompt",
            )
        ids = ids[wanted - context :]
    room = context - len(ids)
    return ids, explicit if explicit is not None else min(default or room, room)
