"""Lists the paths of the HTTP APIs that take a body, and answers the bodies.

Each function takes the service, the body, the id of the request and its context. Most raise
TandemError, which `respond` turns into a response.
"""

import json
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Final

from starlette.responses import JSONResponse, PlainTextResponse, Response

from ....proto import inference_pb2
from ....proto.errors import TandemError
from ...deadline import before
from ...frontend.fair_threads import COPYING
from ...frontend.prepare import RequestContext
from ..anthropic.answers import ANTHROPIC_FORM
from ..anthropic.bodies import CountTokensBody, MessagesBody
from ..anthropic.requests import parse_count_tokens, parse_messages
from ..batches.batches import BatchBody, create_batch
from ..openai.answers import OPENAI_FORM, ResponseWriter, error_response
from ..openai.bodies import (
    ChatBody,
    CompletionBody,
    DetectWatermarkBody,
    DetokenizeBody,
    LoadLoraAdapterBody,
    TokenizeBody,
    UnloadLoraAdapterBody,
)
from ..openai.embeddings import (
    EMBEDDINGS_FORM,
    EmbeddingsBody,
    ScoreBody,
    make_score_request,
    parse_embeddings,
    score_form,
)
from ..openai.openapi import LEFT_OUT, READ_ERRORS, Operation, generation, ok
from ..openai.parsing import json_list, left_out, parse
from ..openai.requests import (
    AnyRequest,
    parse_chat,
    parse_completion,
    parse_tokenize,
    prompt_messages,
)
from ..openai.rerank import RerankBody, make_rerank_request, rerank_form
from ..openai.respond import off_loop
from ..openai.streaming import GenerationResponse
from ..openai.writers import AnswerForm, streaming_form
from ..responses.bodies import ResponsesBody
from ..responses.stored import answer_responses
from ..service import GenerationService


async def _generate(
    parse_body: Callable[..., AnyRequest],
    form: AnswerForm,
    service: GenerationService,
    body: bytes,
    request_id: str,
    context: RequestContext,
) -> Response:
    """Generates for a body that `parse_body` translates, and answers in `form`."""
    parse_body = partial(parse_body, ignores_unknown=service.dialect.ignores_unknown)
    parsed = await off_loop(context.caller.fairness_id, body, parse_body, request_id)
    return GenerationResponse(service, parsed, context, form)


async def _chat(
    service: GenerationService, body: bytes, request_id: str, context: RequestContext
) -> Response:
    """Answers a chat; its reasoning is in the fields that the service has chosen."""
    writer = partial(ResponseWriter, reasoning_names=service.dialect.reasoning_names)
    form = streaming_form(writer, error_response)
    return await _generate(parse_chat, form, service, body, request_id, context)


async def _embed(
    service: GenerationService, body: bytes, request_id: str, context: RequestContext
) -> Response:
    """Embeds texts, by default with the model's own pooling."""
    parse_body = partial(parse_embeddings, ignores_unknown=service.dialect.ignores_unknown)
    parsed = await off_loop(context.caller.fairness_id, body, parse_body, request_id)
    model = service.model(parsed.common.model)
    parsed.common.pooling = model.pooling.choose(parsed.common.pooling)
    return GenerationResponse(service, parsed, context, EMBEDDINGS_FORM)


async def _score(
    service: GenerationService, body: bytes, request_id: str, context: RequestContext
) -> Response:
    """Scores text_2 given text_1 with log probabilities."""
    parsed = await off_loop(context.caller.fairness_id, body, partial(parse, ScoreBody))
    model = service.model(parsed.model or "")
    made = make_score_request(parsed, model, request_id, context.caller)
    request, starts = await before(context.deadline, made)
    return GenerationResponse(service, request, context, score_form(starts))


async def _rerank(
    service: GenerationService, body: bytes, request_id: str, context: RequestContext
) -> Response:
    """Scores documents for a query."""
    parsed = await off_loop(context.caller.fairness_id, body, partial(parse, RerankBody))
    model = service.model(parsed.model or "")
    made = make_rerank_request(parsed, model, request_id, context.caller)
    request, lengths = await before(context.deadline, made)
    return GenerationResponse(service, request, context, rerank_form(lengths))


