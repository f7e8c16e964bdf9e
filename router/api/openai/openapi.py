"""Makes the OpenAPI document: what each path takes and returns."""

from collections.abc import Sequence
from typing import Any, Final

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from ....proto.limits import MAX_REQUEST_ID_CHARACTERS

REQUEST_ID: Final = "x-request-id"
REQUEST_TIMEOUT: Final = "x-request-timeout"
RESUME: Final = "tandem-resume"
LAST_EVENT_ID: Final = "last-event-id"
MAX_TOKENS: Final = "tandem-max-tokens"
"""Of a response whose max_tokens was reduced to what the prompt leaves of the context."""

MAX_TIMEOUT_SECONDS: Final = 86_400

_REF = "#/components/schemas/{model}"


def _object(optional: tuple[str, ...] = (), **properties: Any) -> dict[str, Any]:
    required = [name for name in properties if name not in optional]
    return {"type": "object", "properties": properties, "required": required}


_STRING: Final = {"type": "string"}
_INTEGER: Final = {"type": "integer"}
_KEY: Final = {"type": "http", "scheme": "bearer"}
_NULL: Final = {"type": "null"}
_MODEL: Final = _object(
    id=_STRING,
    object={"const": "model"},
    created=_INTEGER,
    owned_by=_STRING,
    root=_STRING,
    max_model_len=_INTEGER,
    parent={"anyOf": [_STRING, _NULL]},
    default_sampling_params={"type": "object", "additionalProperties": {"type": "number"}},
)
_SCHEMAS: Final = {
    "Error": _object(
        error=_object(
            message=_STRING, type=_STRING, param={"anyOf": [_STRING, _NULL]}, code=_STRING
        )
    ),
    "Model": _MODEL,
    "ModelList": _object(object={"const": "list"}, data={"type": "array", "items": _MODEL}),
    "TokenizeResponse": _object(
        optional=("token_strs",),
        count=_INTEGER,
        max_model_len=_INTEGER,
        tokens={"type": "array", "items": _INTEGER},
        token_strs={"type": "array", "items": _STRING},
    ),
    "DetokenizeResponse": _object(prompt=_STRING),
    "AnthropicError": _object(
        type={"const": "error"}, error=_object(type=_STRING, message=_STRING)
    ),
    "TokenCount": _object(input_tokens=_INTEGER),
}


def responses(
    schema: str = "", *errors: int, form: str = "Error"
) -> dict[int | str, dict[str, Any]]:
    """Returns the descriptions of a path's responses: of success, if its `schema` is named, and of
    error statuses; `form`: the schema of errors.
    """
    found: dict[int | str, dict[str, Any]] = (
        {200: {"description": "OK", **_content(schema)}} if schema else {}
    )
    return found | {status: {"description": _ERRORS[status], **_content(form)} for status in errors}


_ERRORS: Final = {
    400: "A field is wrong; `param` names it.",
    401: "The service needs an API key, and this one is not valid.",
    403: "The host or the origin of the request may not use the service, or the key may not do this.",
    404: "No such model.",
    413: "The body is too large.",
    415: "The body has a Content-Encoding other than gzip.",
    429: "Queue or cache is full, or the key's limits are reached; see Retry-After.",
    500: "The service is at fault.",
    503: "No worker can take the request now; see Retry-After.",
    504: "The deadline passed.",
}


def _content(schema: str) -> dict[str, Any]:
    return {"content": {"application/json": {"schema": {"$ref": _REF.format(model=schema)}}}}


def request_body(kind: type[BaseModel]) -> dict[str, Any]:
    """Returns the description of a JSON body of this kind."""
    return {"requestBody": {"required": True, **_content(kind.__name__)}}


def command(kind: type[BaseModel]) -> dict[str, Any]:
    """Returns the description of a path that does something and says so in a line."""
    return request_body(kind) | {
        "responses": {"200": {"description": "OK", "content": {"text/plain": {}}}}
    }


def generation(
    kind: type[BaseModel], made: str, members: Sequence[str] = ("id", "choices", "usage")
) -> dict[str, Any]:
    """Returns the description of a path that generates: its body, its headers, the forms of its
    response, which whole is an object with these `members`.
    """
    content: dict[str, Any] = {
        "application/json": {"schema": {"type": "object", "required": list(members)}}
    }
    description = f"A {made}."
    if "stream" in kind.model_fields:
        content["text/event-stream"] = {}
        description = (
            f"A {made}; with `stream` as server-sent events, of which the last may be an error."
        )
    return request_body(kind) | {
        "parameters": [
            {
                "name": REQUEST_ID,
                "in": "header",
                "description": "Names the request in logs and in the answer.",
                "schema": {
                    "type": "string",
                    "maxLength": MAX_REQUEST_ID_CHARACTERS,
                    "pattern": "^[ -~]*$",
                },
            },
            {
                "name": REQUEST_TIMEOUT,
                "in": "header",
                "description": "Seconds from arrival to the end of the response; what takes longer ends with 504.",
                "schema": {"type": "number", "exclusiveMinimum": 0, "maximum": MAX_TIMEOUT_SECONDS},
            },
        ],
        "responses": {"200": {"description": description, "content": content}},
    }


def document(app: FastAPI, version: str, bodies: Sequence[type[BaseModel]]) -> dict[str, Any]:
    """Returns the whole document, made once and kept in the app. `bodies`: of all requests."""
    if app.openapi_schema is None:
        made = get_openapi(
            title="Tandem", version=version, description=_DESCRIPTION, routes=app.routes
        )
        _, schemas = models_json_schema(
            [(kind, "validation") for kind in bodies], ref_template=_REF
        )
        made["components"] = {
            "schemas": _SCHEMAS | schemas["$defs"],
            "securitySchemes": {"key": _KEY},
        }
        made["security"] = [{"key": []}, {}]  # by configuration
        for path in made["paths"].values():
            for operation in path.values():
                operation["responses"].pop("422", None)  # FastAPI's own check of bodies is not used
        app.openapi_schema = made
    return app.openapi_schema


_DESCRIPTION: Final = (
    "OpenAI's API, with vLLM's additions, and Anthropic's Messages API. Fields that Tandem cannot "
    "honour are refused "
    "by name. Where the service has API keys, each call but /health brings one in `Authorization: "
    "Bearer` or in "
    "`x-api-key`. Tenants are served in turn and share no prefix cache."
)
