"""The OpenAPI document: what each path takes and answers."""

from collections.abc import Mapping
from typing import Any, Final

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from ....proto.limits import MAX_REQUEST_ID_CHARACTERS
from .bodies import ChatBody, ChatTokenizeBody, CompletionBody, DetokenizeBody, TextTokenizeBody

REQUEST_ID: Final = "x-request-id"
REQUEST_TIMEOUT: Final = "x-request-timeout"
MAX_TIMEOUT_SECONDS: Final = 86_400

_REF = "#/components/schemas/{model}"
_BODIES: Final = (CompletionBody, ChatBody, TextTokenizeBody, ChatTokenizeBody, DetokenizeBody)


class ErrorObject(BaseModel):
    """What went wrong, and with which field."""

    message: str
    type: str
    param: str | None
    code: str


class ErrorBody(BaseModel):
    """The body of every answer that is no success, and of the last event of a stream that broke."""

    error: ErrorObject


class ModelCard(BaseModel):
    """One model that is served."""

    id: str
    object: str = "model"
    created: int
    owned_by: str
    root: str
    max_model_len: int


class ModelList(BaseModel):
    object: str = "list"
    data: list[ModelCard]


class TokenizeResponse(BaseModel):
    """The answer of POST /tokenize."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeResponse(BaseModel):
    """The answer of POST /detokenize."""

    prompt: str


def error_responses(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """The descriptions of answers with these statuses."""
    texts = {
        400: "A field is wrong; `param` names it.",
        404: "No such model.",
        413: "The body is too large.",
        429: "Queue or cache is full; see Retry-After.",
        500: "The service is at fault.",
        503: "No worker can take the request now; see Retry-After.",
        504: "The deadline passed.",
    }
    return {status: {"description": texts[status], "model": ErrorBody} for status in statuses}


def request_body(*kinds: type[BaseModel]) -> dict[str, Any]:
    """The description of a JSON body of one of these kinds."""
    refs = [{"$ref": _REF.format(model=kind.__name__)} for kind in kinds]
    schema: Mapping[str, Any] = refs[0] if len(refs) == 1 else {"anyOf": refs}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def generation(kind: type[BaseModel], made: str) -> dict[str, Any]:
    """The description of a path that generates: its body, its headers, both forms of its answer."""
    return request_body(kind) | {
        "parameters": [
            {
                "name": REQUEST_ID,
                "in": "header",
                "description": "Names the request in logs and in the answer.",
                "schema": {"type": "string", "maxLength": MAX_REQUEST_ID_CHARACTERS, "pattern": "^[ -~]*$"},
            },
            {
                "name": REQUEST_TIMEOUT,
                "in": "header",
                "description": "Seconds from arrival to the end of the answer; what takes longer ends with 504.",
                "schema": {"type": "number", "exclusiveMinimum": 0, "maximum": MAX_TIMEOUT_SECONDS},
            },
        ],
        "responses": {
            "200": {
                "description": f"A {made}; with `stream`, its chunks as server-sent events, then [DONE] or an error.",
                "content": {
                    "application/json": {"schema": {"type": "object", "required": ["id", "choices", "usage"]}},
                    "text/event-stream": {},
                },
            }
        },
    }


def document(app: FastAPI, version: str) -> dict[str, Any]:
    """The whole document, made once and kept in the app."""
    if app.openapi_schema is None:
        made = get_openapi(title="Tandem", version=version, description=_DESCRIPTION, routes=app.routes)
        _, schemas = models_json_schema([(kind, "validation") for kind in _BODIES], ref_template=_REF)
        made["components"]["schemas"] |= schemas["$defs"]
        for path in made["paths"].values():
            for operation in path.values():
                operation["responses"].pop("422", None)  # FastAPI's, for a check that it does not make here
        app.openapi_schema = made
    return app.openapi_schema


_DESCRIPTION: Final = (
    "OpenAI's API, with vLLM's additions. Fields that Tandem cannot honour are refused by name. "
    "A key in `Authorization: Bearer` tells tenants apart: they are served in turn, and share no prefix cache."
)