async def _count_tokens(
    service: GenerationService, body: bytes, _request_id: str, context: RequestContext
) -> Response:
    """Counts the tokens of the prompt of a message."""
    parse_body = partial(parse_count_tokens, ignores_unknown=service.dialect.ignores_unknown)
    parsed = await off_loop(context.caller.fairness_id, body, parse_body)
    request = inference_pb2.TokenizeRequest(model=parsed.common.model, prompt=parsed.prompts[0])
    try:
        ids = await service.encode(request, context.caller, context.deadline)
    except TandemError as error:
        return ANTHROPIC_FORM.error_response(error, parsed.field)
    names = left_out(parsed.body)
    return JSONResponse({"input_tokens": len(ids)}, headers={LEFT_OUT: names} if names else None)


async def _tokenize(
    service: GenerationService, body: bytes, _request_id: str, context: RequestContext
) -> Response:
    """Returns the token ids of a text or a chat."""
    caller = context.caller
    request, parsed = await off_loop(caller.fairness_id, body, parse_tokenize)
    adds = parsed.prompt is None or parsed.add_special_tokens is not False
    ids = await service.encode(request, caller, context.deadline, add_special_tokens=adds)
    model = service.model(request.model)

    def write() -> bytes:
        head = {"count": len(ids), "max_model_len": model.context_tokens}
        text = f'{json.dumps(head)[:-1]}, "tokens": {json_list(ids)}'
        if parsed.return_token_strs:
            strings = [model.tokenizer.token_bytes(each).decode(errors="replace") for each in ids]
            text += f', "token_strs": {json_list(strings)}'
        return f"{text}}}".encode()

    content = await COPYING.run(caller.fairness_id, len(ids), write)
    return Response(content, media_type="application/json")


async def _detokenize(
    service: GenerationService, body: bytes, _request_id: str, context: RequestContext
) -> Response:
    """Returns the text of token ids."""
    caller = context.caller
    parsed = await off_loop(caller.fairness_id, body, partial(parse, DetokenizeBody))
    request = inference_pb2.DetokenizeRequest(model=parsed.model or "", token_ids=parsed.tokens)
    text = (await service.detokenize(request, caller, context.deadline)).text
    return await COPYING.run(caller.fairness_id, len(text), JSONResponse, {"prompt": text})


async def _detect_watermark(
    service: GenerationService, body: bytes, _request_id: str, context: RequestContext
) -> Response:
    """Tests a text for the watermark."""
    parsed = await off_loop(context.caller.fairness_id, body, partial(parse, DetectWatermarkBody))
    (prompt,) = prompt_messages([parsed.prompt])
    request = inference_pb2.DetectWatermarkRequest(model=parsed.model or "", prompt=prompt)
    found = await service.detect_watermark(request, context.caller, context.deadline)
    return JSONResponse(
        {
            "z": found.z,
            "p": found.p,
            "num_tokens": found.num_tokens,
            "num_green": found.num_green,
        }
    )


async def _load_adapter(
    service: GenerationService, body: bytes, _request_id: str, context: RequestContext
) -> Response:
    """Loads a LoRA adapter."""
    parsed = await off_loop(context.caller.fairness_id, body, partial(parse, LoadLoraAdapterBody))
    request = inference_pb2.LoadLoraAdapterRequest(
        lora_name=parsed.lora_name, lora_path=parsed.lora_path
    )
    await service.load_adapter(request, context.caller)
    return PlainTextResponse(f"Success: LoRA adapter '{parsed.lora_name}' added successfully.")


async def _unload_adapter(
    service: GenerationService, body: bytes, _request_id: str, context: RequestContext
) -> Response:
    """Unloads a LoRA adapter."""
    parsed = await off_loop(context.caller.fairness_id, body, partial(parse, UnloadLoraAdapterBody))
    request = inference_pb2.UnloadLoraAdapterRequest(lora_name=parsed.lora_name)
    await service.unload_adapter(request, context.caller)
    return PlainTextResponse(f"Success: LoRA adapter '{parsed.lora_name}' removed successfully.")


