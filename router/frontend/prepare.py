"""Turns a request as it came into one that the dispatcher takes: checked, the prompt in tokens, defaults set."""

import asyncio
import secrets
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from ...proto import inference_pb2, limits
from ...proto.errors import InvalidArgument
from ...proto.parameters import check_count, check_token_ids
from ..auth.authenticator import Caller
from ..auth.rate import Quota
from ..request import LoraAdapter, TokenRequest
from ..telemetry.trace import TraceContext
from .chat import check_chat
from .constraint import GrammarValidator
from .fair_threads import LONG_FROM, TEXTS
from .resume import ChoiceProgress, ResumeBinding, ResumeKey, check_resume, digest_request
from .tokenizer import Tokenizer
from .tools import tool_call_constraint
from .validation import (
    answer_size,
    check_answer_size,
    check_parameters,
    complete_beam_search,
    complete_sampling,
    num_answers,
    num_generated,
)

_BYTES_PER_TOKEN: Final = 4  # of typical text
_DEFAULT_COMPLETION_TOKENS: Final = 16  # OpenAI's and vLLM's, of all that is no chat


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """Holds a model under the name that requests ask for."""

    name: str
    tokenizer: Tokenizer
    context_tokens: int  # the longest prompt plus completion
    defaults: Mapping[str, float] = field(
        default_factory=dict
    )  # by field, where it has its own; of a request's unset ones
    grammars: GrammarValidator = field(default_factory=GrammarValidator)
    adapter: LoraAdapter | None = None  # that is added to its weights


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestContext:
    """Holds what a request says outside its message. Times are those of time.monotonic()."""

    arrived: float  # when the server had the request
    deadline: float | None = None  # when the answer must have ended
    caller: Caller = field(default_factory=Caller)
    is_resumable: bool = False  # whether the answer has resume tokens
    resume: Sequence[inference_pb2.ResumedChoice] = ()  # of a header; otherwise the message has it
    trace: TraceContext | None = None  # that the caller follows the request in


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedRequest:
    """Holds a checked request: what is generated, and how it is answered."""

    request_id: str  # as the client knows it
    model: str  # its name
    tokens: TokenRequest
    num_answers: int  # completions to answer, the best of those generated
    tokenizer: Tokenizer
    stop: tuple[str, ...]
    wants_logprobs: bool  # the client; ranking by best_of needs them, too
    echo: str  # the prompt's text, if it is to be repeated
    is_empty: bool  # max_tokens is 0: the one token that is generated is not answered
    chat: inference_pb2.Chat | None
    quota: Quota = field(default_factory=Quota)  # that the completions count against
    resume: ResumeBinding | None = None  # what its resume tokens bind; None: it has none
    progress: Mapping[int, ChoiceProgress] = field(default_factory=dict)  # by choice, if it was begun elsewhere
    trace: TraceContext | None = None

    @property
    def is_held(self) -> bool:
        """Whether nothing is answered before all completions have ended."""
        return self.tokens.num_choices > self.num_answers or self.tokens.beam_search is not None


async def prepare(
    request: inference_pb2.GenerateRequest,
    model: ServedModel,
    context: RequestContext,
    *,
    admit: Callable[[], None] = lambda: None,
    resume_key: ResumeKey | None = None,
) -> PreparedRequest:
    """Checks and tokenizes `request`. `admit` is called once all is checked that needs no tokens. `resume_key`: for an
    answer with resume tokens.

    Without `stopping.max_tokens` the completion of a text may have 16 tokens, the answer to a chat any number, as far
    as the context and the model's own default go. Raises InvalidArgument, which names the field by its path in the
    message (`sampling.temperature`) and the bound, and Overloaded if a grammar takes too long to check."""
    tokenizer = model.tokenizer
    check_parameters(request, tokenizer.vocab_size)
    turn = context.caller.turn
    await check_prompt(request.prompt, tokenizer, turn)
    admit()
    ids = await encode_prompt(request.prompt, tokenizer, context.caller)
    if not ids:
        raise InvalidArgument("has no tokens; at least 1 is needed", "prompt")
    bad_words = await _encode_bad_words(request.sampling, tokenizer, turn)
    grammar = await _grammar(request, model, turn)
    prompt, max_tokens = _fit_context(ids, request, model)
    check_answer_size(answer_size(request, len(prompt), max_tokens), request)
    tokens = _token_request(request, model, context, prompt, max_tokens, bad_words, grammar)
    tokens = replace(tokens, adapter=model.adapter)
    prepared = PreparedRequest(
        request_id=request.request_id or tokens.request_id,
        model=model.name,
        tokens=tokens,
        num_answers=num_answers(request),
        tokenizer=tokenizer,
        stop=tuple(request.stopping.stop),
        wants_logprobs=request.HasField("logprobs"),
        echo=await _echo(request, prompt, tokenizer, turn, is_cut=len(prompt) < len(ids)),
        is_empty=max_tokens == 0,
        chat=request.prompt.chat if request.prompt.HasField("chat") else None,
        quota=context.caller.quota,
        trace=context.trace,
    )
    if resume_key is None:
        return prepared
    weights = f"{model.name} {model.adapter.fingerprint.hex()}" if model.adapter else model.name
    digest = digest_request(request, prompt, max_tokens, f"{weights} {context.caller.tenant}")
    return _resumed(prepared, request, resume_key, digest)


