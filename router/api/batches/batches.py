"""Answers the requests of OpenAI's Batch API. Runners of the routers answer the batches' lines."""

import time
import uuid
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any, Final, Literal

from pydantic import Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from ....proto.errors import InvalidArgument, NotFound, Overloaded
from ....proto.limits import MAX_MESSAGE_BYTES
from ...auth.authenticator import Caller
from ...frontend.fair_threads import FairThreads
from ...frontend.prepare import RequestContext
from ...storage.interface import (
    BATCH_SECONDS,
    FINISHED,
    MAX_BATCH_LINES,
    MAX_BATCHES,
    MAX_FILE_BYTES,
    Batch,
    Owner,
    StoredFile,
)
from ..large_messages import check_json_elements
from ..openai.bodies import WHOLE, NestedModel, OpenModel
from ..openai.lists import list_response, one_more, read_page, unknown_after
from ..openai.parsing import parse
from ..openai.respond import off_loop
from ..service import GenerationService
from .files import check_can_keep, counted, read_pieces
from .lines import BatchUrl, parse_batch

_MAX_PAGE: Final = 100
_DEFAULT_PAGE: Final = 20
_MAX_METADATA: Final = 16
_MAX_ERROR_CHARACTERS: Final = 1_024  # of one line; each unknown field of it adds to the error

# Of inputs in memory at a time: of one tenant, and of all.
_MAX_READ_BYTES_EACH: Final = 2 * MAX_FILE_BYTES
_MAX_READ_BYTES: Final = 4 * MAX_FILE_BYTES

# One thread, because the texts of the largest file take several times its size.
_PARSER: Final = FairThreads("tandem-batch", 1, max_size=4 * MAX_FILE_BYTES)

_reading = Counter[str]()  # bytes, by tenant

_Key = Annotated[str, Field(max_length=64)]
_Value = Annotated[str, Field(max_length=512)]


class ExpiresAfter(NestedModel):
    anchor: Literal["created_at"]
    seconds: Annotated[int, Field(ge=3_600, le=2_592_000), WHOLE]


class BatchBody(OpenModel):
    """Declares the body of POST /v1/batches."""

    input_file_id: Annotated[str, Field(max_length=128)]
    endpoint: BatchUrl
    completion_window: Literal["24h"]
    metadata: Annotated[dict[_Key, _Value], Field(max_length=_MAX_METADATA)] | None = None
    output_expires_after: ExpiresAfter | None = Field(
        None, description="For how long the output and error files are kept."
    )


async def create_batch(
    service: GenerationService, body: bytes, _request_id: str, context: RequestContext
) -> Response:
    """Answers POST /v1/batches; a batch whose input cannot be read has the status `failed`."""
    caller = context.caller
    check_can_keep(caller)
    parsed = await off_loop(caller.fairness_id, body, partial(parse, BatchBody))
    stored = await _find_input(service, caller.tenant, parsed.input_file_id)
    with counted(
        _reading,
        caller.tenant,
        stored.size,
        _MAX_READ_BYTES_EACH,
        _MAX_READ_BYTES,
        "bytes of input files",
        "read",
    ):
        added = await _add_batch(service, caller, parsed, stored)
    if added is None:
        raise Overloaded(
            f"the storage of this tenant is full, or {MAX_BATCHES} of its batches run; delete "
            "files, or try again later"
        )
    return JSONResponse(describe_batch(added))


async def _add_batch(
    service: GenerationService, caller: Caller, body: BatchBody, stored: StoredFile
) -> Batch | None:
    """Reads the input of a batch and stores both; returns None without room."""
    try:
        pieces = [piece async for piece in read_pieces(service, caller.tenant, stored)]
    except NotFound:  # the file was deleted meanwhile
        raise _unknown_input() from None
    content = b"".join(pieces)
    now = int(time.time())
    keep = body.output_expires_after
    batch = Batch(
        batch_id=f"batch_{uuid.uuid4().hex}",
        owner=Owner(tenant=caller.tenant, key_name=caller.key_name),
        endpoint=body.endpoint,
        input_file_id=body.input_file_id,
        metadata=body.metadata,
        created=now,
        expires=now + BATCH_SECONDS,
        output_seconds=None if keep is None else keep.seconds,
        total=0,
    )
    lines = await _PARSER.run(
        caller.fairness_id, len(content), _read_lines, content, body.endpoint, batch
    )
    return await service.storage.add_batch(batch, lines)


async def _find_input(service: GenerationService, tenant: str, file_id: str) -> StoredFile:
    stored = await service.storage.find_file(tenant, file_id)
    if stored is None:
        raise _unknown_input()
    if stored.purpose != "batch":
        raise InvalidArgument("must be a file of the purpose batch", "input_file_id")
    return stored