Answer = Callable[[GenerationService, bytes, str, RequestContext], Awaitable[Response]]

ANTHROPIC_PATH: Final = "/v1/messages"
"""Its errors, and those of the paths below it, have Anthropic's form."""

STORING_PATHS: Final = frozenset(
    {"/v1/batches", "/v1/load_lora_adapter", "/v1/unload_lora_adapter"}
)
"""Their work goes on if the client disconnects: it changes what the service stores or serves."""

_LINE: Final = {"description": "OK", "content": {"text/plain": {}}}
_SCORES: Final = (
    generation("Scores text_2 given text_1.", ScoreBody, "list of scores", ("id", "data", "usage")),
    _score,
)

_RERANK: Final = (
    generation(
        "Orders documents by their relevance to a query.",
        RerankBody,
        "list of scores",
        ("id", "results", "usage"),
    ),
    _rerank,
)

POSTS: Final[dict[str, tuple[Operation, Answer]]] = {
    "/v1/completions": (
        generation("Completes prompts.", CompletionBody, "completion"),
        partial(_generate, parse_completion, OPENAI_FORM),
    ),
    "/v1/chat/completions": (
        generation("Answers a chat.", ChatBody, "chat completion"),
        _chat,
    ),
    "/v1/responses": (
        generation(
            "Answers a request of OpenAI's Responses API.",
            ResponsesBody,
            "response",
            ("id", "output", "status", "usage"),
        ),
        answer_responses,
    ),
    ANTHROPIC_PATH: (
        generation(
            "Answers a request of Anthropic's Messages API.",
            MessagesBody,
            "message",
            ("id", "content", "stop_reason", "usage"),
            "AnthropicError",
        ),
        partial(_generate, parse_messages, ANTHROPIC_FORM),
    ),
    f"{ANTHROPIC_PATH}/count_tokens": (
        Operation(
            "Counts the tokens of the prompt of a message.",
            ok("TokenCount"),
            READ_ERRORS,
            CountTokensBody,
            "AnthropicError",
        ),
        _count_tokens,
    ),
    "/v1/embeddings": (
        generation(
            "Returns the embeddings of texts.",
            EmbeddingsBody,
            "list of embeddings",
            ("data", "model", "usage"),
        ),
        _embed,
    ),
    "/score": _SCORES,
    "/v1/score": _SCORES,
    "/rerank": _RERANK,
    "/v1/rerank": _RERANK,
    "/v2/rerank": _RERANK,
    "/tokenize": (
        Operation(
            "Returns the token ids of a text or a chat.",
            ok("TokenizeResponse"),
            READ_ERRORS,
            TokenizeBody,
        ),
        _tokenize,
    ),
    "/detokenize": (
        Operation(
            "Returns the text of token ids.", ok("DetokenizeResponse"), READ_ERRORS, DetokenizeBody
        ),
        _detokenize,
    ),
    "/v1/watermark/detect": (
        Operation(
            "Tests whether a text has the watermark of this service.",
            ok("WatermarkEvidence"),
            READ_ERRORS,
            DetectWatermarkBody,
        ),
        _detect_watermark,
    ),
    "/v1/batches": (
        Operation("Creates a batch.", ok("Batch"), (*READ_ERRORS, 503), BatchBody),
        create_batch,
    ),
    "/v1/load_lora_adapter": (
        Operation(
            "Loads a LoRA adapter.",
            _LINE,
            (400, 401, 403, 413, 415, 429, 503, 504),
            LoadLoraAdapterBody,
        ),
        _load_adapter,
    ),
    "/v1/unload_lora_adapter": (
        Operation("Unloads a LoRA adapter.", _LINE, (*READ_ERRORS, 504), UnloadLoraAdapterBody),
        _unload_adapter,
    ),
}
"""By path: its description, and the function that answers a body."""