async def check_prompt(prompt: inference_pb2.Prompt, tokenizer: Tokenizer, turn: str = "") -> None:
    """Checks the bounds that need no encoding, of a long prompt in a thread and in its caller's turn. Raises
    InvalidArgument and Overloaded."""
    if (size := prompt.ByteSize()) < LONG_FROM:
        _check_prompt(prompt, tokenizer)
    else:
        await TEXTS.run(turn, size, _check_prompt, prompt, tokenizer)


def _check_prompt(prompt: inference_pb2.Prompt, tokenizer: Tokenizer) -> None:
    if prompt.suffix and not prompt.HasField("text"):
        raise InvalidArgument("goes with a prompt of text only", "prompt.suffix")
    match prompt.WhichOneof("kind"):
        case "text":
            num_characters = len(prompt.text) + len(prompt.suffix)
            check_count(num_characters, limits.MAX_PROMPT_CHARACTERS, "characters", "prompt.text")
        case "token_ids":
            check_count(len(prompt.token_ids.ids), limits.MAX_TOKENS, "ids", "prompt.token_ids")
            check_token_ids(prompt.token_ids.ids, tokenizer.vocab_size, "prompt.token_ids")
        case "chat":
            check_chat(prompt.chat)
        case _:
            raise InvalidArgument("one of text, token_ids and chat must be set", "prompt")