def _unknown_input() -> NotFound:
    return NotFound("input_file_id: no file of this id is stored here")


async def get_batch(service: GenerationService, request: Request) -> Response:
    """Answers GET /v1/batches/{name}."""
    caller = request.state.caller
    check_can_keep(caller)
    return _found(await service.storage.find_batch(caller.tenant, request.path_params["name"]))


async def list_batches(service: GenerationService, request: Request) -> Response:
    """Answers GET /v1/batches."""
    caller = request.state.caller
    check_can_keep(caller)
    page = read_page(request, default=_DEFAULT_PAGE, most=_MAX_PAGE)
    if page.after and await service.storage.find_batch(caller.tenant, page.after) is None:
        raise unknown_after(page)
    batches = await service.storage.list_batches(caller.tenant, one_more(page))
    return list_response(list(map(describe_batch, batches)), page)


async def cancel_batch(service: GenerationService, request: Request) -> Response:
    """Answers POST /v1/batches/{name}/cancel; the requests that run now are still answered."""
    caller = request.state.caller
    check_can_keep(caller)
    name = request.path_params["name"]
    batch = await service.storage.find_batch(caller.tenant, name)
    if batch is not None and batch.status in FINISHED:
        raise InvalidArgument(f"the batch has ended: its status is {batch.status}", "batch_id")
    return _found(await service.storage.cancel_batch(caller.tenant, name))


def _found(batch: Batch | None) -> JSONResponse:
    if batch is None:
        raise NotFound("no batch of this id is stored here")
    return JSONResponse(describe_batch(batch))


def _read_lines(content: bytes, endpoint: str, batch: Batch) -> list[bytes]:
    """Returns the lines of a file. If one is wrong, returns none and notes it in the batch."""
    requests = []
    try:
        content = content.rstrip()
        num_lines = content.count(b"\n") + 1  # empty ones included
        if num_lines > MAX_BATCH_LINES:
            raise InvalidArgument(f"has {num_lines} lines; the maximum is {MAX_BATCH_LINES}")
        lines = content.split(b"\n")
        _check_sizes(lines)
        for number, request in parse_batch(content.decode(), "line"):
            if request.url != endpoint:
                raise InvalidArgument(f"url: must be {endpoint}, as the batch", f"line:{number}")
            requests.append(lines[number - 1])
    except (UnicodeDecodeError, InvalidArgument) as error:
        _fail(batch, error)
        return []
    batch.total = len(requests)
    return requests


def _check_sizes(lines: Sequence[bytes]) -> None:
    """Raises InvalidArgument for a line that is too large for the body of a request."""
    for number, line in enumerate(lines, 1):
        place = f"line:{number}"
        if len(line) > MAX_MESSAGE_BYTES:
            raise InvalidArgument(
                f"has {len(line)} bytes; the maximum is {MAX_MESSAGE_BYTES}", place
            )
        try:
            check_json_elements(line)
        except InvalidArgument as error:
            raise InvalidArgument(error.message, place) from None


def _fail(batch: Batch, error: UnicodeDecodeError | InvalidArgument) -> None:
    message = error.message if isinstance(error, InvalidArgument) else "is not UTF-8"
    place = error.field if isinstance(error, InvalidArgument) else ""
    number = place.rpartition(":")[2]
    batch.status = "failed"
    batch.ended = batch.created
    batch.errors = [
        {
            "code": "invalid_file",
            "message": message[:_MAX_ERROR_CHARACTERS],
            "param": "input_file_id",
            "line": int(number) if number.isdecimal() else None,
        }
    ]


def describe_batch(batch: Batch) -> dict[str, Any]:
    """Returns the batch as OpenAI's API describes it."""
    times = {
        f"{status}_at": batch.ended if batch.status == status else None
        for status in ("completed", "failed", "cancelled", "expired")
    }
    has_begun = batch.status != "failed"
    return {
        "id": batch.batch_id,
        "object": "batch",
        "endpoint": batch.endpoint,
        "errors": {"object": "list", "data": batch.errors} if batch.errors else None,
        "input_file_id": batch.input_file_id,
        "completion_window": "24h",
        "status": batch.status,
        "output_file_id": batch.output_file_id,
        "error_file_id": batch.error_file_id,
        "created_at": batch.created,
        "in_progress_at": batch.created if has_begun else None,
        "expires_at": batch.expires,
        "finalizing_at": batch.ended if batch.status == "completed" else None,
        "cancelling_at": batch.cancelling,
        "request_counts": {
            "total": batch.total,
            "completed": batch.completed,
            "failed": batch.failed,
        },
        "metadata": batch.metadata,
    } | times
