"""Prepares a request for the dispatcher: checks it, tokenizes the prompt and sets defaults."""

import asyncio
import secrets
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final

from ...proto import inference_pb2, limits, worker_pb2
from ...proto.errors import InvalidArgument, PromptTooLong
from ...proto.hashing import hash_tenant
from ...proto.parameters import check_count, check_token_ids
from ..auth.authenticator import Caller
from ..prompt_cache import find_retentions
from ..request import TokenRequest
from ..resume.policy import ResumePolicy
from ..resume.tokens import (
    ANSWER_BYTES,
    ResumeBinding,
    ResumeKey,
    digest_request,
)
from ..slo import find_slo, first_token_due
from ..stopping.rules import stop_rules
from ..telemetry.trace import TraceContext
from ..turns import droppable_parts, without
from ..watermark.rules import choose_watermark
from .chat import check_chat, must_call, within_characters
from .constraint import MAX_COMBINED, either
from .fair_threads import CHECKING, COMPILING
from .prepared import PreparedRequest, begin_of, resumed
from .served_model import ServedModel, fit_context, reserved_tokens
from .tokenizer import Tokenizer
from .tools import optional_call_constraint, tool_call_constraint
from .validation import (
    answer_size,
    check_answer_size,
    check_echo_size,
    check_parameters,
    complete_beam_search,
    complete_sampling,
    count_choices,
    count_returned,
)
from .words import encode_bad_words, find_stop_tokens

BYTES_PER_TOKEN: Final = 4  # of typical text
_PATTERN_MICROSECONDS: Final = 256  # to compile a character of stop_regex, at most


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestContext:
    """Holds the data of a request outside its message. Times are those of time.monotonic()."""

    arrived: float  # when the server had the request
    deadline: float | None = None  # when the answer must have ended
    caller: Caller = field(default_factory=Caller)
    is_resumable: bool = False  # the answer's messages have resume tokens
    # The event after which an HTTP stream is resumed. "": a new stream whose events have ids.
    event_id: str | None = None
    # An HTTP stream that has sent no bytes for this time sends a keep-alive; None: never.
    keepalive_seconds: float | None = None
    trace: TraceContext | None = None  # the caller's
    reduces_max_tokens: bool = False  # to the rest of the context, as some APIs do
    is_batch: bool = False  # a line of a batch


