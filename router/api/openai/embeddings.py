"""Answers OpenAI's POST /v1/embeddings and vLLM's POST /score, which generate no tokens."""

import asyncio
import base64
import json
import math
import time
from array import array
from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any, Final, Literal

from pydantic import BeforeValidator, FailFast, Field, PlainValidator, WithJsonSchema
from pydantic_core import PydanticCustomError

from ....proto import inference_pb2, limits
from ....proto.errors import InvalidArgument, PromptTooLong
from ....proto.parameters import check_count
from ...auth.authenticator import Caller
from ...frontend.prepare import BYTES_PER_TOKEN
from ...frontend.served_model import ServedModel
from ...frontend.tokenizer import Tokenizer
from .answers import error_response
from .bodies import (
    WHOLE,
    Count,
    Ignored,
    OpenModel,
    parse_prompts,
    prompt_schema,
    with_named_parameters,
)
from .parsing import parse
from .requests import ParsedRequest, prompt_messages, set_parameters
from .writers import AnswerForm, Answers, TokenIds

_POOLINGS: Final = {
    None: inference_pb2.POOLING_UNSPECIFIED,
    "LAST": inference_pb2.POOLING_LAST,
    "MEAN": inference_pb2.POOLING_MEAN,
}

_MAX_NUMBERS: Final = {"float": 2**22, "base64": 2**24}
"""By format, the bound on the numbers in all embeddings of one response, which then has 80 MB."""


class EmbeddingsFields(OpenModel):
    """Declares the body of POST /v1/embeddings."""

    model: str | None = None
    input: Annotated[
        list[str | list[int]],
        PlainValidator(partial(parse_prompts, most=limits.MAX_TEXTS)),
        WithJsonSchema(prompt_schema(limits.MAX_TEXTS)),
    ]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Count | None = Field(
        None,
        description="The number of first numbers of each embedding that are kept, before it is"
        " scaled to length 1; by default all.",
    )
    pooling_type: Literal["LAST", "MEAN"] | None = Field(
        None,
        description="How the last hidden states are pooled; by default as the model's modules.json"
        " says, or LAST without this file.",
    )
    normalize: bool | None = Field(
        None, description="Scales the embedding to length 1; true by default."
    )
    user: Ignored[str] = None


_TRUNCATION: Final = {name: name for name in ("truncate_prompt", "truncate_prompt_tokens")}
EmbeddingsBody = with_named_parameters(EmbeddingsFields, "EmbeddingsBody", _TRUNCATION)


def _texts(value: object) -> object:
    texts = [value] if isinstance(value, str) else value
    if isinstance(texts, list) and not 1 <= len(texts) <= limits.MAX_TEXTS:
        raise PydanticCustomError(
            "texts", f"has {len(texts)} texts; 1 to {limits.MAX_TEXTS} are allowed"
        )
    return texts


_TEXTS_SCHEMA: Final = {
    "anyOf": [
        {"type": "string"},
        {"type": "array", "items": {"type": "string"}, "maxItems": limits.MAX_TEXTS},
    ]
}
_Texts = Annotated[list[str], FailFast(), BeforeValidator(_texts), WithJsonSchema(_TEXTS_SCHEMA)]


_KeptTokens = Annotated[int, Field(ge=-1, le=limits.MAX_TOKENS), WHOLE]


class ScoreBody(OpenModel):
    """Declares the body of POST /score."""

    model: str | None = None
    text_1: _Texts
    text_2: _Texts
    truncate_prompt_tokens: _KeptTokens | None = Field(
        None,
        description="The number of last tokens of both texts that are kept; -1: as many as fit the"
        " context, 0: all.",
    )
    user: Ignored[str] = None


def parse_embeddings(
    body: bytes, request_id: str, *, ignores_unknown: bool = False
) -> ParsedRequest[EmbeddingsFields]:
    """Translates the body of POST /v1/embeddings; leaves an absent pooling unspecified.

    Raises InvalidArgument that names the field.
    """
    parsed = parse(EmbeddingsBody, body, ignores_unknown=ignores_unknown)
    pooling = _POOLINGS[parsed.pooling_type]
    common = inference_pb2.GenerateRequest(model=parsed.model or "", pooling=pooling)
    set_parameters(common, parsed, _TRUNCATION)
    return ParsedRequest(
        body=parsed,
        common=common,
        prompts=prompt_messages(parsed.input),
        request_id=request_id,
        names={"prompt": "input"},
        is_streamed=False,
    )


