"""Lists the paths of stored responses, files, batches, usage and the prefix cache.

Each has a function that takes the service and the request.
"""

from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import Response

from ..batches.batches import cancel_batch, get_batch, list_batches
from ..batches.files import delete_file, get_content, get_file, list_files, upload_file
from ..openai.openapi import LIST_PARAMETERS, MODEL_NAME, ORDER, Operation, ok
from ..openai.respond import respond_without_body
from ..prefix_cache import reset_prefix_cache
from ..responses.stored import delete_response, get_response, list_input_items
from ..service import GenerationService
from ..usage import answer_usage

_ERRORS: Final = (400, 401, 403, 404, 429, 503)
_SINCE: Final = {
    "name": "since",
    "in": "query",
    "description": "The first day in UTC, by default this day.",
    "schema": {"type": "string", "format": "date"},
}
_UPLOAD: Final = {
    "type": "object",
    "properties": {
        "file": {"type": "string", "format": "binary"},
        "purpose": {"const": "batch"},
        "expires_after[anchor]": {"const": "created_at"},
        "expires_after[seconds]": {"type": "integer", "minimum": 3_600, "maximum": 2_592_000},
    },
    "required": ["file", "purpose"],
}

Stored = Callable[[GenerationService, Request], Awaitable[Response]]


def _operation(
    summary: str, schema: str, parameters: Sequence[dict[str, Any]] = (MODEL_NAME,), **more: Any
) -> Operation:
    return Operation(summary, ok(schema), _ERRORS, parameters=parameters, **more)


async def _answer(answer: Stored, service: GenerationService, request: Request) -> Response:
    return await respond_without_body(request, partial(answer, service))


_OPERATIONS: Final[list[tuple[str, Operation, Stored]]] = [
    (
        "/v1/responses/{name}",
        _operation("Returns a stored response.", ""),
        get_response,
    ),
    (
        "/v1/responses/{name}",
        _operation("Deletes a stored response.", "Deleted", verb="DELETE"),
        delete_response,
    ),
    (
        "/v1/responses/{name}/input_items",
        _operation(
            "Lists the input items of a stored response and of the conversation before it.",
            "List",
            (MODEL_NAME, *LIST_PARAMETERS, ORDER),
        ),
        list_input_items,
    ),
    (
        "/v1/files",
        Operation("Uploads a file.", ok("File"), (*_ERRORS, 413, 415), form=_UPLOAD),
        upload_file,
    ),
    (
        "/v1/files",
        Operation(
            "Lists the files.", ok("List"), _ERRORS, parameters=(*LIST_PARAMETERS, ORDER), verb=""
        ),
        list_files,
    ),
    ("/v1/files/{name}", _operation("Returns the facts of a file.", "File"), get_file),
    (
        "/v1/files/{name}",
        _operation("Deletes a file.", "Deleted", verb="DELETE"),
        delete_file,
    ),
    (
        "/v1/files/{name}/content",
        Operation(
            "Returns the content of a file.",
            {"description": "OK", "content": {"application/octet-stream": {}}},
            _ERRORS,
            parameters=(MODEL_NAME,),
        ),
        get_content,
    ),
    (
        "/v1/batches",
        _operation("Lists the batches.", "List", (*LIST_PARAMETERS, ORDER)),
        list_batches,
    ),
    ("/v1/batches/{name}", _operation("Returns a batch.", "Batch"), get_batch),
    (
        "/v1/batches/{name}/cancel",
        _operation("Cancels a batch.", "Batch", verb="POST"),
        cancel_batch,
    ),
    (
        "/usage",
        Operation(
            "Returns what the requests of each API key used, by day.",
            ok("List"),
            _ERRORS,
            parameters=(_SINCE,),
        ),
        answer_usage,
    ),
    (
        "/reset_prefix_cache",
        Operation(
            "Empties the prefix caches of all workers.",
            ok("CacheReset"),
            (400, 401, 403, 429),
            verb="POST",
        ),
        reset_prefix_cache,
    ),
]

STORED: Final[Sequence[tuple[str, Operation, Stored]]] = [
    (path, operation, partial(_answer, answer)) for path, operation, answer in _OPERATIONS
]
"""Each with its path and its description."""