async def prepare(
    request: inference_pb2.GenerateRequest,
    model: ServedModel,
    context: RequestContext,
    *,
    admit: Callable[[], None] = lambda: None,
    resume_key: ResumeKey | None = None,
    resume_policy: ResumePolicy | None = None,
) -> PreparedRequest:
    """Checks and tokenizes `request`; calls `admit` after the checks that need no tokens.

    `resume_key`: of resume tokens and event ids, if the answer is to have them. `resume_policy`:
    shared by all requests. Without `stopping.max_tokens` the completion of a text may have 16
    tokens, and the answer to a chat any number within the context, MAX_ANSWER_SIZE and the model's
    default. Raises InvalidArgument, which names the field by its path in the message
    (`sampling.temperature`) and the bound, and Overloaded if a grammar takes too long to check.
    """
    tokenizer = model.tokenizer
    check_parameters(request, tokenizer.vocab_size)
    if request.pooling:
        model.pooling.check()
    slo = find_slo(model.slo, request.service_tier, is_batch=context.is_batch)
    fairness_id = context.caller.fairness_id
    await check_prompt(request.prompt, model, fairness_id, drops_turns=request.truncation == "auto")
    admit()
    policy = resume_policy or ResumePolicy()
    began = policy.milliseconds_at(context.arrived)
    # A template may write the date: it sees the same time when the answer is resumed.
    begin = begin_of(request.resume, context.event_id, resume_key)
    now = (began if begin is None else begin.began) / 1000
    if begin is not None:  # otherwise the prompt or max_tokens could differ
        model = model.held_by(begin.context_tokens, begin.context_tokens)
    ids, chat = await _encode_fitting(request, model, context, now)
    if not ids:
        raise InvalidArgument("has no tokens; at least 1 is needed", "prompt")
    if not request.prompt.HasField("token_ids"):  # added tokens may lie beyond the embedding
        await CHECKING.run(
            fairness_id, len(ids), check_token_ids, ids, tokenizer.vocab_size, "prompt"
        )
    bad_words = await encode_bad_words(request.sampling, tokenizer, fairness_id)
    grammar = await _grammar(request, model, context.caller)
    prompt, max_tokens, fitted = fit_context(
        ids, request, model, reduces=context.reduces_max_tokens
    )
    check_answer_size(answer_size(request, len(prompt), max_tokens), request)
    stopping = request.stopping
    stop_tokens = find_stop_tokens(stopping, tokenizer)
    stops = await COMPILING.run(
        fairness_id,
        _PATTERN_MICROSECONDS * len(stopping.stop_regex),
        stop_rules,
        stopping,
        stop_tokens,
    )
    submit = _submit(request, model, context.caller, prompt, max_tokens, bad_words, grammar)
    encode = partial(tokenizer.encode_chat, fairness_id=fairness_id, now=now)
    submit.retentions.extend(await find_retentions(request, prompt, encode))
    submit.stop_token_ids.extend(dict.fromkeys((*stopping.stop_token_ids, *stop_tokens)))
    prepared = PreparedRequest(
        request_id=request.request_id or submit.request_id,
        model=model.name,
        tokens=TokenRequest(
            request_id=submit.request_id,
            submit=submit,
            tenant=context.caller.tenant,
            arrived=context.arrived,
            deadline=context.deadline,
            first_token_due=first_token_due(slo, context.arrived),
            ends_at=context.arrived + stopping.max_time_ms / 1000 if stopping.max_time_ms else None,
            affinity=_affinity(request.prompt_cache_key, context.caller),
            is_batch=context.is_batch,
        ),
        num_returned=count_returned(request),
        tokenizer=tokenizer,
        stops=stops,
        wants_logprobs=request.HasField("logprobs"),
        echo=await _echo(request, prompt, tokenizer, fairness_id, is_cut=len(prompt) < len(ids)),
        is_empty=max_tokens == 0,
        chat=chat,
        dropped_messages=len(request.prompt.chat.messages) - len(chat.messages) if chat else 0,
        quota=context.caller.quota,
        trace=context.trace,
        slo=slo,
        key_name=context.caller.key_name,
    )
    if resume_key is None:
        return prepared
    salt = f"{_model_digest(model, submit)} {context.caller.tenant}"
    digest = digest_request(request, prompt, max_tokens, salt)
    prepared = replace(
        prepared,
        resume=ResumeBinding(
            key=resume_key,
            policy=policy,
            digest=digest,
            seed=submit.sampling.seed,
            answer=secrets.token_bytes(ANSWER_BYTES),
            began=began,
            context_tokens=fitted,
        ),
        has_event_ids=context.event_id is not None,
    )
    if context.event_id or request.resume:
        return resumed(prepared, request.resume, context.event_id or "")
    return prepared


def _model_digest(model: ServedModel, submit: worker_pb2.Submit) -> str:
    """Returns a text that differs if the model's weights or its watermark do."""
    weights = f"{model.name} {model.adapter.fingerprint.hex()}" if model.adapter else model.name
    if not submit.HasField("watermark"):
        return weights
    return f"{weights} {submit.watermark.SerializeToString(deterministic=True).hex()}"


async def check_prompt(
    prompt: inference_pb2.Prompt,
    model: ServedModel,
    fairness_id: str = "",
    *,
    drops_turns: bool = False,
) -> None:
    """Checks the bounds that need no encoding; a long prompt waits for a thread, see FairThreads.

    `drops_turns`: see `check_chat`. Raises InvalidArgument, and Overloaded if too many prompts
    wait.
    """
    await CHECKING.run(fairness_id, prompt.ByteSize(), _check_prompt, prompt, model, drops_turns)


