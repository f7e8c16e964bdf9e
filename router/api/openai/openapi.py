"""Makes the OpenAPI document: the body and the responses of each path."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from ....proto.limits import MAX_REQUEST_ID_CHARACTERS

REQUEST_ID: Final = "x-request-id"
REQUEST_TIMEOUT: Final = "x-request-timeout"
RESUME: Final = "tandem-resume"
LAST_EVENT_ID: Final = "last-event-id"
MAX_TOKENS: Final = "tandem-max-tokens"
"""Header of a response whose max_tokens was reduced to fit the context: the new value."""

LEFT_OUT: Final = "tandem-left-out"
"""Header of a response that lists what was left out of the request.

These are the names of unknown fields, and the types of tools and items.
"""

MAX_TIMEOUT_SECONDS: Final = 86_400

_REF = "#/components/schemas/{model}"


def _object(optional: tuple[str, ...] = (), **properties: Any) -> dict[str, Any]:
    required = [name for name in properties if name not in optional]
    return {"type": "object", "properties": properties, "required": required}


_STRING: Final = {"type": "string"}
_INTEGER: Final = {"type": "integer"}
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
    default_chat_template_kwargs={"type": "object"},
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
    "WatermarkEvidence": _object(
        z={"type": "number"},
        p={"type": "number", "minimum": 0, "maximum": 1},
        num_tokens=_INTEGER,
        num_green=_INTEGER,
    ),
    "AnthropicError": _object(
        type={"const": "error"}, error=_object(type=_STRING, message=_STRING)
    ),
    "TokenCount": _object(input_tokens=_INTEGER),
    "File": _object(
        id=_STRING, object={"const": "file"}, bytes=_INTEGER, filename=_STRING, purpose=_STRING
    ),
    "Batch": _object(
        id=_STRING, object={"const": "batch"}, status=_STRING, request_counts={"type": "object"}
    ),
    "List": _object(object={"const": "list"}, data={"type": "array"}, has_more={"type": "boolean"}),
    "CacheReset": _object(
        success={"type": "boolean"},
        failed={"type": "object", "additionalProperties": _STRING},
    ),
    "Deleted": _object(id=_STRING, object=_STRING, deleted={"const": True}),
}


_ERRORS: Final = {
    400: "A field is wrong; `param` names it.",
    401: "The service needs an API key, and this one is not valid.",
    403: "The host, the origin or the key of the request has no permission.",
    404: "No such model, response, file or batch.",
    413: "The body is too large.",
    415: "The body has a Content-Encoding other than gzip.",
    429: "Queue or cache is full, or the key's limits are reached; see Retry-After.",
    500: "The service is at fault.",
    503: "No worker can accept the request now; see Retry-After.",
    504: "The deadline passed.",
}

READ_ERRORS: Final = (400, 401, 403, 404, 413, 415, 429)
"""The statuses of errors of a path that takes a body and generates nothing."""

MODEL_NAME: Final = {"name": "name", "in": "path", "required": True, "schema": _STRING}
"""The parameter in the path of one model, response, file or batch."""

LIST_PARAMETERS: Final = (
    {
        "name": "limit",
        "in": "query",
        "description": "The maximum number of entries.",
        "schema": {"type": "integer", "minimum": 1},
    },
    {
        "name": "after",
        "in": "query",
        "description": "The id of the entry before the first one.",
        "schema": _STRING,
    },
)
ORDER: Final = {"name": "order", "in": "query", "schema": {"enum": ["asc", "desc"]}}

_GENERATION_HEADERS: Final = (
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
        "description": (
            "Seconds from arrival to the end of the response. A request that takes longer ends "
            "with 504."
        ),
        "schema": {"type": "number", "exclusiveMinimum": 0, "maximum": MAX_TIMEOUT_SECONDS},
    },
)


@dataclass(frozen=True)
class Operation:
    """Describes a path and a method: POST if it has a body, otherwise GET, unless `verb` is set."""

    summary: str
    success: dict[str, Any]  # the description of the response of status 200
    errors: Sequence[int]  # the other statuses
    body: type[BaseModel] | None = None
    error_schema: str = "Error"
    parameters: Sequence[Mapping[str, Any]] = ()
    verb: Literal["", "DELETE", "POST"] = ""
    form: Mapping[str, Any] | None = None  # the schema of a body of type multipart/form-data

    @property
    def method(self) -> str:
        if self.verb:
            return self.verb
        return "GET" if self.body is None and self.form is None else "POST"

    def describe(self, path: str) -> dict[str, Any]:
        """Returns the part of the document about this path."""
        responses = {
            str(status): {"description": _ERRORS[status]} | _content(self.error_schema)
            for status in self.errors
        }
        described: dict[str, Any] = {
            "summary": self.summary,
            "operationId": re.sub(r"\W+", "_", f"{self.method.lower()}{path}").strip("_"),
            "responses": {"200": self.success} | responses,
        }
        if self.body is not None:
            described["requestBody"] = {"required": True} | _content(self.body.__name__)
        if self.form is not None:
            content = {"multipart/form-data": {"schema": self.form}}
            described["requestBody"] = {"required": True, "content": content}
        if self.parameters:
            described["parameters"] = list(self.parameters)
        return {self.method.lower(): described}


def ok(schema: str = "") -> dict[str, Any]:
    """Describes a success with a JSON body. `schema`: its name, "" for any JSON."""
    return {"description": "OK"} | _content(schema)


def generation(
    summary: str,
    body: type[BaseModel],
    made: str,
    members: Sequence[str] = ("id", "choices", "usage"),
    error_schema: str = "Error",
) -> Operation:
    """Describes a path that generates.

    `made`: the result, an object with these `members` if it is not streamed.
    """
    content: dict[str, Any] = {
        "application/json": {"schema": {"type": "object", "required": list(members)}}
    }
    description = f"A {made}."
    if "stream" in body.model_fields:
        content["text/event-stream"] = {}
        description = (
            f"A {made}; with `stream` as server-sent events, of which the last may be an error."
        )
    success = {"description": description, "content": content}
    errors = (*READ_ERRORS, 500, 503, 504)
    return Operation(summary, success, errors, body, error_schema, _GENERATION_HEADERS)


def document(version: str, operations: Iterable[tuple[str, Operation]]) -> dict[str, Any]:
    """Returns the whole document. `operations`: each with its path."""
    kinds: dict[type[BaseModel], None] = {}
    paths: dict[str, dict[str, Any]] = {}
    for path, operation in operations:
        paths.setdefault(path, {}).update(operation.describe(path))
        if operation.body is not None:
            kinds[operation.body] = None
    _, schemas = models_json_schema([(kind, "validation") for kind in kinds], ref_template=_REF)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Tandem", "version": version, "description": _DESCRIPTION},
        "paths": paths,
        "components": {
            "schemas": _SCHEMAS | schemas["$defs"],
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"key": []}, {}],  # the configuration decides whether a key is needed
    }


def _content(schema: str) -> dict[str, Any]:
    found = {"$ref": _REF.format(model=schema)} if schema else {}
    return {"content": {"application/json": {"schema": found}}}


_DESCRIPTION: Final = (
    "OpenAI's API with vLLM's additions, and Anthropic's Messages API. Fields that Tandem does not "
    "support are refused by name; a service may also ignore unknown fields, and list them in the "
    "header Tandem-Left-Out. If the service has API keys, each call except /health needs one "
    "in `Authorization: Bearer` or in `x-api-key`. Tenants are served in turn and share no prefix "
    "cache."
)
