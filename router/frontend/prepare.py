"""From a request as it came to one the dispatcher takes: every bound checked, the prompt in tokens, defaults set."""

import secrets
import uuid
from collections.abc import Callable
from dataclasses import dataclass, replace

from ...proto import inference_pb2, limits
from ...proto.errors import InvalidArgument
from ..request import TokenRequest
from . import tools
from .chat import check_chat
from .constraint import compile_constraint
from .sampling import (
    check_beam_search,
    check_count,
    check_ids,
    check_range,
    check_sampling,
    check_stopping,
    num_choices,
)
from .tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """A model under the name that requests ask for."""

    name: str
    tokenizer: Tokenizer
    context_tokens: int  # the longest prompt plus completion


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedRequest:
    """A request that was found good."""

    request_id: str  # as the client knows it
    tokens: TokenRequest
    num_answers: int  # completions to answer, the best of those generated
    tokenizer: Tokenizer
    stop: tuple[str, ...] = ()
    wants_logprobs: bool = False  # the caller; the service may want them, too
    echo: str = ""  # the prompt's text, if it is to be repeated
    is_empty: bool = False  # max_tokens is 0: the one token that is generated is not answered
    chat: inference_pb2.Chat | None = None


async def prepare(
    request: inference_pb2.GenerateRequest,
    model: ServedModel,
    *,
    arrived: float,
    deadline: float | None,
    default_max_tokens: int | None = None,
    tenant: str = "",
    admit: Callable[[], None] = lambda: None,
) -> PreparedRequest:
    """Checks and tokenises `request`. `admit` is called in between, when all is checked that needs no tokens.

    Without `stopping.max_tokens` the completion may have `default_max_tokens` tokens (None: any number) as far as the
    context goes. `arrived` and `deadline` are times of time.monotonic(). Raises InvalidArgument, which names the field
    by its path in the message (`sampling.temperature`) and the bound.
    """
    accepted = _checked(request, model, arrived=arrived, deadline=deadline, tenant=tenant)
    check_prompt(request.prompt, model.tokenizer)
    admit()
    ids = await encode_prompt(request.prompt, model.tokenizer)
    if not ids:
        raise InvalidArgument("has no tokens; at least 1 is needed", "prompt")
    bad_words = await _bad_words(request.sampling, model.tokenizer)
    grammar = await _grammar(request, model.tokenizer)
    explicit = request.stopping.max_tokens if request.stopping.HasField("max_tokens") else None
    prompt, max_tokens = _fit(ids, explicit, default_max_tokens, request.truncate_prompt, model.context_tokens)
    if request.stopping.min_tokens > max_tokens:
        raise InvalidArgument(f"must be at most max_tokens, which is {max_tokens}", "stopping.min_tokens")
    tokens = replace(
        accepted.tokens, prompt=tuple(prompt), max_tokens=max(max_tokens, 1), bad_words=bad_words, grammar=grammar
    )
    echo = ""
    if request.echo:
        is_text = request.prompt.WhichOneof("kind") == "text" and len(prompt) == len(ids)
        echo = request.prompt.text if is_text else model.tokenizer.decode(prompt)
    return replace(accepted, tokens=tokens, echo=echo, is_empty=max_tokens == 0)


def check_request_id(request_id: str) -> None:
    """Raises InvalidArgument unless `request_id` is short, printable ASCII (it goes into logs and headers)."""
    if len(request_id) > limits.MAX_REQUEST_ID_CHARACTERS:
        raise InvalidArgument(f"has more than {limits.MAX_REQUEST_ID_CHARACTERS} characters", "request_id")
    if not (request_id.isascii() and request_id.isprintable()):
        raise InvalidArgument("must be printable ASCII", "request_id")


def check_prompt(prompt: inference_pb2.Prompt, tokenizer: Tokenizer) -> None:
    """Raises InvalidArgument if a bound is broken that can be checked without encoding."""
    match prompt.WhichOneof("kind"):
        case "text":
            check_count(len(prompt.text), limits.MAX_PROMPT_CHARACTERS, "characters", "prompt.text")
        case "token_ids":
            check_ids(prompt.token_ids.ids, tokenizer.vocab_size, "prompt.token_ids")
        case "chat":
            check_chat(prompt.chat)
        case _:
            raise InvalidArgument("one of text, token_ids and chat must be set", "prompt")


async def encode_prompt(prompt: inference_pb2.Prompt, tokenizer: Tokenizer) -> list[int]:
    """The token ids of a checked prompt of any kind. Raises InvalidArgument if the chat template refuses it."""
    if prompt.HasField("text"):
        return await tokenizer.encode(prompt.text)
    if prompt.HasField("chat"):
        return await tokenizer.encode_chat(prompt.chat)
    return list(prompt.token_ids.ids)