async def encode_prompt(
    prompt: inference_pb2.Prompt, tokenizer: Tokenizer, caller: Caller, *, add_special_tokens: bool = True
) -> list[int]:
    """Returns the token ids of a checked prompt of any kind, and charges the caller for them, whatever becomes of them;
    for a prompt that is refused or cancelled by its size.

    Raises InvalidArgument if the chat template refuses it, and Overloaded if the caller has no tokens left or too much
    waits to be tokenized."""
    caller.quota.check_tokens()
    try:
        if prompt.HasField("text"):
            text = tokenizer.infill(prompt.text, prompt.suffix) if prompt.suffix else prompt.text
            ids = await tokenizer.encode(text, add_special_tokens=add_special_tokens, turn=caller.turn)
        elif prompt.HasField("chat"):
            ids = await tokenizer.encode_chat(prompt.chat, caller.turn)
        else:
            ids = list(prompt.token_ids.ids)
    except (InvalidArgument, asyncio.CancelledError):  # it was work, too
        caller.quota.take_tokens(prompt.ByteSize() // _BYTES_PER_TOKEN)
        raise
    caller.quota.take_tokens(len(ids))
    return ids


def _token_request(
    request: inference_pb2.GenerateRequest,
    model: ServedModel,
    context: RequestContext,
    prompt: list[int],
    max_tokens: int,
    bad_words: tuple[tuple[int, ...], ...],
    grammar: str,
) -> TokenRequest:
    generated = num_generated(request)
    needs_logprobs = request.HasField("logprobs") or generated > num_answers(request)
    return TokenRequest(
        # Clients may use one id twice at the same time; dispatcher and workers tell requests apart by it.
        request_id=f"{request.request_id}.{secrets.token_hex(8)}" if request.request_id else uuid.uuid4().hex,
        prompt=tuple(prompt),
        max_tokens=max(max_tokens, 1),
        sampling=complete_sampling(request, model.defaults),
        bad_words=bad_words,
        num_choices=generated,
        beam_search=complete_beam_search(request),
        stop_token_ids=tuple(request.stopping.stop_token_ids),
        ignore_eos=request.stopping.ignore_eos,
        min_tokens=request.stopping.min_tokens,
        logprobs=request.logprobs if needs_logprobs else None,
        prompt_logprobs=request.prompt_logprobs if request.HasField("prompt_logprobs") else None,
        pooling=request.pooling,
        grammar=grammar,
        priority=context.caller.priority(request.priority),
        tenant=context.caller.tenant,
        cache_salt=context.caller.cache_salt,
        arrived=context.arrived,
        deadline=context.deadline,
    )


def _resumed(
    prepared: PreparedRequest, request: inference_pb2.GenerateRequest, key: ResumeKey, digest: bytes
) -> PreparedRequest:
    """Lets the request go on where it was interrupted elsewhere, if it was. Raises InvalidArgument."""
    tokens = prepared.tokens
    progress = check_resume(request.resume, key, digest, prepared.num_answers)
    for each in progress.values():
        tokens.sampling.seed = each.seed
    binding = ResumeBinding(key=key, digest=digest, seed=tokens.sampling.seed)
    if progress and not prepared.is_held:  # else it starts again, with the same seed
        choices = [progress.get(choice) for choice in range(tokens.num_choices)]
        emitted = tuple(() if each is None else None if each.has_ended else each.ids for each in choices)
        prompt_logprobs = None if 0 in progress else tokens.prompt_logprobs  # the first message of choice 0 had them
        tokens = replace(tokens, emitted=emitted, prompt_logprobs=prompt_logprobs)
    return replace(prepared, tokens=tokens, resume=binding, progress=progress)


async def _grammar(request: inference_pb2.GenerateRequest, model: ServedModel, turn: str) -> str:
    """Returns the grammar that the constraint, or else the tool choice of a checked chat, demands; "" for none."""
    constraint, field = request.constraint if request.HasField("constraint") else None, ""
    chat = request.prompt.chat if request.prompt.HasField("chat") else None
    if chat is not None and (calls := tool_call_constraint(chat, model.tokenizer)):
        for name in ("constraint", "beam_search"):
            if request.HasField(name):
                raise InvalidArgument("does not go with a tool_choice that demands a call", name)
        constraint, field = calls, "prompt.chat.tools"
    if constraint is None:
        return ""
    for name in ("min_tokens", "ignore_eos"):
        if getattr(request.stopping, name):
            raise InvalidArgument("does not go with a constraint, which determines the end itself", f"stopping.{name}")
    return await model.grammars.validate(constraint, field, turn)


async def _encode_bad_words(
    sampling: inference_pb2.SamplingParams, tokenizer: Tokenizer, turn: str
) -> tuple[tuple[int, ...], ...]:
    """Encodes each text with and without a space before: tokenizers distinguish the first word of a text."""
    texts = [text for word in sampling.bad_words for text in (word, f" {word.lstrip()}")]
    found: dict[tuple[int, ...], None] = {}
    for i, ids in enumerate(await tokenizer.encode_all(texts, add_special_tokens=False, turn=turn)):
        check_count(len(ids), limits.MAX_BAD_WORD_TOKENS, "tokens", f"sampling.bad_words[{i // 2}]")
        if ids:
            found[tuple(ids)] = None
    return tuple(found)


def _fit_context(ids: list[int], request: inference_pb2.GenerateRequest, model: ServedModel) -> tuple[list[int], int]:
    """Makes prompt and completion fit the context; returns the prompt and max_tokens.

    A completion length that the client asked for is kept or refused, never shortened. Raises InvalidArgument."""
    context = model.context_tokens
    explicit = request.stopping.max_tokens if request.stopping.HasField("max_tokens") else None
    if request.pooling:
        explicit = 0
    if explicit is not None and explicit >= context:
        raise InvalidArgument(
            f"{explicit} leaves no token for the prompt in the context of {context} tokens", "stopping.max_tokens"
        )
    least = max(explicit or 1, 1)
    if len(ids) + least > context:
        if not request.truncate_prompt:
            raise InvalidArgument(
                f"{len(ids)} prompt tokens and {least} to generate do not fit the context of {context} tokens", "prompt"
            )
        ids = ids[least - context :]
    rest = context - len(ids)
    max_tokens = explicit if explicit is not None else min(_default_max_tokens(request, model, rest), rest)
    if request.stopping.min_tokens > max_tokens:
        raise InvalidArgument(f"must be at most max_tokens, which is {max_tokens}", "stopping.min_tokens")
    return ids, max_tokens


def _default_max_tokens(request: inference_pb2.GenerateRequest, model: ServedModel, rest: int) -> int:
    usual = rest if request.prompt.HasField("chat") else _DEFAULT_COMPLETION_TOKENS
    return min(usual, int(model.defaults.get("stopping.max_tokens", usual)))


async def _echo(
    request: inference_pb2.GenerateRequest, prompt: list[int], tokenizer: Tokenizer, turn: str, *, is_cut: bool
) -> str:
    if not request.echo:
        return ""
    is_whole_text = request.prompt.HasField("text") and not is_cut
    return request.prompt.text if is_whole_text else await tokenizer.detokenize(prompt, turn)