async def make_score_request(
    body: ScoreBody, model: ServedModel, request_id: str, caller: Caller
) -> tuple[ParsedRequest[ScoreBody], list[int]]:
    """Makes a prompt of each pair of texts; a single text 1 is paired with every text 2.

    Also returns where text 2 starts in each prompt. Charges the caller for the whole texts of all
    pairs, as soon as they are encoded. Raises InvalidArgument, and Overloaded if the caller has no
    tokens left.
    """
    tokenizer = model.tokenizer
    firsts = body.text_1
    seconds = body.text_2
    if len(firsts) not in (1, len(seconds)):
        raise InvalidArgument(
            f"has {len(firsts)} texts; it must have 1 or {len(seconds)} like text_2", "text_1"
        )
    # A single text_1 is repeated for each text_2. Each copy counts.
    num_characters = len(seconds) // len(firsts) * sum(map(len, firsts)) + sum(map(len, seconds))
    check_count(num_characters, limits.MAX_MESSAGE_BYTES, "characters in all pairs", "text_1")
    for field, texts in (("text_1", firsts), ("text_2", seconds)):
        for i, text in enumerate(texts):
            most = limits.MAX_PROMPT_CHARACTERS
            check_count(len(text), most, "characters", f"{field}[{i}]", PromptTooLong)
    caller.quota.check_tokens()
    before = await _encode(firsts, "text_1", tokenizer, caller)
    after = await _encode(seconds, "text_2", tokenizer, caller, add_special_tokens=False)
    copies = before * (len(after) // len(before) - 1)
    caller.quota.take_tokens(sum(map(len, copies)))
    before += copies
    common = inference_pb2.GenerateRequest(
        model=body.model or "", prompt_logprobs=0, stopping={"max_tokens": 0}
    )
    kept = body.truncate_prompt_tokens or limits.MAX_TOKENS
    kept = model.context_tokens - 1 if kept < 0 else kept
    pairs = list(zip(before, after, strict=True))
    num_tokens = sum(min(len(first) + len(second), kept) for first, second in pairs)
    check_count(num_tokens, limits.MAX_SCORED_TOKENS, "tokens in all prompts", "text_2")
    request = ParsedRequest(
        body=body,
        common=common,
        prompts=prompt_messages((first + second)[-kept:] for first, second in pairs),
        request_id=request_id,
        names=dict.fromkeys(("prompt", "prompt_logprobs", "logprobs"), "text_2"),
        is_streamed=False,
        is_charged=True,
    )
    return request, [max(min(len(first), kept - len(second)), 0) for first, second in pairs]


async def _encode(
    texts: Sequence[str],
    field: str,
    tokenizer: Tokenizer,
    caller: Caller,
    *,
    add_special_tokens: bool = True,
) -> list[list[int]]:
    """Returns the token ids of the texts in `field`, and charges the caller for them.

    Texts that are refused or cancelled are charged by their size. Raises InvalidArgument if a text
    has no tokens, and Overloaded if too many texts wait.
    """
    try:
        encoded = await tokenizer.encode_all(
            texts, add_special_tokens=add_special_tokens, fairness_id=caller.fairness_id
        )
    except (InvalidArgument, asyncio.CancelledError):  # the work was done
        num_bytes = sum(each.ByteSize() for each in prompt_messages(texts))
        caller.quota.take_tokens(num_bytes // BYTES_PER_TOKEN)
        raise
    caller.quota.take_tokens(sum(map(len, encoded)))
    for i, ids in enumerate(encoded):
        if not ids:
            raise InvalidArgument("has no tokens; the minimum is 1", f"{field}[{i}]")
    return encoded


async def _render_embeddings(
    request: ParsedRequest[EmbeddingsFields], model: str, _prompts: TokenIds, answers: Answers
) -> bytes:
    return await asyncio.to_thread(_embeddings, request.body, model, answers)


def _embeddings(body: EmbeddingsFields, model: str, answers: Answers) -> bytes:
    found = [
        array("f", [number for each in messages for number in each.embedding])
        for messages in answers
    ]
    if body.dimensions is not None:
        length = len(found[0])
        if body.dimensions > length:
            raise InvalidArgument(
                f"is {body.dimensions}; the maximum is {length}, the length of this model's "
                "embeddings",
                "dimensions",
            )
        found = [each[: body.dimensions] for each in found]
    count = sum(map(len, found))
    most = _MAX_NUMBERS[body.encoding_format or "float"]
    if count > most:
        remedy = "send fewer texts"
        if body.encoding_format != "base64":
            remedy += ", or set encoding_format to base64"
        raise InvalidArgument(
            f"asks for {count} numbers; the maximum of one response is {most}; {remedy}", "input"
        )
    # One by one, to save memory: a number takes 4 bytes here, 20 as text and 32 as an object.
    data = ", ".join(
        json.dumps({"object": "embedding", "index": i, "embedding": _written(each, body)})
        for i, each in enumerate(found)
    )
    rest = json.dumps({"model": model, "usage": _usage(answers)})[1:]
    return f'{{"object": "list", "data": [{data}], {rest}'.encode()


def _written(embedding: "array[float]", body: EmbeddingsFields) -> str | list[float]:
    if body.normalize is not False:
        length = math.sqrt(math.fsum(number * number for number in embedding)) or 1.0
        embedding = array("f", [number / length for number in embedding])
    if body.encoding_format == "base64":
        return base64.b64encode(embedding.tobytes()).decode()
    return embedding.tolist()


def score_form(starts: Sequence[int]) -> AnswerForm:
    """Returns the form of scores of the texts that start at `starts` in their prompts."""

    async def render_full(
        request: ParsedRequest[ScoreBody], model: str, _prompts: TokenIds, answers: Answers
    ) -> bytes:
        return await asyncio.to_thread(_scores, starts, request.request_id, model, answers)

    return AnswerForm(render_full, error_response)


def _scores(starts: Sequence[int], request_id: str, model: str, answers: Answers) -> bytes:
    data = []
    for index, (start, messages) in enumerate(zip(starts, answers, strict=True)):
        scores = [each.token.logprob for message in messages for each in message.prompt_logprobs]
        data.append({"index": index, "object": "score", "score": math.fsum(scores[start:])})
    head = {
        "id": f"score-{request_id}",
        "object": "list",
        "created": int(time.time()),
        "model": model,
    }
    return json.dumps(head | {"data": data, "usage": _usage(answers)}).encode()


def _usage(answers: Answers) -> dict[str, Any]:
    num_tokens = sum(messages[-1].usage.prompt_tokens for messages in answers)
    return {"prompt_tokens": num_tokens, "total_tokens": num_tokens}


EMBEDDINGS_FORM: Final = AnswerForm(_render_embeddings, error_response)