def _checked(
    request: inference_pb2.GenerateRequest,
    model: ServedModel,
    *,
    arrived: float,
    deadline: float | None,
    tenant: str,
) -> PreparedRequest:
    """All that needs no tokens; the rest is not in it yet."""
    check_request_id(request.request_id)
    is_chat = request.prompt.WhichOneof("kind") == "chat"
    if request.echo and is_chat:
        raise InvalidArgument("does not go with a chat", "echo")
    may_be_empty = request.echo or request.HasField("prompt_logprobs")
    answered, generated = num_choices(request)
    beam_search = check_beam_search(request)
    check_range(request.logprobs, 0, limits.MAX_LOGPROBS, "logprobs")
    check_range(request.prompt_logprobs, 0, limits.MAX_LOGPROBS, "prompt_logprobs")
    check_range(request.priority, -limits.MAX_PRIORITY, limits.MAX_PRIORITY, "priority")
    sampling = check_sampling(request.sampling, model.tokenizer.vocab_size)
    check_stopping(request.stopping, model.tokenizer.vocab_size, may_be_empty=may_be_empty)
    wants_logprobs = request.HasField("logprobs")
    tokens = TokenRequest(
        request_id=_unique(request.request_id),
        prompt=(),
        max_tokens=1,
        sampling=sampling,
        num_choices=generated,
        beam_search=beam_search,
        stop_token_ids=tuple(request.stopping.stop_token_ids),
        ignore_eos=request.stopping.ignore_eos,
        min_tokens=request.stopping.min_tokens,
        logprobs=request.logprobs if wants_logprobs or generated > answered else None,
        prompt_logprobs=request.prompt_logprobs if request.HasField("prompt_logprobs") else None,
        priority=request.priority,
        tenant=tenant,
        cache_salt=tenant.encode(),
        arrived=arrived,
        deadline=deadline,
    )
    return PreparedRequest(
        request_id=request.request_id or tokens.request_id,
        tokens=tokens,
        num_answers=answered,
        tokenizer=model.tokenizer,
        stop=tuple(request.stopping.stop),
        wants_logprobs=wants_logprobs,
        chat=request.prompt.chat if is_chat else None,
    )


async def _grammar(request: inference_pb2.GenerateRequest, tokenizer: Tokenizer) -> str:
    """What the caller wants of the completion or, where the checked chat demands tool calls, what makes it such."""
    constraint, field = request.constraint if request.HasField("constraint") else None, ""
    is_chat = request.prompt.WhichOneof("kind") == "chat"
    if is_chat and (calls := tools.constraint_for(request.prompt.chat, tokenizer)):
        for name in ("constraint", "beam_search"):
            if request.HasField(name):
                raise InvalidArgument("does not go with a tool_choice that demands a call", name)
        constraint, field = calls, "prompt.chat.tools"
    if constraint is None:
        return ""
    for name in ("min_tokens", "ignore_eos"):
        if getattr(request.stopping, name):
            raise InvalidArgument("does not go with a constraint, which says itself when it ends", f"stopping.{name}")
    return await compile_constraint(constraint, field)


async def _bad_words(sampling: inference_pb2.SamplingParams, tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """Each text with and without a space before: tokenizers tell the first word of a text from the others."""
    found: dict[tuple[int, ...], None] = {}
    for i, word in enumerate(sampling.bad_words):
        for text in (word, f" {word.lstrip()}"):
            ids = tuple(await tokenizer.encode(text, add_special_tokens=False))
            check_count(len(ids), limits.MAX_BAD_WORD_TOKENS, "tokens", f"sampling.bad_words[{i}]")
            if ids:
                found[ids] = None
    return tuple(found)


def _unique(request_id: str) -> str:
    """Clients may use one id twice at the same time; dispatcher and workers tell requests apart by it."""
    return f"{request_id}.{secrets.token_hex(8)}" if request_id else uuid.uuid4().hex


def _fit(
    ids: list[int], explicit: int | None, default: int | None, truncate: bool, context: int
) -> tuple[list[int], int]:
    """Makes prompt and completion fit the context; returns the prompt and max_tokens.

    A completion length that the caller asked for is kept or refused, never shortened."""
    if explicit is not None and explicit >= context:
        raise InvalidArgument(
            f"{explicit} leaves no room for a prompt in the context of {context} tokens", "stopping.max_tokens"
        )
    wanted = max(explicit, 1) if explicit is not None else 1
    if len(ids) + wanted > context:
        if not truncate:
            raise InvalidArgument(
                f"{len(ids)} prompt tokens and {wanted} to generate do not fit the context of {context} tokens",
                "prompt",
            )
        ids = ids[wanted - context :]
    room = context - len(ids)
    return ids, explicit if explicit is not None else min(default or room, room)