def _check_prompt(prompt: inference_pb2.Prompt, model: ServedModel, drops_turns: bool) -> None:
    if prompt.suffix and not prompt.HasField("text"):
        raise InvalidArgument("only allowed with a prompt of text", "prompt.suffix")
    match prompt.WhichOneof("kind"):
        case "text":
            num_characters = len(prompt.text) + len(prompt.suffix)
            most = limits.MAX_PROMPT_CHARACTERS
            check_count(num_characters, most, "characters", "prompt.text", PromptTooLong)
        case "token_ids":
            ids = prompt.token_ids.ids
            check_count(len(ids), limits.MAX_TOKENS, "ids", "prompt.token_ids", PromptTooLong)
            check_token_ids(ids, model.tokenizer.vocab_size, "prompt.token_ids")
        case "chat":
            check_chat(prompt.chat, model.text_model_of, drops_turns=drops_turns)
        case _:
            raise InvalidArgument("one of text, token_ids and chat must be set", "prompt")


async def encode_prompt(
    prompt: inference_pb2.Prompt,
    tokenizer: Tokenizer,
    caller: Caller,
    *,
    add_special_tokens: bool = True,
    now: float | None = None,
) -> list[int]:
    """Returns the token ids of a checked prompt of any kind, and charges the caller for them.

    A prompt that is refused or cancelled is charged by its size. `now`: see Tokenizer.encode_chat.
    Raises InvalidArgument if the chat template refuses the prompt, and Overloaded if the caller has
    no tokens left or if too many texts wait.
    """
    caller.quota.check_tokens()
    try:
        if prompt.HasField("text"):
            text = tokenizer.infill(prompt.text, prompt.suffix) if prompt.suffix else prompt.text
            ids = await tokenizer.encode(
                text, add_special_tokens=add_special_tokens, fairness_id=caller.fairness_id
            )
        elif prompt.HasField("chat"):
            ids = await tokenizer.encode_chat(prompt.chat, caller.fairness_id, now)
        else:
            ids = list(prompt.token_ids.ids)
    except (InvalidArgument, asyncio.CancelledError):  # the work was done
        caller.quota.take_tokens(prompt.ByteSize() // BYTES_PER_TOKEN)
        raise
    caller.quota.take_tokens(len(ids))
    return ids


async def _encode_fitting(
    request: inference_pb2.GenerateRequest,
    model: ServedModel,
    context: RequestContext,
    now: float,
) -> tuple[list[int], inference_pb2.Chat | None]:
    """Returns the ids of the checked prompt, and its chat without the turns that do not fit.

    If `truncation` is auto, drops the oldest turns: the fewest with which the prompt fits, or all
    that may be dropped if it never fits. The caller is charged for all turns within
    MAX_PROMPT_CHARACTERS. Raises as `encode_prompt`.
    """
    caller = context.caller
    prompt = request.prompt
    chat = prompt.chat if prompt.HasField("chat") else None
    if chat is None or request.truncation != "auto":
        return await encode_prompt(prompt, model.tokenizer, caller, now=now), chat
    # Only then it may have too many characters: each has at least a byte.
    if (size := prompt.ByteSize()) > limits.MAX_PROMPT_CHARACTERS:
        chat = await CHECKING.run(caller.fairness_id, size, within_characters, chat)
    longest = model.context_tokens
    room = longest - reserved_tokens(request, longest, reduces=context.reduces_max_tokens)
    parts = droppable_parts(chat)
    found = None
    count, least, most = 0, 0, len(parts)  # parts to drop
    while least <= most:  # bisection, because each attempt renders the chat
        shorter = without(chat, parts[:count]) if count else chat
        try:
            if count:
                ids = await model.tokenizer.encode_chat(shorter, caller.fairness_id, now)
            else:
                whole = inference_pb2.Prompt(chat=chat)
                ids = await encode_prompt(whole, model.tokenizer, caller, now=now)
            fits = len(ids) <= room or count == len(parts)
        except PromptTooLong:  # with the text that the template adds
            if count == len(parts):
                raise
            fits = False
        if fits:
            found = ids, shorter
            most = count - 1
        else:
            least = count + 1
        count = (least + most) // 2
    assert found is not None
    return found


def _submit(
    request: inference_pb2.GenerateRequest,
    model: ServedModel,
    caller: Caller,
    prompt: list[int],
    max_tokens: int,
    bad_words: Sequence[inference_pb2.TokenIds],
    grammar: str,
) -> worker_pb2.Submit:
    """Returns the message to workers without the fields that take time to check.

    Raises InvalidArgument if the request cannot have its watermark.
    """
    num_choices = count_choices(request)
    sampling = complete_sampling(request, model.defaults)
    watermark = None
    if max_tokens > 0:
        watermark = choose_watermark(request, sampling.temperature, model.watermark, caller.tenant)
    needs_logprobs = request.HasField("logprobs") or num_choices > count_returned(request)
    return worker_pb2.Submit(
        request_id=_unique_id(request.request_id),
        token_ids=prompt,
        max_tokens=max(max_tokens, 1),
        sampling=sampling,
        bad_words=bad_words,
        grammar=grammar,
        watermark=watermark,
        num_choices=num_choices,
        beam_search=complete_beam_search(request),
        ignore_eos=request.stopping.ignore_eos,
        min_tokens=request.stopping.min_tokens,
        logprobs=request.logprobs if needs_logprobs else None,
        prompt_logprobs=request.prompt_logprobs if request.HasField("prompt_logprobs") else None,
        processed_logprobs=request.processed_logprobs,
        pooling=request.pooling,
        priority=caller.priority(request.priority),
        tenant=hash_tenant(caller.tenant),
        cache_salt=caller.cache_salt,
        adapter=None if model.adapter is None else model.adapter.message(),
    )


def _unique_id(request_id: str) -> str:
    """Returns an id for routers and workers: clients may use an id twice at the same time."""
    return f"{request_id}.{secrets.token_hex(8)}" if request_id else uuid.uuid4().hex


async def _grammar(
    request: inference_pb2.GenerateRequest, model: ServedModel, caller: Caller
) -> str:
    """Returns the grammar of the demanded tool calls or of the constraint; "" without either.

    If the model may call a tool, the grammar of the constraint has calls as well.
    """
    constraint = request.constraint if request.HasField("constraint") else None
    tools: Sequence[inference_pb2.Tool] = ()
    field = ""
    chat = request.prompt.chat if request.prompt.HasField("chat") else None
    if chat is not None and (calls := tool_call_constraint(chat, model.tokenizer)):
        for name in ("constraint", "beam_search"):
            if request.HasField(name):
                raise InvalidArgument("not allowed with a tool_choice that demands a call", name)
        constraint = calls.constraint
        tools = calls.tools
        field = "prompt.chat.tools"
    if constraint is None:
        return ""
    for name in ("min_tokens", "ignore_eos"):
        if getattr(request.stopping, name):
            raise InvalidArgument(
                "not allowed with a constraint, which determines the end", f"stopping.{name}"
            )
    grammar = await model.grammars.validate(
        constraint, field, caller.fairness_id, caller.cache_salt, tools
    )
    if chat is None or must_call(chat):
        return grammar
    return await _with_calls(grammar, chat, model, caller)


async def _with_calls(
    grammar: str, chat: inference_pb2.Chat, model: ServedModel, caller: Caller
) -> str:
    """Returns the grammar of an answer with the calls that may take its place."""
    calls = optional_call_constraint(chat, model.tokenizer)
    if calls is None:
        return grammar
    field = "prompt.chat.tools"
    validate = model.grammars.validate
    of_calls = await validate(
        calls.constraint, field, caller.fairness_id, caller.cache_salt, calls.tools
    )
    try:
        both = inference_pb2.Constraint(grammar=either(of_calls, grammar))
    except ValueError as error:
        raise InvalidArgument(f"{error} to be combined with tools", "constraint") from None
    return await validate(
        both, field, caller.fairness_id, caller.cache_salt, max_characters=MAX_COMBINED
    )


def _affinity(key: str, caller: Caller) -> str:
    return f"{caller.tenant} {key}" if key else ""


async def _echo(
    request: inference_pb2.GenerateRequest,
    prompt: list[int],
    tokenizer: Tokenizer,
    fairness_id: str,
    *,
    is_cut: bool,
) -> str:
    if not request.echo:
        return ""
    is_whole_text = request.prompt.HasField("text") and not is_cut
    echo = (
        request.prompt.text
        if is_whole_text
        else await tokenizer.text_of_prompt(prompt, fairness_id)
    )
    check_echo_size(len(echo) * count_choices(request))
    return echo
